"""The report of a comparison: one self-contained HTML page, and the frontier plot on its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from lenience.rules import Judge, terms

COLORS = {"target": "#6b7280", "draft": "#6b7280", "exact": "#2563eb", "topk": "#d97706", "judge": "#059669"}
MARKS = {"target": "s", "draft": "D", "exact": "o", "topk": "^", "judge": "o"}
ORIGINS = {
    "draft": "proposed by the draft, and what the target would have said",
    "draft-lenient": "proposed by the draft, kept although the target would have said something else",
    "draft-trusted": "proposed by the draft, and kept on its gate's word, the target not having read it",
    "correction": "the target's, in place of a rejected one",
    "bonus": "the target's, after a window accepted whole",
}


def family(rule: str) -> str:
    """The group that a rule is drawn with: the name of its last term, for a judge the folder of its head."""
    last = [Path(term.path).name if isinstance(term, Judge) else term.name for term in terms(rule)][-1:]
    return last[0] if last else rule


def short(row: dict[str, Any]) -> str:
    """A row's rule with no more of its judge's path than its folder."""
    shortened = (
        Path(term.path).name + ("" if term.threshold is None else f"@{probability(term.threshold)}")
        if isinstance(term, Judge)
        else str(term)
        for term in terms(row["rule"])
    )
    return "|".join(shortened) or row["rule"]


def why(row: dict[str, Any]) -> str:
    """Why a row's window is in the table, where it is not the rule's fastest."""
    if row["why"].startswith("window of"):
        return "judge's"
    return "widest" if row["why"] == "widest" else ""


def probability(p: float) -> str:
    """A probability in as few digits as tell it from 0 and 1: 0.9 and 0.99996."""
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if abs(float(text) - p) <= 0.05 * min(abs(p), abs(1 - p)):
            return text
    return repr(p)


def plot(frontier: dict[str, Any]) -> Any:
    """The frontier as a matplotlib figure: accuracy against tokens per pass and, at the rules' fastest windows, against tokens
    per second. Accuracies are drawn on a logit scale, which parts those near 1; a label that would cover another is left
    out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    marked = {
        left: _marks(left, "tokens_per_pass", "tokens per pass of the target", frontier["rows"]),
        right: _marks(right, "tokens_per_second", "tokens per second", [row for row in frontier["rows"] if not why(row)]),
    }
    left.set_yscale("logit")
    ticks = [
        share for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99) if left.get_ylim()[0] < share < left.get_ylim()[1]
    ]
    left.set_yticks(ticks, [f"{100 * share:.0f}" for share in ticks])
    left.set_yticks([], minor=True)
    left.set_ylabel("right answers, %")
    left.legend(frameon=False, fontsize=8, loc="lower left")
    figure.draw_without_rendering()  # so that data can be told in pixels
    for axis, marks in marked.items():
        taken: list[Any] = []
        for x, y, text, color in marks:
            at = axis.transData.transform((x, y))
            if all(abs(at[0] - other[0]) > 88 or abs(at[1] - other[1]) > 11 for other in taken):
                taken.append(at)
                axis.annotate(text, (x, y), fontsize=7, color=color, xytext=(4, 4), textcoords="offset points")
    return figure


def _marks(axis: Any, key: str, label: str, rows: list[dict[str, Any]]) -> list[tuple[float, float, str, str]]:
    """Draw one axis; gives the marks that may be labelled, fastest windows first: x, y, text and colour."""
    groups: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        if row[key] is not None:
            groups.setdefault((family(row["rule"]), bool(why(row))), []).append(row)
    marks = []
    for (name, other), group in sorted(groups.items(), key=lambda item: item[0][1]):
        group.sort(key=lambda row: row[key])
        least = 0.5 / group[0]["n"]  # 0 and 1 have no place on a logit scale
        x, y = [row[key] for row in group], [min(max(row["accuracy"], least), 1 - least) for row in group]
        bounds = [[min(max(bound, least / 2), 1 - least / 2) for bound in row["accuracy_interval"]] for row in group]
        errors = [[abs(at - bound[side]) for at, bound in zip(y, bounds)] for side in (0, 1)]
        color, mark = COLORS.get(name, "#7c3aed"), MARKS.get(name, "o")
        axis.errorbar(x, y, yerr=errors, color=color, fmt="none", alpha=0.3, linewidth=1)
        style = {"linestyle": ":", "markerfacecolor": "white"} if other else {"label": name}
        axis.plot(x, y, color=color, marker=mark, markersize=6, linewidth=1.2, **style)
        for row, px, py in zip(group, x, y):
            marks.append((px, py, f"{short(row)}, w {row['window']}" if row["window"] else short(row), color))
    axis.set_xlabel(label)
    axis.margins(x=0.15)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    return marks


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
            rank = ("judge:" in row["rule"], result["correct"], lenient)
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
