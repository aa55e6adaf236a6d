"""Answers of the target and of settings on prompts that nothing was chosen on, and the losses
between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from lenience.certification.question import CertifyConfig
from lenience.certification.sequential_tests import SettingResult, Test
from lenience.core.errors import InputError
from lenience.core.files import digest, read_json, write_json
from lenience.core.progress import Progress
from lenience.decoding.certified import (
    LostAnswer,
    LostSample,
    TriedSetting,
    heads_of,
    setting_without_paths,
    stop_without_paths,
    without_paths,
)
from lenience.decoding.options import Decoding
from lenience.decoding.pair import Pair
from lenience.rules.registry import parse_rule
from lenience.runs.answers import Answer, Answers
from lenience.runs.journal import open_run
from lenience.runs.record import check_prompts, describe
from lenience.runs.uses import Draw, fresh, locked, note_uses
from lenience.tasks import Sample, Task, ungradable

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENOUGH = 50
"""On how many prompts the target's accuracy is looked at."""
TUNING = 8
"""How many prompts an automatic window is picked on."""


@dataclass
class Calibration:
    """The prompts of one question, and the answers to them; what its folder holds is not decoded
    again."""

    pair: Pair
    task: Task
    config: CertifyConfig
    decoding: Decoding
    """The options that all settings share, where one does not say otherwise."""
    samples: list[Sample]
    folder: Path
    progress: Progress

    def __post_init__(self) -> None:
        self._answers = Answers(self.pair, self.task, self.folder / "answers.jsonl")

    @property
    def decoded(self) -> int:
        """How many answers have been decoded since."""
        return self._answers.decoded

    def chains(self) -> list[list[Decoding]]:
        """The settings that are tested, from strict to lenient."""
        return self.config.chains(self.decoding)

    def answers(self, decoding: Decoding, n: int, phase: str = "") -> list[Answer]:
        """The first n prompts' answers; `phase` is shown while they are decoded."""
        return self._answers.get(decoding, self.samples[:n], self.progress, phase)

    def alone(self, samples: Sequence[Sample]) -> list[Answer]:
        """Answers by the target alone."""
        decoding, phase = replace(self.decoding, rule="target"), "the target alone"
        return self._answers.get(decoding, samples, self.progress, phase)

    def beside(self, decoding: Decoding, lenient: Sequence[Answer]) -> list[Answer | None]:
        """The target's own answers to the first prompts, which a setting has answered; None where
        nothing can be lost whatever it is. The target is asked only where it must be: a greedy
        answer in which nothing was kept by lenience is its own, where the rule goes on as the
        target does, and one that is right is no paired loss."""
        as_target = decoding.temperature == 0 and parse_rule(decoding.rule).goes_on_as_target
        paired = self.config.loss == "paired"
        known: list[Answer | None] = []
        asked = []
        for sample, answer in zip(self.samples, lenient):
            own = as_target and not answer.accepted_lenient
            known.append(answer if own else None)
            if not own and not (paired and answer.correct):
                asked.append(sample)
        by_id = {answer.id: answer for answer in self.alone(asked)}
        return [answer or by_id.get(one.id) for answer, one in zip(known, lenient)]

    def losses(self, decoding: Decoding, n: int, phase: str = "") -> NDArray:
        """[n] in [0, 1], of the target alone against a setting."""
        lenient = self.answers(decoding, n, phase)
        if self.config.loss in ("paired", "net"):
            self._check_target(n)
        rows = zip(self.samples, self.beside(decoding, lenient), lenient)
        return np.array(
            [self._loss(sample, own, answer) if own else 0.0 for sample, own, answer in rows]
        )

    def _loss(self, sample: Sample, alone: Answer, lenient: Answer) -> float:
        """What is lost on one prompt, in [0, 1]."""
        loss = self.config.loss
        if loss == "paired":
            return float(alone.correct and not lenient.correct)
        if loss == "net":
            return (1 + float(alone.correct) - float(lenient.correct)) / 2
        if loss == "disagreement":
            if alone.text == lenient.text:
                return 0.0
            found: tuple[Any, Any] = alone.answer, lenient.answer
            return float(self.task.same(*found, sample) is not True)
        value = self.task.loss(lenient.text, alone.text, sample)
        if not (isinstance(value, int | float) and 0 <= value <= 1):
            what = f"its loss of {sample.id} is {value!r}"
            raise InputError(f"task {self.task.name!r}: {what}; it must be a number in [0, 1]")
        return float(value)

    def _check_target(self, n: int) -> None:
        """Raise InputError where the target is right on none of the prompts, or on too few of the
        first n."""
        alone = self.alone(self.samples[: min(n, ENOUGH)])
        right, least = sum(one.correct for one in alone), self.config.least_accuracy
        if not right and not any(one.correct for one in self.alone(self.samples)):
            raise InputError(
                f"task {self.task.name!r}: the target answers none of {len(self.samples)} prompts "
                "rightly, so nothing can be lost; look at how answers are found (--answer, "
                "--same), or bound the disagreement (--loss disagreement)"
            )
        if len(alone) >= min(ENOUGH, len(self.samples)) and right < least * len(alone):
            raise InputError(
                f"task {self.task.name!r}: the target answers {right} of {len(alone)} prompts "
                f"rightly, so at most that can be lost, and any decoder would do; {least:.0%} are "
                "asked for: look at how answers are found and at --max-new-tokens, or give "
                "--allow-weak-target"
            )

    def result(self, test: Test, decoding: Decoding, tried: SettingResult) -> TriedSetting:
        """How a setting's test ended; losses and bounds as they are asked for, also of the net
        drop."""
        losses, net = self.losses(decoding, tried.n), self.config.loss == "net"
        lenient = self.answers(decoding, tried.n)
        alone = self.alone(self.samples[: min(tried.n, ENOUGH)])
        bound = test.bound(tried.look, losses)
        lost = (2 * losses - 1).sum() if net else losses.sum()
        return TriedSetting(
            rule=str(decoding.rule),
            window=int(decoding.window),
            options=decoding.differing(self.decoding),
            n=tried.n,
            losses=round(float(lost), 9),
            upper_bound=2 * bound - 1 if net else bound,
            passed=tried.passed,
            hopeless=tried.futile,
            tokens_per_pass=tokens_per_pass(lenient),
            accuracy=float(np.mean([one.correct for one in lenient])),
            target_accuracy=float(np.mean([one.correct for one in alone])),
            tokens_per_second=self.config.speeds.get(str(decoding)),
        )

    def decoding_of(self, row: TriedSetting) -> Decoding:
        """The whole decoder that was tried."""
        return self.decoding.with_options({"rule": row.rule, "window": row.window, **row.options})

    def binds(self, decoding: Decoding) -> dict[str, Any]:
        """All that a certificate of a setting depends on."""
        return {
            **self.pair.binding(decoding),
            **decoding.bound(),
            "task": self.task.name,
            "reads": self.task.reads,
            "data": data_hash(self.samples),
        }

    def lost_samples(self, decoding: Decoding, n: int) -> list[LostSample]:
        """The prompts on which quality was lost, with both answers."""
        at_par = 0.5 if self.config.loss == "net" else 0.0
        losses, lenient = self.losses(decoding, n).tolist(), self.answers(decoding, n)
        rows = zip(self.samples, losses, self.beside(decoding, lenient), lenient)
        return [
            LostSample(
                id=sample.id,
                prompt=sample.prompt,
                reference=sample.reference,
                loss=loss,
                target=LostAnswer(text=alone.text, answer=alone.answer),
                lenient=LostAnswer(text=lenient.text, answer=lenient.answer),
            )
            for sample, loss, alone, lenient in rows
            if loss > at_par and alone
        ]


