"""Benchmarks, read from their published files."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from lenience.core import spec
from lenience.core.errors import InputError, reason
from lenience.tasks.base import Messages, Sample, Task
from lenience.tasks.rows import Row, read_rows

JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
SUFFIXES = (*JSON, ".csv", ".parquet")
ROLES = {"train": "train", "test": "test", "val": "validation", "valid": "validation"}
ROLES |= {"validation": "validation", "dev": "dev"}
WHOLE = "whole"
"""Role of files whose names contain no role."""
FOLDS = 5
EXTRA = "pip install 'lenience[data]'"


@dataclass(kw_only=True)
class Published(Task):
    """A published benchmark. Its options are the dataclass's fields, written `name:option=value`.
    If it has no test set, one fifth becomes the split "test" and the rest "train": `fold` (0 to 4)
    chooses the fifth, and sets=whole puts all samples into both splits."""

    scores_by_reference = True
    title: ClassVar[str]
    """Name of the benchmark, the first part of its spec."""
    train_roles: ClassVar[tuple[str, ...]] = ("train", "validation", "dev")
    test_roles: ClassVar[tuple[str, ...]] = ("test", "validation", "dev")
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    fold: int = 4
    sets: Literal["split", "whole"] = "split"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name, None)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise InputError(
                    f"{self.title}'s {name} must be {' or '.join(get_args(kind))}, not "
                    f"{value!r}"
                )
        if not 0 <= self.fold < FOLDS:
            raise InputError(
                f"{self.title}'s fold must be from 0 to {FOLDS - 1}, not {self.fold}"
            )
        self._given: dict[str, list[Sample]] = {}

    def open(self, data: str) -> Self:
        """Read the samples from `data` (see `published_files`) and return the task. Raises
        InputError for files of another benchmark."""
        files = published_files(data, self.suffixes)
        self._data = data
        try:
            self._prepare(files)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"task {self.title}, {data}: lacks {error}") from None
        paths = [path.resolve().parent for some in files.values() for path in some]
        top = Path(os.path.commonpath(paths))
        for role, paths in files.items():
            samples = []
            for path in paths:
                for sample in self._samples_of(path, role, top):
                    samples.append(sample)
            self._given[role] = _distinct(samples, self.title)
        if not any(self._given.values()):
            why = f" with these options ({self.choices})" if self.choices else ""
            raise InputError(
                f"task {self.title}, {data}: there is no problem in it{why}"
            )
        if not self.is_one_set and (self.fold, self.sets) != (
            type(self).fold,
            type(self).sets,
        ):
            raise InputError(
                f"task {self.title}, {data}: has its own test set; fold and sets are "
                "for benchmarks without one"
            )
        self.version = type(self).version
        self.name = f"{self.spec} ({_digest(files)}) version={self.version}"
        return self

    def of_fold(self, fold: int) -> Self:
        """Return the same benchmark with another fold as its split "test"."""
        return replace(self, fold=fold, sets="split").open(self._data)

    @property
    def spec(self) -> str:
        """Return the benchmark's name with the options that differ from the defaults."""
        return spec.show(self.title, self)

    @property
    def reads(self) -> str:
        return f"{self.spec} version={self.version}"

    def samples(self, split: str) -> Iterator[Sample]:
        train = self._role(self.train_roles)
        test = self._role(self.test_roles)
        if split not in ("train", "test"):
            raise InputError(
                f"task {self.title} has no split {split!r}; it has train and test"
            )
        role = train if split == "train" else test
        samples = self._given[role]
        if self.is_one_set and self.sets == "split":
            wanted = split == "test"
            samples = [
                sample
                for sample in samples
                if (fold_of(sample.group or sample.id) == self.fold) == wanted
            ]
        yield from self._chosen(samples, split)

    @property
    def is_one_set(self) -> bool:
        """Return True if the benchmark has no separate test set, so that folds split it."""
        return self._role(self.train_roles) == self._role(self.test_roles)

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        """Return the sample of a row, with an empty id if the row has none; None if the options
        exclude the row. Raises InputError or KeyError for a row of another benchmark."""
        raise NotImplementedError

    @property
    def choices(self) -> str:
        """Return the options that may exclude all samples, as text for an error; "" without any."""
        return self.spec.partition(":")[2]

    def _prepare(self, files: dict[str, list[Path]]) -> None:
        """Prepare to read samples from the files, such as by reading shots. A hook for
        subclasses."""

    def _chosen(self, samples: list[Sample], split: str) -> list[Sample]:
        """Return the samples of a split to use; by default all."""
        return samples

    def _rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        return read_table(path)

    def _samples_of(self, path: Path, role: str, top: Path) -> Iterator[Sample]:
        name = str(path.resolve().relative_to(top)).split(".")[0]
        for number, (where, row) in enumerate(self._rows(path)):
            try:
                sample = self.read(row, where, role)
            except InputError as error:
                raise InputError(f"task {self.title}, {where}: {error}") from None
            except (KeyError, TypeError, IndexError, ValueError) as error:
                what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise InputError(
                    f"task {self.title}, {where}: {what}; it has {', '.join(row)}"
                ) from None
            if sample is not None:
                yield sample if sample.id else replace(sample, id=f"{name}-{number}")

    def _role(self, roles: Sequence[str]) -> str:
        """Return the first of `roles` that has samples, preferring a role whose samples have
        references."""
        there = [role for role in (*roles, WHOLE) if self._given.get(role)]
        there = there or [name for name in self._given if self._given[name]]
        return next(
            (name for name in there if self._given[name][0].reference is not None),
            there[0],
        )


