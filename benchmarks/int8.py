"""Weights in 8 bits through ONNX Runtime: speed, and whether strict answers stay the target's own.

    python benchmarks/int8.py MODEL ROWS.jsonl [--prompts 40]

MODEL is a folder, ROWS has the fields question and answer. Each form of the weights answers all
prompts alone, with n-gram drafts and in a batch. Writes benchmarks/results/int8.json.

- float32: the exported graph as it is.
- int8: MatMulNBits with 8-bit weights. Its kernel also rounds the activations to 8 bits.
- int8 as two int4: the same 8 bits as the sum of two 4-bit matrices, whose kernel computes in
  float32.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from recording import write_results

from lenience.decoding.generation import Generation
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.compile import graph_path
from lenience.models.onnx_graph import Graph, weights_of

RESULTS = Path(__file__).parent / "results" / "int8.json"
BLOCK = 64
"""Number of weights that share a scale."""
TOKENS = 100
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"rule": "target"},
    "ngram, window 4": {"drafter": "ngram", "window": 4},
    "ngram, window 8": {"drafter": "ngram", "window": 8},
}
Arrays = dict[str, NDArray[Any]]
Split = Callable[[NDArray[Any]], tuple[int, int, dict[str, tuple[Any, Any]]]]
"""Function of a matrix [N, K] that returns the bits and the accuracy level of its nodes, and the
codes and scales of each."""


def whole(matrix: NDArray[Any]) -> tuple[int, int, dict[str, tuple[Any, Any]]]:
    """Return a matrix in 8 bits for the kernel that computes in int8."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    scale = _scale(blocks, 127)
    codes = np.round(blocks / scale[..., None]) + 128
    return 8, 4, {"": (codes.astype(np.uint8), scale)}


def halves(matrix: NDArray[Any]) -> tuple[int, int, dict[str, tuple[Any, Any]]]:
    """Return a matrix in 8 bits as two of 4 bits, for the kernel that computes in float32."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    scale = _scale(blocks, 119)
    codes = np.round(blocks / scale[..., None]).astype(int)
    high = (codes + 8) // 16
    low = codes - 16 * high
    packed = {"high": (_packed(high), 16 * scale), "low": (_packed(low), scale)}
    return 4, 1, packed


def _scale(blocks: NDArray[Any], largest: int) -> NDArray[Any]:
    scale = np.abs(blocks).max(-1) / largest
    return np.where(scale == 0, 1, scale).astype(np.float32)


def _packed(codes: NDArray[Any]) -> NDArray[Any]:
    """Pack pairs of 4-bit codes, of which 8 stands for 0."""
    codes = (codes + 8).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def quantised(path: Path, weights: Arrays, split: Split, out: Path) -> Arrays:
    """Write the graph at `path` with its matrices in 8 bits. Return the weights left outside."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    made_by = {name: node for node in graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    codes: Arrays = {}
    for node in graph.node:
        source = made_by.get(node.input[1]) if node.op_type == "MatMul" else None
        name = source.input[0] if source and source.op_type == "Transpose" else ""
        if name in weights and weights[name].shape[1] % BLOCK == 0:
            nodes += in_8_bits(node, name, weights[name], split, codes)
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)
    graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in codes.items()
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, str(out))
    left = {value.name for value in graph.initializer}
    return {name: weight for name, weight in weights.items() if name in left}


def in_8_bits(
    node: onnx.NodeProto,
    name: str,
    matrix: NDArray[Any],
    split: Split,
    codes: Arrays,
) -> list[onnx.NodeProto]:
    """Return the nodes that stand for a product with a matrix [N, K]. Adds its codes and scales to
    `codes`."""
    rows, columns = matrix.shape
    bits, level, parts = split(matrix)
    shape = {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK}
    nodes = []
    outputs = []
    for part, (code, scale) in parts.items():
        codes[f"{name}.codes{part}"] = code
        codes[f"{name}.scale{part}"] = scale.reshape(-1)
        outputs.append(f"{node.output[0]}.{part}" if part else node.output[0])
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                [node.input[0], f"{name}.codes{part}", f"{name}.scale{part}"],
                outputs[-1:],
                domain="com.microsoft",
                accuracy_level=level,
                **shape,
            )
        )
    if len(outputs) > 1:
        nodes.append(helper.make_node("Add", outputs, list(node.output)))
    return nodes


def replace_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Replace the nodes of a graph, without transposes and constants that nothing reads."""
    read = {name for node in nodes for name in node.input}
    kept = [
        node for node in nodes if node.op_type != "Transpose" or node.output[0] in read
    ]
    read = {name for node in kept for name in node.input}
    constants = [value for value in graph.initializer if value.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(constants)


def measured(
    pair: Pair, rows: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the speed of each way of decoding, and the number of answers that equal the target's
    own."""
    prompts = [row["question"] for row in rows]
    own: list[Generation] = []
    figures: dict[str, dict[str, Any]] = {}
    for way, options in WAYS.items():
        pair.generate(prompts[0], max_new_tokens=TOKENS, **options)
        began = time.perf_counter()
        outs = [
            pair.generate(prompt, max_new_tokens=TOKENS, **options)
            for prompt in prompts
        ]
        seconds = time.perf_counter() - began
        own = own or outs
        tokens = sum(len(out.tokens) for out in outs)
        figures[way] = {
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_pass": round(tokens / sum(o.target_passes for o in outs), 3),
            "same": same(outs, own),
            "right": sum(map(is_right, outs, rows)),
        }
    together = pair.generate_batch(
        prompts, rule="target", batch_size=8, max_new_tokens=TOKENS
    )
    figures["alone, batch of 8"] = {"same": same(together, own)}
    return figures


def same(outs: Sequence[Generation], own: Sequence[Generation]) -> int:
    return sum(out.tokens == other.tokens for out, other in zip(outs, own))


def is_right(out: Generation, row: Mapping[str, Any]) -> bool:
    """Return True if the last number of an answer is the reference."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", out.text.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(row["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    args = parser.parse_args()
    lines = args.rows.read_text(encoding="utf-8").split("\n")[: args.prompts]
    rows = list(map(json.loads, lines))
    pair = load_pair(args.model, dtype="float32", compile=True)
    path = graph_path(pair.target)
    weights = weights_of(pair.target, path)
    forms: dict[str, Split | None] = {
        "float32": None,
        "int8": whole,
        "int8 as two int4": halves,
    }
    results: dict[str, Any] = {"prompts": len(rows), "forms": {}}
    for form, split in forms.items():
        with tempfile.TemporaryDirectory() as folder:
            if split:
                out = Path(folder) / "graph.onnx"
                left = quantised(path, weights, split, out)
                pair.target.use(Graph(out, left, None))
            results["forms"][form] = measured(pair, rows)
        print(form, json.dumps(results["forms"][form]), flush=True)
    write_results(RESULTS, results)


if __name__ == "__main__":
    main()
