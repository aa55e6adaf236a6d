"""What is asked again, elsewhere or otherwise, and which prompts stand for which, told by a pair
whose losses are known."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

import lenience
from lenience import InputError
from lenience.certification import certify as certifying
from lenience.certification.certificate import read_certificate
from lenience.certification.certify import certify, plan
from lenience.certification.question import CertifyConfig
from lenience.certification.sequential_tests import Binomial
from lenience.core.types import Trace
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.mining.search import MineConfig, mine
from lenience.runs.journal import Journal
from lenience.runs.ledger import Attempt, Ledger
from lenience.runs.uses import Draw
from lenience.tasks import Sample, as_task


class Stub:
    """A pair whose target says "right" to every prompt, and whose lenient rules say "wrong" to
    those that are `lost`."""

    def __init__(self, pair: Pair, lost: Callable[[str], bool] = lambda prompt: False):
        self.pair, self.lost = pair, lost
        self.texts = ("right", "wrong")
        self.asked: list[tuple[str, str]] = []
        """Prompts with the rules that they were decoded with."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)

    def as_completed(
        self, prompts: Sequence[str], decoder: Decoder, *, batch_size: int
    ) -> Iterator[tuple[int, Generation]]:
        for number, prompt in enumerate(prompts):
            lenient = not decoder.alone
            self.asked.append((prompt, str(decoder.rule)))
            text = self.texts[lenient and self.lost(prompt)]
            trace = [Trace(1, "draft-lenient" if lenient else "bonus")]
            yield (
                number,
                Generation([], text=text, tokens=[1], target_passes=1, trace=trace),
            )


def prompt_of(i: int) -> str:
    return f"w{1 + i % 46} w{1 + i // 46 % 46} w{1 + i // 2116}"


def after(n: int, every: int) -> Callable[[str], bool]:
    """One in so many is lost, in the order in which they are asked, after the first n."""
    number: dict[str, int] = {}
    return lambda prompt: (
        (i := number.setdefault(prompt, len(number))) >= n and i % every == 0
    )


class Rows:
    """So many prompts, whose answers are their texts."""

    name = "rows"
    max_new_tokens = 8

    def __init__(self, size: int, reference: str | None = "right"):
        self.size, self.reference_of_all = size, reference

    def samples(self, split: str) -> Iterator[Sample]:
        for i in range(self.size):
            yield Sample(f"{split}-{i}", prompt_of(i), self.reference_of_all)

    def answer(self, text: str) -> str | None:
        return text


def question(**given: Any) -> CertifyConfig:
    given = {"rules": ("topk:2",), "max_drop": 0.1, "options": {"window": 4}, **given}
    return CertifyConfig(**given)


def used(folder: Path, key: str | None = None) -> list[str]:
    uses = Journal(folder / "uses.jsonl")
    return [use["id"] for use in uses if key in (None, use["key"])]


def test_another_question_is_counted_and_gets_what_is_left_of_the_error(
    llama: Pair, tmp_path: Path
) -> None:
    pair, made = Stub(llama), []
    for confidence in (0.95, 0.950001, 0.950002, 0.950003):
        asked = question(confidence=confidence, limit=100)
        made.append(certify(pair, Rows(3000), tmp_path, asked))
    assert [one.attempt for one in made] == [1, 2, 3, 4]
    shares = [0.9, *(0.1 * 6 / (math.pi * k) ** 2 for k in (1, 2, 3))]
    assert [one.level for one in made] == pytest.approx(
        [0.05 * one for one in shares], rel=1e-3
    )
    assert sum([0.9, *(0.1 * 6 / (math.pi * k) ** 2 for k in range(1, 100_000))]) < 1
    for one in made:
        assert f"attempt {one.attempt}" in one.procedure
        if one.certified:
            assert 0.9**one.n <= one.level
    assert len(used(tmp_path)) == len(set(used(tmp_path)))
    n = [one.n for one in made if one.certified]
    assert n == sorted(n) and len(set(n)) > 1, "each takes more than the one before"


