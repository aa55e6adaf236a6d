"""Shapes of windows: a chain, where one token follows another, or a tree of tokens of which any
path may be kept. Like a rule, a shape is data: its fields are its spec."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast, get_args

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.noise import gumbel_argmax, without_replacement
from lenience.core.transfer import to_device
from lenience.core.types import Draft, Draws
from lenience.drafting.planning import BUILT_IN, best_shape, load_acceptance
from lenience.drafting.stops import Fixed, Stop

LARGEST = 1024
"""How many tokens a tree may have."""
SIZES = (4, 8, 16, 32, 64)
"""Those that the fastest one is picked from."""
NONE = -1
"""Stands for a token where a drafter has no more."""


@dataclass
class Grown:
    """A row's tree, while it grows: parents stand before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    picked_from: list[int] = field(default_factory=list)
    """Which of the distributions that were asked for each token is picked from."""

    def add(self, token: int, parent: int, picked_from: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.picked_from.append(picked_from)

    def cut(self, depth: int, eos: frozenset[int]) -> Grown:
        """What stands at most `depth` tokens behind the prefix, and after no EOS; and no token that
        is `NONE`, nor what follows it."""
        grown, new, deep = Grown(), dict[int, int]({-1: -1}), {-1: 0}
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents)):
            ended = token == NONE or (parent >= 0 and self.tokens[parent] in eos)
            if parent in new and deep[parent] < depth and not ended:
                new[i], deep[i] = len(grown.tokens), deep[parent] + 1
                grown.add(token, new[parent], self.picked_from[i])
        return grown


@dataclass(frozen=True)
class Level:
    """Tokens of one depth after which distributions are wanted, as many of each row."""

    tokens: list[list[int]]
    """[B][F]"""
    parents: list[list[int]]
    """[B][F]: which of the tokens that were asked about before each one follows, -1 for the
    prefix."""
    depth: int
    """How many tokens stand before each."""


Expand = Callable[[Level | None], Tensor]
"""[B, F, V]: processed logits after each of a level's tokens; [B, 1, V] after the prefix, where
there is no level."""


@dataclass(frozen=True)
class Ends:
    """Where trees end."""

    limits: Sequence[int]
    """[B]: how many tokens may follow one another."""
    eos: frozenset[int]
    stop: Stop = field(default_factory=Fixed)

    def doubted(self, logits: Tensor, tokens: Tensor, ctx: Context) -> list[list[list[bool]]]:
        """[B][F][k]: which of the tokens [B, F, k], picked from logits [B, F, V], the stop
        condition ends a path at."""
        rows, n, k = tokens.shape
        if not self.stop.per_token:
            return [[[False] * k] * n] * rows
        each = logits[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)
        ends: list[list[list[bool]]] = (
            self.stop.ends(each, tokens.flatten(1), ctx).view(rows, n, k).tolist()
        )
        return ends


@dataclass(frozen=True)
class Tree:
    """One named shape."""

    name: ClassVar[str]
    is_chain: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """How many tokens it has at most."""
        raise NotImplementedError

    def columns(self, window: int) -> int:
        """How many tokens are read at most, by the target or by what drafts."""
        return max(window, self.size)

    def choices(self) -> list[Tree]:
        """The shapes that the fastest one is picked from; none where one is given."""
        return []

    @property
    def draws(self) -> Draws | None:
        """How its tokens are drawn when sampling; None where they are chosen."""
        return None

    def drawn(self, ctx: Context) -> Draws | None:
        """The same, None when greedy."""
        return None if ctx.greedy else self.draws

    def log_probs(self, logits: Tensor, ctx: Context) -> Tensor:
        """[…, V] processed logits → the log-probabilities that it grows by."""
        if self.drawn(ctx):
            return ctx.probs(logits).log()
        return ctx.log_probs(logits)

    def grow(self, expand: Expand, ctx: Context, ends: Ends) -> list[Grown]:
        """[B]: trees, by asking for distributions after the prefix and then level by level, as long
        as any row's goes on."""
        raise NotImplementedError

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Chain(Tree):
    """Each token follows the one before."""

    name = "chain"
    is_chain = True

    @property
    def size(self) -> int:
        return 0


