"""The search for important tokens, and mining runs that record its results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lenience.core.errors import InputError
from lenience.core.files import alone
from lenience.core.progress import Progress, silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import (
    Compare,
    Continue,
    Dialogue,
    FinishedDialogue,
    Predict,
)
from lenience.decoding.guesses import check_guesses
from lenience.decoding.pair import Pair
from lenience.decoding.response import completes_stop, until_stop
from lenience.decoding.task_models import task_for
from lenience.drafting.base import DrafterSpec
from lenience.drafting.model import DraftModel
from lenience.mining.by_likelihood import scores
from lenience.mining.crew import Crew, mined_by
from lenience.mining.on_policy import check_policy, search_on_policy
from lenience.mining.resampling import Resampling, resample
from lenience.mining.work import SampleBatch, identity_of
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.runs.answers import for_task
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import (
    MinedAnswers,
    MinedSample,
    MiningCost,
    Mismatch,
    describe,
    mined_first,
    mined_samples,
)
from lenience.runs.uses import check_prompts, prompt_digest
from lenience.tasks import Sample, Task, take

DRAFT_MODEL = DraftModel()
LEAST_SCORE = -11.4
"""Default score under which a mismatch is important, for labels by likelihood."""


@dataclass(frozen=True)
class MineConfig:
    """Settings of a mining run."""

    limit: int | None = None
    """Number of training samples; None for all."""
    max_new_tokens: int | None = None
    """Maximum number of tokens in a response; None for the task's default."""
    batch_size: int = 16
    """Number of samples searched concurrently."""
    first: bool = False
    """True to take the first samples of the split instead of random samples. If the data are
    sorted, the prompts left for certificates are then of another kind."""
    seed: int = 0
    """Random seed for choosing samples."""
    resamples: int = 0
    """Number of sampled continuations of each swap that changed the answer."""
    policy: Decoder | None = None
    """Decoder whose answers are mined instead of the target's: its leniently accepted tokens are
    labelled."""
    temperature: float = 0.0
    """Sampling temperature of the target's answers. Above 0, target and draft are drawn with the
    same keys, so a swap is compared under the same noise (AutoJudge, appendix A)."""
    top_k: int | None = None
    """Truncation when sampling, together with `top_p`; None for the model's own settings."""
    top_p: float | None = None
    draw_seed: int = 0
    """Random seed for sampled mining."""
    drafter: DrafterSpec = DRAFT_MODEL
    """Drafter whose tokens are swapped in."""
    answers_only: bool = False
    """True to record the target's answers without a search: training data for drafters and
    trees."""
    labels: Literal["answers", "likelihood"] = "answers"
    """Method of labelling a mismatch: by the final answer after a swap, or by the likelihood of the
    target's own response after it (see `scores`), for tasks without answers."""
    least: float | None = None
    """Score in nats under which a mismatch is important, for labels by likelihood; None for
    LEAST_SCORE."""

    def __post_init__(self) -> None:
        if self.temperature and (self.policy or self.resamples):
            what = "policy" if self.policy else "resamples"
            raise InputError(
                f"{what}: needs greedy answers; leave it or the temperature out"
            )
        if not self.temperature and (self.top_k, self.top_p) != (None, None):
            raise InputError("top_k, top_p: need a temperature")
        if self.batch_size < 1:
            raise InputError(f"batch_size {self.batch_size}: must be 1 or more")
        if self.policy:
            check_policy(self.policy)
        if not self.searches_with_draft:
            self._check_drafter()
        if self.labels == "likelihood":
            self._check_likelihood()
        elif self.least is not None:
            raise InputError("least: needs labels by likelihood")

    @property
    def searches_with_draft(self) -> bool:
        """Return True if the draft model's tokens are swapped in."""
        return self.drafter == DRAFT_MODEL and not self.answers_only

    @property
    def least_score(self) -> float:
        """Return the score under which a mismatch is important."""
        return LEAST_SCORE if self.least is None else self.least

    def _check_drafter(self) -> None:
        """Raise InputError for options that need the draft model's mismatches."""
        what = "answers_only" if self.answers_only else f"drafter {self.drafter}"
        if self.answers_only and self.drafter != DRAFT_MODEL:
            raise InputError(
                f"{what}: swaps no tokens in; leave out drafter {self.drafter}"
            )
        if self.policy:
            raise InputError(f"{what}: a policy names its own drafter; leave out one")
        if self.resamples and self.answers_only:
            raise InputError(
                f"{what}: there are no swaps to continue; leave out resamples"
            )
        check_guesses(self.drafter)

    def _check_likelihood(self) -> None:
        """Raise InputError for options that labels by likelihood do not have."""
        others = {
            "temperature": self.temperature,
            "policy": self.policy,
            "resamples": self.resamples,
            "answers_only": self.answers_only,
        }
        for name, value in others.items():
            if value:
                raise InputError(
                    f"{name}: cannot be combined with labels by likelihood; leave one out"
                )

    def decoder(self, task: Task) -> Decoder:
        """Return the decoder of the target's own responses."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "drafter")
        options = {name: getattr(self, name) for name in names} | {
            "seed": self.draw_seed
        }
        return for_task(Decoder.of(options), options, task)

    def asked(self, decoder: Decoder) -> dict[str, Any]:
        """Return the settings that the run records."""
        stops = list(decoder.stop_strings) or None
        limits = {"max_new_tokens": decoder.max_new_tokens, "stop_strings": stops}
        sampling = (
            ("temperature", "top_k", "top_p", "draw_seed") if self.temperature else ()
        )
        drawn = {name: getattr(self, name) for name in sampling}
        searched: dict[str, Any] = {}
        if self.answers_only:
            searched["answers_only"] = True
        if self.drafter.record:
            searched["drafter"] = self.drafter.record
        if self.labels == "likelihood":
            searched["labels"] = {"by": self.labels, "least": self.least_score}
        return limits | drawn | searched | {"seed": self.seed}


@dataclass(frozen=True)
class MinedCounts:
    """Counts of a mining journal."""

    samples: int
    mismatches: int
    important: int
    abstained: int
    """Number of mismatches without a label, mainly since the target's own response has no
    answer."""
    unanswered: int = 0
    """Number of samples in which the target's own response has no answer."""
    cut_off: int = 0
    """Number of unanswered samples whose response ends at the length limit."""


