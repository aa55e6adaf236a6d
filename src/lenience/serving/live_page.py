"""The live page: one prompt, decoded in columns by the target alone, strictly and leniently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from lenience.core.errors import InputError
from lenience.core.templates import ORIGINS, read_template
from lenience.core.types import Step, Trace
from lenience.decoding.response import TextStream
from lenience.models.lm import LM
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.serving.batch import Job
from lenience.serving.service import Service

EXAMPLE_PROMPTS = 6
"""Number of example prompts on the page."""
SLOWED = 20
"""Factor of slow motion that the page begins with on the built-in pair, whose answers take a
fraction of a second."""


class RaceColumn:
    """A column of the page, which turns steps into lines of JSON."""

    def __init__(self, name: str, job: Job, lm: LM):
        self.name = name
        self.job = job
        self._lm = lm
        self._stream = TextStream(lm)
        self._passes = 0
        self._tokens = 0

    def line(self, step: Step) -> dict[str, Any]:
        """Return the tokens of a step with the counts so far. `seconds` is the time of the column's
        own cycles."""
        self._passes += step.target_passes
        self._tokens += len(step.trace)
        tokens = [self._token(entry) for entry in step.trace]
        if step.finish and tokens:
            tokens[-1]["text"] += self._stream.flush()
        return {
            "column": self.name,
            "tokens": tokens,
            "passes": self._passes,
            "count": self._tokens,
            "seconds": self.job.decoding,
            "finish": step.finish,
        }

    def _token(self, entry: Trace) -> dict[str, Any]:
        """Return a token's text, its origin, the judge's score, and the target's own token if that
        is another one."""
        own = entry.alternatives[0][0] if entry.alternatives else entry.token
        return {
            "text": self._stream.push(entry.token),
            "origin": entry.origin,
            "score": entry.score,
            "target": None
            if own == entry.token
            else self._lm.decode([own], special=True),
        }


@dataclass(frozen=True)
class DialStep:
    """A position of the page's dial."""

    dial: str
    """Value of the field `lenience`."""
    label: str
    starts: bool = False
    """True for the position that the page begins with."""


def dial_steps(service: Service) -> list[DialStep]:
    """Return the positions of the dial: exact, and the thresholds that requests may choose,
    strictest first. Without a threshold there are exact and the lenient rule."""
    lenient = service.lenient
    steps = [DialStep("exact", "exact", starts=lenient is None)]
    if lenient is None:
        return steps
    assert isinstance(lenient.rule, AnyOf)
    tunable = [term for term in lenient.rule.terms if term.has_threshold]
    if len(tunable) != 1 or service.decoder.bound_to:
        return [*steps, DialStep(str(lenient.rule), str(lenient.rule), starts=True)]
    term: Any = tunable[0]
    own: float = term.bound if term.heads else term.threshold
    # strictest first, by the term's own order
    allowed = {}
    for each in term.with_thresholds([*term.thresholds(), own]):
        dial = str(lenient.rule.with_terms(partial(_replaced, by=each)))
        if _is_allowed(service, dial):
            allowed[each.threshold] = dial
    labels = told_apart(list(allowed))
    for (threshold, dial), label in zip(allowed.items(), labels):
        steps.append(DialStep(dial, label, starts=threshold == own))
    return steps


def _replaced(term: Term, by: Term) -> Term:
    """Return `by` in place of the term with a threshold."""
    return by if term.has_threshold else term


def _is_allowed(service: Service, dial: str) -> bool:
    try:
        service.dial.rule_for(dial)
    except InputError:
        return False
    return True


def told_apart(numbers: Sequence[float]) -> list[str]:
    """Return numbers with as few digits as tell them apart, and from 1."""
    found = list[str]()
    for number in numbers:
        found.append(_shortest(number, [n for n in numbers if n != number]))
    return found


def _shortest(number: float, others: Sequence[float]) -> str:
    """Return a number with the fewest digits that no other number and not 1 would have."""
    for digits in range(3, 17):
        text = f"{number:.{digits}g}"
        taken = {f"{other:.{digits}g}" for other in (1.0, *others) if other != number}
        if text not in taken:
            return text
    return repr(number)


def live_page(service: Service, needs_key: bool, nonce: str) -> str:
    """Return the page's HTML. `nonce` marks its own script."""
    decoders = {
        "target": "the target alone, one token a pass",
        "strict": str(service.strict.without_paths()),
        "lenient": str(service.lenient.without_paths().rule)
        if service.lenient
        else None,
    }
    built_in = service.pair.name == "built-in"
    steps = dial_steps(service)
    # "<" would end the page's script
    as_json = json.dumps(list(map(asdict, steps))).replace("<", "\\u003c")
    return read_template("live.html").render(
        service=service,
        decoders=decoders,
        steps=steps,
        steps_json=as_json,
        origins=ORIGINS,
        made=service.dial.certificate,
        examples=_examples(built_in),
        slowed=SLOWED if built_in else 1,
        needs_key=needs_key,
        nonce=nonce,
    )


def _examples(built_in: bool) -> list[str]:
    """Return prompts to try: problems of the built-in task for the built-in pair."""
    if not built_in:
        return [
            "Write a short story about a lighthouse keeper who finds a letter.",
            "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
            "List three uses of a paper clip besides holding paper.",
        ]
    from lenience.tasks import WordMath, take

    return [str(sample.prompt) for sample in take(WordMath(), "test", EXAMPLE_PROMPTS)]
