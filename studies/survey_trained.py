"""Drafters of the survey (Xia 2024) that need training or a search, and that lenience does not
have, each tried in a few lines on any run's pair.

    python studies/survey_trained.py OUT [--only sublayers kangaroo look_ahead online boost]
    [--run RUN] [--samples 600] [--held-out 100] [--epochs 4]

All counts come from forward passes over the target's greedy answers of the run. Where a draft
predicts the next token of such an answer, strict decoding accepts it, and the draft's next context
is again a prefix of the answer. So the accepted tokens of each window follow exactly. Writes
OUT/survey_trained.json and prints it:

- `check`: tokens per pass of the pair's draft model by this count, and by `Pair.generate`;
- `sublayers`: the target without some attention and MLP modules (Draft & Verify, Zhang 2023; SWIFT,
  Xia 2025) against the target without whole layers. Both are found by the same greedy search on
  training answers. `times` is the speed-up over the target alone at the best window, if a draft
  pass costs its share of the parameters of all modules;
- `kangaroo`: the target's first layers, frozen, and a trained layer after them (Kangaroo, Liu
  2024). It stops drafting after a token with less than 0.6 of the probability. Next to it, a cut
  draft with the same layers, all trained, and the first layers alone (`exit:N`). `times` counts
  passes of layers. Drafting k tokens and verifying them takes k (first + 1) + depth passes for the
  first two: verification reuses the first layers' states, but drafting does not compute those of
  the last drafted token. The stop is read along the answer, also after a rejected token;
- `look_ahead`: trained embeddings after the text, at which the target predicts later tokens in the
  same pass (PaSS, Monea 2023). `paper` needs a pass to draft and a pass to verify. `one_pass` has
  look-ahead tokens after the last and each drafted token, so that each pass verifies and drafts: it
  runs over 25 tokens for four drafted ones;
- `online`: a draft that learns during decoding (Online Speculative Decoding, Liu 2023). After every
  eight answers it takes a step on the tokens that were rejected. Measured on the last third of the
  training answers, before it learns from them;
- `boost`: a second draft, trained where the first one does not predict the whole window
  (SpecInfer, Miao 2024, adaptive boost-tuning). Both windows are verified together. Next to it are
  a second draft trained everywhere, and a second branch from the first draft's second choice.

Trained weights take --epochs epochs in batches of eight answers by AdamW, with a rate that falls to
0; `steps` is the number of steps, and `by_epoch` the agreement on held-out answers after each
epoch. All training answers' logits stay in memory. Intervals are 95 % over resampled answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined import add_run, mined
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn

from lenience.decoding.checks import draft_of
from lenience.decoding.pair import Pair
from lenience.drafting.self_draft import take_apart
from lenience.models.lm import LM
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

WINDOW = 4
BATCH = 8
RATES = {"layers": 1e-3, "draft": 3e-4, "look-ahead": 2e-2}
"""First learning rates: of layers of the target, of the pair's draft, and of look-ahead tokens. Not
tuned."""
LOOK_AHEAD = WINDOW
"""Number of look-ahead tokens."""
PLACES = 32
"""Number of random positions per training answer with look-ahead tokens."""
CONFIDENT = 0.6
"""Probability below which Kangaroo stops drafting."""
EVERY = 8
"""Number of answers between two steps of online distillation."""
SEARCHED = 20
"""Number of answers on which modules to skip are searched."""
OWN = 0.99
"""Share of the answers' tokens that the target must predict itself."""
RESAMPLES = 2000

Answer = tuple[list[int], list[int]]
"""A prompt and the target's own answer."""


@dataclass(frozen=True)
class Data:
    """Training and held-out answers of a pair."""

    pair: Pair
    training: Sequence[Answer]
    held_out: Sequence[Answer]
    epochs: int

    @property
    def target(self) -> LM:
        return self.pair.target

    @property
    def draft(self) -> LM:
        return draft_of(self.pair.models, "this study")

    @cached_property
    def target_logits(self) -> list[Tensor]:
        """Return the target's logits [T, V] along the training answers, in half precision."""
        found: list[Tensor] = []
        for batch in batches(self.training):
            found += [logits.half() for logits in predictions(self.target.model, batch)]
        return found


