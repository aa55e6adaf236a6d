"""Memory that KV caches need, checked against the free memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from lenience.core.errors import InputError
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST, States
from lenience.models.session import Session

MASK_BYTES = 6
"""Bytes per entry of a tree's mask while it is built, for any kind of attention."""


def token_bytes(lm: LM, states: States = LAST) -> dict[torch.device, int]:
    """Return the bytes per token in the KV cache, features included, for each device. Computed once
    per model, kind of backend and features."""
    way = type(lm.backend).__name__

    def find() -> dict[torch.device, int]:
        return Session(lm, capacity=1, states=states).cache.token_bytes()

    return lm.once(("token bytes", way, states.features), find)


def row_bytes(lm: LM) -> dict[torch.device, int]:
    """Return the bytes that a row needs whatever its length, for each device. Computed once per
    model and kind of backend."""

    def find() -> dict[torch.device, int]:
        return Session(lm, capacity=1).cache.row_bytes()

    return lm.once(("row bytes", type(lm.backend).__name__), find)


def check_memory(
    caches: Iterable[tuple[LM, States, int]], rows: int, nodes: int = 0
) -> None:
    """Raise InputError if the KV caches of `rows` rows and the masks of trees of `nodes` tokens
    exceed the free memory. `caches` holds each model with its states and its number of tokens per
    row."""
    need: dict[torch.device, int] = {}
    for lm, states, capacity in caches:
        need[lm.device] = need.get(lm.device, 0) + MASK_BYTES * nodes * capacity
        if lm.backend is not None:
            lm.backend.drop_spare(rows, capacity)
            if lm.backend.has_spare(rows, capacity):
                continue  # the cache exists already
        for device, size in token_bytes(lm, states).items():
            need[device] = need.get(device, 0) + size * (capacity + 1)
        for device, size in row_bytes(lm).items():
            need[device] = need.get(device, 0) + size
    for device, size in need.items():
        free = free_bytes(device)
        if free is not None and size * rows > free:
            what = "KV cache"
            fix = "batch_size or max_new_tokens"
            if nodes:
                what = "KV cache and masks of trees"
                fix = f"{fix}, the tree's size or the window"
            raise InputError(
                f"{rows} rows need {size * rows / 2**30:.1f} GiB of {what} on {device}, "
                f"{free / 2**30:.1f} GiB are free: at most {free // size} rows fit; lower {fix}"
            )


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free memory in bytes; None if unknown."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(
            device
        ) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_by_torch
    try:
        with open("/proc/meminfo") as file:
            free = next(
                int(line.split()[1]) * 1024
                for line in file
                if line.startswith("MemAvailable")
            )
            return min(free, _allowed())
    except (OSError, StopIteration):
        return None


def _allowed() -> int:
    """Return the process's limit on memory in bytes."""
    try:
        import resource
    except ImportError:  # not on every system
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
