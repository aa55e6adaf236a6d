"""What mining takes beside the book's way, on the built-in pair, and how often labels of drawn
answers repeat. Prints one JSON object.

    python benchmarks/mining.py --out benchmarks/results/mining.json

By the book (AutoJudge, Garipov 2025, algorithm 1) the target goes on after every swap alone: a pass
for each new token, and the prompt with what stands before the swap is read again each time. Ours
are the journal's own counts. `plainly` is the same search, each continuation drafted by the draft
model alone in windows of 4; `recalling` what `lenience mine` does on a CPU, which drafts with what
the sample's earlier responses say; `in_flight` what it does on a GPU, where windows are wider and
continuations that are likely to be asked for are decoded beside the one that is. `one_worker` and
`two_workers` are processes that have one thread each, after they have loaded their models. The
labels of all are the same, or it fails.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recording import recorded

from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import Continue, Dialogue, FinishedDialogue
from lenience.decoding.loading import load_pair
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.decoding.scheduler import (
    IN_FLIGHT,
    LONGEST,
    LONGEST_ON_CPU,
    DialogueLimits,
    converse,
)
from lenience.drafting.earlier_texts import Recalled
from lenience.drafting.parsing import parse_drafter
from lenience.mining.crew import HiredWorker, ProcessCrew, mined_by
from lenience.mining.search import Miner, SearchResult, search
from lenience.mining.work import SampleBatch, WorkerPlan, identity_of
from lenience.runs.record import MinedSample
from lenience.tasks import Sample, WordMath, take

AT_ONCE = 16
TEMPERATURE = 0.6
SEEDS = (1, 2)
"""Of the drawn answers, and the further draws of each label."""


class Book:
    """What the book's way takes for the continuations that are asked for."""

    def __init__(self) -> None:
        self.passes = self.tokens = 0

    def counted(self, search: Dialogue[SearchResult]) -> Dialogue[SearchResult]:
        """Yield the same dialogue, with its continuations counted."""
        answer: Any = None
        while True:
            try:
                question = search.send(answer)
            except StopIteration as end:
                found: SearchResult = end.value
                return found
            answer = yield question
            if isinstance(question, Continue):
                self.passes += len(answer)
                self.tokens += len(question.ids) + len(answer) - 1


def mined(
    pair: Pair, samples: Sequence[Sample], book: Book, **how: Any
) -> tuple[list[FinishedDialogue[SearchResult]], float]:
    """Return what is found on samples, and the seconds it took."""
    task = WordMath()
    prompts = [pair.target.encode(sample.prompt) for sample in samples]
    most = task.max_new_tokens
    miners = [Miner(task, sample, pair.target, most) for sample in samples]
    dialogues = (
        book.counted(miner.search(prompt)) for miner, prompt in zip(miners, prompts)
    )
    conversing = DialogueLimits(AT_ONCE, max(map(len, prompts)) + most, **how)
    began = time.perf_counter()
    ended = list(converse(pair, dialogues, conversing))
    seconds = time.perf_counter() - began
    return sorted(ended, key=lambda dialogue: dialogue.number), seconds


def counts(ended: list[FinishedDialogue[SearchResult]]) -> dict[str, int]:
    """Return what searches took in all."""
    names = ("target_passes", "target_tokens", "unused_tokens", "draft_tokens")
    return {
        name: sum(getattr(dialogue.cost, name) for dialogue in ended) for name in names
    }


class Loaded:
    """A crew of workers that have their models."""

    at_once = True

    def __init__(self, number: int):
        crew = ProcessCrew(WorkerPlan(threads=1), number)
        self.most = number
        self.workers = [crew.hire(i) for i in range(number)]

    def hire(self, number: int) -> HiredWorker | None:
        return self.workers[number]

    def stop(self) -> None: ...

    def close(self) -> None: ...


