"""Counts of accepted tokens per request and in all, from workers to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lenience.integrations.vllm.served_rule import KEY


@dataclass
class Counts:
    """Of one request."""

    passes: int = 0
    """Passes of the target over a drafted window."""
    kept_strictly: int = 0
    """Drafted tokens that the strict rule keeps at their own place."""
    kept_leniently: int = 0
    unjudged: int = 0
    """Windows that were decided strictly because the rule could not be asked."""
    non_finite: int = 0
    """Windows in which the target's logits are NaN or infinite; no token is kept from there on."""


def put(
    output: Any, counts: Mapping[str, Counts], steps: Mapping[str, dict[str, Any]]
) -> None:
    """Send the counts of requests, and perhaps the decisions of this step, along with a runner's
    output."""
    told: dict[str, dict[str, Any]] = {
        id: asdict(count) for id, count in counts.items()
    }
    for id, step in steps.items():
        told[id]["step"] = step
    setattr(output, KEY, told)


def attach(result: Any, _scheduler: Any, _scheduled: Any, output: Any) -> None:
    """Attach the counts to each request's outputs, in vLLM's field for data of extensions."""
    counts = getattr(output, KEY, None)
    if not counts:
        return
    for outputs in result.values():
        for completion in outputs.outputs:
            if completion.request_id in counts:
                others = completion.kv_transfer_params or {}
                completion.kv_transfer_params = {
                    **others,
                    KEY: counts[completion.request_id],
                }


def observe(processor: Any, outputs: Any, *_args: Any, **_kwargs: Any) -> None:
    """Add new counts of requests to Prometheus's."""
    seen: dict[str, dict[str, Any]] = processor.__dict__.setdefault(KEY, {})
    for output in outputs:
        counts = (output.kv_transfer_params or {}).get(KEY)
        if counts:
            before = seen.get(output.request_id, {})
            for name in COUNTED:
                _counter(name).inc(counts[name] - before.get(name, 0))
            seen[output.request_id] = counts
        if output.finish_reason is not None:
            seen.pop(output.request_id, None)
    for id in [id for id in seen if id not in processor.request_states]:
        del seen[id]  # ended by a stop string, or aborted


COUNTED = {
    "passes": "Passes of the target over drafted windows",
    "kept_strictly": "Drafted tokens that the strict rule keeps",
    "kept_leniently": "Drafted tokens that are kept by lenience alone",
    "unjudged": "Windows decided strictly because the rule could not be asked",
    "non_finite": "Windows in which the target's logits are NaN or infinite",
}
_COUNTERS: dict[str, Any] = {}


def _counter(name: str) -> Any:
    """Return Prometheus's counter for one of the counts; vLLM's /metrics shows all that are
    registered."""
    import prometheus_client

    if name not in _COUNTERS:
        _COUNTERS[name] = prometheus_client.Counter(f"{KEY}:{name}", COUNTED[name])
    return _COUNTERS[name]
