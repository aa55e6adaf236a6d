"""What a server and a request ask of the plugin, without vLLM: which rule, and how much a request
may change it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import Field

from lenience.core.errors import InputError
from lenience.core.records import Record
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.registry import is_lossless, parse_spec, refuse_forbidden

KEY = "lenience"
"""Of additional_config, and of a request's vllm_xargs."""
VARIABLE = "LENIENCE_RULE"


class Options(Record):
    """What stands under "lenience" in --additional-config."""

    rule: str
    allow: tuple[str, ...] = ()
    """Rules that a request may ask for although they are more lenient."""
    max_unjudged: float = Field(default=0.05, ge=0, le=1)
    """The largest share of windows that may be left to strict decoding because the rule could not
    be asked."""


@dataclass(frozen=True)
class Asked:
    """The rule that a server decodes by, and what its requests may ask for."""

    rule: AnyOf
    allow: tuple[AnyOf, ...]
    max_unjudged: float

    def rule_for(self, dial: object) -> AnyOf:
        """The rule of a request whose dial is "exact", a spec, or a threshold for the server's own
        rule; None leaves it as it is. Raises InputError for one that is more lenient than the
        server allows."""
        if dial is None:
            return self.rule
        rule = self._with_threshold(dial) if _is_number(dial) else parse_spec(str(dial))
        if is_lossless(rule) or rule in (self.rule, *self.allow) or _stricter(rule, self.rule):
            return rule
        others = "".join(f", {other}" for other in self.allow)
        raise InputError(
            f"{KEY} {dial!r}: may be more lenient than the server's rule {self.rule}; it takes "
            f"exact, a stricter threshold of that rule{others}"
        )

    def _with_threshold(self, dial: Any) -> AnyOf:
        """The server's rule at another threshold."""
        if sum(term.has_threshold for term in self.rule.terms) != 1:
            raise InputError(
                f"{KEY} {dial!r}: is a threshold, and the server's rule {self.rule} has none, or "
                "several; name a whole rule"
            )
        return self.rule.with_terms(lambda term: _at(term, float(dial)))


def read(additional: object) -> Asked | None:
    """What the server's --additional-config or LENIENCE_RULE asks for; None where neither does.
    Raises InputError where it cannot be done, or where LENIENCE_FORBID=1 forbids it."""
    options = additional.get(KEY) if isinstance(additional, Mapping) else None
    named = os.environ.get(VARIABLE)
    if options is None and not named:
        return None
    if options is not None and named:
        raise InputError(f"{VARIABLE} {named}: --additional-config names a rule too; give one")
    given = {"rule": named} if options is None else options
    server = _read(json.dumps(given, sort_keys=True))
    for rule in (server.rule, *server.allow):
        refuse_forbidden(rule)
    return server


@lru_cache
def _read(options: str) -> Asked:
    where = f'--additional-config "{KEY}"'
    content = json.loads(options)
    if not isinstance(content, dict):
        raise InputError(f'{where}: must be an object, such as {{"rule": "topk:3"}}')
    known = Options.read(content, where, "docs/vllm.md lists what it takes")
    rule, *allow = map(parse_spec, (known.rule, *known.allow))
    return Asked(rule, tuple(allow), known.max_unjudged)


def dial_of(extra_args: object) -> object:
    """What a request's vllm_xargs ask for; None where they ask for nothing."""
    return extra_args.get(KEY) if isinstance(extra_args, Mapping) else None


def _is_number(dial: object) -> bool:
    try:
        float(str(dial))
    except ValueError:
        return False
    return not isinstance(dial, bool)


def _at(term: Term, threshold: float) -> Term:
    """A term at a threshold, where it has one."""
    if not term.has_threshold:
        return term
    again: Any = replace
    changed: Term = again(term, threshold=threshold)
    return changed


def _stricter(rule: AnyOf, than: AnyOf) -> bool:
    """Whether a rule is the other at thresholds as strict or stricter."""
    if len(rule.terms) != len(than.terms) or rule.with_terms(_open) != than.with_terms(_open):
        return False
    pairs = [(a, b) for a, b in zip(rule.terms, than.terms) if a.has_threshold]
    return all(_strictest(a, b) == _bound(a) for a, b in pairs)


def _open(term: Term) -> Term:
    """A term without its threshold, to be compared with others."""
    return _at(term, 0.5)


def _strictest(a: Term, b: Term) -> float:
    """The stricter threshold of two settings of a term."""
    return _bound(a.with_thresholds([_bound(a), _bound(b)])[0])


def _bound(term: Any) -> float:
    """The threshold that holds, which a judge's head may hold."""
    threshold: float = term.bound if term.threshold is None else term.threshold
    return threshold
