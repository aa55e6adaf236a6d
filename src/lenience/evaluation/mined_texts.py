"""Mined answers for a report: which of their tokens are important (AutoJudge, appendix)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lenience.decoding.response import pieces
from lenience.evaluation.table import MinedText, MinedToken
from lenience.models.lm import LM
from lenience.runs.journal import Journal
from lenience.runs.record import MinedSample, mined_samples, read_run

SHOWN = 3
"""Number of mined answers in a report."""


def mined_texts(lm: LM, run: Path, count: int = SHOWN) -> tuple[MinedText, ...]:
    """Return the `count` mined answers of a run with the most important and harmless mismatches;
    none if nothing is mined, or `lm` has another tokenizer."""
    journal = run / "journal.jsonl"
    if not journal.exists() or read_run(run).tokenizer != lm.tokenizer_fingerprint:
        return ()
    samples = _most_telling(mined_samples(Journal(journal)), count)
    return tuple(_marked(lm, sample) for sample in samples)


def _most_telling(samples: Iterable[MinedSample], count: int) -> list[MinedSample]:
    """Return the samples that have the most of the rarer kind of mismatch."""
    ranked = []
    for sample in samples:
        important = sum(found.important is True for found in sample.mismatches)
        harmless = sum(found.important is False for found in sample.mismatches)
        if important and harmless:
            ranked.append((min(important, harmless), sample))
    ranked.sort(key=lambda item: -item[0])
    return [sample for _, sample in ranked[:count]]


def _marked(lm: LM, sample: MinedSample) -> MinedText:
    """Return a mined answer with its mismatches marked. The answer has the draft's token at a
    harmless mismatch, and the target's at an important one."""
    ids = sample.final_ids
    tokens = []
    for text in pieces(lm, ids):
        tokens.append(MinedToken(text=text))
    for found in sample.mismatches:
        kept = found.target_token if found.important else found.draft_token
        other = found.draft_token if found.important else found.target_token
        at = found.position
        if found.important is None or at >= len(ids) or ids[at] != kept:
            continue
        tokens[at] = MinedToken(
            text=tokens[at].text,
            kind="important" if found.important else "harmless",
            other=lm.decode([other], special=True),
        )
    prompt = lm.decode(sample.prompt_ids)
    return MinedText(prompt=prompt.strip(), tokens=tuple(tokens))
