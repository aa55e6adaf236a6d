"""Strict decoding of a pretrained model on Spec-Bench, one question at a time.

    python benchmarks/real_strict.py MODEL QUESTIONS.jsonl OUT.jsonl --results RESULTS.json
        [--draft DIR] [--eagle DIR] [--medusa DIR] [--each 3]

QUESTIONS.jsonl is the test set that `benchmarks/real_inputs.py questions` writes. Every decoder
answers each question in turn: the target alone, lenience's drafters, and `transformers`' own
generation: alone, with prompt lookup, and with the draft model as its assistant.

Each line of OUT.jsonl is one answer with its seconds, its passes, and whether its tokens are those
of the target alone. The command resumes. RESULTS.json holds the figures of all decoders, in all and
by category, and the seconds of a pass of the target by its number of tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_inputs import rows_of
from recording import digest_of, resumed, write_results

from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.session import Session
from lenience.runs.journal import Journal

TOKENS = 64
"""Maximum number of new tokens in an answer."""
MIDDLE = "skip:10,11,12,13,14,15"
"""Draft that leaves out six layers in the middle of the target."""
DECODERS: dict[str, dict[str, Any]] = {
    "target": {"rule": "target"},
    "ngram": {"drafter": "ngram", "window": 4},
    "suffix": {"drafter": "suffix", "window": 4},
    "suffix, tree": {"drafter": "suffix", "tree": "dynamic:8"},
    "skip": {"drafter": MIDDLE, "window": 3},
    "exit": {"drafter": "exit:20", "window": 2},
    "ngram>skip": {"drafter": f"ngram>{MIDDLE}", "window": 3},
}
"""Options of decoders without training by name; the first gives the reference answers."""
WITH_DRAFT: dict[str, dict[str, Any]] = {
    "draft, window 2": {"window": 2},
    "draft, window 4": {"window": 4},
    "ngram>draft": {"drafter": "ngram>model", "window": 4},
    "draft, tree": {"tree": "dynamic:6", "window": 3},
}
WITH_HEADS: dict[str, dict[str, Any]] = {
    "{heads}, window 2": {"window": 2},
    "{heads}, window 4": {"window": 4},
    "ngram|{heads}, tree": {"join": True, "tree": "dynamic:6", "window": 3},
}
"""Options by name for EAGLE or Medusa heads."""
THEIRS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10},
}
"""Options of `transformers`' generate by name."""
ASSISTED = "transformers, assisted"
RESAMPLES = 2000
LENGTHS = (1, 2, 3, 5, 7, 9, 17)
"""Numbers of tokens of timed passes."""
BEFORE = 100
REPEATS = 15


def decoders(heads: dict[str, Path], draft: bool) -> dict[str, dict[str, Any]]:
    """Return the options of our decoders by name."""
    made = {**DECODERS, **(WITH_DRAFT if draft else {})}
    for kind, path in heads.items():
        for name, given in WITH_HEADS.items():
            options = dict(given)
            joined = "ngram|" if options.pop("join", False) else ""
            options["drafter"] = f"{joined}{kind}:{path}"
            made[name.format(heads=kind)] = options
    return made


def ours(pair: Pair, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of our loop."""
    options = {"rule": "exact", **options}
    out = pair.generate(prompt, max_new_tokens=TOKENS, **options)
    return {
        "tokens": out.tokens,
        "passes": out.target_passes,
        "seconds": out.seconds,
    }


def theirs(pair: Pair, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of `transformers`' generate on the same model."""
    model: Any = pair.target.model
    ids = torch.tensor([prompt])
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=sorted(pair.target.eos_ids),
        **options,
    )
    seconds = time.perf_counter() - began
    hook.remove()
    tokens = out[0, len(prompt) :].tolist()
    return {"tokens": tokens, "passes": passes, "seconds": seconds}


Answerers = dict[str, tuple[Any, dict[str, Any]]]
"""The function and the options that answer, by decoder."""


def answerers(pair: Pair, heads: dict[str, Path]) -> Answerers:
    """Return how each decoder answers, by name."""
    found: Answerers = {
        name: (ours, options)
        for name, options in decoders(heads, pair.draft is not None).items()
    }
    found |= {name: (theirs, options) for name, options in THEIRS.items()}
    if pair.draft is not None:
        found[ASSISTED] = (theirs, {"assistant_model": pair.draft.model})
    return found


def answered(
    pair: Pair, row: dict[str, Any], by_name: Answerers
) -> Iterator[dict[str, Any]]:
    """Yield the record of each decoder's answer to a question."""
    message = [{"role": "user", "content": row["turns"][0]}]
    prompt = pair.target.encode(message)
    own: list[int] = []
    for name, (answer_by, options) in by_name.items():
        answer = answer_by(pair, prompt, options)
        own = own or answer["tokens"]
        yield {
            "id": f"{row['question_id']} {name}",
            "decoder": name,
            "category": row["category"],
            "prompt_tokens": len(prompt),
            "same": answer["tokens"] == own,
            **answer,
        }


