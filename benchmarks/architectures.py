"""Every kind of causal language model in transformers, tiny and random, decoded with lenience.

    python benchmarks/architectures.py                 all kinds; writes results and docs/models.md
    python benchmarks/architectures.py qwen3_5 mamba   some kinds; prints the reasons whole

Answers are compared with the greedy answers of transformers' own `generate`. A kind is the same if
each way of decoding gives the same tokens or is refused by name, and refused if loading is.
"""

from __future__ import annotations

import argparse
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from recording import write_results
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS,
)
from transformers.utils import logging

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.models.lm import LM
from lenience.models.session import check_windows

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "architectures.json"
PAGE = HERE.parent / "docs" / "models.md"
BEGIN = "<!-- kinds: written by benchmarks/architectures.py -->"
END = "<!-- end of kinds -->"
VOCABULARY = 96
LAYERS = 4
CONTEXT = 128
LENGTH = 14
"""Tokens of an answer."""
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21]]
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"rule": "target"},
    "window 1": {"window": 1},
    "window 4": {"window": 4},
    "window 8": {"window": 8},
    "ngram": {"drafter": "ngram", "window": 4},
    "in a batch": {"window": 4, "batch_size": 3},
    "tree": {"tree": "dynamic:8", "window": 4},
}
"""Ways of decoding strictly, with their options."""
SIZES: dict[str, int | float | None] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
        LAYERS,
    ),
    **dict.fromkeys(("num_decoder_layers",), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length"), CONTEXT
    ),
    **dict.fromkeys(("max_seq_len", "seq_length"), CONTEXT),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "lru_width", "embedding_size"), 32
    ),
    **dict.fromkeys(("attention_hidden_size", "dim"), 32),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "n_heads", "mamba_n_heads"), 4
    ),
    **dict.fromkeys(
        (
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_encoder_attention_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "rotary_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(
        ("qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim"), 48
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1
    ),
    **dict.fromkeys(("num_shared_experts", "num_global_layers"), 1),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        16,
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(
        ("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size"), 8
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "block_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "mamba_d_conv"), 4),
    **dict.fromkeys(("mamba_expand",), 2),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("linear_num_value_heads", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("linear_num_key_heads", "type_vocab_size"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_topk"), 8),
    **dict.fromkeys(("index_n_heads",), 16),  # with fewer, ties among the keys' scores
    **dict.fromkeys(("index_head_dim", "chunk_size", "patch_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 16),
    **dict.fromkeys(("local_attention", "image_size"), 16),
    **dict.fromkeys(("decoder_layerdrop", "pad_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": None,
    "is_decoder": True,  # False in encoders, whose attention has no causal mask
}
"""Sizes by the name of the configuration's field, for all kinds that have the field."""
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Fields that name the type of each layer. A tiny model takes turns between a kind's types."""
LEAVE = object()
"""Value of an override that leaves a field as it is."""
QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 100,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Indexers' fields are None by default. The n-gram embedding (ple) needs an end token."""
DOTS3_HEADS = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
}
DOTS3_NOTE = {
    **DOTS3_HEADS,
    **{f"swa_{name}": value for name, value in DOTS3_HEADS.items()},
    "qk_rope_head_dim": 8,
    "shared_experts_intermediate_size": 16,
}
"""Fields that differ by layer: of indexed attention, and of sliding attention (swa)."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bart": {"decoder_layerdrop": 0.0},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "num_hidden_layers": LAYERS,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            name: {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            }
            for name in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dots3_note": {
        "text_config": DOTS3_NOTE,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3_NOTE,
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "layers_block_type": LEAVE,
        "shared_intermediate_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": LEAVE,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mamba2": {"head_dim": 16},
    "prophetnet": {"num_hidden_layers": LEAVE, "num_encoder_layers": LAYERS},
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xlnet": {"max_position_embeddings": LEAVE, "d_inner": 48},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": LEAVE, "head_dim": LEAVE},
    "zamba2": {"attention_hidden_size": LEAVE, "head_dim": LEAVE, "adapter_rank": 8},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 16,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}
"""Fields of kinds that the sizes above do not fit. Left not built are gemma3n (timm is missing),
gemma4_assistant and gemma4_unified_assistant (they read a target's keys and values), and musicgen
and musicgen_melody (AutoModelForCausalLM does not take their configuration)."""


def tiny_config(kind: str) -> PretrainedConfig:
    """Return the configuration of a tiny model of a kind."""
    made = CONFIG_MAPPING[kind]
    usual = made()
    given = _sizes(usual)
    for name in getattr(made, "sub_configs", {}):
        part = getattr(usual, name, None)
        if part is not None:
            given[name] = _sizes(part)
    for name, value in OVERRIDES.get(kind, {}).items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            given[name] = {**given[name], **value}
        else:
            given[name] = value
    return made(**{name: value for name, value in given.items() if value is not LEAVE})


def _sizes(config: PretrainedConfig) -> dict[str, Any]:
    """Return the tiny sizes of a configuration's own fields."""
    names = [name for name in SIZES if _is_set(config, name)]
    given: dict[str, Any] = {name: SIZES[name] for name in names}
    if "kv_lora_rank" in given:  # each head has keys of its own there
        given["num_key_value_heads"] = given["num_attention_heads"]
    if "index_topk" in given:  # a padding token's embedding of zeros ties all scores
        given["pad_token_id"] = None
    for name in LAYER_LISTS:
        types = getattr(config, name, None) if _can_set(config, name) else None
        if types:
            each = list(dict.fromkeys(types))
            given[name] = [each[i % len(each)] for i in range(LAYERS)]
    return given


def _is_set(config: PretrainedConfig, name: str) -> bool:
    """Return True if a configuration has a value in a field that can be set."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some fields differ by layer and cannot be read as one
        return False
    tokens = name in ("pad_token_id", "bos_token_id", "eos_token_id")
    known = value is not None or name in ("num_key_value_heads", "head_dim") or tokens
    return known and hasattr(config, name) and _can_set(config, name)


def _can_set(config: PretrainedConfig, name: str) -> bool:
    target = type(config).attribute_map.get(name, name)
    own = getattr(type(config), target, None)
    return not (isinstance(own, property) and own.fset is None)


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of a kind with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    settings = model.generation_config
    settings.eos_token_id = None
    return model


def tiny_draft(kind: str) -> PreTrainedModel:
    """Return the tiny model of a kind with noise on its weights: a draft that is right at times."""
    model = tiny_model(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(0.02 * noise * weight.std().nan_to_num(0))
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0"
    )


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return transformers' own greedy answer."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=0,
        )
    return list(out[0, len(prompt) :].tolist())


@dataclass
class Found:
    """What became of a kind."""

    kind: str
    status: str
    """same, refused, different, failed, or not built."""
    why: str = ""
    ways: dict[str, str] = field(default_factory=dict)
    """Each way of decoding with "same", or with why not."""
    tokens_per_pass: float = 0.0
    """Tokens per target pass at window 4."""


def survey(kind: str) -> Found:
    """Build a kind, decode with it in every way, and compare."""
    try:
        models = tiny_model(kind), tiny_draft(kind)
        wanted = [greedy(models[0], prompt) for prompt in PROMPTS]
    except Exception as error:  # whatever a kind raises that needs other sizes
        return Found(kind, "not built", _said(error))
    try:
        target = LM(models[0], tokenizer(), kind, "target")
        draft = LM(models[1], tokenizer(), kind, "draft")
        for lm in (target, draft):
            check_windows(lm)
    except InputError as error:
        return Found(kind, "refused", str(error))
    except Exception as error:  # what a user would see as a crash
        return Found(kind, "failed", _said(error))
    pair = Pair(target, draft, kind)
    found = Found(kind, "same")
    for name, options in WAYS.items():
        found.ways[name] = _compared(found, pair, wanted, name, options)
    if any(way.startswith("failed") for way in found.ways.values()):
        found.status = "failed"
    if any(way.startswith("different") for way in found.ways.values()):
        found.status = "different"
    if all(way.startswith("refused") for way in found.ways.values()):
        found.status = "refused"
        found.why = found.ways["alone"].removeprefix("refused: ")
    return found


def _compared(
    found: Found,
    pair: Pair,
    wanted: Sequence[list[int]],
    name: str,
    options: dict[str, Any],
) -> str:
    """Decode in one way, and return "same" or why not."""
    try:
        outs = pair.generate_batch(PROMPTS, max_new_tokens=LENGTH, **options)
    except InputError as error:
        return f"refused: {error}"
    except Exception as error:  # what a user would see as a crash
        return f"failed: {_said(error)}"
    if name == "window 4":
        passes = sum(out.target_passes for out in outs)
        found.tokens_per_pass = sum(len(out.tokens) for out in outs) / passes
    wrong = sum(out.tokens != answer for out, answer in zip(outs, wanted))
    return f"different: {wrong} of {len(wanted)} answers" if wrong else "same"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of hundreds of loaded models."""
    shown = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Reformer prints what it ignores
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(shown)


def survey_all(kinds: Sequence[str]) -> Iterator[Found]:
    """Yield what became of each kind as it is known."""
    for kind in kinds:
        with quiet():
            found = survey(kind)
        yield found


def section(rows: Sequence[Found]) -> str:
    """Return the page's list of kinds."""
    whole = [row for row in rows if row.status == "same" and row.ways["tree"] == "same"]
    chains = [row for row in rows if row.status == "same" and row not in whole]
    refused = [row for row in rows if row.status == "refused"]
    missing = [row for row in rows if row.status == "not built"]
    parts = [
        f"**The same, chains and trees** ({len(whole)}):",
        _names(whole),
        f"**The same, chains alone** ({len(chains)}):",
        _names(chains),
        f"**Refused** ({len(refused)}):",
        _reasons(refused),
        f"**Not built tiny** ({len(missing)}), so not tried:",
        _reasons(missing),
    ]
    return "\n\n".join(parts)


def _names(rows: Sequence[Found]) -> str:
    names = textwrap.fill(
        " ".join(row.kind for row in rows), 96, break_on_hyphens=False
    )
    return f"```text\n{names}\n```"


def _reasons(rows: Sequence[Found]) -> str:
    return "\n".join(f"- `{row.kind}`: {_reason(row)}" for row in rows)


def _reason(row: Found) -> str:
    """Return why a kind is refused, without its name and what to do instead."""
    why = row.why.removeprefix(f"target {row.kind!r}: ")
    for rest in ("; name a decoder-only", "; use a", "; use another", "; set pair."):
        why = why.split(rest)[0]
    return why.replace("<", "&lt;").strip()


def write_page(rows: Sequence[Found]) -> None:
    """Replace the page's list of kinds."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    text = f"{before}{BEGIN}\n\n{section(rows)}\n\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "kinds", nargs="*", help="kinds of models; all if none is given"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)

    results = []
    for found in survey_all(args.kinds or list(KINDS)):
        results.append(found)
        ways = [f"{way}: {said}" for way, said in found.ways.items() if said != "same"]
        text = "; ".join([found.why, *ways] if found.why else ways)
        shown = text if args.kinds else text[:150]
        print(f"{found.kind:26} {found.status:10} {shown}", flush=True)
    print(dict(Counter(found.status for found in results)))
    if not args.kinds:
        write_page(results)
        rows = [vars(found) for found in results]
        write_results(
            RESULTS, {"transformers": transformers.__version__, "kinds": rows}
        )


if __name__ == "__main__":
    main()
