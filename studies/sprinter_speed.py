"""SPRINTER (Zhong 2025): runs of acceptable tokens, latency, and speed next to other conditions
that stop drafting, on any run's pair and task.

    python studies/sprinter_speed.py OUT [--samples 300] [--tau 1 1.2 1.5] [--threshold 0.5 0.8
    0.95] [--problems 100] [--turns 3] [--run RUN]

The gates are trained as in `studies/sprinter.py`. `specdec` is SpecDec++'s head: on the draft's
state after its token, rejections weighted 6. It learns the probability that speculative sampling
accepts the token, on the gates' texts. `entropy` is AdaEDL. All text is sampled at temperature 1.
Writes OUT/sprinter_speed.json and OUT/sprinter_speed.png, and prints the last part:

- `runs`: the draft samples 20 tokens after prefixes of the target's answers. A token x is
  acceptable if draft(x) / target(x) is at most tau. For each s, `passed` is the share of runs of s
  acceptable tokens in which the gate passes every token, so that the target is not called. Its
  interval is 95 % over resampled problems. The theory predicts TPR^s, where TPR is the share of
  single acceptable tokens that the gate passes.
- `flops`: MFLOP for a run of 20 acceptable tokens, by the paper's count of one token of the target
  per call, at the mean length of the answers. The theory predicts 20 (1 − TPR) calls of the target
  for a gate. Speculative decoding runs the target over all 20 tokens.
- `latency`: predicted and measured tokens/s of each gate over those of speculative decoding with
  the best window. The theory takes the seconds of a draft pass and of a target pass from a profile
  of speculative decoding. A gate makes N tokens in N draft passes and one target pass, where
  N = 1 / (1 − s) and s is the share of tokens that the gate passes. Speculative decoding with a
  window w makes (1 − alpha^(w+1)) / (1 − alpha) tokens in w draft passes and one target pass
  (Leviathan 2023).
- `rows`: accuracy, tokens per pass, MFLOP per token and tokens/s of all decoders. Decoders take
  turns on the same prompts with the same seeds. `paired` has exact McNemar tests against
  speculative decoding with the best window.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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
from sprinter import Problems, cost

from lenience.cli.console import with_bars
from lenience.core.profile import Profile
from lenience.decoding.checks import draft_of
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig, fit_head
from lenience.heads.head import Head, Inputs
from lenience.models.flops import ReadingCost
from lenience.models.lm import LM
from lenience.models.prompts import Prompt
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import take
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.stop_examples import gate_states

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

LENGTH = 20
"""Number of tokens that the draft samples after a prefix."""
POINTS = 5
"""Number of prefixes per answer of the target."""
WINDOWS = (2, 3, 4, 8)
"""Windows of speculative decoding."""
LONGEST = 16
"""Maximum window of the conditions that verify each token."""
SEED = 1
RESAMPLES = 2000


@dataclass(frozen=True)
class Drafted:
    """Continuations by the draft. Both arrays are [continuations, LENGTH]."""

    ratios: NDArray[np.float64]
    """draft(x) / target(x) of each drafted token x; infinite after the end of an answer."""
    states: torch.Tensor
    """[continuations, LENGTH, hidden]: the draft's states before each token."""
    alpha: float
    """Mean probability that speculative sampling accepts a token, 1 − TV."""
    problems: NDArray[np.int64]
    """[continuations]: the problem of each."""


