"""An exported forward pass, and the cache that it reads."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lenience.core.profile import Profile
from lenience.models.kv_cache import Pass
from lenience.models.lm import LM

FIRST_CAPACITY = 160
"""How many tokens a row of a new cache can hold before it grows."""


KEPT_CALLS, LARGEST_KEPT_CALL = 16, 1 << 20
"""How many shapes of calls a cache keeps bound, and of how many numbers."""


LARGEST_SCORES = 1 << 24
"""How many attention scores a layer may take at once; longer reads are made in parts."""


def load(path: Path) -> Graph:
    """The graph in a file, which is deleted if ONNX Runtime cannot read it; raises whatever that raises."""
    import onnxruntime

    _share_threads()
    try:
        return Graph(path)
    except (onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf,
            onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph):  # fmt: skip
        path.unlink(missing_ok=True)
        raise


class Graph:
    """An exported forward pass, loaded."""

    def __init__(self, path: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        past = [item for item in self.session.get_inputs() if item.name.startswith("past_")]
        self.layers, self.heads, self.size = len(past) // 2, past[0].shape[1], past[0].shape[3]
        self.width, self.hidden = (item.shape[-1] for item in self.session.get_outputs()[:2])
        self.loops = any(item.name == "steps" for item in self.session.get_inputs())

    def spares(self, rows: int, capacity: int) -> bool:
        """Whether a cache is kept that the next session can take: none is."""
        return False

    def cache(self, lm: LM, rows: int, capacity: int) -> GraphCache:
        return GraphCache(lm, self, rows, capacity)


@cache
def _share_threads() -> None:
    """One pool for all graphs: threads of the target's that wait by spinning would take the cores from the draft."""
    import onnxruntime

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    onnxruntime.set_global_thread_pool_sizes(cores, 1)


