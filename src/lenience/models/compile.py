"""Choose a faster forward pass (ONNX export or CUDA graphs) and check it against the model's.

On a CPU exported graphs are several times faster than the forward pass of `transformers`, which on
small models spends most of its time in Python. On a GPU passes are recorded and replayed.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

from lenience.core.errors import first_line
from lenience.core.files import EMBEDDED, cache_folder
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.lm import LM, Backend
from lenience.models.onnx_graph import Graph, GraphFinder, load
from lenience.models.pass_cache import LAST, States
from lenience.models.session import reads_together_as_alone, reads_trees_as_paths

FORMAT = 3
"""Version of the graph format. Raise it when the same model would be exported differently, so that
older graphs are not used."""
NEEDS_ONNX = "exported passes need ONNX Runtime: pip install 'lenience[onnx]'"
EXPORTERS = ("onnx", "onnx_ir", "onnxruntime", "onnxscript")
"""Packages of the extra `onnx`."""
NOT_OF_THE_GRAPH = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")
"""Entries of a configuration that do not change the forward pass. Graphs are exported from float32
weights."""
TRIED = 5
"""Number of timed passes per model."""
LARGEST = 1 << 28
"""Maximum number of parameters of an exported model. A graph is one file of at most 2 GiB."""


EXPORT_SECONDS = 4.5
EXPORT_SECONDS_A_MILLION = 0.25
"""Seconds to export a model, and additional seconds per million parameters, on two cores."""
SAVED = 0.6
TOKENS_A_CYCLE = 3.0
DRAFTED = 8
"""Rough figures for small models: the share of a pass that exporting saves, the tokens per cycle,
and the draft tokens per cycle."""


def export_seconds(models: Sequence[LM]) -> float:
    """Return an estimate of the seconds needed to export the models. Models with a cached or
    shipped graph cost nothing."""
    missing = []
    for lm in models:
        if lm.backend is None and not _Export(graph_path(lm), LAST, False).exists(lm):
            missing.append(lm)
    millions = sum(lm.model.num_parameters() for lm in missing) / 1e6
    return EXPORT_SECONDS * len(missing) + EXPORT_SECONDS_A_MILLION * millions


@torch.inference_mode()
def saved_seconds(models: Sequence[LM]) -> float:
    """Return an estimate of the seconds per new token that exported graphs save. `models` holds the
    target, then its draft if any; each runs a few timed passes."""
    seconds = []
    for lm in models:
        token = torch.zeros(1, 1, dtype=torch.long)
        lm.model(token)  # warm-up
        began = time.perf_counter()
        for _ in range(TRIED):
            lm.model(token)
        seconds.append((time.perf_counter() - began) / TRIED)
    target, *drafts = seconds
    return SAVED * (target + DRAFTED * sum(drafts)) / TOKENS_A_CYCLE


def compile_model(lm: LM, *, export: bool = True) -> bool:
    """Choose a faster forward pass for a model, and return True if it has one.

    On a CPU the pass is an exported graph from the cache or the package; with `export` a missing
    graph is exported, which takes some seconds. On a GPU, with `export`, passes are recorded and
    replayed. The result is checked against the model's own pass. If the faster pass cannot be made,
    is broken or differs, a warning names the reason and the model keeps its own pass.
    """
    with lm.lock:
        if lm.backend is not None and (lm.backend.makes_others or not export):
            return True
        return _compile(lm, export)


def _compile(lm: LM, export: bool) -> bool:
    why = refuses(lm)
    path = None if why or lm.device.type != "cpu" else graph_path(lm)
    if not export and not (path and _Export(path, LAST, export).exists(lm)):
        return False
    if not why:
        try:
            backend = _backend(lm, path, export)
            if backend:
                lm.use(backend)
                return True
            why = f"the {'exported' if path else 'recorded'} pass differs from the model's own pass"
        except Exception as error:  # whatever an exporter raises
            why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(f"{lm.role} {lm.name!r}: is not compiled: {why}", stacklevel=3)
    return False


def _backend(lm: LM, path: Path | None, export: bool) -> Backend | None:
    """Return the exported graph at `path`, or recorded passes if `path` is None. Return None if the
    output differs from the model's own pass."""
    if path is None:
        recorded = CudaGraphs()
        return (
            recorded
            if reads_together_as_alone(lm, recorded.cache(lm, 3, 256))
            else None
        )
    return _load_right(
        lm,
        _Export(path, LAST, export),
        lambda graph: reads_together_as_alone(lm, graph.cache(lm, 3, 256)),
    )


def _others(export: bool, states: States = LAST) -> GraphFinder:
    """Return a finder for the model's other graphs (other states, trees). With `export` the finder
    also exports missing graphs, see `_another`."""

    def giving(lm: LM, wanted: States) -> Graph | None:
        def reads(graph: Graph) -> bool:
            return reads_together_as_alone(lm, graph.cache(lm, 3, 256), wanted)

        layers = []
        for layer in (*wanted.layers, *wanted.features):
            if layer is not None:
                layers.append(layer)
        what = (
            f"the states after layer {', '.join(map(str, layers))}"
            if layers
            else "features"
        )
        return _another(
            lm, what, _Export(graph_path(lm, wanted), wanted, export), reads
        )

    def for_trees(lm: LM, chains: Graph) -> Graph | None:
        def reads(graph: Graph) -> bool:
            chains.trees = graph
            return reads_trees_as_paths(lm, chains.cache(lm, 2, 64), states)

        path = graph_path(lm, states, trees=True)
        return _another(lm, "trees", _Export(path, states, export, trees=True), reads)

    return GraphFinder(giving, for_trees, export)


