"""Training of the head that weighs the target against the draft (DIVERSED, Wang 2026)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lenience.core.errors import InputError
from lenience.core.files import digest
from lenience.core.progress import Progress, silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import task_for
from lenience.heads.head import Head, Inputs
from lenience.models.session import Session
from lenience.rules.combine import as_rule
from lenience.rules.mixtures import Diversed
from lenience.runs.answers import for_task
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import Sample, Task, take
from lenience.training.features import check_models
from lenience.training.fit import prompt_digests
from lenience.training.trainer import AVERAGES, Checkpoint

INPUTS = Inputs(("draft", "target"), ("previous",))
"""The states that predict a token, of both models."""
MOMENTUM = 0.9
"""Share of the earlier mean reward in the baseline that rewards are compared with."""


@dataclass(frozen=True)
class MixturePlan:
    """Settings of the training. The defaults are those of the authors' configuration, except for
    `acceptance`."""

    out: Path
    updates: int = 100
    batch_size: int = 8
    """Number of answers per update."""
    rate: float = 5e-4
    """Peak learning rate of AdamW, after a warm-up over a tenth of the updates; it then falls to 0
    as a cosine."""
    acceptance: float = 0.01
    """Weight of an answer's expected number of rejected tokens in the loss."""
    window: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Rollout:
    """An answer that the mixture decoded, position by position."""

    states: Tensor
    """[n, F]: inputs of the head."""
    target: Tensor
    """[n]: the target's probability of the answer's token."""
    draft: Tensor
    """[n]: the draft's probability of it."""
    distance: Tensor
    """[n]: total variation of the models' distributions."""
    reward: float


@dataclass
class _Weigher:
    """The head in training: a linear layer on standardised states."""

    mean: Tensor
    scale: Tensor
    layer: torch.nn.Linear = field(init=False)

    def __post_init__(self) -> None:
        self.layer = torch.nn.Linear(len(self.mean), 1)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def weights(self, states: Tensor) -> Tensor:
        """Return [n]: the target's weight at each position."""
        scaled = (states - self.mean) / self.scale
        return torch.sigmoid(self.layer(scaled)[:, 0])

    def folded(self) -> tuple[Tensor, float]:
        """Return the weight [F] and the bias for states that are not standardised."""
        weight = (self.layer.weight[0] / self.scale).detach()
        bias = self.layer.bias[0].detach() - (weight * self.mean).sum()
        return weight, float(bias)


def fit_mixture(
    pair: Pair, task: Task, run: Path, plan: MixturePlan, progress: Progress = silent
) -> Head:
    """Train the head by REINFORCE on the samples of a run, and save it in `plan.out`.

    Each update decodes answers with the head so far, greedily, and rewards right answers with 1.
    The loss is −(reward − baseline) · Σ log mixture(token) per answer, plus `plan.acceptance` times
    the sum of the probabilities that a drafted token is rejected, weight · TV(target, draft).
    An interrupted training resumes after its last update. Raises InputError if the run has other
    models, or its samples have no references.
    """
    pair.require_draft("fit --mixture")
    check_models(pair, run)
    task = task_for(pair, task, progress)
    samples = _samples(task, run)
    order = np.random.default_rng(plan.seed).permutation(len(samples)).tolist()
    head = _head(pair, run, plan)
    made_of = _identity(head, task, samples, plan)
    checkpoint = Checkpoint(plan.out / "training.safetensors", made_of)
    training = _Training.resumed(checkpoint, plan)
    with TemporaryDirectory() as folder:
        for update in range(training.done if training else 0, plan.updates):
            (training.head(head) if training else head).save(Path(folder))
            first = update * plan.batch_size
            chosen = islice(cycle(order), first, first + plan.batch_size)
            rollouts = _rollouts(
                pair, task, [samples[i] for i in chosen], Path(folder), plan.window
            )
            training = training or _Training(_standardising(rollouts), plan)
            training.update(rollouts)
            training.save(checkpoint)
            progress("training the mixture", update + 1, plan.updates)
    history = training.history if training else []
    head = training.head(head) if training else head
    head = replace(head, metrics={**head.metrics, "history": history})
    head.save(plan.out)
    checkpoint.forget()
    return head


def _identity(
    head: Head, task: Task, samples: Sequence[Sample], plan: MixturePlan
) -> str:
    """Return a digest of the models, data, scoring and settings of a training."""
    rows = [[sample.id, sample.prompt, sample.reference] for sample in samples]
    settings = [plan.updates, plan.batch_size, plan.rate, plan.acceptance, plan.window]
    scoring = [task.name, task.version, task.reads]
    ends = [task.max_new_tokens, list(task.stop_strings)]
    parts = [dict(head.fingerprints), rows, scoring, ends, settings, plan.seed]
    return digest(parts, sort_keys=True)


