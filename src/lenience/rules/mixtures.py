"""Lenient rules that verify against another distribution than the target's.

They combine the target's and the draft's distributions as sampling uses them, after truncation.
None of them goes with other rules. The bonus is the target's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Needs, Parts
from lenience.core.numeric import argmax
from lenience.core.types import Draft, Reading
from lenience.heads.head import HeadReference
from lenience.rules.base import (
    Lenient,
    draft_distribution,
    draft_distributions,
    gather_tokens,
    lacks_distribution,
    select_position,
)
from lenience.rules.divergence import mentor
from lenience.rules.strict import accept_ratio, correct


class Mixing(Lenient):
    """A rule that verifies against weight · target + (1 − weight) · draft."""

    composable = False

    def weights(self, draft: Draft, reading: Reading, ctx: Context) -> float | Tensor:
        """Return the target's weight, for all positions or for each [B, W, 1]."""
        raise NotImplementedError

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return self.greedy_next_tokens(draft, reading, ctx)[:, :-1] == draft.tokens
        target = ctx.probs(reading.logits[:, :-1])
        drafted = draft_distributions(draft, ctx, target.shape[-1])
        weight = self.weights(draft, reading, ctx)
        return accept_ratio(weight * target + (1 - weight) * drafted, draft, ctx)

    def greedy_next_tokens(
        self, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        if not draft.width:
            return reading.greedy_tokens
        before = reading.logits[:, :-1]
        own = reading.greedy_tokens
        logs = ctx.log_probs(before)
        weight = self.weights(draft, reading, ctx)
        drafted = self._at_temperature(draft, ctx, logs.shape[-1])
        mixed = weight * logs.exp() + (1 - weight) * drafted
        # never below the floor, except for the target's own choice
        floor = math.log(self.floor) if self.floor else -torch.inf
        least = logs.amax(-1, keepdim=True).clamp(max=floor)
        allowed = (before > -torch.inf) & (logs >= least)
        if self.overshoot < math.inf:
            own_choice = logs >= logs.amax(-1, keepdim=True)
            allowed &= own_choice | (drafted <= self.overshoot * logs.exp())
        mixed = mixed.where(allowed, -1.0)
        inside = argmax(mixed).where(draft.proposed, own[:, :-1])
        return torch.cat([inside, own[:, -1:]], 1)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        # the positive part of mixture − draft is that of target − draft, scaled
        return correct(
            ctx.probs(select_position(reading.logits, kept)), 1.0, kept, draft, ctx
        )

    @staticmethod
    def _at_temperature(draft: Draft, ctx: Context, vocabulary: int) -> Tensor:
        """Return [B, W, V]: the draft's distributions before truncation, at temperature 1 when
        greedy."""
        if draft.logits is None:
            return draft_distributions(draft, ctx, vocabulary)
        return ctx.log_probs(draft.logits).exp()


@dataclass(frozen=True)
class Ensemble(Mixing):
    """Verify against weight · target + (1 − weight) · draft (DIVERSE, 2026; `transformers`'
    assistant_ensemble_weight). The mixture replaces the target's distribution: in speculative
    sampling, or by its most probable token when greedy. The bonus is the target's."""

    weight: float
    name = "ensemble"
    needs = Needs(Parts.DRAWS)
    bounds: ClassVar = {"weight": (0, 1)}
    grid = ("ensemble:0.8", "ensemble:0.6", "ensemble:0.5", "ensemble:0.4")

    def weights(self, draft: Draft, reading: Reading, ctx: Context) -> float:
        return self.weight


@dataclass(frozen=True)
class Diversed(HeadReference, Mixing):
    """Verify against a mixture as `ensemble` does, in which a trained head gives the target's
    weight at each position from both models' states before the drafted token (DIVERSED, Wang
    2026). `lenience fit RUN --mixture` trains it."""

    threshold: None = field(default=None, init=False)  # a weight has none
    name = "diversed"
    role = "mixture"

    def __post_init__(self) -> None:
        HeadReference.__post_init__(self)
        Lenient.__post_init__(self)

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        return (self,)

    @property
    def needs(self) -> Needs:
        return Needs(Parts.DRAWS | Parts.PROBS | Parts.STATES, self.head.inputs.layers)

    def weights(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return torch.sigmoid(self.head.window_logits(draft, reading, ctx))[..., None]


CASCADES = ("chow", "diff", "opt", "token1", "token2", "token3")


@dataclass(frozen=True)
class Cascade(Lenient):
    """Verify against the distribution of a speculative cascade (Narasimhan 2025), in which a
    deferral rule decides which tokens stay with the draft. With threshold alpha these are:

    - `chow`: all tokens, if max draft ≥ 1 − alpha;
    - `diff`: all tokens, if max draft ≥ max target − alpha;
    - `opt`: all tokens, if max draft ≥ max target − alpha · TV(draft, target);
    - `token1`: tokens with draft ≥ max target − alpha;
    - `token2`: tokens with target ≥ max target − alpha;
    - `token3`: tokens with target ≥ (1 − alpha) · max target.

    Tokens that stay have the draft's probability. The other tokens share the remaining mass in
    proportion to the target's distribution, which all tokens take part in. The conditions read
    probabilities at temperature 1, as in the authors' code, and TV at the request's temperature.
    When greedy, each distribution has one token: the draft's most probable token if it stays, and
    otherwise the target's. The bonus is the target's."""

    kind: str
    threshold: float
    name = "cascade"
    composable = False
    has_threshold = True
    grid = (
        "cascade:opt@0", "cascade:opt@0.1", "cascade:opt@0.3",
        "cascade:token1@0", "cascade:token1@0.1",
        "cascade:token3@0.3", "cascade:token3@0.6", "cascade:token3@0.9",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in CASCADES:
            raise InputError(
                f"cascade's kind {self.kind!r}: must be one of {', '.join(CASCADES)}"
            )
        if self.kind in ("chow", "token3"):
            self._check_bounds("threshold", self.threshold, 0, 1)

    @property
    def needs(self) -> Needs:
        """Return the inputs that the kind requires. `token2` and `token3` read the target alone."""
        if self.kind in ("token2", "token3"):
            return Needs(Parts.DRAWS)
        return Needs(Parts.DRAWS | Parts.PROBS)

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return self.greedy_next_tokens(draft, reading, ctx)[:, :-1] == draft.tokens
        before = reading.logits[:, :-1]
        drafted = draft_distributions(draft, ctx, before.shape[-1])
        return accept_ratio(self._mixed(before, drafted, draft.logits, ctx), draft, ctx)

    def greedy_next_tokens(
        self, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        own = reading.greedy_tokens  # [B, W + 1]
        if not draft.width:
            return own
        before = reading.logits[:, :-1]
        best = draft.tokens if draft.logits is None else argmax(draft.logits)
        distance = (best != own[:, :-1]).float()  # TV of one-token distributions
        stays = self._stays(before, draft.logits, distance, ctx)
        stays = gather_tokens(stays, best) & draft.proposed
        return torch.cat([torch.where(stays, best, own[:, :-1]), own[:, -1:]], 1)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        logits = select_position(reading.logits, kept)  # [B, V]
        target = ctx.probs(logits)
        if not draft.width:
            return correct(target, 1.0, kept, draft, ctx)
        drafted = draft_distribution(draft, ctx, kept, target.shape[-1])
        inside = kept.clamp(max=draft.width - 1)
        drafted_logits = (
            None if draft.logits is None else select_position(draft.logits, inside)
        )
        whole = (kept == draft.lengths)[:, None]
        mixed = self._mixed(logits, drafted, drafted_logits, ctx)
        aim = torch.where(whole, target.to(mixed.dtype), mixed)
        return correct(aim, 1.0, kept, draft, ctx)

    def _mixed(
        self,
        logits: Tensor,
        drafted: Tensor,
        drafted_logits: Tensor | None,
        ctx: Context,
    ) -> Tensor:
        """Return […, V] float64: the cascade's distribution, from the target's logits and the
        draft's distribution […, V]."""
        target = ctx.probs(logits).double()
        drafted = drafted.double()
        distance = (drafted - target).clamp(min=0).sum(-1)
        stays = self._stays(logits, drafted_logits, distance, ctx) & (target > 0)
        staying = drafted.masked_fill(~stays, 0.0)
        mixed = _with_rest(staying, target)
        if self.overshoot < math.inf:
            mixed = _with_rest(mixed.minimum(self.overshoot * target), target)
        return mixed

    def _stays(
        self,
        logits: Tensor,
        drafted_logits: Tensor | None,
        distance: Tensor,
        ctx: Context,
    ) -> Tensor:
        """Return […, V] bool: the tokens that stay with the draft, from both models' logits
        […, V] and their TV distance […]. Tokens below the floor never stay, nor, when greedy, those
        above the overshoot."""
        target = logits.float().softmax(-1)
        best = target.amax(-1, keepdim=True)
        allowed = logits > -torch.inf
        if self.floor:
            allowed = allowed & (ctx.log_probs(logits) >= math.log(self.floor))
        if ctx.greedy and self.overshoot < math.inf and drafted_logits is not None:
            drafted = drafted_logits.float().softmax(-1)
            allowed = allowed & (drafted <= self.overshoot * target)
        if self.kind == "token2":
            return allowed & (target >= best - self.threshold)
        if self.kind == "token3":
            return allowed & (target >= (1 - self.threshold) * best)
        if drafted_logits is None:
            raise lacks_distribution(self)
        drafted = drafted_logits.float().softmax(-1)
        if self.kind == "token1":
            return allowed & (drafted >= best - self.threshold)
        surest = drafted.amax(-1, keepdim=True)
        least = {
            "chow": torch.full_like(best, 1 - self.threshold),
            "diff": best - self.threshold,
            "opt": best - self.threshold * distance[..., None].to(best.dtype),
        }[self.kind]
        return allowed & (surest >= least)


def _with_rest(part: Tensor, target: Tensor) -> Tensor:
    """Return […, V]: the masses `part`, with what they lack to 1 spread as `target` is."""
    return part + (1 - part.sum(-1, keepdim=True)).clamp(min=0) * target


@dataclass(frozen=True)
class Mentored(Lenient):
    """Verify against the distribution that accepts most draft tokens among those within `most` nats
    of the target's (mentored decoding, Tran-Thien 2023). `most` 0 is speculative sampling. There is
    no greedy form."""

    most: float
    name = "mentored"
    needs = Needs(Parts.DRAWS, sampling=True)
    composable = False
    bounds: ClassVar = {"most": (0, math.inf)}
    grid = ("mentored:0.05", "mentored:0.2", "mentored:0.5")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        target = ctx.probs(reading.logits[:, :-1])
        drafted = draft_distributions(draft, ctx, target.shape[-1])
        return accept_ratio(mentor(target, drafted, self.most), draft, ctx)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        target = ctx.probs(select_position(reading.logits, kept))  # [B, V]
        if not draft.width:
            return correct(target, 1.0, kept, draft, ctx)
        drafted = draft_distribution(draft, ctx, kept, target.shape[-1])
        whole = (kept == draft.lengths)[:, None]
        aim = torch.where(whole, target.double(), mentor(target, drafted, self.most))
        return correct(aim, 1.0, kept, draft, ctx)
