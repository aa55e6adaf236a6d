"""Durable, resumable work over many samples: a run folder's run.json and its journal of finished samples."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import read_json, write_json


class Journal:
    """A JSONL file of finished work, one record a line, each appended whole and flushed to the disk.

    A torn last line, as a crash leaves it, is dropped with a warning, so that its sample is done again. Raises
    InputError for a broken line elsewhere: that is no crash's doing, and nothing is thrown away.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
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
                    raise InputError(
                        f"{self.path}, line {number}: broken ({error}); restore the file from a copy, or "
                        "delete that line to do its sample again"
                    ) from None
                yield record

    def resume(self) -> list[dict[str, Any]]:
        """The finished records; a torn last line is cut off the file."""
        done = list(self)
        if self.path.exists():
            size, whole = self.path.stat().st_size, self._whole_size()
            if whole < size:
                print(f"warning: {self.path}: dropped a torn last line; its sample is done again", file=sys.stderr)
                os.truncate(self.path, whole)
        return done

    def append(self, *records: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.writelines(map(_line, records))
            file.flush()
            os.fsync(file.fileno())

    def sort(self, order: Sequence[str]) -> None:
        """Put the records whose ids are in `order` into that order, the others after them; the file is whole at all times."""
        place = {id: i for i, id in enumerate(order)}
        records = list(self)
        ordered = sorted(records, key=lambda record: place.get(record["id"], len(place)))
        if ordered != records:
            new = self.path.with_suffix(".new")
            with new.open("wb") as file:
                file.writelines(map(_line, ordered))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)

    def _whole_size(self) -> int:
        with self.path.open("rb") as file:
            return sum(len(line) for line in file if line.endswith(b"\n"))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def open_run(folder: Path, asked: dict[str, Any], name: str = "run.json") -> None:
    """Record what a run was asked for or, if the folder holds one, check that it was asked for the same.

    Raises InputError that names the first difference.
    """
    path = folder / name
    if path.exists():
        before = read_json(path)
        for key, value in asked.items():
            if key not in ("versions", "pair") and _nameless(before.get(key)) != _nameless(value):
                raise InputError(
                    f"{folder}: was made with {_difference(key, before.get(key), value)}; give the same, or another folder"
                )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error})") from None
    write_json(path, asked)


def _nameless(value: Any) -> Any:
    """A model is known by its fingerprint: its folder may move."""
    return {key: _nameless(inner) for key, inner in value.items() if key != "name"} if isinstance(value, dict) else value


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        inner = next(part for part in [*now, *before] if _nameless(before.get(part)) != _nameless(now.get(part)))
        return _difference(f"{key} {inner}", before.get(inner), now.get(inner))
    return f"{key} {before!r}, not {now!r}"