@dataclass(frozen=True)
class Ranked(Tree):
    """A tree of one shape after every prefix: each token has a place among its siblings. When
    sampling, with `draw`, they are drawn from what the drafter samples from, one after the other:
    with-replacement (SpecInfer, Miao 2023, section 4.3) or without-replacement (Sequoia, Chen 2024,
    section 3.2). Else, and when greedy, they are the most probable ones, the likeliest first."""

    draw: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.draw not in (None, *get_args(Draws)):
            raise InputError(
                f"{self.name}'s draw {self.draw}: must be one of {', '.join(get_args(Draws))}"
            )

    def places(self) -> list[tuple[int, int]]:
        """For each token, which one it follows and how many of its siblings stand before it; level
        by level."""
        raise NotImplementedError

    @property
    def draws(self) -> Draws | None:
        return cast(Draws | None, self.draw)

    def grow(self, expand: Expand, ctx: Context, ends: Ends) -> list[Grown]:
        trees = _OfOneShape(self.places(), ends)
        for depth in range(max(ends.limits)):
            first = len(trees.asked) if depth else 0
            logits = expand(trees.ask(depth))
            picking = _Picking(self.drawn(ctx), ctx, depth, first)
            picked = picking.tokens(self.log_probs(logits, ctx), trees.most_siblings)
            trees.add(picked.tolist(), ends.doubted(logits, picked.clamp(min=0), ctx))
            if not trees.go_on:
                break
        return [tree.cut(limit, ends.eos) for tree, limit in zip(trees.grown, ends.limits)]


class _OfOneShape:
    """All rows' trees, each with a token in every place of a shape, or `NONE`, while they grow."""

    def __init__(self, places: list[tuple[int, int]], ends: Ends):
        self.places, self.ends = places, ends
        self.grown = [Grown() for _ in ends.limits]
        self.closed = [{-1: False} for _ in ends.limits]
        """After which places nothing may follow."""
        self.inner, self.level = {parent for parent, _ in places}, [-1]
        self.asked = {-1: 0}
        """Where each place's distribution stands among those asked for."""

    @property
    def children(self) -> list[int]:
        return [i for i, (parent, _) in enumerate(self.places) if parent in self.level]

    @property
    def most_siblings(self) -> int:
        return 1 + max(self.places[i][1] for i in self.children)

    def ask(self, depth: int) -> Level | None:
        """The places that distributions are wanted after; none before the first."""
        if not depth:
            return None
        tokens = [[max(tree.tokens[i], 0) for i in self.level] for tree in self.grown]
        parents = [self.asked[self.places[i][0]] - 1 for i in self.level]
        self.asked |= {i: len(self.asked) + n for n, i in enumerate(self.level)}
        return Level(tokens, [parents] * len(tokens), depth - 1)

    def add(
        self, picked: Sequence[Sequence[Sequence[int]]], doubted: Sequence[Sequence[Sequence[bool]]]
    ) -> None:
        """Put the tokens [B][F][k] that were picked after the level's places in theirs; `doubted`
        are those at which a path ends."""
        children = self.children
        for tree, closed, ranked, ends in zip(self.grown, self.closed, picked, doubted):
            for i in children:
                parent, rank = self.places[i]
                at = self.level.index(parent)
                token, is_end = ranked[at][rank], ends[at][rank]
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
class _Picking:
    """How a level's tokens are picked."""

    draws: Draws | None
    ctx: Context
    depth: int
    asked: int
    """How many distributions have been asked for before this level's."""

    def tokens(self, logs: Tensor, k: int) -> Tensor:
        """[B, F, k] from log-probabilities [B, F, V], `NONE` where there are no more."""
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
            keys = self.ctx.noise_keys(1, "token", self.depth, logs.device).expand(-1, n)
        return without_replacement(logs.exp(), keys, k)


@dataclass(frozen=True)
class Cartesian(Ranked):
    """After each token of a level the same number of tokens: `cartesian:4,3,2` has 4 tokens after
    the prefix, 3 after each of these, and 2 after each of those (Medusa, Cai 2024, section
    2.1.2)."""

    widths: spec.NUMBERS
    name = "cartesian"

    def __post_init__(self) -> None:
        super().__post_init__()
        size, level = 0, 1
        for width in self.widths:
            if width < 1:
                raise InputError(f"cartesian's width {width}: must be 1 or more")
            level *= width
            size += level
            _check_size("cartesian", size)

    @property
    def size(self) -> int:
        return len(self.places())

    def places(self) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        level = [-1]
        for width in self.widths:
            first = len(places)
            places += [(parent, rank) for parent in level for rank in range(width)]
            level = [*range(first, len(places))]
        return places


