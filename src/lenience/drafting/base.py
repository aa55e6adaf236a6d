"""Drafters as data: specs that build the objects which propose windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter, TrainedPart
from lenience.drafting.stops import Stop
from lenience.drafting.trees.shapes import Tree
from lenience.models.lm import LM
from lenience.models.session import Session


@dataclass(frozen=True)
class DrafterSetup:
    """Everything that a drafter is built from."""

    target: LM
    draft: LM | None
    """Draft model of the pair; never None for a drafter that needs a draft model."""
    rows: int
    """Number of batched sequences."""
    capacity: int
    """Maximum number of tokens of a sequence."""
    stop: Stop
    tree: Tree
    keep_states: bool
    """True if the rule reads the draft's hidden states."""
    profile: Profile
    keeps_last: bool = False
    """True if the target's session keeps the last states as features because the rule reads other
    layers."""
    session: Session | None = None
    """Session of the target; set when the drafter is built."""
    alone: bool = True
    """True if no other drafter proposes for the same rows."""


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter as data: a frozen dataclass whose fields are its spec."""

    name: ClassVar[str]
    branches: ClassVar[bool] = False
    """True if proposals may be trees although chains are requested."""
    writes_target_cache: ClassVar[bool] = False
    """True if drafting may overwrite keys and values in the target's cache."""

    @property
    def needs(self) -> Sources:
        """Return what the drafter reads besides the tokens of its row."""
        return Sources.NOTHING

    @property
    def offers(self) -> Parts:
        """Return the parts of windows that the drafter offers to rules, stop conditions, trees and
        the draft temperature. A drafter that proposes tokens with probability 1 offers no
        distributions (PROBS), and only a drafter that runs a single model offers
        OWN_TEMPERATURE."""
        return Parts.EARLY_ENDS

    @property
    def needs_draft(self) -> bool:
        """Return True if the pair must have a draft model."""
        return Sources.DRAFT_MODEL in self.needs

    @property
    def proposes_as_draft(self) -> bool:
        """Return True if the windows are those of the pair's draft model, with which runs are mined
        by default."""
        return False

    @property
    def longest(self) -> int | None:
        """Return the maximum length of a proposed path; None if there is no limit."""
        return None

    grid: ClassVar[tuple[str, ...]] = ()
    """Specs of some settings of this drafter, for runs that try all drafters."""

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        """Return the trained parts of the drafter."""
        return ()

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the drafter's identity in runs and judges: its spec without folders, and the
        fingerprints of its heads. None stands for the draft model."""
        if self.proposes_as_draft:
            return None
        named = self.relocated(lambda path: Path(path).name)
        heads = [part.head.fingerprint for part in self.fitted]
        return {"spec": str(named), "heads": heads}

    def relocated(self, path: Callable[[str], str]) -> Self:
        """Return the drafter with its heads at other paths."""
        return self

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        """Raise InputError if the drafter cannot draft for a target; `fingerprints` are the
        pair's."""

    @property
    def members(self) -> tuple[DrafterSpec, ...]:
        """Return the drafters whose proposals are merged; the drafter itself if it drafts alone."""
        return (self,)

    def check_tree(self, tree: Tree) -> None:
        """Raise InputError if the drafter, which offers TREES, cannot propose this shape."""

    def features(self, target: LM) -> tuple[int | None, ...]:
        """Return the layers of the target whose states the drafter reads, see
        `lenience.models.lm.States`."""
        return ()

    def models(self, setup: DrafterSetup) -> list[LM]:
        """Return the models that need caches."""
        return []

    def build(self, setup: DrafterSetup) -> Drafter:
        """Build the drafter."""
        raise NotImplementedError

    def __str__(self) -> str:
        return spec.show(self.name, self)


def check_fitted_to(
    where: str, fitted_to: Mapping[str, str], fingerprints: Mapping[str, str]
) -> None:
    """Raise InputError if a part was trained for other models or another tokenizer than these."""
    for part, value in fitted_to.items():
        if fingerprints.get(part, value) != value:
            raise InputError(
                f"{where}: was trained for another {part} ({value}, this is "
                f"{fingerprints[part]}: other weights, or the same quantised otherwise); "
                "train one for this target"
            )
