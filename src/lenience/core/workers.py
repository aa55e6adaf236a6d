"""Threads for blocking calls.

Unlike those of an executor they do not delay the process's end: a call that hangs is abandoned.
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
"""Seconds in which threads that have nothing left to do end."""
T = TypeVar("T")
A = TypeVar("A")


class Workers(Generic[T]):
    """At most `most` threads, begun as they are needed."""

    def __init__(self, most: int):
        self._most = most
        self._threads = list[Thread]()
        self._waiting = SimpleQueue[tuple[Future[T], Callable[[], T]] | None]()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do work as soon as a thread is free."""
        future = Future[T]()
        self._waiting.put((future, work))
        if len(self._threads) < self._most:
            self._threads.append(Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Let threads end after the submitted work, and abandon those that take longer."""
        for _ in self._threads:
            self._waiting.put(None)
        until = time.monotonic() + ENDING
        for thread in self._threads:  # one that ends as the process does would abort it
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
    """Return a function's results for some values, in order, with `most` calls at once. Raises the
    first exception and starts no further calls then."""
    workers = Workers[Any](most)
    futures = [workers.submit(partial(function, value)) for value in values]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        workers.close()
