"""Answers and losses of the target and of settings on unused prompts."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lenience.certification.certificate import (
    LostAnswer,
    LostSample,
    TriedSetting,
)
from lenience.certification.labels import Labels
from lenience.certification.prompts import Prompts, check_references
from lenience.certification.question import CertifyConfig
from lenience.certification.reuse import is_same
from lenience.certification.sequential_tests import SettingResult, Test
from lenience.core.errors import InputError
from lenience.core.files import alone, digest, read_json, write_json
from lenience.core.progress import Progress
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import task_for
from lenience.runs.answers import Answer, Answers, for_task, own_values
from lenience.runs.journal import open_run
from lenience.runs.ledger import Attempt, Ledger
from lenience.runs.record import describe
from lenience.runs.uses import check_prompts
from lenience.tasks import Sample, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray


GRADED_AT_ONCE = 32
"""Number of pairs of answers per call of a grader."""
ACCURACY_PROMPTS = 50
"""Number of prompts on which the target's accuracy is measured."""
FEW = 500
"""Number of prompts of which the target must answer one correctly if it may be weak."""


@dataclass
class Calibration:
    """A question with its prompts and their answers. Answers in its folder are not decoded
    again."""

    pair: Pair
    task: Task
    config: CertifyConfig
    decoder: Decoder
    """Decoder with the options that all settings share unless they set their own."""
    prompts: Prompts
    attempt: Attempt
    folder: Path
    progress: Progress

    def __post_init__(self) -> None:
        self._answers = Answers(self.pair, self.task, self.folder / "answers.jsonl")
        self.labels = Labels(self.task, self.config.labels)
        self._stricter = {
            replace(now, window=window): replace(before, window=window)
            for settings in self.chains()
            for before, now in pairwise(settings)
            for window in self.config.windows or (now.window,)
        }
        """Next stricter setting of each setting, whose answers may be the same."""

    @property
    def ledger(self) -> Ledger:
        return self.prompts.ledger

    @property
    def most(self) -> int:
        """Return the number of prompts available."""
        return len(self.prompts.rows)

    @property
    def test(self) -> Test:
        """Return the test of each setting."""
        return self.config.test(self.attempt.share)

    @property
    def decoded(self) -> int:
        """Return the number of answers decoded by this object."""
        return self._answers.decoded

    def chains(self) -> list[list[Decoder]]:
        """Return the chains of settings to test, each from strict to lenient."""
        return self.config.chains(self.decoder)

    def answers(self, decoder: Decoder, n: int, phase: str = "") -> list[Answer]:
        """Return a setting's answers to the first n prompts; `phase` labels the progress."""
        samples = self.prompts.first(self._ahead(n))
        before = self._stricter.get(decoder)
        if before:
            known = self._answers.known(before, samples).values()
            same = [earlier for earlier in known if is_same(earlier, before, decoder)]
            self._answers.adopt(decoder, same)

        def shown(phase: str, done: int, total: int) -> None:
            self.progress(phase, done, self.most)

        return self._get(decoder, samples, phase, shown)[:n]

    def _ahead(self, n: int) -> int:
        """Return the number of prompts to answer if n are needed."""
        size = self.pair.answers_at_a_time
        return max(n, min(self.most, math.ceil(n / size) * size))

    def alone(self, samples: Sequence[Sample], seed: int | None = None) -> list[Answer]:
        """Return the answers of the target alone; `seed`, if given, is the seed of a draw."""
        decoder = self.decoder.for_target()
        if seed is not None:
            decoder = replace(decoder, seed=seed)
        return self._get(decoder, samples, "the target alone", self.progress)

    def _get(
        self,
        decoder: Decoder,
        samples: Sequence[Sample],
        phase: str,
        progress: Progress,
    ) -> list[Answer]:
        """Return the answers to rows; rows that differ only in their ids are decoded once."""
        firsts = dict[str, Sample]()
        for sample in samples:
            firsts.setdefault(_content(sample), sample)
        answers = self._answers.get(decoder, list(firsts.values()), progress, phase)
        by_content = dict(zip(firsts, answers))
        return [by_content[_content(sample)] for sample in samples]

    def beside(
        self, decoder: Decoder, lenient: Sequence[Answer]
    ) -> list[Answer | None]:
        """Return the target's own answer to the prompt of each of a setting's answers; None if
        nothing can be lost on that prompt.

        The target decodes only if needed. A greedy answer without a leniently accepted token is the
        target's own, if the rule continues as the target does. A correct answer is no paired loss.
        """
        as_target = decoder.temperature == 0 and decoder.rule.goes_on_as_target
        paired = self.config.loss == "paired"
        known: list[Answer | None] = []
        asked = []
        for sample, answer in zip(self.prompts.rows, lenient):
            own = as_target and answer.kept_by_lenience == 0
            known.append(answer if own else None)
            if not own and not (paired and answer.correct):
                asked.append(sample)
        own_answers = self.alone(asked, decoder.seed)
        by_id = dict(zip((sample.id for sample in asked), own_answers))
        found = list[Answer | None]()
        for own_answer, row in zip(known, self.prompts.rows):
            found.append(own_answer or by_id.get(row.id))
        return found

    def losses(self, decoder: Decoder, n: int, phase: str = "") -> NDArray:
        """Return the losses [n] in [0, 1] of a setting against the target alone; 0 if a label is
        missing. With several windows, the loss of a draw is the largest over its windows. With
        several draws, a prompt's loss is the mean over its draws."""
        of_draws = [self._largest_loss(draw, n, phase) for draw in self._draws(decoder)]
        return np.mean(of_draws, 0)

    def _largest_loss(self, draw: Decoder, n: int, phase: str = "") -> NDArray:
        """Return the largest losses [n] of one draw over the question's windows."""
        at_windows = [self._losses_of(at, n, phase) for at in self.at_windows(draw)]
        return np.max(at_windows, 0)

    def at_windows(self, decoder: Decoder) -> list[Decoder]:
        """Return a setting at each of the question's windows, the widest first."""
        windows = self.config.windows[::-1] or (decoder.window,)
        return [replace(decoder, window=window) for window in windows]

    def _losses_at(self, decoder: Decoder, n: int) -> NDArray:
        """Return the losses [n] of a setting at its window alone."""
        return np.mean([self._losses_of(draw, n) for draw in self._draws(decoder)], 0)

    def _draws(self, decoder: Decoder) -> list[Decoder]:
        """Return a setting once per draw, with the draw's seed."""
        seeds = range(decoder.seed, decoder.seed + self.config.draws)
        return [replace(decoder, seed=seed) for seed in seeds]

    def _losses_of(self, decoder: Decoder, n: int, phase: str = "") -> NDArray:
        """Return the losses [n] of one draw."""
        lenient = self.answers(decoder, n, phase)
        if self.config.needs_target_right(self.task):
            self._check_target()
        own = self.beside(decoder, lenient)
        if self.config.loss == "task" and self.task.beside_target:
            self._compare_together(own, lenient)
        rows = zip(self.prompts.rows, own, lenient)
        return np.array(
            [
                self._loss(sample, own, answer) if own else 0.0
                for sample, own, answer in rows
            ]
        )

    def _compare_together(
        self, own: Sequence[Answer | None], lenient: Sequence[Answer]
    ) -> None:
        """Let a grader compare all answers in batches; its judgements are cached."""
        rows = zip(lenient, own, self.prompts.rows)
        triples = []
        for answer, target_answer, sample in rows:
            if target_answer:
                triples.append((answer.text, target_answer.text, sample))
        for start in range(0, len(triples), GRADED_AT_ONCE):
            self.task.points(triples[start : start + GRADED_AT_ONCE])
            self.progress(
                "grading", min(start + GRADED_AT_ONCE, len(triples)), len(triples)
            )

    def _loss(self, sample: Sample, alone: Answer, lenient: Answer) -> float:
        """Return the loss on one prompt, in [0, 1]."""
        loss = self.config.loss
        if self.config.needs_references:
            right, kept = self._verdicts(sample, alone, lenient)
            return (
                float(right and not kept)
                if loss == "paired"
                else (1 + right - kept) / 2
            )
        if loss == "disagreement":
            return float(not self._agree(sample, alone, lenient))
        value = self.task.loss(lenient.text, alone.text, sample)
        if not (isinstance(value, int | float) and 0 <= value <= 1):
            what = f"its loss of {sample.id} is {value!r}"
            raise InputError(
                f"task {self.task.name!r}: {what}; it must be a number in [0, 1]"
            )
        return float(value)

    def _verdicts(
        self, sample: Sample, alone: Answer, lenient: Answer
    ) -> tuple[bool, bool]:
        """Return True or False for the target's answer being right, and for the lenient one.
        Without a reference, both are False if the answers agree or the label is missing."""
        if sample.reference is not None:
            return alone.correct, lenient.correct
        if self._agree(sample, alone, lenient) or alone.answer is None:
            return False, False
        labelled = self.labels.of(sample, alone, lenient)
        if labelled is None:
            return False, False
        own, changed = self.task.score(
            [(alone.text, labelled), (lenient.text, labelled)]
        )
        return own.correct, changed.correct

    def _agree(self, sample: Sample, alone: Answer, lenient: Answer) -> bool:
        """Return True if two responses have the same final answer."""
        if alone.text == lenient.text:
            return True
        found: tuple[Any, Any] = lenient.answer, alone.answer
        return self.task.same(*found, sample) is True

    def _check_target(self) -> None:
        """Raise InputError if the target is right on none of the first prompts, or on too few."""
        samples = self.prompts.first(ACCURACY_PROMPTS)
        if self.config.needs_references and any(
            sample.reference is None for sample in samples
        ):
            return
        task = self.task
        right = self._right(samples)
        least = self.config.least_accuracy
        more = self.prompts.first(FEW if not least else ACCURACY_PROMPTS)
        if not right and not self._right(more):
            other = ", or bound the disagreement (--loss disagreement)"
            raise InputError(
                f"task {task.name!r}: {_weak(task, 0, len(more))}, so nothing can be "
                "lost; check how answers are found (--answer, "
                f"--same){'' if task.same_where_wrong else other}"
            )
        if right < least * len(samples):
            raise InputError(
                f"task {task.name!r}: {_weak(task, right, len(samples))}, so at most "
                "that can be "
                f"lost, and any decoder would do; {least:.0%} are required: check how "
                "answers are found and --max-new-tokens, or give --allow-weak-target"
            )

    def _right(self, samples: Sequence[Sample]) -> float:
        """Return the number of samples that the target answers correctly; an answer that is right
        by degree counts in part."""
        return float(own_values(self.task, self.alone(samples)).sum())

    def _looked_at(self) -> list[Answer]:
        """Return the target's answers that measure its accuracy."""
        return self.alone(self.prompts.first(ACCURACY_PROMPTS))

    def result(self, decoder: Decoder, tried: SettingResult) -> TriedSetting:
        """Return the outcome of a setting's test. Losses and bounds of the net loss are mapped back
        to [−1, 1]."""
        losses = self.losses(decoder, tried.n)
        lenient = self.answers(decoder, tried.n)
        bound = self.test.bound(losses)
        return TriedSetting(
            rule=str(decoder.rule),
            window=int(decoder.window),
            windows={
                int(at.window): self._sum(self._losses_at(at, tried.n))
                for at in self.at_windows(decoder)
                if self.config.windows
            },
            options=decoder.differing(self.decoder),
            n=tried.n,
            losses=self._sum(losses),
            paired=self._paired(decoder, tried.n),
            upper_bound=2 * bound - 1 if self.config.loss == "net" else bound,
            passed=tried.passed,
            hopeless=tried.futile,
            tokens_per_pass=tokens_per_pass(lenient),
            accuracy=float(own_values(self.task, lenient).mean()),
            target_accuracy=float(own_values(self.task, self._looked_at()).mean()),
            tokens_per_second=self.config.speeds.get(str(decoder)),
        )

    def _sum(self, losses: NDArray) -> float:
        """Return the sum of losses; net losses are mapped back to [−1, 1]."""
        net = self.config.loss == "net"
        return round(float((2 * losses - 1 if net else losses).sum()), 9)

    def _paired(self, decoder: Decoder, n: int) -> float | None:
        """Return the number of the first n prompts on which the target is right and the setting
        wrong, as a mean over draws; None if the loss needs no references."""
        if not self.config.needs_references:
            return None
        lost = [self._largest_loss(draw, n) == 1 for draw in self._draws(decoder)]
        return int(lost[0].sum()) if len(lost) == 1 else float(np.mean(lost, 0).sum())

    def decoding_of(self, row: TriedSetting) -> Decoder:
        """Return the decoder of a tested setting."""
        return row.decoder(self.decoder)

    def binds(self, decoder: Decoder, n: int) -> dict[str, Any]:
        """Return the facts that a certificate of a setting on the first n prompts binds."""
        windows = self.config.windows
        return {
            **self.pair.binding(decoder),
            **decoder.bound(),
            **({"windows": list(windows)} if windows else {}),
            "task": self.task.name,
            "reads": self.task.reads,
            "data": data_hash(self.prompts.first(n)),
        }

    def lost_samples(self, decoder: Decoder, n: int) -> list[LostSample]:
        """Return the prompts on which quality was lost, with both answers of the first draw that
        lost it."""
        lost: dict[str, LostSample] = {}
        for draw in itertools.chain.from_iterable(
            map(self._draws, self.at_windows(decoder))
        ):
            losses = self._losses_of(draw, n).tolist()
            lenient = self.answers(draw, n)
            rows = zip(self.prompts.rows, losses, self.beside(draw, lenient), lenient)
            for sample, loss, own, answer in rows:
                if loss > self.config.at_par and own and sample.id not in lost:
                    lost[sample.id] = _side_by_side(sample, loss, own, answer)
        return list(lost.values())

    def gained_samples(self, decoder: Decoder, n: int) -> list[LostSample]:
        """Return the prompts on which a setting is right and the target wrong, among those that the
        target has answered."""
        if not self.config.needs_references:
            return []
        samples = self.prompts.first(n)
        target = self.decoder.for_target()
        own = self._answers.known(target, samples)
        rows = zip(samples, self.answers(decoder, n))
        found = list[LostSample]()
        for sample, lenient in rows:
            if sample.id in own and lenient.correct and not own[sample.id].correct:
                found.append(_side_by_side(sample, 0.0, own[sample.id], lenient))
        return found


