"""GGUF files: loaded through transformers, with one line for a file that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lenience
from lenience.core.errors import InputError

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
VOCABULARY = 64
WIDTH = 32
HEADS = 4
LAYERS = 2
INNER = 48


def write(path: Path, architecture: str = "llama") -> Path:
    """Write a tiny random Llama with a byte-level tokenizer of single characters."""
    rng = np.random.default_rng(0)
    out = gguf.GGUFWriter(str(path), architecture)
    out.add_context_length(128)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10_000.0)
    out.add_vocab_size(VOCABULARY)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    tokens = ["<|endoftext|>", "AB", *(chr(33 + i) for i in range(VOCABULARY - 2))]
    out.add_token_list(tokens)
    out.add_token_types([3] + [1] * (VOCABULARY - 1))
    out.add_token_merges(["A B"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)

    def tensor(name: str, *shape: int) -> None:
        out.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))

    tensor("token_embd.weight", VOCABULARY, WIDTH)
    tensor("output.weight", VOCABULARY, WIDTH)
    out.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{i}.{norm}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{name}.weight", WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_gate.weight", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_up.weight", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_down.weight", WIDTH, INNER)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_file_decodes_as_transformers_does(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    prompt = [5, 6, 7, 5, 6]
    wanted = own.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=20,
    )[0, len(prompt) :].tolist()
    pair = lenience.load_pair(str(path), compile=False)
    assert next(pair.target.model.parameters()).dtype == torch.float32
    assert pair.generate(prompt, drafter="ngram", max_new_tokens=20).tokens == wanted
    again = lenience.load_pair(str(path), str(path), dtype="bfloat16", compile=False)
    assert next(again.target.model.parameters()).dtype == torch.bfloat16
    again.target.model.save_pretrained(
        tmp_path / "saved"
    )  # which quantised ones cannot


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; name an existing file, or a file of the Hub"),
        (b"PK\x03\x04", "is no GGUF file; fetch it again"),
        (b"GGUF\x03", "cannot be loaded"),
    ],
)
def test_a_bad_file_is_one_line(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        lenience.load_pair(str(path))
    assert "\n" not in str(error.value) and "bad.gguf" in str(error.value)


def test_an_architecture_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "other.gguf", "madeup")
    with pytest.raises(InputError, match=r"other\.gguf.*cannot be loaded"):
        lenience.load_pair(str(path))


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lenience.models.gguf.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'lenience\[gguf\]'"):
        lenience.load_pair(str(write(tmp_path / "tiny.gguf")))
