"""The question that a certificate answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lenience.certification.sequential_tests import (
    COMMON,
    TESTS,
    Binomial,
    PairedBetting,
    Test,
    sample_size,
    sample_size_by_trial,
)
from lenience.core.errors import InputError
from lenience.decoding.decoder import Decoder
from lenience.decoding.options import given_options
from lenience.rules.baselines import BASELINES
from lenience.rules.settings import ladder
from lenience.tasks import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

Loss = Literal["paired", "net", "disagreement", "task"]
LOSSES: dict[str, str] = {
    "paired": "the share of prompts that the target alone answers rightly and this decoder wrongly",
    "net": "the target's accuracy minus this decoder's",
    "disagreement": Task.disagreement_is,
    "task": Task.loss_is,
}
"""Description of each loss, unless the task has its own."""
BINARY = ("paired", "disagreement")
"""Losses that are 0 or 1 for each prompt."""
EVER_NAMED = ("window", "stop", "temperature")
"""Options that are part of every question's identity; others only if they are not the defaults."""
HORIZON = 50
"""Default horizon times max_drop: the error is spent over 5,000 prompts for 1 %."""


@dataclass(frozen=True)
class CertifyConfig:
    """A question to certify. Every field is part of the question's identity, except where its doc
    says otherwise."""

    rules: tuple[str, ...] = ()
    """Rules to certify; each stands for its settings from strict to lenient."""
    settings: tuple[tuple[str, ...], ...] = ()
    """Chains of whole decoders to test besides the rules, each from strict to lenient. A decoder is
    written like "judge:run/judge@0.99; window=16; stop=confidence:0.4"."""
    max_drop: float = 0.01
    confidence: float = 0.95
    loss: Loss = "paired"
    procedure: str = "auto"
    thresholds: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Decoding options that were given. The length limit defaults to the task's."""
    horizon: int | None = None
    """Number of prompts over which the error is spent, and the most that the question can ever use.
    Default: 50 / max_drop, and four times as many for losses other than 0 and 1."""
    limit: int | None = None
    """Maximum number of prompts for now; a larger number resumes the question. Default: three
    fifths of the horizon, which gives most settings a good chance. Not part of the question."""
    ids: tuple[str, ...] = ()
    split: str = "train"
    allow_weak_target: bool = False
    """True to certify although the target is right so seldom that any decoder loses little. Not
    part of the question."""
    windows: tuple[int, ...] = ()
    """Windows among which an engine may choose for each answer. The loss of an answer is then the
    largest over these windows, so the bound holds for any choice. Default: the window of the
    options."""
    draws: int = 1
    """Number of sampled answers per prompt. The prompt stays the unit: its loss is the mean over
    its draws."""
    labels: Path | None = None
    """JSONL file for missing references. Prompts without a reference on which the answers differ
    are written to it, and their references are read from it. Not part of the question."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of settings in a race, reported with their losses. Not part of the
    question."""
    command: str = ""
    """Command line, for the certificate's page. Not part of the question."""
    home: Path | None = None
    """Folder of the ledger. Default: the user's data folder. Not part of the question."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max_drop", self.max_drop),
            ("confidence", self.confidence),
        ):
            if not 0 < value < 1:
                raise InputError(
                    f"{name} {value}: must be between 0 and 1, as a fraction"
                )
        for name in ("limit", "horizon"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: must be 1 or more")
        if self.draws < 1:
            raise InputError(f"draws {self.draws}: must be 1 or more")
        if self.draws > 1 and not self.decoder.temperature:
            raise InputError(
                f"draws {self.draws}: greedy answers do not vary; give a temperature, or one draw"
            )
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}: name one of {', '.join(LOSSES)}")
        if self.procedure not in ("auto", *TESTS):
            known = ", ".join(TESTS)
            raise InputError(
                f"procedure {self.procedure!r}: name auto or one of {known}"
            )
        if self.procedure == "binomial" and not self.is_binary:
            fix = f"with --loss {self.loss} or several draws use betting"
            raise InputError(f"procedure binomial: needs losses of 0 or 1; {fix}")
        object.__setattr__(self, "rules", tuple(dict.fromkeys(self.rules)))
        if self.windows:
            self._check_windows()
        if not (self.rules or self.settings) or any(
            rule in BASELINES for rule in self.rules
        ):
            raise InputError(
                "rule: name a rule that drafts; target and draft need no certificate"
            )
        if "rule" in self.options:
            raise InputError("options: give rule in rules, not in options")

    def _check_windows(self) -> None:
        """Sort the windows. Raises InputError for windows beside an option or settings that have
        windows too."""
        windows = tuple(sorted(set(self.windows)))
        if "window" in self.options:
            raise InputError("window: cannot be combined with windows")
        if self.settings:
            raise InputError("windows: need rules, as settings have their own windows")
        if windows[0] < 1:
            raise InputError(f"windows {windows[0]}: must be 1 or more")
        object.__setattr__(self, "windows", windows)

    @cached_property
    def decoder(self) -> Decoder:
        """Return the decoder of the given options; its rule is not part of the question. Of several
        windows it has the widest."""
        widest = {"window": max(self.windows)} if self.windows else {}
        return Decoder.of({**self.options, **widest})

    def chains(self, shared: Decoder | None = None) -> list[list[Decoder]]:
        """Return chains of decoders from strict to lenient: one for each rule, then the given
        chains. Options that a decoder does not set come from `shared`, or from the question."""
        shared = shared or self.decoder
        chains = []
        for text in self.rules:
            rules = ladder(text, self.thresholds)
            chains.append([shared.with_parts(rule=rule) for rule in rules])
        for texts in self.settings:
            given = map(given_options, texts)
            chains.append([shared.with_options(options) for options in given])
        return chains

    def to_json(self) -> dict[str, Any]:
        """Return the question's identity, with decoding options under their own names."""
        decoder = self.decoder.to_json()
        named = {name: decoder[name] for name in EVER_NAMED}
        named["max_new_tokens"] = self.options.get("max_new_tokens")
        if self.decoder.temperature:
            named["seed"] = decoder["seed"]
        changed = self.decoder.changed()
        return {
            "rules": list(self.rules),
            **({"settings": list(map(list, self.settings))} if self.settings else {}),
            "max_drop": self.max_drop,
            "confidence": self.confidence,
            "loss": self.loss,
            "procedure": self.procedure,
            "thresholds": list(self.thresholds),
            **({} if self.horizon is None else {"horizon": self.horizon}),
            **({} if self.draws == 1 else {"draws": self.draws}),
            **({"windows": list(self.windows)} if self.windows else {}),
            "ids": list(self.ids),
            "split": self.split,
            **{
                name: value
                for name, value in changed.items()
                if name not in ("rule", "seed")
            },
            **named,
        }

    @property
    def is_binary(self) -> bool:
        """Return True if each prompt's loss is 0 or 1."""
        return self.loss in BINARY and self.draws == 1

    def alpha(self, share: float) -> float:
        """Return the error budget of each rule or chain, which split the question's `share` of the
        error evenly (Bonferroni)."""
        return share * (1 - self.confidence) / (len(self.rules) + len(self.settings))

    @property
    def least_accuracy(self) -> float:
        """Return the minimum accuracy required of the target. A loss is a part of the target's
        correct answers, so a weak target would certify anything."""
        return 0.0 if self.allow_weak_target else min(10 * self.max_drop, 0.5)

    @property
    def needs_references(self) -> bool:
        return self.loss in ("paired", "net")

    def needs_target_right(self, task: Task) -> bool:
        """Return True if a target that is seldom right would hide losses."""
        if self.loss == "disagreement":
            return task.same_where_wrong
        return self.needs_references or task.by_degree

    def loss_of(self, task: Task) -> str:
        """Return a description of the bounded loss."""
        of_task = {"disagreement": task.disagreement_is, "task": task.loss_is}
        return of_task.get(self.loss, LOSSES[self.loss])

    @property
    def bound(self) -> float:
        """Return the limit of the tested loss, in [0, 1]; the net loss is mapped from [−1, 1]."""
        return (1 + self.max_drop) / 2 if self.loss == "net" else self.max_drop

    @property
    def at_par(self) -> float:
        """Return the tested loss of an answer that is as good as the target's."""
        return 0.5 if self.loss == "net" else 0.0

    @property
    def spent_over(self) -> int:
        """Return the horizon, in prompts. Losses other than 0 and 1 take more prompts."""
        usual = math.ceil(HORIZON / self.max_drop)
        return self.horizon or (usual if self.is_binary else 4 * usual)

    def test(self, share: float) -> Test:
        """Return the test of one setting, given the question's share of the error."""
        given = self.bound, self.alpha(share), self.spent_over
        paired = self.loss == "net" and self.draws == 1
        if paired and self.procedure in ("auto", "betting"):
            return PairedBetting(*given)
        automatic = "binomial" if self.is_binary else "betting"
        return TESTS[automatic if self.procedure == "auto" else self.procedure](*given)

    def num_prompts(self) -> int:
        """Return the number of prompts to draw: all named ids, or as many as spend most of the
        error. At most the limit and the horizon."""
        if self.ids:
            return min(len(self.ids), self.limit or len(self.ids), self.spent_over)
        return min(self.limit or math.ceil(COMMON * self.spent_over), self.spent_over)

    def sample_size(
        self, losses: NDArray, share: float, least: float = 0.0
    ) -> int | None:
        """Return the number of prompts that certifies a setting with losses like these four times
        in five; None if more than the horizon. If losses are 0 or 1, their mean counts as at least
        `least`."""
        test = self.test(share)
        if isinstance(test, Binomial):
            return sample_size(test, max(float(losses.mean()), least))
        return sample_size_by_trial(test, losses)

    def least_prompts(self, share: float) -> int | None:
        """Return the number of prompts that certifies a setting that never loses or gains
        anything."""
        return self.sample_size(np.full(1, self.at_par), share)
