"""Measure what the built-in pair is meant to be: a fair testbed. Prints one JSON object.

    python recipes/check_embedded.py --run demo/run

Accuracy of both models on held-out problems, the cost of a draft pass against a target's read of 9
tokens, the share of important mismatches in a mined run, and how well the kind of token alone tells
them: whether the target's or the draft's token at a mismatch is a digit or an operator.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np
from rich.progress import track
from sklearn.metrics import roc_auc_score

from lenience.core.files import read_json
from lenience.decoding.loading import EMBEDDED, load_pair
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.tasks import WordMath, take


def pass_seconds(lm: LM, prompt: list[int], new: int, repeats: int = 200) -> float:
    """Median time of reading `new` tokens after a prompt."""
    session, times = Session(lm), []
    session.read([prompt])
    for _ in range(repeats):
        began = time.perf_counter()
        session.read([prompt + prompt[:new]], new)
        times.append(time.perf_counter() - began)
        session.read([prompt])
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=EMBEDDED / "run",
        help="a mined run; its judge's AUC is told too",
    )
    parser.add_argument("--limit", type=int, default=500, help="how many held-out problems")
    given = parser.parse_args()
    pair, task = load_pair(compile=False), WordMath()
    samples = take(task, "test", given.limit)
    told: dict[str, object] = {"n": len(samples)}
    for rule in ("target", "draft"):
        answers = pair.as_completed(
            [s.prompt for s in samples],
            batch_size=32,
            rule=rule,
            max_new_tokens=task.max_new_tokens,
        )
        right = [
            task.correct(out.text, samples[i])
            for i, out in track(answers, rule, total=len(samples))
        ]
        told[f"{rule}_accuracy"] = sum(right) / len(samples)
    prompt = pair.target.encode(samples[0].prompt)
    for how in ("plain", "compiled"):
        if how == "compiled":
            pair.compile()
        draft, target = (
            1000 * pass_seconds(pair.draft, prompt, 1),
            1000 * pass_seconds(pair.target, prompt, 9),
        )
        told[how] = {
            "draft_pass_ms": draft,
            "target_read_of_9_ms": target,
            "cost_ratio": draft / target,
        }
    words = pair.target.tokenizer.convert_ids_to_tokens
    found = [
        m
        for record in Journal(given.run / "journal.jsonl")
        for m in record["mismatches"]
        if m["important"] is not None
    ]
    important = np.array([m["important"] for m in found])
    kind = np.array(
        [
            any(
                re.fullmatch(r"▁?[\d+*/=-]", words(m[key]))
                for key in ("target_token", "draft_token")
            )
            for m in found
        ]
    )
    told |= {
        "mismatches": len(found),
        "important_share": float(important.mean()),
        "digits_or_operators_of_important": float(kind[important].mean()),
        "digits_or_operators_of_unimportant": float(kind[~important].mean()),
        "kind_auc": float(roc_auc_score(important, kind)),
        "megabytes": sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file())
        / 1e6,
    }
    if (given.run / "judge").exists():
        told["judge_auc"] = read_json(given.run / "judge" / "judge.json")["metrics"]["auc"]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
