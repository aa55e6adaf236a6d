"""Documents of users' corpora as tokens."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, cast

from transformers import PreTrainedTokenizerBase

from lenience.core.errors import InputError
from lenience.core.progress import Progress, silent
from lenience.models.lm import tokenize

CALL_CHARACTERS = 1 << 20
"""Number of characters per tokenizer call."""


def documents(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    field: str = "text",
    progress: Progress = silent,
) -> Iterator[list[int]]:
    """Yield the token ids of the documents in files. Each row of a .jsonl file (also .jsonl.gz) is
    a document, with its text in `field`; any other file is one document. `name` is the model of the
    tokenizer. Raises InputError for unreadable files."""
    total = 0
    done = 0
    for file in files:
        if not file.is_file():
            raise InputError(f"corpus {file}: there is no such file")
        total += file.stat().st_size
    for file in files:
        size = file.stat().st_size
        rows = ".jsonl" in file.suffixes
        with file.open("rb") as raw, _opened(raw, file) as text:
            read = _rows(text, file, field) if rows else _text(text)
            whole: list[int] = []
            for texts in _blocks(read, file):
                found = tokenize(tokenizer, name, texts, add_special_tokens=False)[
                    "input_ids"
                ]
                if rows:
                    yield from found
                else:
                    whole += list(chain.from_iterable(found))
                progress("corpus", done + min(raw.tell(), size), total)
            if whole:
                yield whole
        done += size


def _opened(raw: IO[bytes], file: Path) -> AbstractContextManager[IO[bytes]]:
    if file.suffix == ".gz":
        return cast(AbstractContextManager[IO[bytes]], gzip.open(raw))
    return nullcontext(raw)


def _text(file: IO[bytes]) -> Iterator[str]:
    """Yield a file's text in parts that end with a line."""
    while lines := file.readlines(CALL_CHARACTERS):
        yield b"".join(lines).decode()


def _rows(file: IO[bytes], path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise InputError(f"corpus {path}, line {number}: is not JSON") from None
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise InputError(
                f"corpus {path}, line {number}: has no text in {field!r}; name --field"
            )
        yield text


def _blocks(texts: Iterator[str], path: Path) -> Iterator[list[str]]:
    """Yield lists of texts that are tokenized in one call."""
    block = list[str]()
    size = 0
    try:
        for text in texts:
            block.append(text)
            size += len(text)
            if size >= CALL_CHARACTERS:
                yield block
                block = []
                size = 0
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"corpus {path}: cannot be read as text ({error})") from None
    if block:
        yield block
