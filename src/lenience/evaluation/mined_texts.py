"""Mined answers for a report, with their important tokens (AutoJudge)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lenience.decoding.response import pieces
from lenience.evaluation.table import MinedText, MinedToken
from lenience.models.lm import LM
from lenience.runs.journal import Journal
from lenience.runs.record import MinedSample, mined_samples, read_run
from lenience.tasks import Task

SHOWN = 3
"""Number of mined answers in a report."""


def mined_texts(
    models: Mapping[str, LM], task: Task, run: Path, count: int = SHOWN
) -> tuple[MinedText, ...]:
    """Return the `count` mined answers of a run with the most important and harmless mismatches.

    There are none if nothing is mined, if the run is of other models or another task, and if its
    labels are not from swaps in the target's answers (by likelihood, or of a policy). Raises
    InputError for a run that cannot be read.
    """
    journal = run / "journal.jsonl"
    if not journal.exists():
        return ()
    about = read_run(run)
    others = about.labels or about.policy or about.task != task.name
    for role, model in about.models.items():
        if role not in models or models[role].fingerprint != model.fingerprint:
            return ()
    if others:
        return ()
    samples = _most_telling(mined_samples(Journal(journal)), count)
    return tuple(_marked(models["target"], sample) for sample in samples)


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
    """Return a mined answer with its mismatches marked. The answer has the drafted token at a
    harmless mismatch, and the target's at an important one."""
    ids = sample.final_ids
    tokens = []
    for text in pieces(lm, ids):
        tokens.append(MinedToken(text=text))
    for found in sample.mismatches:
        at = found.position
        if found.important is None:
            continue
        other = found.draft_token if found.important else found.target_token
        tokens[at] = MinedToken(
            # a special token, or a part of a character, has no text of its own
            text=tokens[at].text or lm.decode([ids[at]], special=True),
            kind="important" if found.important else "harmless",
            other=lm.decode([other], special=True),
        )
    prompt = lm.decode(sample.prompt_ids).strip()
    return MinedText(id=sample.id, prompt=prompt, tokens=tuple(tokens))
