"""The client of servers: requests per second against a stub, and false certificates of simulated
servers whose loss is just above the limit.

    python benchmarks/endpoints.py [--requests 5000] [--runs 2000]

Writes benchmarks/results/endpoints.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recording import write_results

from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.integrations.endpoints import Endpoint, ServedOptions, ServedPair
from lenience.integrations.endpoints.client import Client
from lenience.integrations.endpoints.store import Call, Reply
from lenience.tasks import Sample, Task

RESULTS = Path(__file__).parent / "results" / "endpoints.json"
IN_FLIGHT = (1, 8, 32, 128)
MAX_DROP = 0.1
CONFIDENCE = 0.95
REPLY = json.dumps(
    {
        "model": "stub",
        "choices": [{"message": {"content": "4"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 1},
    }
).encode()


async def _serve(port: Any) -> None:
    """Answer every request with the same reply."""

    async def handle(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while line := await reader.readline():
            length = 0
            while (header := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if length:
                await reader.readexactly(length)
            if not line.startswith(b"POST"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(REPLY)}\r\n\r\n"
                writer.write(head.encode() + REPLY)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _stub(port: Any) -> None:
    asyncio.run(_serve(port))


def throughput(requests: int) -> dict[str, float]:
    """Return requests per second by the number in flight, against a stub in another process."""
    port: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=_stub, args=(port,), daemon=True)
    process.start()
    endpoint = Endpoint.parse(f"http://127.0.0.1:{port.get()}/v1", "stub", "stub")
    body = {"model": "stub", "messages": [{"role": "user", "content": "2 + 2?"}]}
    found = {}
    for in_flight in IN_FLIGHT:
        calls = [Call(endpoint, body)] * requests
        client = Client(in_flight)
        began = time.perf_counter()
        answered = sum(1 for _ in client.run(calls))
        assert answered == requests
        found[str(in_flight)] = round(requests / (time.perf_counter() - began), 1)
        print(f"{in_flight} in flight: {found[str(in_flight)]} requests/s", flush=True)
    process.kill()
    return found


class Simulated(Client):
    """Servers without a network: the reference is always right, the candidate wrong with a known
    probability."""

    def __init__(self, loss: float, seed: int):
        super().__init__()
        self.loss = loss
        self.rng = random.Random(seed)

    def ask(self, endpoint: Endpoint, path: str) -> Any:
        return {"data": [{"id": "simulated"}]} if path.endswith("models") else None

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Reply]]:
        for number, call in enumerate(calls):
            is_candidate = call.endpoint.name != "reference"
            text = (
                "wrong" if is_candidate and self.rng.random() < self.loss else "right"
            )
            yield number, Reply(text, "stop", "simulated", 1, 1)


class RightOrWrong(Task):
    """Prompts whose reference is "right"."""

    name = "right or wrong"
    max_new_tokens = 4

    def samples(self, split: str) -> Iterator[Sample]:
        for number in range(600):
            yield Sample(f"{split}-{number}", f"prompt {number}", "right")

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text


def certified(loss: float, seed: int) -> bool:
    """Return whether a candidate of a known loss is certified."""
    pair: Any = ServedPair(
        Endpoint.parse("http://reference/v1", "", "reference"),
        [Endpoint.parse("http://candidate/v1", "", "candidate")],
        ServedOptions(),
        client=Simulated(loss, seed),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LENIENCE_HOME"] = f"{folder}/home"
        config = CertifyConfig(
            settings=(("served:candidate; window=0",),),
            max_drop=MAX_DROP,
            confidence=CONFIDENCE,
        )
        made = certify(pair, RightOrWrong(), Path(folder) / "run", config)
        return made.certified is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=2000)
    args = parser.parse_args()
    speeds = throughput(args.requests) if args.requests else {}
    false = 0
    for seed in range(args.runs):
        false += certified(MAX_DROP + 1e-9, seed)
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1} runs: {false} false certificates", flush=True)
    lossless = sum(certified(0.0, seed) for seed in range(20)) if args.runs else 0
    results = {
        "requests_per_second": speeds,
        "requests": args.requests,
        "max_drop": MAX_DROP,
        "confidence": CONFIDENCE,
        "runs": args.runs,
        "false_certificates": false,
        "lossless_certified_of_20": lossless,
    }
    write_results(RESULTS, results)


if __name__ == "__main__":
    main()
