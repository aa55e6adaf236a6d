"""The rule of a server, and the changes that a request may ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from lenience.certification.certificate import is_certified
from lenience.core.errors import InputError
from lenience.core.records import Record
from lenience.rules.combine import AnyOf
from lenience.rules.lossless import refuse_forbidden
from lenience.rules.parsing import parse_spec
from lenience.rules.strict import Exact, Speculative
from lenience.serving.dial import (
    ANY,
    KEY,
    Dial,
    certified_rule,
    holding_certificate,
)

VARIABLE = "LENIENCE_RULE"


class PluginOptions(Record):
    """The options under "lenience" in --additional-config."""

    rule: str
    allow: tuple[str, ...] = ()
    """Rules that a request may choose although they are more lenient; "*" for any."""
    max_unjudged: float = Field(default=0.05, ge=0, le=1)
    """Largest share of windows that may be decoded strictly because the engine gave no draft
    distribution."""
    steps: bool = False
    """True if answers carry the rule's decision on each window."""


@dataclass(frozen=True)
class ServedRule(Dial):
    """The rule of a server, and the changes that its requests may ask for."""

    max_unjudged: float = 0.05
    steps: bool = False

    @property
    def judges(self) -> bool:
        """Return True if any request may have a rule that the engine lacks."""
        return self.allow_any or not all(map(is_engines, (self.rule, *self.allow)))


def read(additional: object) -> ServedRule | None:
    """Return the server's rule from --additional-config or LENIENCE_RULE; None without either.
    Raises InputError for an impossible rule, or if LENIENCE_FORBID=1 forbids it."""
    options = additional.get(KEY) if isinstance(additional, Mapping) else None
    named = os.environ.get(VARIABLE)
    if options is None and not named:
        return None
    if options is not None and named:
        raise InputError(
            f"{VARIABLE} {named}: --additional-config names a rule too; give one"
        )
    given = {"rule": named} if options is None else options
    server = _read(json.dumps(given, sort_keys=True))
    for rule in server.rules:
        refuse_forbidden(rule)
    return server


@lru_cache
def _read(options: str) -> ServedRule:
    where = f'--additional-config "{KEY}"'
    content = json.loads(options)
    if not isinstance(content, dict):
        raise InputError(f'{where}: must be an object, such as {{"rule": "topk:3"}}')
    known = PluginOptions.read(content, where, "docs/vllm.md lists what it takes")
    allowed = [spec for spec in known.allow if spec != ANY]
    certificate = holding_certificate(known.rule) if is_certified(known.rule) else None
    rule = (
        parse_spec(known.rule)
        if certificate is None
        else certified_rule(certificate, known.rule)
    )
    return ServedRule(
        rule=rule,
        allow=tuple(map(parse_spec, allowed)),
        allow_any=ANY in known.allow,
        max_unjudged=known.max_unjudged,
        steps=known.steps,
        certificate=certificate,
    )


def is_engines(rule: AnyOf) -> bool:
    """Return True if the engine has a rule itself."""
    return all(isinstance(term, Exact | Speculative) for term in rule.terms)


def dial_of(extra_args: object) -> object:
    """Return the dial in a request's extra arguments; None without one."""
    return extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
