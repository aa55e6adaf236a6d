"""Hooks of the plugin in SGLang: server arguments, requests, verification and the server's state.

SGLang logs the errors of its registry of hooks and continues without them. Each hook is therefore
checked after it was applied.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from lenience.core.errors import InputError
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.engine_rules.inputs import check_request
from lenience.integrations.engine_rules.rule import ServedRule
from lenience.integrations.sglang.checks import check, sglang_version
from lenience.integrations.sglang.requests import dial_of, params_of
from lenience.integrations.sglang.verification import Verification
from lenience.rules.lossless import is_lossless
from lenience.serving.dial import KEY

logger = logging.getLogger("sglang.lenience")
SRT = "sglang.srt"
VERIFY = f"{SRT}.sampling.sampling_params.SamplingParams.verify"
CHECK_ARGUMENTS = f"{SRT}.server_args.ServerArgs.check_server_args"
START = f"{SRT}.managers.scheduler.Scheduler.__init__"
STATE = f"{SRT}.managers.scheduler.Scheduler.get_internal_state"
SAMPLE = f"{SRT}.speculative.eagle_utils.eagle_sample"
GREEDY = f"{SRT}.speculative.eagle_utils.verify_tree_greedy_func"
SAMPLED = f"{SRT}.speculative.eagle_utils.tree_speculative_sampling_target_only"
PARAMETERS = {
    VERIFY: ("self", "vocab_size"),
    CHECK_ARGUMENTS: ("self",),
    START: ("self", "server_args"),
    STATE: ("self",),
    SAMPLE: ("verify_input", "batch", "logits_output"),
}
"""First parameters of the wrapped functions."""
NAMED = {
    GREEDY: ("candidates", "target_predict"),
    SAMPLED: ("candidates", "target_probs"),
}
"""Parameters of SGLang's kernels that are changed, which it passes by name."""


def install() -> None:
    """Wrap SGLang's functions, once per process. Raises InputError if LENIENCE_RULE is impossible,
    or one of the functions is missing or takes other parameters."""
    server = served_rule.read(None)
    assert server is not None
    sglang_version()
    wrap(VERIFY, partial(_requested, server))
    wrap(CHECK_ARGUMENTS, partial(_configured, server))
    wrap(START, partial(_started, server))


def wrap(target: str, hook: Callable[..., Any]) -> None:
    """Wrap a function, whose `hook` gets the function and its arguments. Raises InputError if the
    function has changed or SGLang did not wrap it."""
    if target in HookRegistry._patched:
        return
    check_target(target)
    HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    if target not in HookRegistry._patched:
        raise InputError(f"SGLang {sglang_version()}: {target} cannot be wrapped")


def check_target(target: str) -> None:
    """Raise InputError if a function is missing or takes other parameters."""
    owner, _, name = target.rpartition(".")
    function = getattr(pkgutil.resolve_name(owner), name, None)
    if function is None:
        raise InputError(f"SGLang {sglang_version()}: has no {target} on this machine")
    found = tuple(inspect.signature(function).parameters)
    first: Sequence[str] = PARAMETERS.get(target, ())
    missing = [name for name in NAMED.get(target, ()) if name not in found]
    if found[: len(first)] != tuple(first) or missing:
        wanted = ", ".join((*first, *missing))
        raise InputError(
            f"SGLang {sglang_version()}: {target} takes {', '.join(found)}, not {wanted}"
        )


def _requested(
    server: ServedRule,
    original: Callable[..., Any],
    sampling: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Refuse a request whose dial or parameters do not fit the server's rule. SGLang answers such
    errors with status 400."""
    result = original(sampling, *args, **kwargs)
    try:
        rule = server.rule_for(dial_of(sampling))
        if not is_lossless(rule):
            check_request(rule, params_of(sampling))
    except InputError as error:
        raise ValueError(str(error)) from None
    return result


def _configured(
    server: ServedRule,
    original: Callable[..., Any],
    args: Any,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Check a server's arguments as soon as they are known."""
    result = original(args, *rest, **kwargs)
    try:
        check(server, resolved_view(args))
    except InputError as error:
        raise SystemExit(f"lenience: {error}") from None
    return result


def _started(
    server: ServedRule,
    original: Callable[..., Any],
    scheduler: Any,
    server_args: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Install the rule in a scheduler's process before it loads models, and print the start
    message."""
    view = resolved_view(server_args)
    report = check(server, view)
    if server.judges:
        for head in (head for rule in server.rules for head in rule.heads):
            _ = head.head  # loaded now, in the state that was checked
        verification = Verification(
            server, view.tokenizer_path or view.model_path, view
        )
        wrap(SAMPLE, verification.sample)
        wrap(GREEDY, verification.greedy)
        wrap(SAMPLED, verification.sampled)
        wrap(STATE, partial(_stated, report, verification))
    result = original(scheduler, server_args, *args, **kwargs)
    logger.info("lenience: %s", report)
    return result


def _stated(
    report: str,
    verification: Verification,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add the rule and the counts to the state that /server_info shows."""
    result = original(*args, **kwargs)
    result.internal_state[KEY] = {"started": report, **verification.totals()}
    return result