def test_the_same_question_goes_on_with_the_prompts_that_it_has(
    llama: Pair, tmp_path: Path
) -> None:
    pair, asked = Stub(llama), question(max_drop=0.01)
    few = certify(pair, Rows(3000), tmp_path, replace(asked, limit=100))
    assert few.certified is None and "too few prompts" in str(few.reason)
    first, decoded = used(tmp_path), len(pair.asked)
    more = certify(pair, Rows(3000), tmp_path, replace(asked, limit=2000))
    assert more.certified and (more.attempt, more.key) == (1, few.key)
    assert first and used(tmp_path)[: len(first)] == first and more.n == few.needed
    topk = [prompt for prompt, rule in pair.asked if rule != "target"]
    assert len(topk) == len(set(topk)) and len(pair.asked) > decoded, "nothing twice"
    assert len(used(tmp_path)) < more.n + 32, "no more prompts than it took"
    assert certify(pair, Rows(3000), tmp_path, replace(asked, limit=3000)) == more


def test_what_is_only_out_of_reach_is_not_said_to_lose_too_much(
    llama: Pair, tmp_path: Path
) -> None:
    """One of 32 is more than 1 %, and may be nothing; with so few prompts it cannot pass."""
    pair = Stub(llama, after(5, 20))
    made = certify(pair, Rows(3000), tmp_path, question(max_drop=0.01, limit=420))
    assert (made.n, made.losses) == (32, 1) and "too few prompts" in str(made.reason)
    assert "more than is allowed, but on too few to be sure" in str(made.reason)


def test_a_later_failure_withdraws_an_earlier_certificate(
    llama: Pair, tmp_path: Path
) -> None:
    """Also one that lies in another run folder, and its copy elsewhere."""
    lucky = certify(Stub(llama), Rows(3000), tmp_path / "a", question())
    assert lucky.certified and lucky.n < 60
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    bad = Stub(llama, after(lucky.n, 3))
    again = question(confidence=0.94)
    failed = certify(bad, Rows(3000), tmp_path / "b", again)
    assert failed.certified is None and failed.n > lucky.n and failed.attempt == 2
    for folder in ("a", "copy"):
        if folder == "copy":  # the ledger tells it as soon as anything is asked there
            certify(bad, Rows(3000), tmp_path / folder, again)
        kept = read_certificate(tmp_path / folder)
        assert kept.certified and not kept.holds
        assert f"attempt 2 lost {failed.losses:g} of {failed.n}" in str(kept.withdrawn)
        assert "withdrawn" in (tmp_path / folder / "certificate.html").read_text()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = llama.generate(
                "w1 w2", rule=f"certified:{tmp_path / folder}", max_new_tokens=8
            )
        assert "is withdrawn (attempt 2" in str(caught[0].message)
        assert (
            out.tokens
            == llama.generate("w1 w2", rule="target", max_new_tokens=8).tokens
        )
    once_more = certify(Stub(llama), Rows(3000), tmp_path / "a", question())
    assert once_more.withdrawn and not once_more.holds


@pytest.mark.parametrize(
    ("asked", "every", "withdrawn"),
    [
        # one of 64, on too few to be sure
        (
            {"confidence": 0.949, "limit": 72},
            60,
            False,
        ),
        ({"confidence": 0.99}, 2, True),
        ({"max_drop": 0.05}, 2, True),
        ({"max_drop": 0.05, "limit": 400}, 30, False),  # more was asked for
    ],
)
def test_only_what_contradicts_withdraws(
    asked: dict[str, Any], every: int, withdrawn: bool, llama: Pair, tmp_path: Path
) -> None:
    """What would not pass for what is certified, by these prompts alone."""
    first = certify(Stub(llama), Rows(3000), tmp_path, question())
    failed = certify(
        Stub(llama, after(first.n, every)),
        Rows(3000),
        tmp_path,
        question(**{"limit": 200, **asked}),
    )
    assert first.certified and failed.certified is None and failed.n > first.n
    assert withdrawn == (binom.cdf(failed.losses, failed.n, 0.1) > 0.05)
    kept = read_certificate(tmp_path)
    assert bool(kept.withdrawn) == withdrawn and kept.holds == (not withdrawn)


