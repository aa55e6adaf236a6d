"""vLLM decodes by our rules: its plugin (entry point `vllm.general_plugins`).

vLLM calls `register` in each of its processes. It does nothing until --additional-config or
LENIENCE_RULE names a rule; from then on what cannot be done as asked is an error, never strict
decoding instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lenience.core.errors import InputError
from lenience.integrations.vllm.served_rule import KEY, VARIABLE


def register() -> None:
    """Let vLLM ask for our rules. Raises InputError for a vLLM that is not known, where
    LENIENCE_RULE asks for one; where --additional-config does, as soon as that is read."""
    try:
        from lenience.integrations.vllm import hooks
    except ImportError as error:
        _refuse(
            f"this vLLM is not known ({error}); docs/vllm.md names the versions that are"
        )
        return
    hooks.install()


def _refuse(problem: str) -> None:
    """Raise InputError where a rule is asked for that nothing can be done about."""
    if os.environ.get(VARIABLE):
        raise InputError(f"{VARIABLE}: {problem}")
    from vllm.config import VllmConfig

    configured = VllmConfig.__post_init__

    def refused(config: Any) -> None:
        configured(config)
        if (
            isinstance(config.additional_config, Mapping)
            and KEY in config.additional_config
        ):
            raise InputError(f'--additional-config "{KEY}": {problem}')

    VllmConfig.__post_init__ = refused
