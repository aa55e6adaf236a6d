"""Training of drafters on the target's own answers in a run.

Heads learn by self-distillation (Medusa, Cai 2024, section 2.3.2), draft models by DistillSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.core.files import digest
from lenience.core.progress import Progress, silent
from lenience.decoding.checks import share_vocabulary
from lenience.decoding.pair import Pair
from lenience.drafting.eagle_model import EagleWeights
from lenience.drafting.heads import DraftHeads
from lenience.heads.fitting import ROWS_PER_STEP
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.models.vocabulary import most_frequent, ranks
from lenience.runs.uses import prompt_digest
from lenience.training.distillation import (
    Distill,
    DistilledDraft,
    DistillFit,
    choose_layers,
    cut_draft,
)
from lenience.training.eagle import EagleFit
from lenience.training.features import check_models, mined_samples
from lenience.training.fine_tuning import FineTuning, TunedTarget
from lenience.training.trainer import Answer, Schedule, Training, mean_cross_entropy

DrafterKind = Literal["medusa", "blockwise", "eagle", "model"]
TrainedDrafter = DraftHeads | EagleWeights | DistilledDraft | TunedTarget
HELD_OUT = 0.1
"""Share of the samples that are held out for measurements."""
EPOCHS = {"medusa": 30, "blockwise": 30, "eagle": 10, "model": 5}
LEARNING_RATE = 1e-3
FURTHER_WEIGHT = 0.8
"""Factor of each further head's loss (Medusa, section 2.2.1)."""
NOT_THERE = -100
"""Label of a token beyond the end of an answer."""
LEAST = 10
"""Minimum number of answers."""


@dataclass(frozen=True)
class DrafterPlan:
    """Settings of the drafter to train."""

    kind: DrafterKind
    out: Path
    """Folder in which the drafter is saved."""
    heads: int = 4
    """Number of medusa or blockwise heads."""
    distill: Distill = "forward-kl"
    """Loss of the draft model."""
    only_rejected: bool = False
    """True if the draft model learns only from tokens that would be rejected."""
    layers: int | tuple[int, ...] | None = None
    """Layers of the target from which the draft model is cut, counted from 0, or their number; None
    for the pair's own draft model."""
    draft_vocab: int | None = None
    """Number of tokens that the drafter can predict, the most frequent in the answers; None for all
    tokens."""
    tune_target: bool = False
    """True to fine-tune a copy of the target together with its blockwise heads."""
    epochs: int | None = None
    """Number of epochs; None for the kind's default in EPOCHS."""
    seed: int = 0

    @property
    def num_epochs(self) -> int:
        return EPOCHS[self.kind] if self.epochs is None else self.epochs


def fit_drafter(
    pair: Pair, run: Path, plan: DrafterPlan, progress: Progress = silent
) -> TrainedDrafter:
    """Train a drafter on the target's own answers, and save the epoch that does best on held-out
    samples. An interrupted training resumes after its last epoch. Raises InputError if the run has
    other models or too few samples."""
    check_models(pair, run)
    answers = []
    for sample in mined_samples(run):
        answers.append((sample.prompt_ids, sample.response_ids))
    return fit_to_answers(pair, answers, plan, progress)


def fit_to_answers(
    pair: Pair,
    answers: Sequence[Answer],
    plan: DrafterPlan,
    progress: Progress = silent,
) -> TrainedDrafter:
    """Train a drafter as `fit_drafter` does, on any of the target's own answers."""
    _check(pair, answers, plan)
    num_held_out = max(1, round(HELD_OUT * len(answers)))
    held_out, learned = answers[:num_held_out], answers[num_held_out:]
    layers = _layers(pair.target, learned[:num_held_out], plan, progress)
    tokens = _vocabulary(pair.target, learned, plan)
    if layers:
        cut = cut_draft(pair.target, layers, tokens)
        pair = Pair(pair.target, cut, pair.name)
    parts = _Parts(learned, held_out, tokens)
    fit = _fit(pair, parts, plan, progress)
    schedule = Schedule(plan.num_epochs, fit.rate)
    training = Training(
        fit.weights,
        plan.out / "training.safetensors",
        _identity(pair, answers, plan),
        schedule,
    )
    what = f"training {plan.kind}"
    training.run(
        lambda number: fit.epoch(number, training.step), fit.measure, what, progress
    )
    fitted, metrics = fit.result()
    about = {"samples": len(answers), "held_out": num_held_out, **metrics}
    if layers:
        about["layers"] = list(layers)
    if tokens is not None:
        about["draft_vocab"] = len(tokens)
    fitted_to = {name: pair.fingerprints[name] for name in ("target", "tokenizer")}
    prompts = tuple(dict.fromkeys(prompt_digest(prompt) for prompt, _ in answers))
    fitted = replace(fitted, fingerprints=fitted_to, metrics=about, prompts=prompts)
    fitted.save(plan.out)
    training.forget()
    return fitted


