"""Audits of a certificate: a share of live prompts is also decoded strictly."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

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
from lenience.runs.certificate import (
    Certificate,
    read_certificate,
)
from lenience.runs.journal import Journal, JournalTail
from lenience.tasks import Published, Sample, Task, ungradable
from lenience.tasks.rows import USUAL_FIELDS, Fields, read_rows

_random = random.SystemRandom()
"""Random choice of live prompts. A new draw in each process catches every frequent prompt."""
AUDITABLE = ("paired", "disagreement")
"""The losses that live prompts tell."""


class AuditConfig(Record):
    """How an audit is made."""

    share: float = 0.05
    """Share of the prompts to audit."""
    confidence: float = 0.95
    """A drift is told wrongly, ever, with a chance of at most one less this."""
    seed: int = 0
    """Random seed for choosing a file's rows."""

    def check(self) -> None:
        """Raise InputError for a value that is none."""
        if not 0 < self.share <= 1:
            raise InputError(f"share {self.share}: must be in (0, 1]")
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence {self.confidence}: must be in (0, 1)")


class AuditLine(Record):
    """A line of audit.jsonl: an audited prompt, or how many have been answered."""

    certified: str
    """The certified rule, and the data of its certificate, that the line is about."""
    data: str
    seen: int
    """Number of prompts that had been answered."""
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
    """State of an audit."""

    seen: int
    """Prompts answered."""
    audited: int
    losses: float
    interval: tuple[float, float]
    """A confidence sequence's for the mean loss: it holds at all times together."""
    drifted: bool
    """True if the counted loss is above the certified limit. The probability of ever being wrong is
    at most 1 − confidence. Without references the loss is the disagreement, which may exceed the
    limit while the certified loss does not."""
    loss: str
    unreferenced: int
    """Number of audited prompts with a known disagreement only, of which a paired loss is a
    part."""


@dataclass(frozen=True)
class LivePrompt:
    """An answered prompt, with its reference if known, and further data of its task."""

    prompt: Prompt
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def content(self) -> str:
        """Return the prompt's identity."""
        return digest([self.prompt, self.reference])


@dataclass(frozen=True)
class _Row:
    """Where in a file a prompt stands."""

    number: int
    content: str
    before: int


class Audit:
    """Watches the answers of "certified:RUN": a server calls `see` with each. Of the prompts a
    random share is also decoded by the target alone. With a reference the loss is the paired one,
    without one the disagreement of the answers, of which the paired loss is a part: then alarms do
    not come late, but may come though nothing more is lost. RUN/audit.jsonl keeps everything:
    threads may share an audit, processes that watch the same run have one count and one alarm, and
    a server may be started again. Raises InputError where there is nothing to watch, or for a task
    that finds or compares answers otherwise than the certificate's.
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
        self.alone = self.decoder.with_options({"rule": "target"})
        self.alpha = 1 - config.confidence
        self.alarm = Alarm(self.certificate.max_drop, self.alpha)
        self.losses = list[float]()
        self.drifted = False
        self.seen = 0
        self.unreferenced = 0
        self.rows = dict[tuple[int, str], int]()
        """The rows of files that are done, by number and content: what was seen before their
        file."""
        self._lock = threading.Lock()
        self._unsaid = 0
        """Number of prompts answered here since the last line."""
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
        """Add a line while alone, and count it."""
        self.journal.write(line.to_json())
        assert len(self._tail.new()) == 1
        self._count(line)

    def picks(self, prompt: Prompt, number: int) -> bool:
        """Return True if a file's row of this number is audited. The draw depends on the number and
        the content, so it is the same whenever the file is audited."""
        ids = self.pair.target.encode(prompt)
        key = Noise.for_prompt(self.config.seed, ids).key(number, "audit")
        return float(uniform(torch.tensor([key]))[0]) < self.config.share

    def chosen(self, prompts: Sequence[LivePrompt]) -> list[int]:
        """Return which rows of a file are audited. Raises InputError, by row, for a prompt that
        cannot be used."""
        rows = []
        for row, live in enumerate(prompts):
            try:
                if self.picks(live.prompt, row):
                    rows.append(row)
            except InputError as error:
                raise InputError(f"prompt {row + 1}: {error}") from None
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
        return self._check(live, text, alone, _Row(row, live.content, before))

    def _check(
        self, live: LivePrompt, text: str, alone: Generation, row: _Row | None = None
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
        """Return a prompt's reference; None where no answer can be the same as it, and nothing
        lost."""
        if live.reference is None:
            return None
        prompt: Any = live.prompt
        reference = self.task.reference(live.reference)
        sample = Sample("live", prompt, reference, live.metadata)
        return None if ungradable(self.task, [sample]) else live.reference

    def _loss(self, live: LivePrompt, text: str, alone: Generation) -> float:
        """Return the loss on a prompt; its reference, if any, can be right."""
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
        """Note that `n` prompts have been answered, the last of which were not audited."""
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
    """Return a run's certificate. Raises InputError where it leaves nothing to watch."""
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


def read_prompts(path: Path, fields: Fields = USUAL_FIELDS) -> list[LivePrompt]:
    """Read the prompts of a JSONL file: prompt or messages, or the names in `fields`, and perhaps a
    reference. Raises InputError with the line."""
    prompts = []
    for where, row in read_rows(path):
        whole = row.get("prompt") is not None or "messages" in row
        try:
            prompt = (USUAL_FIELDS if whole else fields).prompt_of(row)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        reference = fields.reference_of(row)
        prompts.append(LivePrompt(prompt, reference, fields.besides(row)))
    if not prompts:
        raise InputError(f"{path}: has no prompts")
    return prompts


def audit(
    watch: Audit,
    prompts: Sequence[LivePrompt],
    batch_size: int = 16,
    progress: Progress = silent,
) -> int:
    """Answer a share of a file's prompts with the certified rule and audit them. A row counts once,
    also in a file that grows. Return the number of rows audited before. Raises InputError for an
    unusable prompt, before any work."""
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be 1 or more")
    contents = [live.content for live in prompts]
    known = [watch.rows[row] for row in enumerate(contents) if row in watch.rows]
    before = known[0] if known else watch.seen
    chosen = watch.chosen(prompts)
    left = [row for row in chosen if (row, contents[row]) not in watch.rows]
    again = len(chosen) - len(left)
    progress("auditing", again, len(chosen))
    for begin in range(0, len(left), batch_size):
        part = left[begin : begin + batch_size]
        asked = [prompts[row].prompt for row in part]
        outs = watch.pair.generate_batch(asked, watch.decoder, batch_size=batch_size)
        alone = watch.pair.generate_batch(asked, watch.alone, batch_size=batch_size)
        for done, (row, out, own) in enumerate(zip(part, outs, alone), begin + 1):
            watch.see_row(prompts[row], out.text, own, row, before)
            progress("auditing", again + done, len(chosen))
    watch.reach(before + len(prompts))
    return again
