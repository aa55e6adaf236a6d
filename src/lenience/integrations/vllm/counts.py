"""Counts of accepted tokens per request and in total, sent from workers to Prometheus."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lenience.integrations.engine_rules.counts import Counts
from lenience.integrations.engine_rules.windows import WindowDecider
from lenience.serving.dial import KEY


def put(output: Any, deciding: WindowDecider) -> None:
    """Send the counts of requests, and any decisions of this step, along with a runner's output."""
    counts = dict[str, dict[str, Any]]()
    for id, count in deciding.counts.items():
        counts[id] = asdict(count)
    for id, step in deciding.take_steps().items():
        counts.setdefault(id, asdict(Counts()))["step"] = step
    if counts:
        setattr(output, KEY, counts)


def attach(result: Any, _scheduler: Any, _scheduled: Any, output: Any) -> None:
    """Attach the counts to each request's outputs, in vLLM's field for extension data."""
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
    """Add the new counts of requests to the Prometheus counters."""
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
    "unjudged": "Windows decided strictly because the rule could not be queried",
    "non_finite": "Windows in which the target's logits are NaN or infinite",
}
_COUNTERS: dict[str, Any] = {}


def _counter(name: str) -> Any:
    """Return the Prometheus counter of a count. vLLM's /metrics shows all registered counters."""
    import prometheus_client

    if name not in _COUNTERS:
        _COUNTERS[name] = prometheus_client.Counter(f"{KEY}:{name}", COUNTED[name])
    return _COUNTERS[name]
