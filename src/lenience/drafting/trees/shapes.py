"""Shapes of windows: chains and trees.

A shape is data: its fields are its spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, cast, get_args

from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.types import Draws
from lenience.drafting.trees.growing import (
    CandidatePool,
    Expand,
    GrowingTree,
    LevelPicker,
    OfOneShape,
    PathEnds,
    TreeLevel,
)
from lenience.drafting.trees.planning import BUILT_IN_TREE, best_shape, load_acceptance

LARGEST = 1024
"""Maximum number of tokens in a tree."""
SIZES = (4, 8, 16, 32, 64)
"""Sizes of trees among which `auto` chooses."""


@dataclass(frozen=True)
class Tree:
    """A named shape of drafts."""

    name: ClassVar[str]
    is_chain: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Return the maximum number of tokens in the tree; 0 for a chain."""
        raise NotImplementedError

    def columns(self, window: int) -> int:
        """Return the maximum number of tokens that any model reads for a window."""
        return max(window, self.size)

    def choices(self) -> list[Tree]:
        """Return the shapes among which to choose the fastest; empty for a given shape."""
        return []

    @property
    def draws(self) -> Draws | None:
        """Return the way in which tokens are drawn when sampling; None if they are chosen."""
        return None

    def drawn(self, ctx: Context) -> Draws | None:
        """Return the way in which tokens are drawn in this context; None when greedy or if they are
        chosen."""
        return None if ctx.greedy else self.draws

    def log_probs(self, logits: Tensor, ctx: Context) -> Tensor:
        """Return the log-probabilities […, V] that rank the tree's tokens, from processed logits
        […, V]."""
        if self.drawn(ctx):
            return ctx.probs(logits).log()
        return ctx.log_probs(logits)

    def grow(self, expand: Expand, ctx: Context, ends: PathEnds) -> list[GrowingTree]:
        """Return [B] trees. Distributions are requested after the prefix and then level by level,
        as long as any row continues."""
        raise NotImplementedError

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Chain(Tree):
    """Draft a chain: each token follows the one before."""

    name = "chain"
    is_chain = True

    @property
    def size(self) -> int:
        return 0


@dataclass(frozen=True)
class Ranked(Tree):
    """A tree of one shape after every prefix, in which each token has a rank among its siblings.

    When sampling, `draw` draws siblings from the drafter's distribution one after another:
    with-replacement (SpecInfer, Miao 2023, section 4.3) or without-replacement (Sequoia, Chen 2024,
    section 3.2). Otherwise siblings are the most probable tokens, in descending order.
    """

    draw: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.draw not in (None, *get_args(Draws)):
            raise InputError(
                f"{self.name}'s draw {self.draw}: must be one of "
                f"{', '.join(get_args(Draws))}"
            )

    def places(self) -> list[tuple[int, int]]:
        """Return, for each token, its parent and the number of siblings before it, level by
        level."""
        raise NotImplementedError

    @property
    def draws(self) -> Draws | None:
        return cast(Draws | None, self.draw)

    def grow(self, expand: Expand, ctx: Context, ends: PathEnds) -> list[GrowingTree]:
        trees = OfOneShape(self.places(), ends)
        for depth in range(max(ends.limits)):
            first = len(trees.asked) if depth else 0
            logits = expand(trees.ask(depth))
            picking = LevelPicker(self.drawn(ctx), ctx, depth, first)
            picked = picking.tokens(self.log_probs(logits, ctx), trees.most_siblings)
            trees.add(picked.tolist(), ends.doubted(logits, picked.clamp(min=0), ctx))
            if not trees.go_on:
                break
        found = list[GrowingTree]()
        for tree, limit in zip(trees.grown, ends.limits):
            found.append(tree.cut(limit, ends.eos))
        return found


