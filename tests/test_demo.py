"""How the demo picks a threshold, on decoders whose losses are known by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_mining import ParityTask

from lenience.demo import _pick
from lenience.tasks import Sample

SAMPLES = [Sample(str(i), f"prompt {i}", None) for i in range(200)]  # two may be lost


class Scripted:
    """A pair whose rule "r:N" answers the first N problems wrongly, and "exact" the last ten."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def as_completed(self, prompts: list[str], *, rule: str, **_options: object):
        self.asked.append(rule)
        for i in reversed(range(len(prompts))):
            wrong = i >= 190 if rule == "exact" else i < int(rule[2:]) or i >= 195
            yield i, SimpleNamespace(text="wrong" if wrong else "right")


class Judged(ParityTask):
    def correct(self, text: str, sample: Sample) -> bool:
        return text == "right"


@pytest.mark.parametrize(
    ("losses", "picked", "tried"),
    [
        ([2, 1, 0], (0, 2), 3),
        ([9, 2, 0], (1, 2), 3),
        ([0, 9, 1], (2, 1), 2),  # what is more lenient than one that fails is not tried
        ([0, 0, 7], (2, 7), 1),
    ],
)
def test_the_last_that_loses_little_is_picked(losses: list[int], picked: tuple[int, int], tried: int) -> None:
    pair = Scripted()
    assert _pick(pair, Judged(), [f"r:{lost}" for lost in losses], SAMPLES) == picked  # type: ignore[arg-type]
    assert pair.asked == ["exact", *(f"r:{lost}" for lost in reversed(losses))][: tried + 1]
