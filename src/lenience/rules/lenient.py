"""The acceptance rules, and their specs. A rule is data: a frozen dataclass whose fields are its spec, see lenience.core.spec;
RULES names them all. What follows a rejection, and how rules join, is in lenience.rules.base.

Strict rules use the distributions that sampling really uses. Lenient ones read the target's and the draft's at the request's
temperature (1 when greedy), before truncation; a token that truncation or a processor forbids is never accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.noise import uniform
from lenience.core.types import Draft, Reading
from lenience.rules.base import Lenient, at, of
from lenience.rules.divergence import DIVERGENCES, entropy, lump, mentor
from lenience.rules.strict import accept_ratio, correct


@dataclass(frozen=True)
class Lenience(Lenient):
    """Accept with probability min(1, target / (factor · draft)), and correct as `speculative` does (Leviathan 2023, appendix
    A.5): no token comes with more than 1/factor times its probability. When greedy, accept a token whose probability is
    at least factor times that of the target's most probable one."""

    factor: float
    name = "lenient"
    bounds: ClassVar = {"factor": (0, 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor == 0:
            raise InputError("lenient's factor 0: must be above 0; fuzzy:tv@2 accepts everything")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        before = reading.logits[:, :-1]
        if ctx.greedy:
            return of(before, draft.tokens).double() >= before.amax(-1).double() + math.log(self.factor)
        return accept_ratio(ctx.probs(before), draft, ctx, self.factor)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return correct(ctx.probs(at(reading.logits, kept)), 1.0, kept, draft, ctx)


@dataclass(frozen=True)
class TopK(Lenient):
    """Accept a token that is among the target's k most probable ones at its own position (Bachmann 2025), of at least the
    highest probability less `margin` (TensorRT-LLM's relaxed acceptance), or `ratio` times it."""

    k: int
    margin: float = field(default=math.inf, kw_only=True)
    ratio: float = field(default=0.0, kw_only=True)
    name = "topk"
    bounds: ClassVar = {"k": (1, math.inf), "margin": (0, math.inf), "ratio": (0, 1)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        logits = reading.logits[:, :-1]
        own = logits.gather(2, draft.tokens[..., None])  # [B, W, 1]
        earlier = torch.arange(logits.shape[-1], device=logits.device) < draft.tokens[..., None]
        # of equal logits the first ranks first, as it does for argmax
        accepted = ((logits > own) | (logits == own) & earlier).sum(-1) < self.k
        if self.margin < math.inf or self.ratio > 0:
            probs = ctx.logs(logits).exp()
            token, top = of(probs, draft.tokens), probs.amax(-1)
            accepted = accepted & (token >= top - self.margin) & (token >= self.ratio * top)
        return accepted


@dataclass(frozen=True)
class Typical(Lenient):
    """Typical acceptance (Medusa, Cai 2024, section 2.3.1): accept a token whose probability is above min(eps, delta ·
    exp(−entropy of the target's distribution))."""

    eps: float
    delta: float
    name = "typical"
    bounds: ClassVar = {"eps": (0, 1), "delta": (0, math.inf)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        logs = ctx.logs(reading.logits[:, :-1])
        return of(logs, draft.tokens).exp() > (self.delta * (-entropy(logs)).exp()).clamp(max=self.eps)


@dataclass(frozen=True)
class Fuzzy(Lenient):
    """Fuzzy speculative decoding (Holsman 2025): accept whatever is drafted where the divergence between the target's and the
    draft's distributions is below the threshold: KL(target ‖ draft) in nats, Jensen–Shannon in nats (at most ln 2), or
    total variation (at most 1)."""

    divergence: str
    threshold: float
    top: int | None = None
    """Tell apart only so many of the target's most probable tokens; the others count as one."""
    name = "fuzzy"
    bounds: ClassVar = {"threshold": (0, math.inf), "top": (1, math.inf)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence not in DIVERGENCES:
            raise InputError(f"fuzzy's divergence {self.divergence!r}: must be one of {', '.join(DIVERGENCES)}")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if draft.logits is None:
            return torch.zeros_like(draft.proposed)
        target, drafted = ctx.logs(reading.logits[:, :-1]), ctx.logs(draft.logits)
        if self.top is not None:
            best = target.topk(min(self.top, target.shape[-1])).indices
            target, drafted = lump(target, best), lump(drafted, best)
        return DIVERGENCES[self.divergence](target, drafted) < self.threshold


@dataclass(frozen=True)
class GuardedKL(Lenient):
    """Accept also where KL(target ‖ draft) is below `most` nats, unless the target's largest probability is above `guard`
    (JuDi, Sun 2026). Alone it means `exact|kl:…` when greedy and `speculative|kl:…` when sampling."""

    most: float
    guard: float = 0.9
    name = "kl"
    joins = True
    bounds: ClassVar = {"most": (0, math.inf), "guard": (0, 1)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return Fuzzy("kl", self.most).accepts(draft, reading, ctx)

    def defers(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        sure = ctx.logs(reading.logits[:, :-1]).amax(-1).exp() > self.guard
        outside = super().defers(draft, reading, ctx)
        return sure if outside is None else sure | outside


@dataclass(frozen=True)
class Ensemble(Lenient):
    """Verify against weight · target + (1 − weight) · draft in place of the target's distribution, as `transformers`'
    assistant_ensemble_weight does (DIVERSE, 2026): when sampling by speculative sampling, when greedy by its most
    probable token. The bonus is the target's."""

    weight: float
    name = "ensemble"
    alone = True
    bounds: ClassVar = {"weight": (0, 1)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return self.best(draft, reading, ctx)[:, :-1] == draft.tokens
        if draft.logits is None:
            return torch.zeros_like(draft.proposed)
        return accept_ratio(self._mixed(ctx.probs(reading.logits[:, :-1]), ctx.probs(draft.logits)), draft, ctx)

    def best(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if draft.logits is None:
            return reading.best
        before = reading.logits[:, :-1]
        mixed = self._mixed(ctx.logs(before).exp(), ctx.logs(draft.logits).exp())
        logs = ctx.logs(before)
        least = logs.amax(-1, keepdim=True).clamp(max=math.log(self.floor) if self.floor else -torch.inf)
        mixed = mixed.where((before > -torch.inf) & (logs >= least), -1.0)
        return torch.cat([mixed.argmax(-1).where(draft.proposed, reading.best[:, :-1]), reading.best[:, -1:]], 1)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        # the positive part of mixture − draft is that of target − draft, scaled
        return correct(ctx.probs(at(reading.logits, kept)), 1.0, kept, draft, ctx)

    def _mixed(self, target: Tensor, drafted: Tensor) -> Tensor:
        return self.weight * target + (1 - self.weight) * drafted


@dataclass(frozen=True)
class Fly(Lenient):
    """Accept a mismatch where the target is unsure and agrees with what follows (FLy, Li 2025, in vLLM's form): where −Σ p ln p
    over its three most probable tokens is at least `entropy`, and the strict rule accepts each of the next `window`
    drafted tokens."""

    entropy: float = 0.3
    window: int = 6
    name = "fly"
    alone = True
    joins = True
    bounds: ClassVar = {"entropy": (0, math.inf), "window": (1, math.inf)}

    def ask(self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor) -> tuple[Tensor, None]:
        logs = ctx.logs(reading.logits[:, :-1])
        unsure = entropy(logs.topk(min(3, logs.shape[-1])).values) >= self.entropy
        n = max(0, draft.width - self.window)  # how many places have a whole window after them
        agreed = torch.nn.functional.pad((exact & draft.proposed).cumsum(1), (1, 0))  # [B, W + 1]: before each place
        follows = agreed[:, 1 + self.window :] - agreed[:, 1 : 1 + n] == self.window  # [B, n]
        return unsure & torch.nn.functional.pad(follows, (0, draft.width - n)), None


@dataclass(frozen=True)
class Mentored(Lenient):
    """Verify against the distribution that accepts most of the draft's among those within `most` nats of the target's (mentored
    decoding, Tran-Thien 2023). 0 is speculative sampling; there is no greedy form."""

    most: float
    name = "mentored"
    alone = True
    samples = True
    bounds: ClassVar = {"most": (0, math.inf)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if draft.logits is None:
            return torch.zeros_like(draft.proposed)
        return accept_ratio(mentor(ctx.probs(reading.logits[:, :-1]), ctx.probs(draft.logits), self.most), draft, ctx)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        target = ctx.probs(at(reading.logits, kept))  # [B, V]
        if draft.logits is None:
            return correct(target, 1.0, kept, draft, ctx)
        drafted = ctx.probs(at(draft.logits, kept.clamp(max=draft.width - 1)))
        whole = (kept == draft.lengths)[:, None]
        return correct(torch.where(whole, target.double(), mentor(target, drafted, self.most)), 1.0, kept, draft, ctx)


@dataclass(frozen=True)
class Random(Lenient):
    """Accept a mismatch with probability `rate`: a floor that any rule must beat (Holsman 2025). Alone it means
    `exact|random:…` when greedy and `speculative|random:…` when sampling."""

    rate: float
    name = "random"
    joins = True
    bounds: ClassVar = {"rate": (0, 1)}

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return uniform(ctx.keys(draft.width, "random", device=draft.tokens.device)) < self.rate
