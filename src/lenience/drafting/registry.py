"""The drafters by name, and a drafter from its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.draft_model import ModelDrafter
from lenience.drafting.eagle import Eagle
from lenience.drafting.heads import Blockwise, Medusa
from lenience.drafting.lookup import Ngram, Suffix
from lenience.drafting.merged import Merged
from lenience.drafting.model_tree import TreeDrafter
from lenience.models.lm import LM
from lenience.models.session import Session, tree_cache


@dataclass(frozen=True)
class DraftModel(DrafterSpec):
    """An independent model of the same vocabulary (Leviathan 2023; Chen 2023): the pair's draft."""

    name = "model"
    needs_draft = True
    certain = False
    has_states = True
    grows_trees = True
    grid = ("model",)

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [setup.draft] if setup.draft else []

    def build(self, setup: DrafterSetup) -> Drafter:
        assert setup.draft is not None
        capacity = min(setup.capacity, setup.draft.context_length or setup.capacity)
        trees = not setup.tree.is_chain
        cache = tree_cache(setup.draft, setup.rows, capacity) if trees else None
        session = Session(setup.draft, setup.rows, capacity, cache, setup.profile)
        if trees:
            return TreeDrafter(session, setup.target, setup.tree)
        return ModelDrafter(session, setup.target, setup.keep_states, setup.stop)


class NoDrafter(Drafter):
    """Proposes nothing, so that each cycle is a plain step of the model that reads."""

    def __init__(self, device: torch.device):
        self.device = device

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        rows = len(ctx.rows)
        tokens = torch.empty(rows, 0, dtype=torch.long, device=self.device)
        return Draft(tokens, torch.zeros(rows, dtype=torch.long, device=self.device))


DRAFTERS: dict[str, type[DrafterSpec]] = {
    drafter.name: drafter for drafter in (DraftModel, Ngram, Suffix, Medusa, Blockwise, Eagle)
}
"""A drafter is added here, and is then known to specs, certificates and the property tests."""


def parse_drafter(drafter: str | DrafterSpec) -> DrafterSpec:
    """A drafter from its spec, such as "model", or several as one, such as "ngram|model"; a
    DrafterSpec is returned as it is. Raises InputError that names what is wrong with the spec."""
    parts = spec.split(drafter, "|") if isinstance(drafter, str) else [drafter]
    parsed = [spec.parse(part, "drafter", "drafter", DRAFTERS, DrafterSpec) for part in parts]
    if len(parsed) == 1:
        return parsed[0]
    try:
        return Merged(tuple(parsed))
    except InputError as error:
        raise InputError(f"drafter {drafter!r}: {error}") from None
