"""Drafters, stop conditions and tree shapes by name."""

from __future__ import annotations

from lenience.drafting.base import DrafterSpec
from lenience.drafting.datastore import Datastore
from lenience.drafting.dflash import Dflash
from lenience.drafting.eagle import Eagle
from lenience.drafting.heads import Blockwise, Medusa
from lenience.drafting.lookup import Ngram, Suffix
from lenience.drafting.model import DraftModel
from lenience.drafting.mtp import Mtp
from lenience.drafting.self_draft import Exit, Skip
from lenience.drafting.stops import (
    Confidence,
    Entropy,
    Fallback,
    Fixed,
    Gate,
    Heuristic,
    Likely,
    Stop,
)
from lenience.drafting.trees.shapes import (
    Auto,
    Cartesian,
    Chain,
    Dynamic,
    Planned,
    Shape,
    Tree,
)

DRAFTERS: dict[str, type[DrafterSpec]] = {
    drafter.name: drafter
    for drafter in (
        DraftModel,
        Ngram,
        Suffix,
        Medusa,
        Blockwise,
        Eagle,
        Mtp,
        Dflash,
        Exit,
        Skip,
        Datastore,
    )
}
"""Registry of drafters; an entry makes a drafter known to specs, certificates and the property
tests."""
STOPS: dict[str, type[Stop]] = {
    stop.name: stop
    for stop in (Fixed, Heuristic, Confidence, Fallback, Entropy, Likely, Gate)
}
"""Registry of stop conditions; an entry makes a stop condition known to specs, certificates and the
tests."""
TREES: dict[str, type[Tree]] = {
    tree.name: tree for tree in (Chain, Auto, Cartesian, Dynamic, Planned, Shape)
}
