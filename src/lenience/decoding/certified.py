"""What a certificate says, what it binds, and how a rule "certified:RUN" becomes the rule that it
certifies."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from lenience.core.errors import InputError
from lenience.core.files import built_in, read_json
from lenience.core.hub import is_on_hub
from lenience.core.protocols import Rule
from lenience.core.records import Record
from lenience.decoding.options import OWN, Decoding, bound_names
from lenience.drafting.base import DrafterSpec, Fitted
from lenience.drafting.parsing import parse_drafter
from lenience.drafting.stops import Stop, parse_stop
from lenience.drafting.trees.shapes import parse_tree
from lenience.rules.parsing import parse_rule, parse_spec
from lenience.rules.registry import BASELINES
from lenience.tasks.base import AnswerValue

PREFIX = "certified:"
FILE = "certificate.json"
BOUND_BESIDE = (
    "models", "tokenizer", "template", "generation_config", "heads", "task", "reads", "data",
)  # fmt: skip
"""What a certificate binds besides the options of decoding."""
FROM_CERTIFICATE = ("window", "stop", "drafter", "tree", "max_new_tokens", "stop_strings")
"""The options that are the certificate's where a caller leaves them out; others are the
defaults."""


def is_certified(rule: object) -> bool:
    return isinstance(rule, str) and rule.startswith(PREFIX)


def refuse_certified(rules: Iterable[str]) -> None:
    """Raise InputError for a rule "certified:RUN", where settings of one's own are compared."""
    for rule in rules:
        if is_certified(rule):
            raise InputError(
                f"rule {rule}: binds a window of its own; compare the rule that it certifies, by "
                "its spec"
            )


class TriedSetting(Record):
    """How the test of one setting ended."""

    rule: str
    window: int
    options: dict[str, Any] = Field(default_factory=dict)
    """What else is not as the question has it."""
    n: int
    losses: float
    paired: int | None = None
    """On how many prompts the target was right and this is wrong; None where references are not
    asked for."""
    upper_bound: float
    """Of this setting's mean loss, as if it alone had been tried."""
    passed: bool
    hopeless: bool
    """Whether it was given up before the last look."""
    tokens_per_pass: float
    accuracy: float
    target_accuracy: float
    """On the first of them, at most 50: the target's answer to each is not needed."""
    tokens_per_second: float | None = None
    """In the race on the machine that it was tuned on; None where it was not."""

    def decoding(self, shared: Decoding) -> Decoding:
        """The whole decoder, what the setting does not name as in `shared`."""
        return shared.with_options({"rule": self.rule, "window": self.window, **self.options})


class Certified(TriedSetting):
    """The setting that is certified."""

    threshold: float | None
    heads: dict[str, str]
    """Where its heads lie, by their paths in the rule: within the run folder, or else on this
    machine."""


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
    """From 0 to 1, as it is tested."""
    target: LostAnswer
    lenient: LostAnswer


