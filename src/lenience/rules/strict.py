"""The strict rules, which keep the target's own output or distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.noise import race, uniform
from lenience.core.types import Draft, Reading
from lenience.rules.base import Term, at, follow_keys, of


@dataclass(frozen=True)
class Exact(Term):
    """Keep a drafted token where the target picks the same (Stern 2018; Xia 2023). When sampling, the target's token is
    drawn and compared, so that the output is plain sampling's with the same seed, whatever was drafted."""

    name = "exact"
    strict = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        drawn = reading.best[:, :-1] if ctx.greedy else ctx.draw(reading.logits[:, :-1])
        return drawn == draft.tokens

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        keys = ctx.keys(draft.width + 1, "token", device=kept.device)
        return race(ctx.probs(at(reading.logits, kept)), at(keys, kept))


@dataclass(frozen=True)
class Speculative(Term):
    """Speculative sampling (Leviathan 2023, algorithm 1; Chen 2023): accept with probability min(1, target/draft), and
    correct from the normalised positive part of target − draft. Lossless; the same as `exact` when greedy."""

    name = "speculative"
    strict = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return reading.best[:, :-1] == draft.tokens
        return accept_ratio(ctx.probs(reading.logits[:, :-1]), draft, ctx)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return correct(ctx.probs(at(reading.logits, kept)), 1.0, kept, draft, ctx)


def accept_ratio(aim: Tensor, draft: Draft, ctx: Context, factor: float = 1.0) -> Tensor:
    """[B, W] bool: accept each drafted token with probability min(1, aim / (factor · draft)), of the distribution `aim`
    [B, W, V]."""
    if draft.logits is None:
        return torch.zeros_like(draft.proposed)
    chance = uniform(ctx.keys(draft.width, "accept", device=aim.device))  # [B, W]
    drafted = of(ctx.probs(draft.logits), draft.tokens).double() * factor
    # chance < aim / drafted, without the division: a token that the target forbids is never accepted
    return chance * drafted < of(aim, draft.tokens).double()


def correct(aim: Tensor, share: float | Tensor, kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
    """[B]: the token after `kept` [B] ones, drawn from the normalised positive part of share · aim − draft, where `aim` [B, V]
    is the distribution there; from `aim` itself where the window was kept whole."""
    if draft.logits is None:
        return race(aim, follow_keys(kept, draft, ctx))
    drafted = ctx.probs(at(draft.logits, kept.clamp(max=draft.width - 1)))
    rest = (share * aim - drafted).clamp(min=0)
    # a window kept whole has a bonus from the target itself; so have equal distributions, rejected by rounding alone
    whole = (kept == draft.lengths) | ~rest.any(-1)
    return race(torch.where(whole[:, None], aim.to(rest.dtype), rest), follow_keys(kept, draft, ctx))


@dataclass(frozen=True)
class Block(Term):
    """Block verification (Sun 2024, algorithm 2): a window's tokens are verified as a whole, so that one that is likely may
    carry those before it. Lossless, and keeps at least as many as `speculative` on average; `exact` when greedy."""

    name = "block"
    strict = True
    alone = True
    looks_ahead = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return reading.best[:, :-1] == draft.tokens
        if draft.logits is None:
            return torch.zeros_like(draft.proposed)
        target, drafted = ctx.probs(reading.logits).double(), ctx.probs(draft.logits).double()
        share = self.shares(target, drafted, draft)  # [B, W + 1]
        rest = (share[:, :-1, None] * target[:, :-1] - drafted).clamp(min=0).sum(-1)  # [B, W]: after 0 … W - 1 tokens
        left = rest + 1 - share[:, :-1]
        stays = torch.where(left > 0, rest / left, 1.0)  # 0 / 0: the next token is certain of its place
        ends = torch.arange(1, draft.width + 1, device=draft.tokens.device) == draft.lengths[:, None]
        chance = torch.where(ends, share[:, 1:], torch.cat([stays[:, 1:], share[:, -1:]], 1))  # [B, W]: to keep so many
        passed = uniform(ctx.keys(draft.width, "accept", device=chance.device)) < chance
        # the longest prefix that passes is kept, whatever came before
        return (passed & draft.proposed).flip(1).cummax(1).values.flip(1)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        target = ctx.probs(reading.logits)
        if draft.logits is None:
            return correct(at(target, kept), 1.0, kept, draft, ctx)
        share = self.shares(target.double(), ctx.probs(draft.logits).double(), draft)
        return correct(at(target, kept).double(), at(share, kept)[:, None], kept, draft, ctx)

    @staticmethod
    def shares(target: Tensor, drafted: Tensor, draft: Draft) -> Tensor:
        """[B, W + 1]: p of the algorithm for the first 0 … W tokens, from the distributions [B, W + 1, V] and [B, W, V];
        trusted tokens are a prefix that was not drafted."""
        ratios = (of(target[:, :-1], draft.tokens) / of(drafted, draft.tokens)).nan_to_num(0.0)
        if draft.kept_unasked is not None:
            ratios = ratios.masked_fill(draft.kept_unasked, 1.0)
        shares = [torch.ones_like(ratios[:, 0])]
        for ratio in ratios.unbind(1):
            shares.append((shares[-1] * ratio).clamp(max=1))
        return torch.stack(shares, 1)
