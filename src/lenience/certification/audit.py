"""Audits of a certificate: a share of live prompts is also decoded by the target alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from lenience.certification.certificate import (
    Certificate,
    read_certificate,
)
from lenience.certification.sequential_tests import Alarm, sequence
from lenience.core.errors import InputError
from lenience.core.files import digest
from lenience.core.noise import Noise, uniform
from lenience.core.progress import Progress, silent
from lenience.core.records import Record
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import task_for
from lenience.models.prompts import Prompt
from lenience.runs.journal import Journal, JournalTail
from lenience.tasks import Published, Sample, Task, ungradable
from lenience.tasks.rows import USUAL_FIELDS, Fields, read_rows

_random = random.SystemRandom()
"""Random choice of live prompts. A new draw in each process catches every frequent prompt."""
AUDITABLE = ("paired", "disagreement")
"""Losses that live prompts can show."""


class AuditConfig(Record):
    """Settings of an audit."""

    share: float = 0.05
    """Share of the prompts to audit."""
    confidence: float = 0.95
    """Probability of never raising a false alarm."""
    seed: int = 0
    """Random seed for choosing a file's rows."""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        if not 0 < self.share <= 1:
            raise InputError(f"share {self.share}: must be in (0, 1]")
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence {self.confidence}: must be in (0, 1)")


class AuditLine(Record):
    """A line of audit.jsonl: an audited prompt, or the number of prompts answered so far."""

    certified: str
    """Certified rule; `data` is the digest of its certificate's prompts."""
    data: str
    seen: int
    """Number of prompts answered so far."""
    prompt: Any = None
    loss: float | None = None
    """Loss of the audited prompt; None if it was not audited."""
    text: str | None = None
    target: str | None = None
    reference: str | None = None
    row: int | None = None
    """Row number and content of a file's prompt, with the number of prompts seen before the
    file."""
    content: str | None = None
    before: int | None = None


@dataclass(frozen=True)
class State:
    """The state of an audit."""

    seen: int
    """Number of prompts answered so far."""
    audited: int
    losses: float
    interval: tuple[float, float]
    """Interval of a confidence sequence for the mean loss, valid at all times simultaneously."""
    drifted: bool
    """True if the counted loss is above the certified limit. The probability of ever being wrong is
    at most 1 − confidence. Without references the loss is the disagreement, which may exceed the
    limit although the certified loss does not."""
    loss: str
    unreferenced: int
    """Number of audited prompts without a reference, whose disagreement counts as the loss."""


@dataclass(frozen=True)
class LivePrompt:
    """An answered prompt, with its reference if known and its metadata."""

    prompt: Prompt
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    log: str = ""
    """Name of the prompt's file in a folder of logs; "" for a single file."""

    @property
    def content(self) -> str:
        """Return the digest of prompt, reference and log."""
        return digest([self.prompt, self.reference, *filter(None, [self.log])])


@dataclass(frozen=True)
class _FilePosition:
    """The position of a prompt in a file."""

    number: int
    content: str
    before: int