@dataclass(frozen=True)
class Shape(Ranked):
    """A tree by how many children the prefix has, and then each token, level by level: `shape:2,1`
    has two tokens after the prefix and one after the first of them; what is left out has none."""

    children: spec.NUMBERS
    name = "shape"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.children) < 0:
            raise InputError(f"shape's {min(self.children)} children: must be 0 or more")
        size = sum(self.children)
        _check_size("shape", size)
        if not size or len(self.children) > size + 1:
            raise InputError(
                f"{self}: says the children of {len(self.children) - 1} tokens, and has {size}; "
                "leave out those of tokens that there are not"
            )
        for i, parent in enumerate(self.parents):
            if parent >= i:
                raise InputError(f"{self}: token {i + 1} would follow itself; name a tree")

    @property
    def parents(self) -> list[int]:
        return [i - 1 for i, n in enumerate(self.children) for _ in range(n)]

    @property
    def size(self) -> int:
        return sum(self.children)

    def places(self) -> list[tuple[int, int]]:
        ranks = [rank for n in self.children for rank in range(n)]
        return [*zip(self.parents, ranks)]


@dataclass(frozen=True)
class Planned(Tree):
    """The tree of so many tokens of which the target should keep the most, by how often it says
    what a drafter does (Sequoia, Chen 2024, section 3.1), as `lenience fit RUN --tree` measures in
    RUN/tree.json; without a path, of the built-in pair's draft. It is a `Shape`."""

    nodes: int
    path: str = str(BUILT_IN)
    draw: str | None = field(default=None, kw_only=True)
    name = "planned"

    def __post_init__(self) -> None:
        _check_size("planned", self.nodes)
        if self.nodes < 1:
            raise InputError(f"planned's nodes {self.nodes}: must be 1 or more")

    def shape(self) -> Shape:
        counts, _ = best_shape(load_acceptance(self.path).shares, self.nodes)
        while counts[-1] == 0:
            counts.pop()
        return Shape(tuple(counts), draw=self.draw)


@dataclass(frozen=True)
class Dynamic(Tree):
    """The `nodes` tokens whose paths the drafter thinks likeliest: level by level the `top`
    likeliest tokens are gone on from, each to its `top` most probable ones, and the likeliest of
    all that were met are kept (EAGLE-2, Li 2024, section 4). It goes as deep as `window`, or
    `depth`, and ends where nothing deeper could be among them."""

    nodes: int
    depth: int | None = None
    top: int = 10
    temperature: float = 1.0
    """Of the distributions that paths are ranked by: above 1 for a drafter that is surer than it is
    right."""
    least: float = 0.0
    """It goes no deeper after a level by which the sum of its paths' probabilities, as many tokens
    as should be kept of it, has grown by less (OPT-Tree, Wang 2024, section 3.2)."""
    name = "dynamic"

    def __post_init__(self) -> None:
        _check_size("dynamic", self.nodes)
        for what, number in (("nodes", self.nodes), ("top", self.top), ("depth", self.depth)):
            if number is not None and number < 1:
                raise InputError(f"dynamic's {what} {number}: must be 1 or more")
        if not 0 < self.temperature < math.inf:
            raise InputError(f"dynamic's temperature {self.temperature}: must be above 0")
        if not 0 <= self.least < math.inf:
            raise InputError(f"dynamic's least {self.least}: must be 0 or more")

    def log_probs(self, logits: Tensor, ctx: Context) -> Tensor:
        return super().log_probs(logits / self.temperature, ctx)

    @property
    def size(self) -> int:
        return self.nodes

    def columns(self, window: int) -> int:
        return max(self.nodes, min(self.top, self.nodes) * min(window, self.depth or window))

    def grow(self, expand: Expand, ctx: Context, ends: Ends) -> list[Grown]:
        pools, logits = [_Pool(self, ends, limit) for limit in ends.limits], expand(None)
        for level in range(max(ends.limits)):
            k = min(self.top, self.nodes, logits.shape[-1])
            likeliest = self.log_probs(logits, ctx).topk(k)
            doubted = ends.doubted(logits, likeliest.indices, ctx)
            found = zip(likeliest.values.tolist(), likeliest.indices.tolist(), doubted)
            for pool, (values, tokens, is_doubted) in zip(pools, found):
                pool.add(values, tokens, is_doubted)
            if not any(pool.goes_on for pool in pools):
                break
            chosen = [pool.choose(k) for pool in pools]
            tokens_of, parents_of = ([pair[i] for pair in chosen] for i in range(2))
            logits = expand(Level(tokens_of, parents_of, level))
        return [pool.best() for pool in pools]


@dataclass(frozen=True)
class Auto(Tree):
    """The fastest here of a chain and dynamic trees of several sizes or, with a `path`, planned
    ones (Sequoia, Chen 2024, section 3.3: a size by what passes cost): it is picked with the window
    "auto"."""

    path: str | None = None
    name = "auto"

    @property
    def size(self) -> int:
        return max(SIZES)

    def choices(self) -> list[Tree]:
        path = self.path
        trees = [Dynamic(n) if path is None else Planned(n, path).shape() for n in SIZES]
        return [Chain(), *trees]


