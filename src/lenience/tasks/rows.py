"""Rows of users' files (JSON lines or a JSON list, perhaps compressed), and their fields."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from lenience.core.errors import InputError, reason
from lenience.tasks.base import Messages

USUAL = {
    "prompt": ("question", "instruction", "problem", "input", "query", "text"),
    "reference": ("answer", "solution", "output", "label", "target"),
}
"""Common names of prompt and reference in other data sets."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Fields:
    """Names of a row's prompt and reference fields."""

    prompt: str = "prompt"
    reference: str = "reference"
    template: str | None = None
    """Template of the prompt, filled with a row's fields, such as "Q: {question}\\nA:"."""

    @property
    def spec(self) -> str:
        """Return the fields that differ from the defaults, as text for runs and certificates."""
        fields = {"prompt": self.prompt, "reference": self.reference}
        parts = []
        for name, field in fields.items():
            if field != name:
                parts.append(f"{name}_field={field}")
        if self.template is not None:
            parts.append(
                f"prompt_template={json.dumps(self.template, ensure_ascii=False)}"
            )
        return " ".join(parts)

    def prompt_of(self, row: Mapping[str, Any]) -> str | Messages:
        """Return a row's prompt. Raises InputError for a missing field."""
        if self.template is not None:
            return self._filled(row)
        prompt = row.get(self.prompt)
        if prompt is None and is_chat(row.get("messages")):
            messages: Messages = row["messages"]
            return messages
        if not isinstance(prompt, str):
            if isinstance(prompt or row.get("turns"), list):
                raise InputError(
                    "has turns; --task mtbench --data FILE prompts them in order"
                )
            if prompt is not None:
                raise InputError(f'its "{self.prompt}" is no text: {prompt!r:.40}')
            raise InputError(
                f'needs a "{self.prompt}" (text) or "messages" (a list of '
                f'{{"role", "content"}}){_instead(row, "prompt")}'
            )
        return prompt

    def reference_of(self, row: Mapping[str, Any]) -> str | None:
        reference = row.get(self.reference)
        return None if reference is None else str(reference)

    def besides(self, row: Row) -> Row:
        """Return a row's other fields, the sample's metadata."""
        known = {self.reference, "id", "split", "group"}
        if self.template is None:
            known |= {self.prompt, "messages"}
        return {key: value for key, value in row.items() if key not in known}

    def unread(self, rows: list[Row]) -> list[str]:
        """Return the keys of rows that neither these fields nor the template read."""
        parsed = Formatter().parse(self.template or "")
        filled = {re.split(r"[.\[]", field)[0] for _, field, _, _ in parsed if field}
        keys = {key: None for row in rows for key in self.besides(row)}
        return [key for key in keys if key not in filled]

    def _filled(self, row: Mapping[str, Any]) -> str:
        assert self.template is not None
        try:
            return self.template.format_map(dict(row))
        except KeyError as error:
            had = ", ".join(row)
            what = f"lacks {error}, which the prompt template names; it has {had}"
            raise InputError(what) from None
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            fix = "write fields as {question}, and braces twice"
            raise InputError(
                f"prompt template {self.template!r:.60}: {error}; {fix}"
            ) from None


USUAL_FIELDS = Fields()


def _instead(row: Mapping[str, Any], what: str) -> str:
    """Return a hint for an error: the row's fields, and the likely substitute of a missing one."""
    if not row:
        return ""
    usual = next((key for key in USUAL[what] if key in row), None)
    fix = f": --{what}-field {usual}" if usual else f"; name one with --{what}-field"
    return f"; it has {', '.join(row)}{fix}"


def is_chat(messages: object) -> bool:
    """Return True if a value is a non-empty list of chat messages."""
    if not isinstance(messages, list) or not messages:
        return False
    return all(
        isinstance(message, dict) and {"role", "content"} <= message.keys()
        for message in messages
    )


def unread_hint(keys: list[str]) -> str:
    """Return a phrase that lists unused keys, with a hint at one that may be the reference."""
    meant = next((key for key in USUAL["reference"] if key in keys), None)
    fix = f" (--reference-field {meant}?)" if meant else ""
    return f"unused keys: {', '.join(keys)}{fix}"


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the objects in a JSON file, each with its location. Raises InputError with the
    location."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({reason(error)})") from None
    for where, value in _values(path, text):
        if not isinstance(value, dict):
            raise InputError(f"{where}: is no object with a prompt")
        yield where, value


def _is_one_object(path: Path, text: str) -> bool:
    """Return True if a .json file is one object over many lines rather than JSON lines."""
    if not path.name.endswith((".json", ".json.gz")):
        return False
    first = text.strip().split("\n")[0]
    try:
        json.loads(first)
    except ValueError:
        return True
    return False


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("[") or _is_one_object(path, text):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from None
        values = values if isinstance(values, list) else [values]
        yield from (
            (f"{path}, row {number}", value) for number, value in enumerate(values, 1)
        )
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise InputError(f"{where}: not JSON ({error})") from None
