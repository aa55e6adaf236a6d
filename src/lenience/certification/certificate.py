"""certificate.json in a run folder, and the decoder of a rule "certified:RUN"."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from lenience.core.errors import InputError
from lenience.core.files import built_in, read_json
from lenience.core.hub import is_on_hub
from lenience.core.records import Record
from lenience.decoding.decoder import Binding, Decoder, Ends, relocated_options
from lenience.decoding.options import bound_names
from lenience.rules.names import short_name
from lenience.tasks.base import AnswerValue

PREFIX = "certified:"
FILE = "certificate.json"
BOUND_BESIDE = (
    "models", "tokenizer", "template", "generation_config", "heads", "task", "reads", "data",
)  # fmt: skip
"""Facts that a certificate binds, besides decoding options."""
BOUND_MODELS = (
    "models",
    "tokenizer",
    "template",
    "generation_config",
    "heads",
    "engine",
    "reference",
    "candidate",
    "claims",
)
"""Bound facts that a pair is compared with before decoding."""
FROM_CERTIFICATE = (
    "window",
    "stop",
    "drafter",
    "tree",
    "max_new_tokens",
    "stop_strings",
)
"""Options taken from the certificate if the caller omits them; other omitted options take their
defaults."""


def is_certified(rule: object) -> bool:
    """Return True if a rule has the form "certified:RUN"."""
    return isinstance(rule, str) and rule.startswith(PREFIX)


def refuse_certified(rules: Iterable[str]) -> None:
    """Raise InputError if a rule is "certified:RUN", for commands that compare explicit
    settings."""
    for rule in rules:
        if is_certified(rule):
            raise InputError(
                f"rule {rule}: binds its own window; compare the certified rule by its "
                "spec"
            )


class TriedSetting(Record):
    """The outcome of one setting's test."""

    rule: str
    window: int
    windows: dict[int, float] = Field(default_factory=dict)
    """Sum of losses at each window, if an engine may choose among several; `losses` counts for each
    prompt the largest of them. Empty for a single window."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that differ from the question's."""
    n: int
    losses: float
    paired: float | None = None
    """Number of prompts on which the target was right and this setting wrong; None if the loss
    needs no references."""
    upper_bound: float
    """Upper bound on this setting's mean loss, as if it were the only setting tested."""
    passed: bool
    hopeless: bool
    """True if the test was given up as futile."""
    tokens_per_pass: float
    accuracy: float
    target_accuracy: float
    """Accuracy of the target alone on the first prompts, at most 50; the test does not need its
    answer to every prompt."""
    tokens_per_second: float | None = None
    """Speed in the race on the tuning machine; None without a race."""

    def verdict(self, max_drop: float) -> str:
        """Return the test's outcome as a phrase."""
        if self.passed:
            return "passes"
        if not self.hopeless:
            return "does not pass"
        return "too few prompts" if self.losses <= max_drop * self.n else "given up"

    @property
    def shown_name(self) -> str:
        """Return the name of the setting, without its window."""
        options = relocated_options(self.options, lambda path: Path(path).name)
        further = [f"{name} {value}" for name, value in options.items()]
        return ", ".join([short_name(self.rule), *further])

    @property
    def shown_window(self) -> str:
        """Return the window, or the windows that an engine may choose among, as text."""
        return ", ".join(map(str, sorted(self.windows))) or str(self.window)

    def decoder(self, shared: Decoder) -> Decoder:
        """Return the setting's decoder; options that it does not set come from `shared`."""
        return shared.with_options(
            {"rule": self.rule, "window": self.window, **self.options}
        )


class Certified(TriedSetting):
    """The certified setting."""

    threshold: float | None
    heads: dict[str, str]
    """Location of each head by its path in the rule: relative to the run folder if inside it,
    otherwise absolute, or a Hub name."""


class LostAnswer(Record):
    """One of the two answers to a prompt on which quality was lost."""

    text: str
    answer: AnswerValue


class LostSample(Record):
    """A prompt on which quality was lost."""

    id: str
    prompt: Any
    reference: AnswerValue
    loss: float
    """Tested loss, from 0 to 1."""
    target: LostAnswer
    lenient: LostAnswer