class _Pool:
    """All tokens that a row's dynamic tree has met."""

    def __init__(self, tree: Dynamic, ends: Ends, limit: int):
        self.tree, self.ends, self.left = tree, ends, min(limit, tree.depth or limit)
        """The last: how many levels may still be added."""
        self.tokens, self.parents, self.scores = list[int](), list[int](), list[float]()
        """The scores are the log-probabilities of whole paths."""
        self.closed = list[bool]()
        """Which tokens nothing may follow."""
        self.from_which, self.asked = list[int](), {-1: 0}
        """Where each was picked from, and where each's own distribution stands."""
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
                if log == -torch.inf or (is_doubted and not self.ends.stop.proposes_doubted):
                    continue
                self.tokens.append(id)
                self.parents.append(parent)
                self.scores.append(before + log)
                self.closed.append(is_doubted or id in self.ends.eos)
                self.from_which.append(self.asked[parent])
        self.newest, self.left = range(first, len(self.tokens)), self.left - 1
        if self.tree.least:
            best = heapq.nlargest(self.tree.nodes, self.scores)
            before, self.worth = self.worth, sum(map(math.exp, best))
            if self.worth - before < self.tree.least:
                self.left = 0

    @property
    def goes_on(self) -> bool:
        """Whether what follows the newest could be among the best, and is looked for."""
        if not self.left:
            return False
        ranked = sorted(self.scores, reverse=True)
        open_ends = [self.scores[i] for i in self.newest if not self.closed[i]]
        full = len(ranked) >= self.tree.nodes
        return bool(open_ends) and not (full and max(open_ends) <= ranked[self.tree.nodes - 1])

    def choose(self, k: int) -> tuple[list[int], list[int]]:
        """The tokens to go on from, always `k`, and which of those asked about they follow."""
        if not self.tokens:
            self.num_asked += k
            return [0] * k, [-1] * k
        order = sorted(
            self.newest, key=lambda i: (not self.closed[i], self.scores[i]), reverse=True
        )
        self.level = (order or [len(self.tokens) - 1])[:k]
        missing = k - len(self.level)  # asked about again, so that rows stand side by side
        self.asked |= {i: self.num_asked + n for n, i in enumerate(self.level)}
        self.num_asked += k
        again = self.level + self.level[-1:] * missing
        return [self.tokens[i] for i in again], [self.asked[self.parents[i]] - 1 for i in again]

    def best(self) -> Grown:
        """Those whose paths are likeliest; an ancestor is at least as likely."""
        order = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))
        kept = sorted(order[: self.tree.nodes])
        new = {-1: -1} | {i: n for n, i in enumerate(kept)}
        return Grown(
            [self.tokens[i] for i in kept],
            [new[self.parents[i]] for i in kept],
            [self.from_which[i] for i in kept],
        )


def as_draft(
    grown: Sequence[Grown],
    device: torch.device,
    logits: Tensor | None = None,
    trees: bool = True,
    draws: Draws | None = None,
) -> Draft:
    """What is grown for each row as a window, the shorter ones padded; `logits` [B, n, V] are the
    distributions that the tokens were picked from, where there are any. Without `trees` all are
    chains. `draws` says how a tree's tokens were drawn."""
    width = max(len(one.tokens) for one in grown)
    missing = [width - len(one.tokens) for one in grown]
    tokens = [one.tokens + [0] * n for one, n in zip(grown, missing)]
    lengths = to_device([len(one.tokens) for one in grown], device)
    window = to_device(tokens, device).long().view(len(grown), width)
    if logits is not None and width:
        places = [one.picked_from + [0] * n for one, n in zip(grown, missing)]
        at = to_device(places, logits.device)
        logits = logits[torch.arange(len(grown), device=at.device)[:, None], at]
    parents = [one.parents + [-1] * n for one, n in zip(grown, missing)] if trees else None
    logits = logits if width else None
    return Draft(window, lengths, logits, parents=parents, draws=draws if width else None)


def _check_size(name: str, size: int) -> None:
    if size > LARGEST:
        raise InputError(f"{name}: a tree of {size} tokens or more; at most {LARGEST} are read")


TREES: dict[str, type[Tree]] = {
    tree.name: tree for tree in (Chain, Auto, Cartesian, Dynamic, Planned, Shape)
}


def parse_tree(tree: str | Tree) -> Tree:
    """A shape from its spec, such as "dynamic:16", or from one that names where it is planned; a
    Tree is returned as it is. Raises InputError that names what is wrong with the spec."""
    parsed = spec.parse(tree, "tree", "tree", TREES, Tree)
    return parsed.shape() if isinstance(parsed, Planned) else parsed
