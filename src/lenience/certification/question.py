"""What a certificate is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lenience.certification.sequential_tests import (
    TESTS,
    Test,
    look_schedule,
    sample_size,
    sample_size_by_trial,
)
from lenience.core.errors import InputError
from lenience.decoding.options import Decoding, given_options
from lenience.rules.registry import BASELINES
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
"""The losses that are 0 or 1 for each prompt."""
EVER_NAMED = ("window", "stop", "temperature", "seed")
"""The options that are part of every question's name; others only where they are not the
defaults."""


@dataclass(frozen=True)
class CertifyConfig:
    """What a certificate is asked for; everything is part of the answer's name."""

    rules: tuple[str, ...] = ()
    """Each stands for its settings from strict to lenient."""
    settings: tuple[tuple[str, ...], ...] = ()
    """Beside the rules, or in their place: chains of whole decoders, each from strict to
    lenient, such as "judge:run/judge@0.99; window=16; stop=confidence:0.4"."""
    max_drop: float = 0.01
    confidence: float = 0.95
    loss: Loss = "paired"
    procedure: str = "auto"
    thresholds: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of decoding that were given; the length limit is the task's where it was not."""
    limit: int | None = None
    """How many prompts at most; None for as many as are needed for a good chance."""
    ids: tuple[str, ...] = ()
    split: str = "train"
    allow_weak_target: bool = False
    """Ask although the target is so seldom right that little can be lost by any decoder."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of settings, where they were measured: of several chains' last settings
    that pass, the fastest is certified. No part of the question."""

    def __post_init__(self) -> None:
        for name, value in (("max_drop", self.max_drop), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise InputError(f"{name} {value}: must be between 0 and 1, as a fraction")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: must be 1 or more")
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}: name one of {', '.join(LOSSES)}")
        if self.procedure not in ("auto", *TESTS):
            known = ", ".join(TESTS)
            raise InputError(f"procedure {self.procedure!r}: name auto or one of {known}")
        if self.procedure == "binomial" and self.loss not in BINARY:
            mend = f"with --loss {self.loss} take betting"
            raise InputError(f"procedure binomial: is for losses of 0 or 1; {mend}")
        object.__setattr__(self, "rules", tuple(dict.fromkeys(self.rules)))
        if not (self.rules or self.settings) or any(rule in BASELINES for rule in self.rules):
            raise InputError(
                "rule: name one or more that draft; target and draft alone need no certificate"
            )
        if "rule" in self.options:
            raise InputError("options: rule is said in rules")
        if self.decoding.stop_strings:
            raise InputError("stop_strings: answers are certified to their end; leave them out")

    @cached_property
    def decoding(self) -> Decoding:
        """The options of decoding, the rule left open."""
        return Decoding.of(self.options)

    def chains(self, shared: Decoding | None = None) -> list[list[Decoding]]:
        """Whole decoders from strict to lenient, for each rule and then as they are given; what
        they do not name is as in `shared`, or in the question's own options."""
        shared = shared or self.decoding
        chains = [
            [shared.with_options({"rule": one}) for one in ladder(rule, self.thresholds)]
            for rule in self.rules
        ]
        return chains + [
            [shared.with_options(given_options(text)) for text in chain] for chain in self.settings
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything that is asked; options under their own names."""
        decoding = self.decoding.to_json()
        named = {name: decoding[name] for name in EVER_NAMED}
        named["max_new_tokens"] = self.options.get("max_new_tokens")
        changed = self.decoding.changed()
        return {
            "rules": list(self.rules),
            **({"settings": list(map(list, self.settings))} if self.settings else {}),
            **({"allow_weak_target": True} if self.allow_weak_target else {}),
            "max_drop": self.max_drop,
            "confidence": self.confidence,
            "loss": self.loss,
            "procedure": self.procedure,
            "thresholds": list(self.thresholds),
            "limit": self.limit,
            "ids": list(self.ids),
            "split": self.split,
            **{name: value for name, value in changed.items() if name != "rule"},
            **named,
        }

    @property
    def alpha(self) -> float:
        """The error that each rule or chain may make; several share it alike (Bonferroni)."""
        return (1 - self.confidence) / (len(self.rules) + len(self.settings))

    @property
    def least_accuracy(self) -> float:
        """Of the target: what is lost is a part of what it gets right, so that a weak one would
        certify anything."""
        return 0.0 if self.allow_weak_target else min(10 * self.max_drop, 0.5)

    @property
    def bound(self) -> float:
        """The limit of the loss as it is tested, in [0, 1]."""
        return (1 + self.max_drop) / 2 if self.loss == "net" else self.max_drop

    def test(self, n: int) -> Test:
        """How one setting is tested on up to n prompts."""
        name = self.procedure
        if name == "auto":
            name = "binomial" if self.loss in BINARY else "betting"
        return TESTS[name](self.bound, self.alpha, look_schedule(n))

    def num_prompts(self) -> int:
        """All that are named, or as many as let a setting pass, four times in five, that loses a
        third of what is allowed; four times as many where losses are not 0 or 1, as little is known
        of them. At most the limit."""
        if self.ids:
            return min(len(self.ids), self.limit or len(self.ids))
        if self.limit:
            return self.limit
        enough = sample_size(self.max_drop, self.alpha, self.max_drop / 3) or 10_000
        return enough if self.loss in BINARY else 4 * enough

    def sample_size(self, losses: NDArray, least: float = 0.0) -> int | None:
        """How many prompts it would take to certify, four times in five, a setting that loses like
        these, and at least `least` on average where they are 0 or 1."""
        if self.loss not in BINARY:
            return sample_size_by_trial(self.test, losses)
        return sample_size(self.max_drop, self.alpha, max(float(losses.mean()), least))
