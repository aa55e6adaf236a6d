"""The search for important tokens, and a mining run that keeps what it finds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.files import alone
from lenience.core.noise import Noise
from lenience.core.progress import Progress, silent
from lenience.core.types import Step
from lenience.decoding.certified import heads_of, setting_without_paths
from lenience.decoding.loop import Request, decode
from lenience.decoding.options import Decoding
from lenience.decoding.pair import Pair
from lenience.decoding.response import Response
from lenience.mining.on_policy import check_policy, search_on_policy
from lenience.mining.resampling import Resampling, resample
from lenience.models.generation_config import processors_of
from lenience.models.lm import LM
from lenience.models.session import Session, common
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import (
    MinedAnswers,
    MinedSample,
    MiningCost,
    Mismatch,
    check_prompts,
    describe,
    mined_first,
    mined_samples,
)
from lenience.runs.uses import prompt_digest
from lenience.tasks import Sample, Task, as_task, take

T = TypeVar("T")
WINDOW = 4
"""Tokens drafted in a cycle of the continuations; they are exact, so it changes their speed
alone."""


@dataclass(frozen=True)
class MineConfig:
    """What is mined."""

    limit: int | None = None
    """How many training samples; None for all."""
    max_new_tokens: int | None = None
    """The length limit of a response; None for the task's own."""
    batch_size: int = 16
    """How many samples are searched together."""
    first: bool = False
    """Take the first samples of the split, instead of random ones: what is left for certificates
    is another kind of prompts where the data are sorted."""
    seed: int = 0
    """Of the choice of samples."""
    resamples: int = 0
    """How often each swap that changed the answer is continued once more, by chance."""
    policy: Decoding | None = None
    """Whose answers are mined, and not the target's: the tokens that it kept by lenience."""


@dataclass(frozen=True)
class MinedCounts:
    """What a journal holds."""

    samples: int
    mismatches: int
    important: int
    abstained: int
    """Of how many mismatches no answer was found that could be compared."""
    unanswered: int = 0
    """In how many samples none was found in the target's own response."""
    cut_off: int = 0
    """How many of these responses ended at the length limit."""


@dataclass(frozen=True)
class Found:
    """What the search found on one prompt."""

    target_response: list[int]
    """The target's own response."""
    final_response: list[int]
    """The response after all harmless swaps."""
    mismatches: list[Mismatch]
    """In order."""
    answer: str | None
    """The target's own answer, which every other one is compared with."""


Continuations = Generator[tuple[list[int], int], list[int], T]
"""Yields (ids, limit) and wants sent how the target goes on after those ids, greedily, until EOS,
which is included, or `limit` new tokens."""


class Miner:
    """Searches one sample for important tokens (AutoJudge, Garipov 2025, algorithm 1). `predict`
    gives the draft's greedy token for each position of a response from a start on; what the target
    is asked is asked of the caller, so that many searches can be decoded together."""

    def __init__(
        self,
        task: Task,
        sample: Sample,
        predict: Callable[[list[int], list[int], int], list[int]],
        target: LM,
        max_new_tokens: int,
    ):
        self.task, self.sample, self.predict = task, sample, predict
        self.target, self.max_new_tokens = target, max_new_tokens

    def answer(self, response: list[int]) -> str | None:
        """The final answer in a response."""
        return self.task.answer(self.target.decode(response), self.sample)

    def search(self, prompt: list[int]) -> Continuations[Found]:
        """Try each mismatch from left to right, and keep the swaps that leave the answer as it
        is."""
        own = yield prompt, self.max_new_tokens
        answer = self.answer(own)
        response, mismatches, start = own, list[Mismatch](), 0
        while start < len(response):
            guesses = dict(enumerate(self.predict(prompt, response, start), start))
            differing = [i for i, token in guesses.items() if token != response[i]]
            start = len(response)
            # the response up to a mismatch is settled, and so are the draft's guesses as long as no
            # swap is adopted
            for i in differing:
                swapped, same = yield from self._swap(prompt, response[:i], guesses[i], answer)
                mismatches.append(
                    Mismatch(
                        position=i,
                        target_token=response[i],
                        draft_token=guesses[i],
                        important=None if same is None else not same,
                    )
                )
                if same:
                    response, start = swapped, i + 1
                    break
        return Found(own, response, mismatches, answer)

    def _swap(
        self, prompt: list[int], before: list[int], token: int, answer: str | None
    ) -> Continuations[tuple[list[int], bool | None]]:
        """Put `token` after `before` and let the target go on: the new response, and whether its
        answer is the same."""
        if answer is None:
            return [], None
        response = [*before, token]
        if token not in self.target.eos_ids and len(response) < self.max_new_tokens:
            response += yield prompt + response, self.max_new_tokens - len(response)
        return response, self.task.same(self.answer(response), answer, self.sample)