def by_workers(
    pair: Pair, samples: Sequence[Sample], number: int
) -> tuple[list[Any], float]:
    """Return what workers of one thread each find on samples, and the seconds it took."""
    crew = Loaded(number)
    ids = [sample.id for sample in samples]
    for worker in crew.workers:
        assert worker is not None
        list(worker.mine(SampleBatch(ids[:2], {"max_new_tokens": 320}, 1)))  # warm-up
    work = SampleBatch(ids, {"max_new_tokens": 320}, AT_ONCE // number)
    began = time.perf_counter()
    records = list(mined_by(crew, work, identity_of(pair, WordMath())))
    seconds = time.perf_counter() - began
    by_id = {
        record["id"]: MinedSample.read(record, "a worker's record")
        for record in records
    }
    return [by_id[id].mismatches for id in ids], seconds


def drawn_again(
    task: WordMath, sample: Sample, mined: MinedSample, pair: Pair
) -> Dialogue[list]:
    """Yield whether each of a sample's swaps changes the answer under another noise."""
    labels = []
    for mismatch in mined.mismatches:
        answers = []
        for token in (mismatch.target_token, mismatch.draft_token):
            response = [*mined.final_ids[: mismatch.position], token]
            if token not in pair.target.eos_ids:
                left = task.max_new_tokens - len(response)
                ids = mined.prompt_ids + response
                response += yield Continue(
                    ids, left, prompt_length=len(mined.prompt_ids)
                )
            answers.append(task.answer(pair.target.decode(response), sample))
        labels.append(task.same(answers[0], answers[1], sample) is not True)
    return labels


def repeating(pair: Pair, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return how often labels of drawn answers come out the same under another noise."""
    task = WordMath()
    decoder = Decoder.of(temperature=TEMPERATURE, max_new_tokens=task.max_new_tokens)
    found = {
        sample.id: sample for sample in search(pair, task, samples, decoder, AT_ONCE)
    }
    known = [
        found[sample.id]
        for sample in samples
        if found[sample.id].answers.target is not None
    ]
    by_id = {sample.id: sample for sample in samples}
    first = np.array([bool(m.important) for sample in known for m in sample.mismatches])
    capacity = max(len(sample.prompt_ids) for sample in known) + task.max_new_tokens
    again: list[Any] = []
    for seed in SEEDS:
        sampling = Decoder.of(temperature=TEMPERATURE, seed=seed)
        dialogues: Iterator[Any] = (
            drawn_again(task, by_id[sample.id], sample, pair) for sample in known
        )
        ended = converse(pair, dialogues, DialogueLimits(AT_ONCE, capacity, sampling))
        labels = [
            sample.result for sample in sorted(ended, key=lambda sample: sample.number)
        ]
        again.append(np.array([label for of_sample in labels for label in of_sample]))
    drawn = np.stack(again)  # [seeds, labels]
    return {
        "temperature": TEMPERATURE,
        "seeds": len(SEEDS),
        "labels": len(first),
        "important": int(first.sum()),
        "same_label": float((drawn == first).mean()),
        "important_again": float(drawn[:, first].mean()),
        "harmless_again": float(1 - drawn[:, ~first].mean()),
    }


def ways(
    pair: Pair, samples: Sequence[Sample]
) -> tuple[dict[str, dict[str, float]], int]:
    """Return what each way to mine takes in all, and how many mismatches there are. Raises
    RuntimeError where they do not find the same."""
    kinds: dict[str, dict[str, Any]] = {
        "plainly": {"drafter": parse_drafter("model"), "window": 4, "in_flight": 1},
        "recalling": {"drafter": Recalled(), "window": LONGEST_ON_CPU, "in_flight": 1},
        "in_flight": {"drafter": Recalled(), "window": LONGEST, "in_flight": IN_FLIGHT},
    }
    rows: dict[str, dict[str, float]] = {}
    labels = []
    for name, how in kinds.items():
        book = Book()
        mined(pair, samples[:2], Book(), **how)  # warm-up
        ended, seconds = mined(pair, samples, book, **how)
        labels.append([dialogue.result.mismatches for dialogue in ended])
        rows["book"] = {"target_passes": book.passes, "target_tokens": book.tokens}
        rows[name] = {**counts(ended), "seconds": seconds}
    for name, number in (("one_worker", 1), ("two_workers", 2)):
        found, seconds = by_workers(pair, samples, number)
        labels.append(found)
        rows[name] = {"seconds": seconds}
    if any(found != labels[0] for found in labels):
        raise RuntimeError("the ways to mine do not find the same")
    return rows, sum(map(len, labels[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument(
        "--drawn", type=int, default=32, help="samples whose answers are drawn"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = load_pair(compile=True)
    samples = take(WordMath(), "train", args.limit)
    rows, mismatches = ways(pair, samples)
    result = {
        "machine": machine(pair),
        "samples": args.limit,
        "mismatches": mismatches,
        "a_sample": {
            name: {key: round(value / args.limit, 3) for key, value in row.items()}
            for name, row in rows.items()
        },
        "drawn": repeating(pair, samples[: args.drawn]),
    }
    result = recorded(result)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