class GraphCache:
    """The keys and values of rows of tokens [2 · layers, rows, H, C, D], read through a graph. The graph reads all of C, so it
    starts small and grows with the rows, to `capacity` where that is enough."""

    together = waits = True

    def __init__(self, lm: LM, graph: Graph, rows: int, capacity: int):
        self.lm, self.graph = lm, graph
        self.heads = int(lm.model.config.get_text_config().num_attention_heads)
        self.most = capacity
        self.states = self._room(rows, min(capacity, FIRST_CAPACITY))
        self._calls: dict[tuple[int, ...], _Call] = {}

    @property
    def loops(self) -> bool:
        return self.graph.loops

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        """While a cache grows there are two."""
        return {self.states.device: 2 * self.states[:, 0, :, 0].nbytes}

    def release(self) -> None: ...

    def move(self, source: int, to: int) -> None:
        self.states[:, to] = self.states[:, source]

    def read(self, p: Pass, profile: Profile) -> tuple[Tensor, Tensor]:
        if p.extent > self.states.shape[3]:
            old, rows, least = self.states, self.states.shape[1], self.states.shape[3] * 3 // 2
            self.states = self._room(rows, max(p.extent, min(least, self.most)))
            self.states[:, :, :, : old.shape[3]] = old
            self._calls = {}
        t, begin, end = len(p.ids[0]), min(p.which), max(p.which) + 1
        if t > 1 and self.heads * (end - begin) * t * self.states.shape[3] > LARGEST_SCORES:
            return self._in_halves(p, t // 2, profile)
        if end - begin > 2 * len(p.which):  # rows far apart are gathered
            call = _Call(self.graph, self.states[:, p.which], t, p.states, p.on)
            place = list(range(len(p.which)))
        else:  # those between them are read as padding, since gathering would copy most of the cache
            call = self._call(begin, end, t, p.states, p.on)
            place = [row - begin for row in p.which]
        profile.lap("cache")
        logits, hidden = call(p, place, self.lm.width - 1)
        profile.lap(self.lm.role)
        for i, row, pad, cached in zip(place, p.which, p.pads, p.cached):
            n = t - pad + p.on
            self.states.select(1, row).narrow(2, cached, n).copy_(call.new.select(1, i).narrow(2, pad, n))
        return logits, hidden

    def _in_halves(self, p: Pass, half: int, profile: Profile) -> tuple[Tensor, Tensor]:
        """Read what would take too much memory at once, the first `half` columns of it and then the others."""
        rest = len(p.ids[0]) - half
        before = [min(pad, half) for pad in p.pads]
        first = Pass(p.which, [ids[:half] for ids in p.ids], before, p.cached, p.extent - rest, max(p.states - rest, 1))
        cached = [kept + half - pad for kept, pad in zip(p.cached, before)]
        pads = [pad - gone for pad, gone in zip(p.pads, before)]
        second = Pass(p.which, [ids[half:] for ids in p.ids], pads, cached, p.extent, min(p.states, rest), p.on)
        parts, n = [self.read(first, profile), self.read(second, profile)], p.states + p.on
        logits, hidden = (torch.cat(pair, 1)[:, -n:] for pair in zip(*parts))
        return logits, hidden

    def _call(self, begin: int, end: int, t: int, states: int, on: int) -> _Call:
        """What reads `t` tokens of each of the rows from `begin` to `end`; some are kept."""
        key = (begin, end, t, states, on)
        call = self._calls.get(key) or _Call(self.graph, self.states[:, begin:end], t, states, on)
        if key not in self._calls and call.new.numel() + call.logits.numel() <= LARGEST_KEPT_CALL:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            self._calls[key] = call
        return call

    def _room(self, rows: int, capacity: int) -> Tensor:
        """Zeros, not anything: a masked key's weight is 0, and 0 times a NaN is none."""
        graph = self.graph
        return torch.zeros(2 * graph.layers, rows, graph.heads, capacity, graph.size)


class _Call:
    """A graph bound to cached states and to shapes, so that a call writes a few numbers."""

    def __init__(self, graph: Graph, past: Tensor, t: int, states: int, on: int):
        m = past.shape[1]
        self.graph, self.past, self.binding = graph, past, graph.session.io_binding()
        self.ids = np.zeros((m, t), np.int64)
        self.pads, self.cached = np.zeros(m, np.int64), np.zeros(m, np.int64)
        self.given = {"ids": self.ids, "pads": self.pads, "cached": self.cached, "kept": np.arange(t - states, t)}
        if graph.loops:
            self.given["steps"] = np.arange(on)
        for name, value in self.given.items():
            self.binding.bind_input(name, "cpu", 0, np.int64, value.shape, value.ctypes.data)
        for i, layer in enumerate(past):
            self.binding.bind_input(f"past_{i}", "cpu", 0, np.float32, tuple(layer.shape), layer.data_ptr())
        self.new = torch.empty(2 * graph.layers, m, graph.heads, t + on, graph.size)
        for i, layer in enumerate(self.new):
            self._bind_output(f"new_{i}", layer)
        self.logits, self.hidden = (self._outputs(*of) for of in (("logits", graph.width), ("hidden", graph.hidden)))

    def _outputs(self, name: str, width: int) -> Tensor:
        """[m, S + N, width]: where the pass over what is given leaves something, and after it the loop."""
        m, states, on = len(self.ids), len(self.given["kept"]), len(self.given.get("steps", ()))
        if not on:
            made = torch.empty(m, states, width)
            self._bind_output(name, made)
            return made
        assert states == 1
        made = torch.empty(1 + on, m, width)
        self._bind_output(name, made[0][:, None])
        self._bind_output(f"step_{name}", made[1:])
        return made.transpose(0, 1)

    def _bind_output(self, name: str, value: Tensor) -> None:
        self.binding.bind_output(name, "cpu", 0, np.float32, tuple(value.shape), value.data_ptr())

    def __call__(self, p: Pass, place: list[int], most: int) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the rows at `place`, the others are padding; ids above `most` are read as that one."""
        whole = len(place) == len(self.ids)
        if whole:
            self.ids[:], self.pads[:], self.cached[:] = p.ids, p.pads, p.cached
        else:
            self.pads[:], self.cached[:] = self.ids.shape[1], 0
            self.ids[place], self.pads[place], self.cached[place] = p.ids, p.pads, p.cached
        np.minimum(self.ids, most, out=self.ids)
        self.graph.session.run_with_iobinding(self.binding)
        if whole:
            return self.logits.clone(), self.hidden.clone()
        return self.logits[place], self.hidden[place]
