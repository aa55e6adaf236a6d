"""The thread that decodes: requests wait in bounded queues and are decoded in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from lenience.core.errors import RunError, first_line
from lenience.core.types import Step
from lenience.serving.batch import Job, RunningBatch


class Busy(Exception):
    """The queue is full."""


class Listener(Protocol):
    """The receiver of a request's steps. Its methods are called in the worker's thread."""

    def on_step(self, job: Job, step: Step) -> None: ...

    def on_error(self, job: Job, error: Exception) -> None: ...


@dataclass
class Lane:
    """A queue of requests and the batch that decodes them."""

    build: Callable[[], RunningBatch]
    longest: int
    """Maximum number of waiting requests."""
    batch: RunningBatch | None = None
    """Batch with its caches; None before the first request, and after a failed cycle."""
    waiting: deque[tuple[Job, Listener]] = field(default_factory=deque)
    admitted: dict[int, tuple[Job, Listener]] = field(default_factory=dict)
    """Requests that have left the queue, with their receivers, by the id of the request."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted)


class DecodingThread:
    """A thread that decodes the requests of its lanes, which take turns by cycles. If the thread
    dies, its running requests fail, and another thread continues with those that wait."""

    def __init__(self, lanes: dict[str, Lane]):
        self.lanes = lanes
        self.restarts = 0
        self.ends_at: float | None = None
        """Time at which the answers must have ended, while the worker closes."""
        self._changed = threading.Condition()
        self._thread = self._started()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.ends_at is None

    def submit(self, name: str, jobs: list[tuple[Job, Listener]]) -> None:
        """Put requests into the queue of a lane, all or none. Raises Busy if they have no room, and
        RunError if the worker is closing."""
        with self._changed:
            if self.ends_at is not None:
                raise RunError("the server is shutting down")
            lane = self.lanes[name]
            if len(lane.waiting) + len(jobs) > lane.longest:
                raise Busy
            lane.waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """End requests without an answer: they leave the queue at once, and their rows before the
        next cycle."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            for lane in self.lanes.values():
                if any(job.cancelled for job, _ in lane.waiting):
                    left = [item for item in lane.waiting if not item[0].cancelled]
                    lane.waiting = deque(left)

    def close(self, seconds: float) -> None:
        """Take no further requests, and finish the others for up to some seconds. Those that are
        left then fail."""
        with self._changed:
            self.ends_at = time.monotonic() + seconds
            self._changed.notify()
        self._thread.join(seconds + 5)

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="lenience worker", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        """Decode until the worker is closed. Whatever ends the thread earlier is answered by a new
        thread."""
        try:
            self._decode()
        except BaseException as error:
            for lane in self.lanes.values():
                self._fail(lane, error)
            if self.ends_at is None:
                self.restarts += 1
                self._thread = self._started()
        else:
            for lane in self.lanes.values():
                self._fail(lane, RunError("the server shut down"), whole=True)

    def _decode(self) -> None:
        while True:
            with self._changed:
                while not (busy := self._busy()) and self.ends_at is None:
                    self._changed.wait()
            if self.ends_at is not None and (
                not busy or time.monotonic() > self.ends_at
            ):
                return
            for lane in busy:
                self._cycle(lane)

    def _busy(self) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.has_work]

    def _cycle(self, lane: Lane) -> None:
        """Run one cycle of a lane. If it fails, its requests fail, and its caches are made anew for
        the next ones."""
        if lane.batch is None:
            try:
                lane.batch = lane.build()
            except Exception as error:
                self._fail(lane, error, whole=True)
                return
        following = self._following(lane)
        try:
            steps = lane.batch.cycle(lambda: next(following, None))
        except Exception as error:
            self._fail(lane, error)
            return
        for job, step in steps:
            lane.admitted[id(job)][1].on_step(job, step)
        running = {id(job) for job in lane.batch.jobs}
        for over in lane.admitted.keys() - running:
            del lane.admitted[over]

    def _following(self, lane: Lane) -> Iterator[Job]:
        """Yield the waiting requests in order, without the cancelled ones."""
        while True:
            with self._changed:
                if not lane.waiting:
                    return
                job, listener = lane.waiting.popleft()
            if not job.cancelled:
                lane.admitted[id(job)] = job, listener
                yield job

    def _fail(self, lane: Lane, error: BaseException, whole: bool = False) -> None:
        """End the running requests of a lane with an error; with `whole` the waiting ones too."""
        lane.batch = None
        failed = list(lane.admitted.values())
        lane.admitted.clear()
        if whole:
            with self._changed:
                failed += lane.waiting
                lane.waiting.clear()
        for job, listener in failed:
            listener.on_error(job, RunError(f"decoding failed: {first_line(error)}"))
