"""The cache that a pass of a model extends, and the hidden states that the pass leaves in it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import create_causal_mask

from lenience.core.errors import InputError
from lenience.models.recurrent import Pieces

CACHE_NAMES = ("past_key_values", "cache", "cache_params")
"""Parameter names by which models take a cache. Up to transformers 5.23 the name is the first,
or the last for Mamba."""
SHARING_LAYER: type = getattr(cache_utils, "DummyLayer", type(None))
"""Layer of a cache that keeps nothing, as it uses another layer's keys and values. transformers
5.19 lacks it."""
KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    SHARING_LAYER,
)
"""Layers of transformers' caches that `lenience.models.kv_cache` has an equivalent of: keys and
values (with an index over them), states, both, or nothing (a layer that uses another layer's keys
and values)."""


@dataclass(frozen=True)
class States:
    """Hidden states that a model's passes return. Layer 1 is the first and -1 the last; None is the
    output of the final norm."""

    layers: tuple[int | None, ...] = (None,)
    """Layers whose states are returned with the logits, concatenated."""
    features: tuple[int | None, ...] = ()
    """Layers whose states are kept for every token, concatenated, for drafters that use the
    target's features."""


LAST = States()
"""States that the LM head takes as its input."""


class PassCache(Cache):
    """A cache that also collects the hidden states of the pass that it is handed to."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._hidden: dict[int | None, Tensor] = {}
        self.pieces: Pieces | None = None
        """Pieces in which mixers read the tokens of the pass; None for all at once."""

    def put_hidden(self, layer: int | None, states: Tensor) -> None:
        self._hidden[layer] = states

    def take_hidden(self, states: States = LAST) -> tuple[Tensor, Tensor | None]:
        """Return and clear the states [m, T, H] of the last pass, and its features [m, T, F] if
        any."""
        given = self._hidden
        self._hidden = {}  # states that nobody requests must not stay in memory
        hidden = _side_by_side([given[layer] for layer in states.layers])
        features = [given[layer].to(hidden.device) for layer in states.features]
        return hidden, torch.cat(features, -1) if features else None


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate states [m, T, H] along H, on the device of the last one."""
    last = parts[-1]
    return (
        last
        if len(parts) == 1
        else torch.cat([part.to(last.device) for part in parts], -1)
    )


def handing_over(layer: int | None) -> Callable[..., None]:
    """Return a forward hook that stores a module's output in the PassCache among the module's
    arguments, if there is one."""

    def hook(
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, PassCache):
                states = out if isinstance(out, Tensor) else out[0]
                argument.put_hidden(layer, states)

    return hook


def cache_argument(model: torch.nn.Module, cache: Cache) -> dict[str, Cache]:
    """Return the keyword argument that hands a cache to a model: `past_key_values`, or `cache` from
    transformers 5.24 on."""
    return {cache_name(cast(Hashable, type(model))) or CACHE_NAMES[0]: cache}


@functools.cache
def cache_name(kind: Any) -> str | None:
    parameters = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_layers(model: PreTrainedModel, what: str) -> Sequence[object]:
    """Return the layers of a new cache of transformers for a model. Raises InputError for
    architectures whose cache cannot be rolled back to an earlier token."""
    config = model.config
    takes_cache = cache_name(cast(Hashable, type(model))) is not None
    layers: Sequence[object] = ()
    built = True
    try:
        layers = DynamicCache(config=config).layers if takes_cache else ()
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
        built = False  # transformers cannot build a cache for it
    follows = any(
        isinstance(layer, LinearAttentionLayer) or type(layer) not in KNOWN_LAYERS
        for layer in layers
    )
    own = own_cache_class(cast(Hashable, type(model)))
    stateful = getattr(model, "_is_stateful", False) and not (follows or own)
    if config.is_encoder_decoder or not takes_cache or stateful or not built:
        raise InputError(
            f"{what}: {type(model).__name__} keeps a state that cannot be rolled back to an "
            "earlier token, which speculative decoding needs; use a decoder-only model of "
            "attention, or of layers whose states transformers keeps in its cache"
        )
    return layers


def new_cache(model: PreTrainedModel) -> PassCache:
    """Return an empty cache of transformers' own layers for a model, of the model's own class of
    caches if it has one."""
    own = own_cache_class(cast(Hashable, type(model)))
    if own is None:
        return PassCache(layers=list(DynamicCache(config=model.config).layers))
    made = type(own.__name__, (PassCache, own), {})
    return cast(PassCache, made())


@functools.cache
def own_cache_class(kind: Any) -> type[DynamicCache] | None:
    """Return the class of caches that the module of a kind of model defines; None if there is
    none."""
    classes = vars(sys.modules[kind.__module__]).values()
    found = []
    for own in classes:
        if (
            isinstance(own, type)
            and issubclass(own, DynamicCache)
            and own.__module__ == kind.__module__
        ):
            found.append(own)
    return found[0] if len(found) == 1 else None


def positions_and_mask(
    config: Any,
    tokens: Tensor,
    position_ids: Tensor | None,
    attention_mask: Any,
    cache: Any,
) -> tuple[Tensor, Any]:
    """Return the positions and the causal mask with which a decoder reads embeddings [m, T, H]
    after the tokens of its cache. Given positions are returned as they are."""
    if position_ids is None:
        past = 0 if cache is None else int(cache.get_seq_length())
        position_ids = past + torch.arange(tokens.shape[1], device=tokens.device)[None]
    # by position: transformers 5.24 names the cache argument differently
    mask = create_causal_mask(
        config, tokens, attention_mask, cache, position_ids=position_ids
    )
    return position_ids, mask
