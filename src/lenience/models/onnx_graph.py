"""An exported forward pass, and its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lenience.core.profile import Profile
from lenience.models.kv_cache import NOWHERE, Forward, TreeVisibility
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST, States
from lenience.models.threads import cores

FIRST_CAPACITY = 160
"""Number of tokens per row in a new cache, before it grows."""
KEPT_CALLS = 16
LARGEST_KEPT_CALL = 1 << 20
"""Limits on the bound calls that a cache keeps: their number, and the numbers in each call's
outputs."""
SPARE_MEMORIES = 4
LARGEST_SPARE = 1 << 23
"""Limits on the memories that a graph keeps for later caches, which saves allocating pages: their
number, and the numbers in each memory."""
LARGEST_SCORES = 1 << 24
"""Maximum number of attention scores per layer in a pass. Larger passes are split."""


@dataclass(frozen=True)
class GraphFinder:
    """Functions that find a model's other graphs, and export them if allowed."""

    giving: Callable[[LM, States], Graph | None]
    """Function that returns a graph with other states."""
    for_trees: Callable[[LM, Graph], Graph | None]
    """Function that returns a graph for trees, given the graph for chains."""
    makes: bool


def load(
    path: Path, lm: LM, others: GraphFinder | None = None, keep: bool = False
) -> Graph:
    """Load the graph in a file, with the weights of `lm`. A file that is not such a graph is
    deleted unless `keep`. Raises whatever ONNX Runtime raises."""
    import onnxruntime
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    errors = onnxruntime.capi.onnxruntime_pybind11_state
    _share_threads()
    try:
        return Graph(path, weights_of(lm, path), others)
    except (DecodeError, KeyError, errors.InvalidProtobuf, errors.InvalidGraph):
        if not keep:
            path.unlink(missing_ok=True)
        raise


def weights_of(lm: LM, path: Path) -> dict[str, NDArray[Any]]:
    """Return the weights that a graph file leaves out, keyed by name. Raises KeyError if the model
    lacks a weight or its shape differs."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    weights = dict(lm.model.named_parameters(remove_duplicate=False))
    found = {}
    for constant in graph.initializer:
        if constant.data_location != onnx.TensorProto.EXTERNAL:
            continue
        weight = weights[constant.name].detach()
        if tuple(weight.shape) != tuple(constant.dims):
            raise KeyError(f"{constant.name} has another shape in this model")
        found[constant.name] = weight.contiguous().numpy()
    return found


class Graph:
    """A loaded exported forward pass: the backend of exported graphs."""

    shares_layers = True

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, NDArray[Any]],
        others: GraphFinder | None,
    ):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False
        values = list(map(onnxruntime.OrtValue.ortvalue_from_numpy, weights.values()))
        options.add_external_initializers(list(weights), values)
        self._weights = values  # the session uses their memory
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=providers
        )
        inputs = self.session.get_inputs()
        past = [item for item in inputs if item.name.startswith("past_")]
        self.layers = len(past) // 2
        self.heads = past[0].shape[1]
        self.head_size = past[0].shape[3]
        shapes = {item.name: item.shape for item in self.session.get_outputs()}
        self.vocab_size = shapes["logits"][-1]
        self.hidden_size = shapes["hidden"][-1]
        self.feature_size: int | None = (
            shapes["features"][-1] if "features" in shapes else None
        )
        names = {item.name for item in inputs}
        self.can_loop = "steps" in names
        self.reads_trees = "related" in names
        self.reads_inputs = "inputs" in names
        self._others = others
        self.makes_others = bool(others and others.makes)
        self.trees: Graph | None = None
        """Graph that reads trees, once requested."""
        self._spare: dict[tuple[int, int], _Memory] = {}

    def giving(self, lm: LM, states: States) -> Graph | None:
        return self._others.giving(lm, states) if self._others else None

    def for_trees(self, lm: LM) -> Graph | None:
        if self._others and not self.trees:
            self.trees = self._others.for_trees(lm, self)
        return self if self.trees else None

    def has_spare(self, rows: int, capacity: int) -> bool:
        return False

    def drop_spare(self, rows: int, capacity: int) -> None:
        self._spare = {key: kept for key, kept in self._spare.items() if key[0] == rows}

    def cache(self, lm: LM, rows: int, capacity: int) -> GraphCache:
        return GraphCache(lm, self, _Store(self, rows, capacity))

    def memory(self, rows: int, capacity: int) -> _Memory:
        """Return a zeroed memory, reused from another cache if possible."""
        spare = self._spare.pop((rows, capacity), None)
        if spare is None:
            return _Memory.of(self, rows, capacity)
        spare.clear()
        return spare

    def keep(self, memory: _Memory) -> None:
        """Keep a cache's unused memory for a later cache."""
        if memory.states.numel() > LARGEST_SPARE:
            return
        self._spare[memory.states.shape[1], memory.capacity] = memory
        for oldest in list(self._spare)[:-SPARE_MEMORIES]:
            self._spare.pop(oldest, None)