def chat(*turns: tuple[str, str]) -> Messages:
    """Return chat messages from turns, given as (role, content)."""
    return [{"role": role, "content": content} for role, content in turns]


def fold_of(id: str) -> int:
    """Return the fold, from 0 to 4, of a sample's id or group."""
    return zlib.crc32(id.encode()) % FOLDS


def stratified(
    samples: Sequence[Sample], n: int, seed: int, stratum: str
) -> list[Sample]:
    """Return `n` samples in their original order, drawn by `seed` so that each value of `stratum`,
    a key of their metadata, keeps its share."""
    if n >= len(samples):
        return list(samples)
    drawn = list(range(len(samples)))
    random.Random(f"{seed}").shuffle(drawn)
    strata: dict[Any, list[int]] = {}
    for i in drawn:
        strata.setdefault(samples[i].metadata.get(stratum), []).append(i)
    shares = {name: n * len(some) / len(samples) for name, some in strata.items()}
    taken = {name: int(share) for name, share in shares.items()}
    rests = sorted(shares, key=lambda name: (taken[name] - shares[name], str(name)))
    for name in rests[: n - sum(taken.values())]:
        taken[name] += 1
    kept = [i for name, some in strata.items() for i in some[: taken[name]]]
    return [samples[i] for i in sorted(kept)]


def _distinct(samples: list[Sample], title: str) -> list[Sample]:
    seen = set[str]()
    for sample in samples:
        if sample.id in seen:
            raise InputError(f"task {title}: the id {sample.id!r} is a duplicate")
        seen.add(sample.id)
    return samples


