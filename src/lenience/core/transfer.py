"""Copies of numbers to a device and back, without waiting for a GPU where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. The copy to a GPU is asynchronous, in stream order."""
    on_host = torch.tensor(numbers, device="cpu")
    return (
        on_host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else on_host.to(device)
    )


def looks_cheaply(tensor: Tensor) -> bool:
    """True if reading the tensor on the host does not wait for an accelerator."""
    return tensor.device.type == "cpu"


def to_host_async(numbers: Tensor) -> Callable[[], list[Any]]:
    """Start to copy numbers to the host. Return a function that waits for the copy and returns the
    numbers as a list."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    host = numbers.to("cpu", non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(numbers.device))

    def arrived() -> list[Any]:
        there.synchronize()
        return host.tolist()

    return arrived


def waiting_for(devices: set[torch.device]) -> Callable[[], None] | None:
    """Return a function that synchronises the GPUs among the devices; None if there are no GPUs."""
    gpus = [device for device in devices if device.type == "cuda"]

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return wait if gpus else None
