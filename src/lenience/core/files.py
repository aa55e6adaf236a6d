"""Atomic files, JSON rows with line numbers, and digests. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lenience.core.errors import InputError, RunError, first_line, reason

EMBEDDED = Path(__file__).parents[1] / "embedded"
"""Folder of the built-in pair and of the heads trained for it."""


def built_in(path: str | Path) -> bool:
    """Return True if a head or drafter ships with the built-in pair. Specs leave out the path of
    such a part."""
    return Path(path).is_relative_to(EMBEDDED)


def data_folder() -> Path:
    """Return the folder of data that all runs share: $LENIENCE_HOME, or else `lenience` in the
    user's data folder."""
    user_data = Path(
        os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    )
    return Path(os.environ.get("LENIENCE_HOME") or user_data / "lenience")


def cache_folder() -> Path:
    """Return the folder of files that can be recreated: $LENIENCE_CACHE, else `cache` in
    $LENIENCE_HOME, else `lenience` in the user's cache folder."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = os.environ.get("LENIENCE_HOME")
    ours = Path(home) / "cache" if home else user_cache / "lenience"
    return Path(os.environ.get("LENIENCE_CACHE") or ours)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide a path to write to; the new file replaces `path` if the block succeeds.

    `path` is complete at all times, and missing folders are created. A path that is no regular
    file, such as /dev/null or a named pipe, is written directly.
    """
    if path.exists() and not path.is_file():
        with written(path):
            yield path
        return
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield new
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn errors of the disk into RunError while a file is written. The message names the file and
    the cause, such as a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{path}: cannot be written ({cause})") from error


@contextmanager
def alone(folder: Path, work: str) -> Iterator[None]:
    """Hold a lock for `work` in a folder, so that only one process does it. A killed process
    releases the lock. Raises InputError that names the process that holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{work}.lock"
    by = path.with_suffix(".pid")
    try:
        held = FileLock(path).acquire(timeout=0)
    except Timeout:
        who = by.read_text() if by.exists() else "another"
        fix = "wait until it has ended, or name another folder"
        raise InputError(f"{folder}: process {who} is at its {work}; {fix}") from None
    with held:
        by.write_text(str(os.getpid()))
        try:
            yield
        finally:
            by.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def stamp(file: Path) -> tuple[int, int]:
    """Return what changes when a file is written anew: its time and its size, as some file systems
    count time in steps of milliseconds."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises InputError if the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except OSError:
        raise InputError(f"{path}: there is no such file") from None
    except ValueError as error:
        fix = "restore it from a copy or start another folder"
        raise InputError(f"{path}: broken ({error}); {fix}") from None


def read_lines(path: Path, holds: str) -> list[tuple[int, str]]:
    """Return the non-empty lines of a text file with their line numbers, from 1. Raises InputError
    if the file cannot be read; `holds` describes the file's content in the message."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read ({reason(error)}); name a JSONL file of {holds}"
        ) from None
    # splitlines would also split at U+2028 and other characters that JSON allows in strings
    found = list[tuple[int, str]]()
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append((number, line))
    return found


def digest(value: Any, size: int = 8, sort_keys: bool = False) -> str:
    """Hash a JSON value to `size` bytes, as hexadecimal text."""
    return digest_bytes(json.dumps(value, sort_keys=sort_keys).encode(), size)


def digest_bytes(content: bytes, size: int = 8) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()
