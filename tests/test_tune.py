"""Tuning: races against speeds that are known, and certificates of what won them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_certify import Echo

from lenience import InputError
from lenience.certification.certificate import TriedSetting, read_certificate
from lenience.certification.certify import _Outcomes
from lenience.certification.question import CertifyConfig
from lenience.certification.races import (
    HEATS,
    HEATS_OF_ENGINES,
    Budget,
    Race,
    RaceResult,
    Turns,
)
from lenience.certification.speeds import Speeds, Timed
from lenience.certification.tune import (
    Races,
    TuneConfig,
    _Choice,
    _fast,
    drafters_for,
    read_drafters,
    tune,
)
from lenience.cli.tables import gained, print_passed, print_races
from lenience.core.errors import RunError
from lenience.core.progress import silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs
from lenience.rules.parsing import parse_rule
from lenience.runs.journal import Journal


class Clock:
    """Decodes in seconds that are known: each setting's speed, and on some prompts its luck."""

    def __init__(self, speeds: dict[str, float], luck: dict[tuple[str, str], float]):
        self.speeds, self.luck, self.asked = speeds, luck, list[tuple[str, str]]()

    def generate(self, prompt: str, decoder: Decoder) -> SimpleNamespace:
        setting = str(decoder.with_options({"max_new_tokens": 256}))
        if decoder.max_new_tokens == 256:  # not a warm-up
            self.asked.append((prompt, setting))
        speed = self.speeds[setting] * self.luck.get((prompt, setting), 1)
        return SimpleNamespace(tokens=[1] * 60, seconds=60 / speed)

    def by_engine(self, decoders: list[Decoder]) -> list[list[Decoder]]:
        return [decoders]

    def reset_prefix_cache(self) -> None:
        pass


def test_a_race_finds_the_fastest_of_each_group_and_tells_its_speed_in_the_final(
    tmp_path: Path,
) -> None:
    groups = [
        [Decoder.of(rule=rule, window=window) for window in (2, 4, 8, 16)]
        for rule in ("exact", "topk:2")
    ]
    speeds = {
        str(one): 100.0 + 10 * i for group in groups for i, one in enumerate(group)
    }
    prompts = [f"p{i}" for i in range(12)]
    # five times as fast while others drop out, never in the final
    lucky = str(groups[1][3])
    heats = sum(n for n, _ in HEATS)
    luck = {(prompt, lucky): 5.0 for prompt in prompts[:heats]}
    clock = Clock(speeds, luck)
    race = Race(clock, tmp_path, "here", prompts)  # type: ignore[arg-type]
    won = race.run(groups, Budget())
    assert [one.setting for one in won] == [str(group[3]) for group in groups]
    assert [one.tokens_per_second for one in won] == pytest.approx([130, 130])
    finalists = {setting for prompt, setting in clock.asked if prompt == "p11"}
    assert len(finalists) < len(speeds), "slow ones have dropped out"
    turns = [prompt for prompt, _ in clock.asked]
    assert turns == sorted(turns, key=prompts.index), "all take turns on each prompt"


class Engines(Clock):
    """A clock whose windows need engines of their own. It knows the order in which they started."""

    def __init__(self, speeds: dict[str, float]):
        super().__init__(speeds, {})
        self.started = list[int]()

    def by_engine(self, decoders: list[Decoder]) -> list[list[Decoder]]:
        windows = sorted({int(decoder.window) for decoder in decoders})
        return [[d for d in decoders if d.window == window] for window in windows]

    def generate(self, prompt: str, decoder: Decoder) -> SimpleNamespace:
        if self.started[-1:] != [decoder.window]:
            self.started.append(int(decoder.window))
        return super().generate(prompt, decoder)


GROUPS = [[Decoder.of(rule="exact", window=0)]] + [
    [Decoder.of(rule=rule, window=window) for window in (2, 4, 8, 16)]
    for rule in ("exact", "topk:2")
]
SPEEDS = {str(d): 100.0 - abs(8 - int(d.window)) for group in GROUPS for d in group}