@pytest.mark.parametrize(
    ("first", "later", "withdrawn"),
    [((2, 4, 8), (4,), True), ((2, 4, 8), (5,), False), ((4,), (2, 4), True)],
)
def test_a_failure_at_one_of_its_windows_withdraws_a_certificate(
    first: tuple[int, ...],
    later: tuple[int, ...],
    withdrawn: bool,
    llama: Pair,
    tmp_path: Path,
) -> None:
    def asked(windows: tuple[int, ...], **given: Any) -> CertifyConfig:
        if len(windows) == 1:
            return question(options={"window": windows[0]}, **given)
        return question(options={}, windows=windows, **given)

    lucky = certify(Stub(llama), Rows(3000), tmp_path, asked(first))
    assert lucky.certified
    bad = Stub(llama, after(lucky.n, 3))
    failed = certify(bad, Rows(3000), tmp_path, asked(later, confidence=0.94))
    assert failed.certified is None and failed.n > lucky.n
    assert bool(read_certificate(tmp_path).withdrawn) == withdrawn


def test_where_changing_takes_long_many_prompts_are_answered_at_a_time(
    llama: Pair, tmp_path: Path
) -> None:
    """The certificate stays the same; between the target and the rule there are few changes."""

    def changes(ahead: int) -> int:
        pair = Stub(llama, after(0, 40))
        pair.answers_at_a_time = ahead
        asked = question(max_drop=0.05, limit=300, home=tmp_path / str(ahead))
        made[ahead] = certify(pair, Rows(3000), tmp_path / f"run-{ahead}", asked)
        rules = [rule for _, rule in pair.asked]
        return sum(a != b for a, b in pairwise(rules))

    made: dict[int, Any] = {}
    assert changes(128) < changes(1) / 2
    one, other = made.values()
    assert (one.n, one.losses, one.certified) == (
        other.n,
        other.losses,
        other.certified,
    )


def test_one_ledger_counts_for_all_folders(llama: Pair, tmp_path: Path) -> None:
    """No prompt is used twice, and each question is counted, from whichever folder it is asked."""
    rules, drawn = ("topk:1", "topk:2", "topk:3"), list[str]()
    for number, rule in enumerate(rules, 1):
        folder = tmp_path / rule[-1]
        made = certify(Stub(llama), Rows(900), folder, question(rules=(rule,)))
        assert made.attempt == number
        drawn += used(folder)
    assert len(drawn) == len(set(drawn))
    same = certify(
        Stub(llama), Rows(900), tmp_path / "again", question(rules=("topk:1",))
    )
    assert same.attempt == 1 and used(tmp_path / "again") == used(tmp_path / "1")
    other = certify(
        Stub(llama), Rows(900), tmp_path / "d", question(home=tmp_path / "home")
    )
    assert other.attempt == 1, "another user's"


