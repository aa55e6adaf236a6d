"""The plots of docs/studies.md, from results files.

    python studies/plots.py [--results benchmarks/results] [--out docs]

Writes fuzzy.svg (FSD: paired loss against accepted tokens per pass, by divergence),
classifiers.svg (AutoJudge: AUC and share accepted, by classifier) and real.svg (all rules on a
pretrained pair: correct answers against tokens per pass and per second).
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


REAL = {
    "target": ("D", "black", "target alone"),
    "draft": ("D", "gray", "draft alone"),
    "exact": ("*", "black", "strict"),
    "judge:training/real/autojudge": ("o", "tab:blue", "AutoJudge's head"),
    "judge:training/real/mlp": ("o", "tab:purple", "MLP judge"),
    "judge:training/real/annotated": ("o", "tab:red", "Judge Decoding's head"),
    "speculative": ("P", "tab:brown", "SPRINTER's gate"),
    "fuzzy": ("s", "tab:green", "fuzzy"),
    "topk": ("^", "tab:orange", "top-K"),
    "random": ("x", "gray", "random"),
}
"""Marks, colours and names by the beginning of a rule's spec."""
OTHERS = ("v", "tab:cyan", "typical, kl, ensemble, cascade, fly")
PANELS = {
    "tokens_per_pass": "tokens per pass of the target",
    "tokens_per_second": "tokens per second",
}


def real(results: dict[str, Any]) -> Figure:
    """Return the share of correct answers of all rules against what they keep, and their speed."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (figure_name, label) in zip(panels, PANELS.items()):
        named = set[str]()
        for row in results["rows"]:
            if row[figure_name] is None:
                continue
            kinds = [kind for kind in REAL if row["rule"].startswith(kind)]
            mark, colour, name = REAL[kinds[0]] if kinds else OTHERS
            low, high = row[f"{figure_name}_interval"]
            accuracy = 100 * row["accuracy"]
            bottom, top = (100 * bound for bound in row["accuracy_interval"])
            axes.errorbar(
                row[figure_name],
                accuracy,
                xerr=[[row[figure_name] - low], [high - row[figure_name]]],
                yerr=[[accuracy - bottom], [top - accuracy]],
                marker=mark,
                color=colour,
                elinewidth=0.5,
                ls="",
                label=None if name in named else name,
            )
            named.add(name)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(f"correct answers, % of {results['rows'][0]['n']} problems")
    handles, names = panels[1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
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
    results = json.loads((given.results / "real-rules.json").read_text())
    real(results).savefig(given.out / "real.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
