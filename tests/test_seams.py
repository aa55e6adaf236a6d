"""The seams: what is added in one place is known everywhere, and what is asked of one part is
refused or done by name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_contributing import copy_of_the_source
from test_mining import ParityTask
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
)
from transformers.utils import logging

import lenience
from lenience import InputError
from lenience.certification.question import CertifyConfig
from lenience.core.context import Context
from lenience.core.protocols import Rule
from lenience.core.records import Record
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.decoder import Decoder
from lenience.decoding.options import ELSEWHERE, Options, bound_names, names
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.pages import write_report
from lenience.heads.head import Head, Inputs
from lenience.models.lm import LM
from lenience.rules.settings import ladder
from lenience.runs.answers import Answers
from lenience.runs.journal import Journal
from lenience.tasks import Sample, Score, as_task, take

# ---- an option of decoding

ONE_LINE = '''    flavour: Literal["plain", "sweet"] = "plain"
    """How it tastes."""
    seed: int = 0
'''
CHECKS = """
import inspect, sys, tempfile
from pathlib import Path
import lenience
from lenience.cli.options import decoding_flags
from lenience.decoding.decoder import Decoder
from lenience.decoding.options import bound_names
from lenience.evaluation.compare import CompareConfig
from lenience.runs.answers import Answers
from lenience.tasks import WordMath, take

pair = lenience.load_pair(compile=False)
for function in (pair.generate, pair.generate_batch, pair.stream):
    assert "flavour" in inspect.signature(function).parameters, function
(sample,) = take(WordMath(), "test", 1)
assert pair.generate(sample.prompt, flavour="sweet", max_new_tokens=1).tokens
assert "flavour" in bound_names() and Decoder.of(flavour="sweet").bound()["flavour"] == "sweet"
config = CompareConfig(settings=("exact; flavour=sweet",))
assert config.named[-1] == {"rule": "exact", "flavour": "sweet"}
answers = Answers(pair, WordMath(), Path(tempfile.mkdtemp()) / "answers.jsonl")
decoding = Decoder.of(flavour="sweet", max_new_tokens=2)
(answer,) = answers.get(decoding, [sample])
assert answer.setting == "exact; max_new_tokens=2; flavour=sweet", answer.setting
assert not answers.known(Decoder.of(max_new_tokens=2, flavour="plain"), [sample])
"""


def test_an_option_is_one_line(tmp_path: Path) -> None:
    """A field of PlainOptions is a keyword, a flag, bound by certificates, named by settings, and
    part of a journal's key."""
    options = copy_of_the_source(tmp_path) / "decoding" / "options.py"
    text = options.read_text()
    assert text.count("    seed: int = 0\n") == 1
    options.write_text(text.replace("    seed: int = 0\n", ONE_LINE))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, "-c", CHECKS], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for command in ("generate", "certify", "compare"):
        command_line = [sys.executable, "-m", "lenience", command, "--help"]
        shown = subprocess.run(command_line, env=env, capture_output=True, text=True)
        assert "--flavour" in shown.stdout and "How it tastes." in shown.stdout, command


def test_options_are_the_keywords_of_what_decodes() -> None:
    for function in (Pair.generate, Pair.generate_batch, Pair.stream):
        assert set(names()) <= inspect.signature(function).parameters.keys()
    assert {"rule", "seed"} == set(names()) - set(bound_names())


@given(
    st.integers(0, 64),
    st.sampled_from(["fixed", "heuristic", "confidence:0.4", 'head:"my run/stop"@0.5']),
    st.floats(0, 2, width=32),
    st.lists(st.text('ab;="\\\n ', min_size=1, max_size=6), max_size=3),
)
def test_a_setting_is_its_text(
    window: int, stop: str, temperature: float, ends: list[str]
) -> None:
    decoder = Decoder.of(
        rule="topk:3",
        window=window,
        stop=stop,
        temperature=temperature,
        stop_strings=tuple(ends),
    )
    assert Decoder.parse(str(decoder)) == decoder
    assert Decoder.of(decoder.to_json()) == decoder


