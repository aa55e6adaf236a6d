"""Lenient rules that need no training.

The rules compare the target's and the draft's distributions at the request's temperature (1 when
greedy), before truncation. A token that truncation or a processor forbids is never accepted.
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
from lenience.core.noise import uniform
from lenience.core.types import Draft, Reading
from lenience.rules.base import (
    Lenient,
    gather_tokens,
    lacks_distribution,
    select_position,
)
from lenience.rules.divergence import DIVERGENCES, entropy, lump
from lenience.rules.strict import accept_ratio, correct


@dataclass(frozen=True)
class Lenience(Lenient):
    """Accept with probability min(1, target / (factor · draft)) (Leviathan 2023, appendix A.5). No
    token is produced with more than 1/factor times its probability under the target. The correction
    is that of `speculative`. When greedy, accept a token whose probability is at least `factor`
    times that of the target's most probable token."""

    factor: float
    name = "lenient"
    needs = Needs(Parts.DRAWS)
    bounds: ClassVar = {"factor": (0, 1)}
    grid = ("lenient:0.5", "lenient:0.2", "lenient:0.05")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor == 0:
            raise InputError(
                "lenient's factor 0: must be above 0; fuzzy:tv@2 accepts everything"
            )

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        before = reading.logits[:, :-1]
        if ctx.greedy:
            least = before.amax(-1).double() + math.log(self.factor)
            return gather_tokens(before, draft.tokens).double() >= least
        return accept_ratio(ctx.probs(before), draft, ctx, self.factor)

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        return correct(
            ctx.probs(select_position(reading.logits, kept)), 1.0, kept, draft, ctx
        )


@dataclass(frozen=True)
class TopK(Lenient):
    """Accept a token among the target's k most probable tokens at its own position (Bachmann 2025).
    With `margin` its probability must also be at least the highest probability minus `margin`
    (TensorRT-LLM's relaxed acceptance), with `ratio` at least `ratio` times the highest
    probability."""

    k: int
    margin: float = field(default=math.inf, kw_only=True)
    ratio: float = field(default=0.0, kw_only=True)
    name = "topk"
    bounds: ClassVar = {"k": (1, math.inf), "margin": (0, math.inf), "ratio": (0, 1)}
    grid = (
        "topk:2", "topk:3", "topk:4",
        "topk:4,margin=0.1", "topk:4,margin=0.3", "topk:4,margin=0.6",
        "topk:10,ratio=0.5", "topk:10,ratio=0.3", "topk:10,ratio=0.1",
    )  # fmt: skip

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        logits = reading.logits[:, :-1]
        own = logits.gather(2, draft.tokens[..., None])  # [B, W, 1]
        # of equal logits the first ranks first, as it does for argmax
        vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        earlier = vocabulary < draft.tokens[..., None]
        accepted = ((logits > own) | (logits == own) & earlier).sum(-1) < self.k
        if self.margin < math.inf or self.ratio > 0:
            probs = ctx.log_probs(logits).exp()
            token = gather_tokens(probs, draft.tokens)
            top = probs.amax(-1)
            accepted = (
                accepted & (token >= top - self.margin) & (token >= self.ratio * top)
            )
        return accepted


@dataclass(frozen=True)
class Typical(Lenient):
    """Accept a token with a probability above min(eps, delta · exp(−entropy of the target)):
    typical acceptance (Medusa, Cai 2024, section 2.3.1)."""

    eps: float
    delta: float
    name = "typical"
    bounds: ClassVar = {"eps": (0, 1), "delta": (0, math.inf)}
    grid = ("typical:0.3,0.55", "typical:0.09,0.3", "typical:0.01,0.1")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        logs = ctx.log_probs(reading.logits[:, :-1])
        least = (self.delta * (-entropy(logs)).exp()).clamp(max=self.eps)
        return gather_tokens(logs, draft.tokens).exp() > least


@dataclass(frozen=True)
class Rollback(Lenient):
    """Accept a token whose −log probability under the target is at most `nats`: the rollback policy
    of BiLD (Kim 2023, section 3.3). BiLD's fallback policy is the stop condition `fallback`."""

    nats: float
    name = "rollback"
    bounds: ClassVar = {"nats": (0, math.inf)}
    grid = ("rollback:1", "rollback:2", "rollback:4")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return (
            -gather_tokens(ctx.log_probs(reading.logits[:, :-1]), draft.tokens)
            <= self.nats
        )


