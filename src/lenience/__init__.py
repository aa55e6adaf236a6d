"""lenience: speculative decoding that learns which draft tokens do not matter for your task.

`load_pair` gives a pair of models to generate with, `rule` an acceptance rule from its spec, `task` a task by its name.
The heavy imports happen when these are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lenience.core.errors import InputError
from lenience.core.version import VERSION

if TYPE_CHECKING:
    from lenience.core.protocols import Rule
    from lenience.decoding.pair import Pair
    from lenience.tasks import Task

__version__ = VERSION
__all__ = ["InputError", "load_pair", "rule", "task"]


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    dtype: str | None = None,
    device: str = "auto",
    compile: bool | None = None,
    target_kwargs: dict[str, Any] | None = None,
    draft_kwargs: dict[str, Any] | None = None,
) -> Pair:
    """Load a target and a draft by Hub name or folder, or the built-in pair; see `lenience.pair.load_pair`."""
    from lenience.decoding.loading import load_pair

    kwargs = {"target_kwargs": target_kwargs, "draft_kwargs": draft_kwargs}
    return load_pair(target, draft, dtype=dtype, device=device, compile=compile, **kwargs)


def rule(spec: str) -> Rule:
    """An acceptance rule from its spec, such as "topk:3"; `str(rule)` gives the spec back. Raises InputError."""
    from lenience.rules.registry import parse_rule

    return parse_rule(spec)


def task(spec: str, *, answer: str | None = None, same: str | None = None) -> Task:
    """A task by name ("wordmath"), as a JSONL file or as "file.py:Name"; see `lenience.tasks.load_task`."""
    from lenience.tasks import load_task

    return load_task(spec, answer=answer, same=same)
