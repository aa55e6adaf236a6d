"""Speed of endpoints: tokens/s, time to the first token and between tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lenience.core.progress import Progress, silent
from lenience.decoding.decoder import Decoder
from lenience.integrations.endpoints.endpoint import Endpoint
from lenience.integrations.endpoints.pair import ServedPair
from lenience.integrations.endpoints.store import Call, Reply
from lenience.models.prompts import Prompt

BOOTSTRAPS = 2000
"""Number of bootstrap draws for an interval."""
Interval = tuple[float, float, float]
"""A figure with its 95 % interval."""


@dataclass(frozen=True)
class EndpointSpeed:
    """The speed of an endpoint at a given concurrency, each figure with its 95 % interval."""

    name: str
    in_flight: int
    tokens_per_second: Interval
    """Tokens per second of all requests, over rounds."""
    first_token: Interval
    """Median seconds to the first token, over requests."""
    between_tokens: Interval
    """Median seconds between tokens, over requests."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Round:
    """The answers of an endpoint to all prompts, with the time they took."""

    seconds: float
    replies: list[Reply]


def measure_speeds(
    pair: ServedPair,
    prompts: Sequence[Prompt],
    decoder: Decoder,
    *,
    rounds: int = 3,
    progress: Progress = silent,
) -> list[EndpointSpeed]:
    """Return the speed of each endpoint. All endpoints take turns in `rounds` rounds, each time in
    another order. A round sends every prompt again as a stream, with as many in flight as the pair
    allows. A first round, which fills the servers' prompt caches, is not counted."""
    taken: dict[Endpoint, list[_Round]] = {endpoint: [] for endpoint in pair.endpoints}
    for endpoint in pair.endpoints:
        _round(pair, endpoint, prompts, decoder)
    total = rounds * len(taken)
    for turn in range(rounds):
        shift = turn % len(taken)
        order = [*pair.endpoints[shift:], *pair.endpoints[:shift]]
        for done, endpoint in enumerate(order):
            progress("timing", turn * len(taken) + done, total)
            taken[endpoint].append(_round(pair, endpoint, prompts, decoder))
    progress("timing", total, total)
    return [_speed(pair, endpoint, some) for endpoint, some in taken.items()]


def _round(
    pair: ServedPair, endpoint: Endpoint, prompts: Sequence[Prompt], decoder: Decoder
) -> _Round:
    calls = []
    for number, prompt in enumerate(prompts):
        body = pair.body(endpoint, prompt, decoder, number)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        calls.append(Call(endpoint, {**body, **streamed}))
    began = time.perf_counter()
    replies = [reply for _, reply in pair.client.run(calls)]
    return _Round(time.perf_counter() - began, replies)


def _speed(pair: ServedPair, endpoint: Endpoint, rounds: list[_Round]) -> EndpointSpeed:
    speeds = []
    for taken in rounds:
        speeds.append(
            sum(reply.completion_tokens for reply in taken.replies) / taken.seconds
        )
    replies = [reply for taken in rounds for reply in taken.replies]
    timed = [reply for reply in replies if reply.first_token is not None]
    firsts = [reply.first_token or 0.0 for reply in timed]
    between = []
    for reply in timed:
        if reply.completion_tokens > 1:
            between.append(
                (reply.seconds - (reply.first_token or 0.0))
                / (reply.completion_tokens - 1)
            )
    return EndpointSpeed(
        endpoint.name,
        pair.options.in_flight,
        _with_interval(speeds),
        _with_interval(firsts),
        _with_interval(between),
    )


def _with_interval(values: Sequence[float]) -> Interval:
    """Return the median of values with its 95 % bootstrap interval."""
    if not values:
        return (0.0, 0.0, 0.0)
    rng = np.random.default_rng(0)
    drawn = rng.choice(values, (BOOTSTRAPS, len(values)))
    low, high = np.quantile(np.median(drawn, 1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)
