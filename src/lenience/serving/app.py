"""The server's HTTP interface: OpenAI's API, health, metrics and the live page."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.types import Step
from lenience.core.version import VERSION
from lenience.serving.answers import Choice, ServedAnswer
from lenience.serving.batch import Job
from lenience.serving.guard import ApiError, Guard, add_error_handlers, error_body
from lenience.serving.live_page import RaceColumn, live_page
from lenience.serving.metrics import Metrics, RequestCounts
from lenience.serving.protocol import (
    ChatCompletion,
    Completion,
    Detokenize,
    RaceRequest,
    Tokenize,
)
from lenience.serving.service import MAIN, Penalties, Service
from lenience.serving.worker import Busy, DecodingThread

DEFAULT_TOKENS = 16
"""Maximum number of new tokens of a completion that names none, as in OpenAI's API."""


@dataclass
class _Mailbox:
    """The steps of a request's answers, passed from the worker's thread to the event loop: at once
    for a stream, and otherwise when an answer ends, so that the event loop seldom interrupts the
    worker."""

    streams: bool
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    queue: asyncio.Queue[tuple[Job, Step | Exception]] = field(
        default_factory=asyncio.Queue
    )
    held: dict[int, list[Step]] = field(default_factory=dict)
    """Steps that are not passed on yet, by the id of the request."""

    def on_step(self, job: Job, step: Step) -> None:
        steps = self.held.setdefault(id(job), [])
        steps.append(step)
        if self.streams or step.finish:
            del self.held[id(job)]
            self._put(job, steps)

    def on_error(self, job: Job, error: Exception) -> None:
        self._put(job, [error])

    def _put(self, job: Job, items: Sequence[Step | Exception]) -> None:
        def put() -> None:
            for item in items:
                self.queue.put_nowait((job, item))

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # the event loop is closed, and nobody waits any more
            return