def test_each_engine_starts_once_a_heat_and_serves_all_its_settings(
    tmp_path: Path,
) -> None:
    engines = Engines(SPEEDS)
    race = Race(engines, tmp_path, "here", [f"p{i}" for i in range(12)])  # type: ignore[arg-type]
    won = race.run(GROUPS, Budget())
    assert [Decoder.parse(one.setting).window for one in won] == [0, 8, 8]
    assert engines.started == [0, 2, 4, 8, 16, 0, 8]
    heat, _ = HEATS_OF_ENGINES[0]
    asked = [prompt for prompt, setting in engines.asked if "window=2" in setting]
    assert asked == [f"p{i}" for i in range(heat) for _ in ("exact", "topk:2")]
    engines.asked.clear()
    assert race.run(GROUPS, Budget()) == won and not engines.asked, "timed once"


def test_a_race_that_was_cut_goes_on_with_the_next_engine(tmp_path: Path) -> None:
    class Dies(Engines):
        def generate(self, prompt: str, decoder: Decoder) -> SimpleNamespace:
            if decoder.window == 8:
                raise KeyboardInterrupt
            return super().generate(prompt, decoder)

    prompts = [f"p{i}" for i in range(12)]
    with pytest.raises(KeyboardInterrupt):
        Race(Dies(SPEEDS), tmp_path, "here", prompts).run(GROUPS, Budget())  # type: ignore[arg-type]
    engines = Engines(SPEEDS)
    Race(engines, tmp_path, "here", prompts).run(GROUPS, Budget())  # type: ignore[arg-type]
    assert engines.started == [8, 16, 0, 8]