def _identity(pair: Pair, answers: Sequence[Answer], plan: DrafterPlan) -> str:
    """Return a digest of the models, data and settings of a training."""
    settings = [
        plan.kind,
        plan.heads,
        plan.num_epochs,
        plan.seed,
        plan.distill,
        plan.only_rejected,
    ]
    if plan.tune_target:
        settings.append(plan.tune_target)
    if plan.draft_vocab:
        settings.append(plan.draft_vocab)
    learner = pair.fingerprints.get("draft") if plan.kind == "model" else None
    return digest([list(answers), settings, pair.target.fingerprint, learner])


def _layers(
    target: LM, answers: Sequence[Answer], plan: DrafterPlan, progress: Progress
) -> tuple[int, ...]:
    """Return the layers from which a draft model is cut; empty for any other drafter."""
    if isinstance(plan.layers, int):
        return choose_layers(target, answers, plan.layers, progress)
    return plan.layers or ()


def _vocabulary(
    target: LM, answers: Sequence[Answer], plan: DrafterPlan
) -> Tensor | None:
    """Return a plan's draft vocabulary [N]; None for the whole vocabulary."""
    if plan.draft_vocab is None:
        return None
    size = len(target.output_matrix)
    written = [answer for _, answer in answers]
    return most_frequent(written, plan.draft_vocab, size, sorted(target.eos_ids))


@dataclass(frozen=True)
class _Parts:
    """Data of a training."""

    answers: Sequence[Answer]
    held_out: Sequence[Answer]
    tokens: Tensor | None
    """[N]: a draft vocabulary; None for the whole vocabulary."""


def _fit(
    pair: Pair, parts: _Parts, plan: DrafterPlan, progress: Progress
) -> _HeadsFit | EagleFit | DistillFit | FineTuning:
    """Return the training of a plan's drafter."""
    target = pair.target
    answers = parts.answers
    held_out = parts.held_out
    if plan.tune_target:
        heads = first_heads(target, plan)
        return FineTuning(target, heads, answers, held_out, plan.seed)
    if plan.kind == "eagle":
        return EagleFit(target, answers, held_out, plan.seed, parts.tokens)
    if plan.kind == "model":
        only_rejected = plan.only_rejected
        return DistillFit(
            pair,
            answers,
            held_out,
            plan.distill,
            only_rejected=only_rejected,
            seed=plan.seed,
        )
    return _HeadsFit(target, parts, plan, progress)


def _check(pair: Pair, answers: Sequence[Answer], plan: DrafterPlan) -> None:
    if plan.kind != "model":
        pair.target.check_states()
    elif not plan.layers and not share_vocabulary(pair.models):
        raise InputError(
            "--drafter model: the draft has another tokenizer than the target, and learns the "
            "target's tokens; take --layers, which cuts a draft out of the target"
        )
    if len(answers) < LEAST:
        raise InputError(
            f"--drafter {plan.kind}: {len(answers)} answers are too few, {LEAST} are "
            "needed; mine more"
        )


Part = tuple[Tensor, Tensor]
"""States [n, H] of a sample, and the tokens [n, heads] that the heads should predict at each."""


def _states(target: LM, prompt: list[int], answer: list[int], heads: int) -> Part:
    """Return the target's states along its own answer, from the prompt's last token on, and the
    tokens that the heads should predict."""
    session = Session(target, 1, len(prompt) + len(answer))
    reading = session.read([prompt + answer], len(answer) + 1)
    further = [*answer[1:], *[NOT_THERE] * (heads + 1)]
    wanted = [further[i : i + heads] for i in range(len(answer))]
    return reading.hidden[0, :-1].float().cpu(), torch.tensor(wanted).view(-1, heads)


