"""Train the built-in pair from scratch on the task `wordmath`.

    python recipes/train_embedded.py tokenizer
    python recipes/train_embedded.py target --tokens 36e6
    python recipes/train_embedded.py target --tokens 40e6 --compare 5
    python recipes/train_embedded.py draft --tokens 5.2e6

Each writes into src/lenience/embedded/; a training run keeps its state in --work and goes on from
there when it is started again. Both models see right solutions only, each in the wording of its own
author.

These are the commands that made the models that are shipped, on two cores of an AMD EPYC, with one
difference: the first 16 M tokens of the target were read under --tokens 40e6, at the same constant
learning rate.

- target, 8 layers x 128, 1.7 M parameters: 9,000 tokens/s with other work beside, 75 minutes in
  all. After 36 M tokens it was right on 94.0 % of 400 problems (share 100 %, work 98 %, shop 94 %,
  compare 85 %); the second command prolongs it with more problems of the family `compare`, entering
  the learning rate's way down at a quarter of its peak.
- draft, 2 layers x 128, 0.45 M parameters: 30,000 tokens/s, 3 minutes. With 6.5 M tokens it is
  right on 56 %, with 10 M on 69 %, and then too few of its mismatches are important.

Reached on the first 500 problems of the test split: target 96.4 % right, draft 39.6 %. Of 20,499
mismatches mined from 1,000 samples 9.2 % are important; whether a digit or an operator stands there
tells them with an AUC of 0.81. A draft pass costs a seventh of the target's read of 9 tokens
compiled, a fifth to a quarter as transformers runs them (recipes/check_embedded.py).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lenience.tasks import wordmath, wordmath_problems

EMBEDDED = Path(__file__).parents[1] / "src/lenience/embedded"
SHAPES = {
    "target": dict(
        hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=2
    ),
    "draft": dict(
        hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2
    ),
}
CONTEXT = 1024
EOS = "</s>"
NUMERIC = 3.0
"""Weight of digits and operators in the loss, whose signal would else drown in that of wording."""
IGNORED = -100  # label of positions that the loss leaves out: the prompt and the padding


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words, punctuation marks and single digits, each with and without a space before it; no token
    for the unknown."""
    pieces = r"▁?\d|▁?[A-Za-z]+|▁?[^\sA-Za-z\d▁]"
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
        ]
    )
    words = {f"{space}{digit}" for space in ("", "▁") for digit in range(10)}
    for i in range(20_000):
        made = wordmath.problem("vocabulary", i)
        for author in ("target", "draft"):
            text = f"{wordmath.prompt(made)} {wordmath.solution(made, author, random.Random(i))}"
            words |= {piece for piece, _ in split.pre_tokenize_str(text)}
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([EOS, *sorted(words)])}))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def batches(
    author: str, tokenizer: PreTrainedTokenizerFast, size: int, start: int, compare: int
) -> Iterator[tuple]:
    """Endless (state, ids [B, T], labels [B, T]) of about `size` tokens, rows of like length
    together; `start` is the pool to begin with, `compare` how often the hardest family comes for
    once of each other."""
    hardest, *others = wordmath_problems.FAMILIES
    pool = start
    while True:
        rng = random.Random(f"pool|{author}|{pool}")
        rows = []
        for i in range(pool * 2048, (pool + 1) * 2048):
            made = wordmath.problem(f"pretrain-{author}", i, [hardest] * compare + others)
            rows.append((wordmath.prompt(made), f" {wordmath.solution(made, author, rng)}"))
        asked = tokenizer([row[0] for row in rows])["input_ids"]
        whole = tokenizer([row[0] + row[1] for row in rows])["input_ids"]
        pairs = sorted(zip(asked, whole), key=lambda pair: len(pair[1]))
        chunks, chunk = [], []
        for pair in pairs:
            if chunk and (len(chunk) + 1) * (len(pair[1]) + 1) > size:
                chunks.append(chunk)
                chunk = []
            chunk.append(pair)
        chunks.append(chunk)
        rng.shuffle(chunks)
        pool += 1
        for chunk in chunks:
            width = max(len(ids) for _, ids in chunk) + 1
            ids = torch.full((len(chunk), width), tokenizer.eos_token_id)
            labels = torch.full((len(chunk), width), IGNORED)
            for row, (question, text) in enumerate(chunk):
                ids[row, : len(text)] = torch.tensor(text)
                labels[row, len(question) : len(text)] = ids[row, len(question) : len(text)]
                labels[row, len(text)] = tokenizer.eos_token_id
            yield pool, ids, labels


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of logits [B, T, V] on labels [B, T], each position counted by its label's
    weight [V]."""
    kept = labels != IGNORED
    return torch.nn.functional.cross_entropy(logits[kept], labels[kept], weight=weights)


def schedule(done: float) -> float:
    """Share of the peak learning rate after a share `done` of the training: a short warm-up, then a
    linear way down over the last 40 %."""
    return min(1.0, done / 0.01, max(0.02, (1 - done) / 0.4))


def save_state(
    path: Path, model: torch.nn.Module, optimizers: list, progress: tuple[int, int, int]
) -> None:
    """Weights and optimizer states, whole or not at all; `progress` is (tokens seen, next pool,
    steps)."""
    tensors = {f"model/{name}": value for name, value in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{i}/{j}/{key}": value for key, value in state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(".new"), metadata={"progress": json.dumps(progress)})
    path.with_suffix(".new").replace(path)


def load_state(path: Path, model: torch.nn.Module, optimizers: list) -> tuple[int, int, int]:
    parameters = dict(model.named_parameters())
    states: list[dict] = [{} for _ in optimizers]
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118
            kind, *rest = key.split("/")
            if kind == "model":
                parameters[rest[0]].copy_(file.get_tensor(key))
            else:
                states[int(rest[0])].setdefault(int(rest[1]), {})[rest[2]] = file.get_tensor(key)
        progress = json.loads(file.metadata()["progress"])
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return tuple(progress)


def train(
    role: str,
    tokens: float,
    work: Path,
    rate: float,
    size: int,
    compare: int,
    device: str,
    out: Path,
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / role)
    torch.manual_seed({"target": 1, "draft": 2}[role])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **SHAPES[role],
    )
    model = LlamaForCausalLM(config).to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    numeric = [
        bool(re.fullmatch(r"▁?[\d+*/=-]", token))
        for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    ]
    weights = torch.where(torch.tensor(numeric), NUMERIC, 1.0).to(device)
    state = work / f"{role}.safetensors"
    seen, pool, step = load_state(state, model, optimizers) if state.exists() else (0, 0, 0)
    if seen >= tokens:
        print(
            f"{role}: {seen / 1e6:.2f} M tokens are done already; --tokens for more, another "
            "--work to begin anew"
        )
        model.save_pretrained(out / role)
        return
    began, first, losses = time.time(), seen, []
    for pool_now, ids, labels in batches(role, tokenizer, size, pool, compare):
        ids, labels = ids.to(device), labels.to(device)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(seen / tokens)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [B, T-1, V]
        loss = weighted_loss(logits.float(), labels[:, 1:], weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen, step = seen + ids.numel(), step + 1
        losses = [*losses[-49:], loss.item()]
        last = seen >= tokens
        if step % 20 == 0 or last:
            speed = (seen - first) / (time.time() - began)
            left = (tokens - seen) / speed / 60
            print(
                f"{role} step {step} {seen / 1e6:.2f} M tokens loss "
                f"{sum(losses) / len(losses):.4f} {speed:.0f} tokens/s {left:.1f} min left",
                flush=True,
            )
        if step % 200 == 0 or last:
            save_state(state, model, optimizers, (seen, pool_now, step))
        if last:
            break
    model.save_pretrained(out / role)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tokenizer", "target", "draft"))
    parser.add_argument("--tokens", type=float, default=12e6, help="how many tokens to train on")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=8192, help="tokens in a batch")
    parser.add_argument(
        "--compare",
        type=int,
        default=2,
        help="how often the family `compare` comes for once of each other",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("training"),
        help="where the state of the training is kept",
    )
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="where the finished models go")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.what == "tokenizer":
        for role in SHAPES:
            build_tokenizer().save_pretrained(given.out / role)
    else:
        train(
            given.what,
            given.tokens,
            given.work,
            given.rate,
            given.batch,
            given.compare,
            given.device,
            given.out,
        )


if __name__ == "__main__":
    main()
