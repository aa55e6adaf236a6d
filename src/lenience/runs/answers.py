"""Answers of decoders to a task's samples, kept in a journal: what is there is not decoded
again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lenience.core.progress import Progress, silent
from lenience.core.records import Record
from lenience.decoding.generation import Generation
from lenience.decoding.options import Decoding
from lenience.decoding.pair import Pair
from lenience.decoding.response import pieces
from lenience.runs.journal import Journal
from lenience.tasks import Sample, Score, Task


class Answer(Record):
    """A line of a journal of answers: what one decoder said to one sample, and what it took."""

    id: str
    rule: str
    setting: str = ""
    """All options of decoding that are not the defaults, as `Decoding.parse` takes them."""
    text: str = ""
    answer: str | None
    correct: bool
    loss: float | None = None
    """The task's own, from 0 to 1."""
    tokens: int
    target_passes: int
    draft_passes: int = 0
    accepted_exact: int = 0
    accepted_lenient: int = 0
    seconds: float | None = None
    """How long it took, many being decoded together: what this one added."""
    trace: list[tuple[str, str, float | None]] | None = None
    """Of each token its text, where it came from, and the judge's score, where that is kept."""


@dataclass
class _Decoded:
    """An answer before it is scored."""

    sample: Sample
    out: Generation
    seconds: float


class Answers:
    """The answers that a journal holds, and those that are still to be decoded."""

    def __init__(self, pair: Pair, task: Task, path: Path, batch_size: int = 32):
        self.pair, self.task, self.batch_size = pair, task, batch_size
        self.journal = Journal(path)
        self.decoded = 0
        """How many have been decoded since."""
        self._known: dict[tuple[str, str], Answer] = {}
        self._known_by_rule: dict[tuple[str, str], Answer] = {}
        """Of journals that name no settings: one of 0.1 holds one setting of each rule."""
        for record in self.journal.resume():
            self._keep(Answer.read(record, f"{path}, {record.get('id')}"))

    def _keep(self, answer: Answer) -> None:
        if answer.setting:
            self._known[answer.setting, answer.id] = answer
        else:
            self._known_by_rule[answer.rule, answer.id] = answer

    def known(self, decoding: Decoding, sample: Sample) -> Answer | None:
        """An answer that is there already."""
        by_rule = self._known_by_rule.get((str(decoding.rule), sample.id))
        return self._known.get((str(decoding), sample.id), by_rule)

    def get(
        self,
        decoding: Decoding,
        samples: Sequence[Sample],
        progress: Progress = silent,
        phase: str = "decoding",
        traced: Iterable[str] = (),
    ) -> list[Answer]:
        """The answers to `samples`, in their order; of those whose ids are in `traced` it is kept
        where every token came from. Answers are scored beside decoding, so that a slow scorer does
        not stall it."""
        left = [sample for sample in samples if self.known(decoding, sample) is None]
        done, traced = len(samples) - len(left), set(traced)
        if left:
            with _Scoring(self.task) as scoring:
                began = time.perf_counter()
                try:
                    for number, out in self._decode(decoding, left):
                        seconds = time.perf_counter() - began
                        began = time.perf_counter()
                        scoring.add(_Decoded(left[number], out, seconds))
                        self._write(decoding, scoring.collect(), traced)
                        done += 1
                        progress(phase, done, len(samples))
                finally:  # what was decoded is kept, also where it is stopped
                    self._write(decoding, scoring.collect(wait=True), traced)
        self.decoded += len(left)
        answers = [self.known(decoding, sample) for sample in samples]
        return [answer for answer in answers if answer is not None]

    def _decode(
        self, decoding: Decoding, samples: Sequence[Sample]
    ) -> Iterable[tuple[int, Generation]]:
        prompts = [sample.prompt for sample in samples]
        return self.pair.as_completed(prompts, batch_size=self.batch_size, **vars(decoding))

    def _write(
        self,
        decoding: Decoding,
        scored: Sequence[tuple[_Decoded, str | None, Score]],
        traced: set[str],
    ) -> None:
        """Put what was scored into the journal."""
        for decoded, found, score in scored:
            out = decoded.out
            trace: list[tuple[str, str, float | None]] | None = None
            if decoded.sample.id in traced:
                texts = pieces(self.pair.target, out.tokens)
                trace = [(text, one.origin, one.score) for text, one in zip(texts, out.trace)]
            answer = Answer(
                id=decoded.sample.id,
                rule=str(decoding.rule),
                setting=str(decoding),
                text=out.text,
                answer=found,
                correct=score.correct,
                loss=score.loss,
                tokens=len(out.tokens),
                target_passes=out.target_passes,
                draft_passes=out.draft_passes,
                accepted_exact=out.accepted_exact,
                accepted_lenient=out.accepted_lenient,
                seconds=round(decoded.seconds, 4),
                trace=trace,
            )
            self.journal.append(answer.to_json())
            self._keep(answer)


class _Scoring:
    """Scores answers in a thread of its own, as many together as have come while it was busy."""

    def __init__(self, task: Task):
        self.task = task
        self._pool = ThreadPoolExecutor(1)
        self._waiting: list[_Decoded] = []
        self._running: tuple[list[_Decoded], Future[list[tuple[str | None, Score]]]] | None = None

    def __enter__(self) -> _Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, decoded: _Decoded) -> None:
        self._waiting.append(decoded)

    def collect(self, wait: bool = False) -> list[tuple[_Decoded, str | None, Score]]:
        """What has been scored since; or, waiting for it, all that was added. Raises what the task
        raised."""
        finished: list[tuple[_Decoded, str | None, Score]] = []
        while self._running or self._waiting:
            if self._running:
                batch, future = self._running
                if not wait and not future.done():
                    break
                scored = zip(batch, future.result())
                finished += [(decoded, answer, score) for decoded, (answer, score) in scored]
                self._running = None
            if self._waiting:
                batch, self._waiting = self._waiting, []
                self._running = batch, self._pool.submit(self._score, batch)
                if not wait:
                    break
        return finished

    def _score(self, batch: list[_Decoded]) -> list[tuple[str | None, Score]]:
        answers = [self.task.answer(one.out.text, one.sample) for one in batch]
        scores = self.task.score([(one.out.text, one.sample) for one in batch])
        if len(scores) != len(batch):
            raise RuntimeError(
                f"task {self.task.name!r}: score gave {len(scores)} scores for {len(batch)} "
                "responses"
            )
        return list(zip(answers, scores))