class _Training:
    """The optimizer of a head, and the baseline of its rewards."""

    def __init__(self, weigher: _Weigher, plan: MixturePlan):
        self.weigher = weigher
        self.plan = plan
        self.history: list[dict[str, float]] = []
        """Mean reward, and mean probability that a drafted token is rejected, of each update."""
        self._baseline: float | None = None
        self._optimizer = torch.optim.AdamW(weigher.layer.parameters(), lr=plan.rate)

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, plan: MixturePlan) -> _Training | None:
        """Return the training that a checkpoint holds; None if there is none."""
        found = checkpoint.read()
        if found is None:
            return None
        saved, about = found
        training = cls(_Weigher(saved["mean"], saved["scale"]), plan)
        training.history = json.loads(about["history"])
        training._baseline = json.loads(about["baseline"])
        for name, weight in training.weigher.layer.named_parameters():
            weight.data.copy_(saved[name])
            training._optimizer.state[weight] = {
                key: saved[f"{key}.{name}"] for key in AVERAGES
            }
        return training

    def save(self, checkpoint: Checkpoint) -> None:
        """Save the state after the last update."""
        tensors = {"mean": self.weigher.mean, "scale": self.weigher.scale}
        for name, weight in self.weigher.layer.named_parameters():
            tensors[name] = weight
            state = self._optimizer.state[weight]
            tensors |= {f"{key}.{name}": state[key] for key in AVERAGES}
        facts = {"history": self.history, "baseline": self._baseline}
        checkpoint.save(tensors, {key: json.dumps(facts[key]) for key in facts})

    @property
    def done(self) -> int:
        """Return the number of updates."""
        return len(self.history)

    def head(self, head: Head) -> Head:
        """Return the head with the weights so far."""
        weight, bias = self.weigher.folded()
        return replace(head, weight=weight, bias=bias)

    def update(self, rollouts: Sequence[Rollout]) -> None:
        """Make a step. The baseline is a running mean of the rewards before this step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate * _rate(self.done, self.plan.updates)
        reward = float(np.mean([rollout.reward for rollout in rollouts]))
        against = reward if self._baseline is None else self._baseline
        self._baseline = MOMENTUM * against + (1 - MOMENTUM) * reward
        loss, rejected = _loss(self.weigher, rollouts, against, self.plan.acceptance)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.history.append({"reward": reward, "rejected": rejected})


def _samples(task: Task, run: Path) -> list[Sample]:
    """Return the samples of a run that have a reference. Raises InputError if none has one."""
    mined = {sample.id for sample in mined_samples(Journal(run / "journal.jsonl"))}
    found = []
    for sample in take(task, "train", None):
        if sample.id in mined and sample.reference is not None:
            found.append(sample)
    if not found:
        raise InputError(
            f"{run}: none of its samples has a reference, and a mixture learns from which answers "
            "are right; mine a task with references"
        )
    return found


def _head(pair: Pair, run: Path, plan: MixturePlan) -> Head:
    """Return the untrained head, which gives both models the weight one half."""
    sizes = {role: lm.hidden_size for role, lm in pair.models.items()}
    about: dict[str, Any] = {
        "updates": plan.updates,
        "batch_size": plan.batch_size,
        "rate": plan.rate,
        "acceptance": plan.acceptance,
        "window": plan.window,
    }
    return Head(
        weight=torch.zeros(INPUTS.width(sizes)),
        bias=0.0,
        inputs=INPUTS,
        threshold=0.5,
        fingerprints=pair.fingerprints,
        metrics=about,
        role="mixture",
        prompts=tuple(dict.fromkeys(prompt_digests(run))),
    )


def _rollouts(
    pair: Pair, task: Task, samples: Sequence[Sample], head: Path, window: int
) -> list[Rollout]:
    """Decode answers to samples with the head in a folder, and read both models' states and
    distributions along them."""
    decoder = Decoder(rule=as_rule(Diversed(str(head))), window=window)
    decoder = for_task(decoder, {}, task)
    prompts = [sample.prompt for sample in samples]
    outs = pair.generate_batch(prompts, decoder, batch_size=len(prompts))
    return [_read(pair, task, out, sample) for out, sample in zip(outs, samples)]


@torch.no_grad()
def _read(pair: Pair, task: Task, out: Generation, sample: Sample) -> Rollout:
    n = len(out.tokens)
    states: dict[str, Tensor] = {}
    probs: dict[str, Tensor] = {}
    for role, lm in pair.models.items():
        reading = Session(lm).read([out.prompt_tokens + out.tokens], n + 1)
        states[role] = reading.hidden[0, :n].float().cpu()
        probs[role] = reading.logits[0, :n].float().softmax(-1).cpu()
    # a token that one of the models lacks has probability 0 there
    width = max(part.shape[-1] for part in probs.values())
    target, draft = (
        pad(probs[role], (0, width - probs[role].shape[-1]))
        for role in ("target", "draft")
    )
    tokens = torch.tensor(out.tokens)[:, None]
    return Rollout(
        torch.cat([states[role] for role in INPUTS.models], 1),
        target.gather(1, tokens)[:, 0],
        draft.gather(1, tokens)[:, 0],
        (target - draft).abs().sum(1) / 2,
        float(task.correct(out.text, sample)),
    )


def _standardising(rollouts: Sequence[Rollout]) -> _Weigher:
    states = torch.cat([rollout.states for rollout in rollouts])
    return _Weigher(states.mean(0), states.std(0) + 1e-6)


def _loss(
    weigher: _Weigher, rollouts: Sequence[Rollout], baseline: float, acceptance: float
) -> tuple[Tensor, float]:
    """Return the loss of an update, and the mean probability that a drafted token is rejected."""
    losses = []
    rejected = []
    for rollout in rollouts:
        weight = weigher.weights(rollout.states)
        mixed = weight * rollout.target + (1 - weight) * rollout.draft
        advantage = rollout.reward - baseline
        lost = weight * rollout.distance
        losses.append(
            acceptance * lost.sum() - advantage * mixed.clamp(min=1e-9).log().sum()
        )
        rejected.append(lost.detach())
    return torch.stack(losses).mean(), float(torch.cat(rejected).mean())


def _rate(done: int, updates: int) -> float:
    """Return the share of the peak learning rate of the update after `done` updates."""
    warm = max(1, updates // 10)
    if done < warm:
        return 0.1 + 0.9 * done / warm
    left = (done - warm) / max(1, updates - warm)
    return float(0.5 * (1 + np.cos(np.pi * left)))
