"""The step `right` of benchmarks/gpu.py: greedy answers against transformers' own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Item, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lenience.core.errors import InputError, first_line
from lenience.decoding.pair import Pair
from lenience.drafting.datastore import build_store
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.lm import LM
from lenience.models.session import reads_together_as_alone
from lenience.training.fit_drafter import DrafterKind, DrafterPlan, fit_to_answers

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, **SMALL, num_key_value_heads=2, head_dim=16),
    "gemma2, sliding window": Gemma2Config(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
    ),
    "mistral, sliding window": MistralConfig(
        **COMMON, **SMALL, num_key_value_heads=2, sliding_window=24
    ),
    "gpt2": GPT2Config(**COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=512),
}
DECODED: dict[str, dict[str, Any]] = {
    "chain": {},
    "batch of 4": {"batch_size": 4},
    "tree": {"tree": "dynamic:8"},
    "trees in a batch": {"tree": "dynamic:8", "batch_size": 4},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "exit": {"drafter": "exit:1"},
    "skip": {"drafter": "skip:2"},
    "ngram|model": {"drafter": "ngram|model"},
    "ngram>model": {"drafter": "ngram>model"},
}
FITTED: tuple[DrafterKind, ...] = ("medusa", "blockwise", "eagle")
PROMPTS = [
    [5, 6, 7],
    [*range(1, 40)],
    [9],
    [3, 3, 3, 3, 8, 8],
    [*range(100, 120)],
    [42, 17],
]
NEW = 48
"""Number of new tokens of an answer; a third of it in a dry run."""
Answer = tuple[list[int], list[int]]
"""The tokens of a prompt, and of the target's answer by transformers."""


def random_pair(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> Pair:
    """Return a target with random weights, and a draft that is the target with some noise."""
    torch.manual_seed(1)
    target = AutoModelForCausalLM.from_config(config)
    draft = AutoModelForCausalLM.from_config(config)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std().nan_to_num())
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")),
        eos_token="<eos>",
    )
    on_device = [
        LM(model.to(device, dtype), tokenizer, f"random {role}", role)
        for role, model in (("target", target), ("draft", draft))
    ]
    return Pair(on_device[0], on_device[1], "random")


@torch.inference_mode()
def near_tie(lm: LM, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """Return whether two answers part at two tokens whose logits differ by rounding alone."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    logits = (
        lm.model(torch.tensor([prompt + theirs[:at]], device=lm.device))
        .logits[0, -1]
        .float()
    )
    ulps = 2 * torch.finfo(lm.model.dtype).eps * float(logits.abs().max())
    gap = abs(float(logits[ours[at]] - logits[theirs[at]]))
    return gap <= 4 * ulps


def compared(
    pair: Pair, answers: Sequence[Answer], options: Mapping[str, Any]
) -> Result:
    """Count the answers that are the same as the target's own."""
    prompts = [prompt for prompt, _ in answers]
    most = max(len(own) for _, own in answers)
    given = {"batch_size": 1, "window": 6, "max_new_tokens": most, **options}
    outs = pair.generate_batch(prompts, rule="exact", **given)
    found: Result = {"prompts": len(outs), "same": 0, "near_ties": 0, "different": 0}
    for (prompt, own), out in zip(answers, outs):
        if out.tokens == own:
            found["same"] += 1
        else:
            tie = near_tie(pair.target, prompt, out.tokens, own)
            found["near_ties" if tie else "different"] += 1
    return found | {"accepted": sum(out.accepted_exact for out in outs)}


def right(bench: Bench) -> Iterator[Item]:
    """Compare answers with transformers' own, first of the most common kind of model."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kinds = [
        (name, dtype) for name in CONFIGS for dtype in (torch.float32, torch.bfloat16)
    ]
    for name, dtype in kinds[:2] if bench.toy else kinds:
        pair = random_pair(CONFIGS[name], dtype, bench.device)
        prompts = PROMPTS[:2] if bench.toy else PROMPTS
        most = NEW // 3 if bench.toy else NEW
        answers = [(each, own_greedy(pair.target, each, most)) for each in prompts]
        kind = f"{name}, {str(dtype).removeprefix('torch.')}"
        variants = DECODED | retrieved(pair, answers)
        variants |= fitted(pair, answers) if name == "llama" else {}
        for passes in ("plain", "recorded"):
            if passes == "recorded" and (why := record(pair)):
                yield f"{kind}, recorded", partial(failing, why)
                break
            for variant, options in variants.items():
                yield (
                    f"{kind}, {passes}, {variant}",
                    partial(compared, pair, answers, options),
                )


def record(pair: Pair) -> str | None:
    """Read a pair through recorded passes; on a CPU they are made anew each time, with the same
    shapes. Returns what is wrong with them, if anything is."""
    for lm in pair.models.values():
        backend = CudaGraphs()
        try:
            if not reads_together_as_alone(lm, backend.cache(lm, 3, 256)):
                return f"{lm.role}: recorded passes differ from its own"
        except Exception as error:  # whatever a GPU raises
            return f"{lm.role}: {type(error).__name__}: {first_line(error)}"
        if lm.device.type == "cpu":
            # drafts made of the target's layers stay plain; by default they would be exported
            backend.makes_others = False
        lm.use(backend)
    return None


def failing(why: str) -> Result:
    raise RuntimeError(why)


@torch.inference_mode()
def own_greedy(lm: LM, prompt: list[int], most: int) -> list[int]:
    ids = torch.tensor([prompt], device=lm.device)
    out = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most
    )
    return out[0, len(prompt) :].tolist()


def retrieved(pair: Pair, answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return a drafter that looks up in a datastore of the target's own answers; nothing, with a
    word, where the library that builds one is missing."""
    store = Path(tempfile.mkdtemp()) / "store"
    documents = iter([answer for _, answer in answers])
    try:
        build_store(documents, pair.target.tokenizer_fingerprint, store)
    except InputError as error:
        print(f"right: no datastore ({first_line(error)})", flush=True)
        return {}
    return {"datastore": {"drafter": f"datastore:{store}"}}


def fitted(pair: Pair, answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return drafters that are trained for a moment on the target's answers; what cannot be trained
    is left out with a word."""
    found: dict[str, dict[str, Any]] = {}
    for kind in FITTED:
        folder = Path(tempfile.mkdtemp()) / kind
        try:
            fit_to_answers(
                pair, [*answers] * 5, DrafterPlan(kind, folder, heads=2, epochs=1)
            )
        except (InputError, RuntimeError) as error:
            print(f"right: no {kind} ({first_line(error)})", flush=True)
            continue
        found[kind] = {"drafter": f"{kind}:{folder}"}
    return found
