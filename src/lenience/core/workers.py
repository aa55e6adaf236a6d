"""Threads for blocking calls.

Unlike the threads of an executor, they do not delay the end of the process: a call that hangs is
abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

ENDING = 1.0
"""Seconds that idle threads get to end."""
T = TypeVar("T")
A = TypeVar("A")


class Workers(Generic[T]):
    """A pool of at most `most` threads, started as needed."""

    def __init__(self, most: int):
        self._most = most
        self._threads = list[Thread]()
        self._waiting = SimpleQueue[tuple[Future[T], Callable[[], T]] | None]()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` as soon as a thread is free. Return its future."""
        future = Future[T]()
        self._waiting.put((future, work))
        if len(self._threads) < self._most:
            self._threads.append(Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Let the threads end after the submitted work; abandon those that take longer than ENDING
        seconds."""
        for _ in self._threads:
            self._waiting.put(None)
        until = time.monotonic() + ENDING
        for thread in self._threads:  # ending during interpreter exit would abort it
            thread.join(max(0.0, until - time.monotonic()))
        self._threads = []

    def _work(self) -> None:
        while item := self._waiting.get():
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


def each(function: Callable[[A], Any], values: Iterable[A], most: int) -> list[Any]:
    """Return a function's results for the values, in order, with at most `most` calls at a time.
    Raises the first exception; no further calls start then."""
    workers = Workers[Any](most)
    futures = [workers.submit(partial(function, value)) for value in values]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        workers.close()
