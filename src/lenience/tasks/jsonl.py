"""A user's own task from a JSONL file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lenience.core.errors import InputError
from lenience.tasks.base import Sample


class JsonlTask:
    """One sample a line: `prompt` (text) or `messages` (chat), and `reference`; also, if you like, `id` and `split`.

    `answer` says how an answer is found in a response: "regex:PATTERN" (the last match; its first group, if it has one)
    or "after:MARKER" (what follows the last MARKER on its line). `same` says how answers are compared: as "number",
    "text" (case and spaces aside) or "choice" (the first letter A–Z that stands alone). A reference is searched for
    its answer in the same way and taken whole where nothing is found. Without a `split`, every fifth line is "test".
    Raises InputError that names the line.
    """

    max_new_tokens = 256

    def __init__(self, path: Path, answer: str, same: str):
        how, _, what = answer.partition(":")
        if how not in ("regex", "after") or not what:
            raise InputError(f"answer {answer!r}: write regex:PATTERN or after:MARKER")
        if same not in COMPARISONS:
            raise InputError(f"same {same!r}: name one of {', '.join(COMPARISONS)}")
        try:
            self._pattern = re.compile(what if how == "regex" else re.escape(what) + r"[ \t]*([^\n]*[^\s])")
        except re.error as error:
            raise InputError(f"answer {answer!r}: not a regular expression ({error})") from None
        self._normal = COMPARISONS[same]
        self._rows = list(_rows(path))
        content = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        self.reads = f"answer={answer} same={same}"
        self.name = f"{path.name} ({content}) {self.reads}"

    def samples(self, split: str) -> Iterator[Sample]:
        for number, row in enumerate(self._rows):
            if row.get("split", "test" if number % 5 == 4 else "train") != split:
                continue
            prompt = row["messages"] if row.get("prompt") is None else row["prompt"]
            yield Sample(row["id"], prompt, self.reference(row.get("reference")))

    def reference(self, given: object) -> str | None:
        """The answer that a reference holds."""
        return None if given is None else self.answer(str(given)) or str(given)

    def answer(self, text: str) -> str | None:
        *_, last = [None, *self._pattern.finditer(text)]
        return None if last is None else (last[1] if last.re.groups else last[0])

    def same(self, a: str | None, b: str | None) -> bool | None:
        left = None if a is None else self._normal(a)
        right = None if b is None else self._normal(b)
        return None if left is None or right is None else left == right

    def correct(self, text: str, sample: Sample) -> bool:
        return self.same(self.answer(text), sample.reference) is True


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
                f'task file {path}, line {number}: needs a "prompt" (text) or "messages" (a list of {{"role", "content"}})'
            )
        row["id"] = str(row.get("id", number))
        if row["id"] in ids:
            raise InputError(f"task file {path}, line {number}: the id {row['id']!r} has come before; make each one once")
        ids.add(row["id"])
        yield row


def _is_chat(row: dict) -> bool:
    messages = row.get("messages")
    return (
        row.get("prompt") is None
        and isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    )


def _number(text: str) -> float | None:
    """The value of a number written with or without thousands separators, currency and percent signs."""
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
