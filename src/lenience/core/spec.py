"""Specs: rules, drafters, trees and stop conditions as text. Their fields are the arguments.

    spec = term {("|" | "&") term}        "&" binds tighter
    term = name [":" args] ["@" bound ["," args]]        args = arg {"," arg}
    arg = value | key "=" value        bound = number | ("recall" | "logit") "=" number

A value that contains one of `@ , | & = + >` or a space is put in double quotes. The number after
`@` is the field `threshold`, or the field that it names. Keyword-only fields are always written
with their key. A last field of type `NUMBERS` takes all remaining values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_type_hints

from lenience.core.errors import InputError

T = TypeVar("T")
NUMBERS = tuple[int, ...]
"""Type of a last field that takes all remaining values."""
BOUNDS = ("threshold", "recall", "logit")
"""Fields that are written after `@`; a spec gives at most one of them."""
PLACED = {"placed": True}
"""Metadata of a field with a default that is shown in its position, without its key, if it is not
the default."""


def show(name: str, value: Any) -> str:
    """Return the spec of a dataclass object. `parse_term` turns it back into the object."""
    placed = [item for item in _fields(value) if _in_its_place(item, value)]
    args = []
    for item in placed:
        if item.name not in BOUNDS:
            args.append(_shown(getattr(value, item.name)))
    args += further_arguments(value)
    return name + (":" + ",".join(args) if args else "") + shown_bound(value)


def shown_bound(value: Any, show: Callable[[float], str] = repr) -> str:
    """Return the part of a dataclass object's spec from `@` on; "" if the object has no bound."""
    for name in BOUNDS:
        bound = getattr(value, name, None)
        if bound is not None:
            return (
                f"@{show(bound)}" if name == "threshold" else f"@{name}={_brief(bound)}"
            )
    return ""


def _brief(number: float) -> str:
    """Return a number with at most six digits if they are exact, else in full."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def further_arguments(value: Any) -> list[str]:
    """Return the arguments of a spec that are not defaults, as key=value, without the bound and the
    arguments shown by position."""
    args = []
    for item in _fields(value):
        content = getattr(value, item.name)
        if item.name in BOUNDS or _in_its_place(item, value):
            continue
        if content != item.default:
            args.append(f"{item.name}={_quote(_as_text(content))}")
    return args


def named_arguments(value: Any) -> list[str]:
    """Return the arguments that identify the kind of a setting: required arguments that are words,
    and the names of other arguments that are not defaults."""
    words = []
    for item in _fields(value):
        if item.default is dataclasses.MISSING and isinstance(
            getattr(value, item.name), str
        ):
            words.append(str(getattr(value, item.name)))
    return words + [argument.split("=", 1)[0] for argument in further_arguments(value)]


def _in_its_place(item: dataclasses.Field[Any], value: Any) -> bool:
    """Return True if a field is shown by position, without its key."""
    if item.default is dataclasses.MISSING:
        return True
    return (
        bool(item.metadata.get("placed")) and getattr(value, item.name) != item.default
    )


def _shown(content: Any) -> str:
    """Return a value as text without its key; several numbers are separated by commas."""
    if isinstance(content, tuple):
        return ",".join(map(str, content))
    return _quote(_as_text(content))


def _as_text(content: Any) -> str:
    return str(content).lower() if isinstance(content, bool) else str(content)


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that a dataclass is made from, positional ones first."""
    given = [item for item in dataclasses.fields(kind) if item.init]
    return sorted(given, key=lambda item: bool(item.kw_only))


def _quote(text: str) -> str:
    return f'"{text}"' if re.search(r"[@,|&=;+>\s]", text) else text


def split(text: str, mark: str, limit: int = 0, *, escapes: bool = False) -> list[str]:
    """Split at `mark` outside double quotes, at most `limit` times if `limit` is positive. With
    `escapes`, a backslash within quotes escapes a quote, as in JSON. Raises InputError if a quote
    is not closed."""
    parts: list[str] = []
    quoted = escaped = False
    start = 0
    for i, char in enumerate(text):
        quoted ^= char == '"' and not escaped
        escaped = escapes and quoted and char == "\\" and not escaped
        if char == mark and not quoted and (not limit or len(parts) < limit):
            parts.append(text[start:i])
            start = i + 1
    if quoted:
        raise InputError("a double quote is not closed")
    return [*parts, text[start:]]


def quote_value(text: str) -> str:
    """Return a value as written in a setting, `name=value; name=value`. Values with special
    characters are quoted as in JSON."""
    return (
        json.dumps(text, ensure_ascii=False) if re.search(r'[;"\\\s]', text) else text
    )


def unquote_value(text: str) -> str:
    """Return the value that `quote_value` has quoted. A text that is no JSON string is returned as
    it is, since a spec may contain quotes."""
    try:
        content = json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text
    return str(content)


