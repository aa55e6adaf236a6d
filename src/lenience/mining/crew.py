"""Mining by several workers.

Only the driver writes the journal. The samples of a lost worker go to other workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Protocol, Self

from lenience.core.errors import InputError, RunError
from lenience.mining.work import SampleBatch, WorkerPlan

MOST_AT_ONCE = 4
"""Maximum size of a worker's part, as a multiple of its batch size; parts get smaller towards the
end."""
LOST_IN_A_ROW = 3
"""Number of successive losses, without a finished sample, after which a worker is not replaced; the
other workers continue without it."""
ENDING = 5.0
"""Seconds to wait for each thread to end."""


class WorkerLost(Exception):
    """The loss of a worker, with its known cause."""


class HiredWorker(Protocol):
    """A worker, as the driver sees it."""

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identity of the worker's pair and task, see `Worker.identity`."""
        ...

    def mine(self, part: SampleBatch) -> Iterator[dict[str, Any]]:
        """Yield the record of each sample of a part as it is finished. Raises WorkerLost, or
        InputError or RunError if the search itself fails."""
        ...

    def close(self) -> None:
        """Release the worker."""
        ...


class Crew(Protocol):
    """A source of workers."""

    @property
    def most(self) -> int | None:
        """Return the maximum number of workers; None for as many as there is room for."""
        ...

    @property
    def at_once(self) -> bool:
        """Return True if all workers start at the same time, False if each starts when the previous
        worker is ready."""
        ...

    def hire(self, number: int) -> HiredWorker | None:
        """Return a worker that is ready, perhaps after waiting for room; None once the crew is
        closed. Raises the same errors as HiredWorker.mine."""
        ...

    def stop(self) -> None:
        """Hire no more workers, and stop those that are searching."""
        ...

    def close(self) -> None:
        """Release the crew's resources; no further workers start."""
        ...


class ProcessCrew:
    """Processes on this machine, each with its own models. With several GPUs the processes take
    them in turn."""

    at_once = True

    def __init__(self, plan: WorkerPlan, number: int):
        if number < 1:
            raise InputError(f"workers {number}: must be 1 or more")
        self.plan = plan
        self.most = number
        self._processes = list[_Process]()

    def hire(self, number: int) -> HiredWorker | None:
        self._processes.append(_Process(number))
        return self._processes[-1].started(self.plan)

    def stop(self) -> None:
        for process in self._processes:
            process.close()

    def close(self) -> None:
        self.stop()


