"""Planned trees: the shape of a given size with the most accepted tokens (Sequoia, Chen 2024)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenience.core.errors import InputError, first_line
from lenience.core.files import EMBEDDED, stamp, write_json
from lenience.core.types import Draws

BUILT_IN_TREE = EMBEDDED / "tree.json"
FIX = "`lenience fit RUN --tree` measures it"


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance rates of a drafter's tokens."""

    drafter: str
    shares: tuple[tuple[float, ...], ...]
    """Acceptance rate by the number of drafted tokens before (all correct) and by rank: the share
    of positions at which the target predicts the drafter's token of this rank."""
    places: tuple[int, ...]
    """Number of counted positions, by the number of drafted tokens before."""
    draw: Draws | None = None
    """Way in which the tokens were drawn; None if they were the most probable ones."""

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


def load_acceptance(path: str | Path) -> Acceptance:
    """Load measured acceptance rates from a file. Raises InputError if the file is missing or
    broken."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"planned: there is no {file}; {FIX}")
    return _load(file, stamp(file))


@lru_cache(maxsize=4)
def _load(file: Path, changed: tuple[int, int]) -> Acceptance:
    try:
        said = json.loads(file.read_text())
        shares = tuple(tuple(map(float, row)) for row in said["shares"])
        if not shares or not all(len(row) == len(shares[0]) > 0 for row in shares):
            raise ValueError("its shares are no table")
        if not any(shares[0]):
            raise ValueError("the target never chose a drafted token")
        places = tuple(map(int, said["places"]))
        return Acceptance(str(said["drafter"]), shares, places, said.get("draw"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"planned {file}: is broken ({why}); {FIX}") from None


def best_shape(
    shares: Sequence[Sequence[float]], nodes: int
) -> tuple[list[int], float]:
    """Return the tree of at most `nodes` tokens with the highest expected number of accepted
    tokens, and that number.

    The tree is the number of children of the prefix and of each token, level by level. `shares` are
    those of an Acceptance: a token's acceptance rate depends on its level and rank alone.
    """
    depth = len(shares)
    ranks = len(shares[0])
    # expected accepted tokens from n descendants of a token of this level
    below: NDArray[np.float64] = np.zeros(nodes + 1)
    splits: list[NDArray[np.int64]] = []
    for level in reversed(range(depth)):
        # the same for a child with n tokens, itself included, once it is accepted
        worth = np.concatenate([[0.0], 1 + below[:-1]])
        rest = np.zeros(nodes + 1)
        split = np.zeros((ranks, nodes + 1), np.int64)
        for rank in reversed(range(ranks)):
            best = np.zeros(nodes + 1)
            for n in range(1, nodes + 1):
                values = shares[level][rank] * worth[1 : n + 1] + rest[n - 1 :: -1][:n]
                at = int(values.argmax())
                if values[at] > 0:
                    best[n] = values[at]
                    split[rank, n] = at + 1
            rest = best
        below = rest
        splits.insert(0, split)
    return _counts(splits, nodes), float(below[nodes])


def _counts(splits: Sequence[NDArray[np.int64]], nodes: int) -> list[int]:
    """Return the number of children of the prefix and of each token, level by level. `splits` has
    for each level [ranks, n]: of n remaining tokens, the number that the child of a rank takes with
    its descendants; 0 for no child."""
    counts = list[int]()
    sizes = [nodes]
    for split in splits:
        deeper = list[int]()
        for left in sizes:
            before = len(deeper)
            for of_rank in split:
                size = int(of_rank[left])
                if not size:
                    break
                deeper.append(size - 1)
                left -= size
            counts.append(len(deeper) - before)
        sizes = deeper
    return counts + [0] * len(sizes)
