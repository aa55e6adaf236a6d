"""Endpoints in the role of a pair: a reference as the target, candidates as decoders."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from lenience.core.errors import InputError, RunError
from lenience.core.files import digest
from lenience.decoding.decoder import Decoder, check_binding
from lenience.decoding.generation import Generation
from lenience.decoding.options import takes_options
from lenience.integrations.endpoints.client import Client
from lenience.integrations.endpoints.endpoint import Endpoint
from lenience.integrations.endpoints.store import Call, Reply, request_key
from lenience.models.prompts import Chat, Prompt
from lenience.rules.baselines import served

NAME = "openai"
"""Name of the engine."""
REPORTS = ("version", "server_info", "get_server_info", "props", "v1/models")
"""Paths below a server's root at which servers describe themselves."""
VOLATILE = (
    "created",
    "permission",
    "slots",
    "total_slots",
    "is_sleeping",
    "internal_states",
    "id_slot",
    "uptime",
)
"""Fields of a description that change although the settings do not."""
SECRET = re.compile(
    r"(?i)^token$|api_?key|secret|passw|credential|authorization|ssl_key"
    r"|(auth|access|hf|bearer)_?token"
)
"""Names of fields that may hold a secret, which no record keeps."""
CHECKED_EVERY = 10.0
"""Seconds between checks that the servers are unchanged."""
NOT_SENT = {
    "drafter": "model",
    "tree": "chain",
    "stop": "fixed",
    "draft_temperature": None,
}
"""Decoding options that a server decides, with the only values allowed here."""


class ServedModel:
    """An endpoint in the role of a target. A prompt's token ids are the bytes of its `repr`, which
    identify the prompt in the ledger."""

    context_length = None
    dtype = "served"
    device = torch.device("cpu")

    def __init__(self, endpoint: Endpoint, identity: Mapping[str, Any]):
        self.name = endpoint.url
        self.fingerprint = digest(dict(identity), sort_keys=True)
        self.tokenizer_fingerprint = self.fingerprint
        self.chat = Chat()

    def encode(self, prompt: Prompt, any_length: bool = False) -> list[int]:
        """Return the bytes of a prompt's `repr`. Raises InputError for token ids."""
        if not isinstance(prompt, str) and not _are_messages(prompt):
            raise InputError("a prompt for an endpoint is text or chat messages")
        return list(repr(prompt).encode())

    def generation_settings(self) -> dict[str, Any]:
        return {}

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return ""


@dataclass(frozen=True)
class ServedOptions:
    """The settings of a run on endpoints."""

    in_flight: int = 32
    """Maximum number of requests sent to an endpoint at once."""
    system: str | None = None
    """System message for each chat prompt that has none."""
    store: Path | None = None
    """File of stored answers, which are not requested again."""
    claims: tuple[str, ...] = ()
    """User's statements about the servers, for facts that servers do not report."""