@dataclass(frozen=True)
class Fuzzy(Lenient):
    """Accept a token if the divergence between target and draft is below the threshold: fuzzy
    speculative decoding (FSD, Holsman 2025). The divergence is KL(target ‖ draft) in nats,
    Jensen–Shannon in nats (at most ln 2), or total variation (at most 1)."""

    divergence: str
    threshold: float
    top: int | None = None
    """Number of the target's most probable tokens to compare one by one; all other tokens count as
    one. None compares all tokens."""
    name = "fuzzy"
    needs = Needs(Parts.PROBS)
    has_threshold = True
    bounds: ClassVar = {"threshold": (0, math.inf), "top": (1, math.inf)}
    grid = (
        "fuzzy:js@0.05", "fuzzy:js@0.1", "fuzzy:js@0.2", "fuzzy:js@0.3",
        "fuzzy:kl@0.1", "fuzzy:kl@0.4", "fuzzy:kl@1.0",
        "fuzzy:tv@0.1", "fuzzy:tv@0.25", "fuzzy:tv@0.45",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence not in DIVERGENCES:
            known = ", ".join(DIVERGENCES)
            raise InputError(
                f"fuzzy's divergence {self.divergence!r}: must be one of {known}"
            )

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        drafted = _compared(self, draft, ctx)
        target = ctx.log_probs(reading.logits[:, :-1])
        if self.top is not None:
            best = target.topk(min(self.top, target.shape[-1])).indices
            target = lump(target, best)
            drafted = lump(drafted, best)
        return DIVERGENCES[self.divergence](target, drafted) < self.threshold


@dataclass(frozen=True)
class GuardedKL(Lenient):
    """Accept a mismatch if KL(target ‖ draft) is below `most` nats, unless the target is sure
    (JuDi, Sun 2026). The target is sure if its largest probability is above `guard`. Alone, the
    rule means `exact|kl:…` when greedy and `speculative|kl:…` when sampling."""

    most: float
    guard: float = 0.9
    name = "kl"
    implies_strict = True
    needs = Needs(Parts.PROBS)
    bounds: ClassVar = {"most": (0, math.inf), "guard": (0, 1)}
    grid = ("kl:0.1", "kl:0.4", "kl:1.0")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        target = ctx.log_probs(reading.logits[:, :-1])
        return DIVERGENCES["kl"](target, _compared(self, draft, ctx)) < self.most

    def defers(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        sure = ctx.log_probs(reading.logits[:, :-1]).amax(-1).exp() > self.guard
        outside = super().defers(draft, reading, ctx)
        return sure if outside is None else sure | outside


@dataclass(frozen=True)
class Fly(Lenient):
    """Accept a mismatch if the target is unsure and agrees with the tokens that follow (FLy, Li
    2025, in vLLM's form). The target is unsure if −Σ p ln p over its three most probable tokens is
    at least `entropy`. It agrees if the strict rule accepts each of the next `window` drafted
    tokens."""

    entropy: float = 0.3
    window: int = 6
    name = "fly"
    composable = False
    implies_strict = True
    bounds: ClassVar = {"entropy": (0, math.inf), "window": (1, math.inf)}
    grid = ("fly:0.3,6", "fly:0.3,3", "fly:0.1,3")

    def ask(
        self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> tuple[Tensor, None]:
        logs = ctx.log_probs(reading.logits[:, :-1])
        unsure = entropy(logs.topk(min(3, logs.shape[-1])).values) >= self.entropy
        # number of positions that have a whole window after them
        n = max(0, draft.width - self.window)
        # [B, W + 1]: number of tokens before each position that the strict rule accepts
        agreed = torch.nn.functional.pad((exact & draft.proposed).cumsum(1), (1, 0))
        follows = (  # [B, n]
            agreed[:, 1 + self.window :] - agreed[:, 1 : 1 + n] == self.window
        )
        return unsure & torch.nn.functional.pad(follows, (0, draft.width - n)), None


@dataclass(frozen=True)
class Random(Lenient):
    """Accept a token with probability `rate`, whether it matches or not (Holsman 2025, appendix E).
    Any useful rule must beat this floor. `exact|random:…` accepts mismatches at random."""

    rate: float
    name = "random"
    bounds: ClassVar = {"rate": (0, 1)}
    grid = ("random:0.6", "random:0.8", "random:0.95")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        keys = ctx.noise_keys(draft.width, "random", device=draft.tokens.device)
        return uniform(keys) < self.rate


def _compared(term: Lenient, draft: Draft, ctx: Context) -> Tensor:
    """Return the draft's log-probabilities [B, W, V]. Raises InputError for a drafter without a
    distribution."""
    if draft.logits is None:
        raise lacks_distribution(term)
    return ctx.log_probs(draft.logits)
