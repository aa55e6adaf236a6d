"""Fitting a drafter's heads to what the target itself answered in a run: self-distillation, with no
data but the journal (Medusa, Cai 2024, section 2.3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lenience.core.errors import InputError
from lenience.core.files import digest, replacing
from lenience.core.progress import Progress, silent
from lenience.decoding.pair import Pair
from lenience.drafting.heads import DraftHeads
from lenience.mining.features import check_models, journal_records
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.runs.record import MinedSample
from lenience.runs.uses import prompt_digest

Kind = Literal["medusa", "blockwise"]
HELD_OUT = 0.1
"""The share of the samples that only measures."""
BATCH, LEARNING_RATE, WEIGHT_DECAY = 512, 1e-3, 0.01
FURTHER_WEIGHT = 0.8
"""What a head's loss weighs less than that of the head before (Medusa, section 2.2.1)."""
NOT_THERE = -100
"""Stands for a token past the end of an answer."""
LEAST = 10
"""How many answers there must be."""
Answer = tuple[list[int], list[int]]
"""The tokens of a prompt and those of the target's own answer."""


@dataclass(frozen=True)
class DrafterPlan:
    """Which heads are fitted to a run's answers."""

    kind: Kind
    out: Path
    """The folder that they are saved in."""
    heads: int = 4
    epochs: int = 30
    seed: int = 0


def fit_drafter(
    pair: Pair, run: Path, plan: DrafterPlan, progress: Progress = silent
) -> DraftHeads:
    """Read the target's states along its own answers, fit heads to the tokens that follow, and save
    those that do best on samples held out; started again, it goes on after the last epoch. Raises
    InputError where the run is of other models or has too few samples."""
    check_models(pair, run)
    answers = []
    for line, record in enumerate(journal_records(run), 1):
        sample = MinedSample.read(record, f"{run / 'journal.jsonl'}, line {line}")
        answers.append((sample.prompt_ids, sample.response_ids))
    return fit_to_answers(pair, answers, plan, progress)


def fit_to_answers(
    pair: Pair, answers: Sequence[Answer], plan: DrafterPlan, progress: Progress = silent
) -> DraftHeads:
    """The same of any answers of the target's own."""
    pair.target.check_states()
    if len(answers) < LEAST:
        raise InputError(
            f"--drafter {plan.kind}: {len(answers)} answers to learn from, and {LEAST} are the "
            "least; mine more"
        )
    parts = []
    for n, (prompt, response) in enumerate(answers, 1):
        parts.append(_states(pair.target, prompt, response, plan.heads))
        progress("hidden states", n, len(answers))
    of_plan = [plan.kind, plan.heads, plan.epochs, plan.seed]
    made_of = digest([list(answers), of_plan, pair.target.fingerprint])
    training = _Training(pair.target, plan, made_of)
    held_out = max(1, round(HELD_OUT * len(parts)))
    heads, metrics = training.fit(parts[held_out:], parts[:held_out], progress)
    fitted_to = {name: pair.fingerprints[name] for name in ("target", "tokenizer")}
    prompts = tuple(dict.fromkeys(prompt_digest(prompt) for prompt, _ in answers))
    heads = replace(heads, fingerprints=fitted_to, metrics=metrics, prompts=prompts)
    heads.save(plan.out)
    training.path.unlink(missing_ok=True)
    return heads


Part = tuple[Tensor, Tensor]
"""States [n, H] of one sample, and for each [n, heads] the tokens that its heads are to predict."""


def _states(target: LM, prompt: list[int], answer: list[int], heads: int) -> Part:
    """The target's states from the last token of the prompt on, along its own answer."""
    session = Session(target, 1, len(prompt) + len(answer))
    reading = session.read([prompt + answer], len(answer) + 1)
    further = [*answer[1:], *[NOT_THERE] * (heads + 1)]
    wanted = [further[i : i + heads] for i in range(len(answer))]
    return reading.hidden[0, :-1].float().cpu(), torch.tensor(wanted).view(-1, heads)


