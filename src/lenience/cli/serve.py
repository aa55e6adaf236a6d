"""The command `serve`."""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lenience.cli.choices import MANY, Models
from lenience.cli.console import loading, say
from lenience.cli.decode import models_for
from lenience.cli.options import ServeDecoding, decoder_of, given, needs_draft
from lenience.core.errors import InputError

if TYPE_CHECKING:
    from lenience.serving.service import ServeConfig

GRACE = 30
"""Seconds that running answers have to end after SIGTERM."""
BUILT_IN_OPTIONS = {"rule": "exact", "window": 16}
"""Options of the built-in pair's server, if none are given."""
BUILT_IN_ALLOW = ("judge@0.993", "judge@0.09886078796338775")
"""Rules that its requests may choose: the published setting, and the most lenient one of the
dial."""
BUILT_IN_STRICT = "exact; drafter=medusa; window=4"
"""The fastest strict setting of the published results on the built-in pair."""


@Parameter(name="*")
@dataclass
class ServerFlags:
    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the server only on another address than the
    default."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    allow: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """Rule that a request may choose although it is more lenient than --rule; may be repeated. '*'
    allows any."""
    strict: str | None = None
    """Setting of the live page's strict column, such as 'exact; drafter=ngram; window=4'. Default:
    the server's, with the rule exact."""
    max_rows: int = 16
    """Maximum number of requests decoded at once."""
    max_queue: int = 256
    """Maximum number of waiting requests; further ones get status 429."""
    context: int | None = None
    """Maximum number of tokens of a prompt with its answer. Default: the models' context, or what
    memory has room for."""
    model_name: str | None = None
    """Name of the model in the API. Default: the target's."""
    api_key_file: Path | None = None
    """File whose first line is the key that requests must send as Bearer."""

    def config(self) -> ServeConfig:
        """Return the settings of the server. Raises InputError for wrong ones."""
        from lenience.decoding.decoder import Decoder
        from lenience.serving.dial import ANY
        from lenience.serving.service import ServeConfig

        rules = list[Any]()
        for rule in self.allow:
            if rule != ANY:
                rules.append(Decoder.of({"rule": rule}).rule)
        return ServeConfig(
            max_rows=self.max_rows,
            max_queue=self.max_queue,
            context=self.context,
            name=self.model_name,
            allow=tuple(rules),
            allow_any=ANY in self.allow,
            strict=None if self.strict is None else Decoder.parse(self.strict),
        )

    def key(self) -> str | None:
        """Return the API key; None without a file."""
        path = self.api_key_file
        if path is None:
            return None
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {path}: {error}") from None
        key = (text.splitlines() or [""])[0].strip()
        if not key:
            raise InputError(
                f"--api-key-file {path}: its first line is empty; write the key there"
            )
        return key

    def of_built_in(self) -> ServerFlags:
        """Return the flags with the defaults of the built-in pair."""
        allow = self.allow or BUILT_IN_ALLOW
        return replace(self, allow=allow, strict=self.strict or BUILT_IN_STRICT)


def serve(
    *,
    server: ServerFlags | None = None,
    run: Path | None = None,
    flags: ServeDecoding | None = None,
    models: Models | None = None,
) -> None:
    """Serve a pair with OpenAI's API and a live page (extra `serve`).

    Parameters
    ----------
    run
        Run folder whose models are used unless flags name others. certified:RUN implies it.
    """
    _check_installed()
    from lenience.certification.certificate import is_certified
    from lenience.serving.dial import holding_certificate

    server = server or ServerFlags()
    options = given(flags)
    if is_certified(options.get("rule")):
        holding_certificate(
            options["rule"]
        )  # a server never falls back to another rule
    models = models_for(options, run, models)
    models.refuse_vllm("serve")
    if models.target is None and not options:
        options = dict(BUILT_IN_OPTIONS)
        server = server.of_built_in()
    _serve(server, options, models)


def _serve(server: ServerFlags, options: dict[str, Any], models: Models) -> None:
    """Load the pair and answer requests until a signal."""
    key = server.key()
    config = server.config()
    decoder = decoder_of(options)
    wants_draft = needs_draft(decoder) or (
        config.strict is not None and needs_draft(config.strict)
    )
    pair = models.load(needs_draft=wants_draft, tokens=MANY)
    with loading():
        from lenience.serving.app import make_app
        from lenience.serving.guard import is_loopback
        from lenience.serving.service import Service

        service = Service(pair, decoder, config)
        app = make_app(service, key, server.host)
    rule = decoder.bound_to.source if decoder.bound_to else decoder.rule
    room = f"{config.max_rows} rows of up to {service.context} tokens"
    say(f"serving {service.name}, rule {rule}, {room}")
    if key is None and not is_loopback(server.host):
        where = f"{server.host}:{server.port}"
        say(f"anyone who reaches {where} may use it; --api-key-file asks for a key")
    _listen(app, server.host, server.port)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"serve: needs {error.name}; install the extra: pip install 'lenience[serve]'"
        ) from None


def _listen(app: Any, host: str, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM. Raises InputError for an address that cannot be
    listened on."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)
    with bound_socket(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listening.getsockname()[1]}"
        say(f"{url} (live page), {url}/v1 (OpenAI's API)")
        # uvicorn raises the signal again after it has shut down
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        server.run(sockets=[listening])


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Its protocol is named, or asyncio would not turn
    Nagle's algorithm off, which delays answers by 40 ms."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port {port}: must be 0 to 65535")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: cannot listen there ({error}); give another"
        ) from None
    return bound
