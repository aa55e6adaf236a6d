"""The drafters by name."""

from __future__ import annotations

from lenience.drafting.base import DrafterSpec
from lenience.drafting.datastore import Datastore
from lenience.drafting.eagle import Eagle
from lenience.drafting.heads import Blockwise, Medusa
from lenience.drafting.lookup import Ngram, Suffix
from lenience.drafting.model import DraftModel
from lenience.drafting.self_draft import Exit, Skip

DRAFTERS: dict[str, type[DrafterSpec]] = {
    drafter.name: drafter
    for drafter in (DraftModel, Ngram, Suffix, Medusa, Blockwise, Eagle, Exit, Skip, Datastore)
}
"""A drafter is added here, and is then known to specs, certificates and the property tests."""