def first_heads(
    target: LM, plan: DrafterPlan, tokens: Tensor | None = None
) -> DraftHeads:
    """Return initial heads, which predict as the target does because their blocks add nothing. With
    a draft vocabulary `tokens` [N] their matrices have only its rows."""
    matrix = target.output_matrix.detach().float().cpu()
    if tokens is not None:
        matrix = matrix[tokens]
    size = matrix.shape[1]
    generator = torch.Generator().manual_seed(plan.seed)
    if plan.kind == "medusa":
        blocks = []
        for _ in range(plan.heads):
            blocks.append(
                [{"weight": torch.zeros(size, size), "bias": torch.zeros(size)}]
            )
        matrices = [matrix.clone() for _ in range(plan.heads)]
        return DraftHeads("medusa", blocks, matrices, {}, {}, tokens=tokens)
    blocks = []
    for _ in range(plan.heads):
        blocks.append(
            [
                {
                    "into": torch.randn(size, size, generator=generator) * size**-0.5,
                    "into_bias": torch.zeros(size),
                    "out": torch.zeros(size, size),
                    "out_bias": torch.zeros(size),
                }
            ]
        )
    return DraftHeads("blockwise", blocks, None, {}, {})


class _HeadsFit:
    """Training of heads on the target's states, which are computed once."""

    rate = LEARNING_RATE

    def __init__(
        self,
        target: LM,
        parts: _Parts,
        plan: DrafterPlan,
        progress: Progress,
    ):
        self.plan = plan
        self.matrix = target.output_matrix.detach().float().cpu()
        self.heads = first_heads(target, plan, parts.tokens)
        self.weights = {
            name: part
            for name, part in self.heads.tensors().items()
            if part.is_floating_point()
        }
        read = []
        whole = [*parts.held_out, *parts.answers]
        for n, (prompt, answer) in enumerate(whole, 1):
            read.append(_states(target, prompt, answer, plan.heads))
            progress("hidden states", n, len(whole))
        self.held_out = read[: len(parts.held_out)]
        self.x, self.y = map(torch.cat, zip(*read[len(parts.held_out) :]))
        if parts.tokens is not None:  # mark tokens outside as not learned
            rows = ranks(parts.tokens, len(self.matrix), NOT_THERE)
            past_end = self.y == NOT_THERE
            self.y = rows[self.y.clamp(min=0)].masked_fill(past_end, NOT_THERE)

    def epoch(self, number: int, step: Callable[[Tensor], None]) -> None:
        generator = torch.Generator().manual_seed(self.plan.seed + 1000 * number)
        for rows in torch.randperm(len(self.x), generator=generator).split(
            ROWS_PER_STEP
        ):
            logits = self.heads.row_logits(self.x[rows], self.matrix)  # [m, n, N]
            loss = torch.zeros(())
            for i in range(self.plan.heads):
                cross = mean_cross_entropy(logits[:, i], self.y[rows, i], NOT_THERE)
                loss = loss + FURTHER_WEIGHT**i * cross
            step(loss)

    def measure(self) -> float:
        return tokens_per_pass(self.heads, self.matrix, self.held_out)

    def result(self) -> tuple[DraftHeads, dict[str, object]]:
        """Return the trained heads and their metrics."""
        cpu = torch.device("cpu")
        half = self.heads.to(cpu, torch.float16)
        as_read = half.to(cpu, torch.float32)
        return half, {
            "tokens_per_pass": tokens_per_pass(as_read, self.matrix, self.held_out),
            "accuracy": accuracies(as_read, self.matrix, self.held_out),
        }


@torch.no_grad()
def _right(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return [N, n] bool: True where a head's most probable token is the target's."""
    x = torch.cat([part[0] for part in parts])
    y = torch.cat([part[1] for part in parts])
    found = [heads.logits(some, matrix).argmax(-1) for some in x.split(4096)]
    return torch.cat(found) == y


def tokens_per_pass(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> float:
    """Return the tokens per pass under the strict rule, the target's own token included, averaged
    over all positions."""
    return 1 + float(_right(heads, matrix, parts).cumprod(1).sum(1).float().mean())


def accuracies(heads: DraftHeads, matrix: Tensor, parts: Sequence[Part]) -> list[float]:
    """Return each head's share of tokens that equal the target's."""
    return list(map(float, _right(heads, matrix, parts).float().mean(0)))