def _digest(files: dict[str, list[Path]]) -> str:
    content = hashlib.sha256()
    for role in sorted(files):
        for path in files[role]:
            with path.open("rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
    return content.hexdigest()[:12]


def published_files(data: str, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return a benchmark's files by role (train, validation, dev, test or whole). `data` is a file,
    several files separated by commas, a folder, or a Hub dataset, org/name or org/name:FOLDER.
    Raises InputError for missing files and for other suffixes."""
    given = list(map(Path, data.split(",")))
    if len(given) == 1 and not given[0].exists():
        given = [_from_hub(data, suffixes)]
    found = [(_role_of(path, path.parent), path) for path in given if path.is_file()]
    for folder in given:
        if folder.is_dir():
            found += _in_folder(folder, suffixes)
        elif not folder.exists():
            raise InputError(f"--data {folder}: there is no such file or folder")
    for _, path in found:
        if not path.name.lower().endswith(suffixes):
            raise InputError(f"--data {path}: is none of {', '.join(suffixes)}")
    if not found:
        raise InputError(
            f"--data {data}: holds no file that ends in {', '.join(suffixes)}"
        )
    files: dict[str, list[Path]] = {}
    for role, path in found:
        files.setdefault(role, []).append(path)
    return files


def _in_folder(folder: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the files in a folder, with their roles. Raises InputError if it holds several
    benchmarks."""
    paths = []
    for file in sorted(folder.rglob("*")):
        if file.name.lower().endswith(suffixes):
            paths.append(file)
    paths = [
        path for path in paths if path.is_file() and path.name != "dataset_infos.json"
    ]
    paths = _each_once(paths, suffixes)
    inside = set()
    for path in paths:
        if path.parent != folder:
            inside.add(path.relative_to(folder).parts[0])
    apart = set()
    for inner in inside:
        if inner.lower() != "data" and not _role_in(inner):
            apart.add(inner)
    parts = ((path, path.relative_to(folder).parts[0]) for path in paths)
    whole = {part for file, part in parts if part in apart and _role_in(file.name)}
    several = sorted(apart if apart == inside else whole)
    if len(several) > 1:
        names = ", ".join(several[:6])
        raise InputError(
            f"--data {folder}: holds several ({names}); name one of these folders"
        )
    return [(_role_of(path, folder), path) for path in paths]


def _each_once(paths: Sequence[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return each file once; of files that differ only in format, the one with the first suffix."""
    ends = {
        path: next(end for end in suffixes if path.name.lower().endswith(end))
        for path in paths
    }
    first: dict[Path, Path] = {}
    for path in sorted(paths, key=lambda path: suffixes.index(ends[path])):
        first.setdefault(path.parent / path.name[: -len(ends[path])], path)
    return [path for path in paths if path in first.values()]


def _role_of(path: Path, top: Path) -> str:
    """Return the role of a file, by its name or the names of its folders."""
    names = [path.name, *reversed(path.relative_to(top).parts[:-1])]
    return next((role for role in map(_role_in, names) if role), WHOLE)


def _role_in(name: str) -> str | None:
    found = re.search(
        r"(?<![a-z])(train|test|validation|valid|val|dev)(?![a-z])", name.lower()
    )
    return ROLES[found[1]] if found else None


def _from_hub(data: str, suffixes: tuple[str, ...]) -> Path:
    """Download a Hub dataset, or one of its folders, and return its local path. Raises InputError
    if there is none."""
    name, _, part = data.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"--data {data}: there is no such file or folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    patterns = [f"{part}/*{end}" if part else f"*{end}" for end in suffixes]
    try:
        folder = snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    ) as error:
        why = str(error).strip().splitlines()[0]
        raise InputError(
            f"--data {data}: is neither a file nor a dataset ({why:.120})"
        ) from None
    return Path(folder) / part


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    """Return the rows of a JSON, CSV or Parquet file, each with its location. Raises InputError
    with the location."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _numbered(path, _parquet_rows(path))
    if name.endswith(".csv"):
        return _numbered(path, _csv_rows(path))
    return read_rows(path)


def _numbered(path: Path, rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    return ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield rows keyed by the names in the first line. A table of six columns without names is read
    in MMLU's format."""
    csv.field_size_limit(1 << 24)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({reason(error)})") from None
    lines = [line for line in lines if line]
    if lines and len(lines[0]) == 6 and lines[0][5].strip() in "ABCD":
        subject = re.sub(r"_(test|val|dev|train)$", "", path.stem).replace("_", " ")
        for question, *choices, answer in lines:
            yield {
                "question": question,
                "choices": choices,
                "answer": answer,
                "subject": subject,
            }
        return
    for line in lines[1:]:
        if len(line) != len(lines[0]):
            raise InputError(
                f"{path}: a row has {len(line)} fields, the first {len(lines[0])}"
            )
        yield dict(zip(lines[0], line))


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs {EXTRA}") from None
    try:
        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({reason(error)})") from None
