"""The report of a comparison: one self-contained HTML page, and the frontier plot on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from lenience.evaluation.names import named, short, why
from lenience.evaluation.plots import _svg, plot, rungs

ORIGINS = {
    "draft": "proposed by the draft, and what the target would have said",
    "draft-lenient": "proposed by the draft, kept although the target would have said something else",
    "draft-trusted": "proposed by the draft, and kept on its gate's word, the target not having read it",
    "correction": "the target's, in place of a rejected one",
    "bonus": "the target's, after a window accepted whole",
}


def write_certificate(path: Path, made: dict[str, Any]) -> None:
    """Write a certificate's page."""
    path.write_text(_template("certificate.html").render(made=made, rungs=_svg(rungs(made))), encoding="utf-8")


def _template(name: str) -> Template:
    environment = Environment(loader=PackageLoader("lenience", "templates"), autoescape=True, trim_blocks=True)
    environment.filters |= {"short": short, "why": why}
    return environment.get_template(name)


def example(frontier: dict[str, Any]) -> dict[str, Any] | None:
    """The kept answer that shows most: of a judge if there is one, right, with the most leniently kept tokens."""
    found = []
    for sample in frontier["examples"]:
        for row, result in zip(frontier["rows"], sample["results"]):
            lenient = sum(origin == "draft-lenient" for _, origin, _ in result.get("trace", []))
            rank = ("judge:" in row["rule"], result["correct"], lenient)
            found.append((rank, {"row": row, "sample": sample, "result": result, "lenient": lenient}))
    return max(found, key=lambda item: item[0], default=(None, None))[1]


def details(frontier: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a row that is pointed at: its settings and figures, and its answers to the kept prompts."""
    figures = ("accuracy", "paired_loss", "tokens_per_pass", "tokens_per_second", "seconds_per_correct", "share_of_cap")
    return {
        "rows": [{"name": short(row), "rule": row["rule"], "window": row["window"], "why": why(row),
                  **{key: row[key] for key in figures}} for row in frontier["rows"]],
        "prompts": [{"prompt": str(sample["prompt"]), "reference": sample["reference"],
                     "results": [{"answer": result["answer"], "correct": result["correct"], "tokens": result["tokens"],
                                  "passes": result["target_passes"], "trace": result.get("trace", [])}
                                 for result in sample["results"]]} for sample in frontier["examples"]],
    }  # fmt: skip


def write_report(
    path: Path, frontier: dict[str, Any], mining: dict[str, Any] | None = None, certificate: dict[str, Any] | None = None
) -> None:
    """Write report.html and, beside it, frontier.svg; `mining` adds what was mined and fitted: samples, mismatches,
    important_share, judge_auc; `certificate` marks what was certified, and says it."""
    frontier = {**frontier, "rows": named(frontier["rows"])}
    drawn = _svg(plot(frontier, certificate))
    path.with_name("frontier.svg").write_text(drawn, encoding="utf-8")
    page = _template("report.html").render(
        frontier=frontier,
        certificate=certificate,
        rungs=_svg(rungs(certificate)) if certificate else "",
        plot=drawn,
        example=example(frontier),
        details=details(frontier),
        origins=ORIGINS,
        mining=mining,
        n=frontier["rows"][0]["n"],
    )
    path.write_text(page, encoding="utf-8")
