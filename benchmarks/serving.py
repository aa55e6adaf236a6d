"""Speed of `lenience serve` on the built-in pair, and its behaviour under load.

    python benchmarks/serving.py speed     # tokens/s at 1, 4 and 16 clients, into results/
    python benchmarks/serving.py load      # 200 clients for three minutes, into results/

`speed` starts a server for each decoder: the target alone, strict and lenient. It compares their
speed with `generate_batch` at the same batch size, in turns. The clients are in this process, on
the same cores. `load` sends right and wrong requests, leaves some of them, reads some slowly and
kills the decoding thread once; every whole answer is compared with the pair's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from recording import write_results

from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.tasks import WordMath, take

RESULTS = Path(__file__).parent / "results"
DECODERS: dict[str, dict[str, Any]] = {
    "target alone": {"rule": "exact", "window": 0},
    "strict": {"rule": "exact", "drafter": "medusa", "window": 4},
    "lenient": {"rule": "judge@0.993", "window": 16},
}
"""The settings of the published results on the built-in pair."""
CLIENTS = (1, 4, 16)
TURNS = 3
PROMPTS = {1: 16, 4: 48, 16: 96}
"""Number of prompts by the number of clients."""
TOKENS = 256
LOAD_CLIENTS = 200
LOAD_SECONDS = 180
KILLER = """
import ctypes, os, signal, threading
def kill(*_):
    for thread in threading.enumerate():
        if thread.name == "lenience worker":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
signal.signal(signal.SIGUSR1, kill)
from lenience.cli import main
main({argv!r})
"""
"""A server whose decoding thread dies on SIGUSR1."""


class Server:
    """A `lenience serve` process."""

    def __init__(self, options: dict[str, Any], *flags: str):
        argv = ["serve", "--port", "0", "--context", "512", *flags]
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", KILLER.format(argv=argv)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr
        line = next(line for line in self.process.stderr if "http://" in line)
        self.url = line.split()[0]

    @property
    def memory(self) -> int:
        """Return the process's resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

    def counts(self) -> dict[str, float]:
        """Return the counts of /metrics by name."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30).text
        found: dict[str, float] = {}
        for line in text.splitlines():
            name = line.partition("{")[0]
            if name.endswith(("_total", "_running", "_waiting", "_restarts")):
                found[name] = found.get(name, 0) + float(line.split()[-1])
        return found

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def server(options: dict[str, Any], *flags: str) -> Iterator[Server]:
    found = Server(options, *flags)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.stop()


def prompts(count: int) -> list[str]:
    return [str(sample.prompt) for sample in take(WordMath(), "test", count)]


async def send(
    client: httpx2.AsyncClient, prompt: str, streams: bool
) -> tuple[int, float]:
    """Return the number of tokens of an answer, and the seconds to the first one if it streams."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS}
    if not streams:
        told = (await client.post("/v1/completions", json=body)).json()
        return told["usage"]["completion_tokens"], 0.0
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    first = 0.0
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - began
            told = json.loads(line[6:])
            if told.get("usage"):
                tokens = told["usage"]["completion_tokens"]
    return tokens, first


async def ask(
    url: str, asked: list[str], clients: int, streams: bool
) -> tuple[float, float]:
    """Return the tokens per second of some clients, and the median time to the first token."""
    waiting = iter(asked)
    told: list[tuple[int, float]] = []
    async with httpx2.AsyncClient(base_url=url, timeout=300) as client:

        async def work() -> None:
            for prompt in waiting:
                told.append(await send(client, prompt, streams))

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        seconds = time.perf_counter() - began
    return sum(n for n, _ in told) / seconds, statistics.median(t for _, t in told)


def measure(url: str, asked: list[str], clients: int) -> dict[str, float]:
    """Return the tokens per second of whole answers and of streams with some clients, and of whole
    answers with twice as many, so that no row waits for a client; and the time to the first
    token."""
    whole, _ = asyncio.run(ask(url, asked, clients, streams=False))
    streamed, first = asyncio.run(ask(url, asked, clients, streams=True))
    full, _ = asyncio.run(ask(url, asked, 2 * clients, streams=False))
    return {
        "tokens_per_second": whole,
        "streamed": streamed,
        "first_token_ms": 1000 * first,
        "rows_full": full,
    }


