"""Proposals of several drafters merged into one tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_, or_
from typing import Self

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter, TrainedPart
from lenience.core.types import Draft, Reading, Verdict
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.drafting.trees.shapes import Tree
from lenience.models.lm import LM


@dataclass(frozen=True)
class Merged(DrafterSpec):
    """Draft with several drafters and merge their proposals into one tree: `a|b` (SpecInfer, Miao
    2023, section 4.1: merge-based token trees). Tokens of the tree count as chosen, not drawn."""

    parts: tuple[DrafterSpec, ...]
    name = "merged"
    branches = True

    def __post_init__(self) -> None:
        for part in self.parts:
            if list(map(str, self.parts)).count(str(part)) > 1:
                raise InputError(f"{part} is named twice; combine different drafters")

    @cached_property
    def needs(self) -> Sources:
        return reduce(or_, [part.needs for part in self.parts])

    @cached_property
    def offers(self) -> Parts:
        return Parts.TREES & reduce(and_, [part.offers for part in self.parts])

    @property
    def members(self) -> tuple[DrafterSpec, ...]:
        return self.parts

    def check_tree(self, tree: Tree) -> None:
        if tree.draws:
            raise InputError(
                f"tree {tree}: it draws from one drafter, and {self} combines several"
            )
        for part in self.parts:
            part.check_tree(tree)

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return tuple(head for part in self.parts for head in part.fitted)

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, parts=tuple(part.relocated(path) for part in self.parts))

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        for part in self.parts:
            part.check(target, fingerprints)
        wanted = {layers for part in self.parts if (layers := part.features(target))}
        if len(wanted) > 1:
            raise InputError(
                f"drafter {self}: its parts read different layers of the target; "
                "combine other drafters"
            )

    def features(self, target: LM) -> tuple[int | None, ...]:
        return next(
            (layers for part in self.parts if (layers := part.features(target))), ()
        )

    def models(self, setup: DrafterSetup) -> list[LM]:
        setup = replace(setup, alone=False)
        return [lm for part in self.parts for lm in part.models(setup)]

    def build(self, setup: DrafterSetup) -> Drafter:
        setup = replace(setup, alone=False)
        return _MergedDrafter([part.build(setup) for part in self.parts], setup.target)

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))


class _MergedDrafter(Drafter):
    def __init__(self, parts: Sequence[Drafter], target: LM):
        self.parts = parts
        self.target = target

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        drafts = [part.propose(ctx, room) for part in self.parts]
        windows = [(draft.tokens.tolist(), draft.lengths.tolist()) for draft in drafts]
        trees = [_Union() for _ in ctx.rows]
        for draft, (tokens, lengths) in zip(drafts, windows):
            for b, tree in enumerate(trees):
                chain = range(-1, lengths[b] - 1)
                parents = chain if draft.parents is None else draft.parents[b]
                tree.add(tokens[b][: lengths[b]], parents[: lengths[b]])
        merged = as_draft([tree.grown for tree in trees], self.target.device)
        read = [draft.tokens_read or [0] * len(trees) for draft in drafts]
        return replace(
            merged,
            passes=sum(draft.passes for draft in drafts),
            tokens_read=list(map(sum, zip(*read))),
        )

    def move(self, source: int, to: int) -> None:
        for part in self.parts:
            part.move(source, to)

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        for part in self.parts:
            part.observe(ctx, reading, verdicts)


class _Union:
    """A union of one row's trees."""

    def __init__(self) -> None:
        self.grown = GrowingTree()
        self._known: dict[tuple[int, int], int] = {}

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        places = {-1: -1}
        for i, (token, parent) in enumerate(zip(tokens, parents)):
            key = places[parent], token
            if key not in self._known:
                self._known[key] = len(self.grown.tokens)
                self.grown.add(token, key[0], 0)
            places[i] = self._known[key]
