"""lenience: speculative decoding that learns which draft tokens do not matter for your task.

`load_pair` gives a `Pair` of models to generate with, whose answers are `Generation`s and come in
`Step`s; `rule` an acceptance rule from its spec, `task` a task by its name. The heavy imports
happen when these are first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

from lenience.core.errors import InputError
from lenience.core.version import VERSION
from lenience.decoding.options import WHOLE_DECODERS, LoadingOptions, takes_loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lenience.core.protocols import Rule
    from lenience.core.types import Step
    from lenience.decoding.generation import Generation
    from lenience.decoding.pair import Pair
    from lenience.tasks import Task

__version__ = VERSION
__all__ = ["Generation", "InputError", "Pair", "Step", "load_pair", "rule", "task"]
_LATER = {
    "Generation": "lenience.decoding.generation",
    "Pair": "lenience.decoding.pair",
    "Step": "lenience.core.types",
}
"""Names that are imported on first access."""
WHOLE_DECODERS["certified"] = "lenience.certification.certificate"
for _library in ("torchao", "torch.utils._pytree"):
    # while torchao is imported, they log about kernels for other machines
    logging.getLogger(_library).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


@takes_loading
def load_pair(
    target: str | PreTrainedModel | None = None,
    draft: str | PreTrainedModel | None = None,
    **options: Unpack[LoadingOptions],
) -> Pair:
    """Load a target and a draft by Hub name or folder, a target alone, loaded `transformers`
    models, or the built-in pair.

    Options: dtype, device, compile, tokenizer, target_kwargs and draft_kwargs; see
    `lenience.decoding.options.Loading`. Raises InputError where a model can't be loaded or used.
    """
    from lenience.decoding.loading import load_pair

    return load_pair(target, draft, **options)


def rule(spec: str) -> Rule:
    """Make an acceptance rule from its spec, such as "topk:3"; `str(rule)` gives the spec back.
    Raises InputError."""
    from lenience.rules.parsing import parse_rule

    return parse_rule(spec)


def task(spec: str, **options: Any) -> Task:
    """Load a task by name ("wordmath"), a benchmark with its files ("gsm8k:shots=8", data="FILE or
    FOLDER"), JSON files, or "file.py:Name".

    Options: data, grader, stop_strings and a benchmark's own, such as shots; of JSON files answer,
    same, prompt_field, reference_field and prompt_template; see `lenience.tasks.load_task`. Raises
    InputError.
    """
    from lenience.tasks import load_task

    return load_task(spec, **options)
