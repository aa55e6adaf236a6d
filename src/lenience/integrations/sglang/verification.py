"""Rules in SGLang's verification of drafted chains.

SGLang verifies a batch in `eagle_sample`: it applies penalties and masks to the target's logits,
and calls one of two kernels. Before a kernel decides, copies of its inputs are changed so that it
arrives at the rules' verdicts. The logits stay as they are, and so do log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.integrations.engine_rules.counts import Counts
from lenience.integrations.engine_rules.rule import ServedRule
from lenience.integrations.engine_rules.windows import (
    KernelEdits,
    WindowDecider,
    Windows,
)
from lenience.integrations.sglang.requests import Requests

logger = logging.getLogger("sglang.lenience")
END = -1
"""Value of a link in SGLang's trees that leads nowhere."""
PADDING = 0
"""Token with which SGLang fills up the windows of n-grams."""


@dataclass
class _BatchStep:
    """A step in which one batch is verified."""

    batch: Any
    verify_input: Any
    logits_output: Any

    @property
    def width(self) -> int:
        """Return the number of nodes of each request: its last token and the drafted tokens."""
        return int(self.verify_input.draft_token_num)


@dataclass(frozen=True)
class _DraftedChains:
    """The drafted chains of a batch, concatenated: N drafted tokens in all."""

    windows: Windows
    rows: Tensor
    """[N]: node before each drafted token, whose logits decide on it."""
    nodes: Tensor
    """[N]: node of each drafted token."""