@dataclass(frozen=True)
class Cartesian(Ranked):
    """Draft a tree with a fixed number of children per level (Medusa, Cai 2024, section 2.1.2).
    `cartesian:4,3,2` has 4 tokens after the prefix, 3 children of each of them, and 2 children of
    each child."""

    widths: spec.NUMBERS
    name = "cartesian"

    def __post_init__(self) -> None:
        super().__post_init__()
        size = 0
        level = 1
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
    """Draft a tree given by the number of children of the prefix and of each token, level by level.
    `shape:2,1` has two tokens after the prefix and one after the first of them. Tokens without a
    number have no children."""

    children: spec.NUMBERS
    name = "shape"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.children) < 0:
            raise InputError(
                f"shape's {min(self.children)} children: must be 0 or more"
            )
        size = sum(self.children)
        _check_size("shape", size)
        if not size or len(self.children) > size + 1:
            raise InputError(
                f"{self}: lists the children of {len(self.children) - 1} tokens, and "
                f"has {size}; "
                "leave out those of missing tokens"
            )
        for i, parent in enumerate(self.parents):
            if parent >= i:
                raise InputError(
                    f"{self}: token {i + 1} would follow itself; name a tree"
                )

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
    """Draft the tree of `nodes` tokens with the highest expected number of accepted tokens, from
    measured acceptance rates (Sequoia, Chen 2024, section 3.1). `lenience fit RUN --tree` writes
    the rates to RUN/tree.json. Default: the rates of the built-in pair's draft. The tree becomes a
    `Shape`."""

    nodes: int
    path: str = str(BUILT_IN_TREE)
    draw: str | None = field(default=None, kw_only=True)
    name = "planned"

    def __post_init__(self) -> None:
        _check_size("planned", self.nodes)
        if self.nodes < 1:
            raise InputError(f"planned's nodes {self.nodes}: must be 1 or more")

    def shape(self, depth: int | None = None) -> Shape:
        """Return the best shape of at most `depth` levels, or of any depth if None."""
        counts, _ = best_shape(load_acceptance(self.path).shares[:depth], self.nodes)
        while counts[-1] == 0:
            counts.pop()
        return Shape(tuple(counts), draw=self.draw)


@dataclass(frozen=True)
class Dynamic(Tree):
    """Draft the `nodes` tokens with the most probable paths (EAGLE-2, Li 2024, section 4). Each
    level extends the `top` most probable paths by their `top` most probable tokens, and the best of
    all tokens are kept. The depth is at most `window`, and at most `depth` if given. Growing ends
    when no deeper token could be among the best."""

    nodes: int
    depth: int | None = None
    top: int = 10
    temperature: float = 1.0
    """Temperature of the distributions that rank paths: above 1 for an overconfident drafter."""
    least: float = 0.0
    """Minimum gain of a level: the tree grows no deeper after a level that adds less to the sum of
    its best paths' probabilities (OPT-Tree, Wang 2024, section 3.2)."""
    name = "dynamic"

    def __post_init__(self) -> None:
        _check_size("dynamic", self.nodes)
        for what, number in (
            ("nodes", self.nodes),
            ("top", self.top),
            ("depth", self.depth),
        ):
            if number is not None and number < 1:
                raise InputError(f"dynamic's {what} {number}: must be 1 or more")
        if not 0 < self.temperature < math.inf:
            raise InputError(
                f"dynamic's temperature {self.temperature}: must be above 0"
            )
        if not 0 <= self.least < math.inf:
            raise InputError(f"dynamic's least {self.least}: must be 0 or more")

    def log_probs(self, logits: Tensor, ctx: Context) -> Tensor:
        return super().log_probs(logits / self.temperature, ctx)

    @property
    def size(self) -> int:
        return self.nodes

    def columns(self, window: int) -> int:
        return max(
            self.nodes, min(self.top, self.nodes) * min(window, self.depth or window)
        )

    def grow(self, expand: Expand, ctx: Context, ends: PathEnds) -> list[GrowingTree]:
        levels = [min(limit, self.depth or limit) for limit in ends.limits]
        pools = [CandidatePool(self.nodes, self.least, ends, most) for most in levels]
        logits = expand(None)
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
            logits = expand(TreeLevel(tokens_of, parents_of, level))
        return [pool.best() for pool in pools]


@dataclass(frozen=True)
class Auto(Tree):
    """Pick the fastest of a chain and trees of several sizes by measuring, together with window
    "auto". The trees are dynamic or, with a `path`, planned (Sequoia, Chen 2024, section 3.3: the
    size follows from the cost of passes)."""

    path: str | None = None
    name = "auto"

    @property
    def size(self) -> int:
        return max(SIZES)

    def choices(self) -> list[Tree]:
        path = self.path
        trees = []
        for n in SIZES:
            trees.append(Dynamic(n) if path is None else Planned(n, path).shape())
        return [Chain(), *trees]


def _check_size(name: str, size: int) -> None:
    if size > LARGEST:
        raise InputError(
            f"{name}: a tree of {size} tokens or more; at most {LARGEST} are read"
        )