def batch_speed(pair: Pair, asked: list[str], size: int, options: Any) -> float:
    """Return the tokens per second of `generate_batch`."""
    began = time.perf_counter()
    outs = pair.generate_batch(asked, batch_size=size, max_new_tokens=TOKENS, **options)
    seconds = time.perf_counter() - began
    return sum(len(out.tokens) for out in outs) / seconds


def speed() -> None:
    pair = load_pair(compile=True)
    rows = [row for clients in CLIENTS for row in speeds(pair, clients)]
    write_results(
        RESULTS / "serving.json",
        {"decoders": DECODERS, "tokens": TOKENS, "turns": TURNS, "rows": rows},
    )


def speeds(pair: Pair, clients: int) -> list[dict[str, Any]]:
    """Return the speeds of the decoders with some clients and as many rows, medians of turns."""
    asked = prompts(PROMPTS[clients])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in DECODERS}
    with contextlib.ExitStack() as stack:
        flags = "--max-rows", str(clients)
        urls = {
            name: stack.enter_context(server(options, *flags)).url
            for name, options in DECODERS.items()
        }
        for turn in range(TURNS + 1):
            for name, options in DECODERS.items():
                row = measure(urls[name], asked, clients)
                batch = batch_speed(pair, asked, clients, options)
                row |= {
                    "generate_batch": batch,
                    "overhead": batch / row["rows_full"] - 1,
                }
                if turn:  # the first turn warms up
                    found[name].append(row)
    rows = []
    for name, turns in found.items():
        medians = {
            key: statistics.median(row[key] for row in turns) for key in turns[0]
        }
        rows.append({"decoder": name, "clients": clients, **medians})
        print(rows[-1], flush=True)
    return rows


