r"""Ways to find an answer in a response, and to compare two answers.

`lenience.tasks.numbers` lists the forms of numbers that are understood. Any other form is no
answer, so it is never mistaken for another number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lenience.core.errors import InputError
from lenience.tasks.expressions import same_expression
from lenience.tasks.numbers import Number, numbers, plain_text, value

OPERATOR = re.compile(r"\s*(?:[+*×÷·/]|\\times|\\div|\\cdot)\s*")
LETTERS = "A-J"
"""Range of letters that label choices."""
Find = Callable[[str], str | None]


@dataclass(frozen=True)
class AnswerForm:
    """A way to find and compare answers, with its spec."""

    find: Find
    same: Callable[[str, str], bool | None]
    """Comparison of two answers; None if an answer cannot be read."""
    spec: str
    """Name in runs and certificates."""


def answers(answer: str, same: str | None) -> AnswerForm:
    """Return the answer form of the specs for --answer and --same. Raises InputError, which lists
    the known specs, for an unknown spec."""
    name, colon, what = answer.partition(":")
    if (
        name not in FINDERS
        or (colon and name not in TAKES)
        or (not what and name in TAKES)
    ):
        forms = ", ".join(
            f"{finder}:{TAKES[finder]}" if finder in TAKES else finder
            for finder in FINDERS
        )
        raise InputError(f"answer {answer!r}: write {forms}")
    make, compared = FINDERS[name]
    same = same or compared
    if same not in COMPARISONS:
        raise InputError(f"same {same!r}: name one of {', '.join(COMPARISONS)}")
    return AnswerForm(make(what), COMPARISONS[same], f"answer={answer} same={same}")


def without_thought(text: str) -> str:
    """Return a response without the thought before "</think>", which holds no answer."""
    return text.rpartition("</think>")[2]


def proposed(references: list[str]) -> str:
    """Return a hint for an error: the --answer that fits all references of a file."""
    shown = f"; its first reference is {references[0]!r:.60}" if references else ""
    for form, fits in (
        ("number-after:####", lambda text: "####" in text),
        ("boxed", lambda text: "\\boxed" in text),
        (
            "choice",
            lambda text: bool(re.fullmatch(rf"\(?[{LETTERS}]\)?", text.strip())),
        ),
        ("last-number", lambda text: value(text) is not None),
    ):
        if references and all(map(fits, references)):
            return f"{shown}: try --answer {form}"
    return f"{shown}; where no pattern finds it, name a task of your own, file.py:Name"


def _after(marker: str) -> Find:
    return _pattern(re.escape(marker) + r"[ \t]*([^\n]*[^\s])")


def _pattern(pattern: str) -> Find:
    """Return a finder of the last match, or of its first group if the pattern has groups."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"answer 'regex:{pattern}': not a regular expression ({error})"
        ) from None

    def find(text: str) -> str | None:
        *_, last = [None, *compiled.finditer(text)]
        if last is None:
            return None
        found: str = last[1] if compiled.groups else last[0]
        return found

    return find


def _number_after(marker: str) -> Find:
    r"""Return a finder of the number after the first marker that a number follows, on the marker's
    line or the next non-empty line. Emphasis, \boxed{…}, currencies and words around the number are
    ignored. Later markers do not count, as models may continue with further questions."""

    def find(text: str) -> str | None:
        for rest in without_thought(text).split(marker)[1:]:
            lines = re.split(r"[\r\n]+", rest)
            line = next((line for line in lines if line.strip(" \t*_`:$")), "")
            line = plain_text(line)
            found = list(numbers(line))
            if found:
                answer = _result(line, found)
                return answer.text if answer and answer.value is not None else None
        return None

    return find


def _result(line: str, found: list[Number]) -> Number | None:
    """Return the first number of a line, or the result of the calculation that it begins; None for
    a calculation without a result."""
    answer = found[0]
    is_open = False
    for number in found[1:]:
        between = line[answer.end : number.start]
        if re.fullmatch(r"\s*=\s*", between):
            is_open = False
        elif OPERATOR.fullmatch(between) or (
            not between.strip() and number.text[0] in "-−+"
        ):
            is_open = True
        else:
            break
        answer = number
    return None if is_open else answer


def _last_number(_what: str) -> Find:
    def find(text: str) -> str | None:
        *_, last = [None, *numbers(without_thought(text))]
        return last.text if last and last.value is not None else None

    return find


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{…}; None if there is none."""
    for begin in reversed(
        [found.end() for found in re.finditer(r"\\f?boxed\s*\{", text)]
    ):
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
_SAID = re.compile(
    rf"(?i:answer|choice|option)\W{{0,3}}(?:(?i:is|would be)\W{{0,3}})?{_ALONE}"
)


def choice(text: str) -> str | None:
    """Return the chosen letter in upper case: the last letter called the answer, the choice or the
    option; or else the last letter in brackets; or else the last letter that stands alone. None
    without any."""
    said = _SAID.findall(text)
    bracketed = re.findall(rf"[(\[]([{LETTERS}{LETTERS.lower()}])[)\]]", text)
    alone = re.findall(_ALONE, text)
    whole = re.fullmatch(rf"\W*([{LETTERS.lower()}])\W*", text)
    found = said[-1:] or bracketed[-1:] or alone[-1:] or ([whole[1]] if whole else [])
    return found[0].upper() if found else None


FINDERS: dict[str, tuple[Callable[[str], Find], str]] = {
    "number-after": (_number_after, "number"),
    "last-number": (_last_number, "number"),
    "boxed": (_boxed, "text"),
    "choice": (_choice, "choice"),
    "after": (_after, "number"),
    "regex": (_pattern, "number"),
}
"""Ways to find answers, each with its default comparison."""
TAKES = {"number-after": "MARKER", "after": "MARKER", "regex": "PATTERN"}


def _equal(normal: Callable[[str], object]) -> Callable[[str, str], bool | None]:
    """Return a comparison of two answers by their normal forms."""

    def same(a: str, b: str) -> bool | None:
        left = normal(a)
        right = normal(b)
        return None if left is None or right is None else left == right

    return same


COMPARISONS: dict[str, Callable[[str, str], bool | None]] = {
    "number": _equal(value),
    "text": _equal(lambda text: " ".join(text.casefold().split()) or None),
    "choice": _equal(choice),
    "math": same_expression,
}
