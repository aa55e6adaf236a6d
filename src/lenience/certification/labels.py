"""References that a user gives only for prompts on which two answers differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import read_lines, replacing
from lenience.runs.answers import Answer
from lenience.tasks import Sample, Task, ungradable


class Labels:
    """The references in a JSONL file of id and reference, and the rows still to be filled in."""

    def __init__(self, task: Task, path: Path | None):
        """Open a file of labels. Raises InputError if the file is broken."""
        self.task = task
        self.path = path
        self.rows = dict[str, dict[str, Any]]()
        """Rows of the file by id."""
        self.wanted = dict[str, dict[str, Any]]()
        """Rows that need a reference, by id."""
        if path is None or not path.exists():
            return
        for number, line in read_lines(path, "id and reference"):
            try:
                row = json.loads(line)
                self.rows[str(row["id"])] = row
                row["reference"]
            except (ValueError, TypeError, KeyError) as error:
                why = f"{type(error).__name__} {error}; a row has id and reference"
                raise InputError(f"{path}, line {number}: {why}") from None

    def of(self, sample: Sample, alone: Answer, lenient: Answer) -> Sample | None:
        """Return the sample with its reference. If the file has none, return None and add the
        sample to the wanted rows."""
        given = self.rows.get(sample.id, {}).get("reference")
        if given is None:
            self.wanted[sample.id] = {
                "id": sample.id,
                "prompt": sample.prompt,
                "answers": sorted({str(alone.answer), str(lenient.answer)}),
                "reference": None,
            }
            return None
        labelled = replace(sample, reference=self.task.reference(str(given)))
        if ungradable(self.task, [labelled]):
            raise InputError(
                f"{self.path}: the reference {given!r} of {sample.id} equals no "
                "possible answer; check --answer and --same"
            )
        return labelled

    def ask(self) -> None:
        """Write the rows without a reference to the file, if there are any, and raise
        InputError."""
        left = {id: row for id, row in self.wanted.items() if self._open(id)}
        if not left or self.path is None:
            return
        with replacing(self.path) as new:
            rows = {**self.rows, **left}.values()
            new.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            )
        raise InputError(
            f"{self.path}: {len(left)} prompts, on which the answers differ, have no "
            "reference; fill them in and run the command again"
        )

    def _open(self, id: str) -> bool:
        return self.rows.get(id, {}).get("reference") is None