# ---- whole decoders in one table


def test_settings_with_stops_and_windows_of_their_own_stand_in_one_table(
    llama: Pair,
) -> None:
    settings = (
        "topk:2; window=3",
        "topk:2; window=6; stop=confidence:0.4",
        "exact; window=2; stop=entropy:0.5",
    )
    config = CompareConfig(settings=settings, limit=3, timed=1, repeats=1, tuning=2)
    rows = compare(llama, ParityTask(), config).rows
    found = {(row.rule, row.window, row.options.get("stop")) for row in rows}
    assert ("topk:2", 3, None) in found
    assert ("topk:2", 6, "confidence:0.4") in found
    assert ("exact", 2, "entropy:0.5") in found
    strict = {row.rule: row for row in rows}
    assert strict["exact"].paired_loss == 0
    samples = take(as_task(ParityTask()), "test", 3)
    for row, setting in (
        (one, text) for one in rows for text in settings if one.why == "given"
    ):
        decoder = Decoder.parse(setting)
        if (row.rule, row.window) == (str(decoder.rule), decoder.window):
            limited = decoder.with_options(
                {"max_new_tokens": ParityTask.max_new_tokens}
            )
            outs = [llama.generate(sample.prompt, limited) for sample in samples]
            passes = sum(out.target_passes for out in outs)
            assert row.tokens_per_pass == sum(len(out.tokens) for out in outs) / passes


# ---- a target alone, and what proposes for certain


def test_a_target_alone_is_a_pair_that_needs_another_drafter(
    checkpoints, llama: Pair
) -> None:
    target, _ = checkpoints("llama")
    alone = lenience.load_pair(target, dtype="float32", compile=False)
    wanted = llama.generate("w1 w2", rule="target", max_new_tokens=12)
    assert (
        alone.generate("w1 w2", rule="target", max_new_tokens=12).tokens
        == wanted.tokens
    )
    with pytest.raises(InputError, match=r"drafter model.*draft"):
        alone.generate("w1 w2", rule="exact")


def test_a_target_alone_is_compared_without_a_draft(
    checkpoints, repeating: str, tmp_path: Path
) -> None:
    alone = lenience.load_pair(checkpoints("llama")[0], dtype="float32", compile=False)
    config = CompareConfig(
        settings=(f"exact; drafter={repeating}; window=3",), limit=3, timed=1, repeats=1
    )
    frontier = compare(alone, ParityTask(), config)
    assert [row.rule for row in frontier.rows] == ["target", "exact"]
    assert (
        all(row.share_of_cap is None for row in frontier.rows)
        and not frontier.allocation
    )
    assert frontier.rows[1].paired_loss == 0
    write_report(tmp_path / "report.html", frontier)
    with pytest.raises(InputError, match="rule draft"):
        compare(alone, ParityTask(), replace(config, rules=("draft",)))


def test_loaded_models_do_with_their_tokenizer(checkpoints, llama: Pair) -> None:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path) for path in checkpoints("llama")
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoints("llama")[0])
    pair = lenience.load_pair(target, draft, tokenizer=tokenizer, compile=False)
    options = {"rule": "topk:2", "max_new_tokens": 16}
    assert (
        pair.generate("w3 w4", **options).tokens
        == llama.generate("w3 w4", **options).tokens
    )
    mixed = lenience.load_pair(
        target, checkpoints("llama")[1], tokenizer=tokenizer, compile=False
    )
    assert (
        mixed.generate("w3 w4", **options).tokens
        == pair.generate("w3 w4", **options).tokens
    )
    with pytest.raises(InputError, match="tokenizer"):
        lenience.load_pair(target, draft)
    with pytest.raises(InputError, match="dtype"):
        lenience.load_pair(target, draft, tokenizer=tokenizer, dtype="bfloat16")


