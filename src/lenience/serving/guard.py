"""What stands before the endpoints: the API key, the host, the size of bodies, and errors."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lenience.core.errors import RunError, first_line

LARGEST_BODY = 4 << 20
"""Maximum number of bytes of a request's body."""
RETRY_AFTER = 1
"""Seconds after which a refused request may be sent again."""
OPEN = ("/", "/health", "/version", "/metrics", "/openapi.json")
"""Paths that need no API key."""


class ApiError(Exception):
    """An error in OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else {}
        return JSONResponse(
            error_body(self.status, str(self), self.param), self.status, headers
        )


KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = KINDS.get(status, "invalid_request_error")
    body = {"message": message, "type": kind, "param": param, "code": status}
    return {"error": body}


class Guard:
    """ASGI middleware that checks the API key and, on a loopback address, the name of the host, and
    that limits the size of bodies."""

    def __init__(self, app: ASGIApp, api_key: str | None, host: str):
        self.app = app
        self.api_key = api_key
        self.is_local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = None
        named = headers.get(b"host", b"").decode("latin-1")
        if self.is_local and not is_loopback(_without_port(named)):
            error = ApiError(400, f"host {named[:80]!r}: is not this server's")
        elif self.api_key and scope["path"] not in OPEN:
            given = headers.get(b"authorization", b"")
            wanted = f"Bearer {self.api_key}".encode()
            if not hmac.compare_digest(given, wanted):
                error = ApiError(
                    401, "the API key is missing or wrong; send it as Bearer"
                )
        length = headers.get(b"content-length", b"0")
        if error is None and length.isdigit() and int(length) > LARGEST_BODY:
            error = _too_large()
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, _limited(receive), send)


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(named: str) -> str:
    """Return the host of a Host header."""
    if named.startswith("["):
        return named[1:].partition("]")[0]
    return named.partition(":")[0]


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {LARGEST_BODY >> 20} MiB")


def _limited(receive: Receive) -> Receive:
    """Return a function that receives messages, and raises HTTPException for a body that is
    too large."""
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > LARGEST_BODY:
            error = _too_large()
            raise HTTPException(error.status, str(error))
        return message

    return limited


def add_error_handlers(app: FastAPI) -> None:
    """Send every error in OpenAI's form."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = _field_of(first)
        message = str(first["msg"])
        if field and not message.startswith(f"{field}:"):
            message = f"{field}: {message}"
        return ApiError(400, message, field).response()

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse(
            error_body(error.status_code, str(error.detail)),
            error.status_code,
            error.headers,
        )

    async def on_failure(_: Request, error: Exception) -> Response:
        return ApiError(500, first_line(error)).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RunError, on_failure)
    app.add_exception_handler(Exception, on_failure)


def _field_of(problem: dict[str, Any]) -> str | None:
    """Return the field that a validation error is about."""
    field = problem.get("ctx", {}).get("field")
    places = [str(place) for place in problem["loc"] if place != "body"]
    return field or (places[0] if places else None)
