"""Answers of decoders to a task's samples, kept in a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lenience.core.progress import Progress, silent
from lenience.core.records import Record
from lenience.core.workers import Workers
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.options import OWN
from lenience.decoding.pair import Pair
from lenience.decoding.response import pieces
from lenience.drafting.model import DraftModel
from lenience.models.flops import ReadingCost
from lenience.runs.journal import Journal
from lenience.tasks import Sample, Score, Task
from lenience.tasks.base import AnswerValue

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY_LENIENCE = ("draft-lenient", "draft-trusted")
"""Origins of tokens that the target might not have chosen."""
MOST_SCORED = 64
"""Number of answers scored at once; a crash loses at most these."""


def for_task(decoder: Decoder, options: Mapping[str, Any], task: Task) -> Decoder:
    """Return the decoder with the task's length limit and stop strings, unless `options` sets
    them."""
    if options.get("max_new_tokens") is None:
        decoder = decoder.with_parts(max_new_tokens=task.max_new_tokens)
    if options.get("stop_strings") is None:
        decoder = decoder.with_parts(stop_strings=task.stop_strings)
    return decoder


class Answer(Record):
    """A line of a journal of answers: one decoder's answer to one sample, with its counts."""

    id: str
    rule: str
    setting: str = ""
    """Decoding options that differ from the defaults, in the form that `Decoder.parse` reads."""
    text: str = ""
    answer: AnswerValue
    correct: bool
    loss: float | None = None
    """Loss by the task's score, from 0 to 1."""
    verdict: str = ""
    """Further outcome, such as the reason why a program failed its tests."""
    tokens: int
    target_passes: int
    draft_passes: int = 0
    accepted_exact: int = 0
    accepted_lenient: int = 0
    kept_by_lenience: int | None = None
    """Number of tokens of origin "draft-lenient" or "draft-trusted"; None in older journals."""
    flops: float | None = None
    """Floating-point operations of both models' forward passes for this answer. A cached prefix
    shared with the row's previous answer is not counted again. None if unknown."""
    flops_as_sprinter: float | None = None
    """FLOPs as SPRINTER (Zhong 2025) counts them: embeddings count as matrix products, and tokens
    that a gate let through cost the target nothing."""
    closest: float | None = None
    """Highest judge score among rejected tokens; 0 if no token was rejected. A lower threshold
    above this score gives the same answer. None if a rejected token has no score."""
    seconds: float | None = None
    """Seconds from the previous finished answer to this one, so that they add up to the total."""
    trace: list[tuple[str, str, float | None]] | None = None
    """Text, origin and judge score of each token, if kept."""


@dataclass
class _Decoded:
    """An answer before it is scored."""

    sample: Sample
    out: Generation
    answer: AnswerValue
    seconds: float