class Load:
    """Clients of all kinds, and what they saw."""

    def __init__(self, url: str, right: dict[str, list[int]], seconds: float):
        self.url = url
        self.right = right
        self.until = time.monotonic() + seconds
        self.seen = Counter[str]()
        self.health: list[float] = []

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        limits = httpx2.Limits(max_connections=1)
        async with httpx2.AsyncClient(
            base_url=self.url, timeout=120, limits=limits
        ) as client:
            kinds = {
                self.whole: 10,
                self.stream: 5,
                self.leave: 5,
                self.slow: 1,
                self.bad: 3,
            }
            while time.monotonic() < self.until:
                kind = rng.choices(list(kinds), list(kinds.values()))[0]
                try:
                    await kind(client, rng)
                except (httpx2.HTTPError, json.JSONDecodeError) as error:
                    self.seen[f"transport: {type(error).__name__}"] += 1
                await asyncio.sleep(rng.random())

    def body(self, rng: random.Random) -> dict[str, Any]:
        prompt = rng.choice(list(self.right))
        return {
            "prompt": prompt,
            "max_tokens": 48,
            "lenience": "exact",
            "return_token_ids": True,
        }

    def check(self, status: int, tokens: list[int], body: dict[str, Any]) -> None:
        if status != 200:
            self.seen[f"status {status}"] += 1
        else:
            is_right = tokens == self.right[body["prompt"]]
            self.seen["right" if is_right else "WRONG"] += 1

    async def whole(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        body = self.body(rng)
        answer = await client.post("/v1/completions", json=body)
        told = answer.json()
        tokens = told["choices"][0]["token_ids"] if answer.is_success else []
        self.check(answer.status_code, tokens, body)

    async def stream(
        self, client: httpx2.AsyncClient, rng: random.Random, pause: float = 0.0
    ) -> None:
        body = self.body(rng)
        tokens: list[int] = []
        failed = False
        async with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line[6:])
                    failed = failed or "error" in told
                    for choice in told.get("choices", []):
                        tokens += choice.get("token_ids", [])
                await asyncio.sleep(pause)
            status = 500 if failed else answer.status_code
        self.check(status, tokens, body)

    async def slow(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        await self.stream(client, rng, pause=0.2)

    async def leave(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        """Leave before or in the middle of an answer."""
        body = self.body(rng)
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(rng.random()):
                await client.post("/v1/completions", json=body)
        self.seen["left"] += 1

    async def bad(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        headers = {"Content-Type": "application/json"}
        content, wanted = rng.choice(
            [
                (b"{", 400),
                (b"[" * 20000, 400),
                (b'{"prompt": 3}', 400),
                (b'{"prompt": "x", "tools": [1]}', 400),
                (b'{"prompt": "' + b"w" * (5 << 20) + b'"}', 413),
            ]
        )
        answer = await client.post("/v1/completions", content=content, headers=headers)
        expected = answer.status_code == wanted and "error" in answer.json()
        self.seen["refused as it should be" if expected else "WRONG refusal"] += 1

    async def watch(self) -> None:
        """Measure /health twenty times a second."""
        async with httpx2.AsyncClient(base_url=self.url, timeout=60) as client:
            while time.monotonic() < self.until:
                began = time.perf_counter()
                answer = await client.get("/health")
                self.health.append(time.perf_counter() - began)
                if answer.status_code != 200:
                    self.seen[f"health {answer.status_code}"] += 1
                await asyncio.sleep(0.05)


def _watch(url: str, seconds: float, queue: Any) -> None:
    """Measure /health in a process of its own, which the load's clients do not delay."""
    load = Load(url, {}, seconds)
    asyncio.run(load.watch())
    queue.put((load.health, dict(load.seen)))


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum in milliseconds."""
    ordered = [1000 * each for each in sorted(seconds)]
    return {
        "n": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(0.99 * len(ordered))],
        "worst": ordered[-1],
    }


def drained(served: Server) -> tuple[dict[str, float], list[float]]:
    """Return the counts when no request is left, or after ten seconds, and the numbers of running
    and waiting requests."""
    for _ in range(100):
        counts = served.counts()
        left = [counts[f"vllm:num_requests_{kind}"] for kind in ("running", "waiting")]
        if left == [0, 0]:
            break
        time.sleep(0.1)
    return counts, left


def load(seconds: float) -> None:
    import multiprocessing

    pair = load_pair(compile=False)
    asked = prompts(60)
    outs = pair.generate_batch(asked, rule="target", max_new_tokens=48)
    right = {prompt: out.tokens for prompt, out in zip(asked, outs)}
    del pair
    with server({"rule": "judge@0.993", "window": 8}, "--max-queue", "400") as served:
        memory = []
        ours = Load(served.url, right, seconds)
        queue: Any = multiprocessing.Queue()
        watcher = multiprocessing.Process(
            target=_watch, args=(served.url, seconds, queue)
        )
        watcher.start()

        async def kill_once() -> None:
            await asyncio.sleep(seconds / 2)
            memory.append(served.memory)
            os.kill(served.process.pid, signal.SIGUSR1)

        async def run() -> None:
            clients = [ours.client(number) for number in range(LOAD_CLIENTS)]
            await asyncio.gather(kill_once(), *clients)

        asyncio.run(run())
        health, health_seen = queue.get()
        watcher.join()
        counts, left = drained(served)
        memory.append(served.memory)
        status = served.stop()
    results = {
        "clients": LOAD_CLIENTS,
        "seconds": seconds,
        "seen": dict(ours.seen) | health_seen,
        "left_in_rows_and_queue": left,
        "health_ms": percentiles(health),
        "memory_mib_half_way_and_at_the_end": [m >> 20 for m in memory],
        "exit_status": status,
        "counts": counts,
    }
    print(json.dumps(results, indent=1))
    write_results(RESULTS / "serving-load.json", results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "load"])
    parser.add_argument("--seconds", type=float, default=LOAD_SECONDS)
    given = parser.parse_args()
    if given.what == "speed":
        speed()
    else:
        load(given.seconds)


if __name__ == "__main__":
    main()