def _side_by_side(
    sample: Sample, loss: float, alone: Answer, lenient: Answer
) -> LostSample:
    return LostSample(
        id=sample.id,
        prompt=sample.prompt,
        reference=sample.reference,
        loss=loss,
        target=LostAnswer(text=alone.text, answer=alone.answer),
        lenient=LostAnswer(text=lenient.text, answer=lenient.answer),
    )


def _weak(task: Task, right: float, n: int) -> str:
    """Return a phrase that says how seldom the target is right."""
    if task.by_degree:
        return f"the target's {task.measure} is {right / n:.3f} on {n} prompts"
    return (
        f"the target answers {f'{right:g}' if right else 'none'} of {n} prompts rightly"
    )


def tokens_per_pass(answers: Iterable[Answer]) -> float:
    """Return the new tokens per target pass over all answers."""
    counted = [(answer.tokens, answer.target_passes) for answer in answers]
    return sum(tokens for tokens, _ in counted) / max(
        1, sum(passes for _, passes in counted)
    )


def data_hash(samples: Iterable[Sample]) -> str:
    """Return a digest of the samples' ids, prompts and references."""
    return digest([[sample.id, sample.prompt, sample.reference] for sample in samples])


def _content(sample: Sample) -> str:
    """Return a digest of all that a sample's answer and score depend on."""
    return digest(
        [sample.prompt, sample.reference, repr(dict(getattr(sample, "metadata", {})))]
    )


