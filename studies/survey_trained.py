"""Drafters of the survey (Xia 2024) that need training or a search, and that lenience does not
have, each tried in a few lines on any run's pair.

    python studies/survey_trained.py OUT [--only sublayers kangaroo look_ahead online boost]
    [--run RUN] [--samples 600] [--held-out 100] [--epochs 2]

Everything is read off the target's own greedy answers of the run. Where a draft predicts the next
token of such an answer, strict decoding accepts it, and the draft's next context is the answer
again. So the accepted tokens of each window follow from one forward pass, exactly. Writes
OUT/survey_trained.json and prints it:

- `check`: tokens per pass of the pair's draft model by this count, and by `Pair.generate`;
- `sublayers`: the target without some attention and MLP modules (Draft & Verify, Zhang 2023; SWIFT,
  Xia 2025) against the target without whole layers. Both are found by the same greedy search.
  `times` is the expected speed-up over the target alone, if a pass costs in proportion to the
  parameters of the kept modules;
- `kangaroo`: the target's first layers, frozen, and a trained layer after them (Kangaroo, Liu
  2024). It stops drafting after a token with less than 0.6 of the probability. `times` counts the
  frozen layers once, as the verification reuses them. Next to it, a cut draft with the same layers,
  all trained, and the first layers alone (`exit:N`). The stop is read along the answer, also after
  a rejected token;
- `look_ahead`: trained embeddings after the text, at which the target predicts later tokens in the
  same pass (PaSS, Monea 2023). `paper` needs a pass to draft and a pass to verify. `one_pass` has
  look-ahead tokens after each drafted token, so that each pass verifies and drafts;
- `online`: a draft that learns during decoding (Online Speculative Decoding, Liu 2023). After every
  eight answers it takes a step on the positions where it was rejected;
- `boost`: a second draft, trained where the first one does not predict the whole window
  (SpecInfer, Miao 2024, adaptive boost-tuning). Both windows are verified together. Next to it are
  a second draft trained everywhere, and a second branch from the first draft's second choice.

Intervals are 95 % over resampled held-out answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
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

from lenience.decoding.pair import Pair
from lenience.drafting.self_draft import take_apart
from lenience.models.lm import LM
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.training.skipping import worth

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

WINDOW = 4
BATCH = 16
RATE = 3e-4
LOOK_AHEAD = 4
"""Number of look-ahead tokens."""
LOOK_AHEAD_RATE = 1e-2
CONFIDENT = 0.6
"""Probability below which Kangaroo stops drafting."""
EVERY = 8
"""Number of answers between two steps of online distillation."""
SEARCHED = 20
"""Number of answers on which modules to skip are searched."""
RESAMPLES = 2000

Answer = tuple[list[int], list[int]]
"""A prompt and the target's own answer."""


@dataclass(frozen=True)
class Data:
    """What drafters learn from and are measured on."""

    pair: Pair
    learned: Sequence[Answer]
    held_out: Sequence[Answer]
    epochs: int

    @property
    def target(self) -> LM:
        return self.pair.target

    @cached_property
    def own(self) -> list[Tensor]:
        """Return the target's logits [T, V] along the learned answers, in half precision."""
        return [
            logits.half() for logits in predictions(self.target.model, self.learned)
        ]


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


def walk(runs: NDArray[np.int64], drafted: NDArray[np.int64] | None = None) -> Count:
    """Count one answer. `runs` [T] is the number of tokens that would be accepted of a window that
    begins at each position; `drafted` [T] is the window's length, by default WINDOW."""
    at = passes = total = 0
    while at < len(runs):
        passes += 1
        total += WINDOW if drafted is None else int(drafted[at])
        at += int(runs[at]) + 1
    return Count(np.array([[len(runs), passes, total]], float))


def joined(counts: Iterable[Count]) -> Count:
    return Count(np.concatenate([count.each for count in counts]))


