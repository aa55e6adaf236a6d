"""Specs: a rule or a stop condition as text. Their fields are its arguments.

    spec = term {("|" | "&") term}        "&" binds tighter
    term = name [":" arg {"," arg}] ["@" number]        arg = value | key "=" value

A value that holds one of `@ , | & =` or a space stands in double quotes; the number is the field `threshold`. Fields that
are keyword-only have no place without their key.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from lenience.core.errors import InputError

T = TypeVar("T")


def show(name: str, value: Any) -> str:
    """The spec of a dataclass."""
    args, at = [], ""
    for item in _fields(value):
        given = getattr(value, item.name)
        if item.name == "threshold":
            at = "" if given is None else f"@{given!r}"
        elif item.default is dataclasses.MISSING:
            args.append(_quote(str(given)))
        elif given != item.default:
            args.append(f"{item.name}={_quote(str(given).lower() if isinstance(given, bool) else str(given))}")
    return name + (":" + ",".join(args) if args else "") + at


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Those with a place of their own first."""
    return sorted(dataclasses.fields(kind), key=lambda item: bool(item.kw_only))


def _quote(text: str) -> str:
    return f'"{text}"' if re.search(r"[@,|&=\s]", text) else text


def split(text: str, mark: str, limit: int = 0) -> list[str]:
    """Split at `mark` outside double quotes, at most `limit` times where it is positive."""
    parts: list[str] = []
    quoted, start = False, 0
    for i, char in enumerate(text):
        quoted ^= char == '"'
        if char == mark and not quoted and (not limit or len(parts) < limit):
            parts.append(text[start:i])
            start = i + 1
    if quoted:
        raise InputError("a double quote is not closed")
    return [*parts, text[start:]]


def parse_term(text: str, what: str, kinds: Mapping[str, type[T]]) -> T:
    """One of `kinds`, dataclasses by name, from its spec. Raises InputError that says what is wrong; `what` says of what kind
    they all are."""
    body, *at = split(text.strip(), "@")
    name, *rest = split(body, ":", limit=1)
    if name not in kinds:
        raise InputError(f"there is no {what} {name!r}; there are {', '.join(kinds)}")
    kind = kinds[name]
    items = _fields(kind)
    types = {item.name: get_type_hints(kind)[item.name] for item in items}
    keys = [item for item in types if item != "threshold"]
    positional = [item.name for item in items if not item.kw_only and item.name != "threshold"]
    given: dict[str, object] = {}
    for i, arg in enumerate(split(rest[0], ",") if rest else []):
        key, *value = split(arg, "=", limit=1)
        if not value:
            if i >= len(positional):
                raise InputError(f"{name} takes at most {len(positional)} arguments")
            key, value = positional[i], [arg]
        if key not in keys:
            raise InputError(f"{name} has no argument {key!r}; it has {', '.join(keys) or 'none'}")
        if key in given:
            raise InputError(f"{name}'s {key} is given twice")
        given[key] = _value(f"{name}'s {key}", value[0].strip('"'), types[key])
    if at:
        if "threshold" not in types:
            raise InputError(f"{name} takes no @threshold")
        if "," in at[-1]:
            raise InputError(f"{name}'s threshold stands last: write {body},{at[-1].split(',', 1)[1]}@{at[-1].split(',')[0]}")
        given["threshold"] = _value(f"{name}'s threshold", "@".join(at), float)
    missing = [item.name for item in items if item.default is dataclasses.MISSING]
    for key in missing:
        if key not in given:
            raise InputError(f"{name} needs {key}: write " + (f"{body}@T" if key == "threshold" else f"{name}:{key.upper()}"))
    return kind(**given)


def _value(what: str, text: str, kind: object) -> object:
    convert, expected = _KINDS.get(kind, (str, "given"))
    try:
        if not text:
            raise ValueError
        return convert(text)
    except (ValueError, KeyError):
        raise InputError(f"{what} must be {expected}, not {text!r}") from None


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError
    return number


_KINDS: dict[object, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    int | None: (int, "a whole number"),
    float: (_number, "a number"),
    float | None: (_number, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}
