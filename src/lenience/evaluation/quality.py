"""Quality of answers: right or wrong, by degree, or compared with the target's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lenience.runs.answers import Answer, own_values
from lenience.tasks import Sample, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMPARED_AT_ONCE = 32
"""Number of answers compared with the target's own per call, so that progress shows."""


@dataclass(frozen=True)
class Quality:
    """The quality of one setting's answers to n prompts; each array is [n], in [0, 1]."""

    values: NDArray
    lost: NDArray
    """Shortfall of each answer against the target's own: 1 if the target is right and the answer
    wrong, or if a grader prefers the target's."""
    gained: NDArray
    verdicts: dict[str, int]
    """Counts of the task's verdicts, such as reasons why programs failed."""
    counts: bool
    """True if every answer is either right or wrong."""


def qualities(
    task: Task | None, answers: Sequence[Sequence[Answer]], target: int
) -> list[Quality]:
    """Return the quality of each setting's answers; `target` is the index of the target's own.
    Without a task, answers are right or wrong."""
    own = own_values(task, answers[target])
    found = []
    for given in answers:
        of_each = own_values(task, given)
        lost = np.maximum(0, own - of_each)
        gained = np.maximum(0, of_each - own)
        counts = task is None or not task.by_degree
        found.append(Quality(of_each, lost, gained, _verdicts(given), counts))
    return found


def beside_target(
    task: Task,
    samples: Sequence[Sample],
    answers: Sequence[Answer],
    own: Sequence[Answer],
) -> Quality:
    """Return the quality of answers to `samples`, compared with the target's own."""
    triples = []
    for answer, alone, sample in zip(answers, own, samples):
        triples.append((answer.text, alone.text, sample))
    points = list[float]()
    for start in range(0, len(triples), COMPARED_AT_ONCE):
        points += task.points(triples[start : start + COMPARED_AT_ONCE])
    of_each = np.array(points)
    par = task.at_par
    lost = np.maximum(0, par - of_each) / par
    gained = (
        np.maximum(0, of_each - par) / (1 - par) if par < 1 else np.zeros(len(of_each))
    )
    return Quality(of_each, lost, gained, _verdicts(answers), counts=False)


def _verdicts(answers: Sequence[Answer]) -> dict[str, int]:
    counted = Counter(
        answer.verdict.split(":")[0] for answer in answers if answer.verdict
    )
    return dict(counted.most_common())
