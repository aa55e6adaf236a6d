"""Keys and values of rows of tokens, addressed by position in preallocated memory, and passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lenience.core.profile import Profile
from lenience.core.transfer import sent
from lenience.models.lm import LM

LATER = -1
"""Stands for a token that is still to come from the device."""


@dataclass(frozen=True)
class Pass:
    """What a model is asked to read at once: new tokens of m rows, at most T of each, those with fewer padded in front."""

    which: list[int]
    """[m]: the rows of the cache."""
    ids: list[list[int]]
    """[m, T]"""
    pads: list[int]
    """[m]: how many of the T are padding."""
    cached: list[int]
    """[m]: how many tokens of each row are in the cache."""
    extent: int
    """How many tokens the longest row has, the new ones included."""
    states: int
    """After how many of the last tokens logits and hidden states are wanted."""
    on: int = 0
    """How many tokens more are read, each the most probable one after the one before; only by a cache that `loops`, and only
    where `states` is 1."""
    ahead: Tensor | None = None
    """[m, a]: the last tokens of each row where only the model's device has them; `ids` has -1 for them."""

    def ids_on(self, device: torch.device) -> Tensor:
        """[m, T]"""
        ids = sent(self.ids, device)
        if self.ahead is not None:
            ids[:, -self.ahead.shape[1] :] = self.ahead
        return ids


class RowCache(Protocol):
    """Keys and values of rows of tokens, and the model that reads more of them."""

    @property
    def together(self) -> bool | None:
        """Whether rows of different lengths can share a pass; None where that has not been found out yet."""
        ...

    @property
    def loops(self) -> bool:
        """Whether a pass can go on by itself."""
        ...

    @property
    def waits(self) -> bool:
        """Whether tokens that the device has found are wanted on the host before they are read."""
        ...

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        """What one token takes at most, on each device."""
        ...

    def release(self) -> None:
        """The session that used the cache is gone."""
        ...

    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        ...

    def read(self, p: Pass, profile: Profile) -> tuple[Tensor, Tensor]:
        """Logits [m, states + on, V] and hidden states [m, states + on, H]."""
        ...


class PlainCache:
    """The keys and values of rows of tokens, read through the model's own forward pass. Layers with a sliding window keep
    every state too, so that rolling back is the same everywhere; the mask does the sliding."""

    loops = False

    def __init__(self, lm: LM, rows: int, capacity: int, layer: int | None = None):
        """`layer`: after which of the model's layers the hidden states are, where not after its final norm."""
        self.lm, self.place, self.layer = lm, _Place(rows, capacity), layer
        if layer is not None:
            lm.watch(layer)
        self._cache = Cache(layer_class_to_replicate=cast(type[CacheLayerMixin], partial(_Layer, self.place)))

    @property
    def together(self) -> bool | None:
        return self.lm.takes_masks

    @property
    def waits(self) -> bool:
        return self.lm.device.type != "cuda"

    @property
    def layers(self) -> list[_Layer]:
        return cast(list[_Layer], self._cache.layers)

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        taken: dict[torch.device, int] = {}
        if not self.layers:  # they are made by the first read
            self.read(Pass([0], [[0]], [0], [0], 1, 1), Profile())
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                assert kept is not None
                taken[kept.device] = taken.get(kept.device, 0) + kept[0, :, 0].nbytes
        return taken

    def release(self) -> None: ...

    def move(self, source: int, to: int) -> None:
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys[to], layer.values[to] = layer.keys[source], layer.values[source]

    def read(self, p: Pass, profile: Profile) -> tuple[Tensor, Tensor]:
        place, device = self.place, self.lm.device
        ids = p.ids_on(device)
        ids = ids.clamp(max=self.lm.width - 1)  # an id that only the other model's embedding has is read as the last one
        place.which, place.extent = p.which, p.extent
        if place.extent > place.capacity:
            place.capacity = max(place.extent, 2 * place.capacity)
        at = None
        if len(p.which) == 1:
            place.start, place.columns = p.cached[0], None
        else:
            place.start, place.index, place.first = 0, sent(p.which, device), p.which == [*range(len(p.which))]
            at, padding = positions(ids, sent(p.pads, device), sent(p.cached, device))
            place.columns = at.masked_fill(padding, place.capacity)
        profile.lap("cache")
        read = self.forward(ids, p.states, at)
        profile.lap(self.lm.role)
        return read

    def forward(self, ids: Tensor, states: int, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """The model's pass over `ids` [m, T], the `place` being set; `at` [m, T]: their positions, where it is not one row."""
        extra: dict[str, Any] = {}
        if at is not None:
            extra = {"position_ids": at, "attention_mask": self._masks(at, self.place.extent)}
        out = self.lm.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=states, **extra)
        state, logits = self.lm.take_state(self.layer), out.logits[:, -states:]
        return logits, state[:, -states:].to(logits.device)  # a model may lie on several devices

    def _masks(self, at: Tensor, extent: int) -> Any:
        """What of `extent` keys each query sees, as the model's attention wants it told."""
        masks, model = self.lm.masks(at, torch.arange(extent, device=at.device)), self.lm.model
        if model.config.get_text_config()._attn_implementation == "eager":
            least = torch.finfo(model.dtype).min
            masks = {kind: torch.zeros(mask.shape, dtype=model.dtype, device=at.device).masked_fill(~mask, least)
                     for kind, mask in masks.items()}  # fmt: skip
        return masks if len(masks) > 1 else masks["full_attention"]