# ---- counting


@dataclass(frozen=True)
class Count:
    """Tokens, passes of the target and drafted tokens of each answer, [n, 3]."""

    each: NDArray[np.float64]

    @property
    def tokens_per_pass(self) -> float:
        tokens, passes, _ = self.each.sum(0)
        return float(tokens / passes)

    @property
    def drafted_per_pass(self) -> float:
        _, passes, drafted = self.each.sum(0)
        return float(drafted / passes)

    def to_json(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        drawn = rng.integers(len(self.each), size=(RESAMPLES, len(self.each)))
        sums = self.each[drawn].sum(1)
        interval = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
        return {
            "tokens_per_pass": self.tokens_per_pass,
            "interval": interval.tolist(),
            "drafted_per_pass": self.drafted_per_pass,
        }


def walk(runs: NDArray[np.int64], drafted: NDArray[np.int64] | int = WINDOW) -> Count:
    """Count one answer. `runs` [T] is the number of tokens that would be accepted of a window that
    begins at each position; `drafted` is the number of drafted tokens, of all windows or [T]."""
    lengths = np.broadcast_to(drafted, runs.shape)
    at = passes = total = 0
    while at < len(runs):
        passes += 1
        total += int(lengths[at])
        at += int(runs[at]) + 1
    return Count(np.array([[len(runs), passes, total]], float))


def joined(counts: Iterable[Count]) -> Count:
    return Count(np.concatenate([count.each for count in counts]))


def leading(same: NDArray[np.bool_], longest: int = WINDOW) -> NDArray[np.int64]:
    """Return the number [T] of True in a row from each position, at most `longest`."""
    padded = np.concatenate([same, np.zeros(longest, bool)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(same)]
    return windows.cumprod(1).sum(1)


def logits_of(model: nn.Module, answers: Sequence[Answer]) -> list[Tensor]:
    """Return a model's logits [T, V] at each token of each answer."""
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    ids = torch.zeros(len(answers), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(answers):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    logits = model(input_ids=ids, use_cache=False).logits
    found = []
    for row, (prompt, answer) in enumerate(answers):
        found.append(logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1])
    return found


def batches(answers: Sequence[Answer]) -> list[Sequence[Answer]]:
    return [answers[i : i + BATCH] for i in range(0, len(answers), BATCH)]


@torch.no_grad()
def predictions(model: nn.Module, answers: Sequence[Answer]) -> list[Tensor]:
    """Return a model's logits [T, V] along all answers."""
    return [logits for batch in batches(answers) for logits in logits_of(model, batch)]


def agreeing(logits: Tensor, answer: Answer) -> NDArray[np.bool_]:
    """Return True [T] where the most probable token is the answer's."""
    return (logits.argmax(-1) == torch.tensor(answer[1])).numpy()


def runs_of(
    model: nn.Module, answers: Sequence[Answer], window: int = WINDOW
) -> list[NDArray[np.int64]]:
    """Return the number [T] of tokens that would be accepted of a model's window that begins at
    each position of each answer."""
    return [
        leading(agreeing(logits, answer), window)
        for logits, answer in zip(predictions(model, answers), answers)
    ]


def counted(model: nn.Module, answers: Sequence[Answer], window: int = WINDOW) -> Count:
    """Count strict decoding with a model as the draft."""
    return joined(walk(runs, window) for runs in runs_of(model, answers, window))


def check(data: Data) -> dict[str, float]:
    """Compare the count with the engine."""
    prompts = [prompt for prompt, _ in data.held_out]
    longest = max(len(answer) for _, answer in data.held_out)
    outs = data.pair.generate_batch(
        prompts, rule="exact", window=WINDOW, max_new_tokens=longest
    )
    passes = sum(out.target_passes for out in outs)
    tokens = sum(len(out.tokens) for out in outs)
    count = counted(data.draft.model, data.held_out)
    return {"counted": count.tokens_per_pass, "engine": tokens / passes}


# ---- training


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(target ‖ draft) [n] of logits [n, V]."""
    p = target.log_softmax(-1)
    return (p.exp() * (p - draft.log_softmax(-1))).sum(-1)


@dataclass(frozen=True)
class Trained:
    """Number of steps of a training, and the agreement on held-out answers after each epoch."""

    steps: int
    by_epoch: list[float]

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "by_epoch": self.by_epoch}


def train(
    data: Data,
    model: nn.Module,
    weights: Sequence[nn.Parameter],
    rate: float,
    chosen: Sequence[Tensor] | None = None,
) -> Trained:
    """Train some weights to predict as the target does along its answers. `chosen` has the
    positions to learn of each answer, [T] bool; by default all."""
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    optimiser, schedule = _optimiser(data, weights, rate)
    by_epoch = []
    steps = 0
    for epoch in range(data.epochs):
        for picked in track(_shuffled(data, epoch), f"epoch {epoch + 1}"):
            logits = logits_of(model, [data.training[i] for i in picked])
            losses = []
            for i, ours in zip(picked, logits):
                kept = chosen[i] if chosen else slice(None)
                target = data.target_logits[i][kept].float()
                losses.append(divergence(target, ours[kept]))
            loss = torch.cat(losses)
            if len(loss):
                loss.mean().backward()
                optimiser.step()
                optimiser.zero_grad()
                steps += 1
            schedule.step()
        by_epoch.append(agreement(model, data.held_out))
    return Trained(steps, by_epoch)


def _shuffled(data: Data, epoch: int) -> list[NDArray[np.int64]]:
    """Return the numbers of the training answers in each batch of an epoch."""
    order = np.random.default_rng(epoch).permutation(len(data.training))
    return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]


def _optimiser(
    data: Data, weights: Sequence[nn.Parameter], rate: float
) -> tuple[Any, Any]:
    """Return an optimiser, and a schedule that warms up for a tenth of the steps and falls to 0."""
    optimiser = torch.optim.AdamW(weights, rate, weight_decay=0.0)
    steps = data.epochs * -(-len(data.training) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rate, total_steps=steps + 1, pct_start=0.1
    )
    return optimiser, schedule


# ---- attention and MLP modules apart


class Silent(nn.Module):
    """A module that adds nothing to its layer's residual stream."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.attention else zeros


SubLayer = tuple[int, str]
"""A layer and the name of one of its modules."""


def kept_modules(target: LM, left_out: Sequence[SubLayer]) -> nn.Module:
    """Return the target without some modules, on the same weights."""
    whole = target.model
    memo = {id(each): each for each in (*whole.parameters(), *whole.buffers())}
    model: nn.Module = copy.deepcopy(whole, memo)
    layers = target.blocks(model)
    for layer, name in left_out:
        setattr(layers[layer], name, Silent(name == "self_attn"))
    return model


def searched(data: Data, groups: Sequence[tuple[SubLayer, ...]]) -> dict[str, Any]:
    """Leave out one group of modules after another, each time the one that costs least agreement.
    Return the best set by its speed-up on the searched answers, measured on held-out ones, and the
    sets of all sizes."""
    sizes = _sizes(data.target, groups)
    tried = data.training[:SEARCHED]
    left_out: list[tuple[SubLayer, ...]] = []
    rows: list[dict[str, Any]] = []
    while len(left_out) < len(groups) - 1:
        agreements = {}
        for group in track([g for g in groups if g not in left_out], "modules"):
            flat = [module for chosen in (*left_out, group) for module in chosen]
            agreements[group] = agreement(kept_modules(data.target, flat), tried)
        left_out.append(max(agreements, key=lambda group: agreements[group]))
        flat = sorted(module for chosen in left_out for module in chosen)
        cost = 1 - sum(sizes[module] for module in flat) / sum(sizes.values())
        times, window = _best_window(kept_modules(data.target, flat), cost, tried)
        rows.append({"left_out": flat, "cost": cost, "window": window, "times": times})
    best = max(rows, key=lambda row: row["times"])
    model = kept_modules(data.target, best["left_out"])
    measured = {
        "agreement": agreement(model, data.held_out),
        **_times(model, best["cost"], best["window"], data.held_out),
    }
    return {"best": best, "held_out": measured, "searched": rows}


def _sizes(target: LM, groups: Sequence[tuple[SubLayer, ...]]) -> dict[SubLayer, int]:
    """Return the number of parameters of each module."""
    layers = target.blocks(target.model)
    sizes = {}
    for group in groups:
        for layer, name in group:
            module = getattr(layers[layer], name)
            sizes[layer, name] = sum(weight.numel() for weight in module.parameters())
    return sizes


def _best_window(
    model: nn.Module, cost: float, answers: Sequence[Answer]
) -> tuple[float, int]:
    """Return the largest speed-up and its window."""
    found = [
        (_times(model, cost, window, answers)["times"], window)
        for window in range(1, 2 * WINDOW + 1)
    ]
    return max(found)


def _times(
    model: nn.Module, cost: float, window: int, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Return the speed-up over the target alone with a draft whose pass costs `cost` target passes,
    with its interval."""
    count = counted(model, answers, window)
    scale = cost * window + 1
    low, high = count.to_json()["interval"]
    return {
        "times": count.tokens_per_pass / scale,
        "interval": [low / scale, high / scale],
    }


def agreement(model: nn.Module, answers: Sequence[Answer]) -> float:
    """Return the share of the answers' tokens that a model predicts."""
    same = [
        agreeing(logits, answer)
        for logits, answer in zip(predictions(model, answers), answers)
    ]
    return float(np.concatenate(same).mean())


def sublayers(data: Data) -> dict[str, Any]:
    """Search modules and whole layers to skip."""
    layers = range(data.target.num_layers)
    both = ("self_attn", "mlp")
    return {
        "modules": searched(data, [((i, name),) for i in layers for name in both]),
        "layers": searched(data, [tuple((i, name) for name in both) for i in layers]),
    }


# ---- Kangaroo


def kangaroo(data: Data) -> list[dict[str, Any]]:
    """Train an adapter after the first layers, and cut drafts with the same layers."""
    depth = data.target.num_layers
    rows = []
    for first in (1, 2):
        # counted from 1: the first layers and the last one stay
        dropped = range(first + 1, depth)
        for name in ("kangaroo", "cut"):
            lm = take_apart(data.target, dropped)
            model = copy.deepcopy(lm.model).float()
            adapter = lm.blocks(model)[-1]
            part = adapter if name == "kangaroo" else model
            trained = train(data, model, list(part.parameters()), RATES["layers"])
            row = _early(data, model, first + 1)
            rows.append({"name": name, "first": first, **row, **trained.to_json()})
        alone = take_apart(data.target, range(first + 1, depth + 1)).model
        rows.append({"name": "exit", "first": first, **_early(data, alone, first)})
    return rows


def _early(data: Data, model: nn.Module, layers: int) -> dict[str, Any]:
    """Count a draft of some layers with its stop."""
    counts = []
    for logits, answer in zip(predictions(model, data.held_out), data.held_out):
        sure = (logits.softmax(-1).amax(-1) >= CONFIDENT).numpy()
        # a window ends after its first unsure token
        drafted = np.minimum(leading(sure) + 1, WINDOW)
        runs = np.minimum(leading(agreeing(logits, answer)), drafted)
        counts.append(walk(runs, drafted))
    count = joined(counts)
    depth = data.target.num_layers
    cost = (count.drafted_per_pass * layers + depth) / depth
    return {
        "agreement": agreement(model, data.held_out),
        "times": count.tokens_per_pass / cost,
        **count.to_json(),
    }


# ---- look-ahead tokens


@dataclass(frozen=True)
class Ahead:
    """A text with look-ahead tokens after some of its positions, as one input of the target."""

    ids: Tensor
    """[1, n]: the text."""
    places: Tensor
    """[m]: positions that are followed by look-ahead tokens."""

    def logits(self, lm: LM, embeddings: Tensor) -> Tensor:
        """Return logits [m, LOOK_AHEAD, V] at the look-ahead tokens."""
        n = self.ids.shape[1]
        m = len(self.places)
        text = lm.model.get_input_embeddings()(self.ids)
        inputs = torch.cat([text, embeddings.repeat(m, 1)[None]], 1)
        steps = torch.arange(1, LOOK_AHEAD + 1)
        later = (self.places[:, None] + steps).flatten()
        positions = torch.cat([torch.arange(n), later])[None]
        out = lm.model(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask=self.mask(),
            use_cache=False,
        )
        return out.logits[0, n:].view(m, LOOK_AHEAD, -1)

    def mask(self) -> Tensor:
        """Return what is added to attention, [1, 1, n + m L, n + m L]: 0 from text to earlier text,
        and from a look-ahead token to the text up to its place and to earlier tokens of its group;
        −inf elsewhere."""
        n = self.ids.shape[1]
        m = len(self.places)
        size = n + m * LOOK_AHEAD
        seen = torch.zeros(size, size, dtype=torch.bool)
        seen[:n, :n] = torch.ones(n, n, dtype=torch.bool).tril()
        upto = torch.arange(n)[None] <= self.places[:, None]
        seen[n:, :n] = upto.repeat_interleave(LOOK_AHEAD, 0)
        group = torch.ones(LOOK_AHEAD, LOOK_AHEAD, dtype=torch.bool).tril()
        seen[n:, n:] = torch.block_diag(*[group] * m).bool()
        return torch.zeros(size, size).masked_fill(~seen, -torch.inf)[None, None]


def look_ahead(data: Data) -> dict[str, Any]:
    """Train look-ahead embeddings, the target frozen, and count both ways of decoding."""
    lm = data.target
    for weight in lm.model.parameters():
        weight.requires_grad_(False)
    mean = lm.model.get_input_embeddings().weight.mean(0)
    embeddings = nn.Parameter(mean.repeat(LOOK_AHEAD, 1).clone())
    optimiser, schedule = _optimiser(data, [embeddings], RATES["look-ahead"])
    rng = np.random.default_rng(0)
    losses = []
    for epoch in range(data.epochs):
        total = 0.0
        for picked in track(_shuffled(data, epoch), f"look-ahead, epoch {epoch + 1}"):
            for i in picked:
                loss = _ahead_loss(lm, embeddings, data.training[i], rng)
                (loss / len(picked)).backward()
                total += float(loss.detach())
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
        losses.append(total / len(data.training))
    two_passes, one_pass, rights = [], [], []
    for answer in track(data.held_out, "look-ahead, held out"):
        right = _ahead_right(lm, embeddings.detach(), answer)
        # row 0 has no pass before it, and the last rows lack some tokens
        rights.append(right[1 : len(right) - LOOK_AHEAD + 1])
        runs = right.cumprod(1).sum(1)
        one_pass.append(walk(runs, LOOK_AHEAD))
        two_passes.append(_two_passes(runs))
    return {
        "right": np.concatenate(rights).mean(0).tolist(),
        "loss_by_epoch": losses,
        "steps": data.epochs * len(_shuffled(data, 0)),
        "paper": joined(two_passes).to_json(),
        "one_pass": joined(one_pass).to_json(),
    }


def _ahead(prompt: list[int], answer: list[int]) -> tuple[Ahead, Tensor]:
    """Return look-ahead tokens after each position that predicts a token of the answer, and the
    tokens [m, LOOK_AHEAD] that they should predict; -1 after the end.

    The target predicts the next token itself, so the first look-ahead token predicts the second.
    """
    n = len(answer)
    ids = torch.tensor([prompt + answer])
    places = torch.arange(len(prompt) - 1, len(prompt) + n - 1)
    padded = torch.tensor(answer + [-1] * LOOK_AHEAD)
    wanted = padded.unfold(0, LOOK_AHEAD, 1)[1 : n + 1]
    return Ahead(ids, places), wanted


def _ahead_loss(
    lm: LM, embeddings: Tensor, answer: Answer, rng: np.random.Generator
) -> Tensor:
    """Return the cross-entropy at some random positions of an answer."""
    ahead, wanted = _ahead(*answer)
    n = len(ahead.places)
    some = torch.from_numpy(rng.choice(n, min(PLACES, n), replace=False))
    logits = Ahead(ahead.ids, ahead.places[some]).logits(lm, embeddings)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted[some].flatten(), ignore_index=-1
    )


@torch.no_grad()
def _ahead_right(lm: LM, embeddings: Tensor, answer: Answer) -> NDArray[np.bool_]:
    """Return which look-ahead tokens of the pass before each position are right,
    [T, LOOK_AHEAD].

    A pass that ends at a position has the next token from the target, and drafts those after it.
    Row t has the tokens drafted for positions t, t + 1, …; the pass was one position earlier."""
    ahead, wanted = _ahead(*answer)
    right = (ahead.logits(lm, embeddings).argmax(-1) == wanted).numpy()
    # the first token of an answer has no pass before it
    return np.concatenate([np.zeros((1, LOOK_AHEAD), bool), right[:-1]])


def _two_passes(runs: NDArray[np.int64]) -> Count:
    """Count PaSS by its paper: a pass for the next token and the drafted ones, then a pass that
    verifies them and adds a token."""
    at = passes = total = 0
    while at < len(runs):
        passes += 1
        at += 1  # the target's own token
        if at < len(runs):
            passes += 1
            total += LOOK_AHEAD
            at += int(runs[at]) + 1
    return Count(np.array([[len(runs), passes, total]], float))


# ---- learning while decoding


def online(data: Data) -> list[dict[str, Any]]:
    """Decode the training answers in order with drafts that learn meanwhile, and without."""
    target = data.target
    drafts = {
        "model": (data.draft.model, RATES["draft"]),
        "cut, untrained": (
            take_apart(target, range(2, target.num_layers)).model,
            RATES["layers"],
        ),
    }
    rows = []
    tail = len(data.training) * 2 // 3
    for name, (draft, rate) in drafts.items():
        frozen = counted(draft, data.training).each[tail:]
        learning = _online(data, copy.deepcopy(draft).float(), rate).each[tail:]
        rows.append(
            {
                "draft": name,
                "answers": len(data.training),
                "frozen": Count(frozen).to_json(),
                "online": Count(learning).to_json(),
                "more": _more(learning, frozen),
            }
        )
    return rows


def _online(data: Data, draft: nn.Module, rate: float) -> Count:
    """Count answers, each before the draft learns from it."""
    weights = list(draft.parameters())
    for weight in weights:
        weight.requires_grad_(True)
    optimiser = torch.optim.AdamW(weights, rate, weight_decay=0.0)
    counts = []
    for start in track(range(0, len(data.training), EVERY), "online"):
        answers = data.training[start : start + EVERY]
        losses = []
        target = data.target_logits[start : start + EVERY]
        for logits, own, answer in zip(logits_of(draft, answers), target, answers):
            runs = leading(agreeing(logits.detach(), answer))
            counts.append(walk(runs))
            rejected = _rejected(runs)
            losses.append(divergence(own[rejected].float(), logits[rejected]))
        loss = torch.cat(losses)
        if len(loss):
            loss.mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    return joined(counts)


def _rejected(runs: NDArray[np.int64]) -> list[int]:
    """Return the positions of the tokens that strict decoding rejects."""
    found = []
    at = 0
    while at < len(runs):
        accepted = int(runs[at])
        at += accepted
        if accepted < WINDOW and at < len(runs):
            found.append(at)
        at += 1  # the target's token
    return found


def _more(first: NDArray[np.float64], second: NDArray[np.float64]) -> dict[str, Any]:
    """Return how many more tokens per pass the first counts make, with the interval over resampled
    answers."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(first), size=(RESAMPLES, len(first)))
    ratios = []
    for each in (first, second):
        sums = each[drawn].sum(1)
        ratios.append(sums[:, 0] / sums[:, 1])
    whole = [each[:, 0].sum() / each[:, 1].sum() for each in (first, second)]
    low, high = np.percentile(ratios[0] - ratios[1], [2.5, 97.5])
    return {"difference": float(whole[0] - whole[1]), "interval": [low, high]}


# ---- several drafts


def boost(data: Data) -> dict[str, Any]:
    """Train a second draft on what the first one fails at, and count both together."""
    first = data.draft.model
    missed = []
    for runs in runs_of(first, data.training):
        whole = np.minimum(WINDOW, len(runs) - np.arange(len(runs)))
        missed.append(torch.from_numpy(runs < whole))
    own = runs_of(first, data.held_out)
    branches = joined(
        walk(np.maximum(runs, _second_branch(logits, answer)), 2 * WINDOW)
        for runs, logits, answer in zip(
            own, predictions(first, data.held_out), data.held_out
        )
    )
    results: dict[str, Any] = {
        "missed": float(torch.cat(missed).float().mean()),
        "first": joined(map(walk, own)).to_json(),
        "second branch": branches.to_json(),
    }
    for name, chosen in (("boosted", missed), ("everywhere", None)):
        model = copy.deepcopy(first).float()
        weights = list(model.parameters())
        trained = train(data, model, weights, RATES["draft"], chosen)
        other = runs_of(model, data.held_out)
        both = joined(walk(np.maximum(*runs), 2 * WINDOW) for runs in zip(own, other))
        results[name] = {
            "alone": joined(map(walk, other)).to_json(),
            "with the first": both.to_json(),
            "over the second branch": _more(both.each, branches.each),
            **trained.to_json(),
        }
    return results


def _second_branch(logits: Tensor, answer: Answer) -> NDArray[np.int64]:
    """Return the accepted tokens [T] of the window that begins with the draft's second choice."""
    second = logits.topk(2).indices[:, 1]
    right = (second == torch.tensor(answer[1])).numpy()
    rest = np.append(leading(agreeing(logits, answer), WINDOW - 1)[1:], 0)
    return np.where(right, 1 + rest, 0)


STUDIES: dict[str, Callable[[Data], Any]] = {
    "check": check,
    "sublayers": sublayers,
    "kangaroo": kangaroo,
    "look_ahead": look_ahead,
    "online": online,
    "boost": boost,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    add_run(parser)
    only_help = "studies to run; default: all"
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(STUDIES),
        default=list(STUDIES),
        help=only_help,
    )
    samples_help = "number of mined answers that drafts learn from"
    parser.add_argument("--samples", type=int, default=600, help=samples_help)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    source = mined(given.run)
    pair = source.pair(compile=False, dtype="float32")
    answers = [
        (sample.prompt_ids, sample.response_ids)
        for sample in mined_samples(Journal(given.run / "journal.jsonl"))
        if sample.response_ids
    ]
    held_out = answers[-given.held_out :]
    training = answers[: -given.held_out][: given.samples]
    data = Data(pair, training, held_out, given.epochs)
    own = agreement(pair.target.model, held_out)
    if own < OWN:
        raise SystemExit(
            f"{given.run}: its answers are not the target's own greedy ones ({own:.0%} of the "
            "tokens agree)"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "training": len(training),
        "held_out": len(held_out),
        "window": WINDOW,
        "epochs": given.epochs,
    }
    for name in given.only:
        told[name] = STUDIES[name](data)
        write_results(given.out / "survey_trained.json", told)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
