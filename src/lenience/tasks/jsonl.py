"""A user's own task from a JSONL file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import digest_bytes
from lenience.tasks.base import Sample, Task

FIELDS = ("id", "prompt", "messages", "reference", "split", "group")
"""What a row says of a sample that every task has."""


class JsonlTask(Task):
    """One sample a line: `prompt` (text) or `messages` (chat), and `reference`; also, if you like,
    `id`, `split` and `group` (samples of one may be lost together).

    `answer` says how an answer is found in a response: "regex:PATTERN" (the last match; its first
    group, if it has one) or "after:MARKER" (what follows the last MARKER on its line). `same` says
    how answers are compared: as "number", "text" (case and spaces aside) or "choice" (the first
    letter A–Z that stands alone). A reference is searched for its answer in the same way and taken
    whole where nothing is found. Without a `split`, every fifth line is "test". Raises InputError
    that names the line.
    """

    scores_by_reference = True

    def __init__(self, path: Path, answer: str, same: str):
        how, _, what = answer.partition(":")
        if how not in ("regex", "after") or not what:
            raise InputError(f"answer {answer!r}: write regex:PATTERN or after:MARKER")
        if same not in COMPARISONS:
            raise InputError(f"same {same!r}: name one of {', '.join(COMPARISONS)}")
        pattern = what if how == "regex" else re.escape(what) + r"[ \t]*([^\n]*[^\s])"
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise InputError(f"answer {answer!r}: not a regular expression ({error})") from None
        self._normal = COMPARISONS[same]
        self._rows = list(_rows(path))
        self._reads = f"answer={answer} same={same}"
        self.name = f"{path.name} ({digest_bytes(path.read_bytes(), 6)}) {self._reads}"

    @property
    def reads(self) -> str:
        return self._reads

    def samples(self, split: str) -> Iterator[Sample]:
        for number, row in enumerate(self._rows):
            if row.get("split", "test" if number % 5 == 4 else "train") != split:
                continue
            prompt = row["messages"] if row.get("prompt") is None else row["prompt"]
            reference = row.get("reference")
            if reference is not None:
                reference = self.reference(str(reference))
            group = None if row.get("group") is None else str(row["group"])
            yield Sample(row["id"], prompt, reference, metadata(row), group)

    def reference(self, given: str) -> str:
        return self._find(given) or given

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return self._find(text)

    def _find(self, text: str) -> str | None:
        *_, last = [None, *self._pattern.finditer(text)]
        if last is None:
            return None
        return last[1] if last.re.groups else last[0]

    def same(self, a: str | None, b: str | None, sample: Sample | None = None) -> bool | None:
        left = None if a is None else self._normal(a)
        right = None if b is None else self._normal(b)
        return None if left is None or right is None else left == right


def metadata(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says besides, for its task."""
    return {key: value for key, value in row.items() if key not in FIELDS}


def _rows(path: Path) -> Iterator[dict]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"task file {path}: cannot be read ({error})") from None
    ids = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"task file {path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict) or not (isinstance(row.get("prompt"), str) or _is_chat(row)):
            raise InputError(
                f'task file {path}, line {number}: needs a "prompt" (text) or "messages" '
                '(a list of {"role", "content"})'
            )
        row["id"] = str(row.get("id", number))
        if row["id"] in ids:
            raise InputError(
                f"task file {path}, line {number}: the id {row['id']!r} has come before; make "
                "each one once"
            )
        ids.add(row["id"])
        yield row


def _is_chat(row: dict) -> bool:
    messages = row.get("messages")
    if row.get("prompt") is not None or not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in messages)


def _number(text: str) -> float | None:
    """The value of a number written with or without thousands separators, currency and percent
    signs."""
    try:
        return float(re.sub(r"[,$€£%\s]", "", text).rstrip("."))
    except ValueError:
        return None


def _choice(text: str) -> str | None:
    found = re.search(r"\b([A-Z])\b", text) or re.search(r"\b([a-z])\b", text)
    return found[1].upper() if found else None


COMPARISONS: dict[str, Callable[[str], object]] = {
    "number": _number,
    "text": lambda text: " ".join(text.casefold().split()) or None,
    "choice": _choice,
}
