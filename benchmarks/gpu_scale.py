"""The step `scale` of benchmarks/gpu.py: larger targets, trained and then used as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from gpu_bench import Bench, Item, Result, Skipped
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from lenience.core.files import EMBEDDED

sys.path.insert(0, str(Path(__file__).parents[1] / "tools/embedded"))
import train as recipe

PARTS = 8
PART = 16 << 20
"""Number and bytes of the files that weights may come back in."""
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
}
"""63 million parameters: in bfloat16 they fit into what comes back."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CUT = (0, 1, -2, -1)
"""Layers of SmolLM2 that its draft begins with."""
MINUTES = {"target": 4.0, "SmolLM2": 1.5, "SmolLM2's draft": 0.5}
TOY_MINUTES = 0.03


def scale(bench: Bench) -> Iterator[Item]:
    """Train a target on the built-in task and use it with the built-in draft; then the same with
    SmolLM2, and a draft cut out of it, where its file was brought over."""
    target = bench.out / "target"
    yield "train", partial(train_large, bench, target)
    yield (
        "weights",
        partial(in_parts, target / "model.safetensors", bench.out / "weights"),
    )
    models = (EMBEDDED / "target" if bench.toy else target), EMBEDDED / "draft"
    for name, arguments in commands(bench, *models, bench.out / "run").items():
        yield name, partial(by_command, arguments)
    folder = bench.out / "smollm2"
    yield "SmolLM2, train", partial(train_smollm2, bench, folder)
    if not bench.toy:
        models = folder / "target", folder / "draft"
        for name, arguments in commands(bench, *models, folder / "run").items():
            yield f"SmolLM2, {name}", partial(by_command, arguments)


def commands(
    bench: Bench, target: Path, draft: Path, run: Path
) -> dict[str, list[str]]:
    """Return the commands of a user, from mining to a certificate."""
    samples, tested, largest = (
        ("16", "2", "0.5") if bench.toy else ("400", "300", "0.02")
    )
    tuned = (
        ["--window", "8", "--drafter", "model", "--prompts", "16"] if bench.toy else []
    )
    models = [
        "--target",
        str(target),
        "--draft",
        str(draft),
        "--task",
        "wordmath",
        "--no-chat",
    ]
    # the built-in graphs
    models += ["--compile", "--dtype", "float32"] if bench.toy else []
    asked = ["--max-drop", largest, *(["--limit", "16"] if bench.toy else [])]
    judge = f"judge:{run / 'judge'}"
    rules = [
        "--rule",
        "exact",
        "--rule",
        f"{judge}@0.9" if bench.toy else judge,
        "--rule",
        "topk:2",
        "--rule",
        "fuzzy:js@0.3",
    ]
    timed = ["--timed", "2", "--repeats", "1", "--window", "8"] if bench.toy else []
    return {
        "mine": ["mine", *models, "--limit", samples, "--out", str(run)],
        "fit": ["fit", str(run)],
        "compare": [
            *("compare", "--run", str(run), *rules, "--limit", tested, *timed),
            *("--out", str(run / "compare")),
        ],
        "tune": ["tune", str(run), *asked, *tuned, "--allow-weak-target"],
        "certify": ["certify", str(run), *asked, "--allow-weak-target"],
    }


def by_command(arguments: list[str]) -> Result:
    """Run a command of the package and return its JSON object; raises RuntimeError with its last
    line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "lenience", *arguments, "--json"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().split("\n")[-1])
    return {"told": json.loads(done.stdout.strip().split("\n")[-1])}


def train_large(bench: Bench, out: Path) -> Result:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if bench.toy else LARGE),
        vocab_size=len(tokenizer),
        max_position_embeddings=recipe.CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    minutes = TOY_MINUTES if bench.toy else MINUTES["target"]
    return train(
        bench, LlamaForCausalLM(config), tokenizer, out, ("target", minutes, 1e-3)
    )


def train_smollm2(bench: Bench, out: Path) -> Result:
    """Fine-tune SmolLM2, and a draft of some of its layers, on the built-in task."""
    if not bench.parts:
        raise Skipped("--parts names no folder with the parts of SmolLM2's file")
    joined = bench.out / "smollm2.gguf"
    joined.write_bytes(
        b"".join(part.read_bytes() for part in sorted(bench.parts.glob("part-*")))
    )
    as_floats = GgufConfig(gguf_file=joined.name, dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(bench.out, gguf_file=joined.name)
    tokenizer.chat_template = None
    told: Result = {}
    for role, name in (("target", "SmolLM2"), ("draft", "SmolLM2's draft")):
        model = AutoModelForCausalLM.from_pretrained(
            bench.out,
            gguf_file=joined.name,
            quantization_config=as_floats,
            dtype=torch.float32,
        )
        if role == "draft":
            kept = torch.nn.ModuleList(model.model.layers[i] for i in CUT)
            for number, layer in enumerate(kept):
                cast("Any", layer).self_attn.layer_idx = number
            model.model.layers = kept
            model.config.num_hidden_layers = len(kept)
        minutes = TOY_MINUTES if bench.toy else MINUTES[name]
        told[role] = train(bench, model, tokenizer, out / role, (role, minutes, 2e-4))
    return told


def train(
    bench: Bench, model: Any, tokenizer: Any, out: Path, plan: tuple[str, float, float]
) -> Result:
    """Train a model in bfloat16 autocast with AdamW and a linear decay, and save it. `plan` is the
    author of its texts, the minutes and the peak learning rate."""
    author, minutes, peak = plan
    model = model.to(bench.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95))
    began = time.monotonic()
    steps = 0
    seen = 0
    loss = 0.0
    for _, ids, labels in recipe.batches(texts(bench, author), tokenizer, 0):
        share = (time.monotonic() - began) / (60 * minutes)
        if share >= 1 and steps:
            break
        warm = (steps + 1) / 50
        left = max(0.02, 2 - 2 * share)
        optimizer.param_groups[0]["lr"] = peak * min(1.0, warm, left)
        loss = step(model, optimizer, ids.to(bench.device), labels.to(bench.device))
        steps = steps + 1
        seen = seen + ids.numel()
    model.eval().to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    return {
        "steps": steps,
        "tokens": seen,
        "loss": loss,
        "parameters, millions": millions,
    }


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Learn from token ids [B, T] and their labels [B, T]; return the loss before."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    weights = torch.ones(logits.shape[-1], device=ids.device)
    loss = recipe.weighted_loss(logits.float(), labels[:, 1:], weights)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def texts(bench: Bench, author: str) -> Any:
    """Return the recipe's settings of what the texts are made of."""
    return recipe.Training(
        role=author,
        tokens=0,
        rate=0,
        decay=0,
        pool=0,
        widen=None,
        batch=512 if bench.toy else 16384,
        compare=2,
        gifts=2,
        repeats=0.0,
        recalls=0.1,
        sums=0.1,
        numeric=3,
        work=bench.out,
        out=bench.out,
        device=str(bench.device),
    )


def in_parts(path: Path, folder: Path) -> Result:
    """Cut a file into parts that a machine may send back; joined in order they are the file."""
    folder.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes()
    if len(data) > PARTS * PART:
        raise Skipped(f"{len(data) >> 20} MiB are more than {PARTS * PART >> 20}")
    for number, start in enumerate(range(0, len(data), PART)):
        (folder / f"part-{number}").write_bytes(data[start : start + PART])
    return {"bytes": len(data)}
