"""vLLM decodes by our rules: its plugin (entry point `vllm.general_plugins`).

vLLM calls `register` in each of its processes. It does nothing until --additional-config or
LENIENCE_RULE names a rule; from then on what cannot be done as asked is an error, never strict
decoding instead.
"""

from __future__ import annotations

import logging
import os

from lenience.integrations.vllm.asked import VARIABLE

logger = logging.getLogger("vllm.lenience")


def register() -> None:
    """Let vLLM ask for our rules. Raises InputError for a vLLM that is not known, where
    LENIENCE_RULE asks for one."""
    try:
        from lenience.integrations.vllm import hooks
    except ImportError as error:
        problem = f"this vLLM is not known ({error}); docs/vllm.md names the versions that are"
        if os.environ.get(VARIABLE):
            from lenience.core.errors import InputError

            raise InputError(f"{VARIABLE}: {problem}") from None
        logger.warning("lenience: %s; rules in --additional-config are not seen", problem)
        return
    hooks.install()
