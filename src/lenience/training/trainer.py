"""Training loop that resumes after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lenience.core.errors import RunError
from lenience.core.files import replacing
from lenience.core.progress import Progress
from lenience.decoding.soundness import CAUSES

ANSWERS_PER_STEP = 8
"""Number of answers in a training step."""
WEIGHT_DECAY = 0.01
LARGEST_GRADIENT = 0.5
AVERAGES = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a weight; the step count stays on the CPU."""
Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and tokens of the answer to it."""


def by_length(answers: Sequence[Answer]) -> list[Answer]:
    """Sort answers by their length with the prompt, and leave out empty answers."""
    return sorted(
        (answer for answer in answers if answer[1]),
        key=lambda answer: len(answer[0]) + len(answer[1]),
    )


def batches(answers: Sequence[Answer], seed: int) -> Iterator[Sequence[Answer]]:
    """Yield batches of ANSWERS_PER_STEP adjacent answers, in an order given by the seed."""
    starts = range(0, len(answers), ANSWERS_PER_STEP)
    generator = torch.Generator().manual_seed(seed)
    for i in torch.randperm(len(starts), generator=generator).tolist():
        yield answers[starts[i] : starts[i] + ANSWERS_PER_STEP]


def mean_cross_entropy(logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
    """Return the mean cross-entropy of logits [n, V] over the tokens `wanted` [n] that differ from
    `ignored`; 0 if there are none."""
    total = torch.nn.functional.cross_entropy(
        logits, wanted, ignore_index=ignored, reduction="sum"
    )
    return total / (wanted != ignored).sum().clamp(min=1)


@dataclass(frozen=True)
class Schedule:
    """Number of epochs and learning rate."""

    epochs: int
    rate: float
    """Learning rate of the first epoch; it falls to 0 along a cosine."""


class Checkpoint:
    """A file with the state of a training. Only the same training can read it."""

    def __init__(self, path: Path, made_of: str):
        """Take `made_of`, which identifies the models, data and settings."""
        self.path = path
        self.made_of = made_of

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        """Replace the state by these tensors and facts."""
        stored = {name: part.detach().contiguous() for name, part in tensors.items()}
        with replacing(self.path) as new:
            save_file(stored, new, {"of": self.made_of, **about})

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Return the tensors and facts; None if there is no checkpoint of the same training."""
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                if about.get("of") != self.made_of:
                    return None
                names = list(file.keys())  # the file is not a dict
                return {name: file.get_tensor(name) for name in names}, about
        except (OSError, SafetensorError):
            return None

    def forget(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


class Training:
    """Training of weights, saved in a checkpoint after each epoch. The result is the weights of the
    epoch with the highest measure."""

    def __init__(
        self, weights: Mapping[str, Tensor], path: Path, made_of: str, plan: Schedule
    ):
        """Take `made_of`, which identifies the models, data and settings."""
        self.weights = weights
        self.plan = plan
        self._checkpoint = Checkpoint(path, made_of)
        for weight in weights.values():
            weight.requires_grad_(True)
        self.best = {name: weight.detach().clone() for name, weight in weights.items()}
        self.optimizer = torch.optim.AdamW(
            weights.values(), lr=plan.rate, weight_decay=WEIGHT_DECAY
        )
        self.done = 0
        self.best_measure = 0.0

    def run(
        self,
        epoch: Callable[[int], None],
        measure: Callable[[], float],
        what: str,
        progress: Progress,
    ) -> None:
        """Train to the last epoch. `epoch` takes an epoch's number and calls `step` for each batch;
        `measure` returns the measure to maximise."""
        self._resume()
        while self.done < self.plan.epochs:
            progress(what, self.done, self.plan.epochs)
            rate = (
                self.plan.rate
                * 0.5
                * (1 + np.cos(np.pi * self.done / self.plan.epochs))
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            epoch(self.done)
            self.done += 1
            found = measure()
            if found > self.best_measure:
                self.best_measure = found
                self.best = {
                    name: part.detach().clone() for name, part in self.weights.items()
                }
            self._save()
        progress(what, self.plan.epochs, self.plan.epochs)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.best[name]).requires_grad_(False)

    def step(self, loss: Tensor) -> None:
        """Take an optimiser step on a loss. Raises RunError if the loss is NaN or infinite."""
        if not bool(loss.isfinite()):
            what = f"the loss of epoch {self.done + 1} is NaN or infinite"
            raise RunError(f"{self._checkpoint.path.parent}: {what}; {CAUSES}")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), LARGEST_GRADIENT)
        self.optimizer.step()

    def forget(self) -> None:
        """Delete the checkpoint."""
        self._checkpoint.forget()

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            state = self.optimizer.state[weight]
            tensors |= {f"now.{name}": weight.detach(), f"best.{name}": self.best[name]}
            # a weight that took no step yet has no state
            tensors |= {f"{key}.{name}": state[key] for key in AVERAGES if key in state}
        about = {"done": str(self.done), "best": repr(self.best_measure)}
        self._checkpoint.save(tensors, about)

    def _resume(self) -> None:
        """Restore the checkpoint, if there is one of the same training."""
        kept_state = self._checkpoint.read()
        if kept_state is None:
            return
        saved, about = kept_state
        self.done = int(about["done"])
        self.best_measure = float(about["best"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(saved[f"now.{name}"])
                self.best[name] = saved[f"best.{name}"].to(weight.device)
                kept = {key: saved.get(f"{key}.{name}") for key in AVERAGES}
                self.optimizer.state[weight] = {
                    key: part if key == "step" else part.to(weight.device)
                    for key, part in kept.items()
                    if part is not None
                }