def tokens_per_pass(answers: Iterable[Answer]) -> float:
    """New tokens per pass of the target over all answers."""
    counted = [(answer.tokens, answer.target_passes) for answer in answers]
    return sum(tokens for tokens, _ in counted) / max(1, sum(passes for _, passes in counted))


def data_hash(samples: Iterable[Sample]) -> str:
    """Prompts, by their contents."""
    return digest([[sample.id, sample.prompt, sample.reference] for sample in samples])


@contextmanager
def calibration(
    pair: Pair, task: Task, folder: Path, config: CertifyConfig, *, use: str, progress: Progress
) -> Iterator[Calibration]:
    """Check what is asked, and pick and record the prompts: the same ones whenever the same is
    asked. Raises InputError where another process is at the same question."""
    check_question(pair, task, folder, config)
    asked = _asked(pair, task, config, use)
    key = digest(asked, 6, sort_keys=True)
    place = folder / use / key
    tuned = TUNING if config.decoding.window == "auto" else 0
    with locked(folder):  # two certificates that are made at the same time share no prompt
        samples, tuning = _drawn(
            pair, task, folder, config, Draw(key, config.num_prompts() + tuned)
        )
        max_new_tokens = check_prompts(
            pair, task, [*samples, *tuning], config.options.get("max_new_tokens")
        )
        record = {**asked, "data": data_hash(samples)}
        if (place / "asked.json").exists():
            open_run(place, record, "asked.json")
        for part, what in ((samples, use), (tuning, "window")):
            prompts = [(sample.id, sample.prompt) for sample in part]
            note_uses(folder, pair.target, prompts, use=what, key=key, task=task.known_as)
        open_run(place, record, "asked.json")  # after its prompts are its own, whatever ends it
    decoding = replace(config.decoding, max_new_tokens=max_new_tokens)
    with _alone(place):
        if tuned:
            most_lenient = config.chains(decoding)[-1][-1]
            window = _picked_window(pair, most_lenient, tuning, place / "window.json")
            decoding = replace(decoding, window=window)
        yield Calibration(
            pair, task, config, decoding, samples=samples, folder=place, progress=progress
        )


