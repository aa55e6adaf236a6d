"""What a drafter is: data that builds what proposes windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lenience.core import spec
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.drafting.stops import Stop
from lenience.models.lm import LM


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter is built for."""

    target: LM
    draft: LM | None
    """The draft model of the pair; it is there where a drafter says that it needs it."""
    rows: int
    """How many sequences are decoded together."""
    capacity: int
    """How many tokens a sequence may come to."""
    stop: Stop
    keep_states: bool
    """Whether the rule reads the draft's hidden states."""
    profile: Profile


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter as data: a frozen dataclass whose fields are its spec."""

    name: ClassVar[str]
    needs_draft: ClassVar[bool] = False
    """Whether the pair must have a draft model."""
    certain: ClassVar[bool] = True
    """Whether it proposes its tokens for certain: it has no distributions, no hidden states, and no
    stop condition that asks about each token."""
    grid: ClassVar[tuple[str, ...]] = ()
    """Specs of some of its settings, for whoever tries all drafters."""

    def models(self, setup: DrafterSetup) -> list[LM]:
        """The models that it needs caches for."""
        return []

    def build(self, setup: DrafterSetup) -> Drafter:
        """Make what proposes windows."""
        raise NotImplementedError

    def __str__(self) -> str:
        return spec.show(self.name, self)
