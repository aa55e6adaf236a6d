"""What a certificate says, what it binds, and how a rule "certified:RUN" becomes the rule that it certifies."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lenience.errors import InputError
from lenience.journal import read_json, write_json

PREFIX = "certified:"
FILE = "certificate.json"
KEYS = ("certified", "max_drop", "confidence", "n", "losses", "upper_bound", "procedure", "binds")
DEFAULTS: dict[str, Any] = {"stop": "fixed", "temperature": 0.0, "top_k": None, "top_p": None}
"""Of what a certificate binds and a caller may leave out; a window and a length limit are then the certificate's."""


def is_certified(rule: object) -> bool:
    return isinstance(rule, str) and rule.startswith(PREFIX)


def read_certificate(folder: Path) -> dict[str, Any]:
    """The certificate of a run folder, or in a file. Raises InputError where there is none or it is broken."""
    path = folder if folder.suffix == ".json" else folder / FILE
    if not path.exists():
        raise InputError(f"{path}: there is no certificate; `lenience certify {path.parent}` makes one")
    made = read_json(path)
    lacking = [key for key in KEYS if key not in made]
    if lacking:
        raise InputError(f"{path}: is no certificate, it lacks {', '.join(lacking)}; certify again")
    return made


def keep(folder: Path, made: dict[str, Any]) -> Path:
    """Write a run's certificate. One that certifies something is never written over: by another one it is moved to
    certificate-N.json, and one that certifies nothing is then written beside it."""
    path = folder / FILE
    if path.exists() and read_json(path).get("certified"):
        free = next(
            folder / f"certificate-{n}.json" for n in range(1, 10**6) if not (folder / f"certificate-{n}.json").exists()
        )
        if not made["certified"]:
            path = free
        else:
            os.replace(path, free)
    write_json(path, made)
    return path


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
    for name in ("window", "max_new_tokens", *DEFAULTS):
        value = options.setdefault(name, binds[name] if name not in DEFAULTS else DEFAULTS[name])
        value = str(value) if name == "stop" else value
        if value != binds[name]:
            raise InputError(
                f"{rule}: was certified with {name} {binds[name]!r}, not {value!r}; give the same, or certify again"
            )
    now = folder.parent if folder.suffix == ".json" else folder
    return {**options, "rule": moved(made["certified"]["rule"], made["certified"]["folder"], now)}, binds


def moved(spec: str, old: str, now: Path) -> str:
    """A rule's spec whose heads lie in a run folder, where that is now."""
    if Path(old).exists():
        return spec
    return re.sub(rf'(?<=[:=])"?{re.escape(old)}(/[^"@,|&=]*)"?', lambda found: f'"{now}{found[1]}"', spec)


def check_binding(rule: str, binds: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError, by name, for the first of the models, heads and templates that is not what was certified."""
    for name, value in now.items():
        if name in binds and binds[name] != value:
            raise InputError(f"{rule}: was certified with another {name} ({_short(binds[name], value)}); certify again")


def _short(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        part = next((key for key in {**before, **now} if before.get(key) != now.get(key)), None)
        return f"{part} {_short(before.get(part), now.get(part))}"
    return f"{before!r}, this is {now!r}"