def figures(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each decoder: tokens per pass, tokens per second, the speed-up over the
    target alone with a 95 % interval over resampled questions, and the number of answers that are
    the target's own."""
    by_decoder: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_decoder.setdefault(record["decoder"], []).append(record)
    own = by_decoder[next(iter(DECODERS))]
    found: dict[str, dict[str, Any]] = {}
    for name, some in by_decoder.items():
        tokens = sum(len(record["tokens"]) for record in some)
        found[name] = {
            "n": len(some),
            "same": sum(record["same"] for record in some),
            "tokens_per_second": tokens / sum(record["seconds"] for record in some),
            "tokens_per_pass": tokens / sum(record["passes"] for record in some),
            **speed_up(some, own),
        }
    return found


def speed_up(
    some: list[dict[str, Any]], own: list[dict[str, Any]]
) -> dict[str, float | list[float]]:
    """Return the ratio of a decoder's tokens per second to the target's on the same questions, and
    its 95 % interval."""
    counts = np.array(
        [[len(record["tokens"]) for record in rows] for rows in (some, own)]
    )
    seconds = np.array([[record["seconds"] for record in rows] for rows in (some, own)])
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    speeds = counts[:, drawn].sum(2) / seconds[:, drawn].sum(2)
    whole = counts.sum(1) / seconds.sum(1)
    low, high = np.percentile(speeds[0] / speeds[1], [2.5, 97.5])
    return {
        "speed_up": float(whole[0] / whole[1]),
        "speed_up_interval": [float(low), float(high)],
    }


def over_transformers(by_decoder: dict[str, dict[str, Any]]) -> float:
    """Return the speed of our fastest decoder over `transformers`' fastest."""
    theirs = {*THEIRS, ASSISTED} & by_decoder.keys()
    speeds = {name: row["tokens_per_second"] for name, row in by_decoder.items()}
    fastest = max(speed for name, speed in speeds.items() if name not in theirs)
    return fastest / max(speeds[name] for name in theirs)


def by_category(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return tokens per pass and per second of each decoder, by category."""
    found: dict[str, dict[str, Any]] = {}
    for category in dict.fromkeys(record["category"] for record in records):
        some = [record for record in records if record["category"] == category]
        found[category] = {
            name: {key: row[key] for key in ("tokens_per_pass", "tokens_per_second")}
            for name, row in figures(some).items()
        }
    return found


def pass_seconds(pair: Pair) -> dict[int, float]:
    """Return the median seconds of a pass of the target by its number of tokens, after a prefix of
    BEFORE tokens. A free draft that is always right would be faster than the target alone by the
    number of tokens times the first of these over the pass's own."""
    session = Session(pair.target, capacity=BEFORE + max(LENGTHS))
    rng = np.random.default_rng(0)
    prefix = rng.integers(1000, 2000, BEFORE).tolist()
    found: dict[int, float] = {}
    for length in LENGTHS:
        seconds = []
        for _ in range(REPEATS):
            tokens = rng.integers(1000, 2000, length).tolist()
            began = time.perf_counter()
            session.read([prefix + tokens], length)
            seconds.append(time.perf_counter() - began)
        found[length] = float(np.median(seconds))
    return found


def chosen(rows: list[dict[str, Any]], each: int | None) -> list[dict[str, Any]]:
    """Return the first `each` questions of each category, or all."""
    taken: dict[str, int] = {}
    found = []
    for row in rows:
        taken[row["category"]] = taken.get(row["category"], 0) + 1
        if each is None or taken[row["category"]] <= each:
            found.append(row)
    return found


def ask(
    pair: Pair, rows: list[dict[str, Any]], by_name: Answerers, journal: Journal
) -> list[dict[str, Any]]:
    """Return the records of all decoders' answers; those that the journal holds are not made
    again."""
    done = {record["id"] for record in journal.resume()}
    # a drafter's graphs are exported when it is first asked
    first = {"question_id": 0, "category": "", "turns": ["Hello"]}
    list(answered(pair, first, by_name))
    for number, row in enumerate(rows, 1):
        if all(f"{row['question_id']} {name}" in done for name in by_name):
            continue
        for record in answered(pair, row, by_name):
            if record["id"] not in done:
                journal.write(record)
        print(f"{number} questions", flush=True)
    wanted = {str(row["question_id"]) for row in rows}
    records = []
    for record in journal:
        asked = record["id"].partition(" ")[0] in wanted
        if asked and record["decoder"] in by_name:
            records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--draft")
    parser.add_argument("--eagle", type=Path)
    parser.add_argument("--medusa", type=Path)
    parser.add_argument("--each", type=int)
    args = parser.parse_args()
    heads = {"eagle": args.eagle, "medusa": args.medusa}
    trained = {kind: path for kind, path in heads.items() if path}
    pair = load_pair(
        args.model, args.draft, dtype="float32", device="cpu", compile=True
    )
    rows = chosen(rows_of(args.questions), args.each)
    about = {
        "models": pair.fingerprints,
        "heads": {kind: digest_of(path) for kind, path in trained.items()},
        "tokens": TOKENS,
    }
    journal = resumed(args.out, about)
    records = ask(pair, rows, answerers(pair, trained), journal)
    by_decoder = figures(records)
    seconds = pass_seconds(pair)
    results = {
        "decoders": by_decoder,
        "over_transformers": over_transformers(by_decoder),
        "categories": by_category(records),
        "pass_seconds": seconds,
        "pass_costs": {length: took / seconds[1] for length, took in seconds.items()},
    }
    write_results(args.results, results)
    print(json.dumps(results["decoders"]))


if __name__ == "__main__":
    main()