class _Search:
    """The search on one sample, between one continuation and the next. Its cost is counted as if it
    were decoded alone, so that it does not depend on the company."""

    def __init__(self, pair: Pair, task: Task, sample: Sample, max_new_tokens: int):
        self.sample, self.began = sample, time.perf_counter()
        self.target, draft = pair.target, pair.require_draft("mining")
        self.prompt = pair.target.encode(sample.prompt)
        shorter = min(lm.context_length or 1 << 30 for lm in pair.models.values())
        most = min(max_new_tokens, shorter - len(self.prompt))
        self.draft = Session(draft, capacity=len(self.prompt) + most)
        self.noise = Noise(0, b"")
        processors = processors_of(pair.target, sampling=False) or None
        self.ctx = Context([Row(self.noise, self.prompt)], processors=processors)
        self.target_passes = self.target_tokens = self.draft_tokens = 0
        self.miner = Miner(task, sample, self._predict, pair.target, most)
        self._steps = self.miner.search(self.prompt)
        self._ids, self._tokens = list[int](), list[int]()
        """The continuation that is being decoded."""
        self._target_unread = self._draft_unread = 0
        """How many tokens of it a model has not read."""
        self._started = False
        self.found: Found | None = None
        """What came out, once the search is over."""

    def next_request(self, number: int) -> Request | None:
        """The next continuation to decode; None where the search is over."""
        try:
            # nothing can be sent before the first continuation
            ids, limit = self._steps.send(self._tokens) if self._started else next(self._steps)
        except StopIteration as end:
            self.found = end.value
            return None
        known = common([*self._ids, *self._tokens[:-1]], ids)
        self._target_unread = self._draft_unread = len(ids) - min(known, len(ids) - 1)
        self._ids, self._tokens, self._started = list(ids), [], True
        response = Response(self.target, limit, len(ids))
        return Request(Row(self.noise, list(ids)), response, number)

    def add(self, step: Step) -> None:
        """Take note of what a cycle kept."""
        self._tokens += step.tokens
        self.target_passes += 1
        self.target_tokens += self._target_unread + step.drafted
        self._target_unread = 1
        if step.drafted:
            self.draft_tokens += self._draft_unread + step.drafted - 1
            whole = step.accepted_exact + step.accepted_lenient == step.drafted
            self._draft_unread = 2 if whole else 1  # of a whole window the last token too
        else:
            self._draft_unread += len(step.tokens)

    def record(self, together: int) -> MinedSample:
        """The journal's record; `together` searches shared the time."""
        assert self.found is not None
        found = self.found
        return MinedSample(
            id=self.sample.id,
            prompt_ids=self.prompt,
            response_ids=found.target_response,
            final_ids=found.final_response,
            mismatches=found.mismatches,
            answers=MinedAnswers(
                target=found.answer,
                final=self.miner.answer(found.final_response),
                reference=self.sample.reference,
            ),
            cost=MiningCost(
                target_passes=self.target_passes,
                target_tokens=self.target_tokens,
                draft_tokens=self.draft_tokens,
                seconds=round((time.perf_counter() - self.began) / together, 3),
            ),
        )

    def _predict(self, prompt: list[int], response: list[int], start: int) -> list[int]:
        """The draft re-encodes the response in one parallel pass."""
        reading = self.draft.read([prompt + response[:-1]], len(response) - start)
        self.draft_tokens += reading.tokens_read[0]
        # [1, len(response) - start, V]
        logits = self.ctx.process(reading.logits, torch.tensor([response[:-1]]))
        return logits[0, :, : self.target.vocab_size].argmax(-1).tolist()


def search(
    pair: Pair, task: Task, samples: Sequence[Sample], max_new_tokens: int, batch_size: int
) -> Iterator[MinedSample]:
    """What is found on `samples`, as each is finished; `batch_size` searches are decoded together.
    A search keeps its row of the caches from one continuation to the next, so that only what
    changed is read."""
    waiting, active = iter(enumerate(samples)), dict[int, _Search]()
    finished, size = list[MinedSample](), min(batch_size, len(samples))

    def next_request(ended: Request | None) -> Request | None:
        if ended:
            if request := active[ended.number].next_request(ended.number):
                return request
            finished.append(active.pop(ended.number).record(size))
        for number, sample in waiting:
            active[number] = _Search(pair, task, sample, max_new_tokens)
            return active[number].next_request(number)
        return None

    longest = max((len(pair.target.encode(sample.prompt)) for sample in samples), default=0)
    setup = pair.setup(Decoding(window=WINDOW, max_new_tokens=max_new_tokens))
    each_search_has = [pair.require_draft("mining")]
    capacity = longest + max_new_tokens + WINDOW
    session, drafter = pair.engine(setup, WINDOW, size, capacity, beside=each_search_has)
    processors = processors_of(pair.target, sampling=False) or None
    ctx = Context(window=WINDOW, processors=processors)
    for request, step in decode(session, drafter, setup.rule, ctx, next_request, size=size):
        active[request.number].add(step)
        yield from finished
        finished.clear()
    yield from finished