@cache
def _share_threads() -> None:
    """Share one thread pool among all graphs. The target's threads wait by spinning, and with
    separate pools would take the cores from the draft."""
    import onnxruntime

    onnxruntime.set_global_thread_pool_sizes(cores(), 1)


@dataclass(eq=False)
class _Memory:
    """State buffers of a cache at one capacity, and the calls bound to them."""

    states: Tensor
    """[2 · layers, rows, H, C, D]: keys and values of each layer."""
    features: Tensor
    """[rows, C, F]: features of each token."""
    calls: dict[Graph, dict[_CallShape, _Call]] = field(default_factory=dict)
    """Bound calls by graph: the memory's graph, and graphs of models that share its layers."""

    @classmethod
    def of(cls, graph: Graph, rows: int, capacity: int) -> _Memory:
        """Return a memory filled with zeros. Masked keys have weight 0, and 0 times NaN is NaN."""
        return cls(
            torch.zeros(2 * graph.layers, rows, graph.heads, capacity, graph.head_size),
            torch.zeros(rows, capacity, graph.feature_size or 0),
        )

    @property
    def capacity(self) -> int:
        return self.states.shape[3]

    @torch.inference_mode()
    def clear(self) -> None:
        self.states.zero_()
        self.features.zero_()


class _Store:
    """Memory of a session's rows. Graphs run over all columns, so the memory starts small and grows
    with the rows, up to `largest` columns, or more if a row needs more."""

    def __init__(self, graph: Graph, rows: int, largest: int):
        self.graph = graph
        self.largest = largest
        self.memory = graph.memory(rows, min(largest, FIRST_CAPACITY))

    def make_room(self, kv_length: int) -> None:
        """Grow to at least `kv_length` columns."""
        old = self.memory
        if kv_length <= old.capacity:
            return
        capacity = max(kv_length, min(old.capacity * 3 // 2, self.largest))
        self.memory = self.graph.memory(old.states.shape[1], capacity)
        self.memory.states[:, :, :, : old.capacity] = old.states
        self.memory.features[:, : old.capacity] = old.features
        self.graph.keep(old)


class GraphCache:
    """Keys and values of several rows [2 · layers, rows, H, C, D], extended by a graph. The graph
    may consist of some of the layers, see `of_layers`."""

    reads_ragged = needs_host_tokens = True

    def __init__(
        self, lm: LM, graph: Graph, store: _Store, layers: Sequence[int] | None = None
    ):
        """Take `layers`: the graph's layers among the memory's layers, counted from 0; None for all
        layers."""
        self.lm = lm
        self.graph = graph
        self._store = store
        self.num_queries = int(lm.model.config.get_text_config().num_attention_heads)
        self._shares = layers is not None
        places = [2 * i + j for i in layers or range(graph.layers) for j in (0, 1)]
        self._places = torch.tensor(places)
        """[2 · layers]: indices of the graph's keys and values in the memory."""

    def of_layers(
        self, lm: LM, layers: Sequence[int], trees: bool
    ) -> GraphCache | None:
        graph = lm.backend_for(LAST, trees)
        return (
            GraphCache(lm, graph, self._store, layers)
            if isinstance(graph, Graph)
            else None
        )

    @property
    def can_loop(self) -> bool:
        return self.graph.can_loop

    @property
    def _memory(self) -> _Memory:
        return self._store.memory

    @property
    def states(self) -> Tensor:
        return self._memory.states

    @property
    def capacity(self) -> int:
        return self._memory.capacity

    def token_bytes(self) -> dict[torch.device, int]:
        """Return the bytes per token of a row, per device. They count twice, since a growing cache
        exists twice meanwhile."""
        of_token = self.states[:, 0, :, 0].nbytes + self._memory.features[0, 0].nbytes
        return {self.states.device: 2 * of_token}

    def row_bytes(self) -> dict[torch.device, int]:
        return {}

    def resumable(self, row: int, length: int) -> int:
        return length

    def on_session_closed(self) -> None:
        if not self._shares:
            self.graph.keep(self._memory)

    def copy(self, source: int, to: int, length: int) -> None:
        states = self.states[..., :length, :]
        features = self._memory.features
        states[self._places, to] = states[self._places, source]
        if not self._shares:
            features[to, :length] = features[source, :length]

    def gather(self, row: int, start: int, columns: list[int]) -> None:
        kept = slice(start, start + len(columns))
        states = self.states[:, row]
        # few columns of all layers are copied, not all columns of few layers
        states[self._places, :, kept] = states[:, :, columns][self._places]
        features = self._memory.features
        if not self._shares:
            features[row, kept] = features[row, columns]

    def features(self, row: int, start: int, end: int) -> Tensor:
        return self._memory.features[row, start:end]

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        self._store.make_room(forward.kv_length)
        if forward.parents is not None and forward.length > len(forward.parents[0]) + 1:
            return self._prefix_first(forward, profile)
        first = min(forward.rows)
        end = max(forward.rows) + 1
        scores = self.num_queries * (end - first) * forward.length * self.capacity
        if forward.length > 1 and scores > LARGEST_SCORES:
            return self._in_halves(forward, profile)
        if end - first > 2 * len(forward.rows):  # rows far apart are gathered
            shape = _CallShape.of(forward)
            past = [self.states[place][forward.rows] for place in self._places.tolist()]
            call = _Call(self._graph(shape), past, shape)
            places = list(range(len(forward.rows)))
        else:
            # rows in between count as padding, since gathering would copy most of the cache
            call = self._call(_CallShape.of(forward, first, end))
            places = [row - first for row in forward.rows]
        profile.add("cache")
        logits, hidden = call(forward, places, self.lm)
        profile.add(self.lm.role)
        self._write(forward, call, places)
        return logits, hidden

    def _write(self, forward: Forward, call: _Call, places: list[int]) -> None:
        """Copy the new states of a call, whose rows are at `places`, into the cache's rows."""
        rows = zip(places, forward.rows, forward.left_padding, forward.cached_lengths)
        for place, row, padding, cached in rows:
            n = forward.length - padding + forward.lookahead
            states = call.new.select(1, place).narrow(2, padding, n)
            kept = self.states.select(1, row).narrow(2, cached, n)
            if self._shares:
                kept.index_copy_(0, self._places, states)
            else:
                kept.copy_(states)
            if call.features is not None:
                features = call.features[place, padding:]
                self._memory.features[row, cached : cached + n] = features

    def _in_halves(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        """Split a pass that needs too much memory into two passes, each over half of the
        columns."""
        half = forward.length // 2
        rest = forward.length - half
        # padding is on the left, so the first half takes as much of it as fits
        padding = [min(pad, half) for pad in forward.left_padding]
        first = Forward(
            rows=forward.rows,
            input_ids=[ids[:half] for ids in forward.input_ids],
            left_padding=padding,
            cached_lengths=forward.cached_lengths,
            kv_length=forward.kv_length - rest,
            num_states=max(forward.num_states - rest, 1),
            inputs=None if forward.inputs is None else forward.inputs[:, :half],
            parents=forward.parents
            and [tree[: len(tree) - rest] for tree in forward.parents],
        )
        second = replace(
            forward,
            input_ids=[ids[half:] for ids in forward.input_ids],
            left_padding=[
                pad - gone for pad, gone in zip(forward.left_padding, padding)
            ],
            cached_lengths=[
                n + half - pad for n, pad in zip(forward.cached_lengths, padding)
            ],
            inputs=None if forward.inputs is None else forward.inputs[:, half:],
            num_states=min(forward.num_states, rest),
        )
        parts = [self.read(first, profile), self.read(second, profile)]
        # a pass has at least one state, so the first half may have one too many
        n = forward.num_states + forward.lookahead
        logits, hidden = (torch.cat(pair, 1)[:, -n:] for pair in zip(*parts))
        return logits, hidden

    def _prefix_first(
        self, forward: Forward, profile: Profile
    ) -> tuple[Tensor, Tensor]:
        """Read the prefixes, except for their last token, through the graph for chains, then the
        rest with the trees."""
        assert forward.parents is not None
        rest = len(forward.parents[0]) + 1
        cached = []
        for n, pad in zip(forward.cached_lengths, forward.left_padding):
            cached.append(n + forward.length - rest - pad)
        first = replace(
            forward,
            input_ids=[ids[:-rest] for ids in forward.input_ids],
            kv_length=forward.kv_length - rest,
            num_states=1,
            parents=None,
            inputs=None if forward.inputs is None else forward.inputs[:, :-rest],
        )
        self.read(first, profile)
        last = replace(
            forward,
            input_ids=[ids[-rest:] for ids in forward.input_ids],
            left_padding=[0] * len(cached),
            cached_lengths=cached,
            inputs=None if forward.inputs is None else forward.inputs[:, -rest:],
        )
        return self.read(last, profile)

    def _graph(self, shape: _CallShape) -> Graph:
        """Return the graph for a shape: the graph for trees or the graph for chains."""
        if not shape.is_tree:
            return self.graph
        assert self.graph.trees is not None
        return self.graph.trees

    def _call(self, shape: _CallShape) -> _Call:
        """Return the bound call for a shape; small calls are kept for reuse."""
        calls = self._memory.calls.setdefault(self.graph, {})
        call = calls.get(shape)
        if call:
            return call
        rows = self.states[:, shape.first : shape.end]
        past = [rows[place] for place in self._places.tolist()]
        call = _Call(self._graph(shape), past, shape)
        if call.new.numel() + call.logits.numel() <= LARGEST_KEPT_CALL:
            if len(calls) >= KEPT_CALLS:
                calls.clear()
            calls[shape] = call
        return call


@dataclass(frozen=True)
class _CallShape:
    """Shape of a bound call."""

    first: int
    end: int
    """Range of adjacent rows, from `first` to before `end`."""
    length: int
    num_states: int
    lookahead: int
    is_tree: bool

    @classmethod
    def of(cls, forward: Forward, first: int = 0, end: int = 0) -> _CallShape:
        is_tree = forward.parents is not None
        return cls(
            first,
            end,
            forward.length,
            forward.num_states,
            forward.lookahead,
            is_tree=is_tree,
        )


class _Call:
    """A graph bound to cached states and to a shape, so that each call only writes a few
    numbers."""

    def __init__(self, graph: Graph, past: Sequence[Tensor], shape: _CallShape):
        """Take `past`: the cached keys and values, each [m, H, C, D] and contiguous."""
        (m, _, capacity, _), length = past[0].shape, shape.length
        self.graph = graph
        self.past = past
        self.binding = graph.session.io_binding()
        self.num_states = shape.num_states
        self.lookahead = shape.lookahead
        self.ids = np.zeros((m, length), np.int64)
        self.pads = np.zeros(m, np.int64)
        self.cached = np.zeros(m, np.int64)
        if graph.reads_trees:
            width = capacity + length
            self.at = np.zeros((m, length), np.int64)
            self.keys = np.zeros((m, width), np.int64)
            self.related = np.zeros((m, length, width), np.bool_)
        self.beside = np.zeros((m, length, graph.hidden_size), np.float32)
        self.inputs = self._inputs(shape)
        for name, value in self.inputs.items():
            self._bind_input(name, value)
        for i, layer in enumerate(past):
            self._bind_input(f"past_{i}", layer.numpy())
        self._bind_outputs(m, length)

    def _bind_outputs(self, m: int, length: int) -> None:
        """Bind the buffers for the outputs."""
        graph = self.graph
        new_length = length + self.lookahead
        self.new = torch.empty(
            2 * graph.layers, m, graph.heads, new_length, graph.head_size
        )
        for i, layer in enumerate(self.new):
            self._bind_output(f"new_{i}", layer)
        self.logits = self._outputs("logits", graph.vocab_size)
        self.hidden = self._outputs("hidden", graph.hidden_size)
        self.features: Tensor | None = None
        if graph.feature_size is not None:
            self.features = torch.empty(m, length, graph.feature_size)
            self._bind_output("features", self.features)

    def _inputs(self, shape: _CallShape) -> dict[str, NDArray[Any]]:
        """Return the inputs of a call, except for the cached states."""
        kept = np.arange(shape.length - shape.num_states, shape.length)
        inputs: dict[str, NDArray[Any]] = {"ids": self.ids, "kept": kept}
        if self.graph.reads_trees:
            inputs |= {"at": self.at, "keys": self.keys, "related": self.related}
        else:
            inputs |= {"pads": self.pads, "cached": self.cached}
        if self.graph.can_loop:
            inputs["steps"] = np.arange(shape.lookahead)
        if self.graph.reads_inputs:
            inputs["inputs"] = self.beside
        return inputs

    def _bind_input(self, name: str, value: NDArray[Any]) -> None:
        self.binding.bind_input(
            name, "cpu", 0, value.dtype.type, value.shape, buffer_ptr=value.ctypes.data
        )

    def _outputs(self, name: str, width: int) -> Tensor:
        """Bind an output's buffers, of the pass and of the loop. Return them as a view [m,
        num_states + lookahead, width]."""
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
        size = tuple(value.shape)
        address = value.data_ptr()
        self.binding.bind_output(name, "cpu", 0, np.float32, size, buffer_ptr=address)

    def __call__(
        self, forward: Forward, places: list[int], lm: LM
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of the rows at `places`; all other rows are padding. Ids
        beyond the model's vocabulary are clamped to its last id."""
        longest = lm.context_length
        whole = len(places) == len(self.ids)
        if not whole:
            self.pads[:] = self.ids.shape[1]
            self.cached[:] = 0
        rows: slice | list[int] = slice(None) if whole else places
        self.ids[rows] = forward.input_ids
        self.pads[rows] = forward.left_padding
        self.cached[rows] = forward.cached_lengths
        if forward.parents is not None:
            self._see(forward, places, longest)
        if forward.inputs is not None:
            self.beside[rows] = forward.inputs.numpy()
        np.minimum(self.ids, lm.vocab_size - 1, out=self.ids)
        self.graph.session.run_with_iobinding(self.binding)
        if whole:
            return self.logits.clone(), self.hidden.clone()
        return self.logits[places], self.hidden[places]

    def _see(self, forward: Forward, places: list[int], longest: int | None) -> None:
        """Write positions and visibility of trees, first for cached and then for new tokens."""
        sight = TreeVisibility.of(forward, longest)
        capacity = self.past[0].shape[2]
        self.at[:] = 0
        self.keys[:] = NOWHERE
        self.related[:] = True
        for i, place in enumerate(places):
            cached = forward.cached_lengths[i]
            padding = forward.left_padding[i]
            whole = cached + forward.length - padding
            self.at[place] = sight.at[i]
            for start, old, end in (
                (0, 0, cached),
                (capacity + padding, cached, whole),
            ):
                to = slice(start, start + end - old)
                self.keys[place, to] = sight.keys[i, old:end]
                self.related[place, :, to] = sight.related[i, :, old:end]
