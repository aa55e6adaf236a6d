"""A user's own task from a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import digest_bytes
from lenience.tasks.base import Sample, Task
from lenience.tasks.finding import answers, proposed

FIELDS = ("id", "prompt", "messages", "reference", "split", "group")
"""What a row says of a sample that every task has."""


class JsonlTask(Task):
    r"""One sample a line: `prompt` (text) or `messages` (chat), and `reference`; also, if you like,
    `id`, `split` and `group` (samples of one may be lost together).

    `answer` says how an answer is found in a response: "number-after:MARKER" (the number that
    follows the last MARKER), "last-number", "boxed" (the last \boxed{…}), "choice" (the letter that
    is chosen), "after:MARKER" (the rest of the line after the last MARKER) or "regex:PATTERN" (the
    last match; its first group, if it has one). `same` says how answers are compared: as "number",
    "text" (case and spaces aside) or "choice"; by default as fits what is found, see
    `lenience.tasks.finding`. A reference is searched for its answer in the same way and taken whole
    where nothing is found. Without a `split`, every fifth line is "test". Raises InputError that
    names the line, and what the references look like where `answer` is not given.
    """

    version = 2
    scores_by_reference = True

    def __init__(self, path: Path, answer: str | None, same: str | None = None):
        self._rows = list(_rows(path))
        if answer is None:
            references = [row.get("reference") for row in self._rows[:20]]
            told = proposed([str(one) for one in references if one is not None])
            raise InputError(f"task file {path}: say how answers are found (--answer){told}")
        self._how = answers(answer, same)
        self._reads = f"{self._how.spec} version={self.version}"
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
        return self._how.find(text)

    def same(self, a: str | None, b: str | None, sample: Sample | None = None) -> bool | None:
        left = None if a is None else self._how.normal(a)
        right = None if b is None else self._how.normal(b)
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
