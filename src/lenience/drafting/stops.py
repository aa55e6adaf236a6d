"""Stop conditions, which end drafting before the window is full.

A stop condition is data: its fields are its spec.

The token at which a condition stops is the last of its window, except with `fallback`: verifying
that token costs the target next to nothing. Any window may end early at an EOS, at the limits of
the answer, or at the limits of the models' contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.core.needs import Parts
from lenience.heads.head import HeadReference

BUILT_IN_STOP = str(EMBEDDED / "stop")
QUERIED_NEEDS = Parts.EARLY_ENDS | Parts.CHANCES
"""Needs of a condition that is queried for each token."""
FIRST_ALLOWED = 5
"""Number of tokens with which the heuristic schedule begins."""
OF_SHARE = 0.5
OF_LEAST = 0.9
STEP = 0.01
"""Constants of the adapted threshold (Zhang 2023, section 3.3): weight of the earlier share, weight
of the earlier threshold, and step."""


@dataclass(frozen=True)
class Stop:
    """A named stop condition; this base class never stops."""

    name: ClassVar[str]
    skips_verification: ClassVar[bool] = False
    """True if the tokens before the stopping token are kept without verification."""

    proposes_doubted: ClassVar[bool] = True
    """True if the stopping token is proposed to the target."""

    @property
    def per_token(self) -> bool:
        """Return True if the condition is queried for each drafted token."""
        return Parts.CHANCES in self.needs

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        """Return the trained heads that the condition queries."""
        return ()

    def relocated(self, path: Callable[[str], str]) -> Self:
        """Return the condition with its head at another path."""
        return self

    @property
    def needs_state_after(self) -> bool:
        """Return True if the condition reads the state after each token, which takes one more
        pass."""
        return False

    @property
    def needs(self) -> Parts:
        """Return the parts of drafted windows that the condition requires."""
        return Parts.EARLY_ENDS

    @property
    def keeps_bonus(self) -> bool:
        """Return True if a bonus token of the target follows a window that is accepted whole."""
        return True

    def max_tokens(self, row: Row, window: int) -> int:
        """Return the maximum number of tokens to draft for a row now, at most `window`. Called once
        per cycle."""
        return window

    def acceptance_probs(
        self, logits: Tensor, hidden: Tensor | None, tokens: Tensor, ctx: Context
    ) -> Tensor:
        """Return [B, n]: the probability that each of the drafted `tokens` [B, n] is accepted.
        `logits` [B, n, V] are those that the tokens were picked from. `hidden` [B, n, H] are the
        draft's states there, for a condition that reads states. With `needs_state_after` they are
        the states after the tokens, and the only input to use."""
        raise NotImplementedError

    def stop_mask(self, probs: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return [B, n] bool: True where drafting ends, from the acceptance probabilities [B, n] of
        the window so far."""
        raise NotImplementedError

    def ends(self, logits: Tensor, tokens: Tensor, ctx: Context) -> Tensor:
        """Return [B, n] bool: True for each of the drafted `tokens` [B, n] at which a condition
        without states ends drafting. `logits` [B, n, V] are those that the tokens were picked
        from."""
        return self.stop_mask(
            self.acceptance_probs(logits, None, tokens, ctx), ctx.rows
        )

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError if a head of this condition cannot run on the models with these
        fingerprints and hidden sizes."""

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Fixed(Stop):
    """Draft the whole window."""

    name = "fixed"
    needs = Parts.NOTHING


@dataclass(frozen=True)
class Heuristic(Stop):
    """Adapt the window to the last outcome (`transformers`' num_assistant_tokens_schedule
    "heuristic"). For each row it starts at 5 tokens, grows by two after a window that was accepted
    whole, and shrinks by one after any other. It stays between 1 and `window`."""

    name = "heuristic"

    def max_tokens(self, row: Row, window: int) -> int:
        allowed = row.memory.get(self, FIRST_ALLOWED)
        if row.last is not None and row.last.drafted:
            allowed += 2 if row.last.trace[-1].origin == "bonus" else -1
        row.memory[self] = max(1, min(allowed, window))
        return row.memory[self]


@dataclass(frozen=True)
class ThresholdStop(Stop):
    """A stop condition that ends at the first token with a probability below `least`."""

    least: float

    @property
    def needs(self) -> Parts:
        return QUERIED_NEEDS

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise InputError(
                f"{self.name}'s least chance {self.least}: must be from 0 to 1"
            )

    def stop_mask(self, probs: Tensor, rows: Sequence[Row]) -> Tensor:
        return probs < self.least


@dataclass(frozen=True)
class Confidence(ThresholdStop):
    """Stop at the first token to which the draft gives a probability under `least` (`transformers`'
    assistant_confidence_threshold). The temperature is the request's, 1 when greedy."""

    name = "confidence"

    def acceptance_probs(
        self, logits: Tensor, hidden: Tensor | None, tokens: Tensor, ctx: Context
    ) -> Tensor:
        return torch.softmax(ctx.tempered(logits), -1).gather(2, tokens[..., None])[
            ..., 0
        ]


