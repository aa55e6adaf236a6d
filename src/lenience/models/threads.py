"""How many threads torch itself has, while others have the cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_found: list[int] = []
"""Earlier thread counts of the process, one for each change."""


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Give torch so many threads, in the thread that asks; None for as many as it has. Afterwards
    it has as many as were found, also where others have asked meanwhile: the number is kept by
    thread, and new threads take the last that was set."""
    if number is None:
        yield
        return
    with _lock:
        _found.append(_found[0] if _found else torch.get_num_threads())
        torch.set_num_threads(number)
    try:
        yield
    finally:
        with _lock:
            torch.set_num_threads(_found.pop())


_limit: list[int] = []


def limit_threads(number: int) -> None:
    """Let torch and graphs that are loaded from now on have so many threads in this process."""
    torch.set_num_threads(number)
    _limit[:] = [number]


def cores() -> int:
    """Return how many threads graphs share: the process's cores, or fewer by OMP_NUM_THREADS or
    `limit_threads`."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        found = os.cpu_count() or 1
    named = os.environ.get("OMP_NUM_THREADS", "")
    return min(
        [found, *_limit, *([int(named)] if named.isdecimal() and int(named) else [])]
    )