class Server:
    """The endpoints of a service."""

    def __init__(self, service: Service, api_key: str | None = None):
        self.service = service
        self.lm = service.pair.target
        self.api_key = api_key
        self.metrics = Metrics(service.name, max(1, int(service.decoder.window)))
        self.started = int(time.time())
        self._worker: DecodingThread | None = None

    @property
    def worker(self) -> DecodingThread:
        assert self._worker is not None
        return self._worker

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the worker while the server runs."""
        self._worker = self.service.worker()
        yield
        await run_in_threadpool(self.worker.close, 30.0)

    async def health(self) -> Response:
        """Say whether the server decodes."""
        alive = self.worker.is_alive
        return Response(status_code=200 if alive else 503)

    async def version(self) -> dict[str, str]:
        """Return the version, and the rule that answers are decoded with."""
        return {"version": VERSION, "server": "lenience", "rule": self.service.shown}

    async def prometheus(self) -> Response:
        """Return the counts in Prometheus' text format."""
        main = self.worker.lanes[MAIN]
        self.metrics.running.set(len(main.admitted))
        self.metrics.waiting.set(len(main.waiting))
        self.metrics.restarts.set(self.worker.restarts)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        """List the one model that is served."""
        card = {
            "id": self.service.name,
            "object": "model",
            "created": self.started,
            "owned_by": "lenience",
            "max_model_len": self.service.context,
        }
        return {"object": "list", "data": [card]}

    async def tokenize(self, asked: Tokenize) -> dict[str, Any]:
        """Return the token ids of a text or of messages."""
        self._check_model(asked.model)
        if asked.messages is not None:
            ids = await self._chat_ids([message.plain() for message in asked.messages])
        else:
            options = {"add_special_tokens": asked.add_special_tokens}
            text = asked.prompt or ""
            ids = await self._tried(partial(self._text_ids, text, **options), "prompt")
        return {
            "count": len(ids),
            "max_model_len": self.service.context,
            "tokens": ids,
        }

    async def detokenize(self, asked: Detokenize) -> dict[str, str]:
        """Return the text of token ids."""
        self._check_model(asked.model)
        if not all(0 <= token < self.lm.vocab_size for token in asked.tokens):
            raise ApiError(400, "tokens: holds ids outside the vocabulary", "tokens")
        text = await run_in_threadpool(self.lm.decode, asked.tokens, True)
        return {"prompt": text}

    async def completions(self, asked: Completion, request: Request) -> Response:
        """Continue one prompt or several."""
        self._check_model(asked.model)
        prompts = asked.prompts()
        if not prompts:
            raise ApiError(400, "prompt: is empty", "prompt")
        most = self.service.config.max_queue
        if len(prompts) * (asked.n or 1) > most:
            raise ApiError(
                400, f"prompt: at most {most} answers in a request", "prompt"
            )
        ids = [
            list(prompt)
            if not isinstance(prompt, str)
            else await self._tried(partial(self._text_ids, prompt), "prompt")
            for prompt in prompts
        ]
        for each in ids:
            await self._tried(partial(self._check_ids, each), "prompt")
        new = asked.new_tokens or DEFAULT_TOKENS
        return await self._answer(asked, ids, new, request)

    async def chat(self, asked: ChatCompletion, request: Request) -> Response:
        """Answer chat messages."""
        self._check_model(asked.model)
        ids = await self._chat_ids([message.plain() for message in asked.messages])
        new = asked.new_tokens
        if new is None:
            new = self._default_length(ids)
        return await self._answer(asked, [ids], new, request)

    def _default_length(self, ids: list[int]) -> int:
        """Return the maximum number of new tokens of a chat answer whose request names none: the
        certified number, or what the context has room for."""
        decoder = self.service.decoder
        room = max(1, self.service.room(ids))
        return min(room, decoder.max_new_tokens) if decoder.bound_to else room

    def _text_ids(self, text: str, **options: Any) -> list[int]:
        return list(self.lm.tokenize(text, **options)["input_ids"])

    def _check_ids(self, ids: list[int]) -> None:
        if len(ids) >= self.service.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, and this server has room for "
                f"{self.service.context}, answer included; shorten it"
            )
        self.service.pair.encode(ids, self.lm)

    async def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.lm.chats:
            raise ApiError(
                400,
                f"model {self.service.name!r} has no chat template; use /v1/completions",
                "messages",
            )
        return await self._tried(partial(self.lm.encode, messages), "messages")

    async def _tried(self, work: Callable[[], Any], param: str) -> Any:
        """Run work beside the event loop; wrong input is an error of a field."""
        try:
            return await run_in_threadpool(work)
        except InputError as error:
            raise ApiError(400, f"{param}: {first_line(error)}", param) from None

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.service.name:
            raise ApiError(
                404,
                f"model {name!r} does not exist; this server has {self.service.name!r}",
                "model",
            )

    async def _answer(
        self,
        asked: Completion | ChatCompletion,
        prompts: Sequence[list[int]],
        new: int,
        request: Request,
    ) -> Response:
        """Decode the answers to prompts, of at most `new` tokens each, and send them whole or as a
        stream."""
        jobs = await run_in_threadpool(self._jobs, asked, prompts, new)
        window = int(self.service.decoder.window)
        choices = [Choice(i, job, RequestCounts(window)) for i, job in enumerate(jobs)]
        reply = ServedAnswer(
            self.lm,
            self.service.name,
            isinstance(asked, ChatCompletion),
            choices,
            return_token_ids=bool(asked.return_token_ids),
        )
        box = self._submitted(MAIN, jobs, streams=bool(asked.stream))
        steps = self._steps(jobs, choices, box)
        if asked.stream:
            stream_options = asked.stream_options
            chunks = _stream(
                reply,
                steps,
                usage=bool(stream_options and stream_options.include_usage),
                running_usage=bool(
                    stream_options and stream_options.continuous_usage_stats
                ),
            )
            return StreamingResponse(chunks, media_type="text/event-stream")
        whole = asyncio.ensure_future(_drained(steps))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                whole.cancel()
                return Response(status_code=499)
            whole.result()
        finally:
            gone.cancel()
            self._leave(jobs)
        return JSONResponse(reply.whole())

    def _jobs(
        self,
        asked: Completion | ChatCompletion,
        prompts: Sequence[list[int]],
        new: int,
    ) -> list[Job]:
        """Make the requests of each prompt, n of them. Further ones have the next seeds."""
        penalties = Penalties(
            asked.presence_penalty or 0.0,
            asked.frequency_penalty or 0.0,
            asked.repetition_penalty,
            self._bias(asked.logit_bias or {}),
        )
        jobs = []
        for prompt in prompts:
            for i in range(asked.n or 1):
                options = {**asked.options(), "max_new_tokens": new}
                if asked.seed is not None:
                    options["seed"] = asked.seed + i
                try:
                    job = self.service.job(
                        prompt,
                        options,
                        asked.dial,
                        penalties,
                        streams=bool(asked.stream),
                        ignore_eos=bool(asked.ignore_eos),
                    )
                    job.alternatives = asked.alternatives
                except InputError as error:
                    raise ApiError(400, first_line(error)) from None
                jobs.append(job)
        return jobs

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        """Return the biases by token id."""
        found = {}
        for text, bias in given.items():
            is_id = text.isascii() and text.isdigit() and len(text) < 12
            if not is_id or int(text) >= self.lm.vocab_size:
                raise ApiError(
                    400, f"logit_bias {text!r:.40}: is not a token id", "logit_bias"
                )
            found[int(text)] = bias
        return found

    def _submitted(self, lane: str, jobs: list[Job], streams: bool) -> _Mailbox:
        """Put requests into the queue of a lane, and return where their steps arrive."""
        box = _Mailbox(streams)
        try:
            self.worker.submit(lane, [(job, box) for job in jobs])
        except Busy:
            self.metrics.refused.inc(len(jobs))
            raise ApiError(
                429, f"{self.service.config.max_queue} requests wait already; try again"
            ) from None
        except RunError as error:
            raise ApiError(503, str(error)) from None
        return box

    async def _steps(
        self, jobs: Sequence[Job], choices: Sequence[Choice], box: _Mailbox
    ) -> AsyncIterator[tuple[Choice, Step]]:
        """Yield the steps of requests until all have ended. Raises RunError if one fails. Requests
        that nobody waits for any more are cancelled."""
        by_job = {id(choice.job): choice for choice in choices}
        left = len(jobs)
        try:
            while left:
                job, step = await box.queue.get()
                if isinstance(step, Exception):
                    self.metrics.failed.inc()
                    job.cancelled = True
                    raise step
                choice = by_job[id(job)]
                if not choice.trace:
                    self._began(job)
                choice.add(step, self.lm)
                self.metrics.add(step)
                left -= step.finish is not None
                if step.finish:
                    self.metrics.finish(choice.reason or "")
                    self.metrics.whole.observe(time.perf_counter() - job.arrived)
                yield choice, step
        finally:
            self._leave(jobs)

    def _began(self, job: Job) -> None:
        self.metrics.first_token.observe(job.first_token - job.arrived)
        self.metrics.prompt_tokens.inc(len(job.prompt))
        self.metrics.reused.inc(job.reused)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Cancel those of the requests that have not ended."""
        left = [job for job in jobs if not job.is_over]
        if left:
            self.metrics.cancelled.inc(len(left))
            self.worker.cancel(left)

    async def page(self) -> HTMLResponse:
        """Return the live page."""
        nonce = secrets.token_urlsafe(16)
        html = await run_in_threadpool(
            live_page, self.service, bool(self.api_key), nonce
        )
        only = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
        )
        policy = f"{only}; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    async def race(self, asked: RaceRequest) -> Response:
        """Decode a prompt in the live page's columns, as lines of JSON."""
        ids = await self._tried(partial(self.lm.encode, asked.prompt), "prompt")
        await self._tried(partial(self._check_ids, ids), "prompt")
        most = min(asked.max_tokens, self.service.room(ids))
        columns = []
        for name in dict.fromkeys(asked.columns):
            dial = asked.lenience if name == "lenient" else None
            work = partial(self.service.racer, name, ids, most, dial)
            columns.append(
                RaceColumn(name, await self._tried(work, "lenience"), self.lm)
            )
        box = _Mailbox(streams=True)
        submitted: list[Job] = []
        try:
            for column in columns:
                self.worker.submit(column.name, [(column.job, box)])
                submitted.append(column.job)
        except (Busy, RunError):
            self._leave(submitted)
            raise ApiError(429, "too many live pages wait; try again") from None
        return StreamingResponse(
            self._race_lines(columns, box), media_type="application/x-ndjson"
        )

    async def _race_lines(
        self, columns: Sequence[RaceColumn], box: _Mailbox
    ) -> AsyncIterator[str]:
        by_job = {id(column.job): column for column in columns}
        left = len(columns)
        try:
            while left:
                job, step = await box.queue.get()
                if isinstance(step, Exception):
                    yield json.dumps({"error": first_line(step)}) + "\n"
                    return
                left -= step.finish is not None
                yield json.dumps(by_job[id(job)].line(step)) + "\n"
        finally:
            self._leave([column.job for column in columns])


