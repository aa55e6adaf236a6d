"""SGLang's requests as the deciding code reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lenience.core.errors import RunError
from lenience.serving.dial import KEY

GREEDY = 1
"""Value of top_k with which SGLang stores greedy requests."""
WHOLE = 1 << 30
"""Value of top_k with which SGLang stores requests without truncation."""


@dataclass(frozen=True)
class RequestParams:
    """Sampling parameters of a request, named as in vLLM."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int | None
    ignore_eos: bool
    all_stop_token_ids: frozenset[int]
    extra_args: Mapping[str, Any] | None


def params_of(sampling: Any, eos: Sequence[int] = ()) -> RequestParams:
    """Return the parameters of an SGLang SamplingParams. `eos` are the tokens that end answers."""
    greedy = sampling.top_k == GREEDY or sampling.temperature == 0
    return RequestParams(
        temperature=0.0 if greedy else sampling.temperature,
        top_k=0 if greedy or sampling.top_k >= WHOLE else max(sampling.top_k, 0),
        top_p=1.0 if greedy else sampling.top_p,
        min_p=0.0 if greedy else sampling.min_p,
        seed=sampling.sampling_seed,
        max_tokens=sampling.max_new_tokens,
        ignore_eos=bool(sampling.ignore_eos),
        all_stop_token_ids=frozenset(sampling.stop_token_ids or ()) | frozenset(eos),
        extra_args=sampling.custom_params,
    )


def dial_of(sampling: Any) -> object:
    """Return the dial in a request's custom_params; None without one."""
    custom = sampling.custom_params
    return custom.get(KEY) if isinstance(custom, Mapping) else None


@dataclass
class Requests:
    """The requests of a scheduler, with their tokens. SGLang's own list of a request's tokens lacks
    those of the step before, as its scheduler runs one step behind."""

    of: dict[str, Any] = field(default_factory=dict)
    """SGLang's Req by id."""
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Output tokens by id."""

    def __contains__(self, id: str) -> bool:
        return id in self.of

    def params(self, id: str) -> RequestParams:
        request = self.of[id]
        return params_of(request.sampling_params, tuple(request.eos_token_ids or ()))

    def prompt(self, id: str) -> list[int]:
        return list(self.of[id].origin_input_ids)

    def length(self, id: str) -> int:
        return len(self.outputs[id])

    def tokens(self, id: str, start: int) -> list[int]:
        return self.outputs[id][start:]

    def begin_step(
        self, requests: Sequence[Any], roots: Sequence[int], committed: Sequence[int]
    ) -> list[str]:
        """Take note of a step's requests, and return those whose tokens were sent again after a
        preemption. `roots` are the requests' last tokens, [requests], and `committed` the numbers
        of tokens before these. Raises RunError if a request's tokens are not known."""
        resumed = list[str]()
        batch = {request.rid for request in requests}
        for id in [id for id in self.of if id not in batch]:
            if self.of[id].finished():
                del self.of[id]
                del self.outputs[id]
        for request, root, before in zip(requests, roots, committed):
            id = request.rid
            if self.of.get(id) is not request:
                self.of[id] = request
                self.outputs[id] = []
            length = before + 1 - len(request.origin_input_ids)
            known = self.outputs[id]
            if len(known) == length and known[-1:] == [root]:
                continue
            sent = list(request.output_ids)[: length - 1]
            if len(sent) < length - 1:
                raise RunError(
                    f"request {id}: SGLang sent {len(sent)} of its {length} tokens"
                )
            if known:
                resumed.append(id)
            self.outputs[id] = [*sent, root]
        return resumed

    def end_step(self, requests: Sequence[Any], emitted: Sequence[list[int]]) -> None:
        """Add the tokens that a step has emitted for each request."""
        for request, tokens in zip(requests, emitted):
            self.outputs[request.rid] += tokens
