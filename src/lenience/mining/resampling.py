"""Soft labels: how often a swap changes the answer when the target continues by sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.progress import Progress, silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.decoding.response import until_stop
from lenience.runs.journal import Journal
from lenience.runs.record import MinedSample, Mismatch, Resample, mined_samples
from lenience.tasks import Sample, Task

TEMPERATURE = 0.6
"""Sampling temperature of the continuations."""
Swap = tuple[MinedSample, Mismatch]


@dataclass(frozen=True)
class Resampling:
    """Settings of the sampled continuations."""

    times: int
    """Number of continuations per swap."""
    max_new_tokens: int
    batch_size: int


def resample(
    pair: Pair,
    task: Task,
    folder: Path,
    samples: Sequence[Sample],
    resampling: Resampling,
    progress: Progress = silent,
) -> None:
    """Sample continuations after each swap that changed the answer of one of `samples`, and record
    in RUN/resamples.jsonl whether the answer stays the same. Recorded continuations are not
    repeated.

    A label from a single greedy continuation is noisy, and noisy labels dominate at a judge's
    strict thresholds.
    """
    journal = Journal(folder / "resamples.jsonl")
    journal.resume()
    by_id = {sample.id: sample for sample in samples}
    swaps = [swap for swap in _important(folder, pair) if swap[0].id in by_id]
    left = _left(folder, swaps, resampling.times)
    total = resampling.times * len(swaps)
    ready = total - len(left)
    progress("resampling", ready, total)
    for number, group in groupby(left, key=lambda labelled: labelled[0]):
        drawn = Decoder(
            temperature=TEMPERATURE,
            seed=number,
            max_new_tokens=resampling.max_new_tokens,
            stop_strings=task.stop_strings,
        )
        of_number = [swap for _, swap in group]
        prompts = [swap[0].prompt_ids + _swapped(*swap) for swap in of_number]
        outs = pair.as_completed(prompts, drawn, batch_size=resampling.batch_size)
        for i, out in outs:
            mined, mismatch = swap = of_number[i]
            response = _swapped(*swap) + out.tokens
            _, text = until_stop(pair.target, response, task.stop_strings)
            same = _same(task, text, mined, by_id[mined.id])
            line = Resample(
                id=mined.id, position=mismatch.position, number=number, same=same
            )
            journal.write(line.to_json())
            ready += 1
            progress("resampling", ready, total)


def _left(folder: Path, swaps: Sequence[Swap], times: int) -> list[tuple[int, Swap]]:
    """Return the continuations that are still missing, each with its number."""
    done = {(draw.id, draw.position, draw.number) for draw in resamples(folder)}
    found = list[tuple[int, Swap]]()
    for number in range(1, times + 1):
        for swap in swaps:
            if (swap[0].id, swap[1].position, number) not in done:
                found.append((number, swap))
    return found


def _same(task: Task, text: str, mined: MinedSample, sample: Sample) -> bool:
    own: Any = mined.answers.target
    return task.same(task.answer(text, sample), own, sample) is True


def _important(folder: Path, pair: Pair) -> Iterator[Swap]:
    """Yield the swaps that changed the answer, except swaps to an EOS, after which the target
    cannot continue."""
    for mined in mined_samples(Journal(folder / "journal.jsonl")):
        for mismatch in mined.mismatches:
            if mismatch.important and mismatch.draft_token not in pair.target.eos_ids:
                yield mined, mismatch


def _swapped(mined: MinedSample, mismatch: Mismatch) -> list[int]:
    """Return the response up to a mismatch, with the draft's token there."""
    return [*mined.final_ids[: mismatch.position], mismatch.draft_token]


def resamples(folder: Path) -> Iterator[Resample]:
    """Yield the records in RUN/resamples.jsonl."""
    journal = Journal(folder / "resamples.jsonl")
    for number, record in journal.numbered():
        yield Resample.read(record, f"{journal.path}, line {number}")


def shares_harmless(folder: Path) -> list[float]:
    """Return a soft label for each labelled mismatch, in the journal's order: the share of its
    continuations, the greedy one included, that leave the answer unchanged. Mismatches that were
    mined as harmless have 1. Raises InputError if nothing was resampled."""
    verdicts: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for draw in resamples(folder):
        if draw.same is not None:
            verdicts[draw.id, draw.position].append(draw.same)
    if not verdicts:
        fix = f"lenience mine --out {folder} --resamples 4 does"
        raise InputError(f"{folder}: nothing was resampled; {fix}")
    shares = []
    for mined in mined_samples(Journal(folder / "journal.jsonl")):
        for mismatch in mined.mismatches:
            if mismatch.important is not None:
                drawn = (
                    verdicts[mined.id, mismatch.position] if mismatch.important else []
                )
                all_of_them = [not mismatch.important, *drawn]
                shares.append(sum(all_of_them) / len(all_of_them))
    return shares
