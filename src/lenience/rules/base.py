"""Terms of a rule: which drafted tokens a term accepts, and which token follows."""

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
    """A named rule: a frozen dataclass whose fields are its spec."""

    name: ClassVar[str]
    is_strict: ClassVar[bool] = False
    composable: ClassVar[bool] = True
    """True if the rule can be combined with others. Rules that look ahead or replace the
    distribution cannot."""
    exact_when_greedy: ClassVar[bool] = False
    """True if the rule equals `exact` for greedy decoding."""
    verifies: ClassVar[Literal["down", "up"] | None] = None
    """Direction in which the rule verifies sampled trees, see `lenience.drafting.trees.drawn`; None
    if it treats tree tokens as chosen, not sampled."""
    has_threshold: ClassVar[bool] = False
    """True if the field `threshold` sets how lenient the rule is."""
    grid: ClassVar[tuple[str, ...]] = ()
    """Specs of the rule's settings, from strict to lenient; the rule's bare name stands for all of
    them."""

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """Return [B, W] bool: True where the drafted token is accepted at its position."""
        raise NotImplementedError

    def greedy_next_tokens(
        self, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        """Return [B, W + 1]: when greedy, the next token after 0 … W accepted tokens. By default
        the target's most probable token."""
        return reading.greedy_tokens

    @property
    def goes_on_as_target(self) -> bool:
        """Return True if the tokens after accepted ones are the target's own, since
        `greedy_next_tokens` is not overridden."""
        return type(self).greedy_next_tokens is Term.greedy_next_tokens

    def next_token(
        self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context
    ) -> Tensor:
        """Return [B]: when sampling, the token after `kept` [B] accepted tokens: the correction, or
        the bonus if the whole window is kept. By default drawn from the target's distribution,
        independently of the draw of the rejected token."""
        target = ctx.probs(select_position(reading.logits, kept))
        return gumbel_argmax(target, next_token_keys(kept, draft, ctx))

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError if a head of the term cannot run on models of these fingerprints and
        hidden sizes."""

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        """Return the trained heads that the term uses."""
        return ()

    @property
    def needs(self) -> Needs:
        """Return the inputs that the term requires."""
        return Needs()

    @property
    def open_threshold(self) -> bool:
        """Return True if the threshold is still to be chosen."""
        return False

    def thresholds(self) -> list[float]:
        """Return the thresholds to choose from if the term's own is open, strictest first."""
        return []

    def with_thresholds(self, thresholds: Sequence[float]) -> list[Self]:
        """Return the term at each of several thresholds, strictest first."""
        again: Any = replace
        found = list[Self]()
        for threshold in sorted(set(thresholds)):
            found.append(again(self, threshold=threshold))
        return found

    def relocated(self, path: Callable[[str], str]) -> Self:
        """Return the term with its head's path changed by `path`."""
        return self

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Lenient(Term):
    """A term that accepts more tokens than a strict rule, within limits. Where a limit leaves the
    decision to the strict rule, the strict term of the whole rule decides. If the rule names none,
    that is `exact` when greedy and `speculative` when sampling."""

    floor: float = field(default=0.0, kw_only=True)
    """Minimum probability of an accepted token under the target."""
    overshoot: float = field(default=math.inf, kw_only=True)
    """Maximum ratio of the draft's probability of an accepted token to the target's (Zhou 2026).
    When sampling, a token above it is accepted with probability overshoot · target / draft."""
    budget: int | None = field(default=None, kw_only=True)
    """Maximum number of lenient acceptances per request; after these the strict rule decides."""
    begin: str = field(default="", kw_only=True)
    end: str = field(default="", kw_only=True)
    """Texts between which the rule is lenient, such as <think> and </think>; elsewhere the strict
    rule decides."""
    implies_strict: ClassVar[bool] = False
    """True if the rule alone means the strict rule or this rule, as in `exact|judge:…`."""
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Minimum and maximum of each bounded field."""

    def __post_init__(self) -> None:
        for what, (least, most) in {
            **self.bounds,
            "floor": (0, 1),
            "overshoot": (1, math.inf),
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
        """Return the accepted tokens [B, W] bool, given the tokens `exact` [B, W] that the strict
        rule accepts, and the logits of a judge's scores [B, W] if any."""
        return self.accepts(draft, reading, ctx), None

    def defers(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor | None:
        """Return [B, W] bool: True where the strict rule decides; None for nowhere."""
        return ~ctx.in_span(self.begin, self.end, draft.tokens) if self.begin else None


def next_token_keys(kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
    """Return [B]: random keys for the token after the accepted ones. A bonus uses the same key as
    plain decoding."""
    n = draft.width + 1
    device = kept.device
    correction = select_position(ctx.noise_keys(n, "correction", device=device), kept)
    bonus = select_position(ctx.noise_keys(n, "token", device=device), kept)
    return torch.where(kept == draft.lengths, bonus, correction)


def drafted_probs(draft: Draft, ctx: Context) -> Tensor:
    """Return [B, W]: the draft's probability of each of its tokens; 1 for a drafter without a
    distribution."""
    if draft.logits is None:
        return torch.ones_like(draft.tokens, dtype=torch.float32)
    probs = ctx.probs(draft.logits) if draft.probs is None else draft.probs
    return gather_tokens(probs, draft.tokens)


def draft_distributions(draft: Draft, ctx: Context, vocabulary: int) -> Tensor:
    """Return [B, W, V]: the distributions from which the draft's tokens were drawn, of a single
    token for a drafter without a distribution."""
    if draft.logits is None:
        return torch.nn.functional.one_hot(draft.tokens, vocabulary).float()
    return ctx.probs(draft.logits) if draft.probs is None else draft.probs


def draft_distribution(
    draft: Draft, ctx: Context, position: Tensor, vocabulary: int
) -> Tensor:
    """Return [B, V]: the draft's distribution at one position [B] of each row, see
    `draft_distributions`. Positions past the window count as its last."""
    position = position.clamp(max=draft.width - 1)
    if draft.logits is None:
        tokens = select_position(draft.tokens, position)
        return torch.nn.functional.one_hot(tokens, vocabulary).float()
    if draft.probs is not None:
        return select_position(draft.probs, position)
    return ctx.probs(select_position(draft.logits, position))


def select_position(values: Tensor, position: Tensor) -> Tensor:
    """Return [B, …]: the values [B, m, …] at one position [B] of each row."""
    return values[torch.arange(len(position), device=position.device), position]


def gather_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """Return [B, W]: the values [B, W, V] at `tokens` [B, W]."""
    return values.gather(2, tokens[..., None])[..., 0]


def lacks_distribution(term: Term) -> InputError:
    """Return the error of a rule that compares distributions for a drafter that has none."""
    return InputError(
        f"rule {term}: compares the draft's distribution with the target's, and this "
        "drafter has no distribution; use another rule, such as topk:3"
    )