def test_a_run_that_is_copied_brings_its_part_along(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(Stub(llama), Rows(900), tmp_path / "a", question())
    monkeypatch.setenv("LENIENCE_HOME", str(tmp_path / "another machine"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    made = certify(Stub(llama), Rows(900), tmp_path / "copy", question(max_drop=0.2))
    assert made.attempt == 2 and not set(used(tmp_path / "a")) & set(
        used(tmp_path / "copy", made.key)
    )
    elsewhere = certify(
        Stub(llama), Rows(900), tmp_path / "new", question(max_drop=0.3)
    )
    assert elsewhere.attempt == 3, "what it brought is there for all folders"


def test_data_under_another_name_are_the_same_data(llama: Pair, tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt_of(i), "reference": "right", "split": "train"}
        for i in range(400)
    ]
    for name, part in (("a", rows[:200]), ("b", rows[100:300]), ("c", rows[300:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    made = []
    for name in "abc":
        task = lenience.task(
            str(tmp_path / f"{name}.jsonl"), answer="regex:(\\w+)", same="text"
        )
        asked = question(max_drop=0.03, limit=200)
        made.append(certify(Stub(llama), task, tmp_path / "run", asked))
    assert [one.attempt for one in made] == [1, 2, 1], (
        "the last shares no prompt with the others"
    )


def test_a_data_folder_that_cannot_be_written_is_named(
    llama: Pair, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written .*LENIENCE_HOME"):
        certify(
            Stub(llama), Rows(900), tmp_path / "run", question(home=tmp_path / "file")
        )


class Often(Rows):
    """A prompt that is three rows in ten, and others that come once."""

    def samples(self, split: str) -> Iterator[Sample]:
        for i in range(self.size):
            yield Sample(f"{split}-{i}", prompt_of(i if i % 10 > 2 else 0), "right")


def test_a_frequent_prompt_weighs_as_it_comes(llama: Pair, tmp_path: Path) -> None:
    """And is decoded once."""
    pair = Stub(llama, lambda prompt: prompt == prompt_of(0))
    made = certify(pair, Often(1000), tmp_path, question(allow_weak_target=True))
    assert made.certified is None and 0.15 < made.losses / made.n < 0.45
    assert [asked for asked in pair.asked if asked[0] == prompt_of(0)] == [
        (prompt_of(0), "topk:2"),
        (prompt_of(0), "target"),
    ]


def test_of_a_prompt_as_many_rows_are_used_up_as_were_used(
    llama: Pair, tmp_path: Path
) -> None:
    task, folder = as_task(Often(100)), tmp_path / "run"
    ledger = Ledger(folder, llama.fingerprints)
    frequent = [
        sample for sample in task.samples("train") if sample.prompt == prompt_of(0)
    ]
    assert len(frequent) == 30
    ledger.note(llama.target, frequent[:4], use="tuning", key="other", task=task)
    with ledger.held():
        left = ledger.rows(llama.target, task, Draw("key", 100, "calibration"))
    assert len(left) == 96 and not set(frequent[:4]) & set(left)
    again = as_task(type("Renamed", (Often,), {"name": "renamed"})(100))
    with ledger.held():
        rows = ledger.rows(llama.target, again, Draw("key", 100, "calibration"))
    assert [sample.prompt for sample in rows].count(prompt_of(0)) == 26


class Grouped(Rows):
    """Groups of five."""

    def samples(self, split: str) -> Iterator[Sample]:
        for i in range(self.size):
            yield Sample(f"{split}-{i}", prompt_of(i), "right", group=f"user {i // 5}")


def test_of_a_group_one_is_drawn(llama: Pair, tmp_path: Path) -> None:
    made = certify(Stub(llama), Grouped(1500), tmp_path, question(limit=100))
    groups = [int(id.split("-")[1]) // 5 for id in used(tmp_path)]
    assert made.certified and len(groups) == len(set(groups)) > made.n - 1
    assert "each group counts once" in made.drawn
    two = question(ids=("train-0", "train-1"), home=tmp_path / "h")
    assert certify(Stub(llama), Grouped(1500), tmp_path / "b", two).n == 1
    second = certify(
        Stub(llama), Grouped(1500), tmp_path, question(limit=100, max_drop=0.2)
    )
    others = {int(id.split("-")[1]) // 5 for id in used(tmp_path, second.key)}
    assert others and not others & set(groups), "nor one that was used in part"
    renamed = type("Renamed", (Grouped,), {"name": "renamed"})(1500)
    certify(Stub(llama), renamed, tmp_path, question(limit=100, max_drop=0.3))
    drawn = [int(id.split("-")[1]) // 5 for id in used(tmp_path)]
    assert len(drawn) == len(set(drawn)), "under another name neither"


class Unlike(Rows):
    """Every tenth row of a group of its own, the others in groups of nine."""

    def samples(self, split: str) -> Iterator[Sample]:
        for i in range(self.size):
            group = None if i % 10 == 0 else f"user {i // 10}"
            yield Sample(f"{split}-{i}", prompt_of(i), "right", group=group)


def test_groups_are_drawn_as_often_as_single_rows(llama: Pair, tmp_path: Path) -> None:
    """However large: of 300 units, half of them groups, 60 are drawn."""
    task = as_task(Unlike(1500))
    ledger = Ledger(tmp_path, llama.fingerprints)
    counts = []
    for key in "abcdefgh":
        rows = ledger.rows(llama.target, task, Draw(key, 60, "calibration"))
        counts.append(sum(row.group is not None for row in rows))
    assert 195 <= sum(counts) <= 285, (
        "240 of 480 are expected; out of this in one of 30,000"
    )


def test_a_file_may_name_groups(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "split": "train", "group": 7}\n{"prompt": "b", "split": "train"}\n'
    )
    one, two = lenience.task(str(path), answer="choice").samples("train")
    assert (one.group, two.group) == ("7", None) and "group" not in one.metadata


def test_a_certificate_says_how_its_prompts_were_chosen(
    llama: Pair, tmp_path: Path
) -> None:
    made = certify(Stub(llama), Rows(900), tmp_path / "a", question())
    assert made.drawn == "at random from the rows of split 'train'"
    ids = tuple(f"train-{i}" for i in range(100, 200))
    named = certify(
        Stub(llama),
        Rows(900),
        tmp_path / "b",
        question(ids=ids, home=tmp_path / "home"),
    )
    assert "from 100 that were named (--ids), not at random" in named.drawn
    assert "not at random" in (tmp_path / "b" / "certificate.html").read_text()


def test_mining_draws_at_random_and_goes_on_as_it_began(
    llama: Pair, tmp_path: Path
) -> None:
    def mined(name: str, **given: Any) -> list[str]:
        mine(
            llama,
            Rows(60, "w1"),
            tmp_path / name,
            MineConfig(max_new_tokens=4, **given),
        )
        return [line["id"] for line in Journal(tmp_path / name / "journal.jsonl")]

    ten, twenty = mined("a", limit=10), mined("a", limit=20)
    assert twenty[:10] == ten != [f"train-{i}" for i in range(10)]
    assert mined("b", limit=10, seed=1) != ten
    first = mined("c", limit=10, first=True)
    assert first == [f"train-{i}" for i in range(10)] == mined("c", limit=10)
    with pytest.raises(InputError, match="drawn 'random', not 'first'"):
        mined("a", limit=10, first=True)
    with pytest.raises(InputError, match="seed 0, not 1"):
        mined("a", limit=10, seed=1)
    made = certify(Stub(llama), Rows(900), tmp_path / "c", question())
    assert "were the first of the data" in made.drawn


def test_labels_are_asked_only_where_answers_differ(
    llama: Pair, tmp_path: Path
) -> None:
    """And a wrong answer of the target's loses nothing."""
    order: dict[str, int] = {}
    pair = Stub(
        llama, lambda prompt: order.setdefault(prompt, len(order)) in (3, 7, 11)
    )
    with pytest.raises(
        InputError, match="without a reference; collect them with --ask-labels"
    ):
        certify(pair, Rows(900, None), tmp_path / "run", question())
    path = tmp_path / "labels.jsonl"
    asked = question(labels=path)
    with pytest.raises(
        InputError, match=r"labels\.jsonl: 3 prompts, on which the answers differ"
    ):
        certify(pair, Rows(900, None), tmp_path / "run", asked)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["answers"] for row in rows] == [["right", "wrong"]] * 3, (
        "nor whose is which"
    )
    for row, reference in zip(rows, ("right", "wrong", "neither")):
        row["reference"] = reference
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = certify(pair, Rows(900, None), tmp_path / "run", asked)
    assert made.certified and made.losses == 1 and made.attempt == 1
    assert certify(pair, Rows(900), tmp_path / "floor", replace(asked, labels=None)).n
    weak = Stub(llama, lambda prompt: True)
    with pytest.raises(InputError, match="answers none of"):
        certify(weak, Rows(900, "neither"), tmp_path / "weak", asked)
    path.write_text('{"reference": 1}\n')
    with pytest.raises(InputError, match=r"labels\.jsonl, line 1: KeyError 'id'"):
        certify(pair, Rows(900, None), tmp_path / "run", asked)


def test_a_label_that_cannot_be_right_is_refused(llama: Pair, tmp_path: Path) -> None:
    rows = [{"prompt": prompt_of(i), "split": "train"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    task = lenience.task(
        str(tmp_path / "rows.jsonl"), answer="regex:(\\w+)", same="choice"
    )
    path = tmp_path / "labels.jsonl"
    pair = Stub(llama, lambda prompt: prompt.endswith("w1"))
    pair.texts = ("A", "B")
    with pytest.raises(InputError, match="have no reference"):
        certify(pair, task, tmp_path / "run", question(labels=path, max_drop=0.3))
    lines = [
        json.loads(line) | {"reference": "?"} for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        InputError, match=r"the reference '\?' of \d+ equals no possible answer"
    ):
        certify(pair, task, tmp_path / "run", question(labels=path, max_drop=0.3))


def test_a_question_that_was_killed_at_its_end_withdraws_all_the_same(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = certify(Stub(llama), Rows(3000), tmp_path / "a", question())
    bad, again = Stub(llama, after(first.n, 2)), question(confidence=0.94)
    for part in ("write_json", "account"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(certifying, part, _killed)
            certify(bad, Rows(3000), tmp_path / "b", again)
    certify(bad, Rows(3000), tmp_path / "b", again)
    assert read_certificate(tmp_path / "a").withdrawn


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_prompts_that_were_used_with_another_draft_are_used(
    llama: Pair, tmp_path: Path
) -> None:
    drafts = [{**llama.fingerprints, "draft": draft} for draft in ("one", "other")]
    ledgers = [Ledger(tmp_path / draft["draft"], draft) for draft in drafts]
    task, numbers, drawn = as_task(Rows(100)), [], []
    for ledger in ledgers:
        rows = ledger.rows(
            llama.target, task, Draw("key of " + ledger.pair, 50, "calibration")
        )
        ledger.note(
            llama.target,
            rows,
            use="calibration",
            key="key of " + ledger.pair,
            task=task,
        )
        numbers.append(ledger.attempt("key of " + ledger.pair, task, "train").number)
        drawn += rows
    assert len({row.id for row in drawn}) == 100 and numbers == [1, 1]


def test_a_pilot_is_no_attempt_and_plans_the_next_one(
    llama: Pair, tmp_path: Path
) -> None:
    told = plan(Stub(llama), Rows(900), tmp_path, question(), pilot=20)
    made = certify(Stub(llama), Rows(900), tmp_path, question())
    assert made.attempt == 1 and made.certified and made.n == told.least
    after = plan(Stub(llama), Rows(900), tmp_path, question(max_drop=0.0999), pilot=20)
    assert after.least and told.least and after.least > told.least


@pytest.mark.parametrize("limit", [0.01, 0.1])
def test_asked_again_and_again_it_is_wrong_no_more_often(limit: float) -> None:
    """A hundred questions at the limit, apart: exactly, by the chance of each to pass."""
    asked = question(max_drop=limit)
    right = 1.0
    for number in range(1, 101):
        attempt = Attempt(key="", pair="", task="", number=number)
        test = asked.test(attempt.share)
        assert isinstance(test, Binomial)
        right *= 1 - test.power(limit, test.horizon)
    assert 0.04 < 1 - right <= 0.05
