"""The figures of comparisons and certificates."""

from __future__ import annotations

import io
from typing import Any

from lenience.evaluation.names import named, short, why

COLORS = {"target": "#6b7280", "draft": "#6b7280", "exact": "#2563eb", "topk": "#d97706", "judge": "#059669", "mlp": "#047857",
          "random": "#9ca3af"}  # fmt: skip


OTHERS = ("#7c3aed", "#db2777", "#0891b2", "#65a30d", "#b45309", "#4f46e5", "#be123c", "#0d9488", "#a16207", "#0369a1")
"""Of the rules that COLORS does not name, in turn."""


MARKS = {"target": "s", "draft": "D", "exact": "o", "topk": "^", "judge": "o", "mlp": "o", "random": "x"}


AXES = (
    ("tokens_per_pass", "tokens per pass of the target"),
    ("tokens_per_second", "tokens per second"),
    ("seconds_per_correct", "seconds per right answer (fewer is better)"),
)


def plot(frontier: dict[str, Any], certificate: dict[str, Any] | None = None) -> Any:
    """The frontier as a matplotlib figure: accuracy against tokens per pass and, at the rules' fastest windows, against tokens
    per second and seconds per right answer, with bands of 95 % and the line of random allocation. Accuracies are drawn on a
    logit scale, which parts those near 1; a label that would cover another is left out. The mark of row i has the id
    mark-i-0, -1 and -2. What is certified has a ring, at its window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    rows = list(enumerate(named(frontier["rows"])))
    fastest = [(i, row) for i, row in rows if not why(row)]
    others = dict.fromkeys(name for _, row in rows if (name := row["family"]) not in COLORS)
    colors = COLORS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    marked = []
    for number, (axis, (key, label)) in enumerate(zip(axes, AXES)):
        _line(axis, key, frontier.get("allocation", []), rows[0][1]["n"])
        marked.append(_marks(axis, number, key, label, fastest if number else rows, colors))
        _ring(axis, key, rows[0][1]["n"], fastest if number else rows, (certificate or {}).get("certified") or {})
    low = axes[0].get_ylim()[0]
    high = max(_inside(row["accuracy_interval"][1], 2 * row["n"]) for _, row in rows)
    high = 1 - 0.7 * (1 - high)  # a little room on a logit scale
    axes[0].set_yscale("logit")
    axes[0].set_ylim(max(low, 0.02), high)
    ticks = [share for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99) if max(low, 0.02) < share < high]
    axes[0].set_yticks(ticks, [f"{100 * share:.0f}" for share in ticks])
    axes[0].set_yticks([], minor=True)
    axes[0].set_ylabel("right answers, %")
    names = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(names.values(), names.keys(), frameon=False, fontsize=8, loc="outside lower center", ncols=9)
    figure.draw_without_rendering()  # so that data can be told in pixels
    for axis, marks in zip(axes, marked):
        taken: list[Any] = []
        for x, y, text, color in marks:
            at = axis.transData.transform((x, y))
            if all(abs(at[0] - other[0]) > 88 or abs(at[1] - other[1]) > 11 for other in taken):
                taken.append(at)
                axis.annotate(text, (x, y), fontsize=7, color=color, xytext=(4, 4), textcoords="offset points")
    return figure


def _ring(axis: Any, key: str, n: int, rows: list[tuple[int, dict[str, Any]]], certified: dict[str, Any]) -> None:
    for _, row in rows:
        if (row["rule"], row["window"]) == (certified.get("rule"), certified.get("window")) and row[key] is not None:
            axis.plot(row[key], _inside(row["accuracy"], n), "o", markersize=14, markerfacecolor="none",
                      markeredgecolor="#111827", markeredgewidth=1.6, linestyle="none", label="certified")  # fmt: skip


def _line(axis: Any, key: str, points: list[dict[str, Any]], n: int) -> None:
    """What random allocation of prompts to the target and the draft gives, where it can be drawn."""
    shown = [(point[key], point["accuracy"]) for point in points if point[key] is not None]
    if key == "tokens_per_pass":
        shown = shown[:-2]  # it runs off to infinity, where the target reads nothing
    if shown:
        x, y = zip(*shown)
        axis.plot(
            x, [_inside(share, n) for share in y], color="#9ca3af", linewidth=1, linestyle="--", label="random allocation"
        )


def _inside(share: float, n: int) -> float:
    """0 and 1 have no place on a logit scale."""
    return min(max(share, 0.5 / n), 1 - 0.5 / n)


def _marks(
    axis: Any, number: int, key: str, label: str, rows: list[tuple[int, dict[str, Any]]], colors: dict[str, str]
) -> list[tuple[float, float, str, str]]:
    """Draw one axis; gives the marks that may be labelled, fastest windows first: x, y, text and colour."""
    groups: dict[tuple[str, bool], list[tuple[int, dict[str, Any]]]] = {}
    for i, row in rows:
        if row[key] is not None:
            groups.setdefault((row["family"], bool(why(row))), []).append((i, row))
    marks = []
    for (name, other), group in sorted(groups.items(), key=lambda item: item[0][1]):
        group.sort(key=lambda item: item[1][key])
        n, color = group[0][1]["n"], colors[name]
        x = [row[key] for _, row in group]
        y = [_inside(row["accuracy"], n) for _, row in group]
        low, high = ([_inside(row["accuracy_interval"][side], 2 * n) for _, row in group] for side in (0, 1))
        if len(group) > 1:
            axis.fill_between(x, low, high, color=color, alpha=0.06, linewidth=0)
        axis.vlines(x, low, high, color=color, alpha=0.25, linewidth=1)
        axis.plot(x, y, color=color, linewidth=1.1, linestyle=":" if other else "-")
        for nth, ((i, row), px, py) in enumerate(zip(group, x, y)):
            (mark,) = axis.plot(
                [px], [py], color=color, marker=MARKS.get(name, "o"), markersize=6, linestyle="none",
                markerfacecolor="white" if other else color, label=name if nth == 0 and not other else None,
            )  # fmt: skip
            mark.set_gid(f"mark-{i}-{number}")
            marks.append((px, py, f"{short(row)}, w {row['window']}" if row["window"] else short(row), color))
    axis.set_xlabel(label)
    axis.margins(x=0.15)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    # the judges and what stands alone are labelled first, where there is no room for all
    return sorted(marks, key=lambda item: ":" in item[2] or "," in item[2].split(", w")[0])


def rungs(made: dict[str, Any]) -> Any:
    """What a certificate tried, as a matplotlib figure: the loss seen and its bound against tokens per pass."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for row in made["tried"]:
        color, x = ("#059669" if row["passed"] else "#dc2626"), row["tokens_per_pass"]
        low, high = 100 * row["losses"] / row["n"], 100 * row["upper_bound"]
        axes.plot([x, x], [low, high], color=color, linewidth=1)
        axes.plot(x, low, "o", color=color, markersize=5)
        axes.plot(x, high, marker="_", color=color, markersize=12, markeredgewidth=2)
        axes.annotate(short(row), (x, high), fontsize=7, color=color, xytext=(0, 5), textcoords="offset points",
                      rotation=35, rotation_mode="anchor")  # fmt: skip
    axes.axhline(100 * made["max_drop"], color="#6b7280", linestyle="--", linewidth=1)
    axes.set_ylim(min(0, axes.get_ylim()[0]), max(2.2 * 100 * made["max_drop"], min(axes.get_ylim()[1], 100)))
    axes.set_xlabel("tokens per pass of the target")
    axes.set_ylabel("loss, %: seen, and its bound")
    axes.margins(x=0.12)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _svg(figure: Any) -> str:
    """A figure as inline SVG."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
