"""Fine-tune a target together with blockwise heads (Stern 2018, section 6.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from lenience.drafting.heads import DraftHeads
from lenience.models.lm import LM, PassCache, cache_argument, save_model
from lenience.training.trainer import Answer, batches, by_length, mean_cross_entropy

BATCH = 8
FURTHER_WEIGHT = 0.8
"""Number of answers per batch, and factor of each further token's loss."""
LEARNING_RATE = 3e-4
WIDTH = 320
"""The first epoch's rate of a target of this width; a wider one has less in proportion."""
NOT_ASKED = -100
"""Stands for a token that is not learned: the prompt's, and what is past an answer's end."""


@dataclass(frozen=True)
class TunedTarget:
    """A target after it has learned, and its heads."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: DraftHeads
    fingerprints: Mapping[str, str]
    """Fingerprints of the original target and of the tokenizer."""
    metrics: Mapping[str, Any]
    prompts: tuple[str, ...] | None = None
    """The digests of those that it learned from."""

    def save(self, folder: Path) -> None:
        """Save the target in FOLDER/target, as `transformers` does, and then the heads, which are
        bound to it."""
        save_model(self.target, self.tokenizer, folder / "target")
        own = LM(self.target, self.tokenizer, "fine-tuned target").fingerprint
        known = {**self.fingerprints, "target": own}
        about = {**self.metrics, "tuned_from": self.fingerprints["target"]}
        heads = replace(
            self.heads, fingerprints=known, metrics=about, prompts=self.prompts
        )
        heads.save(folder)


class FineTuning:
    """A copy of a target that learns in float32 to answer as before, and with it heads that predict
    its further tokens."""

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
        for batch in batches(self.answers, BATCH, self.seed + 1000 * number):
            logits, wanted = self._read(batch)
            loss = torch.zeros((), device=wanted.device)
            for k in range(wanted.shape[-1]):
                cross = mean_cross_entropy(logits[:, k], wanted[:, k], NOT_ASKED)
                loss = loss + FURTHER_WEIGHT**k * cross
            step(loss)

    def measure(self) -> float:
        return self._measured()["tokens_per_pass"]

    def result(self) -> tuple[TunedTarget, dict[str, Any]]:
        """Return the tuned target and its heads, and their metrics."""
        half = self.heads.to(torch.device("cpu"), torch.float16)
        self.tuned.model.to(self.dtype)
        self.heads = half.to(self.tuned.device, torch.float32)
        made = TunedTarget(self.tuned.model, self.tuned.tokenizer, half, {}, {})
        return made, dict(self._measured())

    def _read(self, batch: Sequence[Answer]) -> tuple[Tensor, Tensor]:
        """Return logits [n, 1 + heads, V] of the target and its heads at each position of some
        answers, and the tokens to predict [n, 1 + heads]."""
        ids, wanted = _padded(batch, 1 + len(self.heads.blocks))
        asked = wanted[..., 0] != NOT_ASKED
        model = self.tuned.model
        device = self.tuned.device
        cache = PassCache(layer_class_to_replicate=DynamicLayer)
        # texts that stand before padding do not see it
        model(input_ids=ids.to(device), **cache_argument(model, cache))
        states = cache.take_hidden()[0][asked.to(device)].float()  # [n, H]
        head = cast(torch.nn.Module, model.get_output_embeddings())
        own = head(states.to(self.tuned.output_matrix.dtype)).float()
        drafted = self.heads.logits(states, self.tuned.output_matrix.float())
        return torch.cat([own[:, None], drafted], 1), wanted[asked].to(device)

    @torch.no_grad()
    def _measured(self) -> dict[str, Any]:
        """Return, on held-out answers of the target as it was, the share of tokens that it still
        predicts, each head's share, and the tokens per pass."""
        right = []
        for i in range(0, len(self.held_out), BATCH):
            logits, wanted = self._read(self.held_out[i : i + BATCH])
            right.append(logits.argmax(-1) == wanted)
        own = torch.cat(right)[:, 0].float()
        heads = torch.cat(right)[:, 1:].float()
        return {
            "tokens_per_pass": 1 + float(heads.cumprod(1).sum(1).mean()),
            "accuracy": heads.mean(0).tolist(),
            "agreement": float(own.mean()),
        }


def _padded(batch: Sequence[Answer], further: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, T] of prompts with their answers, and the `further` tokens of the
    answer [B, T, further] that follow each; NOT_ASKED in the prompt and past the answer's end."""
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