def leading(same: NDArray[np.bool_], longest: int = WINDOW) -> NDArray[np.int64]:
    """Return the number [T] of True in a row from each position, at most `longest`."""
    padded = np.concatenate([same, np.zeros(longest, bool)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(same)]
    return windows.cumprod(1).sum(1)


def logits_of(
    model: nn.Module, answers: Sequence[Answer], **options: Any
) -> list[Tensor]:
    """Return a model's logits [T, V] at each token of each answer."""
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    ids = torch.zeros(len(answers), longest, dtype=torch.long)
    for row, (prompt, answer) in enumerate(answers):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    logits = model(input_ids=ids, use_cache=False, **options).logits
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


def counted(model: nn.Module, answers: Sequence[Answer]) -> Count:
    """Count strict decoding with a model as the draft."""
    return joined(
        walk(leading(agreeing(logits, answer)))
        for logits, answer in zip(predictions(model, answers), answers)
    )


def check(data: Data) -> dict[str, float]:
    """Compare the count with the engine. The last window of an answer differs: the engine drafts
    past its end."""
    prompts = [prompt for prompt, _ in data.held_out]
    longest = max(len(answer) for _, answer in data.held_out)
    options = {"rule": "exact", "window": WINDOW, "max_new_tokens": longest}
    outs = data.pair.generate_batch(prompts, **options)
    passes = sum(out.target_passes for out in outs)
    tokens = sum(len(out.tokens) for out in outs)
    count = counted(data.pair.draft.model, data.held_out)
    return {"counted": count.tokens_per_pass, "engine": tokens / passes}


# ---- training


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """Return KL(target ‖ draft) [n] of logits [n, V]."""
    p = target.log_softmax(-1)
    return (p.exp() * (p - draft.log_softmax(-1))).sum(-1)


def train(
    data: Data,
    model: nn.Module,
    weights: Sequence[nn.Parameter],
    chosen: Sequence[Tensor] | None = None,
) -> None:
    """Train some weights to predict as the target does along its answers. `chosen` has the
    positions to learn of each answer, [T] bool; by default all."""
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    optimiser = torch.optim.AdamW(weights, RATE)
    numbered = list(enumerate(data.learned))
    steps = range(0, len(numbered), BATCH)
    for epoch in range(data.epochs):
        order = np.random.default_rng(epoch).permutation(len(numbered))
        for start in track(steps, f"epoch {epoch + 1}"):
            picked = [numbered[i] for i in order[start : start + BATCH]]
            answers = [answer for _, answer in picked]
            losses = []
            for (i, _), theirs in zip(picked, logits_of(model, answers)):
                kept = chosen[i] if chosen else slice(None)
                losses.append(divergence(data.own[i][kept].float(), theirs[kept]))
            loss = torch.cat(losses)
            if len(loss):
                loss.mean().backward()
                optimiser.step()
                optimiser.zero_grad()


# ---- attention and MLP modules apart


class Silent(nn.Module):
    """A module that adds nothing to its layer's residual stream."""

    def __init__(self, attention: bool):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.attention else zeros


Module = tuple[int, str]
"""A layer and the name of one of its modules."""


def kept_modules(target: LM, left_out: Sequence[Module]) -> nn.Module:
    """Return the target without some modules, on the same weights."""
    whole = target.model
    memo = {id(each): each for each in (*whole.parameters(), *whole.buffers())}
    model: nn.Module = copy.deepcopy(whole, memo)
    layers = target.blocks(model)
    for layer, name in left_out:
        setattr(layers[layer], name, Silent(name == "self_attn"))
    return model


def searched(data: Data, groups: Sequence[tuple[Module, ...]]) -> list[dict[str, Any]]:
    """Leave out one group of modules after another, each time the one that costs least agreement.
    Return the best set of each size."""
    layers = data.target.blocks(data.target.model)
    sizes = {}
    for group in groups:
        for layer, name in group:
            module = getattr(layers[layer], name)
            sizes[layer, name] = sum(weight.numel() for weight in module.parameters())
    total = sum(sizes.values())
    tried = data.learned[:SEARCHED]
    left_out: list[tuple[Module, ...]] = []
    found = []
    while len(left_out) < len(groups) - 1:
        agreements = {}
        for group in track([g for g in groups if g not in left_out], "modules"):
            flat = [module for chosen in (*left_out, group) for module in chosen]
            agreements[group] = agreement(kept_modules(data.target, flat), tried)
        left_out.append(max(agreements, key=lambda group: agreements[group]))
        flat = [module for chosen in left_out for module in chosen]
        model = kept_modules(data.target, flat)
        share = agreement(model, data.held_out)
        cost = 1 - sum(sizes[module] for module in flat) / total
        times, window = worth(share, cost)
        found.append(
            {
                "left_out": [f"{name} {layer + 1}" for layer, name in sorted(flat)],
                "cost": cost,
                "agreement": share,
                "times": times,
                "window": window,
            }
        )
    return found


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
    apart = searched(data, [((i, name),) for i in layers for name in both])
    whole = searched(data, [tuple((i, name) for name in both) for i in layers])
    return {
        "modules": apart,
        "layers": whole,
        "best_modules": max(apart, key=lambda row: row["times"]),
        "best_layers": max(whole, key=lambda row: row["times"]),
    }


# ---- Kangaroo


def kangaroo(data: Data) -> list[dict[str, Any]]:
    """Train an adapter after the first layers, and cut drafts with the same layers."""
    depth = data.target.num_layers
    rows = []
    for first in (1, 2):
        dropped = range(
            first + 1, depth
        )  # counted from 1: all but the first and the last
        for name in ("kangaroo", "cut"):
            lm = take_apart(data.target, dropped)
            model = copy.deepcopy(lm.model).float()
            adapter = lm.blocks(model)[-1]
            trained = adapter if name == "kangaroo" else model
            train(data, model, list(trained.parameters()))
            rows.append(_kangaroo_row(data, model, name, first, depth))
        exit_alone = take_apart(data.target, range(first + 1, depth + 1)).model
        rows.append(_kangaroo_row(data, exit_alone, "exit", first, depth))
    return rows


def _kangaroo_row(
    data: Data, model: nn.Module, name: str, first: int, depth: int
) -> dict[str, Any]:
    """Count a draft with its stop, and estimate its speed-up by layers."""
    counts = []
    for logits, answer in zip(predictions(model, data.held_out), data.held_out):
        sure = (logits.softmax(-1).amax(-1) >= CONFIDENT).numpy()
        # a window ends after its first unsure token
        drafted = np.minimum(leading(sure) + 1, WINDOW)
        runs = np.minimum(leading(agreeing(logits, answer)), drafted)
        counts.append(walk(runs, drafted))
    count = joined(counts)
    layers = first + (name != "exit")
    reused = 0 if name == "cut" else first
    cost = (count.drafted_per_pass * layers + depth - reused) / depth
    return {
        "name": name,
        "first": first,
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
        """Return which tokens attend to which, [1, 1, n + m L, n + m L] bool: text to earlier text,
        a look-ahead token to the text up to its place and to earlier tokens of its group."""
        n = self.ids.shape[1]
        m = len(self.places)
        size = n + m * LOOK_AHEAD
        mask = torch.zeros(size, size, dtype=torch.bool)
        mask[:n, :n] = torch.ones(n, n, dtype=torch.bool).tril()
        upto = torch.arange(n)[None] <= self.places[:, None]
        mask[n:, :n] = upto.repeat_interleave(LOOK_AHEAD, 0)
        group = torch.ones(LOOK_AHEAD, LOOK_AHEAD, dtype=torch.bool).tril()
        mask[n:, n:] = torch.block_diag(*[group] * m).bool()
        return mask[None, None]


def look_ahead(data: Data) -> dict[str, Any]:
    """Train look-ahead embeddings, the target frozen, and count both ways of decoding."""
    lm = data.target
    for weight in lm.model.parameters():
        weight.requires_grad_(False)
    mean = lm.model.get_input_embeddings().weight.mean(0)
    embeddings = nn.Parameter(mean.repeat(LOOK_AHEAD, 1).clone())
    optimiser = torch.optim.AdamW([embeddings], LOOK_AHEAD_RATE, weight_decay=0.0)
    for epoch in range(data.epochs):
        order = np.random.default_rng(epoch).permutation(len(data.learned))
        for number, i in enumerate(track(order, f"look-ahead, epoch {epoch + 1}")):
            loss = _ahead_loss(lm, embeddings, data.learned[i])
            loss.backward()
            if number % BATCH == BATCH - 1:
                optimiser.step()
                optimiser.zero_grad()
    two_passes, one_pass = [], []
    shares = []
    for prompt, answer in track(data.held_out, "look-ahead, held out"):
        same = _ahead_right(lm, embeddings.detach(), (prompt, answer))
        shares.append(same)
        runs = same.cumprod(1).sum(1)
        one_pass.append(walk(runs))
        two_passes.append(_two_passes(runs))
    rights = np.concatenate([same[:-LOOK_AHEAD] for same in shares if len(same) > 4])
    return {
        "right": rights.mean(0).tolist(),
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


def _ahead_loss(lm: LM, embeddings: Tensor, answer: Answer) -> Tensor:
    ahead, wanted = _ahead(*answer)
    logits = ahead.logits(lm, embeddings)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=-1
    )
    return loss / BATCH


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
        after = min(at + 1, len(runs) - 1)  # the target's own token comes first
        passes += 2
        total += LOOK_AHEAD
        at += 1 + int(runs[after]) + 1
    return Count(np.array([[len(runs), passes, total]], float))


# ---- learning while decoding


def online(data: Data) -> list[dict[str, Any]]:
    """Decode the learned answers in order with drafts that learn meanwhile, and without."""
    target = data.target
    cut = range(2, target.num_layers)
    drafts = {
        "model": data.pair.draft.model,
        "cut, untrained": take_apart(target, cut).model,
    }
    rows = []
    for name, draft in drafts.items():
        frozen = counted(draft, data.learned)
        counts, seconds, training = _online(data, copy.deepcopy(draft).float())
        tail = len(data.learned) * 2 // 3
        rows.append(
            {
                "draft": name,
                "answers": len(data.learned),
                "frozen": Count(frozen.each[tail:]).to_json(),
                "online": Count(counts.each[tail:]).to_json(),
                "more": _more(counts.each[tail:], frozen.each[tail:]),
                "seconds": seconds,
                "training_seconds": training,
            }
        )
    return rows


def _online(data: Data, draft: nn.Module) -> tuple[Count, float, float]:
    """Return the counts of the answers, and the seconds of everything and of the training."""
    weights = list(draft.parameters())
    for weight in weights:
        weight.requires_grad_(True)
    optimiser = torch.optim.AdamW(weights, RATE)
    counts = []
    training = 0.0
    len(data.own)  # the target's logits are known from its passes
    began = time.perf_counter()
    for start in track(range(0, len(data.learned), EVERY), "online"):
        answers = data.learned[start : start + EVERY]
        rejected = []
        for logits, answer in zip(predictions(draft, answers), answers):
            same = agreeing(logits, answer)
            rejected.append(torch.from_numpy(~same))
            counts.append(walk(leading(same)))
        before = time.perf_counter()
        own = data.own[start : start + EVERY]
        losses = [
            divergence(ours[wrong].float(), theirs[wrong])
            for ours, theirs, wrong in zip(own, logits_of(draft, answers), rejected)
        ]
        torch.cat(losses).mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        training += time.perf_counter() - before
    return joined(counts), time.perf_counter() - began, training


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
    first = data.pair.draft.model
    missed = []
    for logits, answer in zip(predictions(first, data.learned), data.learned):
        runs = leading(agreeing(logits, answer))
        whole = np.minimum(WINDOW, len(runs) - np.arange(len(runs)))
        missed.append(torch.from_numpy(runs < whole))
    seconds = {}
    for name, chosen in (("boosted", missed), ("everywhere", None)):
        model = copy.deepcopy(first).float()
        train(data, model, list(model.parameters()), chosen)
        seconds[name] = predictions(model, data.held_out)
    own = predictions(first, data.held_out)
    singles, branches = [], []
    pairs: dict[str, list[Count]] = {name: [] for name in seconds}
    alone: dict[str, list[Count]] = {name: [] for name in seconds}
    for i, answer in enumerate(data.held_out):
        runs = leading(agreeing(own[i], answer))
        singles.append(walk(runs))
        branches.append(walk(np.maximum(runs, _second_branch(own[i], answer))))
        for name, logits in seconds.items():
            other = leading(agreeing(logits[i], answer))
            alone[name].append(walk(other))
            pairs[name].append(walk(np.maximum(runs, other)))
    base = joined(branches)
    return {
        "first": joined(singles).to_json(),
        "second branch": base.to_json(),
        **{
            name: {
                "alone": joined(alone[name]).to_json(),
                "with the first": joined(pairs[name]).to_json(),
                "over the second branch": _more(joined(pairs[name]).each, base.each),
            }
            for name in seconds
        },
        "missed": float(torch.cat(missed).float().mean()),
    }


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
    parser.add_argument("--epochs", type=int, default=2)
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
    learned = answers[: -given.held_out][: given.samples]
    data = Data(pair, learned, held_out, given.epochs)
    given.out.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "learned": len(learned),
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