@dataclass(frozen=True)
class SearchResult:
    """Result of the search on a prompt."""

    prompt: list[int]
    target_response: list[int]
    """The target's own response."""
    final_response: list[int]
    """The response after all harmless swaps."""
    mismatches: list[Mismatch]
    """Mismatches in the order of their positions."""
    answer: str | None
    """Final answer in the target's own response, with which every other answer is compared."""


class Miner:
    """Search for important tokens in one sample (AutoJudge, Garipov 2025, algorithm 1). A swap
    after which no answer is found counts as important, so a response with every unimportant
    draft token keeps the target's own answer (appendix A)."""

    def __init__(self, task: Task, sample: Sample, target: LM, max_new_tokens: int):
        self.task = task
        self.sample = sample
        self.target = target
        self.max_new_tokens = max_new_tokens

    def answer(self, response: list[int]) -> str | None:
        """Return the final answer in a response; None if there is none."""
        _, text = until_stop(self.target, response, self.task.stop_strings)
        return self.task.answer(text, self.sample)

    def decode(self, prompt: list[int]) -> Dialogue[SearchResult]:
        """Return the target's own response, without a search."""
        own = yield self._continue(prompt, [])
        return SearchResult(prompt, own, own, [], self.answer(own))

    def compare(self, prompt: list[int]) -> Dialogue[SearchResult]:
        """Return the target's own response and the mismatches in it, without labels."""
        own = yield self._continue(prompt, [])
        predicted = yield Predict(prompt + own, len(prompt), len(prompt))
        mismatches = []
        for i, token in enumerate(predicted):
            if token not in (None, own[i]):
                mismatches.append(
                    Mismatch(
                        position=i,
                        target_token=own[i],
                        draft_token=token,
                        important=None,
                    )
                )
        return SearchResult(prompt, own, own, mismatches, self.answer(own))

    def search(self, prompt: list[int]) -> Dialogue[SearchResult]:
        """Try each mismatch from left to right, and keep the swaps that leave the answer
        unchanged."""
        own = yield self._continue(prompt, [])
        answer = self.answer(own)
        response = own
        mismatches = list[Mismatch]()
        start = 0
        while start < len(response):
            predicted = yield Predict(
                prompt + response, len(prompt) + start, len(prompt)
            )
            guesses = dict(enumerate(predicted, start))
            differing = []
            for i, token in guesses.items():
                if token not in (None, response[i]):
                    differing.append(i)
            start = len(response)
            # the response up to a mismatch is settled, and so are the draft's guesses as long as no
            # swap is adopted
            for i in differing:
                swapped, same = yield from self._swap(
                    prompt, response[:i], guesses[i], answer
                )
                mismatches.append(
                    Mismatch(
                        position=i,
                        target_token=response[i],
                        draft_token=guesses[i],
                        important=None if answer is None else not same,
                    )
                )
                if same:
                    response = swapped
                    start = i + 1
                    break
        return SearchResult(prompt, own, response, mismatches, answer)

    def _swap(
        self, prompt: list[int], before: list[int], token: int, answer: str | None
    ) -> Dialogue[tuple[list[int], bool | None]]:
        """Put `token` after `before` and let the target continue. Return the new response, and
        whether its answer is the same. If there is no answer to compare with, return an empty
        response and None."""
        if answer is None:
            return [], None
        response = [*before, token]
        stops = self.task.stop_strings
        if not self._ends(response):
            response += yield self._continue(prompt, response)
            # a stop string may have begun before the swap
            response, _ = until_stop(self.target, response, stops)
        found = self.answer(response)
        if not self.task.compares_slowly or found == answer:
            return response, self.task.same(found, answer, self.sample)
        same: bool | None = yield Compare(
            partial(self.task.same, found, answer, self.sample)
        )
        return response, same

    def _continue(self, prompt: list[int], response: list[int]) -> Continue:
        left = self.max_new_tokens - len(response)
        stops = self.task.stop_strings
        # searching during a slow comparison would make results depend on its duration
        searches = not self.task.compares_slowly
        return Continue(prompt + response, left, stops, len(prompt), searches=searches)

    def _ends(self, response: list[int]) -> bool:
        """Return True if a response is complete: at an EOS, a stop string or the length limit."""
        if response[-1] in self.target.eos_ids or len(response) >= self.max_new_tokens:
            return True
        return completes_stop(self.target, response, self.task.stop_strings)