async def _drained(steps: AsyncIterator[Any]) -> None:
    async for _ in steps:
        pass


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(
    reply: ServedAnswer,
    steps: AsyncIterator[tuple[Choice, Step]],
    usage: bool,
    running_usage: bool,
) -> AsyncIterator[str]:
    """Yield server-sent events: a chunk for each step, and [DONE]."""
    try:
        for chunk in reply.first_chunks():
            yield _event(chunk)
        async for choice, step in steps:
            yield _event(reply.chunk(choice, step, running_usage))
        if usage:
            yield _event(reply.last_chunk())
    except RunError as error:
        yield _event(error_body(500, first_line(error)))
    finally:
        await steps.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def make_app(
    service: Service, api_key: str | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """Return the application of a service. On a loopback `host`, requests that name another host
    are refused, so that no web page reaches the server through a name of its own."""
    server = Server(service, api_key)
    app = FastAPI(
        title="lenience",
        version=VERSION,
        description="OpenAI's API with speculative decoding, and a dial for leniency.",
        lifespan=server.lifespan,
        redoc_url=None,
        docs_url=None,
    )
    app.state.server = server
    routes: tuple[tuple[str, str, Callable[..., Awaitable[Any]]], ...] = (
        ("GET", "/", server.page),
        ("GET", "/health", server.health),
        ("GET", "/version", server.version),
        ("GET", "/metrics", server.prometheus),
        ("GET", "/v1/models", server.models),
        ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/chat/completions", server.chat),
        ("POST", "/tokenize", server.tokenize),
        ("POST", "/detokenize", server.detokenize),
        ("POST", "/live", server.race),
    )
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_middleware(Guard, api_key=api_key, host=host)
    add_error_handlers(app)
    return app
