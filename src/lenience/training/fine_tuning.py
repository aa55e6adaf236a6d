"""Fine-tuning of a target together with blockwise heads (Stern 2018, section 6.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lenience.drafting.heads import DraftHeads
from lenience.models.lm import LM, save_model
from lenience.models.pass_cache import cache_argument, new_cache
from lenience.training.trainer import (
    ANSWERS_PER_STEP,
    Answer,
    batches,
    by_length,
    mean_cross_entropy,
)

FURTHER_WEIGHT = 0.8
"""Factor of each further token's loss."""
LEARNING_RATE = 3e-4
WIDTH = 320
"""Hidden size up to which a target's first learning rate is LEARNING_RATE; for wider targets it
falls in inverse proportion."""
NOT_ASKED = -100
"""Label of a position without a loss: in the prompt, or beyond the end of the answer."""


@dataclass(frozen=True)
class TunedTarget:
    """A fine-tuned target with its heads."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: DraftHeads
    fingerprints: Mapping[str, str]
    """Fingerprints of the original target and of the tokenizer."""
    metrics: Mapping[str, Any]
    prompts: tuple[str, ...] | None = None
    """Digests of the prompts in the training data."""

    def save(self, folder: Path) -> None:
        """Save the target in FOLDER/target, in the format of `transformers`, and then the heads,
        which are bound to it."""
        save_model(self.target, self.tokenizer, folder / "target")
        own = LM(self.target, self.tokenizer, "fine-tuned target").fingerprint
        known = {**self.fingerprints, "target": own}
        about = {**self.metrics, "tuned_from": self.fingerprints["target"]}
        heads = replace(
            self.heads, fingerprints=known, metrics=about, prompts=self.prompts
        )
        heads.save(folder)


class FineTuning:
    """Training of a float32 copy of a target, which learns to answer as before, together with heads
    that predict its further tokens."""

    def __init__(
        self,
        target: LM,
        heads: DraftHeads,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        seed: int,
    ):
        self.answers, self.held_out = map(by_length, (answers, held_out))
        self.dtype = target.model.dtype
        self.seed = seed
        model = copy.deepcopy(target.model).float().requires_grad_(True)
        self.tuned = LM(model, target.tokenizer, f"{target.name} in training")
        self.heads = heads.to(self.tuned.device, torch.float32)
        named = {f"target.{name}": weight for name, weight in model.named_parameters()}
        self.weights = {**named, **self.heads.tensors()}
        self.rate = LEARNING_RATE * min(1.0, WIDTH / target.hidden_size)

    def epoch(self, number: int, step: Callable[[Tensor], None]) -> None:
        for batch in batches(self.answers, self.seed + 1000 * number):
            logits, wanted = self._read(batch)
            loss = torch.zeros((), device=wanted.device)
            for k in range(wanted.shape[-1]):
                cross = mean_cross_entropy(logits[:, k], wanted[:, k], NOT_ASKED)
                loss = loss + FURTHER_WEIGHT**k * cross
            step(loss)

    def measure(self) -> float:
        return self._measured()["tokens_per_pass"]

    def result(self) -> tuple[TunedTarget, dict[str, Any]]:
        """Return the tuned target with its heads, and their metrics."""
        half = self.heads.to(torch.device("cpu"), torch.float16)
        self.tuned.model.to(self.dtype)
        self.heads = half.to(self.tuned.device, torch.float32)
        made = TunedTarget(self.tuned.model, self.tuned.tokenizer, half, {}, {})
        return made, dict(self._measured())

    def _read(self, batch: Sequence[Answer]) -> tuple[Tensor, Tensor]:
        """Return the logits [n, 1 + heads, V] of the target and its heads at each position of some
        answers, and the tokens to predict [n, 1 + heads]."""
        ids, wanted = _padded(batch, 1 + len(self.heads.blocks))
        asked = wanted[..., 0] != NOT_ASKED
        model = self.tuned.model
        device = self.tuned.device
        cache = new_cache(model)
        # padding comes last, so causal attention never sees it
        model(input_ids=ids.to(device), **cache_argument(model, cache))
        states = cache.take_hidden()[0][asked.to(device)].float()  # [n, H]
        head = cast(torch.nn.Module, model.get_output_embeddings())
        own = head(states.to(self.tuned.output_matrix.dtype)).float()
        drafted = self.heads.logits(states, self.tuned.output_matrix.float())
        return torch.cat([own[:, None], drafted], 1), wanted[asked].to(device)

    @torch.no_grad()
    def _measured(self) -> dict[str, Any]:
        """Return metrics on held-out answers of the original target: the share of tokens that the
        tuned target still predicts, the accuracy of each head, and the tokens per pass."""
        right = []
        for i in range(0, len(self.held_out), ANSWERS_PER_STEP):
            logits, wanted = self._read(self.held_out[i : i + ANSWERS_PER_STEP])
            right.append(logits.argmax(-1) == wanted)
        own = torch.cat(right)[:, 0].float()
        heads = torch.cat(right)[:, 1:].float()
        return {
            "tokens_per_pass": 1 + float(heads.cumprod(1).sum(1).mean()),
            "accuracy": heads.mean(0).tolist(),
            "agreement": float(own.mean()),
        }


def _padded(batch: Sequence[Answer], further: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, T] of prompts with their answers, and the `further` answer tokens that
    follow each token [B, T, further]. NOT_ASKED marks positions in the prompt and beyond the
    answer's end."""
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.full((len(batch), longest, further), NOT_ASKED)
    for b, (prompt, answer) in enumerate(batch):
        whole = torch.tensor(prompt + answer)
        first = len(prompt) - 1
        ids[b, : len(whole)] = whole
        for k in range(min(further, len(answer))):
            wanted[b, first : len(whole) - 1 - k, k] = whole[first + 1 + k :]
    return ids, wanted