@dataclass(frozen=True)
class _Export:
    """A graph's path in the cache, its outputs, and whether it may be exported."""

    path: Path
    states: States
    makes: bool
    trees: bool = False

    def exists(self, lm: LM) -> bool:
        """Return True if the graph is in the cache or shipped with the package."""
        return self.path.exists() or self.shipped(lm).exists()

    def shipped(self, lm: LM) -> Path:
        return shipped_path(lm, self.states, self.trees)

    def write(self, lm: LM) -> None:
        """Export the graph; takes some seconds."""
        # needs an extra, and is slow to import
        from lenience.models.onnx_export import (
            export_graph,
        )

        export_graph(lm, self.path, self.states, self.trees)


def _another(
    lm: LM, what: str, export: _Export, reads_rightly: Callable[[Graph], bool]
) -> Graph | None:
    """Return another graph of a model, exported if allowed and missing. Return None if the graph
    may not be exported, or, with a warning, if it fails or differs from the model's own pass."""
    if not export.makes and not export.exists(lm):
        return None
    try:
        graph = _load_right(lm, export, reads_rightly)
        if graph:
            return graph
        why = "the exported pass differs from the model's own pass"
    except Exception as error:  # whatever an exporter raises
        why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(
        f"{lm.role} {lm.name!r}: {what} are read through its own pass: {why}",
        stacklevel=3,
    )
    return None


def _load_right(
    lm: LM, export: _Export, reads_rightly: Callable[[Graph], bool]
) -> Graph | None:
    """Load the first graph whose output equals the model's: the cached graph, else the shipped
    graph, else a new export if allowed. Return None if none does. A wrong graph in the cache is
    deleted."""
    others = None if export.trees else _others(export.makes, export.states)
    if not export.path.exists() and (shipped := export.shipped(lm)).exists():
        try:
            graph = load(shipped, lm, others, keep=True)
            if reads_rightly(graph):
                return graph
        except Exception:  # made by other versions than this machine's
            pass
    if not export.path.exists():
        if not export.makes:
            return None
        export.write(lm)
    graph = load(export.path, lm, others)
    if reads_rightly(graph):
        return graph
    export.path.unlink(missing_ok=True)
    return None


def refuses(lm: LM) -> str | None:
    """Return the reason why a model cannot be compiled; None if compiling can be tried."""
    if not lm.only_attends:
        return "its cache keeps more than keys and values of each layer"
    if getattr(lm.model, "is_quantized", False):
        return "its weights are quantised"
    if lm.reads_rows_apart:
        return "its rows cannot be read together"
    devices = {str(weight.device) for weight in lm.model.parameters()}
    if len(devices) > 1 or lm.device.type not in ("cpu", "cuda"):
        on = ", ".join(sorted(devices))
        return f"it is on {on}, and what is compiled is for a CPU or one GPU"
    if lm.device.type == "cuda":
        return None
    if any(weight.dtype != torch.float32 for weight in lm.model.parameters()):
        return "its weights are not all float32"
    if sum(weight.numel() for weight in lm.model.parameters()) > LARGEST:
        return f"it has more than {LARGEST >> 20} Mi parameters"
    return None if all(map(find_spec, EXPORTERS)) else NEEDS_ONNX


def graph_path(lm: LM, states: States = LAST, trees: bool = False) -> Path:
    """Return the path of a model's graph in the cache. The file name is a hash of what the graph
    depends on and of the versions of PyTorch and transformers. A graph holds no weights, so models
    of the same architecture share a graph."""
    versions = [torch.__version__, transformers.__version__]
    return (
        cache_folder() / f"{_digest([*versions, *_structure(lm, states, trees)])}.onnx"
    )


def shipped_path(lm: LM, states: States = LAST, trees: bool = False) -> Path:
    """Return the path at which the package ships a graph for models of this architecture. The file
    may not exist."""
    return EMBEDDED / "graphs" / f"{_digest(_structure(lm, states, trees))}.onnx"


def _digest(made_of: list[object]) -> str:
    return hashlib.blake2b(repr(made_of).encode(), digest_size=12).hexdigest()


def _structure(lm: LM, states: States, trees: bool) -> list[object]:
    """Return what a graph depends on, except for the weights' values: names and shapes of the
    weights, the configuration, the role, the returned states, and whether the graph is for
    trees."""
    config = lm.model.config.to_dict()
    config = {key: config[key] for key in sorted(config) if key not in NOT_OF_THE_GRAPH}
    shapes = sorted(
        (name, tuple(weight.shape)) for name, weight in lm.model.state_dict().items()
    )
    gives = [lm.role, tuple(states.layers), tuple(states.features), trees]
    return [FORMAT, type(lm.model).__name__, shapes, config, *gives]
