"""SPRINTER (Zhong 2025) on any run's pair and task: gates for several tau, their ROC, and what
follows from their rates beside what decoding does.

    python studies/sprinter.py OUT [--samples 300] [--tau 1 1.2 1.5] [--threshold 0.5 0.7 0.8 0.9
    0.95] [--problems 200] [--after] [--run RUN]

Gates are fitted to the first mined samples, as `lenience fit RUN --gate --tau` does, into OUT/run;
with `--after` to the draft's states after its token in place of those before it. All is sampled at
temperature 1; a doubted token is verified by speculative sampling. Prints, and writes to
OUT/sprinter.json and OUT/sprinter.png:

- the ROC of each gate on held-out prefixes of the four kinds;
- `predicted`, from averages over such prefixes. A token x is acceptable where draft(x) / target(x)
  is at most tau; TPR and FPR are the shares of the draft's acceptable and other tokens that the
  gate passes, and alpha = 1 − TV(draft, target) is the chance that speculative sampling accepts.
  Theorem 1 of the paper: the output is FPR·TV(draft, target) away from the target's. Theorem 7:
  alpha + FPR·(1 − alpha) of the drafted tokens are kept. Ours, for tokens that pass independently
  of each other with the mean chance s: s / (1 − s) are trusted before the gate stops, which it does
  at the 1 / (1 − s)-th;
- `measured`: the same of what `--stop gate:PATH@T` decodes. TV is the exact distance at places of
  its answers: the next token's distribution is added up over the draft's tokens, each passed or
  not;
- `differences`: predicted minus measured, with 95 % intervals over resampled problems, from rates
  along the gate's own answers and from those of held-out prefixes;
- what it costs: floating-point operations of all that both models read, attention included, and by
  the paper's count, which has the embeddings as products and one token of the target's for each
  time that it is asked, whatever it reads to catch up; and tokens per second, one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mined import add_run, mined
from numpy.typing import NDArray
from paired import as_text, mcnemar
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from lenience.cli.console import with_bars
from lenience.decoding.checks import draft_of
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.drafting.stops import Gate
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs
from lenience.runs.answers import reading_flops
from lenience.runs.record import MinedAnswers, MinedSample, MiningCost
from lenience.tasks import Sample, Task, take
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.stop_examples import gate_states

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

RESAMPLES = 500
MASS = 1e-4
"""How much of the draft's probability, in its least likely tokens, the sums below leave out."""


@dataclass
class Place:
    """What can follow a prefix: the draft's likely tokens with both models' probabilities and the
    draft's state after each, or before it."""

    draft: torch.Tensor  # [n]
    target: torch.Tensor  # [n]
    states: torch.Tensor  # [n, H]
    distance: float
    """TV of the whole distributions."""
    left: torch.Tensor
    """[n]: max(0, target − draft) / TV, what is drawn instead of a rejected token."""

    def sums(self, head: Head, threshold: float, tau: float) -> dict[str, float]:
        """Return the probabilities that a drafted token is acceptable and that the gate passes it,
        and the next token's TV distance from the target's."""
        accepts = (self.target / self.draft).clamp(max=1)  # [n]
        good = (self.draft <= tau * self.target).double()
        passes = (
            torch.sigmoid(head.logits(self.states).double()) >= threshold
        ).double()  # [n]
        rejected = float((self.draft * (1 - passes) * (1 - accepts)).sum())
        out = (
            self.draft * passes
            + self.draft * (1 - passes) * accepts
            + self.left * rejected
        )
        return {
            "alpha": float((self.draft * accepts).sum()),
            "acceptable": float((self.draft * good).sum()),
            "passed_acceptable": float((self.draft * good * passes).sum()),
            "passed_other": float((self.draft * (1 - good) * passes).sum()),
            "tv": float((out - self.target).clamp(min=0).sum()),
        }


@torch.inference_mode()
def place(pair: Pair, ids: list[int], after: bool) -> Place:
    """Compute what can follow the prefix `ids`, with transformers' models alone."""
    before = torch.tensor([ids])
    reads = {"output_hidden_states": True}
    draft_model = draft_of(pair.models, "SPRINTER").model
    by_draft = draft_model(before, **reads)
    by_target = pair.target.model(before, **reads)
    draft, target = (
        out.logits[0, -1].double().softmax(-1) for out in (by_draft, by_target)
    )
    ranked, order = draft.sort(descending=True)
    tokens = order[: int((ranked.cumsum(0) < 1 - MASS).sum()) + 1]
    states = by_draft.hidden_states[-1][:, -1].expand(len(tokens), -1)
    if after:
        each = torch.cat(  # [n, T + 1]
            [before.expand(len(tokens), -1), tokens[:, None]], 1
        )
        states = draft_model(each, **reads).hidden_states[-1][:, -1]
    distance = float((draft - target).clamp(min=0).sum())
    left = (target - draft).clamp(min=0) / max(distance, 1e-12)
    return Place(draft[tokens], target[tokens], states, distance, left[tokens])