class Certificate(Record):
    """certificate.json: the question, its result, and the facts it binds."""

    certified: Certified | None
    """Certified setting; None if nothing is certified."""
    max_drop: float
    confidence: float
    n: int
    losses: float
    upper_bound: float
    procedure: str
    binds: dict[str, Any]
    loss: str = "paired"
    loss_is: str = ""
    attempt: int = 1
    """Number of this attempt among those on the same kind of prompts, counted from 1."""
    level: float | None = None
    """Error budget of this attempt, for all rules; None if it is the whole 1 − confidence."""
    key: str = ""
    """Digest that identifies the question."""
    most: int | None = None
    """Number of prompts that were available for the question."""
    drawn: str = ""
    """Description of how the prompts were chosen."""
    withdrawn: str | None = None
    """Reason for the withdrawal, after which nothing is certified; None while in force."""
    promises_not: tuple[str, ...] = ()
    tried: tuple[TriedSetting, ...] = ()
    lost: tuple[LostSample, ...] = ()
    """Prompts on which quality was lost, with both answers."""
    gained: tuple[LostSample, ...] = ()
    """Prompts that the target answered too, and on which only this setting is right."""
    command: str = ""
    """Command that made the certificate."""
    grading: dict[str, int] | None = None
    """Counts of a grader's judgements, see `lenience.tasks.grader.GradingCounts`."""
    noise: dict[str, int] | None = None
    """Number of prompts that a reference server answered twice, and how many of these pairs differ
    in text and in answer."""
    candidate_noise: dict[str, dict[str, int]] | None = None
    """The same counts for each candidate server, by its name."""
    reason: str | None = None
    """Reason why nothing is certified; None if a setting is."""
    needed: int | None = None
    """Estimated number of prompts that would have been needed."""
    decoded: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Return True if a setting is certified and the certificate is not withdrawn."""
        return self.certified is not None and self.withdrawn is None

    def decoder(self, folder: Path) -> Decoder:
        """Return the certified decoder. Head paths are resolved against `folder`, the run folder or
        a certificate file in it."""
        assert self.certified is not None
        run = folder.parent if folder.suffix == ".json" else folder
        heads = self.certified.heads

        def path_now(path: str) -> str:
            found = heads.get(path, path)
            return found if is_on_hub(found) else str(run / found)

        options = {name: self.binds[name] for name in bound_names()}
        found = Decoder.of({**options, "rule": self.certified.rule}).relocated(path_now)
        binds = {name: self.binds[name] for name in BOUND_MODELS if name in self.binds}
        binds["drafter"] = str(found.without_paths().drafter)
        windows = tuple(self.binds.get("windows", ()))
        return replace(found, bound_to=Binding(f"{PREFIX}{folder}", binds, windows))


def certificate_path(folder: Path) -> Path:
    """Return the path of a run folder's certificate; a .json path is returned as it is."""
    return folder if folder.suffix == ".json" else folder / FILE


def read_certificate(folder: Path) -> Certificate:
    """Return the certificate of a run folder or of a .json file. Raises InputError if it is
    missing, broken, or lacks a bound fact."""
    path = certificate_path(folder)
    if not path.exists():
        fix = f"`lenience certify {path.parent}` makes one"
        raise InputError(f"{path}: there is no certificate; {fix}")
    what = f"{path}: is no certificate"
    certificate = Certificate.read(read_json(path), what, "certify again")
    # an option that the certificate lacks did not exist yet, so its default was in force
    binds = {**Decoder().bound(), **certificate.binds}
    certificate = certificate.model_copy(update={"binds": binds})
    lacking = [f"binds {key}" for key in BOUND_BESIDE if key not in certificate.binds]
    if lacking:
        raise InputError(f"{what}: lacks {', '.join(lacking)}; certify again")
    return certificate


