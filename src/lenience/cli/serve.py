"""The command `serve`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lenience.cli.choices import MANY, Models
from lenience.cli.console import loading, say
from lenience.cli.decode import models_for
from lenience.cli.options import ServeDecoding, decoder_of, given, needs_draft
from lenience.core.errors import InputError, RunError

if TYPE_CHECKING:
    from lenience.decoding.decoder import Decoder
    from lenience.serving.service import ServeConfig

GRACE = 30
"""Seconds that running answers have to end after SIGTERM."""
BUILT_IN = {"rule": "exact", "window": 16}
"""Options of the built-in pair's server, if none are given."""
BUILT_IN_ALLOW = ("judge@0.993", "judge@0.09886078796338775")
"""Rules that its requests may choose: the published setting, and the most lenient one of the
dial."""
BUILT_IN_STRICT = "exact; drafter=medusa; window=4"
"""The fastest strict setting of the published results on the built-in pair."""


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    strict: str | None = None,
    max_rows: int = 16,
    max_queue: int = 256,
    context: int | None = None,
    model_name: str | None = None,
    api_key_file: Path | None = None,
    run: Path | None = None,
    flags: ServeDecoding | None = None,
    models: Models | None = None,
) -> None:
    """Serve a pair with OpenAI's API and a live page (extra `serve`).

    Parameters
    ----------
    host
        Address to listen on. Other machines reach the server only on another address than the
        default.
    port
        Port to listen on; 0 picks a free one.
    allow
        Rule that a request may choose although it is more lenient than --rule; may be repeated.
        '*' allows any.
    strict
        Setting of the live page's strict column, such as 'exact; drafter=ngram; window=4'. Default:
        the server's, with the rule exact.
    max_rows
        Maximum number of requests decoded at once.
    max_queue
        Maximum number of waiting requests; further ones get status 429.
    context
        Maximum number of tokens of a prompt with its answer. Default: the models' context, or what
        memory has room for.
    model_name
        Name of the model in the API. Default: the target's.
    api_key_file
        File whose first line is the key that requests must send as Bearer.
    run
        Run folder whose models are used unless flags name others. certified:RUN implies it.
    """
    _check_installed()
    from lenience.runs.certificate import is_certified
    from lenience.serving.dial import holding_certificate

    options = given(flags)
    if is_certified(options.get("rule")):
        holding_certificate(
            options["rule"]
        )  # a server never falls back to another rule
    models = models_for(options, run, models)
    models.refuse_vllm("serve")
    key = None if api_key_file is None else _key(api_key_file)
    built_in = models.target is None and not options
    if built_in:
        options = dict(BUILT_IN)
        allow = allow or BUILT_IN_ALLOW
        strict = strict or BUILT_IN_STRICT
    decoder = decoder_of(options)
    wants_draft = needs_draft(decoder) or _names_draft(strict)
    pair = models.load(needs_draft=wants_draft, tokens=MANY)
    with loading():
        from lenience.serving.app import make_app
        from lenience.serving.service import Service

        config = _config(allow, strict, max_rows, max_queue, context, model_name)
        service = Service(pair, decoder, config)
        app = make_app(service, key, host)
    rule = decoder.bound_to.source if decoder.bound_to else decoder.rule
    say(
        f"serving {service.name}, rule {rule}, {max_rows} rows of up to {service.context} tokens"
    )
    if key is None and not _is_loopback(host):
        say(
            f"anyone who reaches {host}:{port} may use it; --api-key-file asks for a key"
        )
    _listen(app, host, port)


def _config(
    allow: tuple[str, ...],
    strict: str | None,
    max_rows: int,
    max_queue: int,
    context: int | None,
    name: str | None,
) -> ServeConfig:
    from lenience.decoding.decoder import Decoder
    from lenience.serving.dial import ANY
    from lenience.serving.service import ServeConfig

    rules: list[Any] = [
        Decoder.of({"rule": rule}).rule for rule in allow if rule != ANY
    ]
    return ServeConfig(
        max_rows=max_rows,
        max_queue=max_queue,
        context=context,
        name=name,
        allow=tuple(rules),
        allow_any=ANY in allow,
        strict=None if strict is None else Decoder.parse(strict),
    )


def _names_draft(strict: str | None) -> bool:
    """Return True if the setting of the strict column needs a draft model."""
    if strict is None:
        return False
    from lenience.decoding.decoder import Decoder

    decoder: Decoder = Decoder.parse(strict)
    return needs_draft(decoder)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"serve: needs {error.name}; install the extra: pip install 'lenience[serve]'"
        ) from None


def _key(path: Path) -> str:
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(app: Any, host: str, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM. Raises RunError if the address is taken."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)
    try:
        socket = config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason
        raise RunError(
            f"{host}:{port}: cannot listen there; give another --port"
        ) from None
    with socket:
        bound = socket.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        say(
            f"http://{shown}:{bound} (live page), http://{shown}:{bound}/v1 (OpenAI's API)"
        )
        server.run(sockets=[socket])
