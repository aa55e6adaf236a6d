"""Measure what the built-in pair is meant to be: a fair testbed. Prints one JSON object.

    python tools/embedded/check.py --run demo/run

Accuracy of both models on held-out problems, and the target's where it goes on from the first half
of the draft's answer; the cost of a draft pass against a target's read of 9 tokens, and that of
cycles of each window against a plain one; the share of important mismatches in a mined run, and how
well the kind of token alone tells them: whether the target's or the draft's token at a mismatch is
a digit or an operator.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from sklearn.metrics import roc_auc_score

from lenience.core.files import EMBEDDED, read_json
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.lm import LM
from lenience.models.prompts import Prompt
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import Sample, Task, WordMath, take


def pass_seconds(lm: LM, prompt: list[int], new: int, repeats: int = 200) -> float:
    """Return median time of reading `new` tokens after a prompt."""
    session = Session(lm)
    times = []
    session.read([prompt])
    for _ in range(repeats):
        began = time.perf_counter()
        session.read([prompt + prompt[:new]], new)
        times.append(time.perf_counter() - began)
        session.read([prompt])
    return float(np.median(times))


def answers(
    pair: Pair, task: Task, prompts: Sequence[Prompt], rule: str
) -> Iterator[tuple[int, list[int]]]:
    """Yield the tokens of each answer, as it is finished."""
    outs = pair.as_completed(
        prompts, batch_size=32, rule=rule, max_new_tokens=task.max_new_tokens
    )
    for i, out in track(outs, rule, total=len(prompts), console=Console(stderr=True)):
        yield i, out.tokens


def accuracies(pair: Pair, task: Task, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of samples that each model answers rightly, and the target where it goes on
    from the first half of the draft's answer."""
    prompts = [pair.target.encode(sample.prompt) for sample in samples]
    by_target = dict(answers(pair, task, prompts, "target"))
    by_draft = dict(answers(pair, task, prompts, "draft"))
    halves = [by_draft[i][: len(by_draft[i]) // 2] for i in range(len(samples))]
    begun = [prompt + half for prompt, half in zip(prompts, halves)]
    rest = dict(answers(pair, task, begun, "target"))
    finished = {i: halves[i] + tokens for i, tokens in rest.items()}
    named = {
        "target": by_target,
        "draft": by_draft,
        "target_from_drafts_halves": finished,
    }
    figures = {}
    for name, found in named.items():
        texts = [pair.target.decode(found[i]) for i in range(len(samples))]
        right = [task.correct(text, sample) for text, sample in zip(texts, samples)]
        figures[f"{name}_accuracy"] = float(np.mean(right))
    return figures


def cycles(pair: Pair, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Return how many plain cycles one of strict decoding takes at each window."""
    taken = {}
    for window in (0, 4, 8, 16, 32):
        seconds = []
        for prompt in prompts:
            profile = Profile()
            pair.generate(prompt, window=window, profile=profile)
            seconds.append(sum(profile.seconds.values()) / profile.cycles)
        taken[window] = float(np.median(seconds))
    return {
        f"cycle_at_{window}": taken[window] / taken[0] for window in taken if window
    }


def costs(pair: Pair, prompt: list[int]) -> dict[str, float]:
    """Return what a draft pass costs against the target's read of a window of 8 and the token
    before."""
    draft = 1000 * pass_seconds(pair.require_draft("a draft pass"), prompt, 1)
    target = 1000 * pass_seconds(pair.target, prompt, 9)
    return {
        "draft_pass_ms": draft,
        "target_read_of_9_ms": target,
        "cost_ratio": draft / target,
    }


def mismatches(pair: Pair, run: Path) -> dict[str, float]:
    """Return how many of a mined run's mismatches are important, and what their kind tells."""
    mined = mined_samples(Journal(run / "journal.jsonl"))
    labelled = [
        m for sample in mined for m in sample.mismatches if m.important is not None
    ]
    important = np.array([m.important for m in labelled])
    tokens = np.array([(m.target_token, m.draft_token) for m in labelled])
    ids = list(range(pair.target.vocab_size))
    words = pair.target.tokenizer.convert_ids_to_tokens(ids)
    numeric = np.array([bool(re.fullmatch(r"▁?[\d+*/=-]", word)) for word in words])
    kind = numeric[tokens].any(1)
    return {
        "mismatches": len(labelled),
        "important_share": float(important.mean()),
        "digits_or_operators_of_important": float(kind[important].mean()),
        "digits_or_operators_of_unimportant": float(kind[~important].mean()),
        "kind_auc": float(roc_auc_score(important, kind)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run_help = "a mined run; its judge's AUC is told too"
    parser.add_argument("--run", type=Path, default=EMBEDDED / "run", help=run_help)
    parser.add_argument(
        "--limit", type=int, default=500, help="how many held-out problems"
    )
    given = parser.parse_args()
    pair = load_pair(compile=False)
    task = WordMath()
    samples = take(task, "test", given.limit)
    figures: dict[str, object] = {"n": len(samples)}
    figures |= accuracies(pair, task, samples)
    prompt = pair.target.encode(samples[0].prompt)
    figures["plain"] = costs(pair, prompt)
    pair.compile()
    some = [sample.prompt for sample in samples[:20]]
    figures["compiled"] = costs(pair, prompt) | cycles(pair, some)
    figures |= mismatches(pair, given.run)
    sizes = [path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()]
    figures["megabytes"] = sum(sizes) / 1e6
    if (given.run / "judge").exists():
        figures["judge_auc"] = read_json(given.run / "judge" / "judge.json")["metrics"][
            "auc"
        ]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