def table_of(places: Sequence[Place], head: Head, threshold: float) -> NDArray:
    """Return the gate's sums [n, 6] at each place, in the order of `SUMS`."""
    rows = []
    for place in places:
        sums = place.sums(head, threshold, head.metrics["tau"])
        rows.append([*sums.values(), place.distance])
    return np.array(rows)


def rates(table: NDArray) -> dict[str, float]:
    """Return the gate's rates over the places of a table, and their mean exact TV."""
    mean = dict(zip(SUMS, table.mean(0).tolist(), strict=True))
    return {
        "alpha": mean["alpha"],
        "passed": mean["passed_acceptable"] + mean["passed_other"],
        "tpr": mean["passed_acceptable"] / mean["acceptable"],
        "fpr": mean["passed_other"] / (1 - mean["acceptable"]),
        "draft_tv": mean["distance"],
        "tv": mean["tv"],
    }


def theory(found: dict[str, float]) -> dict[str, float]:
    """Return what the rates predict, see the module."""
    alpha = found["alpha"]
    fpr = found["fpr"]
    s = found["passed"]
    return {
        "tpr": found["tpr"],
        "fpr": fpr,
        "alpha": alpha,
        "tv": fpr * found["draft_tv"],
        "kept": alpha + fpr * (1 - alpha),
        "trusted_before_a_stop": s / (1 - s),
        "stop_time": 1 / (1 - s),
    }


def counts_of(outs: Sequence[Generation]) -> NDArray:
    """Return the doubted, the corrected and all tokens [n, 3] of each answer by a gate whose window
    never fills. Each query of the target keeps the doubted token or corrects it."""
    rows = []
    for out in outs:
        corrected = sum(entry.origin == "correction" for entry in out.trace)
        rows.append([out.target_passes, corrected, len(out.tokens)])
    return np.array(rows)


def runs(counts: NDArray) -> dict[str, float]:
    """Return the shares of trusted and doubted tokens from counts [n, 3], see `counts_of`."""
    doubted, corrected, tokens = map(float, counts.sum(0))
    trusted = tokens - doubted
    s = trusted / (trusted + doubted)
    return {
        "kept": 1 - corrected / tokens,
        "trusted_before_a_stop": s / (1 - s),
        "stop_time": 1 / (1 - s),
    }


def cost(pair: Pair, outs: Sequence[Generation]) -> dict[str, float]:
    """Return what a token of an answer costs."""
    tokens = sum(len(out.tokens) for out in outs)
    counted = [reading_flops(pair, out) for out in outs]
    flops, as_paper = (
        sum(counts) for counts in zip(*(count for count in counted if count))
    )
    return {
        "tokens_per_pass": tokens / max(1, sum(out.target_passes for out in outs)),
        "mflops": flops / tokens / 1e6,
        "mflops_as_paper": as_paper / tokens / 1e6,
        "never_read": float(np.mean([out.target_passes == 0 for out in outs])),
        "tokens_per_second": tokens / sum(out.seconds for out in outs),
    }


@dataclass(frozen=True)
class Problems:
    """What is decoded."""

    pair: Pair
    task: Task
    samples: Sequence[Sample]
    along: int = 5
    """Number of places of each answer at which its TV is computed."""

    @property
    def longest(self) -> int:
        return self.task.max_new_tokens or 256

    @property
    def sampled(self) -> dict[str, Any]:
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
        return {**plain, "max_new_tokens": self.longest}


def decoded(
    problems: Problems, what: str, **options: Any
) -> tuple[list[Generation], dict[str, Any]]:
    pair = problems.pair
    task = problems.task
    samples = problems.samples
    prompts = [sample.prompt for sample in samples]
    # one by one: in a batch a row waits for others, and reads on meanwhile
    asked = {**problems.sampled, **options}
    outs = [pair.generate(prompt, **asked) for prompt in track(prompts, what)]
    correct = [task.correct(out.text, sample) for out, sample in zip(outs, samples)]
    interval = binomtest(sum(correct), len(outs)).proportion_ci()
    accuracy = {
        "accuracy": sum(correct) / len(outs),
        "accuracy_interval": [interval.low, interval.high],
        "right": as_text(correct),
    }
    return outs, {**accuracy, "n": len(outs), **cost(pair, outs)}


