"""Requests to endpoints: concurrent, retried, and stored so that no answer is requested twice."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx2

from lenience.core.errors import InputError, RunError, first_line
from lenience.integrations.endpoints.endpoint import APIS, Endpoint
from lenience.integrations.endpoints.flow import Flow
from lenience.integrations.endpoints.store import AnswerStore, Call, Reply, Usage

ATTEMPTS = 8
"""Maximum number of attempts of a request that a server answers with an error."""
DESCRIPTION_ATTEMPTS = 3
"""Maximum number of attempts to read a server's description of itself."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Longest wait between attempts, in seconds. Waits begin with FIRST_WAIT and double."""
OUTAGE = 300.0
"""Seconds for which a server may be unreachable or overloaded before a run ends."""
TIMEOUT = 600.0
"""Time limit of one answer, in seconds."""
CONNECT = 10.0
"""Time limit of a connection, in seconds."""
BUSY = (408, 429, 500, 502, 503, 504)
"""Status codes after which a request is sent again."""
SPENT = "insufficient_quota"
"""Error code with status 429 that is permanent."""


class Client:
    """A client that sends requests to endpoints. API keys go into headers only."""

    def __init__(
        self,
        in_flight: int = 32,
        store: Path | None = None,
        *,
        outage: float = OUTAGE,
        first_wait: float = FIRST_WAIT,
    ):
        self.in_flight = in_flight
        self.store = AnswerStore(store)
        self.usage = Usage()
        self.retries = 0
        self._outage = outage
        self._first_wait = first_wait
        self._models: dict[Endpoint, str] = {}
        self._tls = httpx2.create_ssl_context()  # takes 40 ms
        self._asking = httpx2.Client(timeout=CONNECT, verify=self._tls)

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Reply]]:
        """Yield each reply with its call's index, as soon as it arrives; stored replies come first.
        Raises InputError for a request that a server refuses, RunError for a server that stays
        unreachable, keeps failing, or answers with another model."""
        left: list[int] = []
        for number, call in enumerate(calls):
            known = self.store.get(call.kept_as)
            if known is None:
                left.append(number)
            else:
                self._check_model(call.endpoint, known)
                yield number, known
        if not left:
            return
        done = SimpleQueue[tuple[int, Reply] | Exception | None]()
        stop = threading.Event()
        worker = threading.Thread(
            target=self._serve, args=(calls, left, done, stop), daemon=True
        )
        worker.start()
        try:
            while (found := done.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                number, reply = found
                self.usage.add(reply)
                self.store.add(calls[number].kept_as, reply)
                yield number, reply
        finally:
            stop.set()
            worker.join(timeout=2)

    def ask(self, endpoint: Endpoint, path: str) -> Any:
        """Return the JSON at an address; None if the server has none there. A temporary error is
        retried. Raises InputError for a server that does not answer or refuses the key, and
        RunError for a server that stays busy."""
        for attempt in range(DESCRIPTION_ATTEMPTS):
            last = attempt == DESCRIPTION_ATTEMPTS - 1
            try:
                response = self._asking.get(path, headers=_headers(endpoint))
                if last or response.status_code not in BUSY:
                    break
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                if last:
                    raise InputError(
                        f"{endpoint.name} {endpoint.url}: no server answers "
                        f"({first_line(error)})"
                    ) from None
            time.sleep(self._first_wait * 2**attempt)
        if response.status_code in BUSY:
            raise RunError(
                f"{endpoint.name} {endpoint.url}: status {response.status_code} for {path}; "
                "run the command again when the server is ready"
            )
        if response.status_code in (401, 403):
            raise InputError(
                f"{endpoint.name} {endpoint.url}: refuses the API key; name its variable "
                "(key-env=VAR) or its file (key-file=PATH)"
            )
        try:
            return response.json() if response.status_code == 200 else None
        except ValueError:
            return None

    def _serve(
        self,
        calls: Sequence[Call],
        left: Sequence[int],
        done: SimpleQueue[tuple[int, Reply] | Exception | None],
        stop: threading.Event,
    ) -> None:
        try:
            asyncio.run(self._answer_all(calls, left, done, stop))
        except ExceptionGroup as group:  # of tasks that failed, the first says why
            done.put(group.exceptions[0])
        except Exception as error:
            done.put(error)
        done.put(None)

    async def _answer_all(
        self,
        calls: Sequence[Call],
        left: Sequence[int],
        done: SimpleQueue[tuple[int, Reply] | Exception | None],
        stop: threading.Event,
    ) -> None:
        flows = {calls[n].endpoint: Flow(self.in_flight) for n in left}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(TIMEOUT, connect=CONNECT, pool=None)
        waiting = iter(left)
        async with httpx2.AsyncClient(
            limits=limits, timeout=timeout, verify=self._tls
        ) as client:

            async def work() -> None:
                for number in waiting:
                    if stop.is_set():
                        return
                    call = calls[number]
                    reply = await self._answer(client, call, flows[call.endpoint], stop)
                    done.put((number, reply))

            workers = []
            for _ in range(min(self.in_flight * len(flows), len(left))):
                workers.append(work())
            async with asyncio.TaskGroup() as group:
                for coroutine in workers:
                    group.create_task(coroutine)

    async def _answer(
        self, client: httpx2.AsyncClient, call: Call, flow: Flow, stop: threading.Event
    ) -> Reply:
        """Return the reply to a call, which is sent again after temporary errors."""
        attempt = failures = 0
        while True:
            wait = min(LONGEST_WAIT, self._first_wait * 2**attempt)
            wait *= random.uniform(0.75, 1.25)
            try:
                async with flow:
                    return await self._send(client, call, flow)
            except _Again as again:
                attempt += 1
                self.retries += 1
                wait = max(wait, again.after)
                failures += not (again.unreachable or again.overloaded)
                self._check_outage(call.endpoint, flow, again, failures)
            if stop.is_set():
                raise RunError("the run has ended")
            await asyncio.sleep(wait)

    def _check_outage(
        self, endpoint: Endpoint, flow: Flow, again: _Again, failures: int
    ) -> None:
        """Raise RunError for a server that is unreachable or overloaded too long, or keeps
        failing."""
        where = f"{endpoint.name} {endpoint.url}"
        kept = "finished answers are kept; run the command again to resume"
        if failures >= ATTEMPTS:
            raise RunError(f"{where}: failed {failures} times ({again}); {kept}")
        if again.overloaded:
            flow.refused()
        if not (again.unreachable or again.overloaded):
            return
        state = "unreachable" if again.unreachable else "overloaded"
        if flow.down_since is None:
            flow.down_since = time.monotonic()
            warnings.warn(
                f"{where}: is {state} ({again}); waiting up to {self._outage:.0f} s",
                stacklevel=2,
            )
        if time.monotonic() - flow.down_since > self._outage:
            raise RunError(
                f"{where}: {state} for {self._outage:.0f} s ({again}); {kept}"
            )

    async def _send(self, client: httpx2.AsyncClient, call: Call, flow: Flow) -> Reply:
        endpoint = call.endpoint
        began = time.perf_counter()
        streams = bool(call.body.get("stream"))
        request = client.build_request(
            "POST",
            f"{endpoint.url}/{APIS[endpoint.api]}",
            json=dict(call.body),
            headers=_headers(endpoint),
        )
        try:
            response = await client.send(request, stream=streams)
            try:
                if response.status_code != 200:
                    await response.aread()
                    _refuse(endpoint, response)
                if streams:
                    reply = await _streamed(response, began)
                else:
                    reply = _reply(response.json(), time.perf_counter() - began)
            finally:
                await response.aclose()
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _Again(
                first_line(error) or "no connection", unreachable=True
            ) from None
        except httpx2.HTTPError as error:
            raise _Again(first_line(error) or type(error).__name__) from None
        except InputError:  # a kind of ValueError
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise _Again(f"its answer is broken: {first_line(error)}") from None
        self._check_model(endpoint, reply)
        flow.answered(reply.seconds, reply.completion_tokens)
        return reply

    def _check_model(self, endpoint: Endpoint, reply: Reply) -> None:
        """Raise RunError if an endpoint answers with another model than before."""
        before = self._models.setdefault(endpoint, reply.model)
        if reply.model != before:
            raise RunError(
                f"{endpoint.name} {endpoint.url}: answered with model {before!r}, and now with "
                f"{reply.model!r}; a certificate needs one model throughout"
            )


class _Again(Exception):
    """A temporary error, after which a request is sent again."""

    def __init__(
        self,
        why: str,
        *,
        unreachable: bool = False,
        overloaded: bool = False,
        after: float = 0.0,
    ):
        super().__init__(why)
        self.unreachable = unreachable
        self.overloaded = overloaded
        self.after = after


def _headers(endpoint: Endpoint) -> dict[str, str]:
    key = endpoint.key
    return {"Authorization": f"Bearer {key}"} if key else {}


def _refuse(endpoint: Endpoint, response: httpx2.Response) -> None:
    """Raise the exception for a status other than 200."""
    status = response.status_code
    said = _said(response)
    if status in BUSY and SPENT not in response.text:
        after = response.headers.get("retry-after", "")
        seconds = min(float(after), LONGEST_WAIT) if _is_number(after) else 0.0
        raise _Again(
            f"status {status}: {said}", overloaded=status in (429, 503), after=seconds
        )
    raise InputError(f"{endpoint.name} {endpoint.url}: status {status}: {said}")


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _said(response: httpx2.Response) -> str:
    """Return the message of an error response."""
    try:
        error = response.json()
        error = error.get("error", error)
        return str(error.get("message", error))[:300]
    except (ValueError, AttributeError):
        return response.text[:300] or response.reason_phrase


def _reply(whole: Any, seconds: float) -> Reply:
    """Return the reply in a response. Raises LookupError or TypeError for an unknown format."""
    choice = whole["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise TypeError("its text is no text")
    usage = whole.get("usage") or {}
    return Reply(
        text,
        str(choice.get("finish_reason") or ""),
        str(whole.get("model", "")),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        passes=_passes(whole),
        seconds=seconds,
    )


def _passes(whole: Mapping[str, Any]) -> int | None:
    """Return the number of target passes that lenience's plugin reports."""
    counts = (whole.get("kv_transfer_params") or {}).get("lenience") or {}
    passes = counts.get("target_passes")
    return passes if isinstance(passes, int) else None


async def _streamed(response: httpx2.Response, began: float) -> Reply:
    """Return the reply in a stream of events. Raises ValueError for a stream that is cut off."""
    parts: list[str] = []
    last: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    finish = ""
    first: float | None = None
    ended = False
    async for data in _events(response):
        if data == "[DONE]":
            ended = True
            continue  # to the end, so that the connection can be used again
        last = json.loads(data)
        usage = last.get("usage") or usage
        for choice in last.get("choices") or ():
            part = (
                (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            )
            if part and first is None:
                first = time.perf_counter() - began
            parts.append(part)
            finish = choice.get("finish_reason") or finish
    if not (ended or finish):
        raise ValueError("its stream is cut")
    return Reply(
        "".join(parts),
        finish,
        str(last.get("model", "")),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or len(parts)),
        seconds=time.perf_counter() - began,
        first_token=first,
    )


async def _events(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()
