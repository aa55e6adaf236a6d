"""Drafting from logits of all tokens of a window, which are known before any is proposed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup
from lenience.drafting.trees.growing import GrowingTree, PathEnds, TreeLevel, as_draft


class ParallelDrafter(Drafter):
    """A drafter whose logits for the next tokens are all known before the first is proposed. A
    subclass gives the logits; windows, trees and their ends are made here."""

    def __init__(self, setup: DrafterSetup, longest: int):
        self.target = setup.target
        self.stop = setup.stop
        self.tree = setup.tree
        self.longest = longest
        """Maximum number of tokens of a proposed path."""

    def ready(self, ctx: Context) -> list[bool]:
        """Return [B]: True for each row that can be drafted for."""
        raise NotImplementedError

    def logits(self, ctx: Context, ready: Sequence[bool], width: int) -> Tensor:
        """Return the logits [B, width, V] of the next tokens; those of rows that are not ready may
        be anything."""
        raise NotImplementedError

    @torch.inference_mode()
    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        ready = self.ready(ctx)
        limits = []
        for row, can, left in zip(ctx.rows, ready, room):
            wanted = self.stop.max_tokens(row, ctx.window)
            limits.append(max(0, min(wanted, self.longest, left - 1)) if can else 0)
        width = max(limits)
        if not width:
            nothing = [GrowingTree() for _ in ctx.rows]
            return as_draft(nothing, self.target.device, trees=not self.tree.is_chain)
        logits = self.logits(ctx, ready, width)
        if self.tree.is_chain:
            return self._chain(logits, limits, ctx)
        return self._tree(logits, limits, ctx)

    def _chain(self, logits: Tensor, limits: list[int], ctx: Context) -> Draft:
        drawn = ctx.draw(logits)
        n = range(logits.shape[1])
        ends = PathEnds(limits, self.target.eos_ids, self.stop)
        doubted = ends.doubted(logits, drawn[..., None], ctx)
        grown = []
        for row, limit, each in zip(drawn.tolist(), limits, doubted):
            end = next((i for i, (is_end,) in enumerate(each) if is_end), len(row))
            limit = min(limit, end + self.stop.proposes_doubted)
            chain = GrowingTree(row, [i - 1 for i in n], list(n))
            grown.append(chain.cut(limit, self.target.eos_ids))
        return as_draft(grown, self.target.device, logits, trees=False)

    def _tree(self, logits: Tensor, limits: list[int], ctx: Context) -> Draft:
        asked: list[Tensor] = []

        def after(level: TreeLevel | None) -> Tensor:
            depth = 0 if level is None else level.depth + 1
            n = 1 if level is None else len(level.tokens[0])
            asked.append(logits[:, depth : depth + 1].expand(-1, n, -1))
            return asked[-1]

        ends = PathEnds(limits, self.target.eos_ids, self.stop)
        grown = self.tree.grow(after, ctx, ends)
        draws = self.tree.drawn(ctx)
        return as_draft(grown, self.target.device, torch.cat(asked, 1), draws=draws)
