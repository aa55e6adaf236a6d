"""Trees of drafted tokens while they grow, level by level, and their conversion to drafts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.noise import gumbel_argmax, without_replacement
from lenience.core.transfer import to_device
from lenience.core.types import Draft, Draws
from lenience.drafting.stops import Fixed, Stop

NONE = -1
"""Placeholder where a drafter has no further token."""


@dataclass
class GrowingTree:
    """A row's tree while it grows. Parents come before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    picked_from: list[int] = field(default_factory=list)
    """Index of the requested distribution that each token was picked from."""

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Self:
        """Return a tree of one path, each token picked from a distribution of its own."""
        places = range(len(tokens))
        return cls(list(tokens), [i - 1 for i in places], list(places))

    def add(self, token: int, parent: int, picked_from: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.picked_from.append(picked_from)

    def cut(self, depth: int, eos: frozenset[int]) -> GrowingTree:
        """Return the tree cut at `depth` levels and after each EOS, without `NONE` tokens and their
        descendants."""
        grown = GrowingTree()
        new = dict[int, int]({-1: -1})
        deep = {-1: 0}
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents)):
            ended = token == NONE or (parent >= 0 and self.tokens[parent] in eos)
            if parent in new and deep[parent] < depth and not ended:
                new[i] = len(grown.tokens)
                deep[i] = deep[parent] + 1
                grown.add(token, new[parent], self.picked_from[i])
        return grown


@dataclass(frozen=True)
class TreeLevel:
    """Tokens of one depth after which distributions are requested, the same number F for each
    row."""

    tokens: list[list[int]]
    """[B][F]"""
    parents: list[list[int]]
    """[B][F]: index of each token's parent among all tokens requested before; -1 for the prefix."""
    depth: int
    """Number of drafted tokens before each token."""


Expand = Callable[[TreeLevel | None], Tensor]
"""Function that returns processed logits: [B, F, V] after each token of a level, or [B, 1, V] after
the prefix if the level is None."""


@dataclass(frozen=True)
class PathEnds:
    """Conditions that end the paths of trees."""

    limits: Sequence[int]
    """[B]: maximum number of tokens on a path."""
    eos: frozenset[int]
    stop: Stop = field(default_factory=Fixed)

    def doubted(
        self, logits: Tensor, tokens: Tensor, ctx: Context
    ) -> list[list[list[bool]]]:
        """Return [B][F][k]: True for each of the `tokens` [B, F, k], picked from logits [B, F, V],
        at which the stop condition ends a path."""
        rows, n, k = tokens.shape
        if not self.stop.per_token:
            return [[[False] * k] * n] * rows
        each = logits[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)
        ends: list[list[list[bool]]] = (
            self.stop.ends(each, tokens.flatten(1), ctx).view(rows, n, k).tolist()
        )
        return ends


class OfOneShape:
    """The trees of all rows while they grow in one shape. Each place of the shape has a token or
    `NONE`."""

    def __init__(self, places: list[tuple[int, int]], ends: PathEnds):
        self.places = places
        self.ends = ends
        self.grown = [GrowingTree() for _ in ends.limits]
        self.closed = [{-1: False} for _ in ends.limits]
        """True for each place after which no token may follow."""
        self.inner = {parent for parent, _ in places}
        self.level = [-1]
        self.asked = {-1: 0}
        """Index of each place's distribution among those requested."""

    @property
    def children(self) -> list[int]:
        return [i for i, (parent, _) in enumerate(self.places) if parent in self.level]

    @property
    def most_siblings(self) -> int:
        return 1 + max(self.places[i][1] for i in self.children)

    def ask(self, depth: int) -> TreeLevel | None:
        """Return the level after which distributions are requested; None at depth 0, for the
        prefix."""
        if not depth:
            return None
        tokens = [[max(tree.tokens[i], 0) for i in self.level] for tree in self.grown]
        parents = [self.asked[self.places[i][0]] - 1 for i in self.level]
        self.asked |= {i: len(self.asked) + n for n, i in enumerate(self.level)}
        return TreeLevel(tokens, [parents] * len(tokens), depth - 1)

    def add(
        self,
        picked: Sequence[Sequence[Sequence[int]]],
        doubted: Sequence[Sequence[Sequence[bool]]],
    ) -> None:
        """Add the tokens [B][F][k] picked after the level's places. `doubted` [B][F][k] is True for
        those at which a path ends."""
        children = self.children
        for tree, closed, ranked, ends in zip(self.grown, self.closed, picked, doubted):
            for i in children:
                parent, rank = self.places[i]
                at = self.level.index(parent)
                token = ranked[at][rank]
                is_end = ends[at][rank]
                if closed[parent] or (is_end and not self.ends.stop.proposes_doubted):
                    token = NONE
                closed[i] = token == NONE or is_end
                tree.add(token, parent, self.asked[parent])
        # the same places in every row, so that a row's draws do not depend on other rows
        self.level = [i for i in children if i in self.inner]

    @property
    def go_on(self) -> bool:
        return any(not row[i] for row in self.closed for i in self.level)


