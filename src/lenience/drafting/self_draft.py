"""Drafting with some of the target's own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.core.trees import Parents
from lenience.core.types import Reading
from lenience.drafting.after_target import AfterTarget, TargetSession
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.model import drafter_on, model_drafter
from lenience.models.compile import compile_model
from lenience.models.kv_cache import RowCache
from lenience.models.lm import LM
from lenience.models.session import Session


@dataclass(frozen=True)
class _OwnLayers(DrafterSpec):
    """A draft model made of some of the target's layers, with its final norm and head, on the same
    weights. It drafts on the target's keys and values (Draft & Verify, Zhang 2023), so no prompt is
    read twice.

    It has its own keys and values in three cases: other drafters propose too, the target's passes
    are recorded, or the target is exported and the draft could not be exported.
    """

    offers = (
        Parts.EARLY_ENDS
        | Parts.PROBS
        | Parts.CHANCES
        | Parts.TREES
        | Parts.OWN_TEMPERATURE
    )
    writes_target_cache = True

    def left_out(self, depth: int) -> Sequence[int]:
        """Return the layers, counted from 1, to skip in a target with `depth` layers. Raises
        InputError for layers that the target lacks."""
        raise NotImplementedError

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.left_out(target.num_layers)
        if not target.only_attends:
            raise InputError(
                f"{self}: {type(target.model).__name__} keeps states or shares keys between "
                "layers, so some of its layers cannot draft alone; take ngram or a draft model"
            )

    def models(self, setup: DrafterSetup) -> list[LM]:
        backend = setup.target.backend
        lm = self._lm(setup.target)
        shares = backend is None or (backend.shares_layers and lm.backend is not None)
        return [] if setup.alone and shares else [lm]

    def build(self, setup: DrafterSetup) -> Drafter:
        target = setup.target
        session = setup.session
        lm = self._lm(target)
        left_out = self.left_out(target.num_layers)
        if not setup.alone or session is None:
            return model_drafter(lm, setup)
        layers = [i for i in range(target.num_layers) if i + 1 not in left_out]
        cache = session.cache.of_layers(lm, layers, trees=not setup.tree.is_chain)
        if cache is None:
            return model_drafter(lm, setup)
        shared = SharedSession(lm, cache, session, setup.profile)
        return AfterTarget(drafter_on(shared, setup), shared)

    def _lm(self, target: LM) -> LM:
        """Return the draft model, compiled if the target is."""
        lm = without_layers(target, self.left_out(target.num_layers))
        backend = target.backend
        if backend:
            compile_model(lm, export=backend.makes_others)
        return lm


@dataclass(frozen=True)
class Exit(_OwnLayers):
    """Draft with the target's first layers (early exit, LayerSkip, Elhoushi 2024). It pays off for
    models trained for early exit."""

    layer: int
    name = "exit"
    grid = ("exit:1",)

    def left_out(self, depth: int) -> Sequence[int]:
        if not 1 <= self.layer < depth:
            raise InputError(
                f"exit:{self.layer}: the target has {depth} layers; name one before the last"
            )
        return range(self.layer + 1, depth + 1)


@dataclass(frozen=True)
class Skip(_OwnLayers):
    """Draft with the target, skipping some of its layers (Draft & Verify, Zhang 2023)."""

    layers: spec.NUMBERS
    name = "skip"
    grid = ("skip:1",)

    def left_out(self, depth: int) -> Sequence[int]:
        wrong = [layer for layer in self.layers if not 1 <= layer <= depth]
        if wrong or not len(set(self.layers)) == len(self.layers) < depth:
            raise InputError(
                f"{self}: the target has layers 1 to {depth}; name some of them, each once"
            )
        return self.layers


class SharedSession(TargetSession):
    """A session of some of the target's layers on the target's own cache. Drafted tokens follow
    those that the target has read, and the target overwrites them."""

    def __init__(self, lm: LM, cache: RowCache, target: Session, profile: Profile):
        """Open a session on `cache`, the part of the target's cache for these layers."""
        rows = len(target.tokens())
        super().__init__(lm, rows, cache=cache, profile=profile)
        self.target = target
        self._seen: list[list[int] | None] = [None] * rows
        """Tokens of each row that the target had read at the last `begin`."""
        self._begun: list[tuple[list[int], list[int]]] = [([], [])] * rows
        """Prefix of each row, and the part of it to read."""

    def begin(self, prefixes: Sequence[list[int]]) -> list[bool]:
        ready = []
        for row, prefix in enumerate(prefixes):
            held = self.target.held(row, prefix)
            read = self.target.tokens()[row]
            if read != self._seen[row]:  # drafted tokens were overwritten
                self._seen[row] = list(read)
                self.cut(row, 0)
                self.tokens()[row].extend(prefix[:held])
            ready.append(held >= len(prefix) - 1)
            # read at most one new token of a prefix that the target has not read, so that all
            # rows of the batch read the same number of tokens
            self._begun[row] = prefix, prefix if ready[-1] else prefix[: held + 1]
        return ready

    def read(
        self,
        sequences: Sequence[list[int]],
        num_states: int = 1,
        device_tokens: Tensor | None = None,
        lookahead: int = 0,
        rows: Sequence[int] | None = None,
        parents: Sequence[Parents] | None = None,
    ) -> Reading:
        assert device_tokens is None and rows is None
        placed = []
        for row, sequence in enumerate(sequences):
            prefix, front = self._begun[row]
            drafted = (
                len(parents[row]) if parents else max(len(sequence) - len(prefix), 0)
            )
            # never before the end of what the target has read, which would be overwritten
            placed.append(front + sequence[len(sequence) - drafted :])
        return super().read(placed, num_states, lookahead=lookahead, parents=parents)

    def move(self, source: int, to: int) -> None:
        """Forget both rows: the target's session has already moved the cache of the row."""
        for row in (source, to):
            self.cut(row, 0)
            self._seen[row] = None


def without_layers(target: LM, left_out: Sequence[int]) -> LM:
    """Return a draft model that is the target without some layers, on the same weights, cached by
    the target. Raises InputError if the model cannot be split into layers."""
    return target.once(
        ("without", tuple(sorted(left_out))), lambda: take_apart(target, left_out)
    )


def take_apart(target: LM, left_out: Sequence[int]) -> LM:
    """Build the draft model of `without_layers`."""
    whole = target.model
    tensors: list[torch.Tensor] = [*whole.parameters(), *whole.buffers()]
    own: Any = copy.deepcopy(whole, {id(tensor): tensor for tensor in tensors})
    kept = [i for i in range(target.num_layers) if i + 1 not in left_out]
    blocks = target.blocks(own)
    if not len(blocks):
        kind = type(whole).__name__
        raise InputError(
            f"target {target.name!r}: the layers of {kind} cannot be told apart"
        )
    chosen = [blocks[i] for i in kept]
    for new, block in enumerate(chosen):
        for part in block.modules():
            for name in ("layer_idx", "layer_id"):
                if hasattr(part, name):
                    setattr(part, name, new)
    blocks._modules = {str(new): block for new, block in enumerate(chosen)}
    config = own.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[i] for i in kept]
    config.num_hidden_layers = len(kept)
    return LM(
        own, target.tokenizer, f"{target.name} without {len(left_out)} layers", "draft"
    )