class Audit:
    """An audit of the answers of "certified:RUN"; a server calls `see` with each answer.

    A random share of the prompts is also decoded by the target alone. With a reference the loss is
    the paired loss. Without a reference it is the disagreement of the answers, which includes the
    paired loss, so alarms are never late but may be false.

    RUN/audit.jsonl keeps the audit. Threads may share it, processes that audit the same run share
    one count and one alarm, and a restarted server resumes. Raises InputError if there is nothing
    to watch, or if the task finds or compares answers differently from the certificate's.
    """

    def __init__(
        self,
        run: Path,
        pair: Pair,
        task: Task,
        config: AuditConfig = AuditConfig(),  # noqa: B008
    ):
        config.check()
        self.certificate = _watchable(run)
        if isinstance(getattr(task, "task", task), Published):
            raise InputError(
                f"task {task.label!r}: a benchmark's prompts are not live traffic; "
                "audit prompts from JSON rows or from your own task"
            )
        self.pair = pair
        self.task = task_for(pair, task)
        self.config = config
        binds = self.certificate.binds
        if self.task.reads != binds["reads"]:
            raise InputError(
                f"{run}: was certified with answers found and compared by "
                f"{binds['reads']!r}, not "
                f"{self.task.reads!r}; name the same --task, --answer and --same"
            )
        self.decoder = self.certificate.decoder(run)
        pair.check(self.decoder)
        self.alone = self.decoder.for_target()
        self.alpha = 1 - config.confidence
        self.alarm = Alarm(self.certificate.max_drop, self.alpha)
        self.losses = list[float]()
        self.drifted = False
        self.seen = 0
        self.unreferenced = 0
        self.rows = dict[tuple[int, str], int]()
        """Number of prompts seen before the file of each audited row, by row number and content."""
        self._lock = threading.Lock()
        self._unsaid = 0
        """Number of prompts answered by this process since its last line."""
        self.journal = Journal(run / "audit.jsonl")
        self._tail = JournalTail(self.journal.path)
        assert self.certificate.certified is not None
        self._about = {
            "certified": self.certificate.certified.rule,
            "data": binds["data"],
        }
        with self._alone():
            pass

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the run's lock, so that no other thread or process counts meanwhile. Counts of other
        processes are read first."""
        with self._lock, FileLock(self.journal.path.with_suffix(".lock")):
            for record in self._tail.new():
                if record.items() >= self._about.items():
                    self._count(AuditLine.read(record, str(self.journal.path)))
            yield

    def _write(self, line: AuditLine) -> None:
        """Write a line and count it; the lock must be held."""
        self.journal.write(line.to_json())
        assert len(self._tail.new()) == 1
        self._count(line)

    def picks(self, prompt: Prompt, number: int) -> bool:
        """Return True if the row with this number in a file is audited. The draw depends on the
        number and the content, so it is the same whenever the file is audited."""
        ids = self.pair.target.encode(prompt)
        key = Noise.for_prompt(self.config.seed, ids).key(number, "audit")
        return float(uniform(torch.tensor([key]))[0]) < self.config.share

    def chosen(self, prompts: Sequence[LivePrompt]) -> list[int]:
        """Return the indices of a file's rows to audit. Raises InputError, with the row, for a
        prompt that cannot be used."""
        rows = []
        numbers = _row_numbers(prompts)
        for index, (live, number) in enumerate(zip(prompts, numbers)):
            try:
                if self.picks(live.prompt, number):
                    rows.append(index)
            except InputError as error:
                where = f"{live.log}: " if live.log else ""
                raise InputError(f"{where}prompt {number + 1}: {error}") from None
        return rows

    def see(
        self,
        prompt: Prompt,
        text: str,
        reference: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> State | None:
        """Receive a lenient answer to a prompt. Return a State if the answer was audited.
        `metadata` is that of a sample of the task."""
        with self._lock:
            self._unsaid += 1
        if _random.random() >= self.config.share:
            return None
        alone = self.pair.generate(prompt, self.alone)
        return self._check(LivePrompt(prompt, reference, metadata or {}), text, alone)

    def see_row(
        self, live: LivePrompt, text: str, alone: Generation, row: int, before: int
    ) -> State:
        """Audit a lenient answer to a row of a file, given the target's own answer `alone`.
        `before` is the number of prompts seen before the file."""
        return self._check(live, text, alone, _FilePosition(row, live.content, before))

    def _check(
        self,
        live: LivePrompt,
        text: str,
        alone: Generation,
        row: _FilePosition | None = None,
    ) -> State:
        reference = self._gradable(live)
        loss = self._loss(replace(live, reference=reference), text, alone)
        with self._alone():
            if row and (row.number, row.content) in self.rows:
                return self._state()  # another process was at the same file
            seen = self.seen + self._unsaid
            self._unsaid = 0
            line = AuditLine(
                **self._about,
                seen=max(seen, row.before + row.number + 1) if row else seen,
                prompt=live.prompt,
                loss=loss,
                text=text,
                target=alone.text,
                reference=reference,
                row=row.number if row else None,
                content=row.content if row else None,
                before=row.before if row else None,
            )
            self._write(line)
            return self._state()

    def _gradable(self, live: LivePrompt) -> str | None:
        """Return a prompt's reference; None if no answer can equal it, so that nothing could be
        lost."""
        if live.reference is None:
            return None
        prompt: Any = live.prompt
        reference = self.task.reference(live.reference)
        sample = Sample("live", prompt, reference, live.metadata)
        return None if ungradable(self.task, [sample]) else live.reference

    def _loss(self, live: LivePrompt, text: str, alone: Generation) -> float:
        """Return the loss on a prompt, 0 or 1; its reference, if any, must be gradable."""
        task = self.task
        reference = live.reference
        prompt: Any = live.prompt  # token ids too, which no task's own samples have
        if reference is not None and self.certificate.loss == "paired":
            sample = Sample("live", prompt, task.reference(reference), live.metadata)
            target, certified = task.score([(alone.text, sample), (text, sample)])
            return float(target.correct and not certified.correct)
        if text == alone.text:
            return 0.0
        sample = Sample("live", prompt, None, live.metadata)
        lenient = task.answer(text, sample)
        strict = task.answer(alone.text, sample)
        return float(task.same(lenient, strict, sample) is not True)

    def reach(self, seen: int) -> None:
        """Record that `seen` prompts have been answered, the last of which were not audited."""
        with self._alone():
            if seen > self.seen:
                self._write(AuditLine(**self._about, seen=seen))

    def _count(self, line: AuditLine) -> None:
        self.seen = max(self.seen, line.seen)
        if line.loss is None:
            return
        self.losses.append(line.loss)
        self.unreferenced += (
            line.reference is None and self.certificate.loss == "paired"
        )
        if (
            line.row is not None
            and line.content is not None
            and line.before is not None
        ):
            self.rows[line.row, line.content] = line.before
        self.drifted = self.alarm.add(line.loss) or self.drifted

    def state(self) -> State:
        """Return the state of the audit."""
        with self._alone():
            return self._state()

    def _state(self) -> State:
        interval = sequence(np.array(self.losses), self.alpha)
        return State(
            seen=self.seen + self._unsaid,
            audited=len(self.losses),
            losses=sum(self.losses),
            interval=interval,
            drifted=self.drifted,
            loss=self.certificate.loss,
            unreferenced=self.unreferenced,
        )


def _watchable(run: Path) -> Certificate:
    """Return a run's certificate. Raises InputError if nothing is certified, or if live prompts
    cannot show its loss."""
    certificate = read_certificate(run)
    if not certificate.holds:
        why = "is withdrawn" if certificate.withdrawn else "certifies nothing"
        raise InputError(
            f"{run}: its certificate {why}, so there is nothing to watch; decoding is "
            "strict"
        )
    if certificate.loss not in AUDITABLE:
        raise InputError(
            f"{run}: bounds the {certificate.loss} loss, which live prompts cannot "
            "show; certify the paired loss"
        )
    return certificate


def _row_numbers(prompts: Sequence[LivePrompt]) -> list[int]:
    """Return each prompt's row number in its own log, from 0 on."""
    lengths = Counter[str]()
    numbers = []
    for live in prompts:
        numbers.append(lengths[live.log])
        lengths[live.log] += 1
    return numbers


