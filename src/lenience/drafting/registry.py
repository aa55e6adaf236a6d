"""The drafters by name, and a drafter from its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.protocols import Drafter
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.cascade import Horizontal, Vertical
from lenience.drafting.datastore import Datastore
from lenience.drafting.eagle import Eagle
from lenience.drafting.heads import Blockwise, Medusa
from lenience.drafting.lookup import Ngram, Suffix
from lenience.drafting.merged import Merged
from lenience.drafting.self_draft import Exit, Skip
from lenience.drafting.trees.by_model import model_drafter
from lenience.models.lm import LM


@dataclass(frozen=True)
class DraftModel(DrafterSpec):
    """An independent model of the same vocabulary (Leviathan 2023; Chen 2023): the pair's draft."""

    name = "model"
    needs_draft = True
    certain = False
    has_states = True
    tells_chances = True
    grows_trees = True
    drafts_by_model = True
    grid = ("model",)

    @property
    def proposes_as_draft(self) -> bool:
        return True

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [setup.draft] if setup.draft else []

    def build(self, setup: DrafterSetup) -> Drafter:
        assert setup.draft is not None
        return model_drafter(setup.draft, setup)


class NoDrafter(Drafter):
    """Proposes nothing, so that each cycle is a plain step of the model that reads."""

    def __init__(self, device: torch.device):
        self.device = device

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        rows = len(ctx.rows)
        tokens = torch.empty(rows, 0, dtype=torch.long, device=self.device)
        return Draft(tokens, torch.zeros(rows, dtype=torch.long, device=self.device))


T = TypeVar("T")

DRAFTERS: dict[str, type[DrafterSpec]] = {
    drafter.name: drafter
    for drafter in (DraftModel, Ngram, Suffix, Medusa, Blockwise, Eagle, Exit, Skip, Datastore)
}
"""A drafter is added here, and is then known to specs, certificates and the property tests."""


def parse_drafter(drafter: str | DrafterSpec) -> DrafterSpec:
    """A drafter from its spec, such as "model", or several as one, such as "ngram|model",
    "ngram>model" or "model:4+ngram", where "|" binds least and "+" most; a DrafterSpec is returned
    as it is. Raises InputError that names what is wrong with the spec."""
    if not isinstance(drafter, str):
        return spec.parse(drafter, "drafter", "drafter", DRAFTERS, DrafterSpec)
    try:
        merged = [_vertical(part) for part in spec.split(drafter, "|")]
        return merged[0] if len(merged) == 1 else Merged(tuple(merged))
    except InputError as error:
        raise InputError(f"drafter {drafter!r}: {error}") from None


def _vertical(text: str) -> DrafterSpec:
    *firsts, last = [_horizontal(part) for part in spec.split(text, ">")]
    return Vertical(_only(firsts, ">"), last) if firsts else last


def _horizontal(text: str) -> DrafterSpec:
    *firsts, last = spec.split(text, "+")
    if not firsts:
        return spec.parse_term(last, "drafter", DRAFTERS)
    name, *count = _only(firsts, "+").rsplit(":", 1)
    if not count or not count[0].isdigit():
        raise InputError(
            f"{firsts[0]}+: how many tokens come from it? Write {firsts[0]}:4+{last}, or put a "
            "path with + in double quotes"
        )
    first, then = (spec.parse_term(part, "drafter", DRAFTERS) for part in (name, last))
    return Horizontal(first, int(count[0]), then)


def _only(parts: list[T], mark: str) -> T:
    if len(parts) > 1:
        raise InputError(f"{mark} joins two drafters; leave the others out")
    return parts[0]
