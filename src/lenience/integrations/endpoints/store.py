"""Requests, their replies, and a store of replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenience.core.files import digest
from lenience.integrations.endpoints.endpoint import Endpoint
from lenience.runs.journal import Journal


@dataclass(frozen=True)
class Call:
    """A request to an endpoint."""

    endpoint: Endpoint
    body: Mapping[str, Any]
    kept_as: str = ""
    """Key of the answer in the store; "" to send the request in any case."""


@dataclass(frozen=True)
class Reply:
    """An endpoint's answer to a request."""

    text: str
    finish: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    passes: int | None = None
    """Number of target passes, if the server reports it."""
    seconds: float = 0.0
    first_token: float | None = None
    """Seconds to the first token of a stream."""

    def to_json(self) -> dict[str, Any]:
        return vars(self)


class AnswerStore:
    """A store of answers by the content of their requests, in a JSONL file."""

    def __init__(self, path: Path | None):
        self._journal = None if path is None else Journal(path)
        self._known: dict[str, Reply] = {}
        for record in self._journal.resume() if self._journal else ():
            if "forgotten" in record:
                self._drop(record["forgotten"])
            else:
                self._known[record["key"]] = Reply(**record["reply"])

    def get(self, key: str) -> Reply | None:
        return self._known.get(key)

    def add(self, key: str, reply: Reply) -> None:
        if not key:
            return
        self._known[key] = reply
        if self._journal:
            self._journal.write({"key": key, "reply": reply.to_json()})

    def forget(self, keys: Sequence[str]) -> None:
        """Remove answers, so that they are requested again."""
        self._drop(keys)
        if self._journal:
            self._journal.write({"forgotten": list(keys)})

    def _drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._known.pop(key, None)


@dataclass
class Usage:
    """The numbers of requests and tokens that were paid for."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.requests += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens


def request_key(identity: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Return the key of an answer: the server as it describes itself, and the request."""
    return digest([dict(identity), dict(body)], 16, sort_keys=True)