class _Layer(CacheLayerMixin):
    """One layer's keys and values [rows, H, capacity + 1, D], written and read where the session's `place` says. Layers
    with a sliding window keep every state too, so that rolling back is the same everywhere; the mask does the sliding."""

    is_sliding = False

    def __init__(self, place: _Place):
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor, old: Tensor | None = None) -> Tensor:
        """Zeros, not anything: a masked key's weight is 0, and 0 times a NaN is none."""
        made = states.new_zeros(self.place.rows, states.shape[1], self.place.capacity + 1, states.shape[3])
        if old is not None:
            made[:, :, : old.shape[2] - 1] = old[:, :, :-1]
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] <= self.place.capacity:
            self.keys, self.values = self._room(key_states, self.keys), self._room(value_states, self.values)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, kept: Tensor | None, states: Tensor) -> Tensor:
        assert kept is not None
        place, visible = self.place, cast(Tensor, kept)[:, :, : self.place.extent]
        if place.columns is None:  # one row, and its new states stand side by side
            row = place.which[0]
            kept[row, :, place.start : place.extent] = states[0]
            return visible[row : row + 1]
        index, columns = place.index.to(kept.device), place.columns.to(kept.device)
        kept[index[:, None], :, columns] = states.transpose(1, 2)  # [m, T, H, D]
        return visible[: len(place.which)] if place.first else visible[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.place.start

    def get_max_length(self) -> int:
        return -1


@dataclass
class _Place:
    """Where the states of a pass go: the one thing that the layers of a cache share."""

    rows: int
    capacity: int
    """How many tokens a row can hold; the column after them takes the states of padding."""
    which: Sequence[int] = ()
    """The rows that take part in the pass."""
    index: Tensor = field(default_factory=lambda: torch.empty(0))
    """[m]: the same as a tensor."""
    first: bool = True
    """Whether they are the first m rows, so that no copy is needed to read them."""
    start: int = 0
    """How many tokens the row holds before the pass, where it is one row."""
    extent: int = 0
    """How many columns the pass can see."""
    columns: Tensor | None = None
    """[m, T]: the column of each new state; None where one row takes part."""


def positions(ids: Tensor, pads: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each of `ids` [m, T], 0 for padding, and which are padding, both [m, T]; `pads` [m] stand in front and
    `cached` [m] tokens came before."""
    steps = torch.arange(ids.shape[1], device=ids.device) - pads[:, None]
    return (steps + cached[:, None]).masked_fill(steps < 0, 0), steps < 0
