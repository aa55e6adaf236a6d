"""Make vLLM for CPUs schedule asynchronously, which it never does by itself.

Python imports this module at its start, in each of vLLM's processes. Streams and events of the
device become objects that do nothing: on a CPU everything has happened by the time a call returns.
The order of scheduling, and what the scheduler and the runner know of a step, stay as on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from typing import Any


class Nothing:
    """A stream or an event."""

    def __init__(self, *_args: Any, **_options: Any):
        pass

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args: None


def schedule_asynchronously(platform: Any) -> None:
    check = platform.CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.CpuPlatform.check_and_update_config = classmethod(checked)


def have_no_streams(_runner: Any) -> None:
    import torch

    torch.cuda.Event = torch.cuda.Stream = torch.Event = Nothing  # type: ignore[assignment, misc]
    torch.cuda.current_stream = Nothing  # type: ignore[assignment]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment]


AFTER = {
    "vllm.platforms.cpu": schedule_asynchronously,
    "vllm.v1.worker.gpu_model_runner": have_no_streams,
}
"""What to do after the import of a module."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of AFTER where others find them, and acts after their import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in AFTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            AFTER[name](module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