Find = Callable[[Miner, list[int]], Dialogue[SearchResult]]


def search(
    pair: Pair,
    task: Task,
    samples: Sequence[Sample],
    decoder: Decoder,
    batch_size: int,
    *,
    find: Find = Miner.search,
) -> Iterator[MinedSample]:
    """Yield the record of each sample as it is finished. `decoder` holds the options of the
    target's answers and the drafter whose tokens are swapped in; `batch_size` searches run
    concurrently. `find` is the method of `Miner` that makes a result."""
    max_new_tokens = decoder.max_new_tokens
    shorter = min(lm.context_length or 1 << 30 for lm in pair.models.values())
    prompts = [pair.target.encode(sample.prompt) for sample in samples]
    miners = []
    for sample, prompt in zip(samples, prompts):
        miners.append(
            Miner(task, sample, pair.target, min(max_new_tokens, shorter - len(prompt)))
        )
    dialogues = (find(miner, prompt) for miner, prompt in zip(miners, prompts))
    size = min(batch_size, len(samples))
    capacity = max(map(len, prompts), default=0) + max_new_tokens
    for ended in pair.converse(
        dialogues,
        size=size,
        capacity=capacity,
        sampling=decoder,
        guesses=find is not Miner.decode,
    ):
        yield _record(miners[ended.number], ended)