@dataclass(frozen=True)
class GateRun:
    """A gate on drafted continuations, [continuations, LENGTH] each."""

    acceptable: NDArray[np.bool_]
    passed: NDArray[np.bool_]
    known: NDArray[np.bool_]
    """False after the end of an answer."""
    problems: NDArray[np.int64]
    """[continuations]: the problem of each."""

    @property
    def rates(self) -> dict[str, float]:
        """Return the shares of tokens that the gate passes: acceptable, other, and all. A share of
        no tokens is 0."""
        good = self.acceptable & self.known
        other = ~self.acceptable & self.known
        return {
            "tpr": _share(self.passed[good]),
            "fpr": _share(self.passed[other]),
            "passed": _share(self.passed[self.known]),
            "acceptable": _share(self.acceptable[self.known]),
        }

    def by_length(self) -> list[dict[str, Any]]:
        """Return for each length s the share of runs of s acceptable tokens, from the start of a
        continuation, that the gate passes whole, with its 95 % interval, and TPR^s."""
        tpr = self.rates["tpr"]
        rows = []
        for length in range(1, LENGTH + 1):
            runs = (self.acceptable & self.known)[:, :length].all(1)
            if not runs.any():
                break
            # [runs]
            whole = np.all(self.passed[runs, :length], axis=1)
            rows.append(
                {
                    "length": length,
                    "n": int(runs.sum()),
                    "passed": float(whole.mean()),
                    "interval": _interval(whole, self.problems[runs]),
                    "theory": tpr**length,
                }
            )
        return rows

    def stops(self) -> dict[str, float]:
        """Return the mean number of tokens that the gate passes before it stops or the continuation
        ends, and the number for tokens that pass independently of each other."""
        # [continuations]
        leading = (self.passed & self.known).cumprod(1).sum(1)
        lengths = self.known.sum(1)
        share = min(self.rates["passed"], 1 - 1e-9)
        expected = share * (1 - share**lengths) / (1 - share)
        return {"passed": float(leading.mean()), "theory": float(expected.mean())}


def _share(marks: NDArray[np.bool_]) -> float:
    return float(marks.mean()) if marks.size else 0.0