def check_question(pair: Pair, task: Task, folder: Path, config: CertifyConfig) -> None:
    """Raise InputError for what is wrong with a question, before any work."""
    for chain in config.chains():
        for decoding in chain:
            pair.check(decoding)
    _check_run(task, folder)
    if config.loss == "task" and not task.has_loss:
        mend = "see docs/your-own-task.md"
        raise InputError(f"task {task.name!r}: has no loss(text, target_text, sample); {mend}")


def _drawn(
    pair: Pair, task: Task, folder: Path, config: CertifyConfig, draw: Draw
) -> tuple[list[Sample], list[Sample]]:
    """The prompts to calibrate on, and those to pick a window on."""
    settings = [decoding for chain in config.chains() for decoding in chain]
    heads = {head.path: head for one in settings for head in heads_of(one.rule, one.stop)}
    draw = replace(
        draw,
        split=config.split,
        seed=config.decoding.seed,
        ids=config.ids,
        heads=tuple(heads.values()),
    )
    samples = fresh(pair.target, task, folder, draw)
    n = len(samples) - (TUNING if config.decoding.window == "auto" else 0)
    if n < 1:
        raise InputError(
            f"window auto: needs {TUNING} fresh prompts of its own, and there are {len(samples)}; "
            "give a number"
        )
    unknown = any(sample.reference is None for sample in samples[:n])
    if unknown and config.loss in ("paired", "net"):
        mend = "--loss disagreement needs none"
        raise InputError(f"task {task.name!r}: has prompts without a reference; {mend}")
    if config.loss in ("paired", "net"):
        _refuse_ungradable(task, samples[:n])
    return samples[:n], samples[n:]


def _refuse_ungradable(task: Task, samples: Sequence[Sample]) -> None:
    """Raise InputError where some references cannot be right: nothing could be lost on them."""
    if wrong := ungradable(task, samples):
        first = wrong[0]
        raise InputError(
            f"task {task.name!r}: {len(wrong)} of {len(samples)} prompts have references to which "
            f"no answer is the same, such as {first.reference!r} of {first.id}; leave them out "
            "(--ids), or look at --answer and --same"
        )


def _picked_window(pair: Pair, decoding: Decoding, samples: list[Sample], path: Path) -> int:
    """The window that was picked once for a question."""
    if not path.exists():
        options = {name: value for name, value in vars(decoding).items() if name != "window"}
        window = pair.pick_window([sample.prompt for sample in samples], **options)
        write_json(path, {"window": window})
    return int(read_json(path)["window"])


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    try:
        held = FileLock(place / "lock").acquire(timeout=0)
    except Timeout:
        mend = "another process is at the same question; ask again when it has ended"
        raise InputError(f"{place}: {mend}") from None
    with held:
        yield


def _asked(pair: Pair, task: Task, config: CertifyConfig, use: str) -> dict[str, Any]:
    """What makes a question the same: not where models and heads lie, but what they are."""
    question = config.to_json()
    chains = config.chains()
    by_rules, given = chains[: len(config.rules)], chains[len(config.rules) :]
    question["rules"] = [[without_paths(str(one.rule)) for one in chain] for chain in by_rules]
    if given:
        question["settings"] = [
            [str(setting_without_paths(one)) for one in chain] for chain in given
        ]
    question["thresholds"] = []
    question["stop"] = stop_without_paths(config.decoding.stop)
    binds = [pair.binding(decoding) for chain in chains for decoding in chain]
    asked = describe(pair, task, use=use, question=question, binds=binds)
    asked["models"] = {role: {**model, "name": ""} for role, model in asked["models"].items()}
    return {key: value for key, value in asked.items() if key not in ("versions", "pair")}


def _without_digest(name: str) -> str:
    """A task's name without the digest of its file."""
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