class _Process:
    def __init__(self, number: int):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lenience.mining.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_device(number)},
            text=True,
            encoding="utf-8",
        )
        self.identity = dict[str, Any]()

    def started(self, plan: WorkerPlan) -> Self:
        """Return the worker once its models are loaded. Raises the same errors as `mine`."""
        self._tell(plan.to_json())
        self.identity = self._message()["ready"]
        return self

    def mine(self, part: SampleBatch) -> Iterator[dict[str, Any]]:
        self._tell(part.to_json())
        while "mined" in (message := self._message()):
            yield message["mined"]

    def close(self) -> None:
        self._process.kill()  # it has no state to save
        self._process.wait()

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None

    def _message(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._lost()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise (InputError if message["is_input"] else RunError)(message["error"])
        return message

    def _lost(self) -> WorkerLost:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return WorkerLost(
            f"ended with status {status}" + (f": {said[-1]}" if said else "")
        )


def _device(number: int) -> dict[str, str]:
    """Return the environment variable that selects the GPU of process `number`; empty unless there
    are several GPUs."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    )
    return {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}


class _Board:
    """Queue of the remaining samples, shared by the workers' threads."""

    def __init__(self, ids: Sequence[str]):
        self.changed = Condition()
        self._left = list(ids)
        self._out = set[str]()
        self._workers = 0
        self.closed = False

    def take(self, most: int) -> list[str]:
        """Return a worker's next part. Parts are smaller when little is left, so that all workers
        end at the same time. The part is empty once everything is done."""
        with self.changed:
            while not self._left and self._out and not self.closed:
                self.changed.wait()
            if self.closed:
                return []
            share = -(-len(self._left) // (2 * max(1, self._workers)))
            taken = self._left[: min(most, share)]
            del self._left[: len(taken)]
            self._out |= set(taken)
            return taken

    def done(self, id: str) -> None:
        with self.changed:
            self._out.discard(id)
            self.changed.notify_all()

    def give_back(self, ids: Sequence[str]) -> None:
        """Return unfinished samples to the front of the queue."""
        with self.changed:
            unfinished = [id for id in ids if id in self._out]
            self._out -= set(unfinished)
            self._left[:0] = unfinished
            self.changed.notify_all()

    def joined(self, by: int) -> None:
        """Change the number of active workers `by` 1 or -1."""
        with self.changed:
            self._workers += by

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def mined_by(
    crew: Crew, work: SampleBatch, identity: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the record of each of a crew's samples as it is finished. `identity` is the driver's
    own. Raises RunError if all workers are lost repeatedly or a worker has other models than the
    driver, and raises a worker's own errors."""
    threads = _Threads(crew, work, identity)
    threads.start()
    try:
        for _ in work.ids:
            found = threads.found.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        threads.close()


class _Threads:
    """Threads that wait for workers, one per worker."""

    def __init__(self, crew: Crew, work: SampleBatch, identity: Mapping[str, Any]):
        self.crew = crew
        self.work = work
        self.identity = identity
        self.board = _Board(work.ids)
        self.found = SimpleQueue[dict[str, Any] | BaseException]()
        self._threads = list[Thread]()
        self._given_up = 0

    def start(self) -> None:
        for _ in range((self.crew.most or 1) if self.crew.at_once else 1):
            self._add()

    def close(self) -> None:
        self.board.close()
        self.crew.stop()
        for thread in self._threads:
            thread.join(ENDING)
        self.crew.close()

    def _add(self) -> None:
        if self.crew.most is None or len(self._threads) < self.crew.most:
            number = len(self._threads)
            self._threads.append(Thread(target=self._work, args=(number,), daemon=True))
            self._threads[-1].start()

    def _work(self, number: int) -> None:
        """Hire a worker, and replace it if it is lost, until all samples are done."""
        lost_in_a_row = 0
        try:
            while not self.board.closed:
                done = list[str]()
                try:
                    self._employ(number, done)
                    return
                except WorkerLost as error:
                    lost_in_a_row = 1 if done else lost_in_a_row + 1
                    if not self.board.closed:
                        self._lament(number, error, lost_in_a_row)
                    if lost_in_a_row == LOST_IN_A_ROW:
                        return
        except BaseException as error:
            self.found.put(error)

    def _employ(self, number: int, done: list[str]) -> None:
        """Let a worker search until no samples are left, and add the finished samples to `done`.
        Raises WorkerLost if the worker is lost before."""
        worker = self.crew.hire(number)
        if not worker:
            return
        self.board.joined(1)
        try:
            self._check(number, worker)
            if not self.crew.at_once and number == len(self._threads) - 1:
                self._add()
            while ids := self.board.take(MOST_AT_ONCE * self.work.batch_size):
                self._search(worker, ids, done)
        finally:
            self.board.joined(-1)
            worker.close()

    def _check(self, number: int, worker: HiredWorker) -> None:
        """Raise RunError if a worker has other models or another task than the driver."""
        theirs = worker.identity
        differs = [key for key, own in self.identity.items() if theirs.get(key) != own]
        if differs:
            raise RunError(
                f"worker {number + 1}: has another {', '.join(differs)} than the "
                "driver; give all "
                "machines the same files"
            )

    def _search(self, worker: HiredWorker, ids: list[str], done: list[str]) -> None:
        try:
            for record in worker.mine(replace(self.work, ids=ids)):
                self.found.put(record)
                self.board.done(record["id"])
                done.append(record["id"])
        finally:
            self.board.give_back(ids)

    def _lament(self, number: int, error: WorkerLost, in_a_row: int) -> None:
        """Print a warning that a worker is lost. Raises RunError if every worker was lost too
        often."""
        print(
            f"warning: worker {number + 1} {error}; other workers take its samples",
            file=sys.stderr,
        )
        if in_a_row < LOST_IN_A_ROW:
            return
        with self.board.changed:
            self._given_up += 1
            all_have = self._given_up == len(self._threads)
        if all_have:
            what = f"every worker was lost {LOST_IN_A_ROW} times without a sample being finished"
            raise RunError(f"{what}, the last one {error}")
