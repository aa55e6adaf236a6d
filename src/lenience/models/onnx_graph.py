"""An exported forward pass, and the cache that it reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lenience.core.profile import Profile
from lenience.models.kv_cache import Forward
from lenience.models.lm import LM

FIRST_CAPACITY = 160
"""How many tokens a row of a new cache can hold before it grows."""
KEPT_CALLS, LARGEST_KEPT_CALL = 16, 1 << 20
"""How many shapes of calls a cache keeps bound, and of how many numbers."""
LARGEST_SCORES = 1 << 24
"""How many attention scores a layer may take at once; longer reads are made in parts."""


AtLayer = Callable[["LM", int], "Graph | None"]


def load(path: Path, at_layer: AtLayer | None = None, makes_layers: bool = False) -> Graph:
    """The graph in a file, which is deleted if ONNX Runtime cannot read it; raises whatever that
    raises."""
    import onnxruntime

    errors = onnxruntime.capi.onnxruntime_pybind11_state
    _share_threads()
    try:
        return Graph(path, at_layer, makes_layers)
    except (errors.InvalidProtobuf, errors.InvalidGraph):
        path.unlink(missing_ok=True)
        raise


class Graph:
    """An exported forward pass, loaded: the backend of exported graphs."""

    def __init__(self, path: Path, at_layer: AtLayer | None, makes_layers: bool):
        """`at_layer` finds the graph that gives the states after a layer, and perhaps makes it."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        inputs = self.session.get_inputs()
        past = [item for item in inputs if item.name.startswith("past_")]
        self.layers, self.heads, self.head_size = len(past) // 2, past[0].shape[1], past[0].shape[3]
        logits, hidden = self.session.get_outputs()[:2]
        self.vocab_size, self.hidden_size = logits.shape[-1], hidden.shape[-1]
        self.can_loop = any(item.name == "steps" for item in inputs)

        self._at_layer, self.makes_layers = at_layer, makes_layers

    def at_layer(self, lm: LM, layer: int) -> Graph | None:
        return self._at_layer(lm, layer) if self._at_layer else None

    def has_spare(self, rows: int, capacity: int) -> bool:
        return False

    def drop_spare(self, rows: int, capacity: int) -> None: ...

    def cache(self, lm: LM, rows: int, capacity: int) -> GraphCache:
        return GraphCache(lm, self, rows, capacity)


@cache
def _share_threads() -> None:
    """One pool for all graphs: threads of the target's that wait by spinning would take the cores
    from the draft."""
    import onnxruntime

    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    onnxruntime.set_global_thread_pool_sizes(cores, 1)


