"""A user's own task from JSON files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lenience.core.errors import InputError
from lenience.core.files import digest_bytes
from lenience.tasks.base import Sample, Task
from lenience.tasks.finding import answers, proposed
from lenience.tasks.rows import USUAL_FIELDS, Fields, Row, read_rows, unread_hint

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


class JsonlTask(Task):
    r"""A task from JSON rows with `prompt` (text) or `messages` (chat), and `reference`; optional
    fields are `id`, `split` and `group` (see `Sample`). `fields` gives other names for the prompt
    and the reference.

    `answer` sets how an answer is found in a response: "number-after:MARKER" (the number after the
    first MARKER), "last-number", "boxed" (the last \boxed{…}), "choice" (the chosen letter),
    "after:MARKER" (the rest of the line after the last MARKER) or "regex:PATTERN" (the last match,
    or its first group). `same` sets how answers are compared: as "number", "text" (ignoring case
    and spaces), "choice" or "math" (math-verify, extra "math"); the default fits `answer`, see
    `lenience.tasks.finding`. The answer in a reference is found in the same way; the whole
    reference is used if none is found.

    Without a `split`, every fifth row is "test"; with several files, those with train or test in
    their names hold these splits. Raises InputError with the line, and with a reference and a hint
    if `answer` is missing.
    """

    version = 3
    scores_by_reference = True

    def __init__(
        self,
        path: Path | Sequence[Path],
        answer: str | None,
        same: str | None = None,
        fields: Fields = USUAL_FIELDS,
    ):
        paths = [path] if isinstance(path, Path) else list(path)
        self.fields = fields
        self._rows = list(_rows(paths, self.fields))
        if not self._rows:
            raise InputError(f"task file {', '.join(map(str, paths))}: has no rows")
        if answer is None:
            references = list(map(self.fields.reference_of, self._rows[:20]))
            hint = proposed(
                [reference for reference in references if reference is not None]
            )
            if self.unread and not any(references):
                hint = f"; {unread_hint(self.unread)}"
            files = ", ".join(map(str, paths))
            raise InputError(
                f"task file {files}: name how answers are found (--answer){hint}"
            )
        self._how = answers(answer, same)
        spec = f" {self.fields.spec}" if self.fields.spec else ""
        self._reads = f"{self._how.spec} version={self.version}{spec}"
        content = b"".join(part.read_bytes() for part in paths)
        files = "+".join(part.name for part in paths)
        self.name = f"{files} ({digest_bytes(content, 6)}) {self._reads}"

    @property
    def reads(self) -> str:
        return self._reads

    @property
    def unread(self) -> list[str]:
        """Return the keys of the rows that nothing reads."""
        return self.fields.unread(self._rows)

    def samples(self, split: str) -> Iterator[Sample]:
        for number, row in enumerate(self._rows):
            if row.get("split", "test" if number % 5 == 4 else "train") != split:
                continue
            reference = self.fields.reference_of(row)
            if reference is not None:
                reference = self.reference(reference)
            group = None if row.get("group") is None else str(row["group"])
            prompt = self.fields.prompt_of(row)
            yield Sample(row["id"], prompt, reference, self.fields.besides(row), group)

    def reference(self, given: str) -> str:
        return self._find(given) or given

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return self._find(text)

    def _find(self, text: str) -> str | None:
        return self._how.find(text)

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        return None if a is None or b is None else self._how.same(a, b)


def _rows(paths: Sequence[Path], fields: Fields) -> Iterator[Row]:
    """Yield the rows of files, each with an id and, with several files, the split in its file's
    name. Raises InputError for a broken row, a duplicate id or a missing split."""
    several = len(paths) > 1
    ids = set[str]()
    splits = []
    for path in paths:
        splits.append(re.search(r"(?<![a-z])(train|test)(?![a-z])", path.name.lower()))
    stems = [path.name.split(".")[0] for path in paths]
    for n, (path, split) in enumerate(zip(paths, splits)):
        prefix = ""
        if several:
            prefix = (
                f"{stems[n]}-" if stems.count(stems[n]) == 1 else f"{stems[n]}{n + 1}-"
            )
        for number, (where, row) in enumerate(read_rows(path), 1):
            try:
                fields.prompt_of(row)
            except InputError as error:
                raise InputError(f"task file {where}: {error}") from None
            row["id"] = f"{prefix}{row.get('id', number)}"
            if row["id"] in ids:
                raise InputError(
                    f"task file {where}: the id {row['id']!r} is a duplicate; give "
                    "each row its own id"
                )
            ids.add(row["id"])
            if several and split:
                row.setdefault("split", split[1])
            elif any(splits) and several and "split" not in row:
                raise InputError(
                    f"task file {where}: names no split, as other files do (train, "
                    "test)"
                )
            yield row