class ServedPair:
    """A reference endpoint and candidates, with a pair's methods. Raises InputError for a server
    that does not answer, or two candidates with one name."""

    engine_name = NAME
    engine_setup = NAME
    draft = None
    shares_vocabulary = False
    compiled = False
    answers_at_a_time = 1
    models: Mapping[str, Any]
    noise: dict[str, int] | None = None
    candidate_noise: dict[str, dict[str, int]] | None = None

    def __init__(
        self,
        reference: Endpoint,
        candidates: Sequence[Endpoint],
        options: ServedOptions = ServedOptions(),
        client: Client | None = None,
    ):
        """Connect to the endpoints. `client` sends the requests; by default it is made from the
        options."""
        self.reference = reference
        self.candidates = {candidate.name: candidate for candidate in candidates}
        if len(self.candidates) < len(candidates):
            names = [candidate.name for candidate in candidates]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(
                f"--candidate: two are named {twice}; give each its own name="
            )
        self.options = options
        self.name = reference.url
        self.client = client or Client(options.in_flight, options.store)
        self._identities: dict[Endpoint, dict[str, Any]] = {}
        self.target = ServedModel(reference, self.identity(reference))
        self.models = {"target": self.target}

    def reset_prefix_cache(self) -> None:
        """Do nothing: what servers keep of earlier prompts is theirs."""

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return {"target": self.target.fingerprint, "tokenizer": self.target.fingerprint}

    @property
    def endpoints(self) -> list[Endpoint]:
        return [self.reference, *self.candidates.values()]

    def identity(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the identity of an endpoint's requests with its server's description of itself,
        which is requested once."""
        if endpoint not in self._identities:
            self._identities[endpoint] = {
                **endpoint.record,
                "reported": self._reported(endpoint),
            }
        return self._identities[endpoint]

    def _reported(self, endpoint: Endpoint) -> dict[str, Any]:
        found = {}
        for path in REPORTS:
            found[path] = _stable(
                self.client.ask(endpoint, f"{endpoint.root}/{path}"), endpoint.key
            )
        if isinstance(found["v1/models"], dict):
            found["v1/models"] = _own_entry(found["v1/models"], endpoint.model)
        return {path: content for path, content in found.items() if content}

    def check_unchanged(self) -> None:
        """Raise RunError for a server whose description of itself has changed since the start."""
        for endpoint, before in self._identities.items():
            now = self._reported(endpoint)
            if now != before["reported"]:
                parts = now.keys() | before["reported"].keys()
                changed = min(
                    p for p in parts if now.get(p) != before["reported"].get(p)
                )
                raise RunError(
                    f"{endpoint.name} {endpoint.url}: its /{changed} has changed since the start; "
                    "restore the server, or start a new run"
                )

    def endpoint_of(self, decoder: Decoder) -> Endpoint:
        """Return the endpoint that a decoder stands for. Raises InputError for an unknown one."""
        if decoder.alone == "target":
            return self.reference
        name = served(decoder.rule)
        if name is None:
            raise InputError(
                f"rule {decoder.rule}: runs in lenience's own loop or in vLLM; with --reference "
                "name servers (--candidate)"
            )
        if name not in self.candidates:
            known = ", ".join(self.candidates) or "none"
            raise InputError(
                f"rule {decoder.rule}: there is no candidate {name}; there are {known}"
            )
        return self.candidates[name]

    def check(self, decoder: Decoder) -> None:
        """Raise InputError for an unknown endpoint, for options that a server decides, and for
        options that differ from the certified ones."""
        if decoder.bound_to:
            check_binding(decoder.bound_to, self.binding(decoder))
        self.endpoint_of(decoder)
        values = decoder.to_json()
        for name, usual in NOT_SENT.items():
            if values[name] != usual:
                raise InputError(
                    f"{name} {values[name]}: is the server's own; set it there, or in body="
                )

    def binding(self, decoder: Decoder) -> dict[str, Any]:
        """Return the facts that a certificate binds: both endpoints with their requests and their
        servers' descriptions, and the user's claims."""
        return {
            "engine": NAME,
            "models": {
                "target": {"fingerprint": self.target.fingerprint, "dtype": "served"}
            },
            "tokenizer": self.target.fingerprint,
            "template": self.options.system,
            "generation_config": {},
            "heads": [],
            "drafter": "model",
            "reference": self.identity(self.reference),
            "candidate": self.identity(self.endpoint_of(decoder)),
            "claims": list(self.options.claims),
        }

    def settle(
        self, prompts: Sequence[Prompt], decoder: Decoder, **options: Any
    ) -> Decoder:
        return decoder

    @takes_options
    def generate(
        self, prompt: Prompt, decoder: Decoder | None = None, **options: Any
    ) -> Generation:
        """Answer one prompt, as `Pair.generate` does. The request is sent even if its answer is
        stored."""
        decoder = (decoder or Decoder()).with_options(options)
        self.check(decoder)
        call = replace(
            self.call(self.endpoint_of(decoder), prompt, decoder), kept_as=""
        )
        ((_, reply),) = self.client.run([call])
        return _generation(reply, self.target.encode(prompt))

    @takes_options
    def generate_batch(
        self, prompts: Sequence[Prompt], decoder: Decoder | None = None, **options: Any
    ) -> list[Generation]:
        """Answer many prompts, as `Pair.generate_batch` does."""
        answers = dict(self.as_completed(prompts, decoder, **options))
        return [answers[number] for number in range(len(prompts))]

    @takes_options
    def as_completed(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder | None = None,
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the answers with their prompts' indices, in the order of arrival. Every ten seconds
        and at the end, the servers are checked to be unchanged; answers are yielded only after a
        check. If a server has changed, its unchecked answers are forgotten and RunError is
        raised."""
        decoder = (decoder or Decoder()).with_options(options)
        self.check(decoder)
        endpoint = self.endpoint_of(decoder)
        calls = []
        for number, prompt in enumerate(prompts):
            calls.append(self.call(endpoint, prompt, decoder, number))
        store = self.client.store
        kept = {call.kept_as for call in calls if store.get(call.kept_as)}
        arrived: list[tuple[int, Reply]] = []
        checked = time.monotonic()
        for found in self.client.run(calls):
            arrived.append(found)
            if time.monotonic() - checked > CHECKED_EVERY:
                self._check_answers(calls, arrived, kept)
                yield from self._generations(arrived, prompts)
                arrived, checked = [], time.monotonic()
        self._check_answers(calls, arrived, kept)
        yield from self._generations(arrived, prompts)

    def _check_answers(
        self,
        calls: Sequence[Call],
        arrived: Sequence[tuple[int, Reply]],
        kept: set[str],
    ) -> None:
        """Raise RunError if a server has changed, and forget the answers that have arrived since
        the last check, except the older ones in `kept`."""
        try:
            self.check_unchanged()
        except RunError:
            keys = {calls[number].kept_as for number, _ in arrived}
            self.client.store.forget(sorted(keys - kept))
            raise

    def _generations(
        self, arrived: Sequence[tuple[int, Reply]], prompts: Sequence[Prompt]
    ) -> Iterator[tuple[int, Generation]]:
        for number, reply in arrived:
            yield number, _generation(reply, self.target.encode(prompts[number]))

    def call(
        self,
        endpoint: Endpoint,
        prompt: Prompt,
        decoder: Decoder,
        number: int | None = None,
        repeat: int = 0,
    ) -> Call:
        """Return the request for an answer; a `repeat` above 0 requests a further answer. The
        endpoint's name is part of the key, so a server compared with itself answers twice."""
        body = self.body(endpoint, prompt, decoder, number)
        asked = {**body, "name": endpoint.name, "repeat": repeat}
        key = request_key(self.identity(endpoint), asked)
        return Call(endpoint, body, key)

    def body(
        self,
        endpoint: Endpoint,
        prompt: Prompt,
        decoder: Decoder,
        number: int | None = None,
    ) -> dict[str, Any]:
        """Return the JSON of a request. The endpoint's `body` overrides other fields. `number` is
        the prompt's index among many, each with its own seed; None for a single prompt."""
        body: dict[str, Any] = {"model": endpoint.model or self._first_model(endpoint)}
        if endpoint.api == "chat":
            body["messages"] = self._messages(prompt)
        elif isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            raise InputError(
                f"{endpoint.name} {endpoint.url}: api=completions takes text, and the prompt is "
                "chat messages; use api=chat"
            )
        body["max_tokens"] = decoder.max_new_tokens
        body["temperature"] = decoder.temperature
        if decoder.temperature:
            body["seed"] = (
                decoder.seed
                if number is None
                else _seed(decoder.seed_of(number), prompt)
            )
        if decoder.stop_strings:
            body["stop"] = list(decoder.stop_strings)
        for name in ("top_p", "top_k"):
            value = getattr(decoder, name)
            if value is not None:
                body[name] = value
        return {**body, **endpoint.body}

    def _messages(self, prompt: Prompt) -> list[dict[str, str]]:
        messages: list[dict[str, str]]
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [dict(cast(Any, message)) for message in prompt]
        if self.options.system is not None and messages[0].get("role") != "system":
            system = {"role": "system", "content": self.options.system}
            return [system, *messages]
        return messages

    def _first_model(self, endpoint: Endpoint) -> str:
        listed = self.identity(endpoint)["reported"].get("v1/models") or {}
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise InputError(
                f"{endpoint.name} {endpoint.url}: lists no models; give model=NAME"
            ) from None

    def floor(
        self, endpoint: Endpoint, prompts: Sequence[Prompt], decoder: Decoder
    ) -> list[tuple[str, str]]:
        """Return two texts of an endpoint for each prompt, from separate requests. Servers that
        batch may answer the same greedy request in different ways; the second requests are sent in
        reverse, so that other requests share their batches."""
        calls = []
        for number, prompt in enumerate(prompts):
            calls.append(self.call(endpoint, prompt, decoder, number))
        again = [
            self.call(endpoint, prompt, decoder, number, repeat=1)
            for number, prompt in enumerate(prompts)
        ][::-1]
        first = {n: reply.text for n, reply in self.client.run(calls)}
        second = {n: reply.text for n, reply in self.client.run(again)}
        last = len(prompts) - 1
        return [(first[n], second[last - n]) for n in range(len(prompts))]


def _generation(reply: Reply, prompt: list[int]) -> Generation:
    """Return a reply as a Generation. Its tokens are counted, but their ids are unknown (0)."""
    if not reply.completion_tokens:
        warnings.warn(
            f"model {reply.model}: the server counts no tokens (usage)", stacklevel=2
        )
    count = max(1, reply.completion_tokens)
    finish = "length" if reply.finish == "length" else "eos"
    return Generation(
        prompt,
        tokens=[0] * count,
        text=reply.text,
        target_passes=reply.passes or count,
        target_tokens=reply.prompt_tokens + count,
        finish=finish,
        seconds=reply.seconds,
    )


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)


def _seed(seed: int, prompt: Prompt) -> int:
    """Return a prompt's own seed. With one seed for all prompts, a server would draw every answer
    from the same random numbers."""
    return int(digest([seed, repr(prompt)], 4), 16) % 2**31


def _own_entry(listed: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return a list of models reduced to the requested model, as others come and go."""
    models = listed.get("data")
    if not isinstance(models, list):
        return listed
    named = [
        entry
        for entry in models
        if isinstance(entry, dict) and entry.get("id") == model
    ]
    return {**listed, "data": named if model else models[:1]}


def _stable(content: Any, key: str | None) -> Any:
    """Return a description without volatile fields and without secrets: fields with a secret's name
    are removed, and the API key is masked in texts."""
    if isinstance(content, dict):
        found = {}
        for name, value in content.items():
            if name not in VOLATILE and not SECRET.search(name):
                found[name] = _stable(value, key)
        return found
    if isinstance(content, list):
        return [_stable(value, key) for value in content]
    if isinstance(content, str) and key:
        return content.replace(key, "…")
    return content