def first_heads(target: LM, plan: DrafterPlan) -> DraftHeads:
    """Heads that say at first what the target itself predicts: blocks that add nothing."""
    matrix = target.output_matrix.detach().float().cpu()
    size = matrix.shape[1]
    generator = torch.Generator().manual_seed(plan.seed)
    if plan.kind == "medusa":
        blocks = [
            [{"weight": torch.zeros(size, size), "bias": torch.zeros(size)}]
            for _ in range(plan.heads)
        ]
        return DraftHeads("medusa", blocks, [matrix.clone() for _ in range(plan.heads)], {}, {})
    blocks = [
        [
            {
                "into": torch.randn(size, size, generator=generator) * size**-0.5,
                "into_bias": torch.zeros(size),
                "out": torch.zeros(size, size),
                "out_bias": torch.zeros(size),
            }
        ]
        for _ in range(plan.heads)
    ]
    return DraftHeads("blockwise", blocks, None, {}, {})


class _Training:
    """A fit that can be gone on with."""

    def __init__(self, target: LM, plan: DrafterPlan, made_of: str):
        self.plan, self.made_of = plan, made_of
        self.matrix = target.output_matrix.detach().float().cpu()
        self.path = plan.out / "training.safetensors"
        self.heads = first_heads(target, plan)
        self.weights = self.heads.tensors()
        for weight in self.weights.values():
            weight.requires_grad_(True)
        self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self.done, self.best_kept = 0, 0.0

    def fit(
        self, parts: Sequence[Part], held_out: Sequence[Part], progress: Progress
    ) -> tuple[DraftHeads, dict[str, object]]:
        """Train on samples; of all epochs the one is taken after which most tokens are kept on
        those held out."""
        self._resume()
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        while self.done < self.plan.epochs:
            progress(f"fitting {self.plan.kind} heads", self.done, self.plan.epochs)
            self._epoch(x, y)
            self.done += 1
            kept = tokens_per_pass(self.heads, self.matrix, held_out)
            if kept > self.best_kept:
                self.best_kept = kept
                self.best = {n: weight.detach().clone() for n, weight in self.weights.items()}
            self._save()
        progress(f"fitting {self.plan.kind} heads", self.plan.epochs, self.plan.epochs)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.best[name]).requires_grad_(False)
        cpu = torch.device("cpu")
        half = self.heads.to(cpu, torch.float16)
        as_read = half.to(cpu, torch.float32)
        return half, {
            "samples": len(parts) + len(held_out),
            "held_out": len(held_out),
            "tokens_per_pass": tokens_per_pass(as_read, self.matrix, held_out),
            "accuracy": accuracies(as_read, self.matrix, held_out),
        }

    def _epoch(self, x: Tensor, y: Tensor) -> None:
        rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * self.done / self.plan.epochs))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        generator = torch.Generator().manual_seed(self.plan.seed + 1000 * self.done)
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            logits = self.heads.logits(x[rows], self.matrix)  # [m, n, V]
            loss = torch.zeros(())
            for i in range(self.plan.heads):
                cross = torch.nn.functional.cross_entropy(
                    logits[:, i], y[rows, i], ignore_index=NOT_THERE
                )
                loss = loss + FURTHER_WEIGHT**i * cross.nan_to_num()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _save(self) -> None:
        """Keep the epochs that are done."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state = self.optimizer.state[weight]
            tensors |= {f"now.{name}": weight.detach(), f"best.{name}": self.best[name]}
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        about = {"of": self.made_of, "done": str(self.done), "best": repr(self.best_kept)}
        with replacing(self.path) as new:
            save_file({name: part.contiguous() for name, part in tensors.items()}, new, about)

    def _resume(self) -> None:
        """Take up the epochs that are done, where they are of the same fit."""
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                if about.get("of") != self.made_of:
                    return
                names = list(file.keys())  # it is no dict
                saved = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError):
            return
        self.done, self.best_kept = int(about["done"]), float(about["best"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(saved[f"now.{name}"])
                self.best[name] = saved[f"best.{name}"]
                self.optimizer.state[weight] = {
                    key: saved[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")
                }


@torch.no_grad()
def _right(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> Tensor:
    """[N, n] bool: whether each head's most probable token is the target's."""
    x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    found = [heads.logits(some, matrix).argmax(-1) for some in x.split(4096)]
    return torch.cat(found) == y


def tokens_per_pass(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> float:
    """How many tokens a pass keeps by the strict rule, the target's own included, over all places
    of the samples."""
    return 1 + float(_right(heads, matrix, parts).cumprod(1).sum(1).float().mean())


def accuracies(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> list[float]:
    """Each head's share of tokens that are the target's."""
    return [float(share) for share in _right(heads, matrix, parts).float().mean(0)]
