"""Alignment of a draft model with its target (DistillSpec, Zhou 2023)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lenience.core.errors import InputError
from lenience.core.files import write_json
from lenience.core.progress import Progress, silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.self_draft import take_apart
from lenience.models.lm import LM, save_model
from lenience.models.memory import free_bytes
from lenience.models.vocabulary import restrict, vocabulary_of
from lenience.rules.baselines import Baseline
from lenience.runs.uses import ALIGNED
from lenience.training.trainer import Answer, batches, by_length

Distill = Literal["forward-kl", "reverse-kl", "on-policy"]
"""Divergence to minimise: KL(target ‖ draft) or KL(draft ‖ target) along the target's own answers,
or KL(target ‖ draft) along answers that the draft samples anew in each epoch."""
ROWS = 32
"""Number of answers that are sampled at once."""
LEARNING_RATE = 3e-4
WIDTH = 320
"""Hidden size up to which a draft's first learning rate is LEARNING_RATE; for wider drafts it falls
in inverse proportion."""
KEPT_SHARE = 0.25
"""Share of the free memory that the target's logits may use."""
CHOICE_ANSWERS = 16
"""Number of answers used to choose the layers of a cut draft."""
WINDOW = 8
"""Draft window for which tokens per pass are measured."""


@dataclass(frozen=True)
class DistilledDraft:
    """A draft model after distillation."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprints: Mapping[str, str]
    """Fingerprints of the target and the tokenizer that the draft was aligned with."""
    metrics: Mapping[str, Any]
    prompts: tuple[str, ...] | None = None
    """Digests of the prompts in the training data."""
    others: Tensor | None = None
    """[V, H]: the target's LM head, which provides the rows missing from a draft vocabulary."""

    def save(self, folder: Path) -> None:
        """Save the model in the format of `transformers`, with the record of its training in
        distilled.json."""
        save_model(self.model, self.tokenizer, folder, self.others)
        about = {"fingerprints": self.fingerprints, "metrics": self.metrics}
        write_json(folder / ALIGNED, {**about, "prompts": self.prompts})


def cut_draft(target: LM, layers: Sequence[int], tokens: Tensor | None = None) -> LM:
    """Return a draft model made of some of the target's layers, counted from 0, with the target's
    embedding and LM head, sharing the weights. With a draft vocabulary `tokens` [N] the head has
    only its rows. Raises InputError for layers that the target lacks."""
    depth = target.num_layers
    wrong = [layer for layer in layers if not 0 <= layer < depth]
    if wrong or not layers or len(set(layers)) < len(layers) or len(layers) == depth:
        shown = ",".join(map(str, layers))
        raise InputError(
            f"--layers {shown}: the target has layers 0 to {depth - 1}; name some of them, each "
            "once"
        )
    kept = set(layers)
    draft = take_apart(target, [i + 1 for i in range(depth) if i not in kept])
    if tokens is not None:
        restrict(draft.model, tokens)
    return draft


def choose_layers(
    target: LM, answers: Sequence[Answer], count: int, progress: Progress = silent
) -> tuple[int, ...]:
    """Return the `count` layers, counted from 0, that make the best untrained draft: the smallest
    mean KL(target ‖ draft) on some answers. The candidates are the first layers, layers spread
    evenly, and the first layers with the last layer or with a last half."""
    depth = target.num_layers
    if not 1 <= count < depth:
        raise InputError(
            f"--layers {count}: the target has {depth} layers; name a number from 1 to {depth - 1}"
        )
    half = count // 2
    spread = [round(i * (depth - 1) / max(1, count - 1)) for i in range(count)]
    layouts: list[tuple[int, ...]] = [
        tuple(range(count)),
        tuple(spread),
        (*range(count - 1), depth - 1),
        (*range(count - half), *range(depth - half, depth)),
    ]
    layouts = list(dict.fromkeys(layouts))
    divergence: dict[tuple[int, ...], float] = {}
    for done, layout in enumerate(layouts):
        progress("choosing layers", done, len(layouts))
        draft = cut_draft(target, layout)
        with torch.no_grad():
            parts = []
            for answer in answers[:CHOICE_ANSWERS]:
                parts.append(_kl(*_read_along(target, draft, [answer])))
        divergence[layout] = float(torch.cat(parts).mean())
    progress("choosing layers", len(layouts), len(layouts))
    return min(divergence, key=lambda layout: divergence[layout])


