"""Forward passes recorded as CUDA graphs.

To replay a recording, the host writes only a few numbers. A whole draft window is one replay.

The pass of a cycle covers all rows of the cache and its columns up to a multiple of BLOCK. Prompts
run through the model's own pass, which is not recorded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lenience.core.errors import first_line
from lenience.core.profile import Profile
from lenience.core.transfer import to_device
from lenience.models.kv_cache import (
    LATER,
    Forward,
    PlainCache,
    TreeVisibility,
    Visibility,
    positions,
)
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST, States

_RECORDING = threading.Lock()
"""Lock that allows one recording at a time in a process."""
BLOCK = 256
KEPT = 64
"""Number of visible columns is rounded up to a multiple of BLOCK; a cache keeps at most KEPT
recordings."""


class CudaGraphs:
    """Backend that records passes as CUDA graphs and replays them."""

    makes_others: bool = True
    shares_layers = False

    def __init__(self, states: States = LAST) -> None:
        self.states = states
        self._spare: list[CudaGraphCache] = []
        """Caches of closed sessions, with their recordings, for the next session; at most one."""
        self._lock = threading.Lock()

    def giving(self, lm: LM, states: States) -> CudaGraphs:
        return CudaGraphs(states)

    def for_trees(self, lm: LM) -> CudaGraphs:
        return self

    def has_spare(self, rows: int, capacity: int) -> bool:
        return any(cache.fits(rows, capacity) for cache in self._spare)

    def drop_spare(self, rows: int, capacity: int) -> None:
        with self._lock:
            self._spare = [cache for cache in self._spare if cache.fits(rows, capacity)]

    def keep(self, cache: CudaGraphCache) -> None:
        """Keep the cache of a closed session for the next session."""
        with self._lock:
            self._spare = [cache]

    def cache(self, lm: LM, rows: int, capacity: int) -> CudaGraphCache:
        with self._lock:  # a cache must not be given to two sessions
            spare = self._spare
            self._spare = []
        if spare and spare[0].fits(rows, capacity):
            spare[0].zero()
            return spare[0]
        return CudaGraphCache(lm, self, rows, _round_up(capacity))


class CudaGraphCache(PlainCache):
    """A KV cache whose passes are recorded and replayed, except for prompts. On a CPU the passes
    run each time, with the same shapes."""

    can_loop = True

    def __init__(self, lm: LM, backend: CudaGraphs, rows: int, capacity: int):
        super().__init__(lm, rows, capacity, backend.states)
        self._backend = backend
        self._recorded_capacity = capacity
        self._recorded: dict[_RecordingShape, _Recording] = {}
        self._pool: Any = None

    def of_layers(self, lm: LM, layers: Sequence[int], trees: bool) -> None:
        """Return None: recordings are bound to their own memory, so layers cannot share it."""

    @property
    def needs_host_tokens(self) -> bool:
        return False

    def fits(self, rows: int, capacity: int) -> bool:
        return self.slots.num_rows == rows and self.slots.capacity >= capacity

    def on_session_closed(self) -> None:
        self._backend.keep(self)

    def memory_pool(self) -> Any:
        """Return the memory pool that all recordings share. A recording's outputs are copied before
        another recording is replayed."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    @torch.inference_mode()
    def zero(self) -> None:
        """Fill the cache with zeros. A pass that overflowed may have left NaN, and a masked NaN
        still spreads, as 0 times NaN is NaN."""
        for states in self.kept():
            states.zero_()

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        if forward.length > forward.num_states + 1:  # prompts, whose lengths differ
            shorter = forward.kv_length - forward.lookahead
            first = super().read(
                replace(forward, lookahead=0, kv_length=shorter), profile
            )
            return self._read_on(forward, first, profile)
        kv_length = _round_up(forward.kv_length)
        self.slots.make_room(kv_length)
        if (
            self.slots.capacity != self._recorded_capacity
        ):  # the recordings use the old memory
            self._recorded = {}
            self._recorded_capacity = self.slots.capacity
            self._pool = None
        is_tree = forward.parents is not None
        shape = _RecordingShape(
            forward.length, forward.num_states, forward.lookahead, kv_length, is_tree
        )
        recording = self._recorded.pop(shape, None) or _Recording(self, shape)
        self._recorded[shape] = recording  # keep the recording used last at the end
        if len(self._recorded) > KEPT:
            del self._recorded[next(iter(self._recorded))]
        return recording(forward, profile)

    def _read_on(
        self, forward: Forward, first: tuple[Tensor, Tensor], profile: Profile
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of a pass that was not recorded (`first`), followed by
        those of its `lookahead` tokens, which are read one by one."""
        parts = [first]
        lengths = [
            cached + len(ids) - pad
            for cached, ids, pad in zip(
                forward.cached_lengths, forward.input_ids, forward.left_padding
            )
        ]
        for i in range(forward.lookahead):
            cached = [length + i for length in lengths]
            later = Forward(
                rows=forward.rows,
                input_ids=[[LATER]] * len(cached),
                left_padding=[0] * len(cached),
                cached_lengths=cached,
                kv_length=max(cached) + 1,
                num_states=1,
                device_tokens=parts[-1][0][:, -1:].argmax(-1),
            )
            parts.append(self.read(later, profile))
        logits, hidden = (torch.cat(part, 1) for part in zip(*parts))
        return logits, hidden


@dataclass(frozen=True)
class _RecordingShape:
    """Shape of a recording: `length` tokens of every row and `lookahead` further tokens. Logits are
    returned after the last `num_states` tokens and each further token; `kv_length` columns of the
    cache are visible."""

    length: int
    num_states: int
    lookahead: int
    kv_length: int
    is_tree: bool


class _Recording:
    """A pass over every row of a cache, recorded if the cache is on a GPU."""

    def __init__(self, cache: CudaGraphCache, shape: _RecordingShape):
        self.cache = cache
        self.shape = shape
        rows = cache.slots.num_rows
        device = cache.lm.device
        self.ids = torch.zeros(rows, shape.length, dtype=torch.long, device=device)
        self.left_padding = torch.zeros(rows, dtype=torch.long, device=device)
        self.cached_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.rows = torch.arange(rows, device=device)
        self.graph = None
        self.sight: Visibility | None = None  # for trees
        if shape.is_tree:
            related = torch.ones(rows, shape.length, shape.kv_length, dtype=torch.bool)
            keys = torch.arange(shape.kv_length).repeat(rows, 1)
            parts = (torch.zeros(rows, shape.length, dtype=torch.long), keys, related)
            self.sight = Visibility(*(part.to(device) for part in parts))
        if device.type == "cuda":
            try:
                with _RECORDING, torch.cuda.device(device):
                    self.graph = self._record()
            except (
                RuntimeError
            ) as error:  # for example out of memory; the pass runs unrecorded
                lm = cache.lm
                why = f"a pass is not recorded: {first_line(error)}"
                warnings.warn(f"{lm.role} {lm.name!r}: {why}", stacklevel=2)

    def _record(self) -> Any:
        """Record a pass. All tokens count as padding meanwhile, so that nothing is written into the
        rows."""
        self.left_padding += self.shape.length
        aside = torch.cuda.Stream()
        cache = self.cache
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        pool = cache.memory_pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.out = self._run()
        cache.slots.forget_columns()  # they are in the pool's memory
        return graph

    def _run(self) -> tuple[Tensor, Tensor]:
        length = self.shape.length
        ids = self.ids
        padding = self.left_padding
        cached = self.cached_lengths
        parts = [
            self._forward(ids, *positions(ids, padding, cached), self.shape.num_states)
        ]
        # rows that are all padding stay padding
        cached = cached + length - padding
        padding = (padding == length).long()
        for _ in range(self.shape.lookahead):
            ids = parts[-1][0][:, -1:].argmax(-1)
            parts.append(self._forward(ids, *positions(ids, padding, cached), 1))
            cached = cached + 1
        logits, hidden = (torch.cat(part, 1) for part in zip(*parts))
        return logits, hidden

    def _forward(
        self, ids: Tensor, position_ids: Tensor, is_padding: Tensor, num_states: int
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        slots = self.cache.slots
        columns = position_ids.masked_fill(is_padding, slots.capacity)
        slots.use_several(
            range(slots.num_rows), self.rows, columns, self.shape.kv_length
        )
        ids = ids.clamp(max=cache.lm.vocab_size - 1)
        keys = torch.arange(self.shape.kv_length, device=ids.device)
        return cache.forward(
            ids, num_states, self.sight or Visibility(position_ids, keys)
        )

    @torch.inference_mode()
    def __call__(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        rows = None  # None if all rows take part
        if forward.rows != [*range(len(self.rows))]:
            rows = to_device(forward.rows, self.ids.device)
        self._write(forward, rows)
        profile.add("cache")
        if self.graph:
            self.graph.replay()
            logits, hidden = self.out
        else:
            logits, hidden = self._run()
        profile.add(self.cache.lm.role)
        if rows is not None:
            return logits[rows], hidden[rows]
        return (logits.clone(), hidden.clone()) if self.graph else (logits, hidden)

    def _write(self, forward: Forward, rows: Tensor | None) -> None:
        """Write a pass into the inputs of the recording. Rows that take no part are all padding."""
        length = self.shape.length
        numbers = [[*[0] * length, length, 0] for _ in range(len(self.rows))]
        asked = zip(
            forward.rows,
            forward.input_ids,
            forward.left_padding,
            forward.cached_lengths,
        )
        for row, ids, padding, cached in asked:
            numbers[row] = [*ids, padding, cached]
        written = to_device(numbers, self.ids.device)
        self.ids.copy_(written[:, :length])
        if forward.device_tokens is not None:
            last = length - forward.device_tokens.shape[1]
            self.ids[slice(None) if rows is None else rows, last:] = (
                forward.device_tokens
            )
        self.left_padding.copy_(written[:, length])
        self.cached_lengths.copy_(written[:, length + 1])
        if self.sight is not None:
            self._see(replace(forward, kv_length=self.shape.kv_length))

    def _see(self, forward: Forward) -> None:
        """Write positions and visibility of trees into the inputs of the recording."""
        assert self.sight is not None and self.sight.related is not None
        given = TreeVisibility.of(forward, self.cache.lm.context_length).on(
            self.ids.device
        )
        assert given.related is not None
        rows = to_device(forward.rows, self.ids.device)
        self.sight.at[rows] = given.at
        self.sight.keys[rows] = given.keys
        self.sight.related[rows] = given.related


def _round_up(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
