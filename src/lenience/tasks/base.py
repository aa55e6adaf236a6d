"""Samples, tasks, scores, and ways to find and compare answers that tasks share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, str]]
AnswerValue = str | int | float | bool | None
"""An answer found by a task; None without an answer. Users' tasks may return numbers."""


@dataclass(frozen=True)
class Sample:
    """One problem. `prompt` is a string or chat messages, `reference` the right answer or None if
    unknown, `metadata` further data to find or compare an answer. `group` names samples whose
    losses may be correlated, such as rewordings of a question or turns of a user; None for an
    independent sample."""

    id: str
    prompt: str | Messages
    reference: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    group: str | None = None


@dataclass(frozen=True)
class Score:
    """The quality of a response."""

    correct: bool
    loss: float
    """Loss from 0 (none) to 1."""
    verdict: str = ""
    """Further outcome, such as the reason why a program failed its tests."""


class Task:
    """A task for mining, comparing and certifying. It needs a name, samples and a way to find an
    answer; the rest has defaults. A user's class may have these methods without being a subclass,
    see `lenience.tasks.as_task`."""

    name: str
    max_new_tokens: int = 256
    stop_strings: tuple[str, ...] = ()
    """Texts before which a response ends, besides EOS."""
    version: int | str | None = None
    """Version of answer extraction and scoring. Bump it when either changes; older runs then refuse
    to resume."""
    failures_are_wrong: bool = False
    """True if a response counts as wrong and without an answer when `answer`, `same`, `correct`,
    `score` or `loss` raises. Otherwise the exception ends the run and names the sample."""
    scores_by_reference: bool = False
    """True if a response can be correct only if the sample has a reference."""
    compares_slowly: bool = False
    """True if comparing answers is slow, so that mining compares while it decodes."""
    measure: str = "accuracy"
    """Name of the mean quality of responses: "accuracy", "pass@1", "ROUGE-L"."""
    by_degree: bool = False
    """True if a response may be partly correct; its quality is then 1 − its score's loss."""
    beside_target: bool = False
    """True if responses are compared only with the target's own, by `points`."""
    at_par: float = 1.0
    """Quality of a response that equals the target's own, if `beside_target`."""
    same_where_wrong: bool = False
    """True if two wrong responses agree, so that a target that is seldom right hides losses."""
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
        """Return the final answer found in a response; None if there is none."""
        raise NotImplementedError

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        """Return True if two answers agree and False if not; None if either is missing, which never
        counts as agreement."""
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        """Return True if a response's answer is the same as the sample's reference."""
        return self.same(self.answer(text, sample), sample.reference, sample) is True

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        """Score responses, each given with its sample. An overriding method may be slow: it runs in
        a thread during decoding, on all responses that have arrived."""
        scores = []
        for text, sample in pairs:
            correct = bool(self.correct(text, sample))
            scores.append(Score(correct, loss=float(not correct)))
        return scores

    def points(self, triples: Sequence[tuple[str, str, Sample]]) -> list[float]:
        """Return the quality, in [0, 1], of each response compared with the target's own. A triple
        is (response, target's response, sample). By default 1 if their answers agree, else 0."""
        points = []
        for text, own, sample in triples:
            found = self.answer(text, sample), self.answer(own, sample)
            points.append(float(text == own or self.same(*found, sample) is True))
        return points

    @property
    def grading(self) -> dict[str, int] | None:
        """Return the counts of a grader's judgements so far; None without a grader."""
        return None

    def attach(self, own_answers: Callable[[Sequence[Messages]], list[str]]) -> None:
        """Take a function that returns the target's own answers, for a task whose prompts contain
        them."""

    @property
    def compares(self) -> bool:
        """Return True if a response is right exactly when its answer is the same as the
        reference."""
        return type(self).correct is Task.correct and type(self).score is Task.score

    @property
    def scores_batches(self) -> bool:
        """Return True if the task has its own scoring, which then runs during decoding."""
        return type(self).score is not Task.score

    @property
    def has_loss(self) -> bool:
        """Return True if the task defines its own `loss`."""
        return type(self).loss is not Task.loss

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        """Return the loss of a response compared with the target's own, from 0 to 1, for `certify
        --loss task`."""
        raise NotImplementedError

    def reference(self, given: str) -> str:
        """Return the answer contained in a reference from a user's data."""
        return given

    @property
    def known_as(self) -> str:
        """Return the task's name and version."""
        return f"{self.name} {self.version}"

    @property
    def label(self) -> str:
        """Return the task's name without the digest of its data."""
        return self.name.split(" (")[0]

    @property
    def reads(self) -> str:
        """Return the identity of how the task finds and compares answers."""
        return self.known_as


def ungradable(task: Task, samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that no response can answer correctly, because the reference does not even
    equal itself: "N/A" if numbers are compared."""
    if not task.compares:
        return []
    found = list[Sample]()
    for sample in samples:
        if (
            sample.reference is not None
            and task.same(sample.reference, sample.reference, sample) is not True
        ):
            found.append(sample)
    return found


def number_after(text: str, marker: str, closed_by: str = "") -> str | None:
    """Return the last number that follows `marker`, without thousands separators; None if there is
    none. `closed_by` must follow the number, so that a number cut off by a length limit does not
    count."""
    found = re.findall(
        re.escape(marker) + r"\s*(-?[\d,]*\.?\d+)" + re.escape(closed_by), text
    )
    return found[-1].replace(",", "") if found else None
