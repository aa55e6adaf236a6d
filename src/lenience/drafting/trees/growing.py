"""Trees of drafted tokens while they grow, level by level, and as the windows that come of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.noise import gumbel_argmax, without_replacement
from lenience.core.transfer import to_device
from lenience.core.types import Draft, Draws
from lenience.drafting.stops import Fixed, Stop

NONE = -1
"""Stands for a token where a drafter has no more."""


@dataclass
class GrowingTree:
    """A row's tree, while it grows: parents stand before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    picked_from: list[int] = field(default_factory=list)
    """Index of the requested distribution that each token was picked from."""

    def add(self, token: int, parent: int, picked_from: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.picked_from.append(picked_from)

    def cut(self, depth: int, eos: frozenset[int]) -> GrowingTree:
        """Return the tokens at most `depth` behind the prefix that follow no EOS, without `NONE`
        tokens and their descendants."""
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
    """Tokens of one depth after which distributions are wanted, as many of each row."""

    tokens: list[list[int]]
    """[B][F]"""
    parents: list[list[int]]
    """[B][F]: which of the tokens that were asked about before each one follows, -1 for the
    prefix."""
    depth: int
    """Number of tokens that stand before each."""


Expand = Callable[[TreeLevel | None], Tensor]
"""[B, F, V]: processed logits after each of a level's tokens; [B, 1, V] after the prefix, where
there is no level."""


@dataclass(frozen=True)
class PathEnds:
    """Where trees end."""

    limits: Sequence[int]
    """[B]: how many tokens may follow one another."""
    eos: frozenset[int]
    stop: Stop = field(default_factory=Fixed)

    def doubted(
        self, logits: Tensor, tokens: Tensor, ctx: Context
    ) -> list[list[list[bool]]]:
        """Return [B][F][k]: which of the tokens [B, F, k], picked from logits [B, F, V], the stop
        condition ends a path at."""
        rows, n, k = tokens.shape
        if not self.stop.per_token:
            return [[[False] * k] * n] * rows
        each = logits[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)
        ends: list[list[list[bool]]] = (
            self.stop.ends(each, tokens.flatten(1), ctx).view(rows, n, k).tolist()
        )
        return ends


class OfOneShape:
    """All rows' trees, each with a token in every place of a shape, or `NONE`, while they grow."""

    def __init__(self, places: list[tuple[int, int]], ends: PathEnds):
        self.places = places
        self.ends = ends
        self.grown = [GrowingTree() for _ in ends.limits]
        self.closed = [{-1: False} for _ in ends.limits]
        """Positions after which nothing may follow."""
        self.inner = {parent for parent, _ in places}
        self.level = [-1]
        self.asked = {-1: 0}
        """Index of each position's distribution among those requested."""

    @property
    def children(self) -> list[int]:
        return [i for i, (parent, _) in enumerate(self.places) if parent in self.level]

    @property
    def most_siblings(self) -> int:
        return 1 + max(self.places[i][1] for i in self.children)

    def ask(self, depth: int) -> TreeLevel | None:
        """Return the places that distributions are wanted after; none before the first."""
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
        """Put the tokens [B][F][k] that were picked after the level's places in theirs; `doubted`
        are those at which a path ends."""
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
        # the same places of every row, so that none's draws depend on the others
        self.level = [i for i in children if i in self.inner]

    @property
    def go_on(self) -> bool:
        return any(not row[i] for row in self.closed for i in self.level)


@dataclass(frozen=True)
class LevelPicker:
    """How a level's tokens are picked."""

    draws: Draws | None
    ctx: Context
    depth: int
    asked: int
    """Number of distributions requested before this level's."""

    def tokens(self, logs: Tensor, k: int) -> Tensor:
        """Return [B, F, k] from log-probabilities [B, F, V], `NONE` where there are no more."""
        n = logs.shape[1]
        if not self.draws:
            most = logs.topk(min(k, logs.shape[-1])).indices
            return torch.nn.functional.pad(most, (0, k - most.shape[-1]), value=NONE)
        if self.draws == "with-replacement":
            keys = self.ctx.noise_keys(n * k, "draft", self.asked * k, logs.device)
            return gumbel_argmax(logs.exp()[:, :, None], keys.view(-1, n, k))
        if self.ctx.fresh_noise_per_window:  # each of its own
            keys = self.ctx.noise_keys(n, "draft", self.asked, logs.device)
        else:  # as the target draws there, so that its token is likely to be among them
            keys = self.ctx.noise_keys(1, "token", self.depth, logs.device).expand(
                -1, n
            )
        return without_replacement(logs.exp(), keys, k)


class CandidatePool:
    """All tokens that a row's dynamic tree has met."""

    def __init__(self, nodes: int, least: float, ends: PathEnds, levels: int):
        self.nodes = nodes
        self.least = least
        self.ends = ends
        self.left = levels
        """Number of levels that may still be added."""
        self.tokens = list[int]()
        self.parents = list[int]()
        self.scores = list[float]()
        """The scores are the log-probabilities of whole paths."""
        self.closed = list[bool]()
        """Tokens after which nothing may follow."""
        self.from_which = list[int]()
        self.asked = {-1: 0}
        """Index of the distribution that each was picked from, and of its own."""
        self.num_asked = 1
        self.level = [-1]
        self.newest = range(0)
        self.worth = 0.0
        """The sum of the best paths' probabilities."""

    def add(
        self,
        values: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
        doubted: Sequence[Sequence[bool]],
    ) -> None:
        """Take the most probable tokens after each of the level's, their log-probabilities, and
        whether the stop condition ends a path at them."""
        if not self.left:  # asked about again beside a row that goes on
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
        # what is asked about beside a row that goes on is no continuation of this one
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
        """Return the `k` tokens to continue from, and the index of the candidate that each
        follows."""
        if not self.tokens:
            self.num_asked += k
            return [0] * k, [-1] * k
        order = sorted(
            self.newest,
            key=lambda i: (not self.closed[i], self.scores[i]),
            reverse=True,
        )
        self.level = (order or [len(self.tokens) - 1])[:k]
        # asked about again, so that rows stand side by side
        missing = k - len(self.level)
        self.asked |= {i: self.num_asked + n for n, i in enumerate(self.level)}
        self.num_asked += k
        again = self.level + self.level[-1:] * missing
        return [self.tokens[i] for i in again], [
            self.asked[self.parents[i]] - 1 for i in again
        ]

    def best(self) -> GrowingTree:
        """Return those whose paths are likeliest; an ancestor is at least as likely."""
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
    """Return the grown trees as windows, the shorter ones padded. `logits` [B, n, V] are the
    distributions that the tokens were picked from, if any. Without `trees` all windows are chains.
    `draws` names the way in which a tree's tokens were drawn."""
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
