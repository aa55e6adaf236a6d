"""The SGLang plugin for lenience's rules (entry point `sglang.srt.plugins`).

SGLang calls `register` in each of its processes. The plugin does nothing unless LENIENCE_RULE names
a rule. SGLang logs most errors of a plugin and serves without it. The plugin therefore raises
SystemExit, which ends the process, wherever it cannot do as requested.
"""

from __future__ import annotations

import os

from lenience.core.errors import InputError
from lenience.integrations.engine_rules.rule import VARIABLE


def register() -> None:
    """Install the plugin's hooks in SGLang. Raises SystemExit if LENIENCE_RULE names a rule, and it
    or this SGLang cannot be used."""
    if not os.environ.get(VARIABLE):
        return
    try:
        from lenience.integrations.sglang import hooks

        hooks.install()
    except Exception as error:  # SGLang would log it and serve without the plugin
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise SystemExit(f"lenience: {VARIABLE}: {kind}{error}") from error