def asked(outs: Sequence[Generation], each: int) -> list[list[int]]:
    """Return prefixes of answers after which the gate was asked about a token: bonus tokens it
    never sees."""
    rng = np.random.default_rng(0)
    found = list[list[int]]()
    for out in outs:
        places = [i for i, entry in enumerate(out.trace) if entry.origin != "bonus"]
        found += [out.prompt_tokens + out.tokens[:i] for i in rng.choice(places, each)]
    return found


def decoded_without_gates(
    problems: Problems,
) -> tuple[list[Generation], dict[str, Any]]:
    """Return the target's own answers, and what it, the draft and speculative sampling cost."""
    alone, costs = decoded(problems, "target", rule="target")
    baselines = {"target": costs}
    for name in ("draft", "speculative"):
        _, baselines[name] = decoded(problems, name, rule=name, window=4)
    return alone, baselines


def held_out(
    problems: Problems, target: Sequence[Generation], inputs: Inputs
) -> tuple[NDArray, NDArray]:
    """Return states and ratios of prefixes of the four kinds."""
    answers = MinedAnswers(target=None, final=None, reference=None)
    cost = MiningCost(target_passes=0, target_tokens=0, draft_tokens=0, seconds=0.0)
    records = [
        MinedSample(
            id=sample.id,
            prompt_ids=problems.pair.target.encode(sample.prompt),
            response_ids=out.tokens,
            final_ids=out.tokens,
            mismatches=[],
            answers=answers,
            cost=cost,
        )
        for sample, out in zip(problems.samples, target)
    ]
    rows = gate_states(problems.pair, records, inputs)
    return torch.cat([x for x, _ in rows]).numpy(), torch.cat(
        [ratio for _, ratio in rows]
    ).numpy()


