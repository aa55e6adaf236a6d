"""Watching a certificate where it is used: a small share of live prompts is decoded strictly as well."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lenience.certification.sequential_tests import Alarm, sequence
from lenience.core.errors import InputError
from lenience.core.noise import Noise, uniform
from lenience.decoding.certified import PREFIX, read_certificate, settled
from lenience.decoding.generation import Generation
from lenience.decoding.options import Options
from lenience.decoding.pair import Pair
from lenience.models.lm import Prompt
from lenience.runs.journal import Journal
from lenience.tasks import JsonlTask, Sample, Task, reads


@dataclass(frozen=True)
class State:
    """What an audit has come to."""

    seen: int
    """Prompts answered."""
    audited: int
    losses: float
    interval: tuple[float, float]
    """A confidence sequence's for the mean loss: it holds at all times together."""
    drifted: bool
    """Whether the loss is above what was certified: it says so wrongly, ever, with a chance of at most 1 − confidence."""
    loss: str
    unreferenced: int
    """Of how many audited prompts only the disagreement of the answers is known, of which a paired loss is a part."""


class Audit:
    """Watches the answers of "certified:RUN": a server calls `see` with each. Of the prompts a random `share` is also decoded
    by the target alone. With a reference the loss is the paired one, without one the disagreement of the answers, of which
    the paired loss is a part: then alarms do not come late, but may come though nothing more is lost. RUN/audit.jsonl keeps
    everything, so that a server may be started again; threads may share an audit. Raises InputError where there is nothing
    to watch, or for a task that finds or compares answers otherwise than the certificate's.
    """

    def __init__(self, run: Path, pair: Pair, task: Task, *, share: float = 0.05, confidence: float = 0.95, seed: int = 0):
        for name, value in (("share", share), ("confidence", confidence)):
            if not 0 < value <= 1 or (name == "confidence" and value == 1):
                raise InputError(f"{name} {value}: must be in (0, 1{')' if name == 'confidence' else ']'}")
        self.made = read_certificate(run)
        if not self.made["certified"]:
            raise InputError(f"{run}: its certificate certifies nothing, so there is nothing to watch; decoding is strict")
        if self.made["loss"] not in ("paired", "disagreement"):
            raise InputError(
                f"{run}: bounds the {self.made['loss']} loss, which live prompts do not tell; certify the paired one"
            )
        binds = self.made["binds"]
        if reads(task) != binds["reads"]:
            raise InputError(
                f"{run}: was certified with answers found and compared by {binds['reads']!r}, not {reads(task)!r}; name the "
                "same --task, --answer and --same"
            )
        self.pair, self.task, self.share, self.seed = pair, task, share, seed
        self.alpha = 1 - confidence
        self.options = pair.certified(cast(Options, settled(self.made, run) | {"rule": f"{PREFIX}{run}"}))
        self.alarm = Alarm(self.made["max_drop"], self.alpha)
        self.journal, self.losses, self.drifted, self.seen = Journal(run / "audit.jsonl"), list[float](), False, 0
        self.unreferenced = 0
        self.rows = dict[tuple[int, str], int]()  # done of files, by number and content: what was seen before their file
        self._lock = threading.Lock()
        self._whose = {"certified": self.made["certified"]["rule"], "data": binds["data"]}  # of the journal's records
        for record in self.journal.resume():
            if record.items() >= self._whose.items():
                self._count(record)

    def picks(self, prompt: Prompt, number: int) -> bool:
        """Whether the prompt of this number is audited: drawn anew at each, by its number and its content."""
        ids = self.pair.target.encode(prompt)
        key = Noise.for_prompt(self.seed, ids).key(number, "audit")
        return float(uniform(torch.tensor([key]))[0]) < self.share

    def chosen(self, prompts: Sequence[tuple[Prompt, str | None]]) -> list[int]:
        """Which rows of a file are audited. Raises InputError, by row, for a prompt that cannot be used."""
        found = []
        for row, (prompt, _) in enumerate(prompts):
            try:
                found += [row] if self.picks(prompt, row) else []
            except InputError as error:
                raise InputError(f"prompt {row + 1}: {error}") from None
        return found

    def see(self, prompt: Prompt, text: str, reference: str | None = None) -> State | None:
        """Take note of a lenient answer to a prompt; a State where it was audited."""
        with self._lock:
            self.seen += 1
            if not self.picks(prompt, self.seen - 1):
                return None
        return self.check(prompt, text, reference)

    def check(self, prompt: Prompt, text: str, reference: str | None, **more: Any) -> State:
        """Audit a lenient answer in any case; `more` is kept in the journal beside it."""
        options: Options = {**self.options, "rule": "target"}
        alone = self.pair.generate(prompt, **options)
        with self._lock:
            record = {"prompt": prompt, "loss": self._loss(prompt, text, alone, reference), "text": text, "target": alone.text,
                      "reference": reference, "seen": self.seen, **self._whose, **more}  # fmt: skip
            self.journal.append(record)
            self._count(record)
            return self.state

    def _loss(self, prompt: Prompt, text: str, alone: Generation, reference: str | None) -> float:
        if reference is not None and self.made["loss"] == "paired":
            wanted = self.task.reference(reference) if isinstance(self.task, JsonlTask) else reference
            sample = Sample("live", cast(str, prompt), wanted)
            return float(self.task.correct(alone.text, sample) and not self.task.correct(text, sample))
        same = text == alone.text or self.task.same(self.task.answer(text), self.task.answer(alone.text)) is True
        return float(not same)

    def reach(self, seen: int) -> None:
        """So many prompts have been answered, the last of them not audited."""
        if seen > self.seen:
            self.seen = seen
            self.journal.append({"seen": seen, **self._whose})

    def _count(self, record: dict[str, Any]) -> None:
        self.seen = max(self.seen, record["seen"])
        if "loss" not in record:
            return
        self.losses.append(record["loss"])
        self.unreferenced += record["reference"] is None and self.made["loss"] == "paired"
        if "row" in record:
            self.rows[record["row"], record["content"]] = record["before"]
        self.drifted = self.alarm.add(record["loss"]) or self.drifted

    @property
    def state(self) -> State:
        interval = sequence(np.array(self.losses), self.alpha)
        loss = self.made["loss"]
        return State(self.seen, len(self.losses), sum(self.losses), interval, self.drifted, loss, self.unreferenced)


