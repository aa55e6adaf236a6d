"""The vLLM plugin for lenience's rules (entry point `vllm.general_plugins`).

vLLM calls `register` in each of its processes. The plugin does nothing until --additional-config or
LENIENCE_RULE names a rule. From then on, whatever cannot be done as requested is an error instead
of strict decoding; only a limited share of windows may be left unjudged (`max_unjudged`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lenience.core.errors import InputError
from lenience.integrations.engine_rules.rule import VARIABLE
from lenience.serving.dial import KEY


def register() -> None:
    """Install the plugin's hooks in vLLM. For an unsupported vLLM, raises InputError if
    LENIENCE_RULE names a rule, or later when vLLM reads an --additional-config that does."""
    try:
        from lenience.integrations.vllm import hooks
    except ImportError as error:
        _refuse(
            f"this vLLM is not known ({error}); docs/vllm.md names the versions that are"
        )
        return
    hooks.install()


def _refuse(problem: str) -> None:
    """Raise InputError if LENIENCE_RULE names a rule, or later when --additional-config does."""
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
