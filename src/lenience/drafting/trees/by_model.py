"""Drafting chains or trees with a model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup
from lenience.drafting.draft_model import ModelDrafter, most_drafted, wide_as_target
from lenience.drafting.stops import Stop
from lenience.drafting.trees.growing import Ends, Grown, Level, as_draft
from lenience.drafting.trees.shapes import Tree
from lenience.models.lm import LM
from lenience.models.session import Session, tree_cache


def model_drafter(lm: LM, setup: DrafterSetup) -> Drafter:
    """What drafts chains or trees with a model of the same vocabulary."""
    capacity = min(setup.capacity, lm.context_length or setup.capacity)
    cache = None if setup.tree.is_chain else tree_cache(lm, setup.rows, capacity)
    return drafter_on(Session(lm, setup.rows, capacity, cache, setup.profile), setup)


def drafter_on(session: Session, setup: DrafterSetup) -> Drafter:
    """The same with the session that the model is read in."""
    if setup.tree.is_chain:
        return ModelDrafter(session, setup.target, setup.keep_states, setup.stop)
    return TreeDrafter(session, setup.target, setup.tree, setup.stop)


class TreeDrafter(Drafter):
    """Drafts trees with an independent model of the same vocabulary, a pass for each level. Its
    tokens are chosen by their probability, also where the target samples, unless the tree draws
    them. A stop condition that asks about each token ends the paths at which it would end a
    chain."""

    def __init__(self, session: Session, target: LM, tree: Tree, stop: Stop):
        self.session, self.target, self.tree, self.stop = session, target, tree, stop

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        wanted = [self.stop.max_tokens(row, ctx.window) for row in ctx.rows]
        most = most_drafted(self.session, self.target, ctx, room)
        limits = [min(pair) for pair in zip(wanted, most)]
        if not max(limits):
            return as_draft([Grown() for _ in ctx.rows], self.target.device)
        # a row for which nothing is drafted may be longer than the draft's context
        prefixes = [row.prefix if n else row.prefix[:1] for row, n in zip(ctx.rows, limits)]
        reader = _Reader(self, ctx, prefixes)
        ends = Ends(limits, self.target.eos_ids, self.stop)
        grown = self.tree.grow(reader.read, ctx, ends)
        logits, draws = torch.cat(reader.logits, 1), self.tree.drawn(ctx)
        draft = as_draft(grown, self.target.device, logits, draws=draws)
        return replace(draft, passes=len(reader.logits), tokens_read=reader.tokens_read)

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)


class _Reader:
    """Reads a cycle's tokens level by level."""

    def __init__(self, drafter: TreeDrafter, ctx: Context, prefixes: list[list[int]]):
        self.session, self.target = drafter.session, drafter.target
        self.ctx, self.prefixes = ctx, prefixes
        self.tokens = [list[int]() for _ in ctx.rows]
        self.parents = [list[int]() for _ in ctx.rows]
        self.logits: list[Tensor] = []
        """[B, F, V] for each level."""
        self.tokens_read = [0] * len(ctx.rows)

    def read(self, level: Level | None) -> Tensor:
        n = 1
        if level is not None:
            n = len(level.tokens[0])
            for b, (tokens, parents) in enumerate(zip(level.tokens, level.parents)):
                self.tokens[b] += tokens
                self.parents[b] += parents
        sequences = [prefix + more for prefix, more in zip(self.prefixes, self.tokens)]
        reading = self.session.read(sequences, n, parents=[list(row) for row in self.parents])
        self.tokens_read = [a + b for a, b in zip(self.tokens_read, reading.tokens_read)]
        logits = self._processed(wide_as_target(reading.logits, self.target), n)
        self.logits.append(logits)
        return logits

    def _processed(self, logits: Tensor, n: int) -> Tensor:
        """By the model's logits processors, after each token's own path."""
        if not self.ctx.processors:
            return logits
        ctx = replace(self.ctx, rows=[row for row in self.ctx.rows for _ in range(n)])
        ahead = []
        for tokens, parents in zip(self.tokens, self.parents):
            for node in range(len(tokens) - n, len(tokens)):
                path, at = list[int](), node
                while at >= 0:
                    path.insert(0, tokens[at])
                    at = parents[at]
                ahead.append(path)
        # a level that is asked about again stands less deep
        deepest = max(map(len, ahead))
        ahead = [path[:1] * (deepest - len(path)) + path for path in ahead]
        flat = logits.reshape(-1, 1, logits.shape[-1])
        return ctx.process(flat, torch.tensor(ahead)).view(logits.shape)