def read_prompts(path: Path) -> list[tuple[Prompt, str | None]]:
    """The prompts of a JSONL file, each with prompt or messages and perhaps reference. Raises InputError, by line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); name a JSONL file of prompts") from None
    found = list[tuple[Prompt, str | None]]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["messages"] if row.get("prompt") is None else row["prompt"]
            if not isinstance(prompt, str | list):
                raise TypeError(f"{prompt!r:.40} is no text")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}, line {number}: {type(error).__name__} {error}; a row has prompt or messages") from None
        reference = row.get("reference")
        found.append((prompt, None if reference is None else str(reference)))
    if not found:
        raise InputError(f"{path}: has no prompts")
    return found


def audit(watch: Audit, prompts: Sequence[tuple[Prompt, str | None]], batch_size: int = 16) -> Iterator[State | None]:
    """Audit a share of a file's prompts, answering those with the certified rule; yields a State for each, or None for what was
    audited before: a row counts once, also of a file that grows. Raises InputError for a prompt that cannot be used, before
    any work."""
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be 1 or more")
    contents = [hashlib.blake2b(json.dumps(row).encode(), digest_size=8).hexdigest() for row in prompts]
    before = next((watch.rows[row] for row in enumerate(contents) if row in watch.rows), watch.seen)
    chosen = watch.chosen(prompts)
    left = [row for row in chosen if (row, contents[row]) not in watch.rows]
    yield from (None for _ in range(len(chosen) - len(left)))
    for begin in range(0, len(left), batch_size):
        part = left[begin : begin + batch_size]
        outs = watch.pair.generate_batch([prompts[row][0] for row in part], batch_size=batch_size, **watch.options)
        for row, out in zip(part, outs):
            watch.seen = max(watch.seen, before + row + 1)
            yield watch.check(prompts[row][0], out.text, prompts[row][1], row=row, content=contents[row], before=before)
    watch.reach(before + len(prompts))
