"""Rules in vLLM's V2 runner, which keeps requests in slots on the device.

As in V1, copies of the kernel's inputs are rewritten. Here a row of logits decides on the next
row's token, and a request's last row on no drafted token. A token to remove is marked -1.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as sampling

from lenience.core.errors import InputError
from lenience.integrations.engine_rules.rule import ServedRule
from lenience.integrations.engine_rules.windows import (
    WindowDecider,
    Windows,
    forced,
    num_drafted,
)
from lenience.integrations.vllm.counts import put

SEAMS: Sequence[tuple[Any, str, Sequence[str]]] = (
    (GPUModelRunner, "load_model", ("self", "load_dummy_weights")),
    (GPUModelRunner, "finish_requests", ("self", "scheduler_output")),
    (
        GPUModelRunner,
        "sample",
        ("self", "hidden_states", "input_batch", "grammar_output"),
    ),
    (GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (Sampler, "add_request", ("self", "req_idx", "sampling_params")),
    (
        SamplingStates,
        "apply_temperature",
        ("self", "logits", "expanded_idx_mapping", "idx_mapping_np"),
    ),
    (
        sampling,
        "rejection_sample",
        (
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
        ),
    ),
)
"""Wrapped functions with their first parameters."""
logger = logging.getLogger("vllm.lenience")
OF_TRIALS = ("_warmup", "_v2_mixed_warmup")
"""Beginnings of the ids of requests with which vLLM warms its kernels up."""


@dataclass
class Slots:
    """The requests of a V2 runner, with their tokens on the device, by slot."""

    states: Any
    of: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of each request."""
    totals: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each request in this step, including its prompt."""

    def __contains__(self, id: str) -> bool:
        return id in self.of

    def params(self, id: str) -> Any:
        return self.of[id]

    def prompt(self, id: str) -> list[int]:
        return self._between(id, 0, self._prompt_length(id))

    def length(self, id: str) -> int:
        return self.totals[id] - self._prompt_length(id)

    def tokens(self, id: str, start: int) -> list[int]:
        return self._between(id, self._prompt_length(id) + start, self.totals[id])

    def request(self, slot: int) -> str:
        """Return the id of the request in a slot; "" if there is none."""
        id: str = self.states.index_to_req_id.get(slot, "")
        return id if id in self else ""

    def add(self, slot: int, params: Any) -> str | None:
        """Record a request that is new or resumed, and return its id. Return None for a slot of a
        trial run, which has no request or one of vLLM's own."""
        id: str | None = self.states.index_to_req_id.get(slot)
        if id is None or id.startswith(OF_TRIALS):
            return None
        self.of[id] = params
        return id

    def forget(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.of.pop(id, None)
            self.totals.pop(id, None)

    def _prompt_length(self, id: str) -> int:
        return int(self.states.prompt_len.np[self.states.req_id_to_index[id]])

    def _between(self, id: str, start: int, end: int) -> list[int]:
        slot = self.states.req_id_to_index[id]
        tokens: list[int] = self.states.all_token_ids.gpu[slot, start:end].tolist()
        return tokens


@dataclass
class Sampling:
    """The sampling of one runner, in which rules decide."""

    slots: Slots
    deciding: WindowDecider
    hidden: Tensor | None = None
    """Target states of the step that is being sampled, [rows of logits, H]."""
    read: int = 0
    """Number of rows of the step decided so far; large steps come in parts."""
    logits: Tensor | None = None
    """Target logits of the part before temperature and truncation; None if these do not apply."""

    def sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep the step's states for the rule, and call the runner's method."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self.hidden = given["hidden_states"][given["input_batch"].logits_indices]
        self.read = 0
        try:
            return original(*args, **kwargs)
        finally:
            self.hidden = self.logits = None

    def sample_tokens(self, original: Callable[..., Any], grammar_output: Any) -> Any:
        """Call the runner's method, and send the counts along."""
        output = original(grammar_output)
        if output is not None:
            put(getattr(output, "model_runner_output", output), self.deciding)
        return output

    def decide(self, given: dict[str, Any], hidden: Tensor) -> None:
        """Change copies of the kernel's inputs for a part of a step so that it arrives at the
        rules' verdicts."""
        with gpu_sync_allowed():
            self._decide(given, hidden)

    def _decide(self, given: dict[str, Any], hidden: Tensor) -> None:
        target = given["target_logits"]
        drafted = given["draft_sampled"]
        states = hidden[self.read : self.read + len(target)]
        self.read += len(target)
        logits = target if self.logits is None else self.logits
        self.logits = None
        windows, rows = self._windows(given, logits, states)
        greedy = all(self.slots.params(id).temperature == 0 for id in windows.ids if id)
        orders = self.deciding.orders(windows, greedy)
        if not orders.tokens:
            return
        given["target_logits"] = forced(target, orders, rows)
        if orders.ends:
            drafted = drafted.clone()
            drafted[rows[torch.tensor(orders.ends, device=rows.device)] + 1] = -1
            given["draft_sampled"] = drafted

    def _windows(
        self, given: dict[str, Any], logits: Tensor, states: Tensor
    ) -> tuple[Windows, Tensor]:
        """Return a part's windows, and the indices [N] of their rows among its rows of logits. A
        slot without a request, as in trial runs, has no window. A window ends before a token marked
        -1."""
        drafted = given["draft_sampled"].tolist()
        ends = given["cu_num_logits"].tolist()
        slots = given["idx_mapping"].tolist()
        positions = given["pos"].tolist()
        ids = list[str]()
        lengths = list[int]()
        rows = list[int]()
        with_bonus = list[int]()
        for slot, (start, end) in zip(slots, pairwise(ends)):
            id = self.slots.request(slot)
            n = num_drafted(drafted[start + 1 : end]) if id else 0
            if id:
                self.slots.totals[id] = positions[start] + 1
            ids.append(id)
            lengths.append(n)
            rows += range(start, start + n)
            with_bonus += range(start, start + n + 1)
        at = torch.tensor(rows, dtype=torch.long, device=logits.device)
        probs = None
        if given["draft_logits"] is not None and self.deciding.may_need_probs:
            probs = self._probs(given, at, logits.shape[1])
        windows = Windows(
            ids=ids,
            tokens=given["draft_sampled"][at + 1],
            lengths=lengths,
            logits=logits[at],
            hidden=states[
                torch.tensor(with_bonus, dtype=torch.long, device=logits.device)
            ],
            probs=probs,
        )
        return windows, at

    def _probs(self, given: dict[str, Any], at: Tensor, vocabulary: int) -> Tensor:
        """Return the distributions [N, V] from which the draft drew the tokens of rows `at`,
        computed from the draft's logits."""
        slots = given["expanded_idx_mapping"][at]
        steps = given["expanded_local_pos"][at]
        logits = given["draft_logits"][slots, steps].float()
        temperature = given["temperature"][slots].float()
        probs = torch.softmax(
            logits / torch.where(temperature > 0, temperature, 1)[:, None], -1
        )
        beyond = max(0, vocabulary - probs.shape[1])
        return torch.nn.functional.pad(probs, (0, beyond))[:, :vocabulary]


_runners: list[Sampling] = []
"""Samplings of this process's runners; one samples at a time."""


def install(runner: Any, server: ServedRule) -> None:
    """Let the server's rule decide on a runner's windows, as soon as the runner has loaded its
    model. Raises InputError then if rows are not laid out as rules expect."""
    for head in (head for rule in server.rules for head in rule.heads):
        _ = head.head  # loaded now, in the state that was checked
    load = runner.load_model

    def loaded(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        if getattr(runner, "rejection_sampler", None) is not None:
            _attach(runner, server)

    runner.load_model = loaded


def _attach(runner: Any, server: ServedRule) -> None:
    decider = runner.rejection_sampler
    plain = type(decider) is sampling.RejectionSampler
    for why, is_so in (
        ("samples in its own way", not plain),
        ("samples parts of a batch on each GPU", runner.batch_sharder is not None),
        ("puts watermarks in", plain and decider.watermark_key is not None),
        ("adapts its windows", plain and decider.enable_adaptive_verification),
    ):
        if is_so:
            raise InputError(f"rule {server.rule}: this runner {why}; switch that off")
    slots = Slots(runner.req_states)
    what = Sampling(slots, WindowDecider(slots, server, runner.model_config, logger))
    _wrap_kernel()
    _runners.append(what)
    sampler = runner.sampler
    states = runner.sampler.sampling_states
    add = sampler.add_request
    finish = runner.finish_requests
    apply = states.apply_temperature

    def added(req_idx: int, sampling_params: Any) -> None:
        id = slots.add(req_idx, sampling_params)
        if id is not None:
            what.deciding.resume([id])
        add(req_idx, sampling_params)

    def finished(scheduler_output: Any) -> None:
        finish(scheduler_output)
        slots.forget(scheduler_output.finished_req_ids)
        what.deciding.forget_finished()

    def tempered(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if what.hidden is not None:
            what.logits = logits.clone()  # `apply` works in place
        return apply(logits, *args, **kwargs)

    sampler.add_request = added
    runner.finish_requests = finished
    states.apply_temperature = tempered
    runner.sample = partial(what.sample, runner.sample)
    runner.sample_tokens = partial(what.sample_tokens, runner.sample_tokens)


def _wrap_kernel() -> None:
    """Wrap the function that vLLM's sampler calls by name, once in a process."""
    if hasattr(sampling.rejection_sample, "lenience"):
        return
    decide = sampling.rejection_sample
    named = inspect.signature(decide)

    @wraps(decide)
    def decided(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = named.bind(*args, **kwargs).arguments
        for runner in _runners:
            if runner.hidden is not None:
                runner.decide(given, runner.hidden)
        result: tuple[Tensor, Tensor] = decide(**given)
        return result

    decided.lenience = True  # type: ignore[attr-defined]
    sampling.rejection_sample = decided
