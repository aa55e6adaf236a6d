"""What a term of a rule is: which drafted tokens it accepts, and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Needs
from lenience.core.noise import gumbel_argmax
from lenience.core.types import Draft, Reading
from lenience.heads.head import HeadReference


@dataclass(frozen=True)
class Term:
    """One named rule: a frozen dataclass whose fields are its spec."""

    name: ClassVar[str]
    is_strict: ClassVar[bool] = False
    composable: ClassVar[bool] = True
    """True if the rule combines with others; not if it looks ahead or has its own distribution."""
    exact_when_greedy: ClassVar[bool] = False
    """True if it equals `exact` for greedy decoding."""
    verifies: ClassVar[Literal["down", "up"] | None] = None
    """Way of verifying drawn trees, see `lenience.drafting.trees.drawn`; None if it takes their
    tokens as chosen."""
    has_threshold: ClassVar[bool] = False
    """True if its field `threshold` sets how lenient it is."""
    grid: ClassVar[tuple[str, ...]] = ()
    """Specs of its settings, from strict to lenient, which its name alone stands for."""

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """Return [B, W] bool: for each drafted position, whether its token is accepted there."""
        raise NotImplementedError

    def greedy_next_tokens(
        self, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        """Return [B, W + 1]: when greedy, the token that follows after 0 … W accepted ones. Here:
        the target's most probable."""
        return reading.greedy_tokens

    @property
    def goes_on_as_target(self) -> bool:
        """Return whether those are the target's own."""
        return type(self).greedy_next_tokens is Term.greedy_next_tokens

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        """Return [B]: when sampling, the token after `kept` [B] accepted ones: a correction, or the
        bonus where all are kept. Here: from the target's own distribution, by a draw that is
        independent of the one that picked the rejected token."""
        target = ctx.probs(select_position(reading.logits, kept))
        return gumbel_argmax(target, next_token_keys(kept, draft, ctx))

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError where a head of this term cannot run on models of these fingerprints and
        hidden sizes."""

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        """Return the fitted heads that it asks."""
        return ()

    @property
    def needs(self) -> Needs:
        """Return the inputs that the term requires."""
        return Needs()

    @property
    def open_threshold(self) -> bool:
        """Return whether its threshold is left to be chosen."""
        return False

    def thresholds(self) -> list[float]:
        """Return the thresholds that it offers where its own is left open, the strictest first."""
        return []

    def with_thresholds(self, thresholds: Sequence[float]) -> list[Self]:
        """Return its settings at several thresholds, the strictest first."""
        again: Any = replace
        return [
            again(self, threshold=threshold) for threshold in sorted(set(thresholds))
        ]

    def relocated(self, path: Callable[[str], str]) -> Self:
        """Return the same term with its head at another path."""
        return self

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Lenient(Term):
    """A term that accepts more than a strict one would, within limits. Where a limit leaves the
    decision to the strict rule, that is the strict term of the whole rule; if the rule names none,
    it is `exact` when greedy and `speculative` when sampling."""

    floor: float = field(default=0.0, kw_only=True)
    """Never accept a token to which the target gives a lower probability."""
    budget: int | None = field(default=None, kw_only=True)
    """Number of lenient acceptances in a request after which the strict rule decides."""
    begin: str = field(default="", kw_only=True)
    end: str = field(default="", kw_only=True)
    """Only between these two texts, such as <think> and </think>; outside the strict rule
    decides."""
    implies_strict: ClassVar[bool] = False
    """True if the rule alone means the strict rule or this one."""
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The least and the largest value of its fields; one that is None has none."""

    def __post_init__(self) -> None:
        for what, (least, most) in {
            **self.bounds,
            "floor": (0, 1),
            "budget": (0, math.inf),
        }.items():
            self._check_bounds(what, getattr(self, what), least, most)
        if bool(self.begin) != bool(self.end) or (
            self.begin and self.begin == self.end
        ):
            raise InputError(
                f"{self.name}: begin and end mark a span; give both, as different texts"
            )

    def _check_bounds(
        self, what: str, value: float | None, least: float, most: float
    ) -> None:
        if value is None:
            return
        if isinstance(value, int) and abs(value) >= 2**31:
            raise InputError(f"{self.name}'s {what} {value}: must fit into 32 bits")
        if not least <= value <= most:
            limits = f"at least {least:g}" + (
                f" and at most {most:g}" if most < math.inf else ""
            )
            raise InputError(f"{self.name}'s {what} {value:g}: must be {limits}")

    def ask(
        self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return [B, W] bool: the accepted tokens, given those that the strict rule accepts,
        `exact`; and the logits of a judge's scores."""
        return self.accepts(draft, reading, ctx), None

    def defers(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor | None:
        """Return [B, W] bool: where the strict rule decides; None for nowhere."""
        return ~ctx.in_span(self.begin, self.end, draft.tokens) if self.begin else None


def next_token_keys(kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
    """Return [B]: keys for drawing the token after the accepted ones; a bonus is drawn as in plain
    decoding."""
    n = draft.width + 1
    device = kept.device
    correction = select_position(ctx.noise_keys(n, "correction", device=device), kept)
    bonus = select_position(ctx.noise_keys(n, "token", device=device), kept)
    return torch.where(kept == draft.lengths, bonus, correction)


def drafted_probs(draft: Draft, ctx: Context) -> Tensor:
    """Return [B, W]: the probability that the draft gave to each of its tokens, 1 where it proposes
    them for certain."""
    if draft.logits is None:
        return torch.ones_like(draft.tokens, dtype=torch.float32)
    probs = ctx.probs(draft.logits) if draft.probs is None else draft.probs
    return gather_tokens(probs, draft.tokens)


def draft_distributions(draft: Draft, ctx: Context, vocabulary: int) -> Tensor:
    """Return [B, W, V]: the distributions that the draft's tokens were drawn from."""
    if draft.logits is None:
        return torch.nn.functional.one_hot(draft.tokens, vocabulary).float()
    return ctx.probs(draft.logits) if draft.probs is None else draft.probs


def draft_distribution(
    draft: Draft, ctx: Context, position: Tensor, vocabulary: int
) -> Tensor:
    """Return [B, V]: the same at one position [B] of each row, the last one's beyond it."""
    position = position.clamp(max=draft.width - 1)
    if draft.logits is None:
        tokens = select_position(draft.tokens, position)
        return torch.nn.functional.one_hot(tokens, vocabulary).float()
    if draft.probs is not None:
        return select_position(draft.probs, position)
    return ctx.probs(select_position(draft.logits, position))


def select_position(values: Tensor, position: Tensor) -> Tensor:
    """Return [B, m, …] and a position [B] → [B, …]."""
    return values[torch.arange(len(position), device=position.device), position]


def gather_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Return [B, W, V] and tokens [B, W] → the tokens' values [B, W]."""
    return values.gather(2, tokens[..., None])[..., 0]
