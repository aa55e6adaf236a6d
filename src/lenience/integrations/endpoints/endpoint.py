"""An endpoint as data: an address with the options of its requests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lenience.core import spec
from lenience.core.errors import InputError, reason
from lenience.core.files import digest

Api = Literal["chat", "completions"]
APIS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions"}
"""Paths of the two APIs below an endpoint's address."""
KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable of the API key, unless an endpoint names another."""
RESERVED = ("messages", "prompt", "stream", "n")
"""Fields of a request that `body` must not set."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts that are this machine."""
OPTIONS = ("body", "model", "name", "api", "key-env", "key-file")
"""Options of an endpoint's spec."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address and the options of the requests to it."""

    url: str
    """Address that ends in /v1, without a slash."""
    name: str
    """Name in tables and certificates, which must not hold a semicolon."""
    model: str | None = None
    """Model of the requests; None for the server's first."""
    body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of each request."""
    api: Api = "chat"
    key_env: str | None = None
    """Environment variable of the API key; None for the usual one."""
    key_file: str | None = None

    @classmethod
    def parse(cls, text: str, flag: str, usual: str) -> Endpoint:
        """Return an endpoint from "URL; body={…}; model=…; name=…"; `usual` is the default name.
        Raises InputError, which begins with the flag, for a wrong spec."""
        url, *options = (part.strip() for part in spec.split(text, ";", escapes=True))
        where = f"{flag} {url}"
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise InputError(f"{where}: is not an address; write http://HOST:PORT/v1")
        if address.username or address.password:
            raise InputError(
                f"{flag}: holds a password; put the key into a variable (key-env=VAR) or a file "
                "(key-file=PATH)"
            )
        values: dict[str, str] = {}
        for option in filter(None, options):
            name, found, value = (part.strip() for part in option.partition("="))
            if not found or name not in OPTIONS:
                known = ", ".join(OPTIONS)
                raise InputError(
                    f"{where}: has no option {option!r}; there are {known}"
                )
            if name in values:
                raise InputError(f"{where}: {name} is given twice")
            values[name] = value
        if values.get("api", "chat") not in APIS:
            raise InputError(f"{where}: api must be chat or completions")
        name = values.get("name", usual)
        if not re.fullmatch(r"[\w.+-]+", name):
            raise InputError(
                f"{where}: the name {name!r} must have letters, digits, '.', '+' and '-' only"
            )
        return cls(
            url.rstrip("/"),
            name,
            values.get("model"),
            _body(where, values.get("body", "{}")),
            api="completions" if values.get("api") == "completions" else "chat",
            key_env=values.get("key-env"),
            key_file=values.get("key-file"),
        )

    @property
    def root(self) -> str:
        """Return the address without /v1, the base of paths such as /version."""
        return self.url.removesuffix("/v1")

    @property
    def key(self) -> str | None:
        """Return the API key, which no record holds. The usual variable's key goes only over https
        or to this machine, unless `key-env` names it. Raises InputError if its file cannot be
        read."""
        if self.key_file is None:
            if self.key_env is None and not self._is_private:
                return None
            return os.environ.get(self.key_env or KEY_VARIABLE)
        try:
            return Path(self.key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InputError(
                f"key-file {self.key_file}: cannot be read ({reason(error)})"
            ) from None

    @property
    def _is_private(self) -> bool:
        """Return True if requests are encrypted or stay on this machine."""
        parts = urlsplit(self.url)
        return parts.scheme == "https" or parts.hostname in LOOPBACK

    @property
    def record(self) -> dict[str, Any]:
        """Return the identity of the endpoint's requests, without API keys."""
        return {
            "url": self.url,
            "model": self.model,
            "api": self.api,
            "body": dict(self.body),
        }

    @property
    def fingerprint(self) -> str:
        return digest(self.record, sort_keys=True)


def _body(where: str, text: str) -> dict[str, Any]:
    """Return the further fields of requests. Raises InputError for text that is no JSON object, or
    sets a reserved field."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: body is no JSON ({error})") from None
    if not isinstance(body, dict):
        raise InputError(
            f"{where}: body must be a JSON object, such as " + '{"top_k": 5}'
        )
    taken = [name for name in RESERVED if name in body]
    if taken:
        raise InputError(f"{where}: body must not set {taken[0]}")
    return body
