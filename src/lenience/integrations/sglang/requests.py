"""SGLang's requests as `engine_rules` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

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
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    all_stop_token_ids: frozenset[int] = frozenset()
    extra_args: Mapping[str, Any] | None = None


def params_of(sampling: Any, eos: Iterable[int] = ()) -> RequestParams:
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
class Changes:
    """The changes of a scheduler's requests since the step before, by id."""

    gone: list[str] = field(default_factory=list)
    """Requests that have ended, or whose id another request has now."""
    resumed: list[str] = field(default_factory=list)
    """Requests whose tokens were sent again after a preemption."""


@dataclass
class Requests:
    """The requests of a scheduler, with their tokens. SGLang's own list of a request's tokens lacks
    those of the step before, as its scheduler runs one step behind."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Output tokens by id."""
    ended: set[str] = field(default_factory=set)
    """Requests with an end token, or with as many tokens as they asked for. SGLang drafts for these
    once more, and drops the result."""
    _of: dict[str, ReferenceType[Any]] = field(default_factory=dict)
    """SGLang's Req by id. The references are weak, as nothing says when a waiting request is
    aborted."""
    _params: dict[str, RequestParams] = field(default_factory=dict)

    def __contains__(self, id: str) -> bool:
        return id in self.outputs

    def params(self, id: str) -> RequestParams:
        return self._params[id]

    def prompt(self, id: str) -> list[int]:
        request = self._of[id]()
        return [] if request is None else list(request.origin_input_ids)

    def length(self, id: str) -> int:
        return len(self.outputs[id])

    def tokens(self, id: str, start: int) -> list[int]:
        return self.outputs[id][start:]

    def begin_step(
        self, requests: Sequence[Any], roots: Sequence[int], committed: Sequence[int]
    ) -> Changes:
        """Take note of a step's requests. `roots` are the requests' last tokens, [requests], and
        `committed` the numbers of tokens before these. Raises RunError if a request's tokens are
        not known."""
        changes = Changes(self._forget({request.rid: request for request in requests}))
        for request, root, before in zip(requests, roots, committed):
            id = request.rid
            if id not in self:
                self._add(request)
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
                changes.resumed.append(id)
            self.outputs[id] = [*sent, root]
            self._note_end(id, self.outputs[id])
        return changes

    def end_step(self, requests: Sequence[Any], emitted: Sequence[list[int]]) -> None:
        """Add the tokens that a step has emitted for each request."""
        for request, tokens in zip(requests, emitted):
            self.outputs[request.rid] += tokens
            self._note_end(request.rid, tokens)

    def _add(self, request: Any) -> None:
        id = request.rid
        self._of[id] = ref(request)
        self.outputs[id] = []
        self._params[id] = params_of(request.sampling_params, _ends(request))

    def _forget(self, batch: Mapping[str, Any]) -> list[str]:
        """Drop requests that have ended, and those whose id another request has now. Return their
        ids."""
        gone = []
        for id, known in self._of.items():
            request = known()
            is_other = id in batch and batch[id] is not request
            has_ended = request is None or (id not in batch and request.finished())
            if is_other or has_ended:
                gone.append(id)
        for id in gone:
            del self._of[id], self.outputs[id], self._params[id]
            self.ended.discard(id)
        return gone

    def _note_end(self, id: str, tokens: Sequence[int]) -> None:
        """Note whether a request has ended with its last `tokens`."""
        params = self._params[id]
        ends = frozenset() if params.ignore_eos else params.all_stop_token_ids
        is_full = len(self.outputs[id]) >= (params.max_tokens or 2**31)
        if is_full or not ends.isdisjoint(tokens):
            self.ended.add(id)


def _ends(request: Any) -> Iterator[int]:
    """Yield the tokens that end a request's answer besides those that it names."""
    yield from request.eos_token_ids or ()
    tokenizer = request.tokenizer
    if tokenizer is not None:
        if tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id
        yield from getattr(tokenizer, "additional_stop_token_ids", None) or ()