@dataclass(frozen=True)
class LevelPicker:
    """A picker of a level's tokens: by draws, or the most probable ones."""

    draws: Draws | None
    ctx: Context
    depth: int
    asked: int
    """Number of distributions requested before this level's."""

    def tokens(self, logs: Tensor, k: int) -> Tensor:
        """Return [B, F, k]: tokens picked from log-probabilities [B, F, V], padded with `NONE`."""
        n = logs.shape[1]
        if not self.draws:
            most = logs.topk(min(k, logs.shape[-1])).indices
            return torch.nn.functional.pad(most, (0, k - most.shape[-1]), value=NONE)
        if self.draws == "with-replacement":
            keys = self.ctx.noise_keys(n * k, "draft", self.asked * k, logs.device)
            return gumbel_argmax(logs.exp()[:, :, None], keys.view(-1, n, k))
        if self.ctx.fresh_noise_per_window:  # one key per token
            keys = self.ctx.noise_keys(n, "draft", self.asked, logs.device)
        else:  # the target's keys, so that its token is likely to be drawn
            keys = self.ctx.noise_keys(1, "token", self.depth, logs.device).expand(
                -1, n
            )
        return without_replacement(logs.exp(), keys, k)


class CandidatePool:
    """All candidate tokens of a row's dynamic tree."""

    def __init__(self, nodes: int, least: float, ends: PathEnds, levels: int):
        self.nodes = nodes
        self.least = least
        self.ends = ends
        self.left = levels
        """Number of levels that may still be added."""
        self.tokens = list[int]()
        self.parents = list[int]()
        self.scores = list[float]()
        """Log-probabilities of the whole paths to the tokens."""
        self.closed = list[bool]()
        """True for each token after which no token may follow."""
        self.from_which = list[int]()
        self.asked = {-1: 0}
        """Index of each token's own distribution among those requested; `from_which` has that of
        the distribution it was picked from."""
        self.num_asked = 1
        self.level = [-1]
        self.newest = range(0)
        self.worth = 0.0
        """Sum of the probabilities of the best paths."""

    def add(
        self,
        values: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
        doubted: Sequence[Sequence[bool]],
    ) -> None:
        """Add the most probable tokens after each token of the level. `values` are their
        log-probabilities, and `doubted` is True for those at which the stop condition ends a
        path."""
        if not self.left:  # requested again because another row continues
            return
        first = len(self.tokens)
        for parent, logs, ids, at_end in zip(self.level, values, tokens, doubted):
            if parent >= 0 and self.closed[parent]:
                continue
            before = self.scores[parent] if parent >= 0 else 0.0
            for log, id, is_doubted in zip(logs, ids, at_end):
                if log == -torch.inf or (
                    is_doubted and not self.ends.stop.proposes_doubted
                ):
                    continue
                self.tokens.append(id)
                self.parents.append(parent)
                self.scores.append(before + log)
                self.closed.append(is_doubted or id in self.ends.eos)
                self.from_which.append(self.asked[parent])
        self.newest = range(first, len(self.tokens))
        self.left = self.left - 1
        if self.least:
            best = heapq.nlargest(self.nodes, self.scores)
            before = self.worth
            self.worth = sum(map(math.exp, best))
            if self.worth - before < self.least:
                self.left = 0
        # requests that only fill up the batch for other rows must not extend this tree
        if not self.goes_on:
            self.left = 0

    @property
    def goes_on(self) -> bool:
        """Return True if descendants of the newest candidates could be among the best."""
        if not self.left:
            return False
        ranked = sorted(self.scores, reverse=True)
        open_ends = [self.scores[i] for i in self.newest if not self.closed[i]]
        full = len(ranked) >= self.nodes
        return bool(open_ends) and not (
            full and max(open_ends) <= ranked[self.nodes - 1]
        )

    def choose(self, k: int) -> tuple[list[int], list[int]]:
        """Return the `k` tokens to continue from, and the index of each one's parent among the
        tokens requested before, as in `TreeLevel`."""
        if not self.tokens:
            self.num_asked += k
            return [0] * k, [-1] * k
        order = sorted(
            self.newest,
            key=lambda i: (not self.closed[i], self.scores[i]),
            reverse=True,
        )
        self.level = (order or [len(self.tokens) - 1])[:k]
        # repeat the last token, so that all rows have k tokens
        missing = k - len(self.level)
        self.asked |= {i: self.num_asked + n for n, i in enumerate(self.level)}
        self.num_asked += k
        again = self.level + self.level[-1:] * missing
        return [self.tokens[i] for i in again], [
            self.asked[self.parents[i]] - 1 for i in again
        ]

    def best(self) -> GrowingTree:
        """Return the tree of the most probable paths. An ancestor is at least as probable, so it is
        included."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))
        kept = sorted(order[: self.nodes])
        new = {-1: -1} | {i: n for n, i in enumerate(kept)}
        return GrowingTree(
            [self.tokens[i] for i in kept],
            [new[self.parents[i]] for i in kept],
            [self.from_which[i] for i in kept],
        )


def as_draft(
    grown: Sequence[GrowingTree],
    device: torch.device,
    logits: Tensor | None = None,
    trees: bool = True,
    draws: Draws | None = None,
) -> Draft:
    """Convert grown trees to windows; shorter windows are padded. `logits` [B, n, V] are the
    requested distributions that tokens were picked from, if any. Without `trees`, all windows are
    chains. `draws` is the way in which a tree's tokens were drawn."""
    width = max(len(tree.tokens) for tree in grown)
    missing = [width - len(tree.tokens) for tree in grown]
    tokens = [tree.tokens + [0] * n for tree, n in zip(grown, missing)]
    lengths = to_device([len(tree.tokens) for tree in grown], device)
    window = to_device(tokens, device).long().view(len(grown), width)
    if logits is not None and width:
        places = [tree.picked_from + [0] * n for tree, n in zip(grown, missing)]
        at = to_device(places, logits.device)
        logits = logits[torch.arange(len(grown), device=at.device)[:, None], at]
    parents = (
        [tree.parents + [-1] * n for tree, n in zip(grown, missing)] if trees else None
    )
    logits = logits if width else None
    return Draft(
        window, lengths, logits, parents=parents, draws=draws if width else None
    )
