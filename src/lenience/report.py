"""The report of a comparison: one self-contained HTML page, and the frontier plot on its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from lenience.rules import AnyOf, Judge, parse_rule

COLORS = {"target": "#6b7280", "draft": "#6b7280", "exact": "#2563eb", "topk": "#d97706", "judge": "#059669"}
MARKS = {"target": "s", "draft": "D", "exact": "o", "topk": "^", "judge": "o"}
ORIGINS = {
    "draft": "proposed by the draft, and what the target would have said",
    "draft-lenient": "proposed by the draft, kept although the target would have said something else",
    "correction": "the target's, in place of a rejected one",
    "bonus": "the target's, after a window accepted whole",
}


def family(rule: str) -> str:
    """The group that a rule is drawn with."""
    return "judge" if "judge" in rule else rule.split(":")[0]


def short(row: dict[str, Any]) -> str:
    """A row's rule with no more of its judge's path than its folder."""
    if row["rule"] in ("target", "draft"):
        return row["rule"]
    parsed = parse_rule(row["rule"])
    terms = parsed.terms if isinstance(parsed, AnyOf) else (parsed,)
    return "|".join(
        Path(term.path).name + ("" if term.threshold is None else f"@{probability(term.threshold)}")
        if isinstance(term, Judge)
        else str(term)
        for term in terms
    )


def why(row: dict[str, Any]) -> str:
    """Why a row's window is in the table, where it is not the rule's fastest."""
    if row["why"].startswith("window of"):
        return "a judge's window"
    return "widest window" if row["why"] == "widest" else ""


def probability(p: float) -> str:
    """A probability in as few digits as tell it from 0 and 1: 0.9 and 0.99996."""
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if abs(float(text) - p) <= 0.05 * min(abs(p), abs(1 - p)):
            return text
    return repr(p)


def plot(frontier: dict[str, Any]) -> Any:
    """The frontier as a matplotlib figure: accuracy against tokens per pass and against tokens per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, key, label in (
        (left, "tokens_per_pass", "tokens per pass of the target"),
        (right, "tokens_per_second", "tokens per second"),
    ):
        groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for row in frontier["rows"]:
            if row[key] is not None:
                groups.setdefault((family(row["rule"]), bool(why(row))), []).append(row)
        for (name, other), group in groups.items():
            group.sort(key=lambda row: row[key])
            x, y = [row[key] for row in group], [100 * row["accuracy"] for row in group]
            low = [100 * (row["accuracy"] - row["accuracy_interval"][0]) for row in group]
            high = [100 * (row["accuracy_interval"][1] - row["accuracy"]) for row in group]
            color, mark = COLORS.get(name, "#7c3aed"), MARKS.get(name, "v")
            axis.errorbar(x, y, yerr=[low, high], color=color, fmt="none", alpha=0.3, linewidth=1)
            style = {"linestyle": ":", "markerfacecolor": "white"} if other else {"label": name}
            axis.plot(x, y, color=color, marker=mark, markersize=6, linewidth=1.2, **style)
            above = name in ("judge", "target", "draft")
            for row, px, py in zip(group, x, y):
                text = f"{short(row)}, w {row['window']}" if row["window"] else short(row)
                axis.annotate(
                    text,
                    (px, py),
                    fontsize=6.5,
                    color=color,
                    rotation=35 if above else -35,
                    rotation_mode="anchor",
                    xytext=(4, 4 if above else -4),
                    textcoords="offset points",
                    va="bottom" if above else "top",
                )
        axis.set_xlabel(label)
        axis.margins(x=0.15, y=0.2)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylim(top=102)
    left.set_ylabel("right answers, %")
    left.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def svg(frontier: dict[str, Any]) -> str:
    """The plot as inline SVG."""
    out = io.StringIO()
    plot(frontier).savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def example(frontier: dict[str, Any]) -> dict[str, Any] | None:
    """The kept answer that shows most: of a judge if there is one, right, with the most leniently kept tokens."""
    found = []
    for sample in frontier["examples"]:
        for row, result in zip(frontier["rows"], sample["results"]):
            lenient = sum(origin == "draft-lenient" for _, origin, _ in result.get("trace", []))
            rank = (family(row["rule"]) == "judge", result["correct"], lenient)
            found.append((rank, {"row": row, "sample": sample, "result": result, "lenient": lenient}))
    return max(found, key=lambda item: item[0], default=(None, None))[1]


def write_report(path: Path, frontier: dict[str, Any], mining: dict[str, Any] | None = None) -> None:
    """Write report.html and, beside it, frontier.svg; `mining` adds what was mined and fitted: samples, mismatches,
    important_share, judge_auc."""
    environment = Environment(loader=PackageLoader("lenience", "templates"), autoescape=True, trim_blocks=True)
    environment.filters |= {"short": short, "why": why}
    drawn = svg(frontier)
    path.with_name("frontier.svg").write_text(drawn, encoding="utf-8")
    page = environment.get_template("report.html").render(
        frontier=frontier,
        plot=drawn,
        example=example(frontier),
        origins=ORIGINS,
        mining=mining,
        n=frontier["rows"][0]["n"],
    )
    path.write_text(page, encoding="utf-8")