class Answers:
    """Decoders' answers to a task's samples: read from the journal, or else decoded and added."""

    def __init__(self, pair: Pair, task: Task, path: Path, batch_size: int = 32):
        self.pair = pair
        self.task = task
        self.batch_size = batch_size
        self.journal = Journal(path)
        self.decoded = 0
        """Number of answers decoded by this object."""
        self._known: dict[tuple[str, str], Answer] = {}
        self._known_by_rule: dict[tuple[str, str], Answer] = {}
        """Answers by rule and id from journals of version 0.1, which hold one unnamed setting per
        rule."""
        for line, record in enumerate(self.journal.resume(), 1):
            self._keep(Answer.read(record, f"{path}, line {line}"))

    def _keep(self, answer: Answer) -> None:
        if answer.setting:
            self._known[answer.setting, answer.id] = answer
        else:
            self._known_by_rule[answer.rule, answer.id] = answer

    def known(self, decoder: Decoder, samples: Sequence[Sample]) -> dict[str, Answer]:
        """Return the decoder's answers that the journal already holds, by sample id."""
        setting = str(decoder)
        rule = str(decoder.rule)
        by_id = {}
        for id in (sample.id for sample in samples):
            answer = self._known.get((setting, id)) or self._known_by_rule.get(
                (rule, id)
            )
            if answer:
                by_id[id] = answer
        return by_id

    def get(
        self,
        decoder: Decoder,
        samples: Sequence[Sample],
        progress: Progress = silent,
        phase: str = "decoding",
        traced: Iterable[str] = (),
    ) -> list[Answer]:
        """Return the answers to `samples`, in order. New answers keep their token trace if their id
        is in `traced`.

        A task with its own scoring scores in a thread, so that a slow scorer does not stall
        decoding. Scored answers reach the journal even if the run fails.
        """
        known = self.known(decoder, samples)
        left = [sample for sample in samples if sample.id not in known]
        done = len(samples) - len(left)
        with_trace = set(traced)

        def keep(decoded: _Decoded, score: Score) -> None:
            self._write(decoder, decoded, score, decoded.sample.id in with_trace)

        if left:
            scoring = _Scoring(self.task, keep)
            began = time.perf_counter()
            try:
                for number, out in self._decode(decoder, left):
                    seconds = time.perf_counter() - began
                    began = time.perf_counter()
                    answer = self.task.answer(out.text, left[number])
                    scoring.add(_Decoded(left[number], out, answer, seconds))
                    done += 1
                    progress(phase, done, len(samples))
            finally:
                scoring.finish()
        self.decoded += len(left)
        known = self.known(decoder, samples)
        return [known[sample.id] for sample in samples]

    def _decode(
        self, decoder: Decoder, samples: Sequence[Sample]
    ) -> Iterable[tuple[int, Generation]]:
        prompts = [sample.prompt for sample in samples]
        return self.pair.as_completed(prompts, decoder, batch_size=self.batch_size)

    def _write(
        self, decoder: Decoder, decoded: _Decoded, score: Score, traced: bool
    ) -> None:
        """Append a scored answer to the journal."""
        out = decoded.out
        trace: list[tuple[str, str, float | None]] | None = None
        if traced and out.trace:
            texts = pieces(self.pair.target, out.tokens)
            trace = []
            for text, entry in zip(texts, out.trace):
                trace.append((text, entry.origin, entry.score))
        elif traced:  # a server's answer has no tokens here
            trace = [(out.text, "correction", None)]
        answer = Answer(
            id=decoded.sample.id,
            rule=str(decoder.rule),
            setting=str(decoder),
            text=out.text,
            answer=decoded.answer,
            correct=score.correct,
            loss=score.loss,
            verdict=score.verdict,
            tokens=len(out.tokens),
            target_passes=out.target_passes,
            draft_passes=out.draft_passes,
            accepted_exact=out.accepted_exact,
            accepted_lenient=out.accepted_lenient,
            kept_by_lenience=sum(entry.origin in BY_LENIENCE for entry in out.trace),
            **_flops(self.pair, decoder, out),
            closest=_closest(out),
            seconds=round(decoded.seconds, 4),
            trace=trace,
        )
        self._add(answer)

    def adopt(self, decoder: Decoder, answers: Iterable[Answer]) -> None:
        """Record answers of another decoder, known to be identical, as answers of `decoder`."""
        setting = str(decoder)
        rule = str(decoder.rule)
        for answer in answers:
            if (setting, answer.id) not in self._known:
                same = {"setting": setting, "rule": rule, "seconds": 0.0, "trace": None}
                self._add(answer.model_copy(update=same))

    def _add(self, answer: Answer) -> None:
        self.journal.write(answer.to_json())
        self._keep(answer)


def own_values(task: Task | None, answers: Sequence[Answer]) -> NDArray:
    """Return the quality [n] of answers by themselves, each in [0, 1]. Without a task, answers are
    right or wrong."""
    if task is not None and task.by_degree:
        return np.array([1 - (answer.loss or 0.0) for answer in answers])
    return np.array([float(answer.correct) for answer in answers])


