"""The search for important tokens (AutoJudge, Garipov 2025, algorithm 1), and the hidden states of what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.types import Step
from lenience.decoding.loop import Request, decode
from lenience.decoding.pair import Pair
from lenience.decoding.response import Limits
from lenience.models.session import Session, common
from lenience.rules.strict import Exact
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import check_prompts, describe
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    pass

WINDOW = 4
"""Tokens drafted in a cycle of the continuations; they are exact, so it changes their speed alone."""


@dataclass
class Mismatch:
    """A position, counted in new tokens from 0, where the draft would have put another token."""

    position: int
    target_token: int
    draft_token: int
    important: bool | None
    """None where the answer could not be parsed."""


@dataclass
class Found:
    """What the search found on one prompt."""

    own: list[int]
    """The target's own response."""
    final: list[int]
    """The response after all harmless swaps."""
    mismatches: list[Mismatch]
    """In order."""
    answer: str | None
    """The target's own answer, which every other one is compared with."""


class Miner:
    """Searches one prompt at a time. `predict` gives the draft's greedy token for each position of a response from a start
    on; what the target is asked is asked of the caller, so that many searches can be decoded together."""

    def __init__(
        self,
        task: Task,
        predict: Callable[[list[int], list[int], int], list[int]],
        decode: Callable[[list[int]], str],
        eos_ids: frozenset[int],
        max_new_tokens: int,
    ):
        self.task, self.predict, self.decode = task, predict, decode
        self.eos_ids, self.max_new_tokens = eos_ids, max_new_tokens

    def search(self, prompt: list[int]) -> Generator[tuple[list[int], int], list[int], Found]:
        """Yields (ids, limit) and wants sent how the target goes on after those ids, greedily, until EOS, which is
        included, or `limit` new tokens; returns what was found."""
        own = yield prompt, self.max_new_tokens
        answer = self.task.answer(self.decode(own))
        response, found, start = own, list[Mismatch](), 0
        while start < len(response):
            guesses = dict(enumerate(self.predict(prompt, response, start), start))
            # the response up to a mismatch is settled, and so are the draft's guesses as long as no swap is adopted
            mismatches = [i for i in guesses if guesses[i] != response[i]]
            start = len(response)
            for i in mismatches:
                swapped, same = yield from self._swap(prompt, response[:i], guesses[i], answer)
                found.append(Mismatch(i, response[i], guesses[i], None if same is None else not same))
                if same:
                    response, start = swapped, i + 1
                    break
        return Found(own, response, found, answer)

    def _swap(
        self, prompt: list[int], before: list[int], token: int, answer: str | None
    ) -> Generator[tuple[list[int], int], list[int], tuple[list[int], bool | None]]:
        """Put `token` after `before` and let the target go on: the new response, and whether its answer is the same."""
        if answer is None:
            return [], None
        response = [*before, token]
        if token not in self.eos_ids and len(response) < self.max_new_tokens:
            response += yield prompt + response, self.max_new_tokens - len(response)
        return response, self.task.same(self.task.answer(self.decode(response)), answer)


