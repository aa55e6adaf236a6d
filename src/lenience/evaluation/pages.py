"""The report of a comparison, a self-contained HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from lenience.certification.certificate import Certificate, Certified
from lenience.certification.page import tested_settings
from lenience.core.figures import as_svg, no_figures
from lenience.core.files import write_text
from lenience.core.templates import ORIGINS, read_template
from lenience.evaluation.advice import recommended
from lenience.evaluation.names import NamedRow, alike, named, why
from lenience.evaluation.plots import plot
from lenience.evaluation.table import Example, Frontier
from lenience.rules.parsing import terms
from lenience.runs.answers import Answer

FIGURES = (
    "accuracy", "paired_loss", "tokens_per_pass", "tokens_per_second", "seconds_per_correct",
    "share_of_cap",
)  # fmt: skip
"""Figures of a row shown on hover."""


@dataclass(frozen=True)
class Mining:
    """Training data of a report's judge."""

    samples: int
    mismatches: int
    important_share: float
    judge_auc: float


@dataclass(frozen=True)
class ShownAnswer:
    """An answer that a report shows token by token."""

    row: NamedRow
    sample: Example
    result: Answer
    lenient: int
    """Number of tokens accepted leniently."""

    @property
    def prompt(self) -> str:
        return as_text(self.sample.prompt)


def template(name: str) -> Template:
    """Return a page template of the package, with the filters that reports use."""
    return read_template(name, why=why)


def example(
    frontier: Frontier, certified: Certified | None = None
) -> ShownAnswer | None:
    """Return the most instructive kept answer: correct, by the certified setting or a judge if
    there is one, with the most leniently accepted tokens."""
    shown = []
    for sample in frontier.examples:
        for row, result in zip(named(frontier.rows), sample.results):
            lenient = sum(
                origin == "draft-lenient" for _, origin, _ in result.trace or ()
            )
            judged = any(term.heads for term in terms(row.rule))
            ours = certified is not None and alike(row, certified)
            rank = (ours, judged, result.correct, lenient)
            shown.append((rank, ShownAnswer(row, sample, result, lenient)))
    return max(shown, key=lambda item: item[0], default=(None, None))[1]


def details(frontier: Frontier) -> dict[str, Any]:
    """Return the data that the page shows for a row on hover: its settings and figures, and its
    answers to the kept prompts."""
    rows = []
    for row in named(frontier.rows):
        rows.append(
            {
                "name": row.name,
                "rule": row.rule,
                "window": row.window,
                "why": why(row),
                **{key: getattr(row, key) for key in FIGURES},
            }
        )
    prompts = []
    for sample in frontier.examples:
        prompts.append(
            {
                "prompt": as_text(sample.prompt),
                "results": [
                    _result(result, sample, frontier.measure)
                    for result in sample.results
                ],
            }
        )
    return {"rows": rows, "prompts": prompts}


def as_text(prompt: Any) -> str:
    """Return a prompt as text; chat messages are shown with their roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        f"{message['role'].capitalize()}: {message['content']}" for message in prompt
    )


def _result(result: Answer, sample: Example, measure: str) -> dict[str, Any]:
    outcome = result.verdict
    if measure == "accuracy":
        verdict = "right" if result.correct else f"wrong ({sample.reference})"
        outcome = f"the answer {result.answer} is {verdict}"
    return {
        "outcome": outcome,
        "tokens": result.tokens,
        "passes": result.target_passes,
        "trace": result.trace or [],
    }


def write_report(
    path: Path,
    frontier: Frontier,
    mining: Mining | None = None,
    certificate: Certificate | None = None,
    headline: str = "",
) -> None:
    """Write report.html and, if plots are available, frontier.svg next to it. `mining` adds the
    judge's training data, `certificate` marks and describes the certified setting, and the
    `headline` comes first; its default is the recommendation."""
    certified = certificate.certified if certificate and certificate.holds else None
    drawn = narrow = no_figures()
    if not drawn:
        drawn = as_svg(plot(frontier, certified))
        narrow = as_svg(plot(frontier, certified, narrow=True))
        write_text(path.with_name("frontier.svg"), drawn)
    page = template("report.html").render(
        frontier=frontier,
        rows=named(frontier.rows),
        certificate=certificate,
        figure=tested_settings(certificate) if certificate else "",
        plot=drawn,
        narrow=narrow,
        example=example(frontier, certified),
        details=details(frontier),
        origins=ORIGINS,
        mining=mining,
        headline=headline or recommended(frontier),
        n=frontier.rows[0].n,
    )
    write_text(path, page)