def reading_flops(pair: Pair, out: Generation) -> tuple[float, float] | None:
    """Return the floating-point operations of all forward passes for an answer: the full count, and
    SPRINTER's count (Zhong 2025). None if a model's cost is unknown."""
    read = {"target": out.target_tokens, "draft": out.draft_tokens}
    asked = dict(read)
    if out.stop.startswith("gate:") and out.target_passes:
        one_each = len(out.prompt_tokens) - 1 + out.target_passes
        asked["target"] = min(out.target_tokens, one_each)
    length = len(out.prompt_tokens) + len(out.tokens)
    total = 0.0
    as_sprinter = 0.0
    for role, lm in pair.models.items():
        cost = ReadingCost.of(lm)
        if cost is None:
            return None
        total += cost.read(read[role], length)
        as_sprinter += cost.read(asked[role], length) + asked[role] * cost.lookup
    return total, as_sprinter


def _flops(pair: Pair, decoder: Decoder, out: Generation) -> dict[str, float]:
    """Return `reading_flops` by field name; empty for another engine, or a drafter other than the
    draft model."""
    if pair.engine_name != OWN or not (
        decoder.alone or decoder.drafter == DraftModel()
    ):
        return {}
    counted = reading_flops(pair, out)
    return {} if counted is None else dict(zip(("flops", "flops_as_sprinter"), counted))


def _closest(out: Generation) -> float | None:
    scores = [entry.score for entry in out.trace if entry.origin == "correction"]
    known = [score for score in scores if score is not None]
    return max(known, default=0.0) if len(known) == len(scores) else None


Scored = tuple[list[tuple[_Decoded, Score]], Exception | None]
"""Scores, and the task's first exception for the rest."""


class _Scoring:
    """A scorer that passes each scored answer to `keep`. A task's own scoring runs in a worker
    thread, on batches of the answers that arrived meanwhile, at most MOST_SCORED."""

    def __init__(self, task: Task, keep: Callable[[_Decoded, Score], None]):
        self.task = task
        self.keep = keep
        self._worker = Workers[Scored](1)
        self._waiting: list[_Decoded] = []
        self._running: Future[Scored] | None = None

    def add(self, decoded: _Decoded) -> None:
        """Score an answer at once, or queue it for the worker thread. Raises the task's
        exception."""
        if not self.task.scores_batches:
            self.keep(decoded, *self.task.score([(decoded.out.text, decoded.sample)]))
            return
        self._waiting.append(decoded)
        if self._running is None or self._running.done():
            self._next()

    def finish(self) -> None:
        """Score all queued answers, then raise the task's first exception, if any."""
        errors = []
        while self._running or self._waiting:
            try:
                self._next()
            except Exception as error:
                errors.append(error)
        self._worker.close()
        if errors:
            raise errors[0]

    def _next(self) -> None:
        """Wait for the running batch, submit the next one and keep the finished scores."""
        scored, error = self._running.result() if self._running else ([], None)
        part = self._waiting[:MOST_SCORED]
        self._waiting = self._waiting[MOST_SCORED:]
        self._running = (
            self._worker.submit(partial(self._score, part)) if part else None
        )
        for decoded, score in scored:
            self.keep(decoded, score)
        if error:
            raise error

    def _score(self, batch: list[_Decoded]) -> Scored:
        try:
            scores = self.task.score(
                [(decoded.out.text, decoded.sample) for decoded in batch]
            )
            return list(zip(batch, scores, strict=True)), None
        except Exception as error:
            if len(batch) == 1:
                return [], error
        # one by one, so that a failure does not lose the other scores
        parts = [self._score([decoded]) for decoded in batch]
        errors = [error for _, error in parts if error]
        return [pair for scored, _ in parts for pair in scored], errors[
            0
        ] if errors else None