class _Search:
    """The search on one sample, between one continuation and the next. Its cost is counted as if it were decoded alone, so that
    it does not depend on the company."""

    def __init__(self, pair: Pair, task: Task, sample: Sample, max_new_tokens: int):
        self.pair, self.task, self.sample, self.began = pair, task, sample, time.perf_counter()
        self.prompt = pair.target.encode(sample.prompt)
        room = min(lm.context or 1 << 30 for lm in (pair.target, pair.draft)) - len(self.prompt)
        self.draft = Session(pair.draft, capacity=len(self.prompt) + min(max_new_tokens, room))
        self.ctx = Context([Row(Noise(0, b""), self.prompt)], processors=pair.target.processors(sampling=False) or None)
        self.cost = {"target_passes": 0, "target_tokens": 0, "draft_tokens": 0}
        miner = Miner(task, self._predict, pair.target.decode, pair.target.eos_ids, min(max_new_tokens, room))
        self._steps = miner.search(self.prompt)
        self._ids, self._tokens = list[int](), list[int]()  # the continuation that is being decoded
        self._unread = {"target": 0, "draft": 0}  # how many tokens of it a model has not read
        self._started = False

    def ask(self, number: int) -> Request | None:
        """The next continuation to decode; None where the search is over."""
        try:
            # nothing can be sent before the first continuation
            ids, limit = self._steps.send(self._tokens) if self._started else next(self._steps)
        except StopIteration as end:
            self.found: Found = end.value
            return None
        unread = len(ids) - min(common([*self._ids, *self._tokens[:-1]], ids), len(ids) - 1)
        self._ids, self._tokens, self._unread, self._started = list(ids), [], dict.fromkeys(self._unread, unread), True
        return Request(Row(self.ctx.rows[0].noise, list(ids)), Limits(self.pair.target, limit, len(ids)), number)

    def add(self, step: Step) -> None:
        self._tokens += step.tokens
        self.cost["target_passes"] += 1
        self.cost["target_tokens"] += self._unread["target"] + step.drafted
        self._unread["target"] = 1
        if step.drafted:
            self.cost["draft_tokens"] += self._unread["draft"] + step.drafted - 1
            whole = step.accepted_exact + step.accepted_lenient == step.drafted  # then its last token is unread as well
            self._unread["draft"] = 2 if whole else 1
        else:
            self._unread["draft"] += len(step.tokens)

    def record(self, together: int) -> dict[str, Any]:
        """The journal's record; `together` searches shared the time."""
        found, pair = self.found, self.pair
        return {
            "id": self.sample.id,
            "prompt_ids": self.prompt,
            "response_ids": found.own,
            "final_ids": found.final,
            "mismatches": [asdict(mismatch) for mismatch in found.mismatches],
            "answers": {
                "target": found.answer,
                "final": self.task.answer(pair.target.decode(found.final)),
                "reference": self.sample.reference,
            },
            "cost": {**self.cost, "seconds": round((time.perf_counter() - self.began) / together, 3)},
        }

    def _predict(self, prompt: list[int], response: list[int], start: int) -> list[int]:
        """The draft re-encodes the response in one parallel pass."""
        reading = self.draft.read([prompt + response[:-1]], len(response) - start)
        self.cost["draft_tokens"] += reading.read[0]
        logits = self.ctx.process(reading.logits, torch.tensor([response[:-1]]))  # [1, len(response) - start, V]
        return logits[0, :, : self.pair.target.width].argmax(-1).tolist()


def search(pair: Pair, task: Task, samples: Sequence[Sample], max_new_tokens: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """The journal records of `samples`, as they are finished; `batch_size` searches are decoded together. A search keeps its
    row of the caches from one continuation to the next, so that only what changed is read."""
    fresh, active, done = iter(enumerate(samples)), dict[int, _Search](), list[dict[str, Any]]()
    size = min(batch_size, len(samples))

    def follow(ended: Request | None) -> Request | None:
        if ended:
            if request := active[ended.number].ask(ended.number):
                return request
            done.append(active.pop(ended.number).record(size))
        for number, sample in fresh:
            active[number] = _Search(pair, task, sample, max_new_tokens)
            return active[number].ask(number)
        return None

    longest = max((len(pair.target.encode(sample.prompt)) for sample in samples), default=0) + max_new_tokens
    session, drafter = pair.engine(size, longest, WINDOW, beside=[pair.draft])  # each search has one more
    ctx = Context(processors=pair.target.processors(sampling=False) or None)
    for request, step in decode(session, drafter, Exact(), ctx, follow, size):
        active[request.number].add(step)
        yield from done
        done.clear()
    yield from done


def mine(
    pair: Pair,
    task: Task,
    folder: Path,
    *,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Mine the first `limit` training samples of a task into a run folder, `batch_size` of them together; what its journal
    holds is not done again. A finished sample is in the journal at once; when all are, they are put into the task's order.

    Yields (samples done, samples wanted, the record just finished), at first with None. Raises InputError where the
    folder was made with other models or options, its journal is broken, or memory has no room for the caches.
    """
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be 1 or more")
    samples = take(task, "train", limit)
    max_new_tokens = check_prompts(pair, task, samples, max_new_tokens)
    open_run(folder, describe(pair, task, split="train", max_new_tokens=max_new_tokens, seed=0))
    journal = Journal(folder / "journal.jsonl")
    finished = {record["id"] for record in journal.resume()}
    done = sum(sample.id in finished for sample in samples)
    yield done, len(samples), None
    left = [sample for sample in samples if sample.id not in finished]
    for record in search(pair, task, left, max_new_tokens, batch_size):
        journal.append(record)
        done += 1
        yield done, len(samples), record
    journal.sort([sample.id for sample in samples])


# ---- hidden states of the mismatches
