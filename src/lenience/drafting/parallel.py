"""Drafting from logits of all tokens of a window, which are known before any is proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup
from lenience.drafting.trees.growing import GrowingTree, PathEnds, TreeLevel, as_draft
from lenience.models.session import Session, common


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

    def logits(self, ctx: Context, drafts: Sequence[bool], width: int) -> Tensor:
        """Return the logits [B, width, V] of the next tokens; those of rows that do not draft may
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
        logits = self.logits(ctx, [limit > 0 for limit in limits], width)
        if self.tree.is_chain:
            return self._chain(logits, limits, ctx)
        return self._tree(logits, limits, ctx)

    def _chain(self, logits: Tensor, limits: list[int], ctx: Context) -> Draft:
        drawn = ctx.draw(logits)
        ends = PathEnds(limits, self.target.eos_ids, self.stop)
        doubted = ends.doubted(logits, drawn[..., None], ctx)
        grown = []
        for row, limit, each in zip(drawn.tolist(), limits, doubted):
            end = next((i for i, (is_end,) in enumerate(each) if is_end), len(row))
            limit = min(limit, end + self.stop.proposes_doubted)
            grown.append(GrowingTree.chain(row).cut(limit, self.target.eos_ids))
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


@dataclass
class CachedRow:
    """Tokens of a row that a drafter's layers have read."""

    cache: Any
    """Cache of transformers, with the keys and values of these tokens."""
    tokens: list[int] = field(default_factory=list)


class RowwiseDrafter(ParallelDrafter):
    """A parallel drafter with layers of its own, which read the target's states. It proposes
    nothing in an answer's first cycle, which reads the prompt. Rows are read one by one, each with
    its own cache. A subclass gives an empty cache and the logits of a row."""

    def __init__(self, setup: DrafterSetup, longest: int, passes: int):
        """Take `passes`: the number of forward passes of a proposal."""
        super().__init__(setup, longest)
        assert setup.session is not None
        self.session: Session = setup.session
        self.passes = passes
        self._rows: dict[int, CachedRow] = {}
        self._tokens_read: list[int] = []

    def empty_cache(self) -> Any:
        """Return a cache of transformers without tokens."""
        raise NotImplementedError

    def row_logits(self, ctx: Context, b: int) -> tuple[Tensor, int]:
        """Return the logits [1, longest, V] after a row's prefix, and the number of tokens read."""
        raise NotImplementedError

    def cached(self, b: int, tokens: list[int]) -> CachedRow:
        """Return a row's cache, an empty one if it holds other tokens than the first of
        `tokens`."""
        held = self._rows.get(b)
        if held is None or common(held.tokens, tokens) < len(held.tokens):
            held = self._rows[b] = CachedRow(self.empty_cache())
        return held

    def ready(self, ctx: Context) -> list[bool]:
        ready = []
        for b, row in enumerate(ctx.rows):
            held = self.session.held(b, row.prefix)
            begun = row.position > row.ahead
            ready.append(begun and held >= len(row.prefix) - 1 >= 1)
        return ready

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        self._tokens_read = [0] * len(ctx.rows)
        draft = super().propose(ctx, room)
        if not any(self._tokens_read):
            return draft
        return replace(draft, passes=self.passes, tokens_read=self._tokens_read)

    def logits(self, ctx: Context, drafts: Sequence[bool], width: int) -> Tensor:
        rows: dict[int, Tensor] = {}
        for b, wanted in enumerate(drafts):
            if wanted:
                logits, self._tokens_read[b] = self.row_logits(ctx, b)
                rows[b] = logits[:, :width]
        blank = torch.zeros_like(next(iter(rows.values())))
        return torch.cat([rows.get(b, blank) for b in range(len(drafts))])

    def move(self, source: int, to: int) -> None:
        held = self._rows.pop(source, None)
        if held is not None:
            self._rows[to] = held
