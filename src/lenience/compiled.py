"""The forward pass as an exported graph for ONNX Runtime, several times faster on a CPU than `transformers`' own, most of
whose time on small models is Python's.

The graph takes the cached keys and values as they lie, at full capacity, and gives the new ones back: attention scores are
taken over both without joining them, so nothing is copied, and the mask says what of the cache is real.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lenience import __version__
from lenience.errors import first_line
from lenience.model import LM
from lenience.session import Pass, positions, reads_together_as_alone

LARGEST = 1 << 28
"""Models of more parameters than this are not exported: a graph is one file of at most 2 GiB."""
FIRST_CAPACITY = 160
"""How many tokens a row of a new cache can hold before it grows."""
KEPT_CALLS, LONGEST_KEPT_CALL = 16, 64
"""How many shapes of calls a cache keeps bound, and of how many tokens."""
LARGEST_SCORES = 1 << 24
"""How many attention scores a layer may take at once; longer reads are made in parts."""


def compile_model(lm: LM, *, export: bool = True) -> bool:
    """Use the exported forward pass of a model: the one that an earlier export left in the cache or, with `export`, a new one,
    which takes some seconds; says whether it is used. It is checked against the model's own pass; where it cannot be
    made, is broken or differs, a warning says why, and the model's own is used on."""
    with lm.lock:
        return lm.graph is not None or _compile(lm, export)


def _compile(lm: LM, export: bool) -> bool:
    why = refuses(lm)
    path = None if why else graph_path(lm)
    if not export and not (path and path.exists()):
        return False
    try:
        if path:
            if not path.exists():
                export_graph(lm, path)
            graph = load(path)
            if reads_together_as_alone(lm, graph.cache(lm, 3, 256)):
                lm.graph = graph
            else:
                path.unlink(missing_ok=True)
                why = "the exported pass differs from its own"
    except Exception as error:  # whatever an exporter raises
        why = f"{type(error).__name__}: {first_line(error)}"
    if why:
        warnings.warn(f"{lm.role} {lm.name!r}: is not compiled: {why}", stacklevel=3)
    return not why


def refuses(lm: LM) -> str | None:
    """Why a model cannot be exported at all; None where it can be tried."""
    if lm.device.type != "cpu":
        return f"it is on {lm.device}, and the exported pass is for a CPU"
    if any(weight.dtype != torch.float32 for weight in lm.model.parameters()):
        return "its weights are not all float32"
    if sum(weight.numel() for weight in lm.model.parameters()) > LARGEST:
        return f"it has more than {LARGEST >> 20} Mi parameters"
    if lm.reads_rows_apart:
        return "its rows cannot be read together"
    return None