def test_no_engine_starts_for_which_no_minutes_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes 60 s here; windows 2 and 4 fit into three minutes, 8 into none."""
    now = 0.0
    monkeypatch.setattr("lenience.certification.races.time.monotonic", lambda: now)

    class Slow(Engines):
        def generate(self, prompt: str, decoder: Decoder) -> SimpleNamespace:
            nonlocal now
            now += 60 if self.started[-1:] != [decoder.window] else 0
            return super().generate(prompt, decoder)

    engines = Slow(SPEEDS)
    budget = Budget(3)
    prompts = [f"p{i}" for i in range(12)]
    won = Race(engines, tmp_path, "here", prompts).run(GROUPS, budget)  # type: ignore[arg-type]
    assert engines.started == [0, 2, 4, 0, 4]
    assert {d.window for d in budget.late} == {8, 16} and len(budget.late) == 4
    assert [Decoder.parse(one.setting).window for one in won] == [0, 4, 4]


def test_what_did_not_race_is_named_and_races_with_more_minutes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = RaceResult(setting="exact; window=0", tokens_per_second=1.0)
    late = Races(
        machine="here",
        alone=one,
        strict=one,
        lenient=[],
        late=["window 8, drafter model"],
        minutes=3,
    )
    print_races(late)
    said = capsys.readouterr().err
    assert "did not race: window 8, drafter model: the 3 minutes were used up" in said
    assert late.is_short_of(4) and not late.is_short_of(3)
    assert not late.model_copy(update={"late": []}).is_short_of(4)


def test_a_group_without_minutes_is_named(tmp_path: Path) -> None:
    groups = [*GROUPS, [Decoder.of(rule="topk:3", window=32)]]
    speeds = {**SPEEDS, str(groups[-1][0]): 1.0}
    race = Race(Engines(speeds), tmp_path, "here", ["p"] * 12)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="--minutes 1e-09: were used up before topk:3"):
        race.run(groups, Budget(1e-9))


def test_prompts_are_timed_in_whole_batches(tmp_path: Path) -> None:
    class Batches(Clock):
        def generate_batch(
            self, prompts: list[str], decoder: Decoder, batch_size: int
        ) -> list[SimpleNamespace]:
            assert batch_size == len(prompts) == 3
            if decoder.max_new_tokens == 256:
                asked.append(list(prompts))
            return [SimpleNamespace(tokens=[1] * 5) for _ in prompts]

    asked: list[list[str]] = []
    turns = Turns(
        Batches({}, {}),  # type: ignore[arg-type]
        tmp_path / "told",
        "here",
        [f"p{i}" for i in range(8)],
        batch_size=3,
    )
    setting = Decoder.of(window=4)
    (timed,) = turns.take([setting], "timing").values()
    assert asked == [["p0", "p1", "p2"], ["p3", "p4", "p5"]]
    assert timed.tokens == [15, 15] and len(timed.seconds) == 2


def test_engines_run_there_and_back(tmp_path: Path) -> None:
    """So that a machine that slows down steadily slows all alike."""

    class Slowing(Engines):
        def generate(self, prompt: str, decoder: Decoder) -> SimpleNamespace:
            out = super().generate(prompt, decoder)
            return SimpleNamespace(tokens=out.tokens, seconds=1 + len(self.asked) / 100)

    settings = [Decoder.of(window=window) for window in (2, 4, 8)]
    engines = Slowing(dict.fromkeys(map(str, settings), 1.0))
    turns = Turns(engines, tmp_path / "told", "here", [f"p{i}" for i in range(8)])  # type: ignore[arg-type]
    timed = turns.take(settings, "timing")
    assert engines.started == [2, 4, 8, 4, 2]
    speeds = [timed[setting].tokens_per_second for setting in settings]
    assert speeds == pytest.approx([speeds[0]] * 3)
    assert all(len(one.tokens) == 8 for one in timed.values())
    assert turns.known(settings) == list(timed.values())


def test_what_is_clearly_slower_than_a_stricter_setting_is_left_out() -> None:
    speeds = [8, 9, 12, 11, 10, 15, 14]
    chain = [
        RaceResult(setting=str(i), tokens_per_second=speed)
        for i, speed in enumerate(speeds)
    ]
    lossless = RaceResult(setting="exact", tokens_per_second=10)
    assert [one.setting for one in _fast(lossless, chain)] == ["1", "2", "3", "5", "6"]
    assert _fast(lossless, chain[:2]) == [], "nothing is as fast as what loses nothing"
    nearly = RaceResult(setting="7", tokens_per_second=9.8)
    assert _fast(lossless, [*chain[:2], nearly]) == [chain[1], nearly], (
        "unlucky in the race"
    )


def test_the_last_of_a_chain_with_the_most_tokens_per_pass_is_the_best() -> None:
    def row(rule: str, tokens: float, passed: bool) -> TriedSetting:
        numbers = {
            "window": 8,
            "n": 9,
            "losses": 0.0,
            "upper_bound": 0.1,
            "accuracy": 1.0,
        }
        found = {"hopeless": False, "tokens_per_pass": tokens, "target_accuracy": 1.0}
        return TriedSetting(rule=rule, passed=passed, **numbers, **found)

    one = [row("exact", 2, True), row("kl:0.1", 3, True), row("kl:0.4", 6, False)]
    other = [row("topk:2", 2.5, True), row("topk:3", 4, False)]
    assert _Outcomes([other, one]).best == one[1]
    assert _Outcomes([other[1:]]).best is None


def test_what_may_be_the_fastest_is_timed_anew_and_leniency_has_to_pay() -> None:
    """What is clearly slower by the race is not, but for what is lossless; within three hundredths
    of the fastest, what is lossless is as fast."""
    strict, *lenient = (
        Decoder.parse(rule) for rule in ("exact", "kl:0.1", "kl:0.4", "topk:2")
    )
    raced = dict(zip(map(str, (strict, *lenient)), (10.0, 17.5, 20.0, 16.9)))

    def chosen(passed: list[Decoder], *speeds: float) -> Decoder:
        """Where those of them that take turns have these speeds."""
        known = iter(speeds)

        def take(settings, phase, progress):
            assert settings == choice.perhaps_fastest(passed)
            return {
                one: Timed(
                    setting=str(one), tokens=[60] * 2, seconds=[80 / speed, 40 / speed]
                )
                for one, speed in zip(settings, known, strict=True)
            }

        turns: Any = SimpleNamespace(take=take)
        choice = _Choice(raced, str(strict), turns, silent)
        return choice.fastest(passed)

    assert chosen([strict, *lenient], 10, 12, 11) == lenient[0], (
        "the last takes no turns"
    )
    assert chosen([lenient[0]]) == lenient[0], "alone it takes none"
    passed = [strict, *lenient[:2]]
    assert chosen(passed, 97.1, 100, 99) == strict
    assert chosen(passed, 96.9, 100, 99) == lenient[0], "but no more than once"
    assert chosen(passed, 50, 99, 100) == lenient[1], (
        "only what is lossless is taken for as fast"
    )


def test_how_many_times_as_fast_is_told_with_an_interval_over_the_same_prompts() -> (
    None
):
    """Where each prompt has the same ratio nothing is unsure, however much prompts differ; where
    few prompts decide, the interval has both sides of one."""
    seconds = [0.5, 4.0, 1.0, 2.5, 0.25, 3.0]
    slow = Timed(setting="a", tokens=[60] * 6, seconds=seconds)
    fast = Timed(setting="b", tokens=[60] * 6, seconds=[one / 1.5 for one in seconds])
    assert fast.times(slow) == pytest.approx((1.5, 1.5, 1.5))
    assert str(fast.times(slow)) == "1.50 (1.50–1.50) times"
    mixed = Timed(setting="c", tokens=[60] * 6, seconds=[0.25, 8.0, 0.5, 5.0, 0.1, 1.0])
    times = mixed.times(slow)
    assert times.value == pytest.approx(sum(seconds) / 14.85)
    assert times.low < 1 < times.high


@pytest.mark.parametrize("n", [5, 13])
def test_the_interval_has_the_true_ratio_as_often_as_it_says(n: int) -> None:
    """Seconds of lognormal prompts, and a ratio that differs from prompt to prompt; 95 % are meant,
    and a plain percentile interval has 84 % of so few as five."""
    generator, inside, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        seconds = generator.lognormal(0, 0.3, n)
        slow = Timed(setting="a", tokens=[60] * n, seconds=(seconds * 1.2).tolist())
        other = seconds * generator.lognormal(0, 0.3, n)
        fast = Timed(setting="b", tokens=[60] * n, seconds=other.tolist())
        _, low, high = fast.times(slow)
        inside += low <= 1.2 / np.exp(0.3**2 / 2) <= high
    assert 0.92 <= inside / trials <= 0.98


@pytest.mark.parametrize(
    ("rule", "window", "seconds", "begins"),
    [
        (
            "judge:run/judge@0.9",
            4,
            0.5,
            "judge@0.9 at a window of 4 makes 120 tokens/s: 6.00 (6.00–6.00) times ",
        ),
        (
            "judge:run/judge@0.9",
            4,
            2.0,
            "Nothing is gained over the fastest strict decoding. judge",
        ),
        (
            "judge:run/judge@0.9",
            4,
            4.0,
            "Nothing is gained over the fastest strict decoding. judge",
        ),
        (
            "judge:run/judge@0.9",
            4,
            None,
            "These prompts show neither a gain nor a loss over the fastest strict",
        ),
        (
            "exact",
            4,
            1.0,
            "Strict decoding is the fastest that is certified. exact at a window of 4 ",
        ),
        (
            "exact",
            4,
            4.0,
            "Nothing is gained over the target alone. exact at a window of 4 makes 15 ",
        ),
        (
            "exact",
            0,
            3.0,
            "Nothing is gained: the target alone is the fastest that is certified (20 ",
        ),
        (None, 4, 1.0, "Nothing is gained: nothing is certified"),
    ],
)
def test_what_is_gained_is_told_as_far_as_it_is_sure(
    rule: str | None, window: int, seconds: float | None, begins: str
) -> None:
    def timed(setting: str, *each: float) -> Timed:
        return Timed(setting=setting, tokens=[60] * 4, seconds=list(each))

    strict, alone = timed("exact", *[1.0] * 4), timed("exact; window=0", *[3.0] * 4)
    unsure = (0.6, 1.5, 0.9, 1.1)
    speeds = Speeds(
        machine="known",
        certified=timed(rule or "", *(unsure if seconds is None else [seconds] * 4)),
        strict=strict,
        alone=alone,
        passed=[],
    )
    certified = rule and tried(rule, window)
    certificate = SimpleNamespace(certified=certified, max_drop=0.01, confidence=0.95)
    said = gained(SimpleNamespace(certificate=certificate, speeds=speeds))  # type: ignore[arg-type]
    assert said.startswith(begins)
    if rule and window:
        assert "times the target alone" in said
        assert said.endswith(
            "over 4 prompts), at a loss of at most 1.00% with 95% confidence"
        )


def tried(rule: str, window: int) -> TriedSetting:
    counts: dict[str, Any] = {
        "n": 4,
        "losses": 0.0,
        "upper_bound": 0.01,
        "tokens_per_pass": 2.0,
    }
    outcome = {
        "passed": True,
        "hopeless": False,
        "accuracy": 1.0,
        "target_accuracy": 1.0,
    }
    return TriedSetting(rule=rule, window=window, **counts, **outcome)


def test_what_passed_is_told_the_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr("lenience.cli.tables.say", said.append)
    print_passed([])
    assert not said
    settings = {
        "exact; window=0": 3.0,
        "judge:run/judge@0.9; window=16": 0.5,
        "exact": 1.0,
    }
    print_passed(
        [
            Timed(setting=one, tokens=[60] * 4, seconds=[each] * 4)
            for one, each in settings.items()
        ]
    )
    assert said[0].endswith(
        "timed again on 4 prompts, in tokens/s: judge@0.9 (window 16) 120, exact "
        "(window 8) 60, "
        "the target alone 20"
    )


@pytest.fixture(scope="module")
def task(llama: Pair) -> Echo:
    return Echo(llama)


@pytest.fixture
def run(llama: Pair, tmp_path: Path) -> Path:
    """A run folder with a judge and a stop of random weights."""
    folder, generator = tmp_path / "run", torch.Generator().manual_seed(1)
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    weight = torch.randn(width, generator=generator) / 4
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints).save(folder / "judge")
    inputs = Inputs(("draft",), ("previous",))
    stop = torch.randn(llama.draft.hidden_size, generator=generator) / 9
    Head(stop, 0.0, inputs, 0.5, llama.fingerprints, role="stop").save(folder / "stop")
    (folder / "uses.jsonl").touch()
    return folder


def config(run: Path, max_drop: float = 0.9) -> TuneConfig:
    question = CertifyConfig(
        (f"judge:{run / 'judge'}",),
        max_drop=max_drop,
        thresholds=(0.8, 0.4),
        limit=60,
        horizon=60,
    )
    stops = ("fixed", f"head:{run / 'stop'}@0.5")
    return TuneConfig(question, windows=(2, 4), stops=stops, prompts=16)


def test_what_is_tuned_is_certified_and_decoded_with(
    llama: Pair, task: Echo, run: Path
) -> None:
    made = tune(llama, task, run, config(run))
    certificate = made.certificate
    assert certificate == read_certificate(run)
    tried = [
        Decoder.parse(one.setting) for one in (made.races.alone, made.races.strict)
    ]
    assert [(str(one.rule), one.window == 0) for one in tried] == [
        ("exact", True),
        ("exact", False),
    ]
    first, *later = certificate.tried
    assert first.rule == "exact" and first.losses == 0, "the chain begins losslessly"
    assert all(row.rule.startswith("judge") for row in later)
    certified = certificate.certified
    assert certified is not None and certified.passed
    prompt = task.prompt(3)
    whole = {"rule": certified.rule, "window": certified.window, "max_new_tokens": 12}
    wanted = llama.generate(prompt, **whole, stop=certificate.binds["stop"])
    assert llama.generate(prompt, rule=f"certified:{run}").tokens == wanted.tokens
    uses = [line for line in Journal(run / "uses.jsonl")]
    raced = {line["prompt"] for line in uses if line["use"] == "tuning"}
    assert len(raced) == 16
    assert not raced & {line["prompt"] for line in uses if line["use"] == "calibration"}
    speeds = made.speeds
    assert speeds is not None and speeds.strict.setting == made.races.strict.setting
    assert str(Decoder.parse(speeds.certified.setting).rule) == certified.rule
    again = tune(llama, task, run, config(run))
    assert again.races == made.races and list(Journal(run / "uses.jsonl")) == uses
    assert again.speeds == speeds, "what was timed once stays"


@pytest.mark.parametrize(
    ("race", "anew", "chosen"),
    [
        ((100, 103), (100, 114), "judge"),
        ((100, 130), (100, 102), "exact"),
        ((100, 130), (100, 90), "exact"),
    ],
)
def test_what_passed_is_chosen_from_by_further_prompts(
    llama: Pair,
    task: Echo,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    race: tuple[float, float],
    anew: tuple[float, float],
    chosen: str,
) -> None:
    """The speeds of strict decoding and of judges are known, in the race and after it."""
    turns = dict[str, list[str]]()

    def known(pair, settings, prompts, phase, progress, batch_size):
        turns[phase] = list(prompts)
        speeds = anew if phase == "timing what passed" else race
        timed = dict[Decoder, Timed]()
        for one in dict.fromkeys(settings):
            speed = 50.0 if one.window == 0 else speeds[str(one.rule) != "exact"]
            each = [12] * len(prompts)
            timed[one] = Timed(
                setting=str(one), tokens=each, seconds=[n / speed for n in each]
            )
        return timed

    monkeypatch.setattr("lenience.certification.races.take_turns", known)
    made = tune(llama, task, run, config(run))
    certified, speeds = made.certificate.certified, made.speeds
    assert certified is not None and speeds is not None
    assert certified.rule.split(":")[0] == chosen
    rules = [str(Decoder.parse(one.setting).rule) for one in speeds.passed]
    assert rules[0] == "exact" and rules[1].startswith("judge")
    prompt = task.prompt(3)
    options = {name: getattr(certified, name) for name in ("rule", "window")}
    wanted = llama.generate(prompt, **options, **certified.options, max_new_tokens=12)
    assert llama.generate(prompt, rule=f"certified:{run}").tokens == wanted.tokens
    heats = [f"racing, heat {i}" for i, _ in enumerate(HEATS, 1)]
    phases = [*heats, "racing, final", "timing what passed", "timing"]
    assert [len(turns[phase]) for phase in phases] == [1, 1, 4, 2, 4, 4]
    assert len({prompt for phase in phases for prompt in turns[phase]}) == 16
    turns.clear()
    again = tune(llama, task, run, config(run))
    assert again.certificate == made.certificate and again.speeds == speeds
    assert not turns, "what was timed once stays"
    stricter = tune(llama, task, run, config(run, max_drop=0.3))
    assert stricter.speeds and stricter.speeds.passed == [], (
        "strict decoding alone passed"
    )


def test_where_leniency_loses_too_much_strict_decoding_is_certified(
    llama: Pair, task: Echo, run: Path
) -> None:
    certificate = tune(llama, task, run, config(run, max_drop=0.06)).certificate
    assert certificate.certified is not None
    assert (certificate.certified.rule, certificate.certified.losses) == ("exact", 0)
    prompt = task.prompt(5)
    out = llama.generate(prompt, rule=f"certified:{run}")
    assert out.tokens == llama.generate(prompt, rule="target", max_new_tokens=12).tokens


def test_a_certificate_that_is_withdrawn_is_not_timed(
    llama: Pair, task: Echo, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tune(llama, task, run, config(run))
    withdrawn = made.certificate.model_copy(
        update={"withdrawn": "it lost too much since"}
    )
    monkeypatch.setattr(
        "lenience.certification.tune.certify", lambda *_, **__: withdrawn
    )
    again = tune(llama, task, run, config(run))
    assert again.speeds is None and "nothing is certified" in gained(again)


def test_races_of_another_machine_are_run_again(
    llama: Pair, task: Echo, run: Path
) -> None:
    tune(llama, task, run, config(run))
    (path,) = run.glob("tuning/*/races.json")
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "machine": "another"}))
    assert tune(llama, task, run, config(run)).races.machine == told["machine"]


def test_judges_race_with_the_drafter_that_they_were_mined_with(
    llama: Pair, run: Path
) -> None:
    drafters, judge = (
        read_drafters(["model", "ngram", "ngram>model", "medusa"]),
        f"judge:{run / 'judge'}@0.9",
    )
    assert drafters_for(parse_rule(judge), drafters) == [drafters[0], drafters[2]]
    assert drafters_for(parse_rule("topk:2"), drafters) == drafters
    weight, inputs = (
        torch.zeros(llama.target.hidden_size),
        Inputs(("target",), ("draft",)),
    )
    Head(weight, 0.0, inputs, 0.5, llama.fingerprints).save(run / "anywhere")
    with pytest.warns(
        UserWarning, match="drafter suffix: the judge was mined with drafter model"
    ):
        llama.decoder({"rule": f"judge:{run / 'anywhere'}@0.9", "drafter": "suffix"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama.decoder({"rule": judge})
        llama.decoder(
            {"rule": f"judge:{run / 'anywhere'}@0.9", "drafter": "suffix>model"}
        )
        llama.decoder({"rule": "topk:2", "drafter": "suffix"})


def test_wrong_questions_are_told(llama: Pair, task: Echo, run: Path) -> None:
    for empty in ({"windows": ()}, {"stops": ()}):
        with pytest.raises(InputError, match=f"{next(iter(empty))}: name at least one"):
            TuneConfig(CertifyConfig(("topk",)), **empty)  # type: ignore[arg-type]
    right = config(run)
    for wrong, says in (
        ({"window": 4}, "options: window is chosen by tuning"),
        ({"stop": "fixed"}, "options: stop is chosen by tuning"),
        ({"temperature": 1.0}, "temperature: tune is for greedy decoding"),
    ):
        with pytest.raises(InputError, match=says):
            replace(right, question=replace(right.question, options=wrong))
    for changed, says in (
        ({"prompts": 15}, "prompts 15: must be 16 or more"),
        ({"windows": (0,)}, "window 0: must be 1 or more"),
    ):
        with pytest.raises(InputError, match=says):
            replace(right, **changed)
    with pytest.raises(InputError, match="/nowhere"):
        tune(llama, task, run, replace(right, stops=("head:/nowhere@0.5",)))
    with pytest.raises(InputError, match="rule: name the rules to tune"):
        replace(right, question=CertifyConfig(settings=(("exact",),)))


def test_chains_of_whole_decoders_are_certified_as_they_are_given(
    llama: Pair, task: Echo, run: Path
) -> None:
    """A setting of a chain is decoded with its own window and stop, and bound so."""
    from lenience.certification.certify import certify

    stop = f"head:{run / 'stop'}@0.5"
    chain = ("exact; window=2", f"topk:2; window=3; stop={stop}")
    asked = CertifyConfig(
        settings=(chain,), max_drop=0.9, limit=40, options={"window": 5}
    )
    certificate = certify(llama, task, run, asked)
    certified = certificate.certified
    assert certified is not None
    assert (certified.rule, certified.window, certified.options) == (
        "topk:2",
        3,
        {"stop": stop},
    )
    assert (certificate.binds["window"], certificate.binds["stop"]) == (3, stop)
    assert certified.heads == {str(run / "stop"): "stop"}
    run.rename(run.with_name("moved"))
    there = run.with_name("moved")
    prompt = task.prompt(7)
    options = {"rule": "topk:2", "window": 3, "max_new_tokens": 12}
    wanted = llama.generate(prompt, **options, stop=f"head:{there / 'stop'}@0.5")
    assert llama.generate(prompt, rule=f"certified:{there}").tokens == wanted.tokens
    with pytest.raises(InputError, match="certified with stop"):
        llama.generate(prompt, rule=f"certified:{there}", stop="fixed")