@contextmanager
def calibration(
    pair: Pair,
    task: Task,
    folder: Path,
    config: CertifyConfig,
    *,
    use: str,
    progress: Progress,
) -> Iterator[Calibration]:
    """Check a question, draw its prompts and count the attempt. The same question always gets the
    same prompts. Raises InputError if another process works on the question."""
    task = task_for(pair, task, progress)
    for chain in config.chains():
        for decoder in chain:
            pair.check(decoder)
    check_question(task, folder, config)
    asked = _asked(pair, task, config, use)
    key = digest(asked, 6, sort_keys=True)
    place = folder / use / key
    ledger = Ledger(folder, pair.fingerprints, config.home)
    prompts = Prompts.of(pair, config, task, ledger, key=key, use=use)
    check_prompts(pair, task, prompts.rows)
    check_references(task, config, prompts.rows)
    decoder = for_task(config.decoder, config.options, task)
    open_run(place, asked, "asked.json")
    with alone(place, "question"):
        if config.decoder.window == "auto":
            picked = _picked(pair, config, decoder, prompts, place / "window.json")
            decoder = decoder.with_options(picked)
        attempt = ledger.attempt(key, task, config.split, counts=use == "calibration")
        if use == "calibration":
            warn_of_too_few(config, attempt.share)
        yield Calibration(
            pair,
            task,
            config,
            decoder,
            prompts=prompts,
            attempt=attempt,
            folder=place,
            progress=progress,
        )


