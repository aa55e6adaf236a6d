"""Durable, resumable work over many samples. No torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import read_json, replacing, write_json, written


class Journal:
    """A JSONL file of finished work, one record a line, each appended whole and flushed to the
    disk.

    A torn last line, left by a crash, is dropped with a warning and its sample redone. A broken
    line elsewhere raises InputError, and nothing is discarded.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, record in self.numbered():
            yield record

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each record with its line number, counted from 1. Raises InputError for a broken
        line."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("not a record")
                except ValueError as error:
                    fix = (
                        "restore the file from a copy, or delete that line to do its "
                        "sample again"
                    )
                    raise InputError(
                        f"{self.path}, line {number}: broken ({error}); {fix}"
                    ) from None
                yield number, record

    def resume(self) -> list[dict[str, Any]]:
        """Return the finished records, and cut a torn last line off the file."""
        records = list(self)
        if self.path.exists():
            size = self.path.stat().st_size
            whole = self._whole_size()
            if whole < size:
                dropped = "dropped a torn last line; its sample is done again"
                print(f"warning: {self.path}: {dropped}", file=sys.stderr)
                os.truncate(self.path, whole)
        return records

    def write(self, *records: dict[str, Any]) -> None:
        """Append finished records; they are on disk when this returns."""
        with written(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(records)

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        with self.path.open("ab") as file:
            file.writelines(map(_line, records))
            file.flush()
            os.fsync(file.fileno())

    def sort(self, order: Sequence[str]) -> None:
        """Sort the records by the position of their ids in `order`; other records come last. The
        file is replaced atomically."""
        rank = {id: i for i, id in enumerate(order)}
        records = list(self)
        ordered = sorted(records, key=lambda record: rank.get(record["id"], len(rank)))
        if ordered != records:
            with replacing(self.path) as new:
                new.write_bytes(b"".join(map(_line, ordered)))

    def _whole_size(self) -> int:
        with self.path.open("rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class JournalTail:
    """A journal that other processes also append to, read incrementally while its lock is held."""

    def __init__(self, path: Path):
        self.journal = Journal(path)
        self._end = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records added since the last call. A torn last line, whose writer has died, is
        cut off."""
        if not self.journal.path.exists():
            return []
        with self.journal.path.open("rb") as file:
            file.seek(self._end)
            whole, newline, torn = file.read().rpartition(b"\n")
        self._end += len(whole) + len(newline)
        if torn:
            self.journal.resume()
        try:
            return list(map(json.loads, whole.split(b"\n"))) if whole else []
        except ValueError:
            list(self.journal)  # raises InputError with the line
            raise


MAY_DIFFER = ("versions", "pair")
"""Fields in which a resumed run may differ from its beginning."""
EARLIER = {"drawn": "first"}
"""Values of settings that earlier versions did not record."""
OPTIONAL = (
    "drafter", "answers_only", "labels", "temperature", "top_k", "top_p", "draw_seed",
)  # fmt: skip
"""Settings that a record omits if they have their defaults."""
UNSAID: dict[str, Any] = {"temperature": 0.0, "answers_only": False}
"""Defaults of optional settings other than None."""


def open_run(folder: Path, asked: dict[str, Any], name: str = "run.json") -> None:
    """Record the settings of a run or, if the folder already holds a run, check that its settings
    are the same. Raises InputError for the first difference."""
    path = folder / name
    if path.exists():
        before = read_json(path)
        before = EARLIER | before
        wanted = {key for key, value in asked.items() if value != UNSAID.get(key)}
        lacking = sorted(wanted - before.keys() - {*MAY_DIFFER, *OPTIONAL})
        if lacking:
            raise InputError(
                f"{path}: has no {lacking[0]}, so another version of lenience wrote "
                "it; name another folder"
            )
        for key in dict.fromkeys([*OPTIONAL, *asked]):
            was = before.get(key, UNSAID.get(key))
            now = asked.get(key, UNSAID.get(key))
            if key not in MAY_DIFFER and _nameless(was) != _nameless(now):
                what = _difference(key, was, now)
                raise InputError(
                    f"{folder}: was made with {what}; give the same, or another folder"
                )
        return
    try:
        write_json(path, asked)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error})") from None


def _nameless(value: Any) -> Any:
    """Return a value without its "name" entries: models are compared by fingerprint, since their
    folders may move."""
    if not isinstance(value, dict):
        return value
    return {key: _nameless(inner) for key, inner in value.items() if key != "name"}


def _difference(key: str, before: Any, now: Any) -> str:
    """Return a phrase that names the innermost part in which two values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for part in (*now, *before):
            if _nameless(before.get(part)) != _nameless(now.get(part)):
                return _difference(f"{key} {part}", before.get(part), now.get(part))
    return f"{key} {before!r}, not {now!r}"