def mine(
    pair: Pair,
    task: Task,
    folder: Path,
    config: MineConfig = MineConfig(),
    progress: Progress = silent,
) -> MinedCounts:
    """Mine a task's training samples into a run folder; what its journal holds is not done again. A
    finished sample is in the journal at once; when all are, they are put into the task's order.

    Returns what the journal then holds. Raises InputError where the folder was made with other
    models or options, its journal is broken, or memory has no room for the caches.
    """
    task = as_task(task)
    if config.batch_size < 1:
        raise InputError(f"batch_size {config.batch_size}: must be 1 or more")
    if config.policy:
        check_policy(config.policy)
    pair.require_draft("mining")
    drawn = "first" if config.first or mined_first(folder) else "random"
    samples = _choose(pair, task, config, drawn)
    max_new_tokens = check_prompts(pair, task, samples, config.max_new_tokens)
    asked = dict(max_new_tokens=max_new_tokens, seed=config.seed, drawn=drawn)
    policy, told = _policy(pair, config.policy, max_new_tokens)
    open_run(folder, describe(pair, task, split="train", policy=told, **asked))
    with alone(folder, "mining"):
        journal = Journal(folder / "journal.jsonl")
        journal.resume()
        finished = {mined.id for mined in mined_samples(journal)}
        left = [sample for sample in samples if sample.id not in finished]
        done = len(samples) - len(left)
        progress("mining", done, len(samples))
        found = (
            search(pair, task, left, max_new_tokens, config.batch_size)
            if policy is None
            else search_on_policy(pair, task, left, policy, config.batch_size)
        )
        for mined in found:
            journal.append(mined.to_json())
            done += 1
            progress("mining", done, len(samples))
        journal.sort([sample.id for sample in samples])
        if config.resamples:
            resampling = Resampling(config.resamples, max_new_tokens, config.batch_size)
            resample(pair, task, folder, samples, resampling, progress=progress)
        return _counts(journal, max_new_tokens)


def _choose(pair: Pair, task: Task, config: MineConfig, drawn: str) -> list[Sample]:
    """The samples that are mined: of random ones, more begin with the fewer; and none that a head
    whose answers are mined has learned from, as it is surer of those."""
    if config.limit is not None and config.limit < 1:
        raise InputError(f"limit {config.limit}: must be 1 or more")
    heads = heads_of(config.policy.rule, config.policy.stop) if config.policy else []
    known = {content for head in heads for content in head.head.prompts}
    samples = take(task, "train", None if known or drawn == "random" else config.limit)
    if drawn == "random":
        random.Random(f"mining {config.seed}").shuffle(samples)
    if not known:
        return samples[: config.limit]
    fresh = (one for one in samples if prompt_digest(pair.target.encode(one.prompt)) not in known)
    chosen = list(islice(fresh, config.limit))
    if not chosen:
        raise InputError(f"--policy {config.policy}: its head has learned from every sample")
    return chosen


def _policy(
    pair: Pair, policy: Decoding | None, max_new_tokens: int
) -> tuple[Decoding | None, dict[str, Any] | None]:
    """Whose answers are mined, and what the run says of it."""
    if policy is None:
        return None, None
    policy = replace(policy, max_new_tokens=max_new_tokens)
    pair.check(policy)
    heads = [head.head.fingerprint for head in heads_of(policy.rule, policy.stop)]
    return policy, {"setting": str(setting_without_paths(policy)), "heads": heads}


def _counts(journal: Journal, max_new_tokens: int) -> MinedCounts:
    """What a mining journal holds."""
    mined = list(mined_samples(journal))
    labels = [mismatch.important for sample in mined for mismatch in sample.mismatches]
    unanswered = [sample for sample in mined if sample.answers.target is None]
    return MinedCounts(
        samples=len(mined),
        mismatches=len(labels),
        important=labels.count(True),
        abstained=labels.count(None),
        unanswered=len(unanswered),
        cut_off=sum(len(sample.response_ids) >= max_new_tokens for sample in unanswered),
    )