def _record(miner: Miner, ended: FinishedDialogue[SearchResult]) -> MinedSample:
    """Return the journal record of a search."""
    found = ended.result
    return MinedSample(
        id=miner.sample.id,
        prompt_ids=found.prompt,
        response_ids=found.target_response,
        final_ids=found.final_response,
        mismatches=found.mismatches,
        answers=MinedAnswers(
            target=found.answer,
            final=miner.answer(found.final_response),
            reference=miner.sample.reference,
        ),
        cost=MiningCost(**vars(ended.cost)),
    )


def mine(
    pair: Pair,
    task: Task,
    folder: Path,
    config: MineConfig = MineConfig(),
    progress: Progress = silent,
    crew: Crew | None = None,
) -> MinedCounts:
    """Mine a task's training samples into a run folder, and return the counts of its journal.

    A finished sample is written to the journal at once and is not mined again. At the end the
    journal is sorted into the task's order. If a `crew` of workers does the search, the journal is
    the same. Raises InputError if the folder was made with other models or options, its journal is
    broken, or memory has no room for the KV caches.
    """
    if crew is not None and config.policy is not None:
        raise InputError("workers: cannot be combined with a policy")
    if crew is not None and config.labels == "likelihood":
        raise InputError("workers: cannot be combined with labels by likelihood")
    task = task_for(pair, task, progress)
    if config.searches_with_draft:
        require_draft(pair)
    drawn = "first" if config.first or mined_first(folder) else "random"
    samples = _choose(pair, task, config, drawn)
    check_prompts(pair, task, samples)
    decoder = config.decoder(task)
    policy, recorded = _policy(pair, config.policy, decoder)
    asked = config.asked(decoder) | {"drawn": drawn, "policy": recorded}
    open_run(folder, describe(pair, task, split="train", **asked))
    with alone(folder, "mining"):
        journal = Journal(folder / "journal.jsonl")
        left = _unfinished(journal, samples)
        done = len(samples) - len(left)
        progress("mining", done, len(samples))
        if policy is not None:
            found = search_on_policy(pair, task, left, policy, config.batch_size)
        else:
            found = _searched(pair, task, left, decoder, config, crew=crew)
        for mined in found:
            journal.write(mined.to_json())
            done += 1
            progress("mining", done, len(samples))
        journal.sort([sample.id for sample in samples])
        if config.resamples:
            _resample(pair, task, folder, samples, config, progress=progress)
        by_likelihood = config.labels == "likelihood"
        return _counts(journal, decoder.max_new_tokens, by_likelihood)


