"""The rule that asks a fitted head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lenience.core.context import Context
from lenience.core.types import Draft, Reading
from lenience.heads.head import Learned
from lenience.rules.base import Lenient


@dataclass(frozen=True)
class Judge(Learned, Lenient):
    """Accept a mismatch that a fitted head scores at least `threshold` (AutoJudge, Garipov 2025; Judge Decoding, Bachmann
    2025). Alone it means `exact|judge:…` when greedy and `speculative|judge:…` when sampling."""

    name = "judge"
    role = "judge"
    joins = True
    highest = 2
    """Above 1 nothing is accepted."""

    def __post_init__(self) -> None:
        Learned.__post_init__(self)
        Lenient.__post_init__(self)

    @property
    def reads_draft(self) -> bool:
        return "draft" in self.head.inputs.models

    @property
    def reads_target(self) -> bool:
        return "target" in self.head.inputs.models

    @property
    def layer(self) -> int | None:
        return self.head.inputs.layer

    def ask(self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.head.window_logits(draft, reading)
        return logits >= _logit(self.bound), logits


def _logit(threshold: float) -> float:
    return math.copysign(math.inf, threshold - 0.5) if not 0 < threshold < 1 else math.log(threshold / (1 - threshold))
