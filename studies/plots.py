"""The plots of docs/studies.md, from results files.

    python studies/plots.py [--results benchmarks/results] [--out docs]

Writes fuzzy.svg (FSD: paired loss against accepted tokens per pass, by divergence) and
classifiers.svg (AutoJudge: AUC and share accepted, by classifier).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from autojudge import bars
from matplotlib.figure import Figure

WINDOW = 5
MARKS = {"exact": "*", "fuzzy:kl": "o", "fuzzy:js": "s", "fuzzy:tv": "^", "random": "x"}


def fuzzy(results: dict[str, Any]) -> Figure:
    """Return the loss of FSD's rules against what they accept, at one window."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in results["rows"] if row["window"] == WINDOW]
    for name, mark in MARKS.items():
        own = [row for row in rows if row["rule"].startswith(name)]
        loss = [100 * row["paired_loss"] for row in own]
        low = [100 * row["paired_loss_interval"][0] for row in own]
        high = [100 * row["paired_loss_interval"][1] for row in own]
        spread = [
            [a - b for a, b in zip(loss, low)],
            [b - a for a, b in zip(loss, high)],
        ]
        accepted = [row["accepted_per_pass"] for row in own]
        axes.errorbar(
            accepted, loss, yerr=spread, marker=mark, capsize=2, lw=1, label=name
        )
    axes.set_xlabel("accepted tokens per pass")
    axes.set_ylabel(f"paired loss, % of {rows[0]['n']} problems")
    axes.set_title(f"Fuzzy speculative decoding, greedy, window {WINDOW}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parents[1]
    parser.add_argument("--results", type=Path, default=here / "benchmarks/results")
    parser.add_argument("--out", type=Path, default=here / "docs")
    given = parser.parse_args()
    # the same file for the same results
    mpl.rcParams["svg.hashsalt"] = "lenience"
    results = json.loads((given.results / "fuzzy.json").read_text())
    fuzzy(results).savefig(given.out / "fuzzy.svg", metadata={"Date": None})
    results = json.loads((given.results / "autojudge_classifiers.json").read_text())
    names = [row["classifier"] for row in results["rows"]]
    figure = bars(results["rows"], names)
    figure.savefig(given.out / "classifiers.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