def read_prompts(path: Path, fields: Fields = USUAL_FIELDS) -> list[LivePrompt]:
    """Read the prompts of a JSONL file: prompt or messages, or the names in `fields`, and perhaps a
    reference. Raises InputError, with the line, for a wrong row, or if there is no prompt."""
    prompts = _rows_of(path, fields)
    if not prompts:
        raise InputError(f"{path}: has no prompts")
    return prompts


def read_logs(path: Path, fields: Fields = USUAL_FIELDS) -> list[LivePrompt]:
    """Read the prompts of a JSONL file, or of all files in a folder of logs, in the order of their
    names. Files without rows in a folder are skipped. Raises InputError if there is no prompt."""
    if not path.is_dir():
        return read_prompts(path, fields)
    prompts: list[LivePrompt] = []
    for file in sorted(path.rglob("*.jsonl*")):
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            name = file.relative_to(path).as_posix()
            prompts += [replace(live, log=name) for live in _rows_of(file, fields)]
    if not prompts:
        raise InputError(f"{path}: the folder has no .jsonl files with prompts")
    return prompts


def _rows_of(path: Path, fields: Fields) -> list[LivePrompt]:
    """Return the prompts of a JSONL file, which may be empty."""
    prompts = []
    for where, row in read_rows(path):
        whole = row.get("prompt") is not None or "messages" in row
        try:
            prompt = (USUAL_FIELDS if whole else fields).prompt_of(row)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        reference = fields.reference_of(row)
        prompts.append(LivePrompt(prompt, reference, fields.besides(row)))
    return prompts


def audit(
    watch: Audit,
    prompts: Sequence[LivePrompt],
    batch_size: int = 16,
    progress: Progress = silent,
) -> int:
    """Answer a share of the prompts of a file, or of a folder of logs, with the certified rule and
    audit them. A row counts once, even if its file grows. Return the number of rows audited in
    earlier calls. Raises InputError for an unusable prompt, before any work."""
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be 1 or more")
    rows = []
    for number, live in zip(_row_numbers(prompts), prompts):
        rows.append((number, live.content))
    known = [watch.rows[row] for row in rows if row in watch.rows]
    before = known[0] if known else watch.seen
    chosen = watch.chosen(prompts)
    left = [index for index in chosen if rows[index] not in watch.rows]
    again = len(chosen) - len(left)
    progress("auditing", again, len(chosen))
    for begin in range(0, len(left), batch_size):
        part = left[begin : begin + batch_size]
        asked = [prompts[index].prompt for index in part]
        outs = watch.pair.generate_batch(asked, watch.decoder, batch_size=batch_size)
        alone = watch.pair.generate_batch(asked, watch.alone, batch_size=batch_size)
        for done, (index, out, own) in enumerate(zip(part, outs, alone), begin + 1):
            watch.see_row(prompts[index], out.text, own, rows[index][0], before)
            progress("auditing", again + done, len(chosen))
    watch.reach(before + len(prompts))
    return again
