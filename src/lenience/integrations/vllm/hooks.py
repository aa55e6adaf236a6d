"""Hooks of the plugin in vLLM: configuration, requests, workers and outputs.

Functions are wrapped, none replaced, and a wrapper does nothing without a rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from lenience.core.errors import InputError
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.engine_rules.inputs import check_request
from lenience.integrations.vllm import counts
from lenience.integrations.vllm.checks import (
    check,
    check_certified,
    check_rule,
    check_seams,
)
from lenience.rules.lossless import is_lossless

logger = logging.getLogger("vllm.lenience")


def install() -> None:
    """Wrap the methods of vLLM that the plugin needs, once per process. vLLM's own checks run
    first."""
    wrap(VllmConfig, "__post_init__", after=_configured)
    wrap(InputProcessor, "_validate_params", after=_requested)
    wrap(WorkerWrapperBase, "init_device", after=_started)
    wrap(Scheduler, "update_from_output", after=counts.attach)
    wrap(OutputProcessor, "process_outputs", before=counts.observe)


def wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Make a method call `before` with its arguments, and `after` with its result and its
    arguments. A method that is wrapped already stays as it is."""
    original = getattr(owner, name)
    if hasattr(original, "lenience"):
        return

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after(result, *args, **kwargs)
        return result

    wrapped.lenience = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _configured(_result: None, config: Any, *_args: Any, **_kwargs: Any) -> None:
    """Check a server's configuration as soon as it is known. vLLM makes a second configuration, for
    the draft, which is skipped."""
    server = served_rule.read(config.additional_config)
    model = config.model_config
    if server is not None and model is not None and model.runner_type != "draft":
        check_seams(SEAMS)
        check(server, config)


def _requested(
    _result: Any, processor: Any, params: Any, *_args: Any, **_kwargs: Any
) -> None:
    """Refuse a request whose dial or parameters do not fit the server's rule. vLLM answers such
    errors with status 400."""
    dial = served_rule.dial_of(getattr(params, "extra_args", None))
    try:
        server = served_rule.read(processor.vllm_config.additional_config)
        if server is not None:
            rule = server.rule_for(dial)
            if server.allow_any and not is_lossless(rule):
                check_rule(rule, processor.vllm_config)
            check_request(rule, params)
            if server.certificate and not is_lossless(rule):
                check_certified(server.certificate, params)
        elif dial is not None:
            raise InputError(
                f"{served_rule.KEY} {dial!r}: this server has no rule; docs/vllm.md "
                "shows how to set one"
            )
    except InputError as error:
        raise VLLMValidationError(str(error)) from None


def _started(_result: None, wrapper: Any, *_args: Any, **_kwargs: Any) -> None:
    """Install the rule in a worker's runner, and print the start message."""
    config = wrapper.vllm_config
    server = served_rule.read(config.additional_config)
    if server is None:
        return
    if server.judges:
        if config.use_v2_model_runner:
            from lenience.integrations.vllm import v2 as runner
        else:
            from lenience.integrations.vllm import v1 as runner  # type: ignore[no-redef]
        check_seams(runner.SEAMS)
        runner.install(wrapper.worker.model_runner, server)
    if wrapper.global_rank == 0:
        logger.info("lenience: %s", check(server, config))


SEAMS: Sequence[tuple[Any, str, Sequence[str]]] = (
    (InputProcessor, "_validate_params", ("self", "params")),
    (WorkerWrapperBase, "init_device", ("self",)),
    (
        Scheduler,
        "update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    (OutputProcessor, "process_outputs", ("self", "engine_core_outputs")),
)
"""Wrapped methods with their first parameters."""
