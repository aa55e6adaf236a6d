"""Samples, tasks, scores, and ways to find and compare answers that tasks share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, str]]
AnswerValue = str | int | float | bool | None
"""An answer as a task finds it, None where there is none; users' tasks may find numbers."""


@dataclass(frozen=True)
class Sample:
    """One problem. `prompt` is a string or chat messages, `reference` the right answer or None if
    unknown, `metadata` further data to find or compare an answer. Samples of one `group`, such as
    rewordings of a question or turns of a user, may be lost together; a sample without a group
    stands alone."""

    id: str
    prompt: str | Messages
    reference: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    group: str | None = None


@dataclass(frozen=True)
class Score:
    """How good a response is."""

    correct: bool
    loss: float
    """Loss from 0 (none) to 1."""
    verdict: str = ""
    """Further outcome, such as the reason why a program failed its tests."""


class Task:
    """A task for mining, comparing and certifying. It has at least a name, samples, and a way to
    find an answer; the rest has defaults. A user's class may have these methods without being a
    subclass, see `lenience.tasks.as_task`."""

    name: str
    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    """Texts before which a response ends, besides EOS."""
    version: int | str | None = None
    """Raised when the same responses would be answered or scored otherwise: a run is not gone on
    with then."""
    failures_are_wrong: bool = False
    """True if a response at which `answer`, `same`, `correct`, `score` or `loss` raises has no
    answer, agrees with none and is wrong. Otherwise the exception ends the run and names the
    sample."""
    scores_by_reference: bool = False
    """True if a response can be correct only if the sample has a reference."""
    compares_slowly: bool = False
    """True if comparing answers is slow, so that mining compares while it decodes."""
    measure: str = "accuracy"
    """Name of the mean quality of responses: "accuracy", "pass@1", "ROUGE-L"."""
    by_degree: bool = False
    """True if a response may be partly correct; its quality is then 1 − its score's loss."""
    beside_target: bool = False
    """True if responses are judged only against the target's own, by `points`."""
    at_par: float = 1.0
    """The quality of a response that is the target's own, where `beside_target`."""
    same_where_wrong: bool = False
    """True if two wrong responses agree. The disagreement is then at most the target's accuracy."""
    loss_is: str = "the mean loss that the task returns"
    """Description of the mean `loss` on certificates."""
    disagreement_is: str = (
        "the share of prompts on which this decoder's final answer is not the target's"
    )
    """Description of the share of responses that are not the `same` on certificates."""

    def samples(self, split: str) -> Iterable[Sample]:
        """Return the samples of a split, "train" or "test", always in the same order."""
        raise NotImplementedError

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        """Return the final answer found in a response, or None where there is none."""
        raise NotImplementedError

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        """Return whether two answers agree; None where either is missing, which is never "the
        same"."""
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        """Return whether a response answers the sample as its reference does."""
        return self.same(self.answer(text, sample), sample.reference, sample) is True

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        """Score responses, each with its sample. A task's own scoring runs in a thread during
        decoding, on all responses that have arrived, so that it may be slow."""
        scores = []
        for text, sample in pairs:
            correct = bool(self.correct(text, sample))
            scores.append(Score(correct, loss=float(not correct)))
        return scores

    def points(self, triples: Sequence[tuple[str, str, Sample]]) -> list[float]:
        """Return the quality in [0, 1] of each response compared with the target's own, with their
        sample: by default whether their answers agree."""
        points = []
        for text, own, sample in triples:
            found = self.answer(text, sample), self.answer(own, sample)
            points.append(float(text == own or self.same(*found, sample) is True))
        return points

    @property
    def grading(self) -> dict[str, int] | None:
        """Return how a grader has judged so far; None without one."""
        return None

    def attach(self, own_answers: Callable[[Sequence[Messages]], list[str]]) -> None:
        """Receive a function that returns the target's own answers, for a task whose prompts hold
        them."""

    @property
    def compares(self) -> bool:
        """Return whether a response is right where its answer is the same as the sample's
        reference."""
        return type(self).correct is Task.correct and type(self).score is Task.score

    @property
    def scores_batches(self) -> bool:
        """Return True if the task has its own scoring, which then runs during decoding."""
        return type(self).score is not Task.score

    @property
    def has_loss(self) -> bool:
        """Return whether it has a loss of its own."""
        return type(self).loss is not Task.loss

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        """Return the loss of a response compared with the target's own, from 0 to 1, for `certify
        --loss task`."""
        raise NotImplementedError

    def reference(self, given: str) -> str:
        """Return the answer that a reference, as it stands in a user's data, holds."""
        return given

    @property
    def known_as(self) -> str:
        """Return the task with its version."""
        return f"{self.name} {self.version}"

    @property
    def label(self) -> str:
        """Return the task whatever its data are now: a file's name without its digest."""
        return self.name.split(" (")[0]

    @property
    def reads(self) -> str:
        """Return how the task finds and compares answers, whatever its samples are."""
        return self.known_as


def ungradable(task: Task, samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples to which no response can be right, as their reference is not even the same
    as itself: "N/A" where numbers are compared."""
    if not task.compares:
        return []
    return [
        sample
        for sample in samples
        if sample.reference is not None
        and task.same(sample.reference, sample.reference, sample) is not True
    ]


def number_after(text: str, marker: str, closed_by: str = "") -> str | None:
    """Return the last number that follows `marker`, without thousands separators; `closed_by` must
    follow it, so that a number cut off by a length limit does not count."""
    found = re.findall(
        re.escape(marker) + r"\s*(-?[\d,]*\.?\d+)" + re.escape(closed_by), text
    )
    return found[-1].replace(",", "") if found else None