def draw(told: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for tau, gate in told["gates"].items():
        left.plot(
            gate["roc"]["fpr"],
            gate["roc"]["tpr"],
            label=f"τ = {tau}: AUC {gate['roc']['auc']:.3f}",
        )
        points = gate["thresholds"].values()
        right.plot(
            [p["predicted"]["tv"] for p in points],
            [p["measured"]["tv"] for p in points],
            "o-",
            label=f"τ = {tau}",
        )
    left.plot([0, 1], [0, 1], ":", color="grey")
    left.set(
        xlabel="share of unacceptable tokens passed",
        ylabel="share of acceptable tokens passed",
        title="ROC, held out",
    )
    most = max(right.get_xlim()[1], right.get_ylim()[1])
    right.plot([0, most], [0, most], ":", color="grey")
    right.set(
        xlabel="TV from the target that theory predicts",
        ylabel="measured along gated answers",
        title="by threshold",
    )
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


SUMS = (
    "alpha", "acceptable", "passed_acceptable", "passed_other", "tv", "distance",
)  # fmt: skip
"""Columns of a table of places, see `Place.sums`."""
DIFFERENCES = ("tv", "kept", "trusted_before_a_stop")
"""What is predicted minus measured."""
COMPARED = ("tpr", "fpr", "tv", "trusted_before_a_stop", "stop_time", "kept")
"""What is both predicted and measured."""


def costs_of(row: dict[str, float]) -> list[str]:
    flops = [f"{row[key]:.2f}" for key in ("mflops", "mflops_as_paper")]
    return [f"{row['accuracy']:.1%}", *flops, f"{row['tokens_per_second']:.0f}"]


def show(told: dict[str, Any]) -> None:
    table = Table(
        title=f"SPRINTER, {told['problems']} problems at temperature 1: predicted / measured"
    )
    for name in (
        "gate",
        "TPR",
        "FPR",
        "TV",
        "trusted before a stop",
        "stop time",
        "kept",
        "accuracy",
        "MFLOP/token",
        "by the paper's count",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    for name, row in told["baselines"].items():
        table.add_row(name, *["–"] * len(COMPARED), *costs_of(row))
    for tau, gate in told["gates"].items():
        for threshold, point in gate["thresholds"].items():
            said = point["predicted"]
            is_ = point["measured"]
            pairs = (f"{said[key]:.3g} / {is_[key]:.3g}" for key in COMPARED)
            table.add_row(f"τ {tau} @{threshold}", *pairs, *costs_of(is_))
    Console(width=180).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    add_run(parser)
    parser.add_argument(
        "--samples",
        type=int,
        default=300,
        help="how many mined samples the gates are fitted to",
    )
    parser.add_argument("--tau", type=float, nargs="+", default=[1.0, 1.2, 1.5])
    parser.add_argument(
        "--threshold", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9, 0.95]
    )
    parser.add_argument("--problems", type=int, default=200)
    along_help = "number of places of each answer at which its TV is computed"
    parser.add_argument("--along", type=int, default=Problems.along, help=along_help)
    after_help = (
        "let gates read the state after a token, which costs one more pass of the draft"
    )
    parser.add_argument("--after", action="store_true", help=after_help)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    source = mined(given.run)
    fitted_to = len(source.first(given.out / "run", given.samples))
    pair = source.pair(compile=True)
    samples = take(source.task, "test", given.problems)
    problems = Problems(pair, source.task, samples, given.along)
    alone, baselines = decoded_without_gates(problems)
    told: dict[str, Any] = {
        "samples": fitted_to,
        "state": "draft" if given.after else "previous",
        "problems": len(samples),
        "baselines": baselines,
        "gates": {},
    }
    add_gates(told, given, problems, alone)
    told["paired"] = tests(told)
    write_results(given.out / "sprinter.json", told)
    draw(told, given.out / "sprinter.png")
    show(told)


def add_gates(
    told: dict[str, Any],
    given: argparse.Namespace,
    problems: Problems,
    alone: Sequence[Generation],
) -> None:
    """Fit a gate for each tau and add its figures at each threshold. They are saved after each
    threshold. `alone` holds the target's own answers."""
    run = given.out / "run"
    inputs = Inputs(("draft",), (told["state"],))
    x, ratio = held_out(problems, alone, inputs)
    prefixes = track(_four_kinds(problems, alone), "held-out prefixes")
    known = [place(problems.pair, ids, given.after) for ids in prefixes]
    aucs = dict[str, NDArray]()
    for tau in given.tau:
        name = f"{tau:g}"
        plan = HeadPlan(
            inputs, run / f"gate-{name}", FitConfig("adam", role="gate"), tau
        )
        head = with_bars(fit_run, problems.pair, run, plan)
        scores = head.logits(torch.from_numpy(x)).numpy()
        aucs[name] = resampled_auc(scores, ratio <= tau, len(problems.samples))
        points = dict[str, Any]()
        told["gates"][name] = {
            "roc": roc_of(scores, ratio <= tau),
            "thresholds": points,
        }
        for threshold in given.threshold:
            gate = Gate(str(plan.out), threshold)
            points[f"{threshold:g}"] = _point(problems, gate, known)
            write_results(given.out / "sprinter.json", told)
    told["auc_by_tau"] = by_tau(told, aucs)


def tests(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each gate's answers with those of speculative sampling and of the target, by the
    exact McNemar test."""
    baselines = ("speculative", "target")
    right = {name: told["baselines"][name]["right"] for name in baselines}
    for tau, gate in told["gates"].items():
        for threshold, point in gate["thresholds"].items():
            right[f"τ {tau}, T {threshold}"] = point["measured"]["right"]
    gates = [name for name in right if name not in baselines]
    return [
        mcnemar(first, gate, right).to_json() for gate in gates for first in baselines
    ]


def resampled_auc(scores: NDArray, acceptable: NDArray, problems: int) -> NDArray:
    """Return the AUCs [RESAMPLES] on resampled problems, whose rows [n] follow each other in equal
    numbers; the same problems are drawn in each call."""
    rng = np.random.default_rng(0)
    of_problem = np.arange(len(scores)).reshape(problems, -1)
    drawn = []
    for _ in range(RESAMPLES):
        rows = of_problem[rng.integers(0, problems, problems)].ravel()
        drawn.append(roc_auc_score(acceptable[rows], scores[rows]))
    return np.array(drawn)


def by_tau(told: dict[str, Any], aucs: dict[str, NDArray]) -> list[dict[str, Any]]:
    """Return how much more the AUC of a gate is than that of the gate with the next smaller tau,
    with the 95 % interval over resampled problems."""
    found = []
    for smaller, larger in pairwise(aucs):
        roc = [told["gates"][tau]["roc"]["auc"] for tau in (smaller, larger)]
        low, high = np.quantile(aucs[larger] - aucs[smaller], [0.025, 0.975])
        interval = [float(low), float(high)]
        found.append(
            {
                "tau": [smaller, larger],
                "difference": roc[1] - roc[0],
                "interval": interval,
            }
        )
    return found


def roc_of(scores: NDArray, acceptable: NDArray) -> dict[str, Any]:
    """Return the curve of scores [n] that are to tell what is acceptable [n]."""
    fpr, tpr, _ = roc_curve(acceptable, scores, drop_intermediate=True)
    return {
        "auc": float(roc_auc_score(acceptable, scores)),
        "acceptable": float(acceptable.mean()),
        "n": len(scores),
        "fpr": fpr.round(4).tolist(),
        "tpr": tpr.round(4).tolist(),
    }


def _four_kinds(problems: Problems, by_target: Sequence[Generation]) -> list[list[int]]:
    """Return a prefix of each kind of each problem: the prompt as it is, and prefixes of the
    answers to it by the target, by the draft, and by the target first and then the draft."""
    pair = problems.pair
    rng = np.random.default_rng(0)
    eos = pair.target.eos_ids
    prompts = [pair.target.encode(sample.prompt) for sample in problems.samples]
    wholes = [prompt + out.tokens for prompt, out in zip(prompts, by_target)]
    halves = [
        whole[: (len(prompt) + len(whole)) // 2]
        for prompt, whole in zip(prompts, wholes)
    ]
    drafts = []
    for starts in (prompts, halves):
        outs = pair.generate_batch(starts, rule="draft", **problems.sampled)
        drafts.append([start + out.tokens for start, out in zip(starts, outs)])
    found = list(prompts)
    for kind in (wholes, *drafts):
        for prompt, whole in zip(prompts, kind):
            last = len(whole) - (whole[-1] in eos)
            found.append(whole[: rng.integers(min(len(prompt), last), last + 1)])
    return found


def _point(problems: Problems, gate: Gate, known: Sequence[Place]) -> dict[str, Any]:
    """Return a gate at one threshold: what its rates say, and what decoding does."""
    head = gate.head
    after = head.inputs.tokens == ("draft",)
    pair = problems.pair
    window = problems.longest
    outs, costs = decoded(
        problems, str(gate), rule="speculative", stop=gate, window=window
    )
    prefixes = track(asked(outs, problems.along), "its TV")
    along = table_of([place(pair, ids, after) for ids in prefixes], head, gate.bound)
    held_out = table_of(known, head, gate.bound)
    counts = counts_of(outs)
    here = rates(along)
    measured = {
        "tpr": here["tpr"],
        "fpr": here["fpr"],
        "alpha": here["alpha"],
        "tv": here["tv"],
        **runs(counts),
        **costs,
    }
    return {
        "predicted": theory(rates(held_out)),
        "predicted_from_its_own_answers": theory(here),
        "measured": measured,
        "differences": differences(held_out, along, counts),
    }


def differences(
    held_out: NDArray, along: NDArray, counts: NDArray
) -> dict[str, dict[str, list[float]]]:
    """Return predicted minus measured with its 95 % interval over resampled problems, from the
    gate's rates at held-out prefixes and along its own answers.

    `counts` [n, 3] is of the answers to n problems, `along` [n·k, 6] of k places of each answer in
    turn, and `held_out` [4·n, 6] of prefixes of the n problems, one kind after the other.
    """
    n = len(counts)
    by_kind = held_out.reshape(-1, n, len(SUMS)).swapaxes(0, 1)  # [n, 4, 6]
    by_place = along.reshape(n, -1, len(SUMS))  # [n, k, 6]
    whole = _predicted_minus_measured(by_kind, by_place, counts)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        rows = rng.integers(0, n, n)
        drawn.append(
            _predicted_minus_measured(by_kind[rows], by_place[rows], counts[rows])
        )
    told: dict[str, dict[str, list[float]]] = {}
    for source, name in whole:
        values = [each[source, name] for each in drawn]
        low, high = np.quantile(values, [0.025, 0.975])
        interval = [whole[source, name], float(low), float(high)]
        told.setdefault(source, {})[name] = interval
    return told


def _predicted_minus_measured(
    by_kind: NDArray, by_place: NDArray, counts: NDArray
) -> dict[tuple[str, str], float]:
    here = rates(by_place.reshape(-1, len(SUMS)))
    there = rates(by_kind.reshape(-1, len(SUMS)))
    measured = {"tv": here["tv"], **runs(counts)}
    predicted = {"held_out": theory(there), "own_answers": theory(here)}
    told = dict[tuple[str, str], float]()
    for source, rate in predicted.items():
        for name in DIFFERENCES:
            told[source, name] = rate[name] - measured[name]
    return told


if __name__ == "__main__":
    main()
