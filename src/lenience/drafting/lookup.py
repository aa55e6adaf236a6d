"""Drafting by lookup: prompt lookup and suffix decoding.

No model drafts; tokens are proposed with probability 1.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Generic, TypeVar

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.suffixes import END, Suffixes
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.drafting.trees.shapes import Dynamic, Tree

T = TypeVar("T", "_Ngrams", Suffixes)
S = TypeVar("S")
MOST_FINISHED = 1_000_000
"""Maximum number of tokens of finished texts that are remembered; beyond it the index starts
afresh."""


@dataclass(frozen=True)
class Ngram(DrafterSpec):
    """Propose the tokens after an earlier occurrence of the last tokens: prompt lookup (Saxena
    2023). The longest match of at most `max` tokens is used; of equally long matches, the most
    recent (`transformers`' prompt_lookup_num_tokens uses the oldest)."""

    max: int = 3
    oldest: bool = False
    """True to use the oldest of equally long matches."""
    name = "ngram"
    grid = ("ngram", "ngram:max=5", "ngram:oldest=true")

    def __post_init__(self) -> None:
        if self.max < 1:
            raise InputError(f"ngram's max {self.max}: must be 1 or more tokens")

    def build(self, setup: DrafterSetup) -> Drafter:
        return _NgramDrafter(setup, self)


@dataclass(frozen=True)
class Suffix(DrafterSpec):
    """Propose the most frequent continuation of the text's last tokens earlier in the text:
    SuffixDecoding (Oliaro 2024). At most the match's length times `factor` tokens are proposed. The
    match with the largest sum of path probabilities is used."""

    depth: int = 24
    """Maximum length of a match that counts."""
    factor: float = 1.0
    least: float = 0.1
    """Minimum share of the continuations for the path of a proposed token."""
    finished: bool = False
    """True to search also the prompts and answers that this process has finished with this
    target."""
    name = "suffix"
    offers = Parts.EARLY_ENDS | Parts.TREES
    grid = ("suffix", "suffix:factor=2.0", "suffix:depth=8,least=0.0")

    def __post_init__(self) -> None:
        for what, number in (("depth", self.depth), ("factor", self.factor)):
            if not 0 < number < inf:
                raise InputError(
                    f"suffix's {what} {number}: must be above 0, and a number"
                )
        if not 0 <= self.least <= 1:
            raise InputError(f"suffix's least {self.least}: must be from 0 to 1")

    @property
    def needs(self) -> Sources:
        return Sources.EARLIER_ANSWERS if self.finished else Sources.NOTHING

    def check_tree(self, tree: Tree) -> None:
        check_dynamic(self, tree)

    def build(self, setup: DrafterSetup) -> Drafter:
        return _SuffixDrafter(setup, self)


def check_dynamic(drafter: DrafterSpec, tree: Tree) -> None:
    """Raise InputError for any tree but a plain dynamic one: lookups have neither a fixed number of
    ranks nor distributions at each position."""
    if not isinstance(tree, Dynamic):
        raise InputError(
            f"drafter {drafter}: has no ranks at every position; with tree {tree} use "
            "another drafter, or --tree dynamic:NODES"
        )
    usual = Dynamic(tree.nodes, tree.depth)
    for name in ("top", "temperature", "least"):
        if getattr(tree, name) != getattr(usual, name):
            raise InputError(
                f"tree {tree}: its {name} needs distributions, and drafter {drafter} "
                "has only shares of earlier continuations; leave it out"
            )


@dataclass
class _RowIndex(Generic[T]):
    """The index of a row's text."""

    index: T
    tokens: list[int] = field(default_factory=list)


class _Lookup(Drafter, Generic[T]):
    """A drafter that keeps an index of each row's text, so that a cycle adds only new tokens."""

    def __init__(self, setup: DrafterSetup):
        self.target = setup.target
        self.stop = setup.stop
        self._rows: dict[int, _RowIndex[T]] = {}

    def new_index(self) -> T:
        raise NotImplementedError

    def finish(self, tokens: list[int]) -> None:
        """Record a finished text."""

    def look_up(
        self, index: T, tokens: list[int], ahead: int, limit: int
    ) -> GrowingTree:
        """Return a continuation of a text, of at most `limit` tokens on a path. The text's last
        `ahead` tokens are not in the index."""
        raise NotImplementedError

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        grown = []
        for b, (row, left) in enumerate(zip(ctx.rows, room)):
            limit = max(0, min(self.stop.max_tokens(row, ctx.window), left - 1))
            index = self._up_to_date(b, row.prefix[: len(row.prefix) - row.ahead])
            found = (
                self.look_up(index, row.prefix, row.ahead, limit)
                if limit
                else GrowingTree()
            )
            grown.append(found)
        return as_draft(grown, self.target.device, trees=self.proposes_trees)

    proposes_trees = False

    def move(self, source: int, to: int) -> None:
        if source in self._rows:
            self._rows[to] = self._rows.pop(source)

    def _up_to_date(self, row: int, prefix: list[int]) -> T:
        known = self._rows.get(row)
        if known is None or prefix[: len(known.tokens)] != known.tokens:
            if known is not None:
                self.finish(known.tokens)
            known = self._rows[row] = _RowIndex(self.new_index())
        for token in prefix[len(known.tokens) :]:
            known.index.add(token)
            known.tokens.append(token)
        return known.index

    def _to_eos(self, tokens: list[int]) -> list[int]:
        ends = (i for i, token in enumerate(tokens, 1) if token in self.target.eos_ids)
        return tokens[: next(ends, len(tokens))]


class _Ngrams:
    """An index from each n-gram of a text to the position of the token that follows it."""

    def __init__(self, most: int, oldest: bool):
        self.most = most
        self.oldest = oldest
        self.ends: dict[tuple[int, ...], int] = {}
        self._last: list[int] = []
        self._length = 0

    def add(self, token: int) -> None:
        for n in range(1, len(self._last) + 1):  # n-grams that end before the token
            key = tuple(self._last[-n:])
            if not (self.oldest and key in self.ends):
                self.ends[key] = self._length
        self._last = [*self._last, token][-self.most :]
        self._length += 1


class _NgramDrafter(_Lookup[_Ngrams]):
    def __init__(self, setup: DrafterSetup, spec: Ngram):
        super().__init__(setup)
        self.spec = spec

    def new_index(self) -> _Ngrams:
        return _Ngrams(self.spec.max, self.spec.oldest)

    def look_up(
        self, index: _Ngrams, tokens: list[int], ahead: int, limit: int
    ) -> GrowingTree:
        for n in range(min(self.spec.max, len(tokens)), 0, -1):
            end = index.ends.get(tuple(tokens[-n:]))
            if end is not None:
                found = self._to_eos(tokens[end : end + limit])
                return GrowingTree(
                    found, list(range(-1, len(found) - 1)), [0] * len(found)
                )
        return GrowingTree()


class Finished:
    """The texts that were finished with a target."""

    def __init__(self) -> None:
        self.index = Suffixes()
        self.size = 0
        self.lock = threading.Lock()
        self._unfinished: dict[int, _RowIndex[Suffixes]] = {}

    def add(self, tokens: list[int]) -> None:
        with self.lock:
            if self.size + len(tokens) > MOST_FINISHED:
                self.index = Suffixes()
                self.size = 0
            for token in (*tokens, END):
                self.index.add(token)
            self.size += len(tokens) + 1

    def go_on(self, rows: dict[int, _RowIndex[Suffixes]]) -> None:
        """Add the texts that the previous drafter left in its rows, and watch the `rows` of the
        next one."""
        before = self._unfinished
        self._unfinished = rows
        for known in before.values():
            self.add(known.tokens)


class _SuffixDrafter(_Lookup[Suffixes]):
    def __init__(self, setup: DrafterSetup, spec: Suffix):
        super().__init__(setup)
        self.spec = spec
        self.tree = setup.tree
        self.proposes_trees = not setup.tree.is_chain
        self.finished: Finished | None = None
        if spec.finished:
            self.finished = setup.target.once("finished texts", Finished)
            self.finished.go_on(self._rows)

    def finish(self, tokens: list[int]) -> None:
        if self.finished:
            self.finished.add(tokens)

    def new_index(self) -> Suffixes:
        return Suffixes()

    def look_up(
        self, index: Suffixes, tokens: list[int], ahead: int, limit: int
    ) -> GrowingTree:
        best = self._best(index, index.matches(tokens[len(tokens) - ahead :]), limit)
        if self.finished:
            with self.finished.lock:
                index = self.finished.index
                matches = index.matches_of(tokens[-self.spec.depth :])
                best = max(
                    best,
                    self._best(index, matches, limit),
                    key=lambda continuation: continuation[1],
                )
        return best[0]

    def _best(
        self, index: Suffixes, matches: Iterable[tuple[int, int]], limit: int
    ) -> tuple[GrowingTree, float]:
        """Return the proposal of the best match in an index, and the sum of its path shares.
        `matches` begin with the longest."""
        best = GrowingTree()
        worth = 0.0
        for state, length in matches:
            most = min(limit, int(self.spec.factor * min(length, self.spec.depth)))
            grown, sum_of = likeliest(
                index.followers,
                state,
                most,
                self.tree,
                least=self.spec.least,
                eos=self.target.eos_ids,
            )
            if sum_of > worth:
                best = grown
                worth = sum_of
        return best, worth


def likeliest(
    followers: Callable[[S], list[tuple[int, float, S]]],
    state: S,
    depth: int,
    tree: Tree,
    least: float,
    eos: frozenset[int],
) -> tuple[GrowingTree, float]:
    """Return the most frequent tokens after a state of an index, at most `depth` on a path, and the
    sum of their paths' shares. Paths with a share below `least` are left out.

    A chain takes the most frequent token after each token, a tree the most frequent paths.
    `followers` returns the continuations of a state: each token, its share, and the state after the
    token.
    """
    grown = GrowingTree()
    worth = 0.0
    depth = min(depth, getattr(tree, "depth", None) or depth)
    nodes = depth if tree.is_chain else tree.size
    # (−share of the path, insertion order, token, parent, state, depth)
    waiting: list[tuple[float, int, int, int, S, int]] = []
    order = count()

    def meet(state: S, share: float, parent: int, deep: int) -> None:
        for token, part, child in followers(state):
            if share * part >= least:
                entry = (-share * part, next(order), token, parent, child, deep)
                heapq.heappush(waiting, entry)

    if depth:
        meet(state, 1.0, -1, 1)
    while waiting and len(grown.tokens) < nodes:
        share, _, token, parent, child, deep = heapq.heappop(waiting)
        if tree.is_chain:
            waiting = []
        grown.tokens.append(token)
        grown.parents.append(parent)
        grown.picked_from.append(0)
        worth -= share
        if deep < depth and token not in eos:
            meet(child, -share, len(grown.tokens) - 1, deep + 1)
    return grown, worth
