"""What a certificate is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from lenience.certification.sequential_tests import TESTS, Test, looks, needed, needed_like
from lenience.core.errors import InputError
from lenience.rules.registry import ALONE
from lenience.rules.settings import ladder

if TYPE_CHECKING:
    from numpy.typing import NDArray


Loss = Literal["paired", "net", "disagreement", "task"]


LOSSES: dict[str, str] = {
    "paired": "the share of prompts that the target alone answers rightly and this decoder wrongly",
    "net": "the target's accuracy minus this decoder's",
    "disagreement": "the share of prompts on which this decoder's final answer is not the target's",
    "task": "the mean loss that the task returns",
}


BINARY = ("paired", "disagreement")


@dataclass(frozen=True)
class Question:
    """What a certificate is asked for; every field is part of the answer's name."""

    rules: tuple[str, ...]
    max_drop: float
    confidence: float
    loss: Loss = "paired"
    procedure: str = "auto"
    thresholds: tuple[float, ...] = ()
    window: int | Literal["auto"] = 8
    stop: str = "fixed"
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None
    ids: tuple[str, ...] = ()
    split: str = "train"
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_drop", self.max_drop), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise InputError(f"{name} {value}: must be between 0 and 1, as a fraction")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: must be 1 or more")
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}: name one of {', '.join(LOSSES)}")
        if self.procedure not in ("auto", *TESTS):
            raise InputError(f"procedure {self.procedure!r}: name auto or one of {', '.join(TESTS)}")
        if self.procedure == "binomial" and self.loss not in BINARY:
            raise InputError(f"procedure binomial: is for losses of 0 or 1; with --loss {self.loss} take betting")
        object.__setattr__(self, "rules", tuple(dict.fromkeys(self.rules)))
        if not self.rules or any(rule in ALONE for rule in self.rules):
            raise InputError("rule: name one or more that draft; target and draft alone need no certificate")

    @cached_property
    def ladders(self) -> list[list[str]]:
        """Each rule's settings from strict to lenient."""
        return [ladder(rule, self.thresholds) for rule in self.rules]

    @property
    def alpha(self) -> float:
        """The error that each rule may make; several share it alike (Bonferroni)."""
        return (1 - self.confidence) / len(self.rules)

    @property
    def bound(self) -> float:
        """The limit of the loss as it is tested, in [0, 1]."""
        return (1 + self.max_drop) / 2 if self.loss == "net" else self.max_drop

    def test(self, n: int) -> Test:
        """How one setting is tested on up to n prompts."""
        name = self.procedure if self.procedure != "auto" else "binomial" if self.loss in BINARY else "betting"
        return TESTS[name](self.bound, self.alpha, looks(n))

    def prompts(self) -> int:
        """All that are named, or as many as let a setting pass, four times in five, that loses a third of what is allowed; four
        times as many where losses are not 0 or 1, as little is known of them. At most the limit."""
        if self.ids:
            return min(len(self.ids), self.limit or len(self.ids))
        return self.limit or (1 if self.loss in BINARY else 4) * (
            needed(self.max_drop, self.alpha, self.max_drop / 3) or 10_000
        )

    def needed(self, losses: NDArray, least: float = 0.0) -> int | None:
        """How many prompts it would take to certify, four times in five, a setting that loses like these, and at least `least`
        on average where they are 0 or 1."""
        if self.loss not in BINARY:
            return needed_like(self.test, losses)
        return needed(self.max_drop, self.alpha, max(float(losses.mean()), least))
