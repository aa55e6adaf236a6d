"""Descriptions of the machine that a pair decodes on, for records of measured speeds."""

from __future__ import annotations

import os
import platform

import torch

from lenience.decoding.options import OWN
from lenience.decoding.pair import Pair


def machine(pair: Pair) -> str:
    """Return a description of the machine and the engine."""
    # other engines load the checkpoints themselves, on their own device
    own = pair.engine_name == OWN
    if pair.target.device.type == "cuda" or (not own and torch.cuda.is_available()):
        name = torch.cuda.get_device_name(None if not own else pair.target.device)
        engine = "recorded passes" if pair.compiled else ""
    else:
        name = f"{processor()}, {os.cpu_count()} cores, {platform.system()}"
        engine = (
            "ONNX Runtime"
            if pair.compiled
            else f"torch, {torch.get_num_threads()} threads"
        )
    engine = engine if own else pair.engine_setup
    return f"{name}, {engine}" if engine else name


def processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            models = (line for line in file if line.startswith("model name"))
            return next(models).split(":")[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
