"""Passes of fixed shapes, which a GPU records once as CUDA graphs and replays: what is left of the host's work between them is
writing a few numbers. A draft's window is one replay.

What a cycle reads is read of all rows of the cache, with its columns up to a multiple of BLOCK in sight; prompts are read as
they are.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lenience.core.errors import first_line
from lenience.core.profile import Profile
from lenience.core.transfer import sent
from lenience.models.kv_cache import LATER, Pass, PlainCache, positions
from lenience.models.lm import LM

_RECORDING = threading.Lock()
"""There may be one at a time in a process."""
BLOCK, KEPT = 256, 64
"""To a multiple of what the columns in sight are rounded up; how many recordings a cache keeps."""


class Replay:
    """The way in which a model is read, for `LM.graph`."""

    def __init__(self) -> None:
        self.spare: list[ReplayCache] = []
        """At most one cache that no session uses any more, with its recordings, for the next one."""

    def spares(self, rows: int, capacity: int) -> bool:
        """Whether a cache is kept that the next session can take; one that it cannot take is dropped."""
        self.spare = [cache for cache in self.spare if cache.place.rows == rows and cache.place.capacity >= capacity]
        return bool(self.spare)

    def cache(self, lm: LM, rows: int, capacity: int) -> ReplayCache:
        if self.spares(rows, capacity):
            with suppress(IndexError):  # another thread may have taken it
                cache = self.spare.pop()
                cache.zero()
                return cache
        return ReplayCache(lm, rows, -(-capacity // BLOCK) * BLOCK)


class ReplayCache(PlainCache):
    """The keys and values of rows of tokens; the passes of cycles over them are recorded and replayed. On a CPU they are made
    anew each time, with the same shapes."""

    loops, waits = True, False

    def __init__(self, lm: LM, rows: int, capacity: int):
        super().__init__(lm, rows, capacity)
        self._recorded: dict[tuple[int, ...], _Recording] = {}
        self._capacity = capacity
        self.pool: Any = None
        """Memory that all recordings share: what one leaves is copied before another is replayed."""

    def release(self) -> None:
        if isinstance(self.lm.graph, Replay):
            self.lm.graph.spare = [self]

    @torch.inference_mode()
    def zero(self) -> None:
        """What a pass left that overflowed must not reach another: 0 times a NaN is none."""
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys.zero_()
            layer.values.zero_()

    def read(self, p: Pass, profile: Profile) -> tuple[Tensor, Tensor]:
        t = len(p.ids[0])
        if t > p.states + 1:  # prompts, each of its own length
            return self._read_on(p, super().read(replace(p, on=0, extent=p.extent - p.on), profile), profile)
        extent = -(-p.extent // BLOCK) * BLOCK
        if extent > self.place.capacity:
            self.place.capacity = max(extent, 2 * self.place.capacity)
        if self.place.capacity != self._capacity:  # what was recorded reads other memory
            self._recorded, self._capacity, self.pool = {}, self.place.capacity, None
        key = (t, p.states, p.on, extent)
        recording = self._recorded.pop(key, None) or _Recording(self, *key)
        self._recorded[key] = recording  # the last used one is the last
        if len(self._recorded) > KEPT:
            del self._recorded[next(iter(self._recorded))]
        return recording(p, profile)

    def _read_on(self, p: Pass, first: tuple[Tensor, Tensor], profile: Profile) -> tuple[Tensor, Tensor]:
        """What follows a pass that was not recorded, token by token."""
        parts, cached = [first], [kept + len(ids) - pad for kept, ids, pad in zip(p.cached, p.ids, p.pads)]
        for i in range(p.on):
            tokens, here = parts[-1][0][:, -1:].argmax(-1), [kept + i for kept in cached]
            one = Pass(p.which, [[LATER]] * len(here), [0] * len(here), here, max(here) + 1, 1, ahead=tokens)
            parts.append(self.read(one, profile))
        logits, hidden = (torch.cat(part, 1) for part in zip(*parts))
        return logits, hidden


class _Recording:
    """A pass over `t` tokens of every row and `on` more, of whose last `states` and those that follow logits are wanted, with
    `extent` columns of the cache in sight."""

    def __init__(self, cache: ReplayCache, t: int, states: int, on: int, extent: int):
        self.cache, self.states, self.on, self.extent = cache, states, on, extent
        rows, device = cache.place.rows, cache.lm.device
        self.ids = torch.zeros(rows, t, dtype=torch.long, device=device)
        self.pads, self.cached = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        self.rows, self.graph = torch.arange(rows, device=device), None
        if device.type == "cuda":
            try:
                with _RECORDING, torch.cuda.device(device):
                    self.graph = self._record()
            except RuntimeError as error:  # out of memory among them; the pass can still be made
                lm = cache.lm
                warnings.warn(f"{lm.role} {lm.name!r}: a pass is not recorded: {first_line(error)}", stacklevel=2)

    def _record(self) -> Any:
        """Padding is read while recording: it is written beside the rows."""
        self.pads += self.ids.shape[1]
        aside, cache = torch.cuda.Stream(), self.cache
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run()
        torch.cuda.current_stream().wait_stream(aside)
        graph, cache.pool = torch.cuda.CUDAGraph(), cache.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=cache.pool, capture_error_mode="thread_local"):
            self.out = self._run()
        cache.place.columns = None  # it lies in the pool
        return graph

    def _run(self) -> tuple[Tensor, Tensor]:
        parts, ids, pads, cached = [], self.ids, self.pads, self.cached
        for i in range(self.on + 1):
            parts.append(self._forward(ids, *positions(ids, pads, cached), 1 if i else self.states))
            if i == 0:  # rows of padding stay so
                cached, pads = cached + ids.shape[1] - pads, (pads == ids.shape[1]).long()
            else:
                cached = cached + 1
            ids = parts[-1][0][:, -1:].argmax(-1)
        logits, hidden = (torch.cat(part, 1) for part in zip(*parts))
        return logits, hidden

    def _forward(self, ids: Tensor, at: Tensor, padding: Tensor, states: int) -> tuple[Tensor, Tensor]:
        lm, place = self.cache.lm, self.cache.place
        place.which, place.index, place.first = range(place.rows), self.rows, True
        place.start, place.extent = 0, self.extent
        place.columns = at.masked_fill(padding, place.capacity)
        return self.cache.forward(ids.clamp(max=lm.width - 1), states, at)

    @torch.inference_mode()
    def __call__(self, p: Pass, profile: Profile) -> tuple[Tensor, Tensor]:
        t, whole = self.ids.shape[1], p.which == [*range(len(self.rows))]
        ids, pads, cached = [[0] * t] * len(self.rows), [t] * len(self.rows), [0] * len(self.rows)
        for i, row in enumerate(p.which):
            ids[row], pads[row], cached[row] = p.ids[i], p.pads[i], p.cached[i]
        numbers = sent([[*row, pad, kept] for row, pad, kept in zip(ids, pads, cached)], self.ids.device)
        which = None if whole else sent(p.which, self.ids.device)
        self.ids.copy_(numbers[:, :t])
        if p.ahead is not None:
            self.ids[slice(None) if which is None else which, t - p.ahead.shape[1] :] = p.ahead
        self.pads.copy_(numbers[:, t])
        self.cached.copy_(numbers[:, t + 1])
        profile.lap("cache")
        if self.graph:
            self.graph.replay()
            logits, hidden = self.out
        else:
            logits, hidden = self._run()
        profile.lap(self.cache.lm.role)
        if which is not None:
            return logits[which], hidden[which]
        return (logits.clone(), hidden.clone()) if self.graph else (logits, hidden)