def check_question(task: Task, folder: Path, config: CertifyConfig) -> None:
    """Raise InputError for a question that a task or a run cannot answer, before any work."""
    _check_run(task, folder)
    if config.loss in ("paired", "net") and (task.beside_target or task.by_degree):
        how = (
            "are compared with the target's own"
            if task.beside_target
            else "are right by degree"
        )
        other = "task" if task.has_loss else "disagreement"
        raise InputError(f"task {task.name!r}: its answers {how}; give --loss {other}")
    if config.loss == "task" and not task.has_loss:
        fix = "see docs/your-own-task.md"
        if task.beside_target:
            fix = "give --loss disagreement, or a --grader"
        raise InputError(
            f"task {task.name!r}: has no loss(text, target_text, sample); {fix}"
        )


def warn_of_too_few(config: CertifyConfig, share: float) -> None:
    """Warn if the allowed number of prompts cannot certify anything at that share of the error."""
    allowed = config.num_prompts()
    least = config.least_prompts(share)
    if least is None or least > allowed:
        if least is None:
            takes = f"more than the horizon, {config.spent_over:,}; raise --horizon"
        else:
            takes = f"about {least:,}; allow more (--limit)"
        warnings.warn(
            f"{allowed:,} prompts cannot certify a loss of at most "
            f"{config.max_drop:.2%}: even a setting that loses nothing needs {takes}",
            stacklevel=2,
        )