def test_prompts_come_as_users_of_transformers_have_them(llama: Pair) -> None:
    tokenizer = llama.target.tokenizer
    ids = tokenizer("w3 w4")["input_ids"]
    told = llama.generate(ids, max_new_tokens=8)
    batch = tokenizer(["w3 w4"], return_tensors="pt")
    padded = {"input_ids": [[*ids, 0, 0]], "attention_mask": [[1] * len(ids) + [0, 0]]}
    for prompt in (
        torch.tensor(ids),
        torch.tensor([ids]),
        np.array(ids),
        batch,
        padded,
    ):
        assert llama.generate(prompt, max_new_tokens=8).tokens == told.tokens
        assert llama.generate_batch([prompt], max_new_tokens=8)[0].tokens == told.tokens
    for prompt in (["w3", "w4"], tokenizer(["w3", "w4"]), torch.tensor([ids, ids])):
        with pytest.raises(InputError, match="generate_batch takes several"):
            llama.generate(prompt)
    with pytest.raises(InputError, match=r"not tensor|not \[0\.5"):
        llama.generate(torch.tensor([0.5]))


def test_options_of_other_libraries_are_told_where_they_are(llama: Pair) -> None:
    for name, says in (
        ("do_sample", "a temperature above 0 samples"),
        ("generation_config", "say temperature, top_k and top_p here"),
        ("stopping_criteria", "stop_strings"),
        ("num_return_sequences", "generate_batch"),
        ("temprature", "there are rule, drafter"),
    ):
        for value in (1, None):
            with pytest.raises(InputError, match=f"{name}: there is no such .*{says}"):
                llama.generate("w3", **{name: value})
    assert not set(ELSEWHERE) & {item.name for item in fields(Options)}
    nothing = {item.name: None for item in fields(Options)}
    assert Decoder.of(nothing) == Decoder()


def test_what_a_user_prints_is_short(llama: Pair) -> None:
    out = llama.generate("w3 w4", max_new_tokens=40)
    assert repr(out).startswith("<Generation 'w") and len(repr(out)) < 150
    assert f"{len(out.tokens)} tokens" in repr(
        out
    ) and f"ended by {out.finish}" in repr(out)
    assert repr(llama).startswith("<Pair ") and "target 0.0 M float32 on cpu" in repr(
        llama
    )
    assert isinstance(llama, lenience.Pair) and isinstance(out, lenience.Generation)
    assert all(
        isinstance(step, lenience.Step) for step in llama.stream("w3", max_new_tokens=4)
    )
    with pytest.raises(AttributeError, match="no attribute 'Paar'"):
        _ = lenience.Paar


def test_loading_draws_no_bars_and_leaves_others_theirs(checkpoints, capfd) -> None:
    assert logging.is_progress_bar_enabled()
    folders = checkpoints("llama")
    capfd.readouterr()  # what making them drew
    lenience.load_pair(*folders, compile=False)
    lenience.load_pair(compile=False)
    assert "%|" not in capfd.readouterr().err and logging.is_progress_bar_enabled()


@pytest.mark.parametrize("rule", ["kl:0.4", "fuzzy:js@0.4"])
def test_a_rule_that_compares_distributions_refuses_a_drafter_that_has_none(
    rule: str, repeating: str, llama: Pair
) -> None:
    name = rule.split(":")[0]
    with pytest.raises(InputError, match=f"{name}.*repeat|repeat.*{name}"):
        llama.generate("w1 w2", rule=rule, drafter=repeating, temperature=0.7)