def _interval(marks: NDArray[np.bool_], problems: NDArray[np.int64]) -> list[float]:
    """Return the 95 % interval of a share over resampled problems."""
    groups = [marks[problems == problem] for problem in np.unique(problems)]
    sums = np.array([[group.sum(), len(group)] for group in groups])
    rng = np.random.default_rng(0)
    drawn = sums[rng.integers(len(sums), size=(RESAMPLES, len(sums)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return [float(low), float(high)]


@torch.inference_mode()
def continuations(problems: Problems) -> Drafted:
    """Sample continuations by the draft after prefixes of the target's answers, and compute both
    models' probabilities with transformers' models alone."""
    pair = problems.pair
    sampled = {**problems.sampled, "seed": SEED}
    prompts = [pair.target.encode(sample.prompt) for sample in problems.samples]
    answers = pair.generate_batch(prompts, rule="target", **sampled)
    rng = np.random.default_rng(0)
    starts = []
    numbers = []
    for number, (prompt, out) in enumerate(zip(prompts, answers)):
        points = min(POINTS, len(out.tokens))
        for cut in rng.choice(len(out.tokens), points, replace=False):
            starts.append(prompt + out.tokens[:cut])
            numbers.append(number)
    sampled["max_new_tokens"] = LENGTH
    outs = pair.generate_batch(starts, rule="draft", **sampled)
    rows = []
    for start, out in zip(track(starts, "both models along drafts"), outs):
        rows.append(_along(pair, start, out.tokens))
    overlaps = torch.cat([row[2] for row in rows])
    return Drafted(
        np.stack([row[0] for row in rows]),
        torch.stack([row[1] for row in rows]),
        float(overlaps.mean()),
        np.array(numbers),
    )


def _along(
    pair: Pair, start: list[int], tokens: list[int]
) -> tuple[NDArray[np.float64], torch.Tensor, torch.Tensor]:
    """Return the ratios [LENGTH], the draft's states before each token [LENGTH, hidden], and the
    probabilities [m] that speculative sampling accepts a token of the draft's distribution."""
    ids = torch.tensor([start + tokens])
    draft_model = draft_of(pair.models, "SPRINTER").model
    by_draft = draft_model(ids, output_hidden_states=True)
    by_target = pair.target.model(ids)
    before = slice(len(start) - 1, len(start) + len(tokens) - 1)
    chosen = torch.tensor(tokens)[:, None]
    # [m, vocabulary]
    draft, target = (
        out.logits[0, before].double().softmax(-1) for out in (by_draft, by_target)
    )
    ratios = np.full(LENGTH, np.inf)
    found = draft.gather(1, chosen) / target.gather(1, chosen)
    ratios[: len(tokens)] = found[:, 0].numpy()
    states = torch.zeros(LENGTH, by_draft.hidden_states[-1].shape[-1])
    states[: len(tokens)] = by_draft.hidden_states[-1][0, before]
    return ratios, states, torch.minimum(draft, target).sum(-1)


def gated(drafted: Drafted, head: Head, tau: float, threshold: float) -> GateRun:
    """Return a gate's decisions on continuations."""
    known = np.isfinite(drafted.ratios)
    logits = head.logits(drafted.states.flatten(0, 1)).double()
    passed = (torch.sigmoid(logits) >= threshold).numpy().reshape(known.shape)
    return GateRun(drafted.ratios <= tau, passed, known, drafted.problems)


def trained(pair: Pair, run: Path, taus: Sequence[float]) -> dict[Path, Head]:
    """Train a gate per tau and SpecDec++'s head in the run's folder. Return the gates by folder."""
    inputs = Inputs(("draft",), ("previous",))
    gates = {}
    for tau in taus:
        plan = HeadPlan(
            inputs, run / f"gate-{tau:g}", FitConfig("adam", role="gate"), tau
        )
        gates[plan.out] = with_bars(fit_run, pair, run, plan)
    specdec = _specdec(pair, run)
    specdec.save(run / "specdec")
    return gates


def _specdec(pair: Pair, run: Path) -> Head:
    """Train SpecDec++'s head on the probabilities min(1, target(x) / draft(x)) of drawn tokens."""
    inputs = Inputs(("draft",), ("draft",))
    samples = list(mined_samples(Journal(run / "journal.jsonl")))
    rows = gate_states(pair, samples, inputs)
    ratios = torch.cat([ratio for _, ratio in rows]).numpy()
    examples = Examples(
        torch.cat([x for x, _ in rows]).float().numpy(),
        harmless=ratios <= 2,  # accepted more often than not
        samples=np.repeat(np.arange(len(rows)), [len(x) for x, _ in rows]),
        shares=np.minimum(1, 1 / ratios).astype(np.float32),
    )
    config = FitConfig(role="stop", weight=6.0)
    return fit_head(examples, inputs, pair.fingerprints, config)


def decoders(run: Path, gates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of all decoders, by name."""
    found: dict[str, Mapping[str, Any]] = {
        "target": {"rule": "target"},
        "draft": {"rule": "draft"},
    }
    for window in WINDOWS:
        found[f"speculative, window {window}"] = {"window": window}
    for threshold in (0.3, 0.5, 0.7):
        stop = f"head:{run / 'specdec'}@{threshold}"
        found[f"specdec@{threshold}"] = {"stop": stop, "window": LONGEST}
    for stop in ("entropy:0.3", "entropy:0.5", "entropy:0.5,rate=0.9"):
        found[stop] = {"stop": stop, "window": LONGEST}
    found |= gates
    return {name: {"rule": "speculative", **asked} for name, asked in found.items()}


def raced(
    problems: Problems, asked: Mapping[str, Mapping[str, Any]], turns: int
) -> dict[str, dict[str, Any]]:
    """Decode all problems with each decoder in turns. A first turn on five problems warms up."""
    prompts = [sample.prompt for sample in problems.samples]
    names = list(asked)
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for turn in range(turns + 1):
        first = turn * len(names) // (turns + 1)
        order = names[first:] + names[:first]
        for name in track(order, f"turn {turn} of {turns}"):
            options = {**problems.sampled, "seed": SEED, **asked[name]}
            few = prompts[: None if turn else 5]
            outs, times = _turn(problems.pair, few, options)
            if turn:
                timed[name].append(times)
                rows[name] = _row(problems, outs)
    for name, row in rows.items():
        row |= {
            key: median([each[key] for each in timed[name]]) for key in timed[name][0]
        }
        speeds = [each["tokens_per_second"] for each in timed[name]]
        row["range"] = [min(speeds), max(speeds)]
    return {name: rows[name] for name in names}


def _turn(
    pair: Pair, prompts: Sequence[Prompt], options: Mapping[str, Any]
) -> tuple[list[Generation], dict[str, float]]:
    """Decode prompts one by one. Return the answers and their times."""
    profile = Profile()
    began = time.perf_counter()
    outs = [pair.generate(prompt, profile=profile, **options) for prompt in prompts]
    return outs, _times(outs, profile, time.perf_counter() - began)


def _times(
    outs: Sequence[Generation], profile: Profile, seconds: float
) -> dict[str, float]:
    """Return the speed of a turn, and the milliseconds of a draft pass, of a target pass and of
    everything else in a cycle."""
    drafted = sum(out.draft_passes for out in outs)
    passes = sum(out.target_passes for out in outs)
    of = profile.seconds
    return {
        "tokens_per_second": sum(len(out.tokens) for out in outs) / seconds,
        "draft_ms": 1000 * of["draft"] / max(1, drafted),
        "target_ms": 1000 * of["target"] / max(1, passes),
        "other_ms": 1000
        * (of["rule"] + of["cache"] + of["rest"])
        / max(1, profile.cycles),
    }


def _row(problems: Problems, outs: Sequence[Generation]) -> dict[str, Any]:
    """Return the accuracy and the cost of answers to all problems."""
    correct = [
        problems.task.correct(out.text, sample)
        for out, sample in zip(outs, problems.samples)
    ]
    interval = binomtest(sum(correct), len(outs)).proportion_ci()
    lengths = [len(out.prompt_tokens) + len(out.tokens) for out in outs]
    return {
        **cost(problems.pair, outs),
        "accuracy": sum(correct) / len(outs),
        "accuracy_interval": [interval.low, interval.high],
        "right": as_text(correct),
        "mean_length": float(np.mean(lengths)),
        "passes": sum(out.target_passes for out in outs),
    }


def best_speculative(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of speculative decoding with the fastest window."""
    names = [f"speculative, window {window}" for window in WINDOWS]
    return max(names, key=lambda name: rows[name]["tokens_per_second"])


def latency(
    rows: Mapping[str, Mapping[str, Any]], gates: Mapping[str, GateRun], alpha: float
) -> dict[str, dict[str, float]]:
    """Return the predicted and the measured speed of each gate over speculative decoding."""
    best = best_speculative(rows)
    window = int(best.rpartition(" ")[2])
    draft, target = rows[best]["draft_ms"], rows[best]["target_ms"]
    made = (1 - alpha ** (window + 1)) / (1 - alpha)
    strict = (window * draft + target) / made
    found = {}
    for name, run in gates.items():
        tokens = 1 / max(1e-9, 1 - run.rates["passed"])
        found[name] = {
            "predicted": strict / ((tokens * draft + target) / tokens),
            "measured": rows[name]["tokens_per_second"]
            / rows[best]["tokens_per_second"],
        }
    return found


def flops_of_runs(
    pair: Pair, length: float, gates: Mapping[str, GateRun]
) -> dict[str, dict[str, float]]:
    """Return the MFLOP for 20 acceptable tokens in texts of a length, by the paper's count. `calls`
    of the target are counted along runs of 20 acceptable tokens; the theory predicts
    20 (1 − TPR)."""
    draft = _paper_mflops(draft_of(pair.models, "SPRINTER"), length)
    target = _paper_mflops(pair.target, length)
    found = {"speculative": {"theory": LENGTH * (draft + target)}}
    for name, run in gates.items():
        whole = (run.acceptable & run.known).all(1)
        predicted = LENGTH * (1 - run.rates["tpr"])
        found[name] = {
            "theory": LENGTH * draft + predicted * target,
            "calls_in_theory": predicted,
            "n": int(whole.sum()),
        }
        if whole.any():
            calls = float((~run.passed[whole]).sum(1).mean())
            found[name] |= {"calls": calls, "measured": LENGTH * draft + calls * target}
    return found


def _paper_mflops(lm: LM, length: float) -> float:
    """Return the MFLOP of a pass over one token, the embedding counted as a product."""
    reading = ReadingCost.of(lm)
    assert reading is not None, "the cost of this model is unknown"
    return (reading.read(1, round(length)) + reading.lookup) / 1e6


def draw(told: Mapping[str, Any], path: Path) -> None:
    """Plot runs and speeds."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, gate) in enumerate(told["runs"].items()):
        rows = gate["by_length"]
        lengths = [row["length"] for row in rows]
        color = f"C{number}"
        left.plot(lengths, [row["passed"] for row in rows], color=color, label=name)
        left.plot(lengths, [row["theory"] for row in rows], ":", color=color)
    left.set(
        xlabel="acceptable tokens in a row",
        ylabel="share that the gate passes whole",
        title="Runs: measured, and TPR^s dotted",
    )
    points = told["latency"]
    for number, (name, point) in enumerate(points.items()):
        right.plot(
            point["predicted"], point["measured"], "o", color=f"C{number}", label=name
        )
    most = max(right.get_xlim()[1], right.get_ylim()[1])
    right.plot([0, most], [0, most], ":", color="grey")
    right.set(
        xlabel="predicted",
        ylabel="measured",
        title="Speed over speculative decoding",
    )
    for axes in (left, right):
        axes.legend(frameon=False, fontsize="small")
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


def show(told: Mapping[str, Any]) -> None:
    """Print the table of decoders."""
    table = Table(title=f"{told['problems']} problems at temperature 1")
    for name in ("decoder", "accuracy", "tokens per pass", "MFLOP/token", "tokens/s"):
        table.add_column(name, justify="right")
    for name, row in told["rows"].items():
        low, high = row["range"]
        table.add_row(
            name,
            f"{row['accuracy']:.1%}",
            f"{row['tokens_per_pass']:.2f}" if row["passes"] else "–",
            f"{row['mflops']:.1f}",
            f"{row['tokens_per_second']:.0f} ({low:.0f}–{high:.0f})",
        )
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    add_run(parser)
    samples_help = "number of mined samples that the gates are trained on"
    parser.add_argument("--samples", type=int, default=300, help=samples_help)
    parser.add_argument("--tau", type=float, nargs="+", default=[1.0, 1.2, 1.5])
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.5, 0.8, 0.95])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def gates_of(
    heads: Mapping[Path, Head], drafted: Drafted, thresholds: Sequence[float]
) -> tuple[dict[str, GateRun], dict[str, dict[str, Any]]]:
    """Return each gate at each threshold: its decisions on continuations, and its options."""
    gates: dict[str, GateRun] = {}
    asked: dict[str, dict[str, Any]] = {}
    for folder, head in heads.items():
        tau = head.metrics["tau"]
        for threshold in thresholds:
            name = f"τ {tau:g}, T {threshold:g}"
            gates[name] = gated(drafted, head, tau, threshold)
            asked[name] = {"stop": f"gate:{folder}@{threshold}"}
    return gates, asked


def paired_tests(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare speculative decoding at its best window with all other decoders, by the exact McNemar
    test."""
    best = best_speculative(rows)
    right = {name: row["right"] for name, row in rows.items()}
    return [mcnemar(best, name, right).to_json() for name in rows if name != best]


def main() -> None:
    given = arguments()
    run = given.out / "run"
    source = mined(given.run)
    trained_on = len(source.first(run, given.samples))
    pair = source.pair(compile=True)
    problems = Problems(pair, source.task, take(source.task, "test", given.problems))
    drafted = continuations(problems)
    gates, asked = gates_of(trained(pair, run, given.tau), drafted, given.threshold)
    for options in asked.values():
        options["window"] = problems.longest
    rows = raced(problems, decoders(run, asked), given.turns)
    told = {
        "samples": trained_on,
        "problems": len(problems.samples),
        "turns": given.turns,
        "alpha": drafted.alpha,
        "continuations": len(drafted.ratios),
        "runs": {
            name: {
                "rates": gate.rates,
                "stops": gate.stops(),
                "by_length": gate.by_length(),
            }
            for name, gate in gates.items()
        },
        "flops": flops_of_runs(pair, rows["target"]["mean_length"], gates),
        "latency": latency(rows, gates, drafted.alpha),
        "rows": rows,
        "best_speculative": best_speculative(rows),
        "paired": paired_tests(rows),
    }
    write_results(given.out / "sprinter_speed.json", told)
    draw(told, given.out / "sprinter_speed.png")
    show(told)


if __name__ == "__main__":
    main()
