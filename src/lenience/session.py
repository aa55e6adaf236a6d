"""Session: rows of tokens and their KV cache, read and rolled back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast
from weakref import finalize

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lenience.core.errors import first_line
from lenience.core.profile import Profile
from lenience.core.transfer import coming, sent
from lenience.core.types import Reading
from lenience.model import LM

LATER = -1
"""Stands for a token that is still to come from the device."""
LARGEST_MASK = 1 << 26
"""How many entries the attention mask of rows that are read together may have."""


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
    def together(self) -> bool:
        """Whether rows of different lengths can share a pass."""
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


class Session:
    """Sequences of tokens, each in a row of a preallocated KV cache that is addressed by position. A session is handed the
    whole sequences each time and works out what is new; rolling back is forgetting that a row was longer.

    Rows of different lengths share a pass where the model's attention takes a mask from outside (checked once, see
    `takes_masks`), and are read one by one where it does not.
    """

    def __init__(
        self,
        lm: LM,
        rows: int = 1,
        capacity: int = 256,
        cache: RowCache | None = None,
        profile: Profile | None = None,
        layer: int | None = None,
    ):
        self.lm, self.profile = lm, profile or Profile()
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._coming: list[tuple[list[list[int]], list[int], Callable[[], list[list[int]]]]] = []
        """Rows, from where on they have tokens of the device, and what gives these."""
        if cache is None and layer is not None:
            cache = PlainCache(lm, rows, capacity, layer)  # exported passes give the last states alone
        self.cache: RowCache = cache or (lm.graph.cache if lm.graph else PlainCache)(lm, rows, capacity)
        finalize(self, self.cache.release).atexit = False

    @property
    def tokens(self) -> list[list[int]]:
        """What is in each row."""
        for rows, starts, found in self._coming:
            for row, start, tokens in zip(rows, starts, found()):
                row[start : start + len(tokens)] = tokens
        self._coming = []
        return self._tokens

    def room(self, tokens: Sequence[int]) -> int:
        """How many more tokens the model's context can hold after these."""
        return 1 << 30 if self.lm.context is None else self.lm.context - len(tokens)

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        tokens = self.tokens
        moved, tokens[to], tokens[source] = tokens[source], [], []
        self.cache.move(source, to)
        tokens[to] = moved

    @torch.inference_mode()
    def read(
        self,
        sequences: Sequence[list[int]],
        states: int = 1,
        ahead: Tensor | None = None,
        on: int = 0,
        rows: Sequence[int] | None = None,
    ) -> Reading:
        """Logits [B, states, V] and hidden states [B, states, H] after each of the last `states` tokens of each sequence,
        which may be followed by tokens `ahead` [B, a]; sequence b is row b's, or rows[b]'s. What is past the end of the
        model's context is not read; its states are anything.

        Of a single state, up to `on` more may follow, each after the most probable token of the one before, where the cache
        reads on by itself.
        """
        self.profile.lap("rest")
        held = self.tokens
        assert len(sequences) <= len(held)
        held = held[: len(sequences)] if rows is None else [held[row] for row in rows]
        if ahead is not None:
            sequences, ahead = self._join(sequences, ahead)
        over = [max(0, -self.room(new)) for new in sequences]
        sequences = [new[: len(new) - past] for new, past in zip(sequences, over)]
        keep = [min(common(old, new), len(new) - states) for old, new in zip(held, sequences)]
        counts = [len(new) - kept for kept, new in zip(keep, sequences)]
        groups = self._groups(sequences, counts, states)
        if len(groups) > 1 or not self.cache.loops:
            on = 0
        on = max(0, min([on, *map(self.room, sequences)]))
        for old, kept in zip(held, keep):
            del old[kept:]  # a pass that fails leaves nothing that is believed
        done = [
            self._pass(
                group if rows is None else [rows[b] for b in group],
                [sequences[b] for b in group],
                [keep[b] for b in group],
                states,
                on,
                ahead if ahead is None or len(groups) == 1 else ahead[sent(group, ahead.device)],
            )
            for group in groups
        ]
        for old, new in zip(held, sequences):
            old += new[len(old) :]
        if ahead is not None:
            self._coming.append((held, [len(new) - ahead.shape[1] for new in sequences], coming(ahead)))
        logits, hidden = done[0]
        if len(done) > 1:
            order = sent([b for group in groups for b in group], logits.device).argsort()
            logits, hidden = (torch.cat(parts)[order] for parts in zip(*done))
        if any(over):  # the states of what was read belong further in front
            logits, hidden = (torch.stack([row.roll(-past, 0) for row, past in zip(rows, over)]) for rows in (logits, hidden))
        reading = Reading(logits, hidden, counts)
        if on:
            self._coming.append((held, [len(new) for new in sequences], coming(reading.best[:, :on])))
        self.profile.lap("cache")
        return reading

    def _join(self, sequences: Sequence[list[int]], ahead: Tensor) -> tuple[list[list[int]], Tensor | None]:
        """The sequences with the tokens `ahead` [B, a]; where these are left on the device, LATER stands for them and they are
        given back."""
        n = ahead.shape[1]
        late = not self.cache.waits and all(self.room(sequence) >= n for sequence in sequences)
        tokens = [[LATER] * n] * len(sequences) if late else ahead.tolist()
        return [sequence + more for sequence, more in zip(sequences, tokens)], ahead if late and n else None

    def _groups(self, sequences: Sequence[list[int]], counts: list[int], states: int) -> list[list[int]]:
        """Which rows are read in one pass. Rows with much to read, such as new prompts, would make the others wait if they
        were read with them, and too many of them together would need a large mask."""
        if len(sequences) > 1 and not self.cache.together:
            return [[b] for b in range(len(sequences))]
        groups: list[list[int]] = []
        for b in (b for b, count in enumerate(counts) if count > states + 1):
            group = [*groups[-1], b] if groups else [b]
            mask = len(group) * max(counts[g] for g in group) * max(len(sequences[g]) for g in group)
            if groups and mask <= LARGEST_MASK:
                groups[-1] = group
            else:
                groups.append([b])
        short = [b for b, count in enumerate(counts) if count <= states + 1]
        return [short, *groups] if short else groups

    def _pass(
        self, which: list[int], sequences: list[list[int]], keep: list[int], states: int, on: int, ahead: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One forward pass of the rows `which`, of whose sequences `keep` tokens are in the cache; gives logits and hidden
        states. Rows with fewer new tokens than others are padded in front, so that the last states are those asked for."""
        most = max(len(new) - kept for new, kept in zip(sequences, keep))  # T
        pads = [most - len(new) + kept for new, kept in zip(sequences, keep)]
        ids = [[0] * pad + new[kept:] for pad, new, kept in zip(pads, sequences, keep)]
        return self.cache.read(Pass(which, ids, pads, keep, max(map(len, sequences)) + on, states, on, ahead), self.profile)


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
    def together(self) -> bool:
        return takes_masks(self.lm)

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
            Session(self.lm, cache=self).read([[0]])
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


def takes_masks(lm: LM) -> bool:
    """Whether rows of different lengths can share a pass of a model's own forward; where they cannot, a warning says so.
    Found out once for a model."""
    with lm.lock:
        if lm.takes_masks is None:
            _try_masks(lm)
    return bool(lm.takes_masks)


def _try_masks(lm: LM) -> None:
    attention = lm.model.config.get_text_config()._attn_implementation
    lm.takes_masks = attention in ("eager", "sdpa") and not lm.reads_rows_apart
    why = "takes no mask from outside"
    if lm.takes_masks:  # models differ in how they place a mask, so it is tried; the session that tries it believes that it can
        try:
            lm.takes_masks = reads_together_as_alone(lm, PlainCache(lm, 3, 256))
        except Exception as error:  # whatever a model raises that wants its mask otherwise
            lm.takes_masks, why = False, f"{why} ({type(error).__name__}: {first_line(error)})"
    if not lm.takes_masks:
        warnings.warn(f"{lm.role} {lm.name!r}: {why}; rows are read one by one", stacklevel=4)


def reads_together_as_alone(lm: LM, cache: RowCache) -> bool:
    """Whether rows of different lengths that are read together in `cache`, of three rows, have the states that they have when
    each is read alone by the model's own pass; so have those that the cache goes on to by itself."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, lm.context or n) for n in (8, 40, 23)]
    rows = [torch.randint(lm.width, (n,), generator=generator).tolist() for n in lengths]
    together = Session(lm, 3, cache=cache)
    together.read([row[:-3] for row in rows])
    for states, on in ((2, 0), (1, 3)):
        last = torch.tensor([row[-1:] for row in rows], device=lm.device)
        got = together.read([row[:-1] for row in rows], states, ahead=last, on=on)
        n = got.hidden.shape[1]
        rows = [row + more for row, more in zip(rows, got.logits[:, : n - states].argmax(-1).tolist())]
        alone = [Session(lm, cache=PlainCache(lm, 1, 256)).read([row], n).hidden for row in rows]
        wanted = torch.cat(alone).float()
        error = (got.hidden.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        if not error.max() < (0.1 if lm.model.dtype.itemsize < 4 else 1e-3):
            return False
    return True


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two sequences, by bisection over comparisons of slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
