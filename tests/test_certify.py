"""Certificates end to end on tiny models: what is certified against losses counted by hand, prompts
used once, what is bound."""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from conftest import quick
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import beta

import lenience
from lenience import InputError
from lenience.certification import certificate as certified
from lenience.certification import certify as certifying
from lenience.certification.audit import (
    Audit,
    AuditConfig,
    LivePrompt,
    State,
    audit,
    read_logs,
    read_prompts,
)
from lenience.certification.calibration import Calibration, calibration
from lenience.certification.certificate import Certificate, TriedSetting
from lenience.certification.certify import _reason, save
from lenience.certification.question import CertifyConfig
from lenience.certification.sequential_tests import fixed_sequence_test
from lenience.core.files import write_json
from lenience.core.progress import silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.options import names
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.rules.registry import RULES
from lenience.rules.settings import ladder
from lenience.runs.journal import Journal
from lenience.runs.ledger import Ledger
from lenience.runs.uses import (
    Draw,
    check_prompts,
    locked,
    note_uses,
    prompt_digest,
)
from lenience.tasks import Sample, Score, as_task
from lenience.training.annotated import Annotated
from lenience.training.fit import HeadPlan, fit_annotated, fit_run
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers


class Echo:
    """What the target says is right, so that every other final answer is a loss; the answer is the
    last word."""

    name = "echo"
    max_new_tokens = 12

    def __init__(self, pair: Pair, size: int = 160):
        self.size, self.right = size, dict[str, str]()
        prompts = [self.prompt(i) for i in range(size)]
        outs = pair.generate_batch(
            prompts, rule="target", max_new_tokens=self.max_new_tokens, batch_size=32
        )
        self.right = {
            prompt: self.answer(out.text) or "" for prompt, out in zip(prompts, outs)
        }

    @staticmethod
    def prompt(i: int) -> str:
        return f"w{1 + i % 47} w{1 + i // 47 + i % 3} w{5 + i % 7}"

    def samples(self, split: str):
        rows = range(self.size) if split == "train" else range(0, self.size, 4)
        for i in rows:
            yield Sample(f"{split}-{i}", self.prompt(i), self.right.get(self.prompt(i)))

    def answer(self, text: str) -> str | None:
        return text.split()[-1] if text.split() else "nothing"

    def same(self, a: str | None, b: str | None) -> bool | None:
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        return self.same(self.answer(text), sample.reference) is True

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        ours, theirs = text.split(), target_text.split()
        return sum(a != b for a, b in zip(ours, theirs)) / max(1, len(theirs))


@pytest.fixture(scope="module")
def task(llama: Pair) -> Echo:
    return Echo(llama)


TOLD = {
    "certified",
    "max_drop",
    "confidence",
    "n",
    "losses",
    "upper_bound",
    "procedure",
    "binds",
}
"""What the public contract says of a certificate."""


def question(**given) -> CertifyConfig:
    given = {
        "rules": ("topk",),
        "max_drop": 0.3,
        "confidence": 0.9,
        "window": 4,
        "limit": 60,
        **given,
    }
    options = {name: given.pop(name) for name in names() if name in given}
    return CertifyConfig(**given, options=options)


def certify(*given) -> dict:
    return certifying.certify(*given).to_json()


def plan(*given, **more) -> dict:
    return certifying.plan(*given, **more).to_json()


def read_certificate(folder: Path) -> dict:
    return certified.read_certificate(folder).to_json()


def watching(run: Path, pair: Pair, task: object, **config) -> Audit:
    return Audit(run, pair, task, AuditConfig(**config))


def audit_file(watch: Audit, prompts: list[tuple[str, str]], **more) -> list[State]:
    """Audit a file; gives the state after each prompt that was audited now."""
    states: list[State] = []
    live = [LivePrompt(*prompt) for prompt in prompts]
    audit(watch, live, progress=lambda *_: states.append(watch.state()), **more)
    return states[1:]  # the first tells of those that had been audited before


def answers(
    pair: Pair, task: Echo, rule: str, prompts: list[str], **options
) -> list[str]:
    outs = pair.generate_batch(
        prompts,
        rule=rule,
        max_new_tokens=task.max_new_tokens,
        **{"window": 4, "seed": 0, **options},
    )
    return [out.text for out in outs]


def test_a_certificate_says_what_can_be_counted_by_hand(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question())
    assert made.keys() >= TOLD and made == read_certificate(tmp_path)
    used = [
        task.prompt(int(use["id"].split("-")[1]))
        for use in Journal(tmp_path / "uses.jsonl")
    ]
    assert 50 <= len(used) == len(set(used)) <= 60
    right = [task.right[prompt] for prompt in used]
    for row in made["tried"]:
        said = answers(llama, task, row["rule"], used[: row["n"]])
        wrong = [task.answer(text) != answer for text, answer in zip(said, right)]
        assert row["losses"] == sum(wrong) and row["target_accuracy"] == 1
        assert row["accuracy"] == pytest.approx(1 - np.mean(wrong))
        assert not row["passed"] or row["upper_bound"] <= 0.3
        alone = beta.ppf(1 - made["level"], sum(wrong) + 1, row["n"] - sum(wrong))
        assert row["upper_bound"] >= alone - 1e-9, (
            "one look, Clopper–Pearson's, would be less"
        )
    settings = [row["rule"] for row in made["tried"]]
    assert settings == ["topk:2", "topk:3", "topk:4"][: len(settings)]
    assert made["tried"][-1]["losses"] > 0, "the test must be able to lose something"
    shown = made["certified"] or made["tried"][0]
    assert len(made["lost"]) == shown["losses"]
    for one in made["lost"]:
        assert one["target"]["answer"] == one["reference"] != one["lenient"]["answer"]
    page = (tmp_path / "certificate.html").read_text()
    assert made["lost"] and all(
        html.escape(one["lenient"]["text"]) in page for one in made["lost"]
    )


