"""Reuse of a stricter setting's answers by a more lenient setting."""

from __future__ import annotations

from dataclasses import replace

from lenience.decoding.decoder import Decoder
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.judge import Judge, logit
from lenience.runs.answers import Answer

MARGIN = 1e-5
"""Margin for comparing logits in float32."""


def is_same(answer: Answer, strict: Decoder, lenient: Decoder) -> bool:
    """Return True if a stricter setting's answer is also the lenient setting's: they differ only in
    the threshold of one judge, and no rejected token's score reaches the lower threshold. Then all
    verdicts are the same."""
    threshold = _lower_threshold(strict, lenient)
    if threshold is None or answer.closest is None:
        return False
    return logit(answer.closest) < logit(threshold) - MARGIN


def _lower_threshold(strict: Decoder, lenient: Decoder) -> float | None:
    """Return the threshold of the lenient setting's judge, if it is lower and the only difference;
    otherwise None."""
    if replace(strict, rule=lenient.rule) != lenient:
        return None
    first = strict.rule
    second = lenient.rule
    if not (isinstance(first, AnyOf) and isinstance(second, AnyOf)):
        return None
    judges = []
    for rule in (first, second):
        for term in rule.terms:
            if isinstance(term, Judge):
                judges.append(term)
    if len(judges) != 2 or first.with_terms(_open) != second.with_terms(_open):
        return None
    above, below = (judge.bound for judge in judges)
    return below if below < above else None


def _open(term: Term) -> Term:
    return replace(term, threshold=None) if isinstance(term, Judge) else term
