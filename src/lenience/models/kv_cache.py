"""KV cache of several rows, addressed by position in preallocated memory, and passes over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    LinearAttentionLayer,
)

from lenience.core.errors import InputError
from lenience.core.profile import Profile
from lenience.core.transfer import to_device
from lenience.core.trees import Parents, depths, lineage
from lenience.models.lm import LM
from lenience.models.pass_cache import (
    LAST,
    SHARING_LAYER,
    PassCache,
    States,
    cache_argument,
    new_cache,
)
from lenience.models.recurrent import (
    MixerStates,
    Pieces,
    StateLayer,
    find_mixers,
    read_in_pieces,
    sizes_of,
)

NOWHERE = 1 << 40
"""Position of a key that no token may attend to."""
LATER = -1
"""Placeholder for a token that has not been copied from the device yet."""


@dataclass(frozen=True)
class Forward:
    """One forward pass over new tokens of m rows, at most T each. Shorter rows are padded in
    front."""

    rows: list[int]
    """[m]: indices of the rows in the cache."""
    input_ids: list[list[int]]
    """[m, T]: token ids, with 0 for padding."""
    left_padding: list[int]
    """[m]: number of padding tokens among the T."""
    cached_lengths: list[int]
    """[m]: number of each row's tokens in the cache."""
    kv_length: int
    """Number of tokens of the longest row, new tokens included."""
    num_states: int
    """Number of last tokens for which logits and hidden states are returned."""
    lookahead: int = 0
    """Number of further tokens to read, each the most probable after its predecessor. Requires a
    cache that `can_loop`, and `num_states` 1."""
    device_tokens: Tensor | None = None
    """[m, a]: each row's last tokens, if they are only on the model's device; `input_ids` holds
    LATER in their positions."""
    parents: Sequence[Parents] | None = None
    """[m][a]: parent of each of the last tokens, if these form a tree; some of them may already be
    in the cache."""
    inputs: Tensor | None = None
    """[m, T, H]: states that a model that `reads_inputs` takes with the tokens. In the lookahead
    the model takes its own last states."""

    @property
    def length(self) -> int:
        """Return T, the number of columns of the pass."""
        return len(self.input_ids[0])

    def ids_on(self, device: torch.device) -> Tensor:
        """Return the token ids [m, T] on a device, `device_tokens` included."""
        ids = to_device(self.input_ids, device)
        if self.device_tokens is not None:
            ids[:, -self.device_tokens.shape[1] :] = self.device_tokens
        return ids


