"""A llama.cpp server on loopback, and GGUF files for it.

    python llama_server.py MODEL.gguf PORT

needs the package `xllamacpp`, which holds llama.cpp with its server.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROWS = 8
"""Number of requests that the server answers at once."""
CONTEXT = 8192
"""Tokens of all rows together."""
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Names of tensors in `transformers`, by their names in a GGUF file of a Llama."""
OF_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""The same for the tensors of each layer."""


def write_gguf(like: Path, folder: Path, out: Path, kind: str) -> None:
    """Write the Llama in `folder` as a GGUF file with the matrices in `kind`, such as "Q8_0".
    Tokenizer, template and settings come from the GGUF file `like`."""
    from gguf import (
        GGMLQuantizationType,
        GGUFReader,
        GGUFValueType,
        GGUFWriter,
        quants,
    )
    from safetensors.torch import load_file

    wanted = GGMLQuantizationType[kind]
    exact = GGMLQuantizationType.F32
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    source = GGUFReader(like)
    writer = GGUFWriter(out, "llama")
    for field in source.fields.values():
        own = field.name.startswith("GGUF.") or field.name == "general.architecture"
        if own or field.name in ("general.file_type", "general.quantization_version"):
            continue
        is_list = field.types[0] == GGUFValueType.ARRAY
        sub_type = field.types[-1] if is_list else None
        writer.add_key_value(
            field.name, field.contents(), field.types[0], sub_type=sub_type
        )
    for tensor in source.tensors:
        name, part = name_in_transformers(tensor.name)
        matrix = weights[name].float().numpy()
        if part in heads:
            matrix = _interleaved(matrix, heads[part])
        form = wanted if matrix.ndim == 2 else exact
        writer.add_tensor(tensor.name, quants.quantize(matrix, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_in_transformers(name: str) -> tuple[str, str]:
    """Return the name of a GGUF file's tensor in `transformers`, and its part of a layer."""
    if name in WHOLE:
        return WHOLE[name], ""
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{OF_LAYERS[part]}.weight", part


def _interleaved(matrix: Any, heads: int) -> Any:
    """Return a query or key matrix in llama.cpp's order: its rotary pairs are neighbours."""
    size = len(matrix) // heads
    halves = matrix.reshape(heads, 2, size // 2, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def serve(path: str, port: int) -> None:
    """Serve a file until the process ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {Path(path).name}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = CONTEXT
    params.n_parallel = ROWS
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
