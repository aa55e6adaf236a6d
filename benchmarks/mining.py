"""What mining takes beside the book's way, on the built-in pair. Prints one JSON object.

    python benchmarks/mining.py --limit 48 --out benchmarks/results/mining.json

By the book (AutoJudge, Garipov 2025, algorithm 1) the target goes on after every swap alone: a pass
for each new token, and the prompt with what stands before the swap is read again each time. Ours
are the journal's own counts. `plainly` is the same search, each continuation drafted by the draft
model alone in windows of 4; `recalling` what `lenience mine` does, which drafts with what the
sample's earlier responses say; `wide` that with windows of 32, as on a GPU. The labels of all are
the same, or it fails.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from lenience.decoding.branches import LONGEST, LONGEST_ON_CPU, Conversing, converse
from lenience.decoding.dialogue import Continue, Dialogue, Ended
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSpec
from lenience.drafting.recalled import Recalled
from lenience.drafting.registry import parse_drafter
from lenience.evaluation.table import machine
from lenience.mining.search import Found, Miner
from lenience.tasks import WordMath, take

AT_ONCE = 16


class Book:
    """What the book's way takes for the continuations that are asked for."""

    def __init__(self) -> None:
        self.passes = self.tokens = 0

    def counted(self, search: Dialogue[Found]) -> Dialogue[Found]:
        """The same dialogue, with its continuations counted."""
        answer: Any = None
        while True:
            try:
                question = search.send(answer)
            except StopIteration as end:
                found: Found = end.value
                return found
            answer = yield question
            if isinstance(question, Continue):
                self.passes += len(answer)
                self.tokens += len(question.ids) + len(answer) - 1


def mined(
    pair: Pair, limit: int, book: Book, drafter: DrafterSpec, window: int, in_flight: int = 1
) -> tuple[list[Ended[Found]], float]:
    """What is found on the first samples of the training split, and the seconds it took."""
    task = WordMath()
    samples = take(task, "train", limit)
    prompts = [pair.target.encode(sample.prompt) for sample in samples]
    most = task.max_new_tokens
    miners = [Miner(task, sample, pair.target, most) for sample in samples]
    dialogues = (book.counted(one.search(prompt)) for one, prompt in zip(miners, prompts))
    began = time.perf_counter()
    capacity = max(map(len, prompts)) + most
    how = Conversing(AT_ONCE, capacity, in_flight=in_flight, drafter=drafter, window=window)
    ended = list(converse(pair, dialogues, how))
    seconds = time.perf_counter() - began
    return sorted(ended, key=lambda one: one.number), seconds


def counts(ended: list[Ended[Found]]) -> dict[str, int]:
    """What searches took in all."""
    names = ("target_passes", "target_tokens", "draft_tokens")
    return {name: sum(getattr(one.cost, name) for one in ended) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair = load_pair(compile=True)
    kinds = {
        "plainly": (parse_drafter("model"), 4),
        "recalling": (Recalled(), LONGEST_ON_CPU),
        "wide": (Recalled(), LONGEST),
    }
    rows: dict[str, Any] = {}
    labels = []
    for name, (drafter, window) in kinds.items():
        book = Book()
        mined(pair, 2, Book(), drafter, window)  # warm-up
        ended, seconds = mined(pair, args.limit, book, drafter, window)
        labels.append([one.result for one in ended])
        rows["book"] = {"target_passes": book.passes, "target_tokens": book.tokens}
        rows[name] = {**counts(ended), "seconds": seconds}
    if any(found != labels[0] for found in labels):
        raise RuntimeError("the ways to draft do not find the same")
    for row in rows.values():
        row.update({key: round(value / args.limit, 3) for key, value in row.items()})
    mismatches = sum(len(found.mismatches) for found in labels[0])
    result = {
        "machine": machine(pair),
        "samples": args.limit,
        "mismatches": mismatches,
        "a_sample": rows,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
