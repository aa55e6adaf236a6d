"""The figures of a comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lenience.certification.certificate import Certified
from lenience.core.figures import Label, draw_labels
from lenience.evaluation.names import NamedRow, alike, named, why
from lenience.evaluation.table import AllocationPoint, Frontier

COLORS = {
    "target": "#6b7280",
    "draft": "#6b7280",
    "exact": "#2563eb",
    "topk": "#d97706",
    "judge": "#059669",
    "built-in judge": "#7c3aed",
    "mlp": "#047857",
    "random": "#9ca3af",
}
OTHER_COLORS = (
    "#db2777", "#0891b2", "#65a30d", "#b45309",
    "#4f46e5", "#be123c", "#0d9488", "#a16207", "#0369a1",
)  # fmt: skip
"""Colours of rules missing in COLORS, in turn."""
MARKS = {
    "target": "s", "draft": "D", "exact": "o", "topk": "^", "judge": "o", "mlp": "o", "random": "x",
}  # fmt: skip
AXES = (
    ("tokens_per_pass", "tokens per pass of the target"),
    ("tokens_per_second", "tokens per second"),
    ("seconds_per_correct", "seconds per right answer (fewer is better)"),
)
TICKS = (0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
Numbered = list[tuple[int, NamedRow]]
"""Rows with their numbers in the table."""


def plot(
    frontier: Frontier, certified: Certified | None = None, narrow: bool = False
) -> Any:
    """Return the frontier as a matplotlib figure: accuracy against tokens per pass and, at the
    rules' fastest windows, against tokens per second and seconds per correct answer, with 95 %
    bands and the line of random allocation.

    Accuracies have a logit scale, which separates values near 1. A label that would cover another
    is moved, with a line to its mark. The mark of row i has the ids mark-i-0, -1 and -2. The
    certified setting has a ring. A `narrow` figure stacks its parts.
    """
    from matplotlib.figure import Figure

    rows = list(enumerate(named(frontier.rows)))
    there = _axes_of(frontier)
    figure = Figure(layout="constrained")
    axes = _parts(figure, len(there), narrow)
    fastest = [(i, row) for i, row in rows if not why(row)]
    colors = _colors(row.family for _, row in rows)
    labels = []
    for number, (axis, (key, title)) in enumerate(zip(axes, there)):
        shown = fastest if number else rows
        _draw_allocation(axis, key, frontier.allocation, rows[0][1].n)
        labels.append(_draw_marks(axis, number, shown, colors))
        _draw_ring(axis, key, shown, certified)
        axis.set_xlabel(title)
        axis.margins(x=0.15)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    _scale_accuracy(axes[0], [row for _, row in rows], frontier.measure)
    for axis in axes[1:] if narrow else ():
        axis.set_ylabel(axes[0].get_ylabel())
    _add_legend(figure, axes, columns=3 if narrow else 9)
    figure.draw_without_rendering()  # so that data coordinates map to pixels
    for axis, of_axis in zip(axes, labels):
        draw_labels(axis, of_axis)
    return figure


def _parts(figure: Any, count: int, narrow: bool) -> list[Any]:
    """Return axes side by side or, if `narrow`, one above the other."""
    figure.set_size_inches(*((4.2, 4.2 * count) if narrow else (4.5 * count, 5)))
    parts = (count, 1) if narrow else (1, count)
    return list(figure.subplots(*parts, sharey=True, squeeze=False).flatten())


def _add_legend(figure: Any, axes: Sequence[Any], columns: int) -> None:
    names = {}
    for axis in axes:
        for line, text in zip(*axis.get_legend_handles_labels()):
            names[text] = line
    figure.legend(
        list(names.values()),
        list(names),
        frameon=False,
        fontsize=8,
        loc="outside lower center",
        ncols=columns,
    )


def _axes_of(frontier: Frontier) -> list[tuple[str, str]]:
    """Return the axes for which a comparison has figures. Without right answers there are no
    seconds per right answer."""
    rows = frontier.rows
    found = list[tuple[str, str]]()
    for axis in AXES:
        if any(getattr(row, axis[0]) is not None for row in rows):
            found.append(axis)
    return found


def _colors(families: Any) -> dict[str, str]:
    """Return colours by family: fixed ones for known families, the others in turn."""
    others = [name for name in dict.fromkeys(families) if name not in COLORS]
    turns = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(others)}
    return COLORS | turns


def _scale_accuracy(axis: Any, rows: Sequence[NamedRow], measure: str) -> None:
    """Put accuracies on a logit scale, with a little room above the highest."""
    low = max(axis.get_ylim()[0], 0.02)
    high = max(_inside(row.accuracy_interval[1], 2 * row.n) for row in rows)
    high = 1 - 0.7 * (1 - high)
    axis.set_yscale("logit")
    axis.set_ylim(low, high)
    ticks = [share for share in TICKS if low < share < high]
    axis.set_yticks(ticks, [f"{100 * share:.0f}" for share in ticks])
    axis.set_yticks([], minor=True)
    axis.set_ylabel("right answers, %" if measure == "accuracy" else f"{measure}, %")


def _draw_ring(
    axis: Any, key: str, rows: Numbered, certified: Certified | None
) -> None:
    for _, row in rows:
        x = getattr(row, key)
        if certified and alike(row, certified) and x is not None:
            axis.plot(
                x,
                _inside(row.accuracy, row.n),
                "o",
                markersize=14,
                markerfacecolor="none",
                markeredgecolor="#111827",
                markeredgewidth=1.6,
                linestyle="none",
                label="certified",
            )


def _draw_allocation(
    axis: Any, key: str, points: Sequence[AllocationPoint], n: int
) -> None:
    """Draw the line of random allocation of prompts to the target and the draft, if it can be
    drawn."""
    values = [(getattr(point, key), point.accuracy) for point in points]
    shown = [(x, _inside(accuracy, n)) for x, accuracy in values if x is not None]
    if key == "tokens_per_pass":
        shown = shown[:-2]  # goes to infinity as the target's share goes to 0
    if shown:
        x, y = zip(*shown)
        style = {"color": "#9ca3af", "linewidth": 1, "linestyle": "--"}
        axis.plot(x, y, label="random allocation", **style)


def _inside(share: float, n: int) -> float:
    """Return a share moved inside (0, 1), as 0 and 1 have no place on a logit scale."""
    return min(max(share, 0.5 / n), 1 - 0.5 / n)


def _draw_marks(
    axis: Any, number: int, rows: Numbered, colors: dict[str, str]
) -> list[Label]:
    """Draw the marks of one axis, with a line for each family, and return their labels."""
    key = AXES[number][0]
    groups: dict[tuple[str, bool], Numbered] = {}
    for i, row in rows:
        if getattr(row, key) is not None:
            groups.setdefault((row.family, bool(why(row))), []).append((i, row))
    labels = []
    for (family, other_window), group in sorted(
        groups.items(), key=lambda item: item[0][1]
    ):
        group.sort(key=lambda item: getattr(item[1], key))
        _draw_line(axis, [row for _, row in group], key, colors[family], other_window)
        for nth, (i, row) in enumerate(group):
            x = getattr(row, key)
            y = _inside(row.accuracy, row.n)
            color = colors[family]
            (mark,) = axis.plot(
                [x],
                [y],
                color=color,
                marker=MARKS.get(family, "o"),
                markersize=6,
                linestyle="none",
                markerfacecolor="white" if other_window else color,
                label=family if nth == 0 and not other_window else None,
            )
            mark.set_gid(f"mark-{i}-{number}")
            text = _text(row, without=family if len(group) > 1 else "")
            # names without arguments, such as judges and baselines, are labelled first
            first = ":" not in row.name and "," not in row.name
            labels.append(Label(x, y, text, color, first))
    return labels


def _text(row: NamedRow, without: str) -> str:
    """Return a mark's label. To save room it omits the family, which the legend names, and the
    arguments of a stop condition."""
    name = re.sub(r"(stop=\w+):[^,]*", r"\1", row.name)
    text = f"{name}, w {row.window}" if row.window else name
    return text.removeprefix(without).lstrip(":, ") or text


def _draw_line(
    axis: Any, rows: Sequence[NamedRow], key: str, color: str, other_window: bool
) -> None:
    """Draw the line of a family, with the intervals of its accuracies."""
    n = rows[0].n
    x = [getattr(row, key) for row in rows]
    y = [_inside(row.accuracy, n) for row in rows]
    low = [_inside(row.accuracy_interval[0], 2 * n) for row in rows]
    high = [_inside(row.accuracy_interval[1], 2 * n) for row in rows]
    if len(rows) > 1:
        axis.fill_between(x, low, high, color=color, alpha=0.06, linewidth=0)
    axis.vlines(x, low, high, color=color, alpha=0.25, linewidth=1)
    axis.plot(x, y, color=color, linewidth=1.1, linestyle=":" if other_window else "-")
