"""Lenient rules on open text: how near their answers are to the target's own.

    python benchmarks/real_open.py MODEL QUESTIONS.jsonl OUT --draft DIR --results RESULTS.json
        [--judge DIR …] [--window 4]

QUESTIONS.jsonl is the test set that `benchmarks/real_inputs.py questions` writes; the categories
OPEN are asked. Decoding is greedy. OUT/answers.jsonl holds the answers of each rule; the command
resumes. RESULTS.json holds for each rule, with 95 % intervals over resampled questions:

- `equal`, the share of answers that are the target's own, token by token;
- `rouge`, the mean ROUGE-L F-measure of an answer beside the target's own (rouge-score, stemmed);
- `nats`, the mean of −log p of an answer's tokens under the target, which is the lowest for text
  that the target finds most probable;
- `tokens_per_pass`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from real_inputs import rows_of
from recording import digest_of, resumed, write_results
from rich.progress import track
from rouge_score.rouge_scorer import RougeScorer

from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.session import Session

OPEN = ("writing", "roleplay", "summarization")
"""Categories whose questions have no single right answer."""
TOKENS = 64
"""Maximum number of new tokens in an answer."""
BATCH = 8
RULES = (
    "target",
    "exact",
    "topk:2",
    "topk:3",
    "topk:10,ratio=0.3",
    "typical:0.3,0.55",
    "typical:0.09,0.3",
    "fuzzy:js@0.1",
    "fuzzy:js@0.2",
    "fuzzy:js@0.3",
    "fuzzy:kl@0.4",
    "kl:0.4",
    "ensemble:0.8",
    "ensemble:0.6",
    "cascade:opt@0",
    "cascade:token3@0.6",
    "fly:0.3,6",
    "random:0.6",
    "draft",
)
RECALLS = ("0.8", "0.9", "0.98")
"""Recalls at which each judge decodes."""
RESAMPLES = 2000
MEASURES = ("equal", "rouge", "nats")


def decode(
    pair: Pair, prompts: Sequence[list[int]], rule: str, window: int
) -> list[dict[str, Any]]:
    """Return the answers of a rule, in batches."""
    given: dict[str, Any] = {
        "rule": rule,
        "max_new_tokens": TOKENS,
        "batch_size": BATCH,
    }
    if rule not in ("target", "draft"):
        given["window"] = window
    outs = pair.generate_batch(list(prompts), **given)
    return [
        {"tokens": out.tokens, "passes": out.target_passes, "text": out.text}
        for out in outs
    ]


def nats(pair: Pair, prompt: list[int], answer: list[int]) -> float:
    """Return the mean of −log p of an answer's tokens under the target."""
    if not answer:
        return 0.0
    session = Session(pair.target)
    reading = session.read([prompt + answer], len(answer) + 1)
    logs = reading.logits[0, :-1].double().log_softmax(-1)  # [n, V]
    chosen = logs[range(len(answer)), answer]
    return -float(chosen.mean())


def answer_all(
    pair: Pair, rows: Sequence[dict[str, Any]], rules: Sequence[str], args: Any
) -> list[dict[str, Any]]:
    """Return the records of all rules' answers, with their distances from the target's own."""
    about = {
        "models": pair.fingerprints,
        "judges": {path: digest_of(Path(path)) for path in args.judge},
        "window": args.window,
        "tokens": TOKENS,
    }
    journal = resumed(args.out / "answers.jsonl", about)
    kept = {record["id"]: record for record in journal.resume()}
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    prompts = [
        pair.target.encode([{"role": "user", "content": row["turns"][0]}])
        for row in rows
    ]
    ids = [str(row["question_id"]) for row in rows]
    for rule in track(rules, "rules"):
        if all(f"{id} {rule}" in kept for id in ids):
            continue
        outs = decode(pair, prompts, rule, args.window)
        for id, row, prompt, out in zip(ids, rows, prompts, outs):
            own = kept.get(f"{id} target", out)
            record = {
                "id": f"{id} {rule}",
                "rule": rule,
                "category": row["category"],
                "equal": float(out["tokens"] == own["tokens"]),
                "rouge": scorer.score(own["text"], out["text"])["rougeL"].fmeasure,
                "nats": nats(pair, prompt, out["tokens"]),
                **out,
            }
            journal.write(record)
            kept[record["id"]] = record
    return [kept[f"{id} {rule}"] for rule in rules for id in ids]


def with_interval(values: NDArray, weights: NDArray) -> list[float]:
    """Return Σ values / Σ weights over questions, and its 95 % interval."""
    drawn = np.random.default_rng(0).integers(
        len(values), size=(RESAMPLES, len(values))
    )
    means = values[drawn].sum(1) / weights[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return [float(values.sum() / weights.sum()), float(low), float(high)]


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the measures of each rule, and ROUGE by category."""
    found: dict[str, Any] = {}
    for rule in dict.fromkeys(record["rule"] for record in records):
        some = [record for record in records if record["rule"] == rule]
        ones = np.ones(len(some))
        row: dict[str, Any] = {"n": len(some)}
        for measure in MEASURES:
            values = np.array([record[measure] for record in some])
            row[measure] = with_interval(values, ones)
        if rule != "draft":
            tokens = np.array([len(record["tokens"]) for record in some], float)
            passes = np.array([record["passes"] for record in some], float)
            row["tokens_per_pass"] = with_interval(tokens, passes)
        row["rouge_by_category"] = {
            category: float(
                np.mean([r["rouge"] for r in some if r["category"] == category])
            )
            for category in dict.fromkeys(record["category"] for record in some)
        }
        found[rule] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--judge", nargs="*", default=[])
    parser.add_argument("--window", type=int, default=4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pair = load_pair(
        args.model, args.draft, dtype="float32", device="cpu", compile=True
    )
    judges = [
        f"judge:{path}@recall={recall}" for path in args.judge for recall in RECALLS
    ]
    rules = [*RULES, *judges]
    for rule in rules:
        pair.check(Decoder.of(rule=rule))  # before anything is decoded
    rows = [row for row in rows_of(args.questions) if row["category"] in OPEN]
    results = figures(answer_all(pair, rows, rules, args))
    write_results(args.results, {"window": args.window, "rules": results})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