def parse_term(text: str, what: str, kinds: Mapping[str, type[T]]) -> T:
    """Return an object of one of `kinds`, dataclasses by name, from its spec. Raises InputError for
    a wrong spec; `what` is the kinds' name in the message, such as "rule"."""
    body, *after = split(text.strip(), "@", limit=1)
    number, *more = split(after[0], ",", limit=1) if after else ("",)
    name, *args = split(body, ":", limit=1)
    args = [argument for part in (*args, *more) for argument in split(part, ",")]
    if not name:
        raise InputError(f"a {what} is missing; there are {', '.join(kinds)}")
    if name not in kinds:
        raise InputError(f"there is no {what} {name!r}; there are {', '.join(kinds)}")
    kind = kinds[name]
    types = _types(cast(Hashable, kind))
    values = _arguments(name, args, kind, types)
    if after:
        key, *named = split(number, "=", limit=1)
        bound = key if named else "threshold"
        if bound not in types or bound not in BOUNDS:
            raise InputError(f"{name} takes no @{bound}")
        values[bound] = convert(f"{name}'s {bound}", named[0] if named else key, float)
    for item in _fields(kind):
        if item.default is dataclasses.MISSING and item.name not in values:
            written = (
                f"{body}@T"
                if item.name == "threshold"
                else f"{name}:{item.name.upper()}"
            )
            raise InputError(f"{name} needs {item.name}: write {written}")
    return kind(**values)


@cache
def _types(kind: Hashable) -> Mapping[str, object]:
    """Return the types of a dataclass's fields by name, cached because finding them is slow."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in _fields(kind)}


def parse(
    value: Any, label: str, what: str, kinds: Mapping[str, type[T]], base: type[T]
) -> T:
    """Return an object of one of `kinds` from its spec; an object of type `base` is returned
    unchanged. Raises InputError that begins with `label` and the spec; `what` is the kinds'
    name."""
    if isinstance(value, base):
        return value
    if not isinstance(value, str):
        raise InputError(f"{label} {value!r}: is neither a spec nor a {base.__name__}")
    try:
        return parse_term(value, what, kinds)
    except InputError as error:
        raise InputError(f"{label} {value!r}: {error}") from None


def _arguments(
    name: str, args: list[str], kind: type, types: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of a term's arguments by field name."""
    fields = [item for item in _fields(kind) if item.name not in BOUNDS]
    keys = [item.name for item in fields]
    positional = [item.name for item in fields if not item.kw_only]
    values: dict[str, object] = {}
    for i, arg in enumerate(args):
        key, *value = split(arg, "=", limit=1)
        if not value:
            last = positional[-1] if positional else ""
            if i >= len(positional) - 1 and types.get(last) == NUMBERS:
                number = convert(f"{name}'s {last}", arg, int)
                values[last] = (
                    *cast(tuple[int, ...], values.get(last, ())),
                    cast(int, number),
                )
                continue
            if i >= len(positional):
                raise InputError(f"{name} takes at most {len(positional)} arguments")
            key = positional[i]
            value = [arg]
        if key not in keys:
            raise InputError(
                f"{name} has no argument {key!r}; it has {', '.join(keys) or 'none'}"
            )
        if key in values:
            raise InputError(f"{name}'s {key} is given twice")
        values[key] = convert(f"{name}'s {key}", value[0].strip('"'), types[key])
    return values


SHARED_KEYS = ("unchecked", "floor", "overshoot", "budget", "begin", "end")
"""Arguments that every lenient rule or head takes; `template` leaves them out."""


def template(name: str, kind: type) -> str:
    """Return the form of a kind's specs, such as `topk:K[,margin=…,ratio=…]`: required arguments in
    capitals, optional ones with their keys in brackets."""
    required: list[str] = []
    optional: list[str] = []
    for item in _fields(kind):
        if item.name in (*BOUNDS, *SHARED_KEYS):
            continue
        if item.default is dataclasses.MISSING or item.name == "path":
            required.append(item.name.upper())
        else:
            optional.append(f"{item.name}=…")
    form = name + (":" + ",".join(required) if required else "")
    if any(item.name == "threshold" for item in _fields(kind)):
        form += "@THRESHOLD"
    if not optional:
        return form
    begin = "," if required or "@" in form else ":"
    return f"{form}[{begin}{','.join(optional)}]"


def named_settings(name: str, grid: Iterable[str]) -> list[str]:
    """Return the specs of a grid that belong to a rule's name such as topk or fuzzy:js. If some of
    them have no further arguments, only these are returned."""
    named = []
    for spec in grid:
        if spec[: len(name)] == name and spec[len(name) :][:1] in ":@=":
            named.append(spec)
    named = [spec for spec in named if spec != name]
    return [spec for spec in named if "," not in spec[len(name) :]] or named


def convert(what: str, text: str, kind: object) -> object:
    """Convert text to a value of type `kind`. Raises InputError that names `what` and describes the
    expected text."""
    from_text, expected = _KINDS.get(kind, (str, "given"))
    try:
        if not text:
            raise ValueError
        return from_text(text)
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
    int | Literal["auto"]: (
        lambda text: text if text == "auto" else int(text),
        "a number or auto",
    ),
    tuple[str, ...]: (lambda text: (text,), "a text"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}
