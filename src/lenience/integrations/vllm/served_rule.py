"""The rule of a server, and the changes that a request may ask for. No vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from lenience.core.errors import InputError
from lenience.core.records import Record
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.lossless import is_lossless, refuse_forbidden
from lenience.rules.parsing import parse_spec
from lenience.rules.strict import Exact, Speculative
from lenience.runs.certificate import (
    Certificate,
    is_certified,
    read_certificate,
    run_of,
)

KEY = "lenience"
"""Key in additional_config, and in a request's vllm_xargs."""
VARIABLE = "LENIENCE_RULE"
LONGEST = 1000
"""Maximum number of characters in a request's dial."""
ANY = "*"
"""Entry of `allow` that allows any rule."""


class PluginOptions(Record):
    """The options under "lenience" in --additional-config."""

    rule: str
    allow: tuple[str, ...] = ()
    """Rules that a request may choose although they are more lenient; "*" for any."""
    max_unjudged: float = Field(default=0.05, ge=0, le=1)
    """Largest share of windows that may be decoded strictly because vLLM gave no draft
    distribution."""
    steps: bool = False
    """True if answers carry the rule's decision on each window."""


@dataclass(frozen=True)
class ServedRule:
    """The rule of a server, and the changes that its requests may ask for."""

    rule: AnyOf
    allow: tuple[AnyOf, ...]
    allow_any: bool
    max_unjudged: float
    steps: bool
    certificate: Certificate | None = None
    """Certificate of the rule, which binds the server and its requests."""

    def rule_for(self, dial: object) -> AnyOf:
        """Return the rule of a request by its dial: "exact", a spec, or a threshold for the
        server's rule; None for the server's rule itself. Raises InputError for a rule that is more
        lenient than the server allows."""
        if dial is None:
            return self.rule
        if len(str(dial)) > LONGEST:
            raise InputError(
                f"{KEY} {str(dial)[:40]!r}…: is longer than {LONGEST} characters"
            )
        rule = self._with_threshold(dial) if _is_number(dial) else _parsed(str(dial))
        refuse_forbidden(rule)
        if is_lossless(rule):
            return rule
        for known in (self.rule, *(() if self.certificate else self.allow)):
            if rule == known:  # with its heads as they were checked
                return known
        if self.certificate:
            raise InputError(
                f"{KEY} {dial!r}: this server's rule is certified at one setting; send "
                "no dial, or exact"
            )
        if _stricter(rule, self.rule):
            return _with_heads(rule, self.rule)
        if self.allow_any:
            return rule
        others = "".join(f", {_shown(other)}" for other in self.allow)
        raise InputError(
            f"{KEY} {dial!r}: may be more lenient than the server's rule "
            f"{_shown(self.rule)}; it takes exact, a stricter threshold of that "
            f"rule{others}"
        )

    @property
    def judges(self) -> bool:
        """Return True if any request may have a rule that vLLM lacks."""
        return self.allow_any or not all(map(is_vllms, (self.rule, *self.allow)))

    @property
    def rules(self) -> tuple[AnyOf, ...]:
        return self.rule, *self.allow

    def _with_threshold(self, dial: Any) -> AnyOf:
        """Return the server's rule at another threshold."""
        if sum(term.has_threshold for term in self.rule.terms) != 1:
            raise InputError(
                f"{KEY} {dial!r}: is a threshold, and the server's rule {self.rule} "
                "has none, or "
                "several; name a whole rule"
            )
        return self.rule.with_terms(lambda term: _at(term, float(dial)))


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
    certificate = _certificate(known.rule) if is_certified(known.rule) else None
    rule = (
        parse_spec(known.rule)
        if certificate is None
        else _certified(certificate, known.rule)
    )
    return ServedRule(
        rule=rule,
        allow=tuple(map(parse_spec, allowed)),
        allow_any=ANY in known.allow,
        max_unjudged=known.max_unjudged,
        steps=known.steps,
        certificate=certificate,
    )


def _certified(certificate: Certificate, rule: str) -> AnyOf:
    """Return the certified rule, with head paths in the run's present folder."""
    found = certificate.decoder(run_of(rule)).rule
    assert isinstance(found, AnyOf)
    return found


def _certificate(rule: str) -> Certificate:
    """Return the certificate of "certified:RUN". Raises InputError if it certifies nothing."""
    certificate = read_certificate(run_of(rule))
    if not certificate.holds:
        raise InputError(
            f"rule {rule}: nothing is certified there "
            f"({certificate.withdrawn or certificate.reason}); name exact to decode "
            "strictly"
        )
    return certificate


@lru_cache(maxsize=256)
def _parsed(spec: str) -> AnyOf:
    """Return the rule of a request's spec, cached so that its heads are loaded once."""
    return parse_spec(spec)


def is_vllms(rule: AnyOf) -> bool:
    """Return True if vLLM has a rule itself."""
    return all(isinstance(term, Exact | Speculative) for term in rule.terms)


def dial_of(extra_args: object) -> object:
    """Return the dial in a request's vllm_xargs; None without one."""
    return extra_args.get(KEY) if isinstance(extra_args, Mapping) else None


def _is_number(dial: object) -> bool:
    try:
        float(str(dial))
    except ValueError:
        return False
    return not isinstance(dial, bool)


def _at(term: Term, threshold: float) -> Term:
    """Return a term at another threshold; a term without a threshold stays as it is."""
    if not term.has_threshold:
        return term
    (changed,) = term.with_thresholds([threshold])
    if "head" in vars(term):
        vars(changed)["head"] = vars(term)["head"]
    return changed


def _stricter(rule: AnyOf, than: AnyOf) -> bool:
    """Return True if `rule` is `than` at thresholds that are equal or stricter."""
    if len(rule.terms) != len(than.terms) or rule.with_terms(_open) != than.with_terms(
        _open
    ):
        return False
    pairs = [(a, b) for a, b in zip(rule.terms, than.terms) if a.has_threshold]
    return all(_strictest(a, b) == _bound(a) for a, b in pairs)


def _with_heads(rule: AnyOf, like: AnyOf) -> AnyOf:
    """Return a rule with the heads that another of its form has loaded."""
    for term, other in zip(rule.terms, like.terms):
        if "head" in vars(other):
            vars(term)["head"] = vars(other)["head"]
    return rule


def _shown(rule: AnyOf) -> str:
    """Return a rule's spec without the folders of its heads."""
    return str(
        rule.with_terms(lambda term: term.relocated(lambda path: Path(path).name))
    )


def _open(term: Term) -> Term:
    """Return a term at a fixed threshold, to compare terms except for their thresholds."""
    return _at(term, 0.5)


def _strictest(a: Term, b: Term) -> float:
    """Return the stricter threshold of two settings of a term."""
    return _bound(a.with_thresholds([_bound(a), _bound(b)])[0])


def _bound(term: Any) -> float:
    """Return the threshold in force, which may be the default of a judge's head."""
    threshold: float = term.bound if term.heads else term.threshold
    return threshold