def test_a_stop_and_a_judge_that_read_the_draft_refuse_a_drafter_without_one(
    repeating: str, judge: str, llama: Pair
) -> None:
    for options in ({"stop": "confidence:0.4"}, {"rule": judge}):
        with pytest.raises(InputError, match=f"drafter {repeating} has none"):
            llama.generate("w1 w2", drafter=repeating, **options)


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_tokens_proposed_for_certain_leave_the_targets_distribution(
    rule: str, repeating: str, llama: Pair
) -> None:
    """A token with draft probability 1 is accepted with the target's probability, and what follows
    a rejection is drawn from the rest: two tokens are distributed as transformers' logits say."""
    n = 500

    def next_probs(prompts: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = llama.target.model(torch.tensor(prompts)).logits[:, -1]
        return (logits.double() / 0.3).softmax(-1)

    # where the target says its last token again about as often as not
    pairs = [[a, b] for a in range(48) for b in range(48)]
    again = next_probs(pairs)[range(len(pairs)), [b for _, b in pairs]]
    which = int((again - 0.4).abs().argmin())
    prompt, chance = pairs[which], float(again[which])
    (first,) = next_probs([prompt])
    expected = {
        (a, b): n * float(first[a] * p)
        for a in range(len(first))
        for b, p in enumerate(next_probs([[*prompt, a]])[0].tolist())
    }
    options = {"rule": rule, "drafter": repeating, "temperature": 0.3, "window": 1}
    outs = [
        llama.generate(prompt, **options, max_new_tokens=2, seed=seed)
        for seed in range(n)
    ]
    accepted = sum(out.accepted_exact + out.accepted_lenient for out in outs)
    assert accepted == pytest.approx(
        n * chance, abs=5 * (n * chance * (1 - chance)) ** 0.5
    )
    assert 50 < accepted < n - 50, "both ways are taken"
    seen = Counter(tuple(out.tokens) for out in outs)
    likely_pairs = [pair for pair in expected if expected[pair] >= 5]
    ours = [seen[pair] for pair in likely_pairs]
    wanted = [expected[pair] for pair in likely_pairs]
    assert len(wanted) >= 5
    assert chisquare([*ours, n - sum(ours)], [*wanted, n - sum(wanted)]).pvalue > 1e-6


def test_a_head_that_reads_a_draft_wants_a_pair_that_has_one(
    checkpoints, judge: str
) -> None:
    alone = lenience.load_pair(checkpoints("llama")[0], dtype="float32", compile=False)
    with pytest.raises(
        InputError, match="reads states of the draft, and the pair has no draft"
    ):
        alone.generate("w1 w2", rule=judge, window=0)


@pytest.mark.parametrize("rule", ["target", "draft"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop": "head:/nowhere@0.5"}, "/nowhere"),
        ({"drafter": "nonsense"}, "drafter 'nonsense'"),
    ],
)
def test_options_are_checked_also_where_one_model_decodes_alone(
    rule: str, options: dict, says: str, llama: Pair
) -> None:
    with pytest.raises(InputError, match=says):
        llama.generate("w1 w2", rule=rule, **options)


class Everything(Rule):
    """Keeps all that is drafted: a rule of a user's own."""

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        after = reading.greedy_tokens.tolist()
        return [
            Verdict(
                tokens[:n],
                list(range(n)),
                after[b][n],
                exact=[True] * n,
                scores=[None] * n,
            )
            for b, (tokens, n) in enumerate(
                zip(draft.tokens.tolist(), draft.lengths.tolist())
            )
        ]


def test_a_users_own_rule_says_only_what_it_decides(llama: Pair) -> None:
    out = llama.generate("w1 w2", rule=Everything(), max_new_tokens=24)
    assert out.drafted > 0 and all(
        entry.origin in ("draft", "bonus") for entry in out.trace
    )
    for wrong in ({"rule": 3}, {"drafter": 3}, {"stop": 3}):
        with pytest.raises(InputError, match="3: is neither a spec nor a"):
            llama.generate("w1 w2", **wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": True}, "window True: must be a whole number"),
        ({"window": 2.5}, 'window 2.5: must be a whole number, or "auto"'),
        ({"top_k": 2.5}, "top_k 2.5: must be a whole number, or None"),
        ({"temperature": None}, "temperature None: must be a number"),
        ({"temperature": "hot"}, "temperature 'hot': must be a number"),
        ({"max_new_tokens": None}, "max_new_tokens None: must be a whole number"),
        ({"seed": None}, "seed None: must be a whole number"),
        ({"seed": "1"}, "seed '1': must be a whole number"),
        ({"stop_strings": [3]}, "stop_strings: 3 is not text"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_name(options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Options(**options)


def test_numbers_of_numpy_and_no_stop_are_taken() -> None:
    decoder = Decoder.of(window=np.int64(3), temperature=np.float32(0.5), stop=None)  # type: ignore[arg-type]
    assert str(decoder) == "exact; window=3; temperature=0.5"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('exact; stop="fixed', "a double quote is not closed"),
        ("exact; window=3;", "after each ; write an option as name=value"),
    ],
)
def test_a_broken_setting_is_told_by_its_text(setting: str, says: str) -> None:
    with pytest.raises(InputError, match=f"setting '{re.escape(setting)}': {says}"):
        Decoder.parse(setting)


def test_what_loads_a_pair_shows_its_options() -> None:
    for function in (lenience.load_pair, lenience.decoding.loading.load_pair):
        assert inspect.signature(function).parameters.keys() >= {
            "dtype",
            "device",
            "compile",
        }
        assert inspect.signature(function).parameters["device"].default == "auto"


def test_what_loading_would_ignore_is_refused(checkpoints) -> None:
    target, draft = checkpoints("llama")
    loaded = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    for models, options, says in (
        ((target, draft), {"tokenizer": tokenizer}, "tokenizer: .*comes with its own"),
        (
            (),
            {"tokenizer": tokenizer},
            "tokenizer: the built-in pair comes with its own",
        ),
        (
            (loaded,),
            {"tokenizer": tokenizer, "device": "cpu"},
            "device: .*loaded already",
        ),
        (
            (target,),
            {"target_kwargs": {"dtype": torch.float32}},
            "target_kwargs: give dtype by",
        ),
        ((target,), {"dtype": torch.float32}, "dtype torch.float32: is unknown"),
        ((3,), {}, "target 3: is neither a name or folder nor a loaded"),
        ((torch.nn.Linear(1, 1),), {}, "target Linear.*: is neither"),
        (
            (loaded,),
            {"tokenizer": target},
            "tokenizer: give that of the loaded target.*, not",
        ),
    ):
        with pytest.raises(InputError, match=says):
            lenience.load_pair(*models, **{"compile": False, **options})


def test_heads_are_refused_where_the_lm_head_reads_other_states_than_the_decoder_gives(
    llama: Pair,
) -> None:
    """BERT transforms them in between."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=48, intermediate_size=48, is_decoder=True, **sizes)
    bert = LM(BertLMHeadModel(config), llama.target.tokenizer, "bert")
    with pytest.raises(
        InputError, match="'bert': BertLMHeadModel transforms its states"
    ):
        bert.check_states()
    llama.target.check_states()


# ---- tasks


class Old:
    """A task as it could be written before samples reached `answer` and `same`."""

    name = "old"
    max_new_tokens = 8

    def samples(self, split: str):
        yield Sample("a", "w1", "w2")

    def answer(self, text: str):
        return text or None

    def same(self, a, b):
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        return text == sample.reference


class Metadata:
    name = "metadata"

    def samples(self, split: str):
        for i in range(6):
            yield Sample(str(i), f"w{i + 1}", "yes", {"wanted": i})

    def answer(self, text: str, sample: Sample):
        return "yes" if sample.metadata["wanted"] % 2 else "no"


def test_tasks_of_both_shapes_work(llama: Pair, tmp_path: Path) -> None:
    old = as_task(Old())
    (sample,) = take(old, "test", None)
    assert old.answer("x", sample) == "x" and old.same("x", "x", sample) is True
    assert old.score([("w2", sample), ("w3", sample)]) == [
        Score(True, 0.0),
        Score(False, 1.0),
    ]
    task = as_task(Metadata())
    samples = take(task, "test", None)
    answers = Answers(llama, task, tmp_path / "answers.jsonl")
    found = answers.get(Decoder.of(max_new_tokens=3), samples)
    assert [answer.correct for answer in found] == [False, True] * 3


class ByName(Metadata):
    """Takes the sample by its name alone."""

    def answer(self, text: str, *, sample: Sample):
        return super().answer(text, sample)


def test_a_sample_may_be_taken_by_name() -> None:
    task = as_task(ByName())
    even, odd = take(task, "test", 2)
    assert (task.answer("", even), task.answer("", odd)) == ("no", "yes")


@pytest.mark.parametrize(
    ("part", "gives", "says"),
    [
        (
            "samples",
            lambda *_: ["w1 w2"],
            "task 'metadata': samples gave 'w1 w2', which is no Samp",
        ),
        (
            "answer",
            lambda *_: ["yes"],
            r"task 'metadata', sample 0: answer gave \['yes'\]; give t",
        ),
        (
            "answer",
            lambda *_: {}["x"],
            "task 'metadata', sample 0: answer failed with KeyError: 'x'",
        ),
        (
            "same",
            lambda *_: 1 / 0,
            "sample 0: same failed with ZeroDivisionError: division",
        ),
        (
            "correct",
            lambda *_: 1 / 0,
            "sample 0: correct failed with ZeroDivisionError",
        ),
        (
            "score",
            lambda pairs: [True] * len(pairs),
            "sample 0: score gave True; give a Score",
        ),
        ("score", lambda pairs: [], "score gave 0 scores for 1 resp"),
    ],
)
def test_what_a_task_gives_wrongly_is_told_by_its_sample(
    part: str, gives, says: str, llama: Pair, tmp_path: Path
) -> None:
    task = as_task(type("Wrong", (Metadata,), {part: staticmethod(gives)})())
    with pytest.raises((InputError, RuntimeError), match=says):
        samples = take(task, "test", 1)
        Answers(llama, task, tmp_path / "a.jsonl").get(
            Decoder.of(max_new_tokens=2), samples
        )


def test_a_users_same_may_give_any_truth() -> None:
    task = as_task(
        type("Numpy", (Metadata,), {"same": lambda self, a, b: np.bool_(a == b)})()
    )
    assert task.same("a", "a") is True and task.same("a", "b") is False


def test_answers_of_other_settings_of_a_rule_are_other_answers(
    llama: Pair, tmp_path: Path
) -> None:
    samples = take(as_task(Metadata()), "test", 1)
    answers = Answers(llama, as_task(Metadata()), tmp_path / "answers.jsonl")
    answers.get(Decoder(), samples)
    assert not answers.known(Decoder.of(window=2), samples)
    old = Answers(llama, as_task(Metadata()), tmp_path / "old.jsonl")
    line = {"id": samples[0].id, "rule": "exact", "answer": None, "correct": True}
    old.journal.write({**line, "tokens": 7, "target_passes": 3})
    old = Answers(llama, as_task(Metadata()), tmp_path / "old.jsonl")
    (known,) = old.get(Decoder.of(window=2), samples)
    assert known.tokens == 7, "a journal that names no settings holds one of each rule"


class Waiting(Metadata):
    """Scores nothing before it is let."""

    name = "waiting"

    def __init__(self) -> None:
        self.may_score, self.batches = threading.Event(), list[int]()

    def score(self, pairs) -> list[Score]:
        assert self.may_score.wait(60)
        self.batches.append(len(pairs))
        return [Score(True, 0.0) for _ in pairs]


def test_a_slow_scorer_is_asked_beside_decoding(llama: Pair, tmp_path: Path) -> None:
    """It may score once everything is decoded: a decoder that waited for it would never end."""
    waiting = Waiting()
    task = as_task(waiting)
    samples = take(task, "test", None)

    def told(_: str, done: int, total: int) -> None:
        if done == total:
            waiting.may_score.set()

    answers = Answers(llama, task, tmp_path / "answers.jsonl")
    found = answers.get(Decoder.of(max_new_tokens=2), samples, told)
    assert len(found) == len(samples) == len(list(Journal(tmp_path / "answers.jsonl")))
    assert len(waiting.batches) == 2, "what came while it was busy is scored together"


class Picky(Metadata):
    """Cannot score one of the samples."""

    def score(self, pairs) -> list[Score]:
        assert all(sample.id != "2" for _, sample in pairs), "no score of 2"
        return [Score(True, 0.0) for _ in pairs]


class PickyInside(Metadata):
    def correct(self, text: str, sample: Sample) -> bool:
        assert sample.id != "2", "no score of 2"
        return True


@pytest.mark.parametrize("task", [Picky(), PickyInside()])
def test_what_a_scorer_raises_ends_the_run_and_loses_no_other_answer(
    task: Metadata, llama: Pair, tmp_path: Path
) -> None:
    picky = as_task(task)
    samples = take(picky, "test", None)
    for _ in range(5):  # each time at least one answer more
        with pytest.raises(
            RuntimeError, match=r"sample 2: .* failed with AssertionError: no"
        ):
            answers = Answers(llama, picky, tmp_path / "a.jsonl", batch_size=1)
            answers.get(Decoder.of(max_new_tokens=2), samples)
    kept = {line["id"] for line in Journal(tmp_path / "a.jsonl")}
    assert kept == ({"0", "1", "3", "4", "5"} if picky.scores_batches else {"0", "1"})


def test_a_task_without_a_score_of_its_own_is_asked_where_it_was_made(
    llama: Pair, tmp_path: Path
) -> None:
    """Time limits by signals, and what belongs to a thread, work in the main one."""

    class Here(Metadata):
        def correct(self, text: str, sample: Sample) -> bool:
            assert threading.current_thread() is threading.main_thread()
            return True

    task = as_task(Here())
    answers = Answers(llama, task, tmp_path / "answers.jsonl")
    assert all(
        one.correct
        for one in answers.get(Decoder.of(max_new_tokens=2), take(task, "test", None))
    )


# ---- records


class Point(Record):
    x: int
    y: int = 0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"y": 1}, "run.json: lacks x; mend"),
        ({"x": 1, "z": 2}, "run.json: has z, which is unknown here; mend"),
        ({"x": "far"}, "run.json: x: Input should be a valid integer.*; mend"),
        ([1], "run.json: .*; mend"),
    ],
)
def test_a_faulty_record_is_told_by_its_fields(value: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Point.read(value, "run.json", "mend it")


def test_a_journal_with_an_unknown_field_names_the_sample(
    llama: Pair, tmp_path: Path
) -> None:
    task = as_task(Metadata())
    path = tmp_path / "answers.jsonl"
    Answers(llama, task, path).get(Decoder.of(max_new_tokens=2), take(task, "test", 1))
    path.write_text(path.read_text().replace('"rule"', '"rules"'))
    with pytest.raises(
        InputError, match=r"answers.jsonl, line 1: lacks rule, has rules"
    ):
        Answers(llama, task, path)


# ---- rules that join


def test_a_ladder_of_one_judge_leaves_another_judges_path_alone(tmp_path: Path) -> None:
    """Paths that begin alike must not be mistaken for one another."""
    for name in ("mlp", "mlp2"):
        metrics = {"thresholds": [{"recall": 0.9, "threshold": t} for t in (0.7, 0.8)]}
        Head(torch.ones(4), 0.0, Inputs(), 0.5, {}, metrics).save(tmp_path / name)
    one, other = f"judge:{tmp_path}/mlp", f"judge:{tmp_path}/mlp2@0.9"
    assert list(map(str, ladder(f"{one}&{other}"))) == [
        f"{one}@{t}&{other}" for t in (0.8, 0.7)
    ]


def test_a_question_reads_a_judge_that_was_trained_again(tmp_path: Path) -> None:
    def trained(*listed: float) -> None:
        metrics = {"thresholds": [{"recall": 0.9, "threshold": t} for t in listed]}
        Head(torch.ones(4), 0.0, Inputs(), 0.5, {}, metrics).save(tmp_path / "judge")

    trained(0.7, 0.8)
    asked = CertifyConfig(rules=(f"judge:{tmp_path}/judge",), max_drop=0.1)
    (before,) = asked.chains()
    trained(0.3)
    (after,) = asked.chains()
    assert [str(step.rule)[-3:] for step in before] == ["0.8", "0.7"]
    assert [str(step.rule)[-3:] for step in after] == ["0.3"]
