"""The rule that accepts tokens by a trained head."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.core.needs import Needs, Parts
from lenience.core.transfer import looks_cheaply
from lenience.core.types import Draft, Reading
from lenience.heads.head import HeadReference
from lenience.rules.base import Lenient

BUILT_IN_JUDGE = str(EMBEDDED / "judge")


@dataclass(frozen=True)
class Judge(HeadReference, Lenient):
    """Accept a mismatch if a trained head's score is at least `threshold` (AutoJudge, Garipov 2025;
    Judge Decoding, Bachmann 2025). Without a path the head is that of the built-in pair. Alone, the
    rule means `exact|judge:…` when greedy and `speculative|judge:…` when sampling."""

    path: str = field(default=BUILT_IN_JUDGE, metadata=spec.PLACED)
    strict: str = field(default="", kw_only=True)
    """Regular expression; where it matches the drafted token's text or that of the target's own
    token, the judge needs a higher score."""
    by: float = field(default=0.0, kw_only=True)
    """Margin added to the minimum logit of the score at the tokens that `strict` matches."""
    recall: float | None = field(default=None, kw_only=True)
    """Share of important tokens to reject, instead of `threshold`: the threshold with this recall
    on samples outside the head's training data."""
    logit: float | None = field(default=None, kw_only=True)
    """Minimum logit of the score, instead of `threshold`: log(p / (1 - p)) for a probability p."""
    name = "judge"
    role = "judge"
    built_in = BUILT_IN_JUDGE
    implies_strict = True
    has_threshold = True
    highest = math.nextafter(1, 2)
    """Largest allowed threshold, just above 1. It accepts nothing, even if an important token has a
    score of 1."""

    def __post_init__(self) -> None:
        HeadReference.__post_init__(self)
        Lenient.__post_init__(self)
        self._check_bound()
        if bool(self.strict) != bool(self.by):
            raise InputError(
                f"{self.name}: strict names tokens with a stricter threshold, and by "
                "its margin; give both"
            )
        if not 0 <= self.by < math.inf:
            raise InputError(
                f"{self.name}'s by {self.by:g}: must be 0 or more, of a logit"
            )
        if '"' in self.strict:
            raise InputError(f"{self.name}'s strict: write \\x22 for a double quote")
        try:
            re.compile(self.strict)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(
                f"{self.name}'s strict {self.strict!r}: is no regular expression "
                f"({error})"
            ) from None

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        return (self,)

    @property
    def needs(self) -> Needs:
        inputs = self.head.inputs
        states = Parts.STATES if "draft" in inputs.models else Parts.NOTHING
        return Needs(states, inputs.layers if "target" in inputs.models else None)

    def _check_bound(self) -> None:
        """Raise InputError for more than one bound, or a recall out of range."""
        given = (self.threshold, self.recall, self.logit)
        if sum(bound is not None for bound in given) > 1:
            raise InputError(
                f"{self.name}: a threshold, a recall and a logit bound the same score; "
                "give one"
            )
        if self.recall is not None and not 0 < self.recall <= 1:
            raise InputError(f"{self.name}'s recall {self.recall:g}: must be in (0, 1]")

    @property
    def open_threshold(self) -> bool:
        return (self.threshold, self.recall, self.logit) == (None, None, None)

    @property
    def bound(self) -> float:
        """Return the threshold in force. Raises InputError for a recall that the head does not
        list."""
        if self.logit is not None:
            return 1 / (1 + math.exp(-self.logit)) if self.logit > -700 else 0.0
        if self.recall is not None:
            return self.head.threshold_of(self.recall)
        return super().bound

    @property
    def least_logit(self) -> float:
        """Return the minimum logit of an accepted score."""
        return logit(self.bound) if self.logit is None else self.logit

    def thresholds(self) -> list[float]:
        """Return the thresholds listed when the head was trained, strictest first, or else the
        head's own threshold."""
        listed = [row["threshold"] for row in self.head.metrics.get("thresholds", [])]
        usable = sorted(
            {threshold for threshold in listed if threshold <= 1}, reverse=True
        )
        return usable or [self.head.threshold]

    def with_thresholds(self, thresholds: Sequence[float]) -> list[Self]:
        ordered = sorted(set(thresholds), reverse=True)
        found = list[Self]()
        for threshold in ordered:
            found.append(replace(self, threshold=threshold, recall=None, logit=None))
        return found

    def ask(
        self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        if looks_cheaply(exact) and bool((exact | ~draft.proposed).all()):
            return exact, None  # nothing would be rejected, so skip the head
        logits = self.head.window_logits(draft, reading, ctx)
        least: Tensor | float = self.least_logit
        if self.strict:
            drafted = ctx.found_in(self.strict, draft.tokens)
            own = ctx.found_in(self.strict, reading.greedy_tokens[:, :-1])
            least = least + self.by * (drafted | own)  # [B, W]
        return logits >= least, logits


def logit(threshold: float) -> float:
    """Return the logit of a probability: -inf at 0 or below, inf at 1 or above."""
    if not 0 < threshold < 1:
        return math.copysign(math.inf, threshold - 0.5)
    return math.log(threshold / (1 - threshold))