class RowCache(Protocol):
    """Keys and values of several rows of tokens, and the forward pass that extends them."""

    @property
    def reads_ragged(self) -> bool | None:
        """Return True if rows of different lengths can share a pass; None if not yet known."""
        ...

    @property
    def can_loop(self) -> bool:
        """Return True if a pass can read a `lookahead`, feeding itself its most probable tokens."""
        ...

    @property
    def needs_host_tokens(self) -> bool:
        """Return True if tokens found on the device must be copied to the host before a pass."""
        ...

    def token_bytes(self) -> dict[torch.device, int]:
        """Return the peak number of bytes per token of a row, per device."""
        ...

    def on_session_closed(self) -> None:
        """Note that the cache's session is closed."""
        ...

    def row_bytes(self) -> dict[torch.device, int]:
        """Return the bytes that a row needs whatever its length, per device."""
        ...

    def resumable(self, row: int, length: int) -> int:
        """Return after how many of a row's first `length` tokens a pass can continue. States after
        later tokens are dropped."""
        ...

    def copy(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` columns of row `source` to row `to`."""
        ...

    def gather(self, row: int, start: int, columns: list[int]) -> None:
        """Move the states of the given columns of a row to adjacent columns from `start` on."""
        ...

    def features(self, row: int, start: int, end: int) -> Tensor:
        """Return the features [n, F] of a row's tokens from `start` to before `end`. If none are
        kept or nothing was read yet, F may be 0."""
        ...

    def of_layers(self, lm: LM, layers: Sequence[int], trees: bool) -> RowCache | None:
        """Return a cache in the same memory for a model that consists of the given layers (counted
        from 0). Return None if the memory cannot be shared. With `trees` the cache reads trees."""
        ...

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        """Run a pass. Return logits [m, num_states + lookahead, V] and hidden states [m, num_states
        + lookahead, H]."""
        ...


@dataclass(frozen=True)
class Visibility:
    """Positions of a pass's tokens and of the keys, which determine the attention mask."""

    at: Tensor
    """[m, T]: positions of the tokens in the pass."""
    keys: Tensor
    """[m, K] or [K]: positions of the keys."""
    related: Tensor | None = None
    """[m, T, K] bool: False for a key on another branch of the token's tree."""

    def masks(self, lm: LM) -> dict[str, Tensor]:
        """Return the attention mask [m, 1, T, K] bool for each kind of layer."""
        masks = lm.masks(self.at, self.keys)
        if self.related is None:
            return masks
        return {kind: mask & self.related[:, None] for kind, mask in masks.items()}


@dataclass(frozen=True)
class TreeVisibility:
    """Positions and visibility of rows that end with trees, on the host. The position of a tree
    token is the prefix's length plus the token's depth. The token attends to the prefix and to the
    path from the root."""

    at: NDArray[np.int64]
    keys: NDArray[np.int64]
    related: NDArray[np.bool_]

    @classmethod
    def of(cls, forward: Forward, longest: int | None) -> TreeVisibility:
        """Return the visibility of a pass. `longest` is the model's context length: tokens beyond
        it are computed at the last position and never accepted."""
        assert forward.parents is not None
        m = len(forward.rows)
        length = forward.length
        width = forward.kv_length
        at = np.zeros((m, length), np.int64)
        keys = np.tile(np.arange(width), (m, 1))
        related = np.ones((m, length, width), np.bool_)
        rows = zip(forward.left_padding, forward.cached_lengths, forward.parents)
        for b, (padding, cached, parents) in enumerate(rows):
            whole = cached + length - padding
            start = whole - len(parents)
            keys[b, start:whole] = start + np.array(depths(parents), np.int64)
            at[b, padding:] = keys[b, cached:whole]
            # the tree's tokens that are new in this pass
            new = slice(max(cached - start, 0), None)
            related[b, length - len(parents[new]) :, start:whole] = lineage(parents)[
                new
            ]
        return cls(
            at if longest is None else np.minimum(at, longest - 1), keys, related
        )

    def on(self, device: torch.device) -> Visibility:
        parts = map(torch.from_numpy, (self.at, self.keys, self.related))
        return Visibility(*(part.to(device) for part in parts))


class PlainCache:
    """Keys and values of several rows, extended by the model's own forward pass. Layers with a
    sliding window also keep every state, so that rolling back is the same for all layers; the mask
    limits the window. For recurrent and convolutional states there are checkpoints, and rows are
    read one by one."""

    can_loop = False

    def __init__(
        self,
        lm: LM,
        rows: int,
        capacity: int,
        states: States = LAST,
        reads_ragged: bool | None = None,
    ):
        """Take `reads_ragged`: True or False if it is known whether rows can share a pass."""
        self.lm = lm
        self.slots = _WriteSlots(rows, capacity)
        self.states = states
        self.reads_ragged = reads_ragged
        lm.capture(states)
        self._features = _RowStates(self.slots)
        make_layer = cast(type[CacheLayerMixin], partial(_KVLayer, self.slots))
        self._mixers: MixerStates | None = None
        if lm.only_attends or lm.copies_cache:
            self._cache = PassCache(layer_class_to_replicate=make_layer)
            return
        layers = []
        for layer in new_cache(lm.model).layers:
            layers.append(_equivalent(layer, self.slots))
        self._cache = PassCache(layers=layers)
        if lm.has_states:
            self.reads_ragged = False
            following = {}
            for i, layer in enumerate(layers):
                if isinstance(layer, StateLayer):
                    following[i] = layer
            self._mixers = MixerStates(following, rows)
            lm.once("mixers", lambda: _prepare_mixers(lm))

    def of_layers(
        self, lm: LM, layers: Sequence[int], trees: bool
    ) -> PlainCache | None:
        other = PlainCache(
            lm, self.slots.num_rows, self.slots.capacity, LAST, self.reads_ragged
        )
        other.slots = self.slots
        other._features = _RowStates(self.slots)
        own = self._cache.layers
        own += [_KVLayer(self.slots) for _ in range(len(own), max(layers) + 1)]
        other._cache = PassCache(layers=[own[i] for i in layers])
        return other

    @property
    def needs_host_tokens(self) -> bool:
        return self.lm.device.type != "cuda"

    def kept(self) -> Iterator[Tensor]:
        """Yield each kept tensor of states [rows, H, capacity + 1, D]."""
        for layer in self._cache.layers:
            if isinstance(layer, _KVLayer):
                yield from layer.kept()
        if self._features.states is not None:
            yield self._features.states

    @torch.inference_mode()
    def token_bytes(self) -> dict[torch.device, int]:
        self._read_a_token()
        taken: dict[torch.device, int] = {}
        for states in self.kept():
            taken[states.device] = taken.get(states.device, 0) + states[0, :, 0].nbytes
        return taken

    def row_bytes(self) -> dict[torch.device, int]:
        if self._mixers is None:
            return {}
        self._read_a_token()
        return {self.lm.device: self._mixers.row_bytes()}

    @torch.inference_mode()
    def _read_a_token(self) -> None:
        """Read a token into a cache that has read none, as the first pass allocates its memory."""
        if not any(True for _ in self.kept()):
            self.read(
                Forward([0], [[0]], [0], [0], kv_length=1, num_states=1), Profile()
            )

    def resumable(self, row: int, length: int) -> int:
        mixers = self._mixers
        return length if mixers is None else mixers.checkpoints.resumable(row, length)

    def scale_states(self, row: int, factor: float) -> bool:
        """Multiply the recurrent states of a row, to see whether passes read them. Returns False if
        there are none."""
        return self._mixers is not None and self._mixers.scale(row, factor)

    def on_session_closed(self) -> None: ...

    def copy(self, source: int, to: int, length: int) -> None:
        if self._mixers is not None:
            self._mixers.checkpoints.copy(source, to, length)
        for states in self.kept():
            states[to, :, :length] = states[source, :, :length]

    def gather(self, row: int, start: int, columns: list[int]) -> None:
        for states in self.kept():
            taken = states[row][:, to_device(columns, states.device)]
            states[row, :, start : start + len(columns)] = taken

    def features(self, row: int, start: int, end: int) -> Tensor:
        states = self._features.states
        return torch.empty(0, 0) if states is None else states[row, 0, start:end]

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        slots = self.slots
        device = self.lm.device
        # an id beyond this model's embedding (the other model has more) is clamped to the last
        ids = forward.ids_on(device).clamp(max=self.lm.vocab_size - 1)
        slots.make_room(forward.kv_length)
        sight: Visibility | None = None
        if len(forward.rows) == 1:
            slots.use_one(forward.rows[0], forward.cached_lengths[0], forward.kv_length)
        else:
            padding = to_device(forward.left_padding, device)
            cached = to_device(forward.cached_lengths, device)
            at, is_padding = positions(ids, padding, cached)
            columns = at.masked_fill(is_padding, slots.capacity)
            rows = to_device(forward.rows, device)
            slots.use_several(forward.rows, rows, columns, forward.kv_length)
            sight = Visibility(at, torch.arange(forward.kv_length, device=device))
        if forward.parents is not None:
            sight = TreeVisibility.of(forward, self.lm.context_length).on(device)
        profile.add("cache")
        with self._states_of(forward):
            outputs = self.forward(ids, forward.num_states, sight, forward.inputs)
        profile.add(self.lm.role)
        return outputs

    @contextmanager
    def _states_of(self, forward: Forward) -> Iterator[None]:
        """Continue from the row's checkpoint, and keep the states of the pass. The mixers read the
        window apart from the tokens before it, which are certain."""
        if self._mixers is None:
            yield
            return
        row = forward.rows[0]
        start = forward.cached_lengths[0]
        certain = forward.length - (forward.num_states - 1)
        sizes = sizes_of(forward.length, certain, start == 0, self.lm.mixer_steps)
        pieces = self._mixers.enter(row, start, sizes, certain)
        self._cache.pieces = pieces
        yield
        self._cache.pieces = None
        self._mixers.leave(row, start, pieces)

    def forward(
        self,
        ids: Tensor,
        num_states: int,
        sight: Visibility | None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [m, num_states, V] and hidden states [m, num_states, H] of the model's pass
        over `ids` [m, T]. The slots must be set. `sight` is required for several rows and for
        trees."""
        extra: dict[str, Any] = {} if inputs is None else {"inputs": inputs}
        if sight is None and self.lm.takes_positions:
            # some kinds count from 0 in each pass otherwise
            at = torch.arange(self.slots.start, self.slots.kv_length, device=ids.device)
            extra["position_ids"] = at[None]
        if sight is not None:
            extra |= {"position_ids": sight.at, "attention_mask": self._masks(sight)}
        out = self.lm.model(
            input_ids=ids,
            **cache_argument(self.lm.model, self._cache),
            use_cache=True,
            logits_to_keep=num_states,
            **extra,
        )
        logits = out.logits[:, -num_states:]
        hidden, features = self._cache.take_hidden(self.states)
        if features is not None:
            self._features.write(features[:, None])
        # a model may be split over several devices
        return logits, hidden[:, -num_states:].to(logits.device)

    def _masks(self, sight: Visibility) -> Any:
        """Return the attention masks in the form that the model takes."""
        masks = sight.masks(self.lm)
        model = self.lm.model
        if model.config.get_text_config()._attn_implementation == "eager":
            least = torch.finfo(model.dtype).min
            masks = {
                kind: torch.zeros_like(mask, dtype=model.dtype).masked_fill(
                    ~mask, least
                )
                for kind, mask in masks.items()
            }
        return masks if len(masks) > 1 else masks["full_attention"]


class _RowStates:
    """States [rows, H, capacity + 1, D] of all rows, written and read at the cache's slots."""

    def __init__(self, slots: _WriteSlots):
        self.slots = slots
        self.states = cast(Tensor | None, None)

    def write(self, states: Tensor) -> Tensor:
        """Write states [m, H, T, D], and return all states that the pass can attend to [m, H,
        kv_length, D]."""
        slots = self.slots
        kept = self._with_room(states)
        visible = kept[:, :, : slots.kv_length]
        if slots.columns is None:  # one row, whose new states are contiguous
            row = slots.rows[0]
            kept[row, :, slots.start : slots.kv_length] = states[0]
            return visible[row : row + 1]
        index = slots.index.to(kept.device)
        columns = slots.columns.to(kept.device)
        kept[index[:, None], :, columns] = states.transpose(1, 2)  # [m, T, H, D]
        return visible[: len(slots.rows)] if slots.leading else visible[index]

    def _with_room(self, like: Tensor) -> Tensor:
        """Return the tensor of all states, enlarged to the capacity if needed. New memory is
        zeroed, because masked keys have weight 0 and 0 times NaN is NaN."""
        old = self.states
        rows = self.slots.num_rows
        capacity = self.slots.capacity
        if old is not None and old.shape[2] > capacity:
            return old
        self.states = like.new_zeros(rows, like.shape[1], capacity + 1, like.shape[3])
        if old is not None:
            self.states[:, :, : old.shape[2] - 1] = old[:, :, :-1]
        return self.states


class _KVLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, slots: _WriteSlots):
        super().__init__()
        self.slots = slots
        self._keys = _RowStates(slots)
        self._values = _RowStates(slots)

    def kept(self) -> Iterator[Tensor]:
        """Yield the layer's keys and values, if there are any yet."""
        for states in (self._keys.states, self._values.states):
            if states is not None:
                yield states

    def lazy_initialization(self, *_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self._keys.write(key_states), self._values.write(value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.start

    def get_max_length(self) -> int:
        return -1


class _IndexedLayer(_KVLayer):
    """Keys and values of one layer, with the keys of an index that picks some of them."""

    def __init__(self, slots: _WriteSlots):
        super().__init__(slots)
        self._index_keys = _RowStates(slots)

    def kept(self) -> Iterator[Tensor]:
        yield from super().kept()
        if self._index_keys.states is not None:
            yield self._index_keys.states

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write index keys [m, T, D], and return all that the pass can see [m, K, D]."""
        return self._index_keys.write(indexer_key_states[:, None])[:, 0]


class _BothLayer(StateLayer, _KVLayer):  # type: ignore[misc,override]
    """Keys and values of one layer that also keeps a state."""

    def __init__(self, slots: _WriteSlots, number_of_states: int):
        StateLayer.__init__(self, number_of_states)
        _KVLayer.__init__(self, slots)


def _equivalent(layer: object, slots: _WriteSlots) -> Any:
    """Return the layer of a PlainCache for a layer of transformers' own cache."""
    if isinstance(layer, SHARING_LAYER):
        return SHARING_LAYER()
    if isinstance(layer, DynamicIndexedLayer):
        return _IndexedLayer(slots)
    if not isinstance(layer, LinearAttentionLayer):
        return _KVLayer(slots)
    if isinstance(layer, CacheLayerMixin):
        return _BothLayer(slots, layer.number_of_states)
    return StateLayer(layer.number_of_states)


def _prepare_mixers(lm: LM) -> None:
    """Make the modules that update a model's states read tokens in the pieces of each pass."""
    cache = new_cache(lm.model)

    def read_a_token() -> None:
        ids = torch.tensor([[0]], device=lm.device)
        lm.model(input_ids=ids, use_cache=True, **cache_argument(lm.model, cache))

    def pieces_in(args: Any, kwargs: Any) -> Pieces | None:
        given = (*args, *kwargs.values())
        found = (value for value in given if isinstance(value, PassCache))
        return next((cache.pieces for cache in found), None)

    with torch.inference_mode():
        mixers = find_mixers(lm.model, cache, read_a_token)
    following = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            following.append(i)
    if not {mixer.layer for _, mixer in mixers}.issuperset(following):
        raise InputError(
            f"{lm.role} {lm.name!r}: {type(lm.model).__name__} keeps its states outside of its "
            "cache, where they cannot be rolled back; use another model"
        )
    for module, mixer in mixers:
        read_in_pieces(module, mixer, pieces_in)


@dataclass
class _WriteSlots:
    """Where a pass writes its states; shared by all layers of a cache."""

    num_rows: int
    capacity: int
    """Number of tokens that a row can hold. The column after them takes the states of padding."""
    rows: Sequence[int] = ()
    """Rows that take part in the pass."""
    index: Tensor = field(default_factory=lambda: torch.empty(0))
    """[m]: `rows` as a tensor."""
    leading: bool = True
    """True if `rows` are the first m rows of the cache, which can then be read without a copy."""
    start: int = 0
    """Number of tokens that the row holds before the pass, if a single row takes part; else 0."""
    kv_length: int = 0
    """Number of columns that the pass can see."""
    columns: Tensor | None = None
    """[m, T]: the column of each new state; None if a single row takes part."""

    def make_room(self, kv_length: int) -> None:
        """Enlarge the capacity to at least `kv_length` tokens; it at least doubles."""
        if kv_length > self.capacity:
            self.capacity = max(kv_length, 2 * self.capacity)

    def use_one(self, row: int, start: int, kv_length: int) -> None:
        self.rows = [row]
        self.start = start
        self.kv_length = kv_length
        self.columns = None

    def use_several(
        self, rows: Sequence[int], index: Tensor, columns: Tensor, kv_length: int
    ) -> None:
        self.rows = rows
        self.index = index
        self.leading = list(rows) == [*range(len(rows))]
        self.start = 0
        self.kv_length = kv_length
        self.columns = columns

    def forget_columns(self) -> None:
        self.columns = None


def positions(
    ids: Tensor, left_padding: Tensor, cached_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the positions of `ids` [m, T], 0 for padding, and which are padding, both [m, T]. Row
    b begins with `left_padding[b]` padding tokens and continues `cached_lengths[b]` cached
    tokens."""
    steps = torch.arange(ids.shape[1], device=ids.device) - left_padding[:, None]
    return (steps + cached_lengths[:, None]).masked_fill(steps < 0, 0), steps < 0
