"""Strict rules, which keep the target's own output, or its distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.needs import Needs, Parts
from lenience.core.noise import gumbel_argmax, uniform
from lenience.core.types import Draft, Reading
from lenience.rules.base import (
    Term,
    draft_distribution,
    draft_distributions,
    drafted_probs,
    gather_tokens,
    next_token_keys,
    select_position,
)


@dataclass(frozen=True)
class Exact(Term):
    """Accept the target's own choice: its most probable token or, when sampling, its draw (Stern
    2018; Xia 2023). The output equals plain decoding with the same seed, whatever was drafted."""

    name = "exact"
    is_strict = True
    grid = ("exact",)

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return reading.greedy_tokens[:, :-1] == draft.tokens
        return ctx.draw(reading.logits[:, :-1]) == draft.tokens

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        keys = ctx.noise_keys(draft.width + 1, "token", device=kept.device)
        target = ctx.probs(select_position(reading.logits, kept))
        return gumbel_argmax(target, select_position(keys, kept))


@dataclass(frozen=True)
class Speculative(Term):
    """Accept with probability min(1, target/draft): speculative sampling (Leviathan 2023, algorithm
    1; Chen 2023). The correction is drawn from the normalised positive part of target − draft.
    Lossless; equals `exact` when greedy."""

    name = "speculative"
    verifies = "down"
    is_strict = True
    exact_when_greedy = True
    grid = ("speculative",)

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return reading.greedy_tokens[:, :-1] == draft.tokens
        return accept_ratio(ctx.probs(reading.logits[:, :-1]), draft, ctx)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        return correct(
            ctx.probs(select_position(reading.logits, kept)), 1.0, kept, draft, ctx
        )


@dataclass(frozen=True)
class Block(Term):
    """Verify a window's tokens as a whole: block verification (Sun 2024, algorithm 2). A token that
    the target finds probable can carry the tokens before it. Lossless; on average accepts at least
    as many tokens as `speculative`, and equals `exact` when greedy."""

    name = "block"
    verifies = "up"
    is_strict = True
    composable = False
    exact_when_greedy = True
    needs = Needs(Parts.DRAWS, whole_window=True)
    grid = ("block",)

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy or not draft.width:
            return reading.greedy_tokens[:, :-1] == draft.tokens
        target = ctx.probs(reading.logits).double()
        drafted = draft_distributions(draft, ctx, target.shape[-1]).double()
        share = self._shares(target, drafted, draft)  # [B, W + 1]
        # [B, W]: the target's remaining mass after 0 … W - 1 tokens
        rest = (share[:, :-1, None] * target[:, :-1] - drafted).clamp(min=0).sum(-1)
        left = rest + 1 - share[:, :-1]
        # 0 / 0: the next token is certain
        stays = torch.where(left > 0, rest / left, 1.0)
        places = torch.arange(1, draft.width + 1, device=draft.tokens.device)
        ends = places == draft.lengths[:, None]
        later = torch.cat([stays[:, 1:], share[:, -1:]], 1)
        chance = torch.where(ends, share[:, 1:], later)  # [B, W]: to keep 1 … W tokens
        passed = (
            uniform(ctx.noise_keys(draft.width, "accept", device=chance.device))
            < chance
        )
        # the longest prefix that passes is kept, whatever came before
        return (passed & draft.proposed).flip(1).cummax(1).values.flip(1)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        target = ctx.probs(reading.logits).double()
        if not draft.width:
            return correct(select_position(target, kept), 1.0, kept, draft, ctx)
        drafted = draft_distributions(draft, ctx, target.shape[-1]).double()
        share = select_position(self._shares(target, drafted, draft), kept)[:, None]
        return correct(select_position(target, kept), share, kept, draft, ctx)

    @staticmethod
    def _shares(target: Tensor, drafted: Tensor, draft: Draft) -> Tensor:
        """Return [B, W + 1]: the probabilities p of the algorithm for the first 0 … W tokens, from
        the target's distributions [B, W + 1, V] and the draft's [B, W, V]. Trusted tokens leave p
        unchanged."""
        own = gather_tokens(target[:, :-1], draft.tokens)
        ratios = (own / gather_tokens(drafted, draft.tokens)).nan_to_num(0.0)
        if draft.kept_unasked is not None:
            ratios = ratios.masked_fill(draft.kept_unasked, 1.0)
        shares = [torch.ones_like(ratios[:, 0])]
        for ratio in ratios.unbind(1):
            shares.append((shares[-1] * ratio).clamp(max=1))
        return torch.stack(shares, 1)


def accept_ratio(
    aim: Tensor, draft: Draft, ctx: Context, factor: float = 1.0
) -> Tensor:
    """Return [B, W] bool: each drafted token accepted with probability min(1, aim / (factor ·
    draft)), where `aim` [B, W, V] is the distribution to verify against."""
    chance = uniform(ctx.noise_keys(draft.width, "accept", device=aim.device))  # [B, W]
    # chance < aim / drafted, without the division: a token that the target forbids is never
    # accepted
    drafted = drafted_probs(draft, ctx).double() * factor
    return chance * drafted < gather_tokens(aim, draft.tokens).double()


def correct(
    aim: Tensor, share: float | Tensor, kept: Tensor, draft: Draft, ctx: Context
) -> Tensor:
    """Return [B]: the token after `kept` [B] accepted tokens. It is drawn from the normalised
    positive part of share · aim − draft, where `aim` [B, V] is the distribution at that position,
    or from `aim` itself if the whole window was kept."""
    keys = next_token_keys(kept, draft, ctx)
    if not draft.width:
        return gumbel_argmax(aim, keys)
    rest = (share * aim - draft_distribution(draft, ctx, kept, aim.shape[-1])).clamp(
        min=0
    )
    # a window kept whole gets a bonus from the target itself; so do equal distributions, where only
    # rounding can cause a rejection
    whole = (kept == draft.lengths) | ~rest.any(-1)
    return gumbel_argmax(torch.where(whole[:, None], aim.to(rest.dtype), rest), keys)
