"""Number of threads that PyTorch and exported graphs use."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_found: list[int] = []
"""Thread count of the process before the first active change, once for each active change."""


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads in the calling thread, or leave it if `number` is None.
    Afterwards the earlier number is restored, even if other threads changed it meanwhile: PyTorch
    keeps the number per thread, and new threads inherit the last one set."""
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
    """Limit the threads of PyTorch, and of graphs loaded from now on, in this process."""
    torch.set_num_threads(number)
    _limit[:] = [number]


def cores() -> int:
    """Return the number of threads that graphs share: the process's cores, or fewer if
    OMP_NUM_THREADS or `limit_threads` says so."""
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        found = os.cpu_count() or 1
    named = os.environ.get("OMP_NUM_THREADS", "")
    return min(
        [found, *_limit, *([int(named)] if named.isdecimal() and int(named) else [])]
    )
