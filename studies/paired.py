"""The exact McNemar test between decoders that answered the same problems.

    python studies/paired.py compare/compare.jsonl [--alpha 0.05]

Prints each pair of settings of a comparison that `lenience compare --out compare` wrote: how many
problems only the first and only the second answered correctly, the two-sided p-value, and how many
more tokens per pass the first makes, with the 95 % interval over resampled problems.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from lenience.decoding.decoder import Decoder
from lenience.runs.journal import Journal

COLUMNS = ("first", "second", "n", "only first", "only second", "p", "tokens per pass")
RESAMPLES = 2000
Setting = tuple[str, int]
"""A rule and a window."""


@dataclass(frozen=True)
class Paired:
    """Two settings on the same problems."""

    first: str
    second: str
    n: int
    only_first: int
    """Number of problems that only the first setting answered correctly."""
    only_second: int
    p: float
    """Two-sided p-value of the exact McNemar test."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mcnemar(first: str, second: str, right: Mapping[str, str]) -> Paired:
    """Compare two settings of `right`, which holds a string of 1 and 0 per setting, one character
    per problem.

    Under the null hypothesis a problem that only one of them answers correctly is as likely to be
    the first's as the second's (McNemar 1947; exact form: a binomial test of one half).
    """
    pairs = list(zip(right[first], right[second], strict=True))
    only_first = pairs.count(("1", "0"))
    only_second = pairs.count(("0", "1"))
    differing = only_first + only_second
    p = binomtest(only_first, differing, 0.5).pvalue if differing else 1.0
    return Paired(
        first,
        second,
        n=len(pairs),
        only_first=only_first,
        only_second=only_second,
        p=float(p),
    )


def as_text(correct: Sequence[bool]) -> str:
    """Return the string that `mcnemar` reads."""
    return "".join("1" if each else "0" for each in correct)


def right_answers(journal: Path) -> dict[Setting, str]:
    """Return which problems each setting of a comparison's journal answered correctly, in the order
    of the problems' ids."""
    found: dict[Setting, dict[str, bool]] = {}
    for line in Journal(journal):
        decoder = Decoder.parse(line["setting"] or line["rule"])
        setting = (str(decoder.rule), int(decoder.window))
        found.setdefault(setting, {})[line["id"]] = line["correct"]
    return {
        setting: as_text([correct[name] for name in sorted(correct)])
        for setting, correct in found.items()
    }


def tokens_and_passes(journal: Path) -> dict[Setting, NDArray[np.float64]]:
    """Return the tokens and the target's passes [n, 2] of each setting's answers, in the order of
    the problems' ids."""
    found: dict[Setting, dict[str, tuple[int, int]]] = {}
    for line in Journal(journal):
        decoder = Decoder.parse(line["setting"] or line["rule"])
        setting = (str(decoder.rule), int(decoder.window))
        counts = (line["tokens"], line["target_passes"])
        found.setdefault(setting, {})[line["id"]] = counts
    return {
        setting: np.array([counts[name] for name in sorted(counts)], float)
        for setting, counts in found.items()
    }


def difference(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> tuple[float, float, float] | None:
    """Return how many more tokens per pass the first setting makes than the second, and the 95 %
    interval over resampled problems; None if one of them runs no pass. Each setting has its tokens
    and passes [n, 2] on the same problems."""
    if not (first[:, 1].all() and second[:, 1].all()):
        return None
    drawn = np.random.default_rng(0).integers(len(first), size=(RESAMPLES, len(first)))
    several = [setting[drawn].sum(1) for setting in (first, second)]  # [RESAMPLES, 2]
    ratios = [counts[:, 0] / counts[:, 1] for counts in several]
    low, high = np.percentile(ratios[0] - ratios[1], [2.5, 97.5])
    whole = [setting[:, 0].sum() / setting[:, 1].sum() for setting in (first, second)]
    return float(whole[0] - whole[1]), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("journal", type=Path)
    alpha_help = "largest p-value that is printed; default: 1"
    parser.add_argument("--alpha", type=float, default=1.0, help=alpha_help)
    given = parser.parse_args()
    counts = tokens_and_passes(given.journal)
    names = {setting: f"{setting[0]}; window={setting[1]}" for setting in counts}
    answers = right_answers(given.journal)
    right = {names[setting]: text for setting, text in answers.items()}
    table = Table(*COLUMNS)
    for first, second in itertools.combinations(counts, 2):
        row = mcnemar(names[first], names[second], right)
        if row.p > given.alpha:
            continue
        more = difference(counts[first], counts[second])
        told = "–" if more is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*more)
        figures = (row.n, row.only_first, row.only_second, f"{row.p:.2g}", told)
        table.add_row(row.first, row.second, *map(str, figures))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
