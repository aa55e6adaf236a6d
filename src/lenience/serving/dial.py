"""The rule of a server, and the changes that a request may ask for: the dial."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lenience.certification.certificate import Certificate, read_certificate, run_of
from lenience.core.errors import InputError
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.lossless import is_lossless, refuse_forbidden
from lenience.rules.parsing import parse_spec

KEY = "lenience"
"""Key of the dial in a request."""
LONGEST = 1000
"""Maximum number of characters in a request's dial."""
ANY = "*"
"""Entry of a list of allowed rules that allows any rule."""


@dataclass(frozen=True)
class Dial:
    """The rule of a server, and the changes that its requests may ask for."""

    rule: AnyOf
    allow: tuple[AnyOf, ...] = ()
    """Rules that a request may choose although they are more lenient."""
    allow_any: bool = False
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
        for known in (self.rule, *self.allow):
            if _stricter(rule, known):
                return _with_heads(rule, known)
        if self.allow_any:
            return rule
        others = "".join(f", {shown(other)}" for other in self.allow)
        raise InputError(
            f"{KEY} {dial!r}: may be more lenient than the server's rule "
            f"{shown(self.rule)}; it takes exact, a stricter threshold of that "
            f"rule{others}"
        )

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


def certified_rule(certificate: Certificate, rule: str) -> AnyOf:
    """Return the certified rule, with head paths in the run's present folder."""
    found = certificate.decoder(run_of(rule)).rule
    assert isinstance(found, AnyOf)
    return found


def holding_certificate(rule: str) -> Certificate:
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
    return all(_is_as_strict(a, b) for a, b in pairs)


def _with_heads(rule: AnyOf, like: AnyOf) -> AnyOf:
    """Return a rule with the heads that another of its form has loaded."""
    for term, other in zip(rule.terms, like.terms):
        if "head" in vars(other):
            vars(term)["head"] = vars(other)["head"]
    return rule


def shown(rule: AnyOf) -> str:
    """Return a rule's spec without the folders of its heads."""
    return str(
        rule.with_terms(lambda term: term.relocated(lambda path: Path(path).name))
    )


def _open(term: Term) -> Term:
    """Return a term at a fixed threshold, to compare terms except for their thresholds."""
    return _at(term, 0.5)


def _is_as_strict(a: Any, b: Any) -> bool:
    """Return True if a term's threshold is equal to another's, or stricter. Judges compare logits,
    which tell probabilities close to 1 apart."""
    if hasattr(a, "least_logit"):
        return bool(a.least_logit >= b.least_logit)
    return _strictest(a, b) == _bound(a)


def _strictest(a: Term, b: Term) -> float:
    """Return the stricter threshold of two settings of a term."""
    return _bound(a.with_thresholds([_bound(a), _bound(b)])[0])


def _bound(term: Any) -> float:
    """Return the threshold in force, which may be the default of a judge's head."""
    threshold: float = term.bound if term.heads else term.threshold
    return threshold
