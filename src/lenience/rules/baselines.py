"""One of the models alone, in place of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from lenience.core.context import Context
from lenience.core.protocols import Rule
from lenience.core.types import Draft, Reading, Verdict
from lenience.rules.combine import as_rule
from lenience.rules.strict import Exact

BASELINES = ("target", "draft")
"""Names of the models that may decode alone."""


@dataclass(frozen=True)
class Baseline(Rule):
    """Decode with one model alone: nothing is drafted, and each token is its own."""

    role: Literal["target", "draft"]

    @property
    def goes_on_as_target(self) -> bool:
        return self.role == "target"

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        return

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        return as_rule(Exact())(draft, reading, ctx)

    def __str__(self) -> str:
        return self.role
