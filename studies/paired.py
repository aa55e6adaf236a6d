"""The exact McNemar test between decoders that answered the same problems.

    python studies/paired.py compare/compare.jsonl [--alpha 0.05]

Prints each pair of settings of a comparison that `lenience compare --out compare` wrote: how many
problems only the first and only the second answered correctly, and the two-sided p-value.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from lenience.decoding.decoder import Decoder
from lenience.runs.journal import Journal

COLUMNS = ("first", "second", "n", "only first", "only second", "p")
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("journal", type=Path)
    alpha_help = "largest p-value that is printed; default: 1"
    parser.add_argument("--alpha", type=float, default=1.0, help=alpha_help)
    given = parser.parse_args()
    right = {
        f"{rule}; window={window}": text
        for (rule, window), text in right_answers(given.journal).items()
    }
    table = Table(*COLUMNS)
    for first, second in itertools.combinations(right, 2):
        row = mcnemar(first, second, right)
        if row.p <= given.alpha:
            figures = (row.n, row.only_first, row.only_second, f"{row.p:.2g}")
            table.add_row(first, second, *map(str, figures))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