class DistillFit:
    """Distillation of a float32 copy of the pair's draft. The target's logits along its own answers
    are computed once if they fit into memory, and otherwise in each epoch."""

    def __init__(
        self,
        pair: Pair,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        how: Distill,
        *,
        only_rejected: bool,
        seed: int,
    ):
        """Take `only_rejected`: True to learn only where the draft's most probable token is not the
        target's (Online Speculative Decoding, Liu 2023)."""
        draft = pair.require_draft("--drafter model")
        self.target = pair.target
        self.seed = seed
        self.how = how
        self.only_rejected = only_rejected
        self.answers = by_length(answers)
        self.held_out = by_length(held_out)
        self.dtype = draft.model.dtype
        model = copy.deepcopy(draft.model).float().requires_grad_(True)
        self.student = LM(model, draft.tokenizer, f"{draft.name} in training", "draft")
        self.pair = Pair(pair.target, self.student, pair.name)
        self.weights = dict(model.named_parameters())
        self.rate = LEARNING_RATE * min(1.0, WIDTH / draft.hidden_size)
        self.tokens = vocabulary_of(model)
        """Draft vocabulary [N]; None for the whole vocabulary."""
        self._kept: dict[int, Tensor] | None = {} if self._have_room() else None
        """Target's logits of the learned tokens in half precision, by batch."""
        self.before = self._measured()

    def epoch(self, number: int, step: Callable[[Tensor], None]) -> None:
        answers = self._sampled(number) if self.how == "on-policy" else self.answers
        for batch in batches(answers, self.seed + 1000 * number):
            target, draft = self._learned(batch)
            if self.only_rejected:
                rejected = target.argmax(-1) != draft.argmax(-1)
                target = target[rejected]
                draft = draft[rejected]
            if len(draft):
                reverse = self.how == "reverse-kl"
                step((_kl(draft, target) if reverse else _kl(target, draft)).mean())

    def measure(self) -> float:
        return self._measured()["tokens_per_pass"]

    def result(self) -> tuple[DistilledDraft, dict[str, object]]:
        """Return the trained draft in its original precision, and its metrics."""
        self.student.model.to(self.dtype)
        found = self._measured()
        made = DistilledDraft(
            self.student.model,
            self.student.tokenizer,
            {},
            {},
            others=self.target.output_matrix,
        )
        how = {"distill": self.how, "only_rejected": self.only_rejected}
        return made, {**how, **found, "before": self.before}

    def _sampled(self, epoch: int) -> list[Answer]:
        """Return new answers that the draft samples for the same prompts, none longer than the
        longest of the target's answers."""
        prompts = [prompt for prompt, _ in self.answers]
        outs = self.pair.generate_batch(
            prompts,
            Decoder(
                rule=Baseline("draft"),
                temperature=1.0,
                seed=self.seed + epoch,
                max_new_tokens=max(len(answer) for _, answer in self.answers),
            ),
            batch_size=ROWS,
        )
        return by_length([(prompt, out.tokens) for prompt, out in zip(prompts, outs)])

    def _have_room(self) -> bool:
        """Return True if memory has room for the target's logits along all answers."""
        if self.how == "on-policy":  # the draft's answers are new in each epoch
            return False
        width = self.target.vocab_size if self.tokens is None else len(self.tokens)
        positions = sum(len(answer) for _, answer in self.answers)
        free = free_bytes(torch.device("cpu"))
        return free is not None and 2 * width * positions <= KEPT_SHARE * free

    def _learned(self, batch: Sequence[Answer]) -> tuple[Tensor, Tensor]:
        """Return the logits [n, N] of the target and of the draft along some answers, for the N
        tokens that the draft can predict."""
        padded = _Batch.of(batch)
        width = min(self.target.vocab_size, self.student.vocab_size)
        learned = torch.arange(width) if self.tokens is None else self.tokens
        kept = None if self._kept is None else self._kept.get(id(batch[0]))
        if kept is None:
            with torch.no_grad():
                kept = _logits(self.target, padded)[:, learned].half().cpu()
            if self._kept is not None:
                self._kept[id(batch[0])] = kept
        draft = _logits(self.student, padded)[:, learned.to(self.student.device)]
        return kept.to(draft), draft

    @torch.no_grad()
    def _measured(self) -> dict[str, float]:
        """Return three metrics on the target's held-out answers: the share of tokens that
        speculative sampling accepts at temperature 1, the share that greedy decoding accepts, and
        the tokens per pass of greedy decoding with a window of WINDOW, averaged over all
        positions."""
        accepted = 0.0
        right = 0.0
        kept = 0.0
        places = 0
        for answer in self.held_out:
            target, draft = _read_along(self.target, self.student, [answer])
            both = torch.minimum(target.softmax(-1), draft.softmax(-1))
            same = target.argmax(-1) == draft.argmax(-1)
            accepted = accepted + float(both.sum())
            right = right + float(same.sum())
            runs = torch.nn.functional.pad(same, (0, WINDOW - 1)).unfold(0, WINDOW, 1)
            kept = kept + float(runs.cumprod(1).sum())
            places = places + len(same)
        return {
            "acceptance": accepted / places,
            "agreement": right / places,
            "tokens_per_pass": 1 + kept / places,
        }


def _read_along(
    target: LM, student: LM, batch: Sequence[Answer]
) -> tuple[Tensor, Tensor]:
    """Return the logits [n, V] of the target and of the draft at each position of some answers, for
    the tokens that both models have."""
    padded = _Batch.of(batch)
    width = min(target.vocab_size, student.vocab_size)
    with torch.no_grad():
        ours = _logits(target, padded)[:, :width]
    return ours.to(student.device), _logits(student, padded)[:, :width]


@dataclass(frozen=True)
class _Batch:
    """Prompts with their answers as a padded batch."""

    ids: Tensor
    """[B, T]: tokens of prompts and answers, padded at the end."""
    positions: Tensor
    """[B, T - 1] bool: positions whose next token belongs to an answer."""

    @classmethod
    def of(cls, batch: Sequence[Answer]) -> _Batch:
        sequences = [prompt + answer for prompt, answer in batch]
        longest = max(map(len, sequences))
        ids = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
        places = torch.arange(longest - 1)
        first = torch.tensor([len(prompt) - 1 for prompt, _ in batch])[:, None]
        last = torch.tensor([len(sequence) - 1 for sequence in sequences])[:, None]
        return cls(torch.tensor(ids), (places >= first) & (places < last))


def _logits(lm: LM, batch: _Batch) -> Tensor:
    """Return the logits [n, V] in float32 at the batch's marked positions. The padding comes last,
    so causal attention never sees it."""
    ids = batch.ids.to(lm.device)
    logits = lm.model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits[batch.positions.to(lm.device)].float()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) [n] of logits [n, V], over the tokens that both can predict."""
    p = p.log_softmax(-1)
    q = q.log_softmax(-1)
    both = (p > -torch.inf) & (q > -torch.inf)
    difference = p.masked_fill(~both, 0.0) - q.masked_fill(~both, 0.0)
    return (p.exp() * difference).sum(-1)