class Certificate(Record):
    """certificate.json: what was asked, what was found, and what it binds."""

    certified: Certified | None
    """None where nothing is."""
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
    """Which question on such prompts it answers, from 1."""
    level: float | None = None
    """The error that it was tested at, all rules together; None where it was the whole."""
    key: str = ""
    """The question."""
    most: int | None = None
    """How many prompts it might have taken."""
    drawn: str = ""
    """How the prompts were chosen."""
    withdrawn: str | None = None
    """Why it holds no longer: then it certifies nothing."""
    promises_not: tuple[str, ...] = ()
    tried: tuple[TriedSetting, ...] = ()
    lost: tuple[LostSample, ...] = ()
    """The prompts on which quality was lost, with both answers."""
    grading: dict[str, int] | None = None
    """How a grader judged, see `lenience.tasks.grader.GradingCounts`."""
    reason: str | None = None
    """Why nothing is certified."""
    needed: int | None = None
    """About how many prompts would have been needed."""
    decoded: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether it certifies something, still."""
        return self.certified is not None and self.withdrawn is None


def certificate_path(folder: Path) -> Path:
    """The certificate's file in a run folder; a file's own path is it."""
    return folder if folder.suffix == ".json" else folder / FILE


def read_certificate(folder: Path) -> Certificate:
    """The certificate of a run folder, or in a file. Raises InputError where there is none or it is
    broken."""
    path = certificate_path(folder)
    if not path.exists():
        mend = f"`lenience certify {path.parent}` makes one"
        raise InputError(f"{path}: there is no certificate; {mend}")
    what = f"{path}: is no certificate"
    certificate = Certificate.read(read_json(path), what, "certify again")
    # an option that it does not name was not there when it was made
    binds = {**Decoding().bound(), **certificate.binds}
    certificate = certificate.model_copy(update={"binds": binds})
    if lacking := [f"binds {key}" for key in BOUND_BESIDE if key not in certificate.binds]:
        raise InputError(f"{what}: lacks {', '.join(lacking)}; certify again")
    return certificate


def resolve(rule: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For "certified:RUN" the options to decode with, filled in from what the certificate binds,
    and what that is.

    Raises InputError, by name, for an option that differs: every lenient answer depends on it. A
    certificate that certifies nothing stands for the strict rule, with a warning.
    """
    folder = run_of(rule)
    certificate = read_certificate(folder)
    options = {name: value for name, value in given.items() if name != "rule"}
    if not certificate.holds:
        why = f"nothing was certified ({certificate.reason})"
        if certificate.withdrawn:
            why = f"the certificate is withdrawn ({certificate.withdrawn})"
        warnings.warn(f"{rule}: {why}; decoding strictly", stacklevel=2)
        strict = "speculative" if options.get("temperature") else "exact"
        return {**options, "rule": strict}, {}
    binds = certificate.binds
    options = _to_their_end(options, binds)
    defaults = Decoding().to_json()
    for name in bound_names():
        default = binds[name] if name in FROM_CERTIFICATE else defaults[name]
        value = options.get(name, default)
        if _comparable(name, value) != _comparable(name, binds[name]):
            raise InputError(
                f"{rule}: was certified with {name} {binds[name]!r}, not {value!r}; give the "
                "same, or certify again"
            )
    return {**certified_options(certificate, folder), **options}, binds


@dataclass(frozen=True)
class Sooner:
    """Where a caller wants the answers of a certified rule to end that were certified to a later
    end. They are decoded as they were certified, windows and all, and then cut off: what is given
    is the beginning of a certified answer."""

    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()


def sooner(given: Mapping[str, Any], decoding: Decoding) -> Sooner:
    """Where options want the answers of a certified rule to end, as its `decoding` does not."""
    most, stops = given.get("max_new_tokens"), _stops(given)
    further = tuple(one for one in stops if one not in decoding.stop_strings)
    return Sooner(most if most and most < decoding.max_new_tokens else None, further)


def _to_their_end(options: Mapping[str, Any], binds: Mapping[str, Any]) -> dict[str, Any]:
    """Options that end answers where they were certified to end; what ends them sooner is left
    out, see `Sooner`. Raises InputError for what no decoding can use."""
    asked = Decoding.of({name: options.get(name) for name in ("max_new_tokens", "stop_strings")})
    kept = dict(options)
    if options.get("max_new_tokens") and asked.max_new_tokens < binds["max_new_tokens"]:
        del kept["max_new_tokens"]
    kept.pop("stop_strings", None)  # those of the certificate end answers too
    return kept


def _stops(options: Mapping[str, Any]) -> tuple[str, ...]:
    return Decoding.of({"stop_strings": options.get("stop_strings")}).stop_strings


def _comparable(name: str, value: Any) -> Any:
    """An option's value as it is compared: of a spec, without where its heads lie."""
    if name == "stop":
        return stop_without_paths(value)
    if name == "drafter":
        return drafter_without_paths(value)
    if name == "stop_strings":
        return list(value)
    return str(parse_tree(value)) if name == "tree" else value