def test_a_stopped_certification_comes_to_the_same(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    class Stop(Exception): ...

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("setting") and done == 20:
            raise Stop

    whole = certify(llama, task, tmp_path / "whole", question())
    with pytest.raises(Stop):
        certify(llama, task, tmp_path / "torn", question(), stop)
    (journal,) = (tmp_path / "torn" / "calibration").rglob("answers.jsonl")
    kept = len(journal.read_text().splitlines())
    with journal.open("a") as file:
        file.write('{"torn')
    again = certify(llama, task, tmp_path / "torn", question())
    assert kept >= 20 and {**again, "seconds": 0, "decoded": 0, "certified": 0} == {
        **whole,
        "seconds": 0,
        "decoded": 0,
        "certified": 0,
    }
    assert again["decoded"] == whole["decoded"] - kept
    assert certify(llama, task, tmp_path / "torn", question()) == again, (
        "asked once more, it decodes nothing"
    )


def test_no_prompt_is_used_twice(llama: Pair, task: Echo, tmp_path: Path) -> None:
    mine(
        llama,
        task,
        tmp_path,
        MineConfig(answers_only=True, limit=30, max_new_tokens=12),
    )
    certify(llama, task, tmp_path, question(limit=40))
    certify(llama, task, tmp_path, question(limit=40, max_drop=0.2))
    plan(llama, task, tmp_path, question(), pilot=10)
    certify(llama, task, tmp_path, question(limit=5, max_drop=0.25, window="auto"))
    uses = list(Journal(tmp_path / "uses.jsonl"))
    mined = {record["id"] for record in Journal(tmp_path / "journal.jsonl")}
    ids = [use["id"] for use in uses]
    assert len(ids) == len(set(ids)) == 40 + 40 + 10 + 5 + 8 and not mined & set(ids)
    assert [use["use"] for use in uses].count("window") == 8
    with pytest.raises(
        InputError, match=f"prompt {ids[0]}: has been used for calibration"
    ):
        certify(llama, task, tmp_path, question(max_drop=0.1, ids=(ids[0],)))
    first = min(mined)
    with pytest.raises(InputError, match=f"prompt {first}: has been used for mining"):
        certify(llama, task, tmp_path, question(max_drop=0.1, ids=(first,)))
    with pytest.raises(
        InputError, match="'train-9999': task 'echo' has no such prompt"
    ):
        certify(llama, task, tmp_path, question(ids=("train-9999",)))
    certify(llama, task, tmp_path, question(limit=50, max_drop=0.15))  # what is left
    spent = r"used: 112 for calibration, 30 for mining, 10 for \w+, 8 for window"
    with pytest.raises(
        InputError, match=rf"none of the 160 prompts .* is fresh \({spent}\)"
    ):
        certify(llama, task, tmp_path, question(max_drop=0.11))


def drawn(pair: Pair, task: object, folder: Path, draw: Draw) -> list[str]:
    rows = Ledger(folder, pair.fingerprints).rows(pair.target, as_task(task), draw)
    return [sample.id for sample in rows]


def test_fresh_prompts_are_a_random_draw(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    one, two = (
        drawn(llama, task, tmp_path, Draw(key, 40, "calibration")) for key in "ab"
    )
    assert one != two and one != [
        sample.id for sample in list(task.samples("train"))[:40]
    ]
    assert one == drawn(llama, task, tmp_path, Draw("a", 40, "calibration"))


def test_what_is_certified_is_decoded_and_nothing_else(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question(max_drop=0.9))
    spec, rule = made["certified"]["rule"], f"certified:{tmp_path}"
    prompts = [task.prompt(i) for i in range(20)]
    wanted = answers(llama, task, spec, prompts)
    assert [out.text for out in llama.generate_batch(prompts, rule=rule)] == wanted
    assert [
        llama.generate(prompt, rule=rule, window=4).text for prompt in prompts
    ] == wanted
    assert (
        "".join(step.text for step in llama.stream(prompts[0], rule=rule)) == wanted[0]
    )
    for name, value in (
        ("window", 5),
        ("max_new_tokens", 13),
        ("temperature", 0.5),
        ("stop", "confidence:0.5"),
        ("top_k", 3),
    ):
        with pytest.raises(InputError, match=f"certified with {name} "):
            llama.generate(prompts[0], rule=rule, **{name: value})


WINDOWS = (1, 2, 6)


def several_windows(**given) -> CertifyConfig:
    return CertifyConfig(
        **{
            "rules": ("topk:2",),
            "max_drop": 0.9,
            "confidence": 0.9,
            "limit": 40,
            **given,
        },
        windows=WINDOWS,
    )


def test_of_several_windows_a_prompt_counts_with_its_largest_loss(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, several_windows(rules=("topk:4",)))
    used = [
        task.prompt(int(use["id"].split("-")[1]))
        for use in Journal(tmp_path / "uses.jsonl")
    ]
    (row,) = made["tried"]
    used = used[: row["n"]]
    wrong = {
        window: [
            task.answer(text) != task.right[prompt]
            for text, prompt in zip(
                answers(llama, task, "topk:4", used, window=window), used
            )
        ]
        for window in WINDOWS
    }
    assert row["windows"] == {str(window): sum(wrong[window]) for window in WINDOWS}
    at_any = [any(lost) for lost in zip(*wrong.values())]
    assert row["losses"] == sum(at_any) > max(map(sum, wrong.values()))
    assert row["window"] == made["binds"]["window"] == 6
    assert made["binds"]["windows"] == [1, 2, 6]
    assert len(made["lost"]) == row["losses"]


def test_what_is_certified_for_several_windows_is_decoded_with_each(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    assert certify(llama, task, tmp_path, several_windows())["certified"]
    rule = f"certified:{tmp_path}"
    prompts = [task.prompt(i) for i in range(8)]
    texts = dict[int, list[str]]()
    for window in WINDOWS:
        outs = llama.generate_batch(prompts, rule=rule, window=window)
        texts[window] = [out.text for out in outs]
        assert texts[window] == answers(llama, task, "topk:2", prompts, window=window)
    assert len(set(map(tuple, texts.values()))) == 3, "windows must matter"
    outs = llama.generate_batch(prompts, rule=rule)
    assert [out.text for out in outs] == texts[6], "the widest by default"
    with pytest.raises(InputError, match="certified with window 1, 2, 6, not 4"):
        llama.generate(prompts[0], rule=rule, window=4)
    page = (tmp_path / "certificate.html").read_text()
    assert "any of the windows 1, 2, 6" in page
    assert "during which the window changes" in page


def test_a_certificate_of_an_earlier_version_is_not_kept_twice(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    asked = question(max_drop=0.9)
    assert certify(llama, task, tmp_path, asked)["certified"]
    for path in tmp_path.rglob("certificate.json"):
        made = json.loads(path.read_text())
        for row in (made["certified"], *made["tried"]):
            del row["windows"]  # which earlier versions did not have
        path.write_text(json.dumps(made))
    assert certify(llama, task, tmp_path, asked)["certified"]["windows"] == {}
    assert not (tmp_path / "certificate-1.json").exists()


def test_a_plan_for_several_windows_counts_the_answers_at_each(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    (several,) = plan(llama, task, tmp_path / "a", several_windows(), pilot=8)["plan"]
    single = question(rules=("topk:2",), max_drop=0.9, window=6, limit=40)
    (one,) = plan(llama, task, tmp_path / "b", single, pilot=8)["plan"]
    each = [row["target_passes"] / row["prompts"] for row in (several, one)]
    assert each[0] > 1.5 * each[1] > 0, "the target's own answers are shared"


def test_the_largest_loss_over_windows_is_taken_for_each_draw(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 12, "seed": 3}
    asked = CertifyConfig(
        ("topk:2",),
        max_drop=0.95,
        confidence=0.6,
        limit=40,
        windows=(1, 6),
        draws=2,
        options=sampled,
        loss="task",
    )
    assert asked.decoder.window == 6
    assert asked.to_json()["window"] == 6
    on = stand_in(llama, task, tmp_path, asked)
    decoder = on.chains()[0][0]
    n = 40
    lost = {
        (window, seed): on._losses_of(
            replace(decoder, window=window, seed=decoder.seed + seed), n
        )
        for window in (1, 6)
        for seed in (0, 1)
    }
    wanted = np.mean([np.maximum(lost[1, seed], lost[6, seed]) for seed in (0, 1)], 0)
    assert on.losses(decoder, n).tolist() == pytest.approx(wanted.tolist())
    means = [(lost[window, 0] + lost[window, 1]) / 2 for window in (1, 6)]
    assert wanted.sum() > np.maximum(*means).sum(), "a choice for each answer"


def stand_in(pair: Pair, task: Echo, folder: Path, asked: CertifyConfig) -> Calibration:
    """A question that has begun."""
    with calibration(
        pair, as_task(task), folder, asked, use="calibration", progress=silent
    ) as on:
        return on


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"options": {"window": 4}}, "window: cannot be combined with windows"),
        ({"settings": (("topk:2",),), "rules": ()}, "windows: need rules"),
    ],
)
def test_wrong_windows_are_refused(given: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        several_windows(**given)


@pytest.fixture(scope="module")
def lenient(llama: Pair, task: Echo, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A certified rule that accepts much."""
    run = tmp_path_factory.mktemp("lenient")
    asked = question(rules=("topk:5",), max_drop=0.95, home=run)
    assert certify(llama, task, run, asked)["certified"]
    return f"certified:{run}"


@quick(25)
@hypothesis.given(
    number=st.integers(0, 19),
    most=st.integers(1, 12),
    stops=st.lists(st.integers(1, 40), max_size=3),
)
def test_an_answer_that_ends_sooner_is_the_beginning_of_a_certified_one(
    llama: Pair, lenient: str, number: int, most: int, stops: list[int]
) -> None:
    pair, rule, prompt = llama, lenient, Echo.prompt(number)
    whole = pair.generate(prompt, rule=rule)
    texts = tuple(f" w{one} " for one in stops)
    out = pair.generate(prompt, rule=rule, max_new_tokens=most, stop_strings=texts)
    assert out.tokens == whole.tokens[: len(out.tokens)] and whole.text.startswith(
        out.text
    )
    ends = [whole.text.index(text) for text in texts if text in whole.text]
    if len(out.tokens) < most and out.finish != "eos":
        assert out.finish == "stop" and len(out.text) == min(ends)
    assert not any(text in out.text for text in texts)


def test_the_stop_strings_that_were_certified_stay(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    task = copy(task)
    task.stop_strings = ("w5 ", "w17")
    made = certify(llama, task, tmp_path, question(max_drop=0.9))
    assert made["binds"]["stop_strings"] == ["w5 ", "w17"]
    rule, asked = made["certified"]["rule"], [task.prompt(i) for i in range(20)]
    stopping = {"stop_strings": task.stop_strings}
    wanted = answers(llama, task, rule, asked, **stopping)
    assert wanted != answers(llama, task, rule, asked)
    for own in ({}, stopping, {"stop_strings": "w17"}):
        outs = llama.generate_batch(asked, rule=f"certified:{tmp_path}", **own)
        assert [out.text for out in outs] == wanted
    again = certify(llama, task, tmp_path, question(max_drop=0.9))
    assert again == made, "the same question"
    task.stop_strings = ("w5 ",)
    assert certify(llama, task, tmp_path, question(max_drop=0.9))["key"] != made["key"]


def test_other_models_and_dtypes_are_refused(
    llama: Pair, task: Echo, tmp_path: Path, checkpoints
) -> None:
    certify(llama, task, tmp_path, question(max_drop=0.9))
    target, draft = checkpoints("llama")
    with pytest.raises(
        InputError, match=r"models target dtype 'float32', not 'bfloat16'"
    ):
        load_pair(target, draft, dtype="bfloat16", compile=False).generate(
            "w1", rule=f"certified:{tmp_path}"
        )
    with pytest.raises(InputError, match=r"models draft fingerprint"):
        load_pair(target, target, dtype="float32", compile=False).generate(
            "w1", rule=f"certified:{tmp_path}"
        )


def test_a_certificate_is_of_its_drafter(
    llama: Pair, task: Echo, repeating: str, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question(rules=("topk:2",), max_drop=0.9))
    assert made["binds"]["drafter"] == "model"
    llama.generate("w1", rule=f"certified:{tmp_path}")
    with pytest.raises(
        InputError, match="certified with drafter 'model', not 'repeat'"
    ):
        llama.generate("w1", rule=f"certified:{tmp_path}", drafter=repeating)


def test_a_head_that_was_fitted_anew_is_refused_and_a_run_may_move(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    run, width = (
        tmp_path / "run",
        2 * (llama.target.hidden_size + llama.draft.hidden_size),
    )
    listed = [
        {"recall": recall, "threshold": t, "accepted": 0.5}
        for recall, t in ((0.5, 0.2), (1.0, 0.9), (0.9, 0.6))
    ]
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 4
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints, {"thresholds": listed}).save(
        run / "judge"
    )
    (run / "uses.jsonl").touch()
    judge = f"judge:{run / 'judge'}"
    assert list(map(str, ladder(judge))) == [
        f"{judge}@0.9",
        f"{judge}@0.6",
        f"{judge}@0.2",
    ]
    assert list(map(str, ladder(f"exact|{judge}", (0.4, 0.7)))) == [
        f"exact|{judge}@0.7",
        f"exact|{judge}@0.4",
    ]
    made = certify(llama, task, run, question(rules=(judge,), max_drop=0.9))
    threshold = [row["rule"] for row in made["tried"] if row["passed"]][-1].split("@")[
        1
    ]
    assert made["certified"]["threshold"] == float(threshold)
    wanted = answers(llama, task, f"{judge}@{threshold}", ["w1 w2 w3"])
    shutil.copytree(run, tmp_path / "copied")
    Head(-weight, 0.0, Inputs(), 0.5, llama.fingerprints, {"thresholds": listed}).save(
        run / "judge"
    )
    assert (
        llama.generate("w1 w2 w3", rule=f"certified:{tmp_path / 'copied'}").text
        == wanted[0]
    ), "a copy has its own head"
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints, {"thresholds": listed}).save(
        run / "judge"
    )
    run.rename(tmp_path / "moved")
    assert (
        llama.generate("w1 w2 w3", rule=f"certified:{tmp_path / 'moved'}").text
        == wanted[0]
    )
    Head(-weight, 0.0, Inputs(), 0.5, llama.fingerprints, {"thresholds": listed}).save(
        tmp_path / "moved" / "judge"
    )
    with pytest.raises(InputError, match="certified with heads"):
        llama.generate("w1 w2 w3", rule=f"certified:{tmp_path / 'moved'}")


def test_a_run_is_found_wherever_it_is_moved(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its old name occurs elsewhere in the spec, and its new one has to be quoted."""
    monkeypatch.chdir(tmp_path)
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 4
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints).save(Path("j/judge"))
    Path("j/uses.jsonl").touch()
    asked = question(rules=('judge:"j/judge"',), thresholds=(0.9,), max_drop=0.95)
    made = certify(llama, task, Path("j"), asked)
    assert made["certified"]["rule"] == "judge:j/judge@0.9", (
        "a spec that is written otherwise has its thresholds too"
    )
    wanted = answers(llama, task, "judge:j/judge@0.9", ["w1 w2 w3"])
    Path("j").rename("my runs, 2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert llama.generate("w1 w2 w3", rule="certified:../my runs, 2").text == wanted[0]
    monkeypatch.chdir(tmp_path)
    assert llama.generate("w1 w2 w3", rule="certified:my runs, 2").text == wanted[0]
    moved = replace(asked, rules=('judge:"my runs, 2/judge"',))
    assert certify(llama, task, Path("my runs, 2"), moved) == made, "the same question"
    Path("my runs, 2/certificate.json").unlink()
    certify(llama, task, Path("my runs, 2"), moved)
    assert read_certificate(Path("my runs, 2")) == made


def test_another_generation_config_is_refused(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(llama, task, tmp_path, question(max_drop=0.9))
    monkeypatch.setattr(llama.target.model.generation_config, "repetition_penalty", 1.3)
    with pytest.raises(
        InputError,
        match=r"certified with generation_config repetition_penalty None, not 1.3",
    ):
        llama.generate("w1", rule=f"certified:{tmp_path}")


def test_prompts_that_others_chose_on_are_left_out(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    run, width = (
        tmp_path / "run",
        2 * (llama.target.hidden_size + llama.draft.hidden_size),
    )
    Head(torch.ones(width) / 9, 0.0, Inputs(), 0.5, llama.fingerprints).save(
        run / "judge"
    )
    write_json(run / "run.json", {"task": "echo", "task_version": None})
    config = CompareConfig(
        (f"judge:{run / 'judge'}@0.5",),
        windows=(2, 3),
        limit=2,
        tuning=5,
        timed=1,
        repeats=1,
    )
    compare(llama, task, config)
    uses = list(Journal(run / "uses.jsonl"))
    assert [(u["id"], u["use"]) for u in uses] == [
        *((f"train-{i}", "window") for i in range(155, 160)),
        ("test-0", "comparison"),
        ("test-4", "comparison"),
    ]
    row = Annotated(task.prompt(7), "w1 w2", "w1 w3", (3, 5), "file, line 1")
    rows = [replace(row, question=task.prompt(i)) for i in range(12)]
    inputs = Inputs(("target",), ("draft",))
    fit_annotated(llama, rows, HeadPlan(inputs, run / "judge", FitConfig(kind="adamw")))
    certify(llama, task, run, question(limit=160))
    left = set(drawn(llama, task, run, Draw("a", 160, "calibration")))
    used = {
        use["id"] for use in Journal(run / "uses.jsonl") if use["use"] == "calibration"
    }
    chosen_on = {f"train-{i}" for i in (*range(12), *range(155, 160))}
    # two prompts of the test split are two of the others, under other names
    assert used and not used & chosen_on and not left & (chosen_on | used)
    assert len(left | used) == 160 - 5 - 12 - len({"train-0", "train-4"} - chosen_on)


def test_what_a_head_without_a_run_was_compared_on_is_used(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """And nothing is put beside it, which would pass for the run that it was fitted in."""
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    head = Head(
        torch.ones(width) / 9, 0.0, Inputs(), 0.5, llama.fingerprints, prompts=("any",)
    )
    head.save(tmp_path / "alone" / "judge")
    rule = f"judge:{tmp_path / 'alone' / 'judge'}@0.5"
    compare(
        llama,
        task,
        CompareConfig((rule,), windows=(2,), limit=4, tuning=2, timed=1, repeats=1),
    )
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["judge"]
    left = drawn(
        llama, task, tmp_path / "run", Draw("a", 160, "calibration", split="test")
    )
    assert left and not {"test-0", "test-4", "test-8", "test-12"} & set(left)


def test_nothing_certified_is_said_and_decodes_strictly(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    with pytest.warns(
        UserWarning, match="20 prompts cannot certify a loss of at most 1.00%"
    ):
        too_few = certify(
            llama, task, tmp_path, question(max_drop=0.01, limit=20, rules=("topk:1",))
        )
    assert too_few["certified"] is None and too_few.keys() >= TOLD
    assert "too few prompts" in too_few["reason"]
    # the first attempt's error, 0.09, is spent over 5,000 prompts
    needed = too_few["needed"]
    spent = [
        0.09 * (0.9 * (n / 3000) ** 0.5 + 0.1 * n / 5000) for n in (needed - 1, needed)
    ]
    assert 0.99 ** (needed - 1) > spent[0] and 0.99**needed <= spent[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = llama.generate(
            "w1 w2 w3", rule=f"certified:{tmp_path}", max_new_tokens=12
        )
    assert "nothing was certified" in str(caught[0].message)
    assert out.text == answers(llama, task, "target", ["w1 w2 w3"])[0]
    lossy = certify(
        llama, task, tmp_path, question(max_drop=0.001, limit=40, rules=("random:1",))
    )
    assert "the loss is too high" in lossy["reason"] and lossy["needed"] is None


def certificate(rule: str | None) -> Certificate:
    """One that certifies a rule, or nothing."""
    row = {
        "rule": rule,
        "window": 4,
        "n": 1,
        "losses": 0,
        "upper_bound": 0,
        "passed": True,
    }
    row |= {
        "hopeless": False,
        "tokens_per_pass": 1,
        "accuracy": 1,
        "target_accuracy": 1,
    }
    made = {"max_drop": 0.1, "confidence": 0.9, "n": 1, "losses": 0, "upper_bound": 0}
    certified_row = None if rule is None else {**row, "threshold": None, "heads": {}}
    return Certificate(**made, procedure="", binds={}, certified=certified_row)


def test_a_valid_certificate_is_never_written_over(tmp_path: Path) -> None:
    valid, better, none = certificate("a"), certificate("b"), certificate(None)
    for one in (none, none, valid):
        assert save(tmp_path, one).name == "certificate.json"
    assert save(tmp_path, none).name == "certificate-1.json"
    assert json.loads((tmp_path / "certificate.json").read_text()) == valid.to_json()
    assert save(tmp_path, better).name == "certificate.json"
    assert json.loads((tmp_path / "certificate-2.json").read_text()) == valid.to_json()
    (tmp_path / "certificate-1.json").unlink()
    save(tmp_path, certificate("c"))
    kept = {
        path.name: json.loads(path.read_text())["certified"]["rule"]
        for path in tmp_path.glob("*.json")
    }
    assert kept == {
        "certificate.json": "c",
        "certificate-1.json": "b",
        "certificate-2.json": "a",
    }


def test_of_several_rules_the_fastest_that_passes_at_its_share_is_taken(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(
        llama,
        task,
        tmp_path,
        question(rules=("topk:1", "topk:48"), max_drop=0.999, confidence=0.9),
    )
    by_rule = {row["rule"]: row for row in made["tried"]}
    assert (
        made["certified"]["rule"] == "topk:48"
        and by_rule["topk:48"]["tokens_per_pass"] > by_rule["topk:1"]["tokens_per_pass"]
    )
    few = question(rules=("topk:1", "topk:48"), max_drop=0.05, limit=52, horizon=52)
    assert few.test(0.9).alpha == pytest.approx(0.045), "Bonferroni: 0.1 shared by two"
    # 0.95^52 = 0.069: enough for one rule at 0.09, not for one of two
    two = replace(few, home=tmp_path / "a")
    assert certify(llama, task, tmp_path / "two", two)["certified"] is None
    one = replace(few, rules=("topk:1",), home=tmp_path / "b")
    assert certify(llama, task, tmp_path / "one", one)["certified"]["rule"] == "topk:1"


def test_losses_of_other_kinds(llama: Pair, task: Echo, tmp_path: Path) -> None:
    tried = {}
    for loss in ("paired", "net", "disagreement", "task"):
        made = certify(
            llama,
            task,
            tmp_path / loss,
            question(
                loss=loss,
                rules=("topk:4",),
                limit=60,
                max_drop=0.05,
                home=tmp_path / loss,
            ),
        )
        tried[loss] = made["tried"][0]
        assert made["certified"] is None or made["certified"]["upper_bound"] <= 0.05, (
            loss
        )
    lost = {}
    for loss, row in tried.items():
        uses = list(Journal(tmp_path / loss / "uses.jsonl"))[: row["n"]]
        used = [task.prompt(int(use["id"].split("-")[1])) for use in uses]
        ours, theirs = (
            answers(llama, task, rule, used) for rule in ("topk:4", "target")
        )
        pairs = list(zip(ours, theirs))
        lost[loss] = sum(task.answer(a) != task.answer(b) for a, b in pairs)
        if loss == "task":
            lost[loss] = sum(task.loss(a, b, Sample("", "", None)) for a, b in pairs)
    # the target is always right here, so nothing is gained and every other answer is a loss
    assert {loss: row["losses"] for loss, row in tried.items()} == pytest.approx(lost)
    assert lost["paired"] > 0 and tried["net"]["paired"] == lost["net"]


def test_wrong_questions_are_refused(llama: Pair, task: Echo, tmp_path: Path) -> None:
    for given, says in (
        ({"max_drop": 1.0}, "max_drop 1.0"),
        ({"confidence": 0}, "confidence 0"),
        ({"loss": "bleu"}, "loss 'bleu'"),
        ({"procedure": "magic"}, "procedure 'magic'"),
        ({"procedure": "binomial", "loss": "net"}, "0 or 1"),
        ({"rules": ("target",)}, "that draft"),
        ({"rules": ()}, "name a rule that drafts"),
    ):
        with pytest.raises(InputError, match=says):
            question(**given)
    assert list(map(str, ladder("fuzzy:js", (0.3, 0.1)))) == [
        "fuzzy:js@0.1",
        "fuzzy:js@0.3",
    ], "the strictest first"
    with pytest.raises(InputError, match="has no threshold"):
        ladder("topk:3", (0.5,))

    class Wrong(Echo):
        def correct(self, text: str, sample: Sample) -> bool:
            return False

        def loss(self, text: str, target_text: str, sample: Sample) -> float:
            return 1.5

    wrong = Wrong(llama, 60)
    with pytest.raises(InputError, match="answers none of 50 prompts rightly"):
        certify(llama, wrong, tmp_path / "a", question(limit=60))
    for given, says in (
        ({"window": -1}, "window -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"seed": 2**70}, "64 bits"),
    ):
        with pytest.raises(InputError, match=says):
            certify(llama, task, tmp_path / "c", question(**given))
        assert not (tmp_path / "c").exists(), "no prompt is used up by a slip"
    with pytest.raises(
        InputError,
        match=r"its loss of train-\d+ is 1.5; it must be a number in \[0, 1\]",
    ):
        certify(
            llama, wrong, tmp_path / "b", question(limit=60, loss="task", home=tmp_path)
        )


def test_a_changed_data_file_is_refused(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    rows = [
        {
            "prompt": task.prompt(i),
            "reference": task.right[task.prompt(i)],
            "split": "train",
        }
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load():
        return lenience.task(str(path), answer="regex:(w\\d+)", same="text")

    mine(
        llama,
        load(),
        tmp_path / "run",
        MineConfig(answers_only=True, limit=10, max_new_tokens=12),
    )
    certify(llama, load(), tmp_path / "run", question(limit=20, allow_weak_target=True))
    path.write_text(path.read_text() + json.dumps(rows[0]) + "\n")
    with pytest.raises(InputError, match=r"has changed since .* was mined"):
        certify(llama, load(), tmp_path / "run", question(limit=20))


def test_what_is_as_good_as_the_target_passes_on_as_many_as_are_told() -> None:
    """Also by the net drop, where a tie is a loss of one half as it is tested."""
    for loss, at_par in (("paired", 0.0), ("net", 0.5)):
        asked = question(loss=loss, max_drop=0.02)
        least = asked.least_prompts(0.9)
        assert least is not None

        def losses(_j: int, n: int, at_par: float = at_par) -> NDArray:
            return np.full(n, at_par)

        for n in (least - 1, least):
            (tried,) = fixed_sequence_test(asked.test(0.9), 1, losses, n)
            assert tried.passed == (n == least), loss


def test_a_plan_counts_what_a_pilot_costs(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = plan(llama, task, tmp_path, question(rules=("topk:1", "random:1")), pilot=20)
    strict, loose = made["plan"]
    assert (strict["pilot_loss"], made["pilot"]) == (0, 20)
    # the first attempt's 0.09 is shared by two, and spent over 167 prompts
    least = made["least"]
    spent = [
        0.045 * (0.9 * (n / 100.2) ** 0.5 + 0.1 * n / 167) for n in (least - 1, least)
    ]
    assert 0.7 ** (least - 1) > spent[0] and 0.7**least <= spent[1]
    assert strict["prompts"] and strict["target_passes"] > strict["prompts"]
    assert loose["pilot_loss"] >= 0.3 and loose["prompts"] is None


def test_ids_are_used_up_no_further_than_they_are_asked_for(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    ids = tuple(f"train-{i}" for i in range(60))
    assert plan(llama, task, tmp_path, question(ids=ids), pilot=10)["pilot"] == 10
    assert len(list(Journal(tmp_path / "uses.jsonl"))) == 10
    assert (
        certify(llama, task, tmp_path, question(ids=ids[10:], limit=30))["tried"][0][
            "n"
        ]
        <= 30
    )
    assert len(list(Journal(tmp_path / "uses.jsonl"))) == 40


def test_another_generation_config_is_another_question(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = certify(llama, task, tmp_path, question(max_drop=0.9, limit=30))
    monkeypatch.setattr(llama.target.model.generation_config, "repetition_penalty", 1.3)
    asked = question(max_drop=0.9, limit=30, allow_weak_target=True)
    after = certify(llama, task, tmp_path, asked)
    assert after["binds"]["generation_config"] != before["binds"]["generation_config"]
    assert after["binds"]["data"] != before["binds"]["data"], "on prompts of its own"
    llama.generate("w1 w2", rule=f"certified:{tmp_path}")


def test_prompts_that_another_runs_head_was_fitted_on_are_left_out(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    old, width = (
        tmp_path / "old",
        2 * (llama.target.hidden_size + llama.draft.hidden_size),
    )
    mine(
        llama,
        task,
        old,
        MineConfig(answers_only=True, limit=40, max_new_tokens=12, first=True),
    )
    Head(torch.ones(width) / 9, 0.0, Inputs(), 0.5, llama.fingerprints).save(
        old / "judge"
    )
    certify(
        llama,
        task,
        tmp_path / "new",
        question(rules=("topk:2", f"judge:{old / 'judge'}@0.5"), limit=160),
    )
    used = {use["id"] for use in Journal(tmp_path / "new" / "uses.jsonl")}
    assert used and used <= {f"train-{i}" for i in range(40, 160)}
    shutil.copytree(old / "judge", tmp_path / "alone" / "judge")
    with pytest.raises(
        InputError, match=r"no run\.json, journal\.jsonl or uses\.jsonl lies next to it"
    ):
        certify(
            llama,
            task,
            tmp_path / "new",
            question(rules=(f"judge:{tmp_path / 'alone' / 'judge'}@0.5",)),
        )


def test_a_stop_conditions_head_moves_with_its_run(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    inputs = Inputs(("draft",), ("previous",))
    Head(
        torch.ones(llama.draft.hidden_size) / 9,
        0.0,
        inputs,
        0.5,
        llama.fingerprints,
        role="stop",
    ).save(run / "stop")
    (run / "uses.jsonl").touch()
    made = certify(
        llama, task, run, question(max_drop=0.9, stop=f"head:{run / 'stop'}@0.6")
    )
    wanted = answers(
        llama,
        task,
        made["certified"]["rule"],
        ["w1 w2 w3"],
        stop=f"head:{run / 'stop'}@0.6",
    )
    run.rename(tmp_path / "moved")
    rule, there = (
        f"certified:{tmp_path / 'moved'}",
        f"head:{tmp_path / 'moved' / 'stop'}",
    )
    assert llama.generate("w1 w2 w3", rule=rule, stop=f"{there}@0.6").text == wanted[0]
    with pytest.raises(InputError, match="certified with stop "):
        llama.generate("w1 w2 w3", rule=rule, stop=f"{there}@0.7")
    watch = watching(tmp_path / "moved", llama, task, share=1.0)
    assert [one.audited for one in audit_file(watch, [("w1 w2 w3", "w1")])] == [1]


def test_certificates_that_are_made_at_once_share_no_prompt_and_are_both_kept(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for each other between drawing prompts and noting them, and between looking for an
    earlier certificate and writing theirs; in vain where one keeps the other out."""

    def meeting(function):
        both = threading.Barrier(2)

        def meet(*given):
            with suppress(threading.BrokenBarrierError):
                both.wait(timeout=1)
            return function(*given)

        return meet

    monkeypatch.setattr(
        "lenience.certification.calibration.check_prompts", meeting(check_prompts)
    )
    monkeypatch.setattr(
        "lenience.certification.certify.write_json", meeting(write_json)
    )
    asked = [
        question(rules=("topk:1",), max_drop=most, limit=30) for most in (0.3, 0.4)
    ]
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda one: certify(llama, task, tmp_path, one), asked)
    by_key = {
        use["key"]: {
            other["id"]
            for other in Journal(tmp_path / "uses.jsonl")
            if other["key"] == use["key"]
        }
        for use in Journal(tmp_path / "uses.jsonl")
    }
    assert [len(ids) for ids in by_key.values()] == [30, 30] and not set.intersection(
        *by_key.values()
    )
    kept = [
        json.loads((tmp_path / name).read_text())["max_drop"]
        for name in ("certificate.json", "certificate-1.json")
    ]
    assert sorted(kept) == [one["max_drop"] for one in made]


def test_uses_are_noted_one_after_the_other(llama: Pair, tmp_path: Path) -> None:
    """What another is about to append must not look like a torn line."""
    with ThreadPoolExecutor(1) as thread:
        with locked(tmp_path):
            note_uses(
                tmp_path, llama.target, [("a", "w1")], use="comparison", key="one"
            )
            other = thread.submit(
                note_uses,
                tmp_path,
                llama.target,
                [("b", "w2")],
                use="comparison",
                key="two",
            )
            assert not wait([other], timeout=0.3).done
        other.result()
    assert [use["id"] for use in Journal(tmp_path / "uses.jsonl")] == ["a", "b"]


def test_a_question_that_is_being_answered_is_not_answered_twice(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    def again(*_) -> None:
        with pytest.raises(
            InputError, match="is at its question; wait until it has ended"
        ):
            certify(llama, task, tmp_path, question(limit=30))
        refused.append(True)

    refused: list[bool] = []
    made = certify(llama, task, tmp_path, question(limit=30), again)
    assert refused and made == certify(llama, task, tmp_path, question(limit=30), again)


def test_a_template_that_tells_the_date_hides_no_use(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in ("w1", "w2"):
        template = (
            day + "{% for message in messages %} {{ message.content }}{% endfor %}"
        )
        monkeypatch.setattr(llama.target.tokenizer, "chat_template", template)
        if day == "w1":
            mine(
                llama,
                task,
                tmp_path,
                MineConfig(answers_only=True, limit=40, max_new_tokens=12, first=True),
            )
    left = drawn(llama, task, tmp_path, Draw("key", 160, "calibration"))
    assert set(left) == {f"train-{i}" for i in range(40, 160)}


def test_what_is_asked_again_is_what_the_run_has(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    one, two = (
        question(rules=("topk:1",), max_drop=most, limit=20) for most in (0.3, 0.4)
    )
    first = certify(llama, task, tmp_path, one)
    assert (
        certify(llama, task, tmp_path, one) == first
        and len(list(tmp_path.glob("certificate*.json"))) == 1
    )
    second = certify(llama, task, tmp_path, two)
    assert read_certificate(tmp_path) == second
    for asked, made in ((one, first), (two, second), (one, first)):
        assert (
            certify(llama, task, tmp_path, asked) == made == read_certificate(tmp_path)
        )
    assert [path.name for path in sorted(tmp_path.glob("certificate*.json"))] == [
        "certificate-1.json",
        "certificate-2.json",
        "certificate.json",
    ]
    assert certify(
        llama, task, tmp_path, question(rules=("topk:2", "topk:3"), limit=20)
    ) != certify(
        llama, task, tmp_path, question(rules=("topk",), thresholds=(), limit=20)
    )


def test_a_torn_publication_is_made_good(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    none = certify(llama, task, tmp_path, question(max_drop=0.01, limit=10))
    made = certify(llama, task, tmp_path, question(max_drop=0.95, limit=40))
    write_json(tmp_path / "certificate.json", none)  # killed before it was written
    assert (
        certify(llama, task, tmp_path, question(max_drop=0.95, limit=40))
        == made
        == read_certificate(tmp_path)
    )


def test_a_broken_certificate_is_refused(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question(max_drop=0.95, limit=40))
    path = tmp_path / "certificate.json"
    for broken, says in (
        ("5", "not an object"),
        ("{}", "lacks certified"),
        (json.dumps(made | {"binds": []}), "binds: Input should be"),
        (
            json.dumps(
                made
                | {"binds": {k: v for k, v in made["binds"].items() if k != "heads"}}
            ),
            "lacks binds heads",
        ),
    ):
        path.write_text(broken)
        with pytest.raises(InputError, match=says):
            llama.generate("w1 w2", rule=f"certified:{tmp_path}")


def test_an_option_that_a_certificate_does_not_name_is_bound_to_its_default(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """It was not there when the certificate was made."""
    made = certify(llama, task, tmp_path, question(max_drop=0.95, limit=40))
    del made["binds"]["top_k"]
    write_json(tmp_path / "certificate.json", made)
    rule = f"certified:{tmp_path}"
    assert llama.generate("w1 w2", rule=rule).tokens
    with pytest.raises(InputError, match="certified with top_k None, not 3"):
        llama.generate("w1 w2", rule=rule, top_k=3)


def test_a_record_of_options_may_name_a_certificate(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question(max_drop=0.95, limit=40))
    setup = llama.decoder(Decoder.of(rule=f"certified:{tmp_path}"))
    assert str(setup.rule) == made["certified"]["rule"]
    assert setup.window == made["binds"]["window"] == 4
    with pytest.raises(InputError, match=r"certified with temperature 0\.0, not 0\.5"):
        llama.decoder(Decoder.of(rule=f"certified:{tmp_path}", temperature=0.5))


def test_a_loss_is_too_high_only_where_that_is_shown() -> None:
    tried = certificate("topk:2").certified
    few = tried.model_copy(update={"n": 50, "losses": 1.0, "hopeless": False})
    lossy = few.model_copy(update={"losses": 20.0, "hopeless": True})
    assert isinstance(few, TriedSetting) and "too few prompts" in _reason(
        question(max_drop=0.01), few
    )
    assert "the loss is too high" in _reason(question(max_drop=0.01), lossy)


# ---- the audit


def test_an_audit_asks_for_the_certificates_own_task_and_options(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    options = {"temperature": 0.7, "stop": "confidence:0.2"}
    sampled = question(max_drop=0.95, limit=30, allow_weak_target=True, **options)
    made = certify(llama, task, tmp_path, sampled)
    assert made["certified"]
    prompts = [(task.prompt(i), task.right[task.prompt(i)]) for i in range(20)]
    said = audit_file(watching(tmp_path, llama, task, share=1.0), prompts)
    records = [
        record
        for record in Journal(tmp_path / "audit.jsonl")
        if record["loss"] is not None
    ]
    assert [record["text"] for record in records] == answers(
        llama, task, made["certified"]["rule"], [p for p, _ in prompts], **options
    )
    assert len(said) == 20
    with pytest.raises(
        InputError, match="answers found and compared by 'echo None', not 'wordmath 2'"
    ):
        watching(tmp_path, llama, lenience.task("wordmath"))
    with pytest.raises(InputError, match="batch_size -1"):
        (audit_file(watching(tmp_path, llama, task), prompts, batch_size=-1))


def test_a_file_is_audited_once(llama: Pair, task: Echo, tmp_path: Path) -> None:
    certify(llama, task, tmp_path, question(max_drop=0.9))
    prompts = [(task.prompt(i), task.right[task.prompt(i)]) for i in range(60)]
    torn = watching(tmp_path, llama, task, share=0.5)

    class Stop(Exception): ...

    def stop(phase: str, done: int, total: int) -> None:
        if done == 7:
            raise Stop

    with pytest.raises(Stop):
        audit(
            torn,
            [LivePrompt(*prompt) for prompt in prompts],
            batch_size=4,
            progress=stop,
        )
    watch = watching(tmp_path, llama, task, share=0.5)
    audit_file(watch, prompts, batch_size=4)
    state = watch.state()
    assert state.seen == 60 and 15 < state.audited < 45
    assert watching(tmp_path, llama, task).state().seen == 60, (
        "also after its last audited prompt"
    )
    again = watching(tmp_path, llama, task, share=0.5)
    assert audit_file(again, prompts) == [] and again.state() == state
    grown = [
        *prompts,
        *((task.prompt(i), task.right[task.prompt(i)]) for i in range(60, 90)),
    ]
    more = audit_file(again, grown)
    assert (
        again.state().seen == 90
        and again.state().audited == state.audited + len(more)
        and 5 < len(more) < 25
    )
    audit_file(again, grown[60:])
    assert again.state().seen == 120, "another file"


def test_a_folder_of_logs_is_audited_once_as_its_logs_grow(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    certify(llama, task, tmp_path / "run", question(max_drop=0.9))
    logs = tmp_path / "logs" / "day"
    logs.mkdir(parents=True)

    def write(name: str, numbers: Iterable[int]) -> None:
        rows = [
            {"prompt": task.prompt(i), "reference": task.right[task.prompt(i)]}
            for i in numbers
        ]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        data = text.encode()
        (logs / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    def audited() -> tuple[int, int]:
        watch = watching(tmp_path / "run", llama, task, share=1.0)
        audit(watch, read_logs(tmp_path / "logs"))
        return watch.state().audited, watch.state().seen

    write("a.jsonl", range(6))
    write("b.jsonl.gz", range(4))  # the first rows of both logs are alike
    write("empty.jsonl", ())
    write("empty.jsonl.gz", ())
    (logs / "blank.jsonl").write_text("\n")
    (logs / "notes.txt").write_text("no log")

    def drawn() -> set[str]:
        prompts = read_logs(tmp_path / "logs")
        chosen = watching(tmp_path / "run", llama, task, share=0.5).chosen(prompts)
        return {prompts[i].content for i in chosen if prompts[i].log != "day/a.jsonl"}

    assert audited() == (10, 10)
    assert audited() == (10, 10)
    before = drawn()
    write("a.jsonl", range(9))
    assert drawn() == before, "the draw of a log depends on no other"
    assert audited() == (13, 13)
    (logs / "b.jsonl.gz").unlink()
    (logs / "a.jsonl").write_text("")
    with pytest.raises(InputError, match=r"logs: the folder has no \.jsonl files"):
        read_logs(tmp_path / "logs")


def test_an_audit_sees_a_share_and_survives_a_restart(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    certify(llama, task, tmp_path, question(max_drop=0.9))
    prompts = [(task.prompt(i), task.right[task.prompt(i)]) for i in range(150)]
    watch = watching(tmp_path, llama, task, share=0.3)
    said = audit_file(watch, prompts)
    state = watch.state()
    assert said[-1] == replace(state, seen=said[-1].seen) and len(said) == state.audited
    assert state.seen == 150 and 20 < state.audited < 75
    records = [
        record
        for record in Journal(tmp_path / "audit.jsonl")
        if record["loss"] is not None
    ]
    rule = watch.certificate.certified.rule
    texts = answers(llama, task, rule, [record["prompt"] for record in records])
    lost = [
        task.answer(text) != record["reference"] for text, record in zip(texts, records)
    ]
    assert (
        state.losses == sum(lost)
        and [bool(record["loss"]) for record in records] == lost
    )
    low, high = state.interval
    assert low <= np.mean(lost) <= high and not state.drifted
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"torn')
    again = watching(tmp_path, llama, task, share=0.3).state()
    assert (again.losses, again.audited, again.interval) == (
        state.losses,
        state.audited,
        state.interval,
    )


def test_processes_that_watch_a_run_have_one_count_and_one_alarm(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """And what they lose together raises it, though neither has lost enough by itself."""
    certify(llama, task, tmp_path, question(rules=("topk:1",)))
    watches = [watching(tmp_path, llama, task, share=1.0) for _ in range(2)]
    right, states = task.right[task.prompt(3)], []
    for i in range(14):
        states.append(watches[i % 2].see(task.prompt(3), "w47", reference=right))
    assert [state.audited for state in states] == list(range(1, 15))
    assert [state.losses for state in states] == list(range(1, 15))
    alone = watching(tmp_path, llama, task, share=1.0)
    assert alone.state() == watches[0].state() == watches[1].state()
    first = next(i for i, state in enumerate(states) if state.drifted)
    assert first >= 2 and all(state.drifted for state in states[first:])
    for _ in range(60):
        after = watches[0].see(task.prompt(3), right, reference=right)
    assert after.losses == 14 and after.drifted, "nothing lost takes no alarm back"


def test_rows_that_two_processes_audit_at_once_count_once(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    certify(llama, task, tmp_path, question(rules=("topk:1",)))
    live = [LivePrompt(task.prompt(i), task.right[task.prompt(i)]) for i in range(8)]
    one, other = (watching(tmp_path, llama, task, share=1.0) for _ in range(2))
    for row, prompt in enumerate(live):
        for watch in (one, other):
            alone = llama.generate(prompt.prompt, rule="target")
            watch.see_row(prompt, "w47", alone, row, before=0)
    assert one.state() == other.state()
    assert (one.state().audited, one.state().seen) == (8, 8)


def test_a_prompt_that_comes_to_ever_new_processes_is_audited_as_often_as_others(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    certify(llama, task, tmp_path, question(rules=("topk:1",)))
    text = llama.generate(task.prompt(3), rule=f"certified:{tmp_path}").text
    for _ in range(40):
        watching(tmp_path, llama, task, share=0.5).see(task.prompt(3), text)
    audited = watching(tmp_path, llama, task, share=0.5).state().audited
    assert 6 <= audited <= 34, "of 40 by halves: out of this in one of 100,000"


def test_an_audit_reads_a_reference_as_its_task_does(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    prompts = [task.prompt(i) for i in range(40)]
    path.write_text(
        "".join(
            json.dumps(
                {"prompt": p, "reference": f"so: {task.right[p]}", "split": "train"}
            )
            + "\n"
            for p in prompts
        )
    )
    own = lenience.task(str(path), answer="regex:(w\\d+)", same="text")
    certify(llama, own, tmp_path, question(max_drop=0.9, max_new_tokens=12, limit=30))
    watch = watching(tmp_path, llama, own, share=1.0)
    said = [
        watch.see(p, text, f"so: {task.right[p]}")
        for p in prompts[:5]
        for text in (f"x {task.right[p]}", "w0")
    ]
    assert [state.losses for state in said if state] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


class Scored(Echo):
    """Says by its score alone what is right, and where, by the sample's metadata."""

    name = "scored"

    def samples(self, split: str):
        for sample in super().samples(split):
            yield replace(sample, metadata={"right": sample.reference})

    def correct(self, text: str, sample: Sample) -> bool:
        raise AssertionError("its score is what counts")

    def score(self, pairs):
        right = [
            self.answer(text) == sample.metadata["right"] for text, sample in pairs
        ]
        return [Score(is_right, float(not is_right)) for is_right in right]


def test_an_audit_measures_the_loss_that_was_certified(
    llama: Pair, tmp_path: Path
) -> None:
    own = Scored(llama, size=40)
    certify(llama, own, tmp_path, question(max_drop=0.9, limit=30))
    watch = watching(tmp_path, llama, own, share=1.0)
    prompt = own.prompt(3)
    for text, losses in ((f"x {own.right[prompt]}", 0), ("nonsense", 1)):
        state = watch.see(prompt, text, "any", {"right": own.right[prompt]})
        assert state is not None and state.losses == losses
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"prompt": prompt, "reference": "any", "right": "never said"})
    )
    (live,) = read_prompts(path)
    audit(watch, [live])
    assert watch.state().losses == 1, "the target is wrong too, so nothing is lost"


def test_the_example_of_an_audit_runs(
    llama: Pair, task: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    certify(llama, task, tmp_path / "run", question(max_drop=0.95, limit=40))
    page = (Path(__file__).parents[1] / "docs" / "certificates.md").read_text()
    (example,) = re.findall(r"```\n(from pathlib.*?)```", page, re.S)
    names = {"pair": llama, "task": task, "prompt": task.prompt(3), "text": "w1"}
    exec(example.replace("share=0.05", "share=1.0"), names)
    assert names["state"].audited == 1


def test_an_audit_warns_of_drift_and_needs_no_references(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    made = certify(llama, task, tmp_path, question(max_drop=0.9))
    made["max_drop"] = (
        0.05  # as if it had been certified where next to nothing was lost
    )
    write_json(tmp_path / "certificate.json", made)
    watch, state = watching(tmp_path, llama, task, share=1.0), None
    for i in range(40):
        said = watch.see(
            task.prompt(i), "w1 nonsense" if i >= 20 else task.right[task.prompt(i)]
        )
        assert said is not None
        state = said
        assert not (i < 20 and state.drifted)
    assert (
        state is not None
        and state.drifted
        and state.interval[0] > 0.05
        and state.losses == 20
    )
    assert watching(tmp_path, llama, task).state().drifted, "a restart does not forget"


def test_an_audit_refuses_what_it_cannot_watch(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="there is no certificate"):
        watching(tmp_path, llama, task)
    certify(llama, task, tmp_path, question(max_drop=0.01, limit=20))
    with pytest.raises(InputError, match="certifies nothing"):
        watching(tmp_path, llama, task)
    bad = tmp_path / "prompts.jsonl"
    for text, says in (
        ("", "has no prompts"),
        ("{}\n", "line 1: needs"),
        ("[1]\n", "row 1: is no object"),
        ("5\n", "line 1: is no object"),
        ('{"prompt": 5}\n', "line 1: "),
    ):
        bad.write_text(text)
        with pytest.raises(InputError, match=says):
            read_prompts(bad)


def test_a_prompt_is_known_by_its_content(llama: Pair) -> None:
    assert (
        prompt_digest(llama.target.encode("w1 w2"))
        == prompt_digest(llama.target.encode("w1  w2"))
        != prompt_digest([2, 1])
    )
    assert not RULES.keys() & {"certified"}, (
        "resolving a certificate is the caller's business"
    )


# ---- what cannot be lost is not counted as kept


def test_a_reference_that_is_not_the_same_as_itself_is_refused(
    llama: Pair, tmp_path: Path
) -> None:
    class Compared:
        """Without a `correct` of its own."""

        name, max_new_tokens = "compared", 12

        def __init__(self, broken: int):
            self.echo, self.broken = Echo(llama, size=80), broken

        def samples(self, split: str):
            for i, sample in enumerate(self.echo.samples(split)):
                yield replace(
                    sample,
                    reference="N/A" if i % 10 < self.broken else sample.reference,
                )

        def answer(self, text: str):
            return self.echo.answer(text)

        def same(self, a, b):
            return None if a is None or b is None or "N/A" in (a, b) else a == b

    with pytest.raises(
        InputError, match=r"\d+ of 60 prompts have references .* such as 'N/A' of"
    ):
        certify(llama, Compared(3), tmp_path / "bad", question())
    made = certify(llama, Compared(0), tmp_path / "good", question())
    assert made["n"] <= 60
    made = certify(
        llama, Compared(3), tmp_path / "differ", question(loss="disagreement")
    )
    assert made["n"] <= 60, "which needs no references"


class Weak(Echo):
    """The target is right on the first tenth of the prompts only."""

    name = "weak"

    def correct(self, text: str, sample: Sample) -> bool:
        return int(sample.id.split("-")[1]) % 10 == 0 and super().correct(text, sample)


def test_a_target_that_is_hardly_ever_right_is_refused(
    llama: Pair, tmp_path: Path
) -> None:
    """At most 10 % can be lost: a limit of 5 % would say next to nothing."""
    weak = Weak(llama)
    asked = question(max_drop=0.05, rules=("topk:1",), limit=100)
    with pytest.raises(
        InputError, match=r"the target answers \d+ of 50 prompts rightly, so at most"
    ):
        certify(llama, weak, tmp_path, asked)
    made = certify(llama, weak, tmp_path, replace(asked, allow_weak_target=True))
    assert (
        made["certified"]["losses"] == 0 and made["certified"]["target_accuracy"] < 0.3
    )


@pytest.mark.parametrize("part", ["correct", "score"])
def test_a_score_that_is_no_verdict_is_refused(
    part: str, llama: Pair, tmp_path: Path
) -> None:
    given = {
        "correct": lambda self, text, sample: 85,
        "score": lambda self, pairs: [Score(True, 1.5) for _ in pairs],
    }
    task = type("Percent", (Echo,), {part: given[part]})(llama)
    with pytest.raises(InputError, match=r"give True or False|a loss is from 0 to 1"):
        certify(llama, task, tmp_path, question())


def test_a_question_that_was_killed_keeps_its_prompts(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """Wherever it is killed: another question cannot take them meanwhile."""

    def killed(*_) -> None:
        raise KeyboardInterrupt

    asked = question(limit=80, max_drop=0.1)
    with pytest.raises(KeyboardInterrupt):
        certify(llama, task, tmp_path, asked, killed)
    first = [use["id"] for use in Journal(tmp_path / "uses.jsonl")]
    certify(llama, task, tmp_path, replace(asked, max_drop=0.2))
    certify(llama, task, tmp_path, asked)
    uses = list(Journal(tmp_path / "uses.jsonl"))
    ids = [use["id"] for use in uses]
    own = [use["id"] for use in uses if use["key"] == uses[0]["key"]]
    assert first and own[: len(first)] == first and len(ids) == len(set(ids))


def test_a_head_takes_what_it_was_fitted_on_with_it(
    llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """Also where it is saved or copied into another run, which knows nothing of its prompts."""
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    seen = [task.prompt(i) for i in range(100)]
    digests = tuple(prompt_digest(llama.target.encode(prompt)) for prompt in seen)
    folder = tmp_path / "other" / "judge"
    head = Head(
        torch.ones(width) / 9, 0.0, Inputs(), 0.5, llama.fingerprints, prompts=digests
    )
    head.save(folder)
    (tmp_path / "other" / "uses.jsonl").touch()
    for run in (tmp_path / "other", tmp_path / "third"):
        rule = f"judge:{folder}@0.5"
        made = certify(
            llama, task, run, question(rules=(rule,), max_drop=0.9, limit=40)
        )
        used = {use["id"] for use in Journal(run / "uses.jsonl")}
        assert made["n"] <= 40 and not used & {f"train-{i}" for i in range(100)}


def test_prompts_that_the_draft_was_aligned_on_are_left_out(
    llama: Pair, task: Echo, checkpoints: Callable, tmp_path: Path
) -> None:
    seen = [llama.target.encode(task.prompt(i)) for i in range(100)]
    answers = [
        (prompt, llama.generate(prompt, max_new_tokens=4).tokens) for prompt in seen
    ]
    plan = DrafterPlan("model", tmp_path / "run" / "model", epochs=1)
    fit_to_answers(llama, answers, plan)
    pair = load_pair(checkpoints("llama")[0], str(plan.out))
    run = tmp_path / "certified"
    made = certify(pair, task, run, question(max_drop=0.9, limit=40))
    used = {use["id"] for use in Journal(run / "uses.jsonl")}
    assert made["n"] and used and not used & {f"train-{i}" for i in range(100)}


def test_a_judge_that_is_fitted_says_on_which_prompts(
    llama: Pair, tmp_path: Path
) -> None:
    from test_mining import ParityTask

    mine(llama, ParityTask(), tmp_path / "run", MineConfig(limit=20))
    plan = HeadPlan(Inputs(), tmp_path / "elsewhere" / "judge", FitConfig())
    head = fit_run(llama, tmp_path / "run", plan)
    prompts = [
        line["prompt_ids"] for line in Journal(tmp_path / "run" / "journal.jsonl")
    ]
    assert head.prompts == tuple(map(prompt_digest, prompts))
    assert load_head(tmp_path / "elsewhere" / "judge").prompts == head.prompts


@pytest.mark.parametrize(
    ("rule", "loss"),
    [
        ("topk:2", "paired"),
        ("topk:2", "net"),
        ("fuzzy:js@0.3", "paired"),
        ("exact|random:0.1", "disagreement"),
        ("exact|random:0.1", "task"),
        # it also rejects what the strict rule accepts
        (
            "fuzzy:js@0.1",
            "disagreement",
        ),
        # what follows its rejections is not the target's
        (
            "ensemble:0.3",
            "disagreement",
        ),
    ],
)
def test_the_target_is_asked_only_where_it_must_be_and_losses_are_the_same(
    rule: str, loss: str, llama: Pair, tmp_path: Path
) -> None:
    half = type("Half", (Echo,), {"correct": _half_right})(llama)
    asked = question(
        rules=(rule,), loss=loss, max_drop=0.5, limit=60, allow_weak_target=True
    )
    (row,) = certify(llama, half, tmp_path, asked)["tried"][:1]
    used = [use["id"] for use in Journal(tmp_path / "uses.jsonl")]
    by_id = {sample.id: sample for sample in half.samples("train")}
    samples = [by_id[id] for id in used][: row["n"]]
    outs = [
        llama.generate_batch(
            [sample.prompt for sample in samples],
            rule=decided_by,
            window=4,
            max_new_tokens=12,
        )
        for decided_by in ("target", rule)
    ]
    losses, needed = [], 0
    for sample, own, lenient in zip(samples, *outs):
        right = [half.correct(out.text, sample) for out in (own, lenient)]
        ends = [half.answer(out.text) for out in (own, lenient)]
        losses.append(
            {
                "paired": float(right[0] and not right[1]),
                "net": float(right[0]) - float(right[1]),
                "disagreement": float(ends[0] != ends[1]),
                "task": half.loss(lenient.text, own.text, sample),
            }[loss]
        )
        needed += lenient.accepted_lenient > 0 and not (loss == "paired" and right[1])
    assert row["losses"] == pytest.approx(sum(losses))
    (journal,) = tmp_path.glob("calibration/*/answers.jsonl")
    targets = {line["id"] for line in Journal(journal) if line["rule"] == "target"}
    first = set(used[:50])  # on which the target's accuracy is looked at
    assert len(targets - first) <= needed and (needed < 60 or loss != "paired")


@pytest.mark.parametrize("joined", ["", "&topk:9", "|topk:2"])
def test_an_answer_that_no_score_lies_between_is_taken_over(
    joined: str, llama: Pair, task: Echo, tmp_path: Path
) -> None:
    """And only such a one: what is taken over is what would have been decoded."""
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 16
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints).save(tmp_path / "judge")
    (tmp_path / "uses.jsonl").touch()
    rules = [
        f"judge:{tmp_path / 'judge'}@{threshold}{joined}"
        for threshold in (0.7, 0.6, 0.5)
    ]
    asked = question(settings=(tuple(rules),), rules=(), max_drop=0.95, limit=100)
    made = certify(llama, task, tmp_path, asked)
    tried = [row["rule"] for row in made["tried"]]
    assert tried == rules, "all must be tried, to have anything to take over"
    (journal,) = tmp_path.glob("calibration/*/answers.jsonl")
    lines = [line for line in Journal(journal) if line["rule"] in rules[1:]]
    taken = [line for line in lines if line["seconds"] == 0]
    assert taken and len(taken) < len(lines)
    by_id = {sample.id: sample.prompt for sample in task.samples("train")}
    for line in taken:
        out = llama.generate(
            by_id[line["id"]], rule=line["rule"], window=4, max_new_tokens=12
        )
        assert (out.text, out.target_passes) == (line["text"], line["target_passes"])


def _half_right(self: Echo, text: str, sample: Sample) -> bool:
    return int(sample.id.split("-")[1]) % 2 == 0 and Echo.correct(self, text, sample)


@pytest.mark.parametrize(
    ("rules", "chains", "shared_by"), [(1, 0, 1), (2, 0, 2), (0, 2, 2), (1, 3, 4)]
)
def test_rules_and_chains_share_the_error(
    rules: int, chains: int, shared_by: int
) -> None:
    config = CertifyConfig(
        rules=tuple(f"topk:{k + 2}" for k in range(rules)),
        settings=tuple(
            (f"topk:{k + 2}; window=4", f"topk:{k + 3}; window=4")
            for k in range(chains)
        ),
        confidence=0.9,
    )
    assert config.alpha(0.5) == pytest.approx(0.5 * 0.1 / shared_by)
