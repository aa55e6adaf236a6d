"""Drafting with some of the target's own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.protocols import Drafter
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.model_tree import model_drafter
from lenience.models.compile import compile_model
from lenience.models.lm import LM


@dataclass(frozen=True)
class _OwnLayers(DrafterSpec):
    """Some of the target's layers, with its final norm and head, as a draft model on the same
    weights, whose keys and values are its own."""

    certain = False
    grows_trees = True
    drafts_by_model = True

    def left_out(self, depth: int) -> Sequence[int]:
        """Which layers of a target with so many are not read, 1 the first. Raises InputError where
        it has no such layers."""
        raise NotImplementedError

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.left_out(target.num_layers)

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [self._lm(setup.target)]

    def build(self, setup: DrafterSetup) -> Drafter:
        return model_drafter(self._lm(setup.target), setup)

    def _lm(self, target: LM) -> LM:
        """The model, compiled where the target is."""
        lm = without_layers(target, self.left_out(target.num_layers))
        if backend := target.backend:
            compile_model(lm, export=backend.makes_others)
        return lm


@dataclass(frozen=True)
class Exit(_OwnLayers):
    """The target's first layers up to one of them (early exit, Elhoushi 2024, LayerSkip; it pays
    where the model was trained for it)."""

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
    """The target without some of its layers (Draft & Verify, Zhang 2023)."""

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


def without_layers(target: LM, left_out: Sequence[int]) -> LM:
    """A draft model that is a target without some of its layers, on the same weights; made once.
    Raises InputError where the model cannot be taken apart so."""
    return target.once(("without", tuple(sorted(left_out))), lambda: take_apart(target, left_out))


def take_apart(target: LM, left_out: Sequence[int]) -> LM:
    """The same, made anew."""
    whole = target.model
    tensors: list[torch.Tensor] = [*whole.parameters(), *whole.buffers()]
    own: Any = copy.deepcopy(whole, {id(tensor): tensor for tensor in tensors})
    kept = [i for i in range(target.num_layers) if i + 1 not in left_out]
    blocks = target.blocks(own)
    if not len(blocks):
        kind = type(whole).__name__
        raise InputError(f"target {target.name!r}: the layers of {kind} cannot be told apart")
    chosen = [blocks[i] for i in kept]
    for new, block in enumerate(chosen):
        for part in block.modules():
            for name in ("layer_idx", "layer_id"):
                if hasattr(part, name):
                    setattr(part, name, new)
    blocks._modules = {str(new): block for new, block in enumerate(chosen)}
    config = own.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[i] for i in kept]
    config.num_hidden_layers = len(kept)
    return LM(own, target.tokenizer, f"{target.name} without {len(left_out)} layers", "draft")