def _picked(
    pair: Pair, config: CertifyConfig, decoder: Decoder, prompts: Prompts, path: Path
) -> dict[str, Any]:
    """Return the window, stop condition and tree that were picked once for a question, on its most
    lenient setting."""
    if not path.exists():
        samples = prompts.for_window()
        last = config.chains(decoder)[-1][-1]
        settled = pair.settle([sample.prompt for sample in samples], last)
        picked = {name: str(getattr(settled, name)) for name in ("stop", "tree")}
        write_json(path, {"window": settled.window, **picked})
    return dict(read_json(path))


def _asked(pair: Pair, task: Task, config: CertifyConfig, use: str) -> dict[str, Any]:
    """Return the identity of a question, with models and heads by content instead of path."""
    question = config.to_json()
    chains = config.chains()
    by_rules = chains[: len(config.rules)]
    given = chains[len(config.rules) :]
    question["rules"] = [
        [str(decoder.without_paths().rule) for decoder in chain] for chain in by_rules
    ]
    if given:
        question["settings"] = [
            [str(decoder.without_paths()) for decoder in chain] for chain in given
        ]
    question["thresholds"] = []
    question["stop"] = str(config.decoder.without_paths().stop)
    if task.stop_strings:
        question.setdefault("stop_strings", list(task.stop_strings))
    if "drafter" in question:
        question["drafter"] = str(config.decoder.without_paths().drafter)
    binds = [pair.binding(decoder) for chain in chains for decoder in chain]
    asked = describe(pair, task, use=use, question=question, binds=binds)
    asked["models"] = {
        role: {**model, "name": ""} for role, model in asked["models"].items()
    }
    # the prompts' format is among the bound facts
    found = dict[str, Any]()
    for key, value in asked.items():
        if key not in ("versions", "pair", "chat"):
            found[key] = value
    return found


def _without_digest(name: str) -> str:
    """Return a task's name without the digest of its file."""
    return name.split(" (")[0]


def _check_run(task: Task, folder: Path) -> None:
    """Refuse a task that has changed since the run was mined."""
    if not (folder / "run.json").exists():
        return
    run = read_json(folder / "run.json")
    now = {"task": task.name, "task_version": task.version}
    same_task = _without_digest(str(run.get("task", ""))) == _without_digest(task.name)
    if same_task and any(run.get(key) != value for key, value in now.items()):
        what = f"has changed since {folder} was mined ({run.get('task')!r})"
        raise InputError(f"task {task.name!r}: {what}; mine it again")
