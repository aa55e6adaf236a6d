"""Counts of a server: per request in the form of vLLM, and in total for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from lenience.core.types import Step

DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Bounds of the histograms of times."""


@dataclass
class RequestCounts:
    """Counts of one request's windows."""

    window: int
    passes: int = 0
    drafted: int = 0
    strictly: int = 0
    """Number of accepted tokens that the strict rule accepts too."""
    leniently: int = 0
    histogram: list[int] = field(default_factory=list)
    """Number of windows by their number of accepted tokens."""

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.window + 1)

    def add(self, step: Step) -> None:
        self.passes += step.target_passes
        self.drafted += step.drafted
        self.strictly += step.accepted_exact
        self.leniently += step.accepted_lenient
        if step.drafted:
            missing = step.kept + 1 - len(self.histogram)
            self.histogram += [0] * max(0, missing)
            self.histogram[step.kept] += 1

    def to_json(self, rule: str) -> dict[str, Any]:
        """Return the counts: vLLM's own fields, and those of leniency."""
        windows = sum(self.histogram)
        accepted = self.strictly + self.leniently
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / windows if windows else 1.0,
                "draft_acceptance_rate": accepted / self.drafted
                if self.drafted
                else 0.0,
                "acceptance_histogram": self.histogram,
                "num_spec_steps": windows,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": self.drafted,
                "num_spec_tokens": self.window,
            },
            "lenience": {
                "rule": rule,
                "passes": self.passes,
                "drafted": self.drafted,
                "accepted_strictly": self.strictly,
                "accepted_leniently": self.leniently,
            },
        }


class Metrics:
    """The totals of a server, with vLLM's names where vLLM has one."""

    def __init__(self, model: str, window: int):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Drafted windows")
        self.drafted = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens"
        )
        self.accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens"
        )
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in the window",
            ["model_name", "position"],
            registry=self.registry,
        )
        self.positions = [
            by_position.labels(position=str(i), **self._labels) for i in range(window)
        ]
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self.reused = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were in a cache"
        )
        self.new_tokens = self._counter("vllm:generation_tokens", "New tokens")
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token"
        )
        self.whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of a whole request"
        )
        self.running = self._gauge("vllm:num_requests_running", "Running requests")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Waiting requests")
        self.passes = self._counter("lenience:passes", "Target passes")
        self.strictly = self._counter(
            "lenience:kept_strictly", "Drafted tokens that the strict rule keeps"
        )
        self.leniently = self._counter(
            "lenience:kept_leniently", "Drafted tokens kept by leniency alone"
        )
        self.refused = self._counter(
            "lenience:requests_refused", "Requests that found the queue full"
        )
        self.cancelled = self._counter(
            "lenience:requests_cancelled", "Requests whose client left"
        )
        self.failed = self._counter("lenience:requests_failed", "Failed requests")
        self.restarts = self._gauge(
            "lenience:worker_restarts", "Times that the decoding thread was replaced"
        )
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def add(self, step: Step) -> None:
        """Count a step of a request."""
        if step.drafted:
            self.drafts.inc()
            self.drafted.inc(step.drafted)
            self.accepted.inc(step.kept)
            for counter in self.positions[: step.kept]:
                counter.inc()
        self.new_tokens.inc(len(step.trace))
        self.passes.inc(step.target_passes)
        self.strictly.inc(max(0, step.kept - max(0, step.accepted_lenient)))
        self.leniently.inc(max(0, step.accepted_lenient))

    def finish(self, reason: str) -> None:
        self._finished.labels(finished_reason=reason, **self._labels).inc()

    def text(self) -> bytes:
        """Return all counts in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str) -> Counter:
        made = Counter(name, what, ["model_name"], registry=self.registry)
        return made.labels(**self._labels)

    def _gauge(self, name: str, what: str) -> Gauge:
        made = Gauge(name, what, ["model_name"], registry=self.registry)
        return made.labels(**self._labels)

    def _histogram(self, name: str, what: str) -> Histogram:
        made = Histogram(
            name, what, ["model_name"], registry=self.registry, buckets=DURATION_BOUNDS
        )
        return made.labels(**self._labels)