@dataclass(frozen=True)
class Fallback(ThresholdStop):
    """Leave a token to the target if the draft's largest probability is under `least`: the fallback
    policy of BiLD (Kim 2023, section 3.3). The draft's token is then not verified."""

    name = "fallback"
    proposes_doubted = False

    def acceptance_probs(
        self, logits: Tensor, hidden: Tensor | None, tokens: Tensor, ctx: Context
    ) -> Tensor:
        return torch.softmax(ctx.tempered(logits), -1).amax(-1)


class _Adapted(NamedTuple):
    """State of `Entropy` for a row."""

    share: float
    """Recent share of drafted tokens that were accepted."""
    least: float
    """Current threshold."""


@dataclass(frozen=True)
class Entropy(ThresholdStop):
    """Stop where AdaEDL's bound on the acceptance probability is under `least` (Agrawal 2024). The
    bound is 1 − √(gamma · entropy of the draft's distribution). With a `rate`, as in AdaEDL, the
    threshold adapts during an answer so that this share of the drafted tokens is accepted."""

    gamma: float = 0.2
    rate: float | None = None
    name = "entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < math.inf:
            raise InputError(f"entropy's gamma {self.gamma}: must be above 0")
        if self.rate is not None and not 0 < self.rate <= 1:
            raise InputError(f"entropy's rate {self.rate}: must be in (0, 1]")

    @property
    def needs(self) -> Parts:
        return QUERIED_NEEDS if self.rate is None else QUERIED_NEEDS | Parts.KEPT_WHOLE

    def max_tokens(self, row: Row, window: int) -> int:
        if self.rate is not None and row.last and row.last.drafted:
            kept = row.last.kept / row.last.drafted
            before = row.memory.get(self, _Adapted(kept, self.least))
            share = OF_SHARE * before.share + (1 - OF_SHARE) * kept
            aim = before.least + (STEP if share <= self.rate else -STEP)
            least = OF_LEAST * before.least + (1 - OF_LEAST) * aim
            row.memory[self] = _Adapted(share, least)
        return window

    def stop_mask(self, probs: Tensor, rows: Sequence[Row]) -> Tensor:
        begun = _Adapted(0.0, self.least)
        least = [row.memory.get(self, begun).least for row in rows]
        return (
            probs < torch.tensor(least, device=probs.device, dtype=probs.dtype)[:, None]
        )

    def acceptance_probs(
        self, logits: Tensor, hidden: Tensor | None, tokens: Tensor, ctx: Context
    ) -> Tensor:
        logs = torch.log_softmax(ctx.tempered(logits), -1)
        finite = logs.clamp(min=torch.finfo(logs.dtype).min)  # 0 · log 0 is 0
        entropy = -(logs.exp() * finite).sum(-1)  # nats
        return 1 - (self.gamma * entropy).sqrt()


@dataclass(frozen=True)
class Scored(HeadReference, Stop):
    """A stop condition with a head on the draft's states; subclasses interpret the head's score."""

    @property
    def needs(self) -> Parts:
        return QUERIED_NEEDS | Parts.STATES

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        return (self,)

    @property
    def needs_state_after(self) -> bool:
        return self.head.inputs.tokens == ("draft",)

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        super().check(fingerprints, sizes)
        if self.head.inputs.models != ("draft",) or len(self.head.inputs.tokens) > 1:
            raise InputError(
                f"{self.name} {self.path}: reads {self.head.inputs}, and decoding reads one state "
                "of the draft"
            )

    def acceptance_probs(
        self, logits: Tensor, hidden: Tensor | None, tokens: Tensor, ctx: Context
    ) -> Tensor:
        assert hidden is not None
        return torch.sigmoid(self.head.logits(hidden).double())


@dataclass(frozen=True)
class Likely(Scored):
    """Stop as soon as a trained head finds a rejection in the window more probable than `threshold`
    (SpecDec++, Huang 2024, section 3). `lenience fit RUN --stop` trains the head. Default: the head
    of the built-in pair."""

    path: str = field(default=BUILT_IN_STOP, metadata=spec.PLACED)
    name = "head"
    role = "stop"
    built_in = BUILT_IN_STOP

    def stop_mask(self, probs: Tensor, rows: Sequence[Row]) -> Tensor:
        return 1 - probs.cumprod(1) > self.bound


@dataclass(frozen=True)
class Gate(Scored):
    """Stop at the first token that a trained gate is unsure of, and accept earlier ones without
    verification (SPRINTER, Zhong 2025). The gate is unsure if the probability that the token is
    acceptable is under `threshold`. The target verifies that token alone; an answer without such a
    token needs no target pass. `lenience fit RUN --gate` trains the gate."""

    bonus: bool = False
    """True if a bonus token of the target follows when the token that the gate was unsure of is
    accepted. SPRINTER has no bonus token: the draft continues."""
    name = "gate"
    role = "gate"
    skips_verification = True

    @property
    def keeps_bonus(self) -> bool:
        return self.bonus

    def __str__(self) -> str:
        """Return the spec. It always states whether there is a bonus token, because answers depend
        on it."""
        shown = super().__str__()
        if self.bonus:
            return shown
        if self.threshold is None:
            return f"{shown},bonus=false"
        path, _, threshold = shown.rpartition("@")
        return f"{path},bonus=false@{threshold}"

    def stop_mask(self, probs: Tensor, rows: Sequence[Row]) -> Tensor:
        return probs < self.bound