class GraphCache:
    """The keys and values of rows of tokens [2 · layers, rows, H, C, D], read through a graph. The
    graph reads all of C, so it starts small and grows with the rows, to `capacity` where that is
    enough."""

    reads_ragged = needs_host_tokens = True

    def __init__(self, lm: LM, graph: Graph, rows: int, capacity: int):
        self.lm, self.graph = lm, graph
        self.num_queries = int(lm.model.config.get_text_config().num_attention_heads)
        self.largest_capacity = capacity
        self.states = self._zeros(rows, min(capacity, FIRST_CAPACITY))
        self._calls: dict[_Shape, _Call] = {}

    @property
    def can_loop(self) -> bool:
        return self.graph.can_loop

    @property
    def capacity(self) -> int:
        return self.states.shape[3]

    def token_bytes(self) -> dict[torch.device, int]:
        """While a cache grows there are two."""
        return {self.states.device: 2 * self.states[:, 0, :, 0].nbytes}

    def on_session_closed(self) -> None: ...

    def move(self, source: int, to: int) -> None:
        self.states[:, to] = self.states[:, source]

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        self._make_room(forward.kv_length)
        first, end = min(forward.rows), max(forward.rows) + 1
        scores = self.num_queries * (end - first) * forward.length * self.capacity
        if forward.length > 1 and scores > LARGEST_SCORES:
            return self._in_halves(forward, profile)
        if end - first > 2 * len(forward.rows):  # rows far apart are gathered
            call = _Call(self.graph, self.states[:, forward.rows], _Shape.of(forward))
            places = list(range(len(forward.rows)))
        else:
            # those between them are read as padding, since gathering would copy most of the cache
            call = self._call(_Shape.of(forward, first, end))
            places = [row - first for row in forward.rows]
        profile.add("cache")
        logits, hidden = call(forward, places, self.lm.vocab_size - 1)
        profile.add(self.lm.role)
        self._write(forward, call.new, places)
        return logits, hidden

    def _write(self, forward: Forward, new: Tensor, places: list[int]) -> None:
        """Put new states, which lie at `places`, into the rows."""
        rows = zip(places, forward.rows, forward.left_padding, forward.cached_lengths)
        for place, row, padding, cached in rows:
            n = forward.length - padding + forward.lookahead
            states = new.select(1, place).narrow(2, padding, n)
            self.states.select(1, row).narrow(2, cached, n).copy_(states)

    def _make_room(self, kv_length: int) -> None:
        if kv_length <= self.capacity:
            return
        old, by_half = self.states, self.capacity * 3 // 2
        capacity = max(kv_length, min(by_half, self.largest_capacity))
        self.states = self._zeros(old.shape[1], capacity)
        self.states[:, :, :, : old.shape[3]] = old
        self._calls = {}

    def _in_halves(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        """Read what would take too much memory at once, the first half of the columns and then the
        others."""
        half = forward.length // 2
        rest = forward.length - half
        padding = [min(pad, half) for pad in forward.left_padding]
        first = Forward(
            rows=forward.rows,
            input_ids=[ids[:half] for ids in forward.input_ids],
            left_padding=padding,
            cached_lengths=forward.cached_lengths,
            kv_length=forward.kv_length - rest,
            num_states=max(forward.num_states - rest, 1),
        )
        second = replace(
            forward,
            input_ids=[ids[half:] for ids in forward.input_ids],
            left_padding=[pad - gone for pad, gone in zip(forward.left_padding, padding)],
            cached_lengths=[n + half - pad for n, pad in zip(forward.cached_lengths, padding)],
            num_states=min(forward.num_states, rest),
        )
        parts = [self.read(first, profile), self.read(second, profile)]
        n = forward.num_states + forward.lookahead
        logits, hidden = (torch.cat(pair, 1)[:, -n:] for pair in zip(*parts))
        return logits, hidden

    def _call(self, shape: _Shape) -> _Call:
        """What reads the rows of a shape; some are kept."""
        if call := self._calls.get(shape):
            return call
        call = _Call(self.graph, self.states[:, shape.first : shape.end], shape)
        if call.new.numel() + call.logits.numel() <= LARGEST_KEPT_CALL:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            self._calls[shape] = call
        return call

    def _zeros(self, rows: int, capacity: int) -> Tensor:
        """Zeros, not anything: a masked key's weight is 0, and 0 times a NaN is none."""
        graph = self.graph
        return torch.zeros(2 * graph.layers, rows, graph.heads, capacity, graph.head_size)


@dataclass(frozen=True)
class _Shape:
    """What a call is bound to."""

    first: int
    end: int
    """The rows that lie side by side, from the first to before the end."""
    length: int
    num_states: int
    lookahead: int

    @classmethod
    def of(cls, forward: Forward, first: int = 0, end: int = 0) -> _Shape:
        return cls(first, end, forward.length, forward.num_states, forward.lookahead)


class _Call:
    """A graph bound to cached states and to a shape, so that a call writes a few numbers."""

    def __init__(self, graph: Graph, past: Tensor, shape: _Shape):
        m, length = past.shape[1], shape.length
        self.graph, self.past, self.binding = graph, past, graph.session.io_binding()
        self.num_states, self.lookahead = shape.num_states, shape.lookahead
        self.ids = np.zeros((m, length), np.int64)
        self.pads, self.cached = np.zeros(m, np.int64), np.zeros(m, np.int64)
        kept = np.arange(length - shape.num_states, length)
        self.inputs = {"ids": self.ids, "pads": self.pads, "cached": self.cached, "kept": kept}
        if graph.can_loop:
            self.inputs["steps"] = np.arange(shape.lookahead)
        for name, value in self.inputs.items():
            address = value.ctypes.data
            self.binding.bind_input(name, "cpu", 0, np.int64, value.shape, buffer_ptr=address)
        for i, layer in enumerate(past):
            size, address = tuple(layer.shape), layer.data_ptr()
            self.binding.bind_input(f"past_{i}", "cpu", 0, np.float32, size, buffer_ptr=address)
        new_length = length + shape.lookahead
        self.new = torch.empty(2 * graph.layers, m, graph.heads, new_length, graph.head_size)
        for i, layer in enumerate(self.new):
            self._bind_output(f"new_{i}", layer)
        self.logits = self._outputs("logits", graph.vocab_size)
        self.hidden = self._outputs("hidden", graph.hidden_size)

    def _outputs(self, name: str, width: int) -> Tensor:
        """[m, num_states + lookahead, width]: where the pass over what is given leaves something,
        and after it the loop."""
        m = len(self.ids)
        if not self.lookahead:
            whole = torch.empty(m, self.num_states, width)
            self._bind_output(name, whole)
            return whole
        assert self.num_states == 1
        by_step = torch.empty(1 + self.lookahead, m, width)
        self._bind_output(name, by_step[0][:, None])
        self._bind_output(f"step_{name}", by_step[1:])
        return by_step.transpose(0, 1)

    def _bind_output(self, name: str, value: Tensor) -> None:
        size, address = tuple(value.shape), value.data_ptr()
        self.binding.bind_output(name, "cpu", 0, np.float32, size, buffer_ptr=address)

    def __call__(self, forward: Forward, places: list[int], last_id: int) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the rows at `places`, the others are padding; ids above
        `last_id` are read as that one."""
        whole = len(places) == len(self.ids)
        if not whole:
            self.pads[:], self.cached[:] = self.ids.shape[1], 0
        rows: slice | list[int] = slice(None) if whole else places
        self.ids[rows] = forward.input_ids
        self.pads[rows], self.cached[rows] = forward.left_padding, forward.cached_lengths
        np.minimum(self.ids, last_id, out=self.ids)
        self.graph.session.run_with_iobinding(self.binding)
        if whole:
            return self.logits.clone(), self.hidden.clone()
        return self.logits[places], self.hidden[places]
