"""Answers stored by the key of their question, so that no question is sent twice. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock

from filelock import FileLock


class TextStore:
    """A file of texts by key. Several processes may append to it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = Lock()
        self._known: dict[str, str] = {}
        for line in (
            path.read_text(encoding="utf-8").split("\n") if path.exists() else ()
        ):
            try:
                record = json.loads(line)
                self._known[record["key"]] = record["text"]
            except (ValueError, LookupError, TypeError):
                continue  # torn by a process killed while writing

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> str:
        return self._known[key]

    def add(self, key: str, text: str) -> None:
        """Add a text and append it to the file at once."""
        with self._lock:
            self._known[key] = text
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (
                FileLock(f"{self.path}.lock"),
                self.path.open("a", encoding="utf-8") as file,
            ):
                file.write(f"\n{json.dumps({'key': key, 'text': text})}")