def run_of(rule: str) -> Path:
    """The run folder, or the certificate's file, of "certified:RUN"."""
    return Path(rule.removeprefix(PREFIX).strip('"'))


def certified_rule(rule: str, certificate: Certificate) -> str:
    """The rule that the certificate of "certified:RUN" certifies, with its heads where the run is
    now."""
    return str(certified_options(certificate, run_of(rule))["rule"])


def certified_options(certificate: Certificate, folder: Path) -> dict[str, Any]:
    """The rule and the options that a certificate certifies, with its heads where its run folder is
    now."""
    run = folder.parent if folder.suffix == ".json" else folder
    assert certificate.certified is not None
    heads, binds = certificate.certified.heads, certificate.binds

    def path_now(path: str) -> str:
        found = heads.get(path, path)
        return found if is_on_hub(found) else str(run / found)

    options = {name: binds[name] for name in bound_names()}
    rule = _relocated(certificate.certified.rule, path_now)
    stop = str(parse_stop(binds["stop"]).relocated(path_now))
    drafter = str(parse_drafter(binds["drafter"]).relocated(path_now))
    return options | {"rule": rule, "stop": stop, "drafter": drafter}


def heads_of(rule: str | Rule) -> tuple[Fitted, ...]:
    """The fitted heads that a rule asks. Raises InputError for a wrong spec."""
    return () if rule in BASELINES else parse_rule(rule).heads


def heads_in(decoding: Decoding) -> list[Fitted]:
    """The fitted heads that a decoding's rule, stop condition and drafter ask. Raises InputError
    for a wrong spec."""
    stop, drafter = parse_stop(decoding.stop), parse_drafter(decoding.drafter)
    return [*heads_of(decoding.rule), *stop.heads, *drafter.fitted]


def head_paths(decoding: Decoding, folder: Path) -> dict[str, str]:
    """Where the heads of a decoding's rule, stop condition and drafter lie, by their paths in
    these: within the run folder, or else on this machine."""
    paths = {}
    for head in heads_in(decoding):
        if built_in(head.path):
            continue
        if is_on_hub(head.path):
            paths[head.path] = head.path
            continue
        whole = Path(head.path).resolve()
        within = os.path.relpath(whole, folder.resolve())
        paths[head.path] = str(whole) if within.startswith("..") else within
    return paths


def without_paths(rule: str) -> str:
    """A rule without where its heads lie."""
    return _relocated(rule, lambda path: Path(path).name)


def stop_without_paths(stop: str | Stop) -> str:
    """A stop condition without where its head lies."""
    return str(parse_stop(stop).relocated(lambda path: Path(path).name))


def drafter_without_paths(drafter: str | DrafterSpec) -> str:
    """A drafter without where its heads lie."""
    return str(parse_drafter(drafter).relocated(lambda path: Path(path).name))


def setting_without_paths(decoding: Decoding) -> Decoding:
    """A whole decoder without where its heads lie."""
    rule, stop = without_paths(str(decoding.rule)), stop_without_paths(decoding.stop)
    drafter = drafter_without_paths(decoding.drafter)
    return replace(decoding, rule=rule, stop=stop, drafter=drafter)


def _relocated(rule: str, path: Callable[[str], str]) -> str:
    if rule in BASELINES:
        return rule
    return str(parse_spec(rule).with_terms(lambda term: term.relocated(path)))


def check_binding(rule: str, binds: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError, by name, for the first of the models, heads and templates that is not what
    was certified."""
    bound = {"engine": OWN, **binds}
    for name, value in {"engine": OWN, **now}.items():
        if bound[name] != value:
            what = f"{name} {_difference(bound[name], value)}"
            raise InputError(f"{rule}: was certified with {what}; certify again")


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        part = next((key for key in {**before, **now} if before.get(key) != now.get(key)), None)
        return f"{part} {_difference(before.get(part), now.get(part))}"
    return f"{before!r}, not {now!r}"
