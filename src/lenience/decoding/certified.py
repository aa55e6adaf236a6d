"""What a certificate says, what it binds, and how a rule "certified:RUN" becomes the rule that it certifies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.decoding.options import learned
from lenience.drafting.stops import Stop, parse_stop
from lenience.heads.head import Learned

PREFIX = "certified:"
FILE = "certificate.json"
KEYS = ("certified", "max_drop", "confidence", "n", "losses", "upper_bound", "procedure", "binds")
OPTIONS = ("window", "stop", "temperature", "top_k", "top_p", "max_new_tokens")
"""What a certificate binds of what a caller decodes with."""
BINDS = ("models", "tokenizer", "template", "generation_config", "heads", "drafter", *OPTIONS, "task", "reads", "data")
DEFAULTS: dict[str, Any] = {"stop": "fixed", "temperature": 0.0, "top_k": None, "top_p": None}
"""Of those that a caller may leave out; a window and a length limit are then the certificate's."""


def is_certified(rule: object) -> bool:
    return isinstance(rule, str) and rule.startswith(PREFIX)


def refuse_certified(rules: Iterable[str]) -> None:
    """Raise InputError for a rule "certified:RUN", where settings of one's own are compared."""
    if certified := [rule for rule in rules if is_certified(rule)]:
        raise InputError(f"rule {certified[0]}: binds a window of its own; compare the rule that it certifies, by its spec")


def read_certificate(folder: Path) -> dict[str, Any]:
    """The certificate of a run folder, or in a file. Raises InputError where there is none or it is broken."""
    path = folder if folder.suffix == ".json" else folder / FILE
    if not path.exists():
        raise InputError(f"{path}: there is no certificate; `lenience certify {path.parent}` makes one")
    made = read_json(path)
    lacking = [key for key in KEYS if key not in made]
    if not lacking:
        binds = made["binds"] if isinstance(made["binds"], dict) else {}
        lacking = [f"binds {key}" for key in BINDS if key not in binds]
    if not lacking and made["certified"]:
        lacking = [f"certified {key}" for key in ("rule", "heads") if key not in made["certified"]]
    if lacking:
        raise InputError(f"{path}: is no certificate, it lacks {', '.join(lacking)}; certify again")
    return made


def resolve(rule: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For "certified:RUN" the options to decode with, filled in from what the certificate binds, and what that is.

    Raises InputError, by name, for an option that differs: every lenient answer depends on it. A certificate that certifies
    nothing stands for the strict rule, with a warning.
    """
    folder = Path(rule.removeprefix(PREFIX).strip('"'))
    made = read_certificate(folder)
    options = {name: value for name, value in given.items() if name != "rule"}
    if not made["certified"]:
        warnings.warn(f"{rule}: nothing was certified ({made.get('reason')}); decoding strictly", stacklevel=2)
        return {**options, "rule": "speculative" if options.get("temperature") else "exact"}, {}
    binds = made["binds"]
    if options.get("stop_strings"):
        raise InputError(f"{rule}: answers were certified to their end; leave stop_strings out")
    certified = settled(made, folder.parent if folder.suffix == ".json" else folder)
    for name in OPTIONS:
        value = options.get(name, DEFAULTS.get(name, binds[name]))
        differs = unplaced_stop(value) != unplaced_stop(binds[name]) if name == "stop" else value != binds[name]
        if differs:
            raise InputError(
                f"{rule}: was certified with {name} {binds[name]!r}, not {value!r}; give the same, or certify again"
            )
    return {**certified, **options}, binds


def settled(made: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """The rule and the options that a certificate certifies, with its heads where the run is now."""

    def now(path: str) -> Path:
        return run / made["certified"]["heads"].get(path, path)

    rule, stop = made["certified"]["rule"], made["binds"]["stop"]
    options = {name: made["binds"][name] for name in OPTIONS}
    return options | {"rule": _moved(rule, learned(rule), now), "stop": _moved(stop, learned("target", stop), now)}


def unplaced(rule: str) -> str:
    """A rule without where its heads lie."""
    return _moved(rule, learned(rule), lambda path: Path(path).name)


def unplaced_stop(stop: str | Stop) -> str:
    """A stop condition without where its head lies."""
    return _moved(str(parse_stop(stop)), learned("target", stop), lambda path: Path(path).name)


def _moved(spec: str, heads: Iterable[Learned], to: Callable[[str], Path | str]) -> str:
    for head in heads:
        elsewhere: Any = replace(head, path=str(to(head.path)))
        spec = spec.replace(str(head), str(elsewhere))
    return spec


def check_binding(rule: str, binds: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError, by name, for the first of the models, heads and templates that is not what was certified."""
    for name, value in now.items():
        if binds[name] != value:
            raise InputError(f"{rule}: was certified with another {name} ({_short(binds[name], value)}); certify again")


def _short(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        part = next((key for key in {**before, **now} if before.get(key) != now.get(key)), None)
        return f"{part} {_short(before.get(part), now.get(part))}"
    return f"{before!r}, this is {now!r}"