class Verification:
    """The verification of one scheduler's batches, in which rules decide."""

    def __init__(self, server: ServedRule, tokenizer: str, args: Any):
        self.requests = Requests()
        config = SimpleNamespace(
            model=args.model_path,
            tokenizer=tokenizer,
            tokenizer_revision=None,
            trust_remote_code=args.trust_remote_code,
        )
        self.deciding = WindowDecider(self.requests, server, config, logger)
        self.pads = args.speculative_algorithm == "NGRAM"
        """True if windows end with padding."""
        self._step: _BatchStep | None = None
        self._finished = Counts()

    def totals(self) -> dict[str, int]:
        """Return the counts of all requests so far."""
        found = asdict(self._finished)
        for counts in self.deciding.counts.values():
            found = {name: found[name] + n for name, n in asdict(counts).items()}
        return found

    def sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Verify a batch: call `eagle_sample`, whose kernels call `greedy` or `sampled`."""
        verify_input, batch, logits_output = args[:3]
        if batch.forward_mode.is_idle():
            return original(*args, **kwargs)
        self._step = _BatchStep(batch, verify_input, logits_output)
        self._begin(self._step)
        try:
            result = original(*args, **kwargs)
        finally:
            self._step = None
        predict, lengths, index = result[:3]
        places = zip(index.tolist(), lengths.tolist())
        tokens = predict.tolist()
        emitted = [[tokens[node] for node in path[:n]] for path, n in places]
        self.requests.end_step(batch.reqs, emitted)
        return result

    def greedy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the kernel for greedy batches with the rules' tokens as the target's."""
        if self._step is None:
            return original(*args, **kwargs)
        chains, edits = self._decide(self._step, kwargs["candidates"], greedy=True)
        target = kwargs["target_predict"].clone()
        if edits.tokens:
            rows, tokens = _forced(chains, edits)
            target.view(-1)[rows] = tokens.to(target.dtype)
        candidates = _redrawn(kwargs["candidates"], chains, edits)
        # scores may differ between ranks in the last digits, and all ranks must accept the same
        for shared in (target, candidates):
            _broadcast(shared)
        return original(
            *args, **{**kwargs, "target_predict": target, "candidates": candidates}
        )

    def sampled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the kernel for sampled batches with probability 1 for the rules' tokens."""
        if self._step is None:
            return original(*args, **kwargs)
        chains, edits = self._decide(self._step, kwargs["candidates"], greedy=False)
        if not edits.tokens:
            return original(*args, **kwargs)
        rows, tokens = _forced(chains, edits)
        probs = kwargs["target_probs"].clone()
        flat = probs.view(-1, probs.shape[-1])
        flat[rows] = 0
        flat[rows, tokens] = 1
        candidates = _redrawn(kwargs["candidates"], chains, edits)
        return original(
            *args, **{**kwargs, "target_probs": probs, "candidates": candidates}
        )

    def _begin(self, step: _BatchStep) -> None:
        """Bring the requests' tokens up to date."""
        tokens = step.verify_input.draft_token.view(-1, step.width)
        changes = self.requests.begin_step(
            step.batch.reqs, tokens[:, 0].tolist(), step.batch.seq_lens.tolist()
        )
        for counts in self.deciding.forget(changes.gone):
            for name, n in asdict(counts).items():
                setattr(self._finished, name, getattr(self._finished, name) + n)
        self.deciding.resume(changes.resumed)

    def _decide(
        self, step: _BatchStep, candidates: Tensor, greedy: bool
    ) -> tuple[_DraftedChains, KernelEdits]:
        chains = self._chains(step, candidates)
        return chains, self.deciding.orders(chains.windows, greedy)

    def _may_decide(self, request: Any) -> bool:
        """Return False for a request that has ended. Abort a request with an impossible dial, which
        came in unchecked, and return False."""
        if request.finished() or request.rid in self.requests.ended:
            return False
        try:
            self.deciding.check(request.rid)
        except InputError as error:
            from sglang.srt.managers.schedule_batch import FINISH_ABORT

            status = HTTPStatus.BAD_REQUEST
            request.to_finish = FINISH_ABORT(str(error), status, "BadRequestError")
            return False
        return True

    def _chains(self, step: _BatchStep, candidates: Tensor) -> _DraftedChains:
        """Return the chains of a batch. A request that has ended, or whose window is padding, has
        an empty one."""
        width = step.width
        links = step.verify_input.retrieve_next_token.tolist()
        tokens = candidates.tolist()
        ids = list[str]()
        lengths = list[int]()
        rows = list[int]()
        nodes = list[int]()
        with_bonus = list[int]()
        for b, request in enumerate(step.batch.reqs):
            path = _path(links[b])
            is_padding = self.pads and path and tokens[b][path[0]] == PADDING
            if is_padding or not self._may_decide(request):
                path = []
            before = [
                0,
                *path,
            ]  # the logits that decide on a node are those of its parent
            ids.append(request.rid)
            lengths.append(len(path))
            nodes += [b * width + node for node in path]
            rows += [b * width + node for node in before[: len(path)]]
            with_bonus += [b * width + node for node in before]
        device = candidates.device
        at = torch.tensor(rows, dtype=torch.long, device=device)
        drafted = torch.tensor(nodes, dtype=torch.long, device=device)
        hidden = step.logits_output.hidden_states
        if hidden is not None:
            hidden = hidden[torch.tensor(with_bonus, device=device)]
        windows = Windows(
            ids=ids,
            tokens=candidates.reshape(-1)[drafted],
            lengths=lengths,
            logits=step.logits_output.next_token_logits[at],
            hidden=hidden,
            probs=None,
        )
        return _DraftedChains(windows, at, drafted)


def _path(links: list[int]) -> list[int]:
    """Return the nodes of a request's chain after its root; `links` [nodes] are the first
    children."""
    path = list[int]()
    node = links[0]
    while node != END:
        path.append(node)
        node = links[node]
    return path


def _forced(chains: _DraftedChains, edits: KernelEdits) -> tuple[Tensor, Tensor]:
    """Return the nodes after which tokens are forced, and these tokens."""
    device = chains.rows.device
    places = torch.tensor(list(edits.tokens), device=device)
    tokens = torch.tensor(list(edits.tokens.values()), device=device)
    return chains.rows[places], tokens


def _redrawn(candidates: Tensor, chains: _DraftedChains, edits: KernelEdits) -> Tensor:
    """Return the candidates with other tokens in place of those that are rejected but drawn again:
    the kernel would accept them."""
    drafted = chains.windows.tokens
    again = [row for row in edits.ends if drafted[row] == edits.tokens[row]]
    candidates = candidates.clone()
    if again:
        nodes = chains.nodes[torch.tensor(again, device=chains.nodes.device)]
        vocabulary = chains.windows.logits.shape[1]
        flat = candidates.view(-1)
        flat[nodes] = (flat[nodes] + 1) % vocabulary
    return candidates


def _broadcast(tensor: Tensor) -> None:
    """Send the first tensor-parallel rank's values to the others."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        group.broadcast(tensor, src=0)
