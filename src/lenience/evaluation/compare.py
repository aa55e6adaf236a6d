"""Compare decoders on the same prompts: quality and speed, paired, with intervals."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lenience.certification.certificate import refuse_certified
from lenience.core.errors import InputError
from lenience.core.files import alone, built_in, digest, read_json, write_json
from lenience.core.progress import Progress, silent
from lenience.core.protocols import TrainedPart
from lenience.decoding.checks import share_vocabulary
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.machine import machine
from lenience.decoding.options import given_options
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import task_for
from lenience.drafting.model import DraftModel
from lenience.drafting.stops import Fixed
from lenience.drafting.trees.shapes import Chain
from lenience.evaluation.human import GRADING_FILES, with_grades
from lenience.evaluation.quality import Quality, beside_target, qualities
from lenience.evaluation.table import (
    ComparedSetting,
    Example,
    Frontier,
    allocation,
    table,
)
from lenience.rules.baselines import BASELINES, is_baseline, served
from lenience.rules.settings import expand
from lenience.runs.answers import Answer, Answers, for_task
from lenience.runs.journal import Journal, open_run
from lenience.runs.ledger import Ledger
from lenience.runs.record import describe
from lenience.runs.uses import aligned, check_prompts, fitted_in, prompt_digest
from lenience.tasks import Sample, Task, take

DEFAULT_WINDOWS = (2, 4, 8, 16, 32)
GROWING = ("rules", "settings", "heads")
"""Fields of compare.json that grow as decoders join a comparison."""
REPORTED_PROMPTS = 3
"""Number of prompts whose answers are kept for the report, token by token."""


@dataclass(frozen=True)
class CompareConfig:
    """Decoders and samples of a comparison."""

    rules: tuple[str, ...] = ()
    """Rules to compare, one decoder each. "all" stands for a grid of every rule, and with it a
    judge named without a threshold runs at several. The target alone and, if the pair has a draft,
    the draft alone are always compared."""
    settings: tuple[str, ...] = ()
    """Whole decoders, such as "judge:run/judge@0.99; window=16; stop=confidence:0.4"."""
    windows: tuple[int, ...] = DEFAULT_WINDOWS
    """Windows to choose from, for decoders that name no window."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Decoding options shared by all decoders; a setting overrides them."""
    limit: int | None = None
    """Number of test samples; None for all."""
    tuning: int = 20
    """Number of samples on which windows are chosen: the last of the training split."""
    timed: int = 50
    """Number of test samples that are also decoded one by one, for the timings."""
    repeats: int = 3
    """Number of timed repeats; medians are reported."""
    batch_size: int = 32
    """Number of samples per batch while quality is measured."""
    home: Path | None = None
    """Folder for the record of used prompts; by default the user's data folder."""

    def __post_init__(self) -> None:
        for name in ("rule", "window"):
            if name in self.options:
                raise InputError(f"options: give {name} in {name}s, or in a setting")
        for name in ("tuning", "timed", "repeats", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be 1 or more")
        if not self.rules and not self.settings:
            raise InputError("rule: name one, or a setting")
        for window in self.windows:
            Decoder(window=window)  # raises InputError for a wrong window

    @cached_property
    def shared(self) -> Decoder:
        """Return the decoder of the shared options."""
        return Decoder.of(self.options)

    @cached_property
    def named(self) -> list[dict[str, Any]]:
        """Return the options that each decoder sets: its rule, and those of its setting. Raises
        InputError for a wrong option."""
        refuse_certified(self.rules)
        named = list(map(given_options, self.settings))
        refuse_certified(str(entry["rule"]) for entry in named)
        entries = list[dict[str, Any]]()
        for rule in expand(self.rules, self.shared.temperature):
            entries.append({"rule": rule})
        entries += [entry for entry in named if entry not in entries]
        for entry in entries:
            if entry.get("window") == "auto":
                raise InputError(
                    f"setting {entry['rule']}: leave window out to have it chosen, or "
                    "give a number"
                )
            if self.shared.with_options(entry).tree.choices():
                raise InputError(
                    f"setting {entry['rule']}: tree auto cannot be compared; give a "
                    "setting for each tree"
                )
        return entries

    def decoders(
        self, shared: Decoder, baselines: Sequence[str] = ()
    ) -> list[Compared]:
        """Return all decoders without duplicates, the baselines first. Options that a decoder does
        not set come from `shared`."""
        entries = [{"rule": rule} for rule in baselines]
        entries += [entry for entry in self.named if entry not in entries]
        found = list[Compared]()
        for entry in entries:
            found.append(Compared(shared.with_options(entry), "window" in entry))
        return found

    def heads(self) -> dict[str, TrainedPart]:
        """Return the trained parts of all decoders, by path. Raises InputError for a wrong
        option."""
        return _by_path(self.decodings())

    def check(self) -> None:
        """Raise InputError for settings that are wrong whatever the models."""
        for head in self.heads().values():
            _ = head.head  # raises if it is missing or broken

    def decodings(self) -> list[Decoder]:
        """Return the decoders before the windows are chosen. Raises InputError for a wrong
        option."""
        return [compared.decoder for compared in self.decoders(self.shared)]


@dataclass(frozen=True)
class Compared:
    """A decoder in a comparison; its window is chosen unless the decoder names it."""

    decoder: Decoder
    names_window: bool

    def to_json(self) -> dict[str, Any]:
        return {"names_window": self.names_window, **self.decoder.to_json()}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Compared:
        """Return the object whose `to_json` is `value`."""
        options = {}
        for name, option in value.items():
            if name != "names_window":
                options[name] = option
        return cls(Decoder.of(options), value["names_window"])


@dataclass(frozen=True)
class Estimate:
    """Estimated time of the remaining work, from an answer and a batch of answers decoded
    beforehand."""

    seconds: float
    answers: int


def compare(
    pair: Pair,
    task: Task,
    config: CompareConfig,
    out: Path | None = None,
    progress: Progress = silent,
) -> Frontier:
    """Decode test samples with every decoder and return the figures.

    The target alone is always compared, and the draft alone if the pair has one. A decoder without
    a window runs at two windows: its fastest on other samples, and the widest, which shows the gain
    if only target passes cost time. The strict rule also runs at each judge's window. Quality and
    passes are measured on batched samples. Speed is measured on some samples, one by one, with the
    decoders taking turns so that changes of the machine's speed affect all alike.

    With `out`, finished answers are kept there and a second call resumes. Raises InputError for a
    wrong rule, task or folder.
    """
    run = Comparison(pair, task, config, progress)
    with run.folder(out) as folder:
        return run.carry_out(folder, progress)


class Comparison:
    """A comparison of decoders of one pair on one task. Raises InputError for an impossible
    setting, an overlong prompt, or a reference that is missing for some samples only."""

    def __init__(
        self, pair: Pair, task: Task, config: CompareConfig, progress: Progress = silent
    ):
        task = task_for(pair, task, progress)
        self.pair = pair
        self.task = task
        self.config = config
        chooses = len(config.windows) > 1
        self.samples = take(task, "test", config.limit)
        self.tuning_samples = (
            take(task, "train", None)[-config.tuning :] if chooses else []
        )
        check_prompts(pair, task, [*self.samples, *self.tuning_samples])
        self.shared = for_task(config.shared, config.options, task)
        both_alone = pair.draft is not None and share_vocabulary(pair.models)
        baselines = BASELINES if both_alone else ("target",)
        self.decoders = config.decoders(self.shared, baselines)
        self.heads = self._fingerprints([asked.decoder for asked in self.decoders])
        for compared in self.decoders:
            pair.check(compared.decoder)
        lacking = [sample.id for sample in self.samples if sample.reference is None]
        self.agreement = task.scores_by_reference and len(lacking) == len(self.samples)
        """True if answers are compared with the target's own, because no sample has a reference."""
        if task.scores_by_reference and lacking and not self.agreement:
            raise InputError(
                f"task {task.name!r}: sample {lacking[0]} has no reference, and "
                "accuracy needs references for all samples; without any, agreement "
                "with the target is measured"
            )

    def _fingerprints(self, decoders: Sequence[Decoder]) -> dict[str, str]:
        """Return the fingerprints of the parts that the decoders' specs merely name: of heads, by
        path, and of servers, by rule."""
        heads = _by_path(decoders).items()
        found = {path: head.head.fingerprint for path, head in heads}
        for decoder in decoders:
            if served(decoder.rule) is not None:
                candidate = self.pair.binding(decoder)["candidate"]
                found[str(decoder.rule)] = digest(candidate, sort_keys=True)
        return found

    @contextmanager
    def folder(self, out: Path | None) -> Iterator[Path]:
        """Provide the folder for finished work: `out`, or a temporary folder. Decoders of an
        earlier comparison in `out` join this one. Raises InputError if its other settings
        differ."""
        if out is None:
            with TemporaryDirectory() as temporary:
                yield Path(temporary)
            return
        self._take_in(out)
        open_run(out, self._asked(), "compare.json")
        with alone(out, "comparison"):
            yield out

    def _asked(self) -> dict[str, Any]:
        """Return the content of compare.json."""
        config = self.config
        shared = self.shared.to_json()
        shared = {
            name: shared[name] for name in shared if name not in ("rule", "window")
        }
        return describe(
            self.pair,
            self.task,
            split="test",
            rules=[str(compared.decoder.rule) for compared in self.decoders],
            settings=[compared.to_json() for compared in self.decoders],
            windows=list(config.windows),
            tuning=config.tuning,
            heads=self.heads,
            generation_config=self.pair.target.generation_settings(),
            **shared,
        )

    def _take_in(self, out: Path) -> None:
        """Join the decoders of an earlier comparison in a folder with those of this one. Raises
        InputError if anything else differs."""
        path = out / "compare.json"
        windows = out / "windows.json"
        before = read_json(path) if path.exists() else {}
        if "settings" not in before:
            return
        open_run(
            out, self._asked() | {name: before[name] for name in GROWING}, path.name
        )
        had = list(map(Compared.of, before["settings"]))
        heads = self._fingerprints([compared.decoder for compared in had])
        changed = [head for head in heads if heads[head] != before["heads"].get(head)]
        if changed:
            is_server = is_baseline(changed[0])
            what = "is another server or request" if is_server else "was trained again"
            raise InputError(f"{out}: {changed[0]} {what} since; name another folder")
        self.decoders = [
            *had,
            *(compared for compared in self.decoders if compared not in had),
        ]
        self.heads = heads | self.heads
        if windows.exists() and "decoders" not in (chosen := read_json(windows)):
            write_json(
                windows, chosen | {"decoders": [compared.to_json() for compared in had]}
            )
        write_json(path, before | {name: self._asked()[name] for name in GROWING})

    def carry_out(self, folder: Path, progress: Progress) -> Frontier:
        """Choose windows, decode and time all settings. Return the figures, which are also written
        to frontier.json in the folder."""
        write_json(
            folder / "prompts.json",
            {sample.id: sample.prompt for sample in self.samples},
        )
        answers = Answers(
            self.pair, self.task, folder / "compare.jsonl", self.config.batch_size
        )
        self._note_uses()
        settings = self._settings(folder / "windows.json", progress)
        rows = self._answers(settings, answers, progress)
        quality = self._quality(settings, rows, progress)
        timings = self._timings(settings, folder / "timings.jsonl", progress)
        examples = []
        for i, sample in enumerate(self.samples[:REPORTED_PROMPTS]):
            examples.append(
                Example(
                    id=sample.id,
                    prompt=sample.prompt,
                    reference=sample.reference,
                    results=[row[i] for row in rows],
                )
            )
        shared = self.shared.to_json()
        shared = {
            name: shared[name] for name in shared if name not in ("rule", "window")
        }
        frontier = Frontier.read(
            {
                **describe(self.pair, self.task, split="test"),
                **shared,
                "machine": machine(self.pair),
                "measure": "agreement" if self.agreement else self.task.measure,
                "grading": self.task.grading,
                "learned_from": self._learned_from(),
                "rows": table(settings, rows, timings, self.shared, quality),
                "allocation": allocation(settings, rows, timings, quality),
                "examples": examples,
            },
            "comparison",
        )
        frontier = with_grades(folder, frontier)
        write_json(folder / "frontier.json", frontier.to_json())
        return frontier

    def estimate(self, folder: Path | None) -> Estimate:
        """Return the estimated number of remaining answers and their time."""
        drafting = []
        for compared in self.decoders:
            if not compared.decoder.alone:
                drafting.append(compared)
        chosen = [compared for compared in drafting if self._chooses_window(compared)]
        settings = len(self.decoders) + len(chosen)
        timed = min(self.config.timed, len(self.samples)) * self.config.repeats
        kept = known = 0
        new = self.decoders
        if folder is not None:
            new = self._not_chosen_yet(folder / "windows.json")
            kept = sum(1 for _ in Journal(folder / "compare.jsonl"))
            times = {}
            for line in Journal(folder / "timings.jsonl"):
                times[line["id"]] = len(line["seconds"])
            known = 0 if new else self.config.repeats * sum(times.values())
        racing = sum(compared in new for compared in chosen)
        tuned = racing * len(self.config.windows) * (1 + len(self.tuning_samples))
        one_by_one = tuned + max(0, settings * timed - known)
        together = max(0, settings * len(self.samples) - kept)
        if not one_by_one + together:
            return Estimate(0.0, 0)
        alone, among_others = self._seconds_an_answer()
        seconds = one_by_one * alone + together * among_others
        return Estimate(seconds, one_by_one + together)

    def _not_chosen_yet(self, path: Path) -> list[Compared]:
        """Return the decoders that a folder's windows.json lacks."""
        if not path.exists():
            return self.decoders
        before = read_json(path).get("decoders")
        done = self.decoders if before is None else list(map(Compared.of, before))
        return [compared for compared in self.decoders if compared not in done]

    def _seconds_an_answer(self) -> tuple[float, float]:
        """Return the seconds per answer, alone and in a batch, of strict decoding with the draft
        model, if any. Most settings take about as long."""
        shared = self.shared
        alone = self.pair.draft is None
        decoder = shared.for_target() if alone else shared.for_strict()
        decoder = decoder.with_parts(
            drafter=DraftModel(), tree=Chain(), stop=Fixed(), window=8
        )
        batch = [sample.prompt for sample in self.samples[: self.config.batch_size]]
        self.pair.generate(batch[0], decoder)  # warm-up
        began = time.perf_counter()
        self.pair.generate(batch[0], decoder)
        middle = time.perf_counter()
        self.pair.generate_batch(batch, decoder, batch_size=len(batch))
        return middle - began, (time.perf_counter() - middle) / len(batch)

    def _note_uses(self) -> None:
        """Record the prompts as used, in the ledger and in the run folders of the compared heads. A
        certificate must not use prompts on which a choice was made."""
        used = {"window": self.tuning_samples, "comparison": self.samples}
        lm = self.pair.target
        task = self.task
        runs = {fitted_in(head) for head in self.config.heads().values()}
        for run in (None, *runs):
            ledger = Ledger(run, self.pair.fingerprints, self.config.home)
            for use, samples in used.items():
                ledger.note(lm, samples, use=use, key="compare", task=task)

    def _learned_from(self) -> int:
        """Return the number of prompts on which a compared head or the draft was trained."""
        fitted = (*self.config.heads().values(), *aligned(self.pair.draft))
        known = {content for head in fitted for content in head.head.prompts or ()}
        encoded = (self.pair.target.encode(sample.prompt) for sample in self.samples)
        return sum(prompt_digest(ids) in known for ids in encoded)

    def _chooses_window(self, compared: Compared) -> bool:
        return len(self.config.windows) > 1 and not compared.names_window

    def _settings(self, path: Path, progress: Progress) -> list[ComparedSetting]:
        """Return each decoder at its fastest and at the widest window, or at the window that it
        names, and the strict rule at the judges' windows too. Choices are made once and kept in
        `path`."""
        settings: dict[Decoder, ComparedSetting] = {}
        done: list[Compared] = []
        if path.exists():
            before = read_json(path)
            done = list(map(Compared.of, before.get("decoders", ()))) or self.decoders
            for entry in before["settings"]:
                decoder = Decoder.of(entry["decoding"])
                settings[decoder] = ComparedSetting(decoder, entry["why"])
        choosing = []
        for compared in self.decoders:
            if compared in done:
                continue
            decoder = compared.decoder
            if decoder.alone:
                decoder = replace(decoder, window=0)
            elif self._chooses_window(compared):
                choosing.append(decoder)
                continue
            elif not compared.names_window:
                decoder = replace(decoder, window=self.config.windows[0])
            settings.setdefault(decoder, ComparedSetting(decoder))
        if choosing:
            self._add_chosen(settings, self._fastest(choosing, progress))
        chosen = []
        for setting in settings.values():
            chosen.append({"decoding": setting.decoder.to_json(), "why": setting.why})
        decoders = [compared.to_json() for compared in self.decoders]
        write_json(path, {"settings": chosen, "decoders": decoders})
        return list(settings.values())

    def _add_chosen(
        self, settings: dict[Decoder, ComparedSetting], fastest: Mapping[Decoder, int]
    ) -> None:
        """Add the settings of decoders whose windows were chosen."""
        widest = max(self.config.windows)
        for decoder, window in fastest.items():
            at = replace(decoder, window=window)
            settings.setdefault(at, ComparedSetting(at, "fastest"))
        for decoder in fastest:
            at = replace(decoder, window=widest)
            settings.setdefault(at, ComparedSetting(at, "widest"))
        choosing = []
        for compared in self.decoders:
            if self._chooses_window(compared):
                choosing.append(compared.decoder)
        strict = next((decoder for decoder in choosing if decoder.is_exact), None)
        for decoder, window in fastest.items():
            if strict is not None and decoder.rule.heads:
                at = replace(strict, window=window)
                settings.setdefault(
                    at, ComparedSetting(at, f"window of {decoder.rule}")
                )

    def _fastest(
        self, decoders: Sequence[Decoder], progress: Progress
    ) -> dict[Decoder, int]:
        """Return the window that gives each decoder the most tokens per second on the tuning
        samples, with all taking turns. The first sample also serves as a warm-up."""
        windows = self.config.windows
        samples = self.tuning_samples
        tried = [
            replace(decoder, window=window)
            for decoder in decoders
            for window in windows
        ]
        tokens = dict.fromkeys(tried, 0)
        seconds = dict.fromkeys(tried, 0.0)
        for decoder in tried:
            self._generate(samples[0], decoder)
        total = len(samples) * len(tried)
        for done, sample in enumerate(samples):
            for each, decoder in enumerate(tried):
                progress("choosing windows", done * len(tried) + each, total)
                out = self._generate(sample, decoder)
                tokens[decoder] += len(out.tokens)
                seconds[decoder] += out.seconds
        progress("choosing windows", total, total)

        def speed(decoder: Decoder) -> float:
            return tokens[decoder] / seconds[decoder]

        return {
            decoder: max(
                windows, key=lambda window: speed(replace(decoder, window=window))
            )
            for decoder in decoders
        }

    def _answers(
        self, settings: Sequence[ComparedSetting], answers: Answers, progress: Progress
    ) -> list[list[Answer]]:
        """Return each setting's answers to the samples, [settings][samples]."""
        n = len(self.samples)
        rows = list[list[Answer]]()
        traced = [sample.id for sample in self.samples[:REPORTED_PROMPTS]]
        total = len(settings) * n
        for number, setting in enumerate(settings):

            def show(phase: str, done: int, _: int, before: int = number * n) -> None:
                progress(phase, before + done, total)

            rows.append(answers.get(setting.decoder, self.samples, show, traced=traced))
        progress("decoding", total, total)
        return rows

    def _quality(
        self,
        settings: Sequence[ComparedSetting],
        rows: Sequence[Sequence[Answer]],
        progress: Progress,
    ) -> list[Quality]:
        """Return the quality of each setting's answers. A grader is queried here."""
        target = [setting.decoder.alone for setting in settings].index("target")
        beside = self.task.beside_target or self.agreement
        if self.task.beside_target:
            progress("grading", 0, len(settings))
        found = []
        for number, answers in enumerate(rows, 1):
            own = rows[target]
            if beside:
                found.append(beside_target(self.task, self.samples, answers, own))
            else:
                found.append(qualities(self.task, [own, answers], 0)[1])
            if self.task.beside_target:
                progress("grading", number, len(settings))
        return found

    def _timings(
        self, settings: Sequence[ComparedSetting], path: Path, progress: Progress
    ) -> list[list[float]]:
        """Return the seconds [timed samples][settings], measured with the settings taking turns. A
        sample is timed again with all settings if a timing is missing or comes from another machine
        or number of repeats: timings taken at different times cannot be compared."""
        samples = self.samples[: self.config.timed]
        repeats = self.config.repeats
        here = {"machine": machine(self.pair), "repeats": repeats}
        journal = Journal(path)
        texts = [str(setting.decoder) for setting in settings]
        known: dict[str, Mapping[str, float]] = {sample.id: {} for sample in samples}
        for line in journal.resume():
            if here.items() <= line.items() and line["id"] in known:
                known[line["id"]] = _by_setting(line["seconds"], texts)
        if not all(set(texts) <= set(seconds) for seconds in known.values()):
            for setting in settings:
                self._generate(samples[0], setting.decoder)  # warm-up
        for done, sample in enumerate(samples):
            progress("timing", done, len(samples))
            if not set(texts) <= set(known[sample.id]):
                known[sample.id] = self._timed(sample, settings, repeats)
                journal.write({"id": sample.id, **here, "seconds": known[sample.id]})
        progress("timing", len(samples), len(samples))
        return [[known[sample.id][text] for text in texts] for sample in samples]

    def _timed(
        self, sample: Sample, settings: Sequence[ComparedSetting], repeats: int
    ) -> dict[str, float]:
        """Return each setting's seconds on a sample: the median over repeats, in which all take
        turns."""
        turns = []
        for _ in range(repeats):
            turns.append(
                [
                    self._generate(sample, setting.decoder).seconds
                    for setting in settings
                ]
            )
        seconds = np.median(turns, 0).round(6).tolist()
        return dict(zip((str(setting.decoder) for setting in settings), seconds))

    def _generate(self, sample: Sample, decoder: Decoder) -> Generation:
        self.pair.reset_prefix_cache()
        return self.pair.generate(sample.prompt, decoder)


def _by_path(decodings: Iterable[Decoder]) -> dict[str, TrainedPart]:
    """Return the trained parts of decoders by path. A part of the built-in pair is keyed by its
    name, wherever the package is installed."""
    heads = [head for decoder in decodings for head in decoder.heads]
    found = dict[str, TrainedPart]()
    for h in heads:
        found[f"built-in {Path(h.path).name}" if built_in(h.path) else h.path] = h
    return found


def _by_setting(seconds: Any, settings: Sequence[str]) -> Mapping[str, float]:
    """Return the seconds by setting in a line of timings.jsonl. Older lines hold a list for the
    first settings."""
    return seconds if isinstance(seconds, dict) else dict(zip(settings, seconds))


def discard(out: Path) -> None:
    """Delete a comparison's files, so that its folder can hold another comparison."""
    for name in (
        "compare.json",
        "compare.jsonl",
        "timings.jsonl",
        "windows.json",
        *GRADING_FILES,
    ):
        (out / name).unlink(missing_ok=True)
