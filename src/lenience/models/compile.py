"""Which other way of reading a model gets, and whether that reads as the model does.

On a CPU exported graphs are several times faster than `transformers`' own forward, most of whose
time on small models is Python's; on a GPU passes are recorded and replayed.
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
from lenience.core.files import cache_folder
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.kv_cache import Backend
from lenience.models.lm import LAST, LM, States
from lenience.models.onnx_graph import Graph, Others, load
from lenience.models.session import reads_together_as_alone, reads_trees_as_paths

FORMAT = 1
"""Of the graphs: raised when the same model would be exported to another one, so that graphs kept
before are not used."""
NEEDS_ONNX = "exported passes need ONNX Runtime: pip install 'lenience[onnx]'"
EXPORTERS = ("onnx_ir", "onnxruntime", "onnxscript")
"""What the extra `onnx` brings."""
TRIED = 5
"""Passes that are timed."""
LARGEST = 1 << 28
"""Models of more parameters than this are not exported: a graph is one file of at most 2 GiB."""


EXPORT_SECONDS, EXPORT_SECONDS_A_MILLION = 8.0, 0.5
"""What exporting a model takes, and for each million of its parameters, on two cores."""
SAVED, TOKENS_A_CYCLE, DRAFTED = 0.6, 3.0, 8
"""The share of a small model's pass that exporting saves, and what a cycle is about."""


def export_seconds(models: Sequence[LM]) -> float:
    """About what exporting models takes, those left out whose graphs are in the cache."""
    missing = [lm for lm in models if lm.backend is None and not graph_path(lm).exists()]
    millions = sum(lm.model.num_parameters() for lm in missing) / 1e6
    return EXPORT_SECONDS * len(missing) + EXPORT_SECONDS_A_MILLION * millions


@torch.inference_mode()
def saved_seconds(models: Sequence[LM]) -> float:
    """About what exported graphs of a target and its draft save a new token, by a few passes of
    each."""
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
    """Read a model in another way than through its own forward; says whether that is done.

    On a CPU it is an exported pass, the one that an earlier export left in the cache or, with
    `export`, a new one, which takes some seconds; on a GPU, with `export`, passes are recorded and
    replayed. What is read is checked against the model's own pass; where it cannot be made, is
    broken or differs, a warning says why, and the model's own is used on.
    """
    with lm.lock:
        if lm.backend is not None and (lm.backend.makes_others or not export):
            return True
        return _compile(lm, export)


def _compile(lm: LM, export: bool) -> bool:
    why = refuses(lm)
    path = None if why or lm.device.type != "cpu" else graph_path(lm)
    if not export and not (path and path.exists()):
        return False
    if not why:
        try:
            backend = _backend(lm, path, export)
            if reads_together_as_alone(lm, backend.cache(lm, 3, 256)):
                lm.use(backend)
                return True
            if path:
                path.unlink(missing_ok=True)
            why = f"the {'exported' if path else 'recorded'} pass differs from its own"
        except Exception as error:  # whatever an exporter raises
            why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(f"{lm.role} {lm.name!r}: is not compiled: {why}", stacklevel=3)
    return False


def _backend(lm: LM, path: Path | None, export: bool) -> Backend:
    """The graph in a file, exported where there is none yet; or recorded passes."""
    if path is None:
        return CudaGraphs()
    if not path.exists():
        _write_graph(lm, path)
    return load(path, _others(export))


def _write_graph(lm: LM, path: Path, states: States = LAST, trees: bool = False) -> None:
    from lenience.models.onnx_export import export_graph  # of an extra, and slow to import

    export_graph(lm, path, states, trees)


def _others(export: bool, states: States = LAST) -> Others:
    """What finds the other graphs of a model, and with `export` makes them, see `_another`."""

    def giving(lm: LM, wanted: States) -> Graph | None:
        def reads(graph: Graph) -> bool:
            return reads_together_as_alone(lm, graph.cache(lm, 3, 256), wanted)

        layers = [layer for layer in (*wanted.layers, *wanted.features) if layer is not None]
        what = f"the states after layer {', '.join(map(str, layers))}" if layers else "features"
        return _another(lm, what, _Export(graph_path(lm, wanted), wanted, export), reads)

    def for_trees(lm: LM, chains: Graph) -> Graph | None:
        def reads(graph: Graph) -> bool:
            chains.trees = graph
            return reads_trees_as_paths(lm, chains.cache(lm, 2, 64), states)

        path = graph_path(lm, states, trees=True)
        return _another(lm, "trees", _Export(path, states, export, trees=True), reads)

    return Others(giving, for_trees, export)


@dataclass(frozen=True)
class _Export:
    """Where another graph lies, what it gives, and whether it may be made."""

    path: Path
    states: States
    makes: bool
    trees: bool = False


def _another(
    lm: LM, what: str, export: _Export, reads_rightly: Callable[[Graph], bool]
) -> Graph | None:
    """Another graph of a model, exported where that is wanted and there is none yet; None, with a
    warning, where it cannot be made or differs."""
    path = export.path
    if not export.makes and not path.exists():
        return None
    try:
        if not path.exists():
            _write_graph(lm, path, export.states, export.trees)
        graph = load(path, None if export.trees else _others(export.makes, export.states))
        if reads_rightly(graph):
            return graph
        path.unlink(missing_ok=True)
        why = "the exported pass differs from its own"
    except Exception as error:  # whatever an exporter raises
        why = f"{type(error).__name__}: {first_line(error)}"
    warnings.warn(
        f"{lm.role} {lm.name!r}: {what} are read through its own pass: {why}", stacklevel=3
    )
    return None


def refuses(lm: LM) -> str | None:
    """Why a model cannot be compiled at all; None where it can be tried."""
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
    """Where a model's graph is cached: its name is a hash of all weights, the configuration, the
    role, the states that it gives, whether it is for trees, and what exports it."""
    versions = [FORMAT, torch.__version__, transformers.__version__]
    made_of = [*versions, lm.model.config.to_json_string(), lm.role]
    made_of += [] if states.layers == LAST.layers else [*states.layers]
    made_of += ["features", *states.features] if states.features else []
    made_of += ["trees"] if trees else []
    digest = hashlib.blake2b(repr(made_of).encode(), digest_size=12)
    for name, weight in sorted(lm.model.state_dict().items()):
        content = weight.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
        digest.update(name.encode() + content.data)
    return cache_folder() / f"{digest.hexdigest()}.onnx"
