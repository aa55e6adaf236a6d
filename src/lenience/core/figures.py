"""Figures of HTML pages: inline SVG, and labels that do not cover each other."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

LABEL_HEIGHT = 9
CHARACTER_WIDTH = 4
"""Approximate width of a label's character, in points; LABEL_HEIGHT is its height."""
LABEL_STEPS = 14
"""Number of label heights that a label may be moved from its mark."""
NEAR = 3
"""Distance in points that another mark must have from a label."""
_Place = tuple[float, float, float]
"""Left edge, bottom edge and width of a label, in points."""


@dataclass(frozen=True)
class Label:
    """A label of a mark at (x, y), in the data's coordinates."""

    x: float
    y: float
    text: str
    color: str
    first: bool
    """True if the label is placed first, as there may be no room for all."""


def no_figures() -> str:
    """Return the reason why pages have no figures, with the fix; "" if they have figures."""
    return (
        ""
        if find_spec("matplotlib")
        else "without figures: pip install 'lenience[plots]'"
    )


def as_svg(figure: Any) -> str:
    """Return a figure as inline SVG."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def draw_labels(axis: Any, labels: Sequence[Label]) -> None:
    """Label the marks, each as near to its mark as there is room."""
    points = 72 / axis.figure.dpi
    left, bottom, right, top = axis.get_window_extent().extents * points
    marks = [axis.transData.transform((label.x, label.y)) * points for label in labels]
    taken = list[_Place]()
    for label in sorted(labels, key=lambda label: not label.first):
        x, y = axis.transData.transform((label.x, label.y)) * points
        width = CHARACTER_WIDTH * len(label.text)
        places = [(x + dx, y + dy, width) for dx, dy in _shifts(width)]
        inside = [
            place
            for place in places
            if left <= place[0] <= right - width
            and bottom <= place[1] <= top - LABEL_HEIGHT
        ]
        place = min(inside or places, key=lambda place: _covered(place, taken, marks))
        taken.append(place)
        shown = axis.annotate(
            label.text,
            (label.x, label.y),
            fontsize=7,
            color=label.color,
            xytext=(place[0] - x, place[1] - y),
            textcoords="offset points",
            arrowprops={
                "arrowstyle": "-",
                "color": label.color,
                "alpha": 0.4,
                "linewidth": 0.5,
            },
        )
        shown.set_in_layout(False)  # a long label would squeeze the axes


def _shifts(width: float) -> list[tuple[float, float]]:
    """Return the possible offsets of a label from its mark, in points, the nearest first."""
    steps = []
    for step in range(LABEL_STEPS):
        for sign in (1, -1) if step else (1,):
            steps.append(sign * step)
    return [(x, 4 + LABEL_HEIGHT * step) for step in steps for x in (4, -4 - width)]


def _covered(place: _Place, taken: Sequence[_Place], marks: Sequence[Any]) -> int:
    """Return the number of labels and marks that a label at `place` would cover."""
    left, bottom, width = place
    labels = sum(
        left < x + its_width and x < left + width and abs(bottom - y) < LABEL_HEIGHT
        for x, y, its_width in taken
    )
    near = sum(
        left - NEAR < x < left + width + NEAR
        and bottom - NEAR < y < bottom + LABEL_HEIGHT
        for x, y in marks
    )
    return labels + near
