"""Trees of drafted tokens by their parents: -1 for the prefix, parents before children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Parents = Sequence[int]


def depths(parents: Parents) -> list[int]:
    """Return each token's depth: the number of tokens before it on its path."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def lineage(parents: Parents) -> NDArray[np.bool_]:
    """Return [n, n] bool: entry [i, j] is True if token j is token i or an ancestor of it."""
    seen = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def paths(parents: Parents) -> list[list[int]]:
    """Return the path of token indices from the prefix to each leaf, in the leaves' order. An empty
    tree has one empty path."""
    inner = set(parents)
    found = [_path(parents, leaf) for leaf in range(len(parents)) if leaf not in inner]
    return found or [[]]


def _path(parents: Parents, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def followed(
    parents: Parents, tokens: Sequence[int], sequence: Sequence[int]
) -> list[int]:
    """Return the longest path of a tree, as indices into its `tokens`, that agrees with the
    beginning of a sequence."""
    children = {(parent, tokens[i]): i for i, parent in reversed([*enumerate(parents)])}
    path = list[int]()
    node = -1
    for token in sequence:
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path
