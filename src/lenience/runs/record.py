"""What a run folder says of what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lenience.core.errors import InputError
from lenience.core.version import VERSION
from lenience.decoding.pair import Pair
from lenience.tasks import Sample, Task


def describe(pair: Pair, task: Task, **options: Any) -> dict[str, Any]:
    """What run.json records: versions, models with fingerprints, task and options."""
    import transformers

    models = {role: {"name": lm.name, "fingerprint": lm.fingerprint,
                     "dtype": str(lm.model.dtype).removeprefix("torch.")}
              for role, lm in (("target", pair.target), ("draft", pair.draft))}  # fmt: skip
    return {
        "versions": {"lenience": VERSION, "torch": torch.__version__, "transformers": transformers.__version__},
        "pair": pair.name,
        "models": models,
        "tokenizer": pair.target.tokenizer_fingerprint,
        "task": task.name,
        "task_version": getattr(task, "version", None),
        **options,
    }


def check_prompts(pair: Pair, task: Task, samples: Sequence[Sample], max_new_tokens: int | None) -> int:
    """Raise InputError, before any work, for the first sample whose prompt a model cannot read; returns the length limit."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens}: must be 1 or more")
    for sample in samples:
        try:
            pair.draft.encode(pair.target.encode(sample.prompt))  # both must have room for it
        except InputError as error:
            raise InputError(f"task {task.name!r}, sample {sample.id}: {error}") from None
    return max_new_tokens or task.max_new_tokens