def _unfinished(journal: Journal, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples that are missing from a journal, after cutting off a torn last line."""
    journal.resume()
    finished = {mined.id for mined in mined_samples(journal)}
    return [sample for sample in samples if sample.id not in finished]


def _resample(
    pair: Pair,
    task: Task,
    folder: Path,
    samples: Sequence[Sample],
    config: MineConfig,
    progress: Progress,
) -> None:
    most = config.decoder(task).max_new_tokens
    resampling = Resampling(config.resamples, most, config.batch_size)
    resample(pair, task, folder, samples, resampling, progress=progress)


def require_draft(pair: Pair) -> None:
    """Raise InputError if a pair has no draft model to mine with."""
    if pair.draft is None:
        raise InputError(
            "mining: swaps a drafter's tokens in, and the pair has no draft model; "
            "name --draft, "
            "or a --drafter such as ngram or eagle:PATH, or write the target's answers "
            "alone "
            "(--answers-only)"
        )


def _part(
    samples: Sequence[Sample], decoder: Decoder, config: MineConfig
) -> SampleBatch:
    ids = [sample.id for sample in samples]
    return SampleBatch(ids, decoder.changed(), config.batch_size, config.answers_only)


def _searched(
    pair: Pair,
    task: Task,
    samples: Sequence[Sample],
    decoder: Decoder,
    config: MineConfig,
    crew: Crew | None,
) -> Iterator[MinedSample]:
    """Yield the records of samples, searched in this process or by a crew's workers."""
    if crew is not None and samples:
        return _by_crew(pair, task, crew, _part(samples, decoder, config))
    if config.labels == "likelihood":
        return _labelled(pair, task, samples, decoder, config)
    find = Miner.decode if config.answers_only else Miner.search
    return search(pair, task, samples, decoder, config.batch_size, find=find)


def _labelled(
    pair: Pair,
    task: Task,
    samples: Sequence[Sample],
    decoder: Decoder,
    config: MineConfig,
) -> Iterator[MinedSample]:
    """Yield the records of samples whose mismatches are labelled by likelihood."""
    session = Session(pair.target)
    for found in search(
        pair, task, samples, decoder, config.batch_size, find=Miner.compare
    ):
        began = time.perf_counter()
        swaps = found.mismatches
        rated, tokens = scores(session, found.prompt_ids, found.response_ids, swaps)
        labelled = []
        for swap, score in zip(swaps, rated):
            labelled.append(
                swap.model_copy(
                    update={"score": score, "important": score < config.least_score}
                )
            )
        cost = found.cost.model_copy(
            update={
                "target_passes": found.cost.target_passes + 1 + len(swaps),
                "target_tokens": found.cost.target_tokens + tokens,
                "seconds": round(found.cost.seconds + time.perf_counter() - began, 3),
            }
        )
        yield found.model_copy(update={"mismatches": labelled, "cost": cost})


def _by_crew(
    pair: Pair, task: Task, crew: Crew, work: SampleBatch
) -> Iterator[MinedSample]:
    """Yield the record of each sample of a crew's workers as it is finished."""
    for record in mined_by(crew, work, identity_of(pair, task)):
        yield MinedSample.read(record, "a worker's record")


def _choose(pair: Pair, task: Task, config: MineConfig, drawn: str) -> list[Sample]:
    """Return the samples to mine. A larger limit extends the random choice of a smaller limit.
    Samples that the policy's heads were trained on are left out, since a head is too sure of
    them."""
    if config.limit is not None and config.limit < 1:
        raise InputError(f"limit {config.limit}: must be 1 or more")
    heads = config.policy.heads if config.policy else []
    known = {content for head in heads for content in head.head.prompts or ()}
    samples = take(task, "train", None if known or drawn == "random" else config.limit)
    if drawn == "random":
        random.Random(f"mining {config.seed}").shuffle(samples)
    if not known:
        return samples[: config.limit]
    fresh = (
        sample
        for sample in samples
        if prompt_digest(pair.target.encode(sample.prompt)) not in known
    )
    chosen = list(islice(fresh, config.limit))
    if not chosen:
        raise InputError(
            f"--policy {config.policy}: its head has learned from every sample"
        )
    return chosen


def _policy(
    pair: Pair, policy: Decoder | None, like: Decoder
) -> tuple[Decoder | None, dict[str, Any] | None]:
    """Return the policy whose answers are mined, and its record in the run."""
    if policy is None:
        return None, None
    policy = replace(
        policy, max_new_tokens=like.max_new_tokens, stop_strings=like.stop_strings
    )
    pair.check(policy)
    heads = [head.head.fingerprint for head in policy.heads]
    return policy, {"setting": str(policy.without_paths()), "heads": heads}


def _counts(
    journal: Journal, max_new_tokens: int, by_likelihood: bool = False
) -> MinedCounts:
    """Return the counts of a mining journal. Labels by likelihood need no answers."""
    mined = list(mined_samples(journal))
    labels = [mismatch.important for sample in mined for mismatch in sample.mismatches]
    unanswered = [sample for sample in mined if sample.answers.target is None]
    return MinedCounts(
        samples=len(mined),
        mismatches=len(labels),
        important=labels.count(True),
        abstained=labels.count(None),
        unanswered=0 if by_likelihood else len(unanswered),
        cut_off=sum(
            len(sample.response_ids) >= max_new_tokens for sample in unanswered
        ),
    )