def resolve(given: Mapping[str, Any]) -> Decoder:
    """Return the decoder for options whose rule is "certified:RUN", bound to the certified setting.
    Raises InputError for an option that differs from the certified one. If the certificate
    certifies nothing, warn and return a strict decoder."""
    rule = str(given["rule"])
    folder = run_of(rule)
    certificate = read_certificate(folder)
    options = {name: value for name, value in given.items() if name != "rule"}
    if not certificate.holds:
        why = f"nothing was certified ({certificate.reason})"
        if certificate.withdrawn:
            why = f"the certificate is withdrawn ({certificate.withdrawn})"
        warnings.warn(f"{rule}: {why}; decoding strictly", stacklevel=2)
        strict = "speculative" if options.get("temperature") else "exact"
        return Decoder.of({**options, "rule": strict})
    certified = certificate.decoder(folder)
    asked = Decoder.of(options)
    if "window" in options:
        certified = _at_window(certified, asked)
    _check_options(rule, options, certified, asked)
    if "max_new_tokens" not in options:
        asked = replace(asked, max_new_tokens=certified.max_new_tokens)
    return _with_ends(certified, asked)


def narrowed(certified: Decoder, given: Mapping[str, Any]) -> Decoder:
    """Return a certified decoder with the seed and the earlier ends that a request gives; options
    that it does not give are the certified ones. Raises InputError for an option that differs."""
    assert certified.bound_to is not None
    source = certified.bound_to.source
    asked = replace(certified, **given)
    for name in given:
        same = getattr(asked, name) == getattr(certified, name)
        shorter = (
            name == "max_new_tokens" and asked.max_new_tokens < certified.max_new_tokens
        )
        if not (same or shorter or name in ("seed", "stop_strings")):
            raise _differs(
                source,
                name,
                repr(getattr(certified, name)),
                getattr(asked, name),
            )
    return _with_ends(certified, asked)


def _at_window(certified: Decoder, asked: Decoder) -> Decoder:
    """Return a certified decoder at the window of another, if it is certified at that window."""
    assert certified.bound_to is not None
    if asked.window in certified.bound_to.windows:
        return replace(certified, window=asked.window)
    return certified


def _with_ends(certified: Decoder, asked: Decoder) -> Decoder:
    """Return a certified decoder with the seed, the lower length limit and the further stop strings
    of another."""
    further = tuple(
        text for text in asked.stop_strings if text not in certified.stop_strings
    )
    is_shorter = asked.max_new_tokens < certified.max_new_tokens
    ends = Ends(asked.max_new_tokens if is_shorter else None, further)
    return replace(certified, seed=asked.seed, ends=ends)


def _differs(source: str, name: str, certified: str, given: Any) -> InputError:
    return InputError(
        f"{source}: was certified with {name} {certified}, not {given!r}; give the same, or "
        "certify again"
    )


def _check_options(
    rule: str, given: Mapping[str, Any], certified: Decoder, asked: Decoder
) -> None:
    """Raise InputError for an option that differs from the certified one. A lower length limit and
    further stop strings are allowed."""
    bound = certified.without_paths().to_json()
    own = asked.without_paths().to_json()
    for name in bound_names():
        if name == "stop_strings" or (name in FROM_CERTIFICATE and name not in given):
            continue
        if name == "max_new_tokens" and own[name] < bound[name]:
            continue
        if own[name] != bound[name]:
            assert certified.bound_to is not None
            several = certified.bound_to.windows if name == "window" else ()
            known = ", ".join(map(str, several)) if several else repr(bound[name])
            raise _differs(rule, name, known, own[name])


def run_of(rule: str) -> Path:
    """Return the run folder or certificate file that "certified:RUN" names."""
    return Path(rule.removeprefix(PREFIX).strip('"'))


def head_paths(decoder: Decoder, folder: Path) -> dict[str, str]:
    """Return the location of each head by its path in the decoder's spec: relative to the run
    folder if inside it, otherwise absolute. Hub names are kept, built-in heads left out."""
    paths = {}
    for head in decoder.heads:
        if built_in(head.path):
            continue
        if is_on_hub(head.path):
            paths[head.path] = head.path
            continue
        whole = Path(head.path).resolve()
        within = os.path.relpath(whole, folder.resolve())
        paths[head.path] = str(whole) if within.startswith("..") else within
    return paths
