"""The HTML page of a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lenience.certification.certificate import Certificate
from lenience.core.figures import Label, as_svg, draw_labels, no_figures
from lenience.core.files import write_text
from lenience.core.templates import read_template


def write_page(path: Path, certificate: Certificate) -> None:
    """Write a certificate's HTML page."""
    page = read_template("certificate.html").render(
        made=certificate, figure=tested_settings(certificate)
    )
    write_text(path, page)


def tested_settings(certificate: Certificate) -> str:
    """Return the figure of a certificate's tested settings, or the reason why there is none."""
    return no_figures() or as_svg(plot(certificate))


def plot(certificate: Certificate) -> Any:
    """Return a certificate's tested settings as a matplotlib figure: the observed loss and its
    bound against tokens per pass."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots()
    labels = list[Label]()
    for row in certificate.tried:
        color = "#059669" if row.passed else "#dc2626"
        x = row.tokens_per_pass
        low = 100 * row.losses / row.n
        high = 100 * row.upper_bound
        axes.plot([x, x], [low, high], color=color, linewidth=1)
        axes.plot(x, low, "o", color=color, markersize=5)
        axes.plot(x, high, marker="_", color=color, markersize=12, markeredgewidth=2)
        labels.append(Label(x, high, row.shown_name, color, first=row.passed))
    limit = 100 * certificate.max_drop
    axes.axhline(limit, color="#6b7280", linestyle="--", linewidth=1)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(0, bottom), max(2.2 * limit, min(top, 100)))
    axes.set_xlabel("tokens per pass of the target")
    axes.set_ylabel("loss, %: seen, and its bound")
    axes.margins(x=0.12)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()  # so that data coordinates map to pixels
    draw_labels(axes, labels)
    return figure
