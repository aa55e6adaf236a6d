"""Samples, the Task protocol, and ways to find and compare answers that tasks share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """One problem: `prompt` is a string or chat messages, `reference` the right answer or None where none is known."""

    id: str
    prompt: str | Messages
    reference: str | None


class Task(Protocol):
    """What mining and comparing need to know of a task."""

    name: str
    max_new_tokens: int

    def samples(self, split: str) -> Iterable[Sample]:
        """The samples of a split, "train" or "test", always in the same order."""
        ...

    def answer(self, text: str) -> str | None:
        """The final answer found in a response, or None where there is none."""
        ...

    def same(self, a: str | None, b: str | None) -> bool | None:
        """Whether two answers agree; None where either is missing, which is never "the same"."""
        ...

    def correct(self, text: str, sample: Sample) -> bool:
        """Whether a response answers the sample as its reference does."""
        ...


def number_after(text: str, marker: str, closed_by: str = "") -> str | None:
    """The last number that follows `marker`, without thousands separators; `closed_by` must follow it, so that a
    number cut off by a length limit does not count."""
    found = re.findall(re.escape(marker) + r"\s*(-?[\d,]*\.?\d+)" + re.escape(closed_by), text)
    return found[-1].replace(",", "") if found else None