def graph_path(lm: LM) -> Path:
    """Where a model's graph is kept: $LENIENCE_CACHE, else the user's cache folder; its name is a hash of all weights, the
    configuration and the versions."""
    base = os.environ.get("LENIENCE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lenience"
    made = [__version__, torch.__version__, transformers.__version__, lm.model.config.to_json_string()]
    digest = hashlib.blake2b(repr(made).encode(), digest_size=12)
    for name, weight in sorted(lm.model.state_dict().items()):
        digest.update(name.encode() + weight.detach().contiguous().view(torch.uint8).numpy().data)
    return Path(base) / f"{digest.hexdigest()}.onnx"


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

    def cache(self, lm: LM, rows: int, capacity: int) -> GraphCache:
        return GraphCache(lm, self, rows, capacity)


@cache
def _share_threads() -> None:
    """One pool for all graphs: threads of the target's that wait by spinning would take the cores from the draft."""
    import onnxruntime

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    onnxruntime.set_global_thread_pool_sizes(cores, 1)


def export_graph(lm: LM, path: Path) -> None:
    """Export a model's forward pass into a file; takes some seconds. What is traced is another model on the same
    weights, so that this one can decode meanwhile."""
    layers, heads, size = _cache_shape(lm)
    m, t, capacity, kept = 2, 5, 32, 3
    past = [torch.randn(m, heads, capacity, size) for _ in range(2 * layers)]
    given = (
        torch.ones(m, t, dtype=torch.long),
        torch.tensor([0, 1]),
        torch.tensor([7, 9]),
        torch.arange(kept) + t - kept,
        past,
    )
    shapes = ({0: "m", 1: "T"}, {0: "m"}, {0: "m"}, {0: "S"}, [{0: "m", 2: "C"}] * (2 * layers))
    names = ["ids", "pads", "cached", "kept", *(f"past_{i}" for i in range(2 * layers))]
    with _TRACING, torch.no_grad(), _quiet():
        program = torch.onnx.export(
            _Forward(lm, _twin(lm)),
            given,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=names,
            output_names=["logits", "hidden", "new"],
            verbose=False,
        )
        assert program is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        program.save(str(new))
    new.replace(path)


class GraphCache:
    """The keys and values of rows of tokens [2 · layers, rows, H, C, D], read through a graph. The graph reads all of C, so it
    starts small and grows with the rows, to `capacity` where that is enough."""

    together = True

    def __init__(self, lm: LM, graph: Graph, rows: int, capacity: int):
        self.lm, self.graph = lm, graph
        self.heads = int(lm.model.config.get_text_config().num_attention_heads)
        self.most = capacity
        self.states = self._room(rows, min(capacity, FIRST_CAPACITY))
        self._calls: dict[tuple[int, int, int, int], _Call] = {}

    @property
    def token_bytes(self) -> dict[torch.device, int]:
        """While a cache grows there are two."""
        return {self.states.device: 2 * self.states[:, 0, :, 0].nbytes}

    def move(self, source: int, to: int) -> None:
        self.states[:, to] = self.states[:, source]

    def read(self, p: Pass) -> tuple[Tensor, Tensor]:
        if p.extent > self.states.shape[3]:
            old, rows, least = self.states, self.states.shape[1], self.states.shape[3] * 3 // 2
            self.states = self._room(rows, max(p.extent, min(least, self.most)))
            self.states[:, :, :, : old.shape[3]] = old
            self._calls = {}
        t, begin, end = len(p.ids[0]), min(p.which), max(p.which) + 1
        if t > 1 and self.heads * (end - begin) * t * self.states.shape[3] > LARGEST_SCORES:
            return self._in_halves(p, t // 2)
        ids = np.minimum(p.ids, self.lm.width - 1)
        if end - begin > 2 * len(p.which):  # rows far apart are gathered
            call = _Call(self.graph, self.states[:, p.which], t, p.states)
            place = list(range(len(p.which)))
        else:  # those between them are read as padding, since gathering would copy most of the cache
            call = self._call(begin, end, t, p.states)
            place = [row - begin for row in p.which]
        logits, hidden = call(ids, p.pads, p.cached, place)
        for i, row, pad, cached in zip(place, p.which, p.pads, p.cached):
            self.states[:, row, :, cached : cached + t - pad] = call.new[:, i, :, pad:]
        return logits, hidden

    def _in_halves(self, p: Pass, half: int) -> tuple[Tensor, Tensor]:
        """Read what would take too much memory at once, the first `half` columns of it and then the others."""
        rest = len(p.ids[0]) - half
        before = [min(pad, half) for pad in p.pads]
        first = Pass(p.which, [ids[:half] for ids in p.ids], before, p.cached, p.extent - rest, max(p.states - rest, 1))
        cached = [kept + half - pad for kept, pad in zip(p.cached, before)]
        pads = [pad - gone for pad, gone in zip(p.pads, before)]
        second = Pass(p.which, [ids[half:] for ids in p.ids], pads, cached, p.extent, min(p.states, rest))
        parts = [self.read(first), self.read(second)]
        logits, hidden = (torch.cat(pair, 1) for pair in zip(*parts))
        return logits[:, -p.states :], hidden[:, -p.states :]

    def _call(self, begin: int, end: int, t: int, states: int) -> _Call:
        """What reads `t` tokens of each of the rows from `begin` to `end`; some are kept."""
        key = (begin, end, t, states)
        if t > LONGEST_KEPT_CALL:
            return _Call(self.graph, self.states[:, begin:end], t, states)
        if key not in self._calls:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            self._calls[key] = _Call(self.graph, self.states[:, begin:end], t, states)
        return self._calls[key]

    def _room(self, rows: int, capacity: int) -> Tensor:
        """Zeros, not anything: a masked key's weight is 0, and 0 times a NaN is none."""
        graph = self.graph
        return torch.zeros(2 * graph.layers, rows, graph.heads, capacity, graph.size)


class _Call:
    """A graph bound to cached states and to shapes; what is bound is kept, so that a call writes a few numbers."""

    def __init__(self, graph: Graph, past: Tensor, t: int, states: int):
        m = past.shape[1]
        self.graph, self.past, self.binding = graph, past, graph.session.io_binding()
        self.ids = np.zeros((m, t), np.int64)
        self.pads, self.cached = np.zeros(m, np.int64), np.zeros(m, np.int64)
        self.kept = np.arange(t - states, t)
        self.new = torch.empty(2 * graph.layers, m, graph.heads, t, graph.size)
        for i, layer in enumerate(past):
            self.binding.bind_input(f"past_{i}", "cpu", 0, np.float32, tuple(layer.shape), layer.data_ptr())
        for name in ("ids", "pads", "cached", "kept"):
            value = getattr(self, name)
            self.binding.bind_input(name, "cpu", 0, np.int64, value.shape, value.ctypes.data)
        self._bind_output("new", self.new)

    def __call__(self, ids: Any, pads: list[int], cached: list[int], place: list[int]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the rows at `place`; the others are padding."""
        m, whole = len(self.ids), len(place) == len(self.ids)
        if not whole:
            self.pads[:], self.cached[:] = self.ids.shape[1], 0
        self.ids[place], self.pads[place], self.cached[place] = ids, pads, cached
        logits, hidden = (torch.empty(m, len(self.kept), width) for width in (self.graph.width, self.graph.hidden))
        self._bind_output("logits", logits)
        self._bind_output("hidden", hidden)
        self.graph.session.run_with_iobinding(self.binding)
        return (logits, hidden) if whole else (logits[place], hidden[place])

    def _bind_output(self, name: str, value: Tensor) -> None:
        self.binding.bind_output(name, "cpu", 0, np.float32, tuple(value.shape), value.data_ptr())


_NOWHERE = 1 << 40
"""The position of a key that nothing may see."""


class _Layer(CacheLayerMixin):
    """Hands the new keys and values on, and keeps them for the graph's output."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, *_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Forward(torch.nn.Module):
    """What is exported."""

    past: Sequence[Tensor] = ()
    """The cached keys and values of the pass that is being traced."""

    def __init__(self, lm: LM, twin: PreTrainedModel):
        super().__init__()
        self.lm, self.model = lm, twin
        cast(torch.nn.Module, twin.get_output_embeddings()).register_forward_pre_hook(self._catch)

    def _catch(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.state = args[0]

    def forward(self, ids: Tensor, pads: Tensor, cached: Tensor, kept: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Logits [m, S, V], hidden states [m, S, H] and the new states [2 · layers, m, H, T, D] of `ids` [m, T], the first
        `pads` [m] of which are padding, after `cached` [m] tokens, whose states are in `past`, each [m, H, C, D]; `kept`
        [S] says after which of the T tokens logits are wanted."""
        _Forward.past = past
        at, padding = positions(ids, pads, cached)
        columns = torch.arange(past[0].shape[2])
        old = torch.where(columns < cached[:, None], columns, _NOWHERE)  # [m, C]
        masks = self.lm.masks(at, torch.cat([old, at.masked_fill(padding, _NOWHERE)], 1))
        layers = [_Layer() for _ in range(len(past) // 2)]
        out = self.model(
            input_ids=ids,
            position_ids=at,
            attention_mask=masks if len(masks) > 1 else masks["full_attention"],
            past_key_values=Cache(layers=list(layers)),
            use_cache=True,
            logits_to_keep=kept,
        )
        new = [states for layer in layers for states in (layer.keys, layer.values)]
        return out.logits, self.state, torch.stack(cast(list[Tensor], new))


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [m, G · H, T, D] over the cached and the new `key` and `value` [m, H, T, D]. The G heads that share
    a key are read as more queries, so that keys need no copies."""
    layer = cast(int, module.layer_idx)
    old_key, old_value = _Forward.past[2 * layer], _Forward.past[2 * layer + 1]  # [m, H, C, D]
    m, heads, t, size = query.shape
    query = query.reshape(m, key.shape[1], -1, size)  # [m, H, G · T, D]
    scores = torch.cat([query @ old_key.transpose(2, 3), query @ key.transpose(2, 3)], -1)  # [m, H, G · T, C + T]
    scores = scores.view(m, heads, t, -1) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    least = torch.finfo(scores.dtype).min  # not −inf: a row of padding sees nothing, and must not become NaN
    weights = torch.softmax(torch.where(attention_mask, scores, least), -1).view(m, key.shape[1], -1, scores.shape[-1])
    capacity = old_key.shape[2]
    out = weights[..., :capacity] @ old_value + weights[..., capacity:] @ value  # [m, H, G · T, D]
    return out.view(m, heads, t, size).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("lenience_graph", _attend)
_TRACING = threading.RLock()


def _twin(lm: LM) -> PreTrainedModel:
    """A model on the same weights, with the attention of the graph."""
    model = lm.model
    twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="lenience_graph", dtype=torch.float32)
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    return twin.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter speaks of its own workings."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _cache_shape(lm: LM) -> tuple[int, int, int]:
    """Layers, heads and head size of the keys and values. Raises ValueError where they differ among layers."""
    with torch.inference_mode():
        layers = lm.model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values.layers
    shapes = {states.shape for layer in layers for states in (layer.keys, layer.values)}
    if len(shapes) > 1:
        raise ValueError("its layers keep states of different shapes")
    ((_, heads, _, size),) = shapes
    return len(layers), heads, size
