r"""How an answer is found in a response, and when two answers are the same.

A number may have a sign (also U+2212), thousands separators and a decimal point, or a decimal comma
where that is what it must be (3,5 and 1.234,5; 1,234 is a thousand), or be a fraction (3/4). Signs
of currencies and percent do not count: 50 % is 50.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lenience.core.errors import InputError
from lenience.tasks.expressions import same_expression

NUMBER = r"[-+−]?(?:\d[\d.,]*\d|\d|[.,]\d+)(?:\s?/\s?\d+)?"
"""A number as it stands in text, with what belongs to it."""
LETTERS = "A-J"
"""The letters of choices."""
Find = Callable[[str], str | None]


@dataclass(frozen=True)
class Answers:
    """How answers are found and compared, and how that is written."""

    find: Find
    same: Callable[[str, str], bool | None]
    """None where one cannot be read."""
    spec: str
    """As runs and certificates name it."""


def answers(answer: str, same: str | None) -> Answers:
    """From the specs that users give. Raises InputError that names what there is."""
    name, colon, what = answer.partition(":")
    if name not in FINDERS or (colon and name not in TAKES) or (not what and name in TAKES):
        forms = ", ".join(f"{one}:{TAKES[one]}" if one in TAKES else one for one in FINDERS)
        raise InputError(f"answer {answer!r}: write {forms}")
    make, compared = FINDERS[name]
    same = same or compared
    if same not in COMPARISONS:
        raise InputError(f"same {same!r}: name one of {', '.join(COMPARISONS)}")
    return Answers(make(what), COMPARISONS[same], f"answer={answer} same={same}")


def proposed(references: list[str]) -> str:
    """Which --answer the references of a file suggest, as a phrase for an error."""
    shown = f"; its first reference is {references[0]!r:.60}" if references else ""
    for form, fits in (
        ("number-after:####", lambda text: "####" in text),
        ("boxed", lambda text: "\\boxed" in text),
        ("choice", lambda text: bool(re.fullmatch(rf"\(?[{LETTERS}]\)?", text.strip()))),
        ("last-number", lambda text: number(text) is not None),
    ):
        if references and all(map(fits, references)):
            return f"{shown}: try --answer {form}"
    return f"{shown}; where no pattern finds it, name a task of your own, file.py:Name"


def _after(marker: str) -> Find:
    return _pattern(re.escape(marker) + r"[ \t]*([^\n]*[^\s])")


def _pattern(pattern: str) -> Find:
    """The last match; its first group, if it has one."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"answer 'regex:{pattern}': not a regular expression ({error})") from None

    def find(text: str) -> str | None:
        *_, last = [None, *compiled.finditer(text)]
        if last is None:
            return None
        found: str = last[1] if compiled.groups else last[0]
        return found

    return find


def _number_after(marker: str) -> Find:
    r"""The first number on what follows the last marker, on its line or the next that is not empty:
    emphasis, \boxed{…}, currencies and words around it aside."""

    def find(text: str) -> str | None:
        _, found, rest = text.rpartition(marker)
        if not found:
            return None
        line = next((line for line in rest.splitlines() if line.strip(" \t*_`:$")), "")
        number = re.search(NUMBER, line)
        return number[0] if number else None

    return find


def _last_number(_what: str) -> Find:
    def find(text: str) -> str | None:
        found = re.findall(NUMBER, text)
        return found[-1] if found else None

    return find


def boxed(text: str) -> str | None:
    r"""What the last whole \boxed{…} holds."""
    for begin in reversed([found.end() for found in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth = 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                return text[begin:end].strip() or None
    return None


def _boxed(_what: str) -> Find:
    return boxed


def _choice(_what: str) -> Find:
    return choice


_ALONE = rf"(?<![\w'’])([{LETTERS}])(?![\w'’])(?!\s+[a-z])"
"""A letter by itself that does not begin a phrase, as in "A cat" or "I think"."""
_SAID = re.compile(rf"(?i:answer|choice|option)\W{{0,3}}(?:(?i:is|would be)\W{{0,3}})?{_ALONE}")


def choice(text: str) -> str | None:
    """The letter that is chosen: the last that is said to be the answer, the choice or the option;
    else the last that stands in brackets or alone."""
    said = _SAID.findall(text)
    bracketed = re.findall(rf"[(\[]([{LETTERS}{LETTERS.lower()}])[)\]]", text)
    alone = re.findall(_ALONE, text)
    whole = re.fullmatch(rf"\W*([{LETTERS.lower()}])\W*", text)
    found = said[-1:] or bracketed[-1:] or alone[-1:] or ([whole[1]] if whole else [])
    return found[0].upper() if found else None


def number(text: str) -> float | None:
    """The value of a number that is all there is in a text."""
    plain = re.sub(r"[$€£%\s*_`\\{}]|</s>", "", text).replace("−", "-").rstrip(".,")
    top, slash, bottom = plain.partition("/")
    try:
        if slash:
            return _value(top) / _value(bottom)
        return _value(top)
    except (ValueError, ZeroDivisionError):
        return None


def _value(text: str) -> float:
    """Of digits with separators."""
    point, comma = text.rfind("."), text.rfind(",")
    decimal = "," if comma > point >= 0 or re.fullmatch(r"[-+]?\d*,(?!\d{3}$)\d+", text) else "."
    thousands = "." if decimal == "," else ","
    return float(text.replace(thousands, "").replace(decimal, "."))


FINDERS: dict[str, tuple[Callable[[str], Find], str]] = {
    "number-after": (_number_after, "number"),
    "last-number": (_last_number, "number"),
    "boxed": (_boxed, "text"),
    "choice": (_choice, "choice"),
    "after": (_after, "number"),
    "regex": (_pattern, "number"),
}
"""How answers are found, each with how they are compared where that is not said."""
TAKES = {"number-after": "MARKER", "after": "MARKER", "regex": "PATTERN"}


def _equal(normal: Callable[[str], object]) -> Callable[[str, str], bool | None]:
    """Compares what both come to."""

    def same(a: str, b: str) -> bool | None:
        left, right = normal(a), normal(b)
        return None if left is None or right is None else left == right

    return same


COMPARISONS: dict[str, Callable[[str, str], bool | None]] = {
    "number": _equal(number),
    "text": _equal(lambda text: " ".join(text.casefold().split()) or None),
    "choice": _equal(choice),
    "math": same_expression,
}
