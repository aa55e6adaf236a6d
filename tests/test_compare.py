"""Comparing: the figures of the table against definitions, windows, resuming, and the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta
from test_certify import certificate
from test_mining import ParityTask, lines, mined

from lenience import InputError
from lenience.core.figures import _covered
from lenience.decoding.decoder import Decoder
from lenience.decoding.options import names
from lenience.decoding.pair import Pair
from lenience.evaluation import compare as comparing
from lenience.evaluation.advice import recommended
from lenience.evaluation.compare import CompareConfig
from lenience.evaluation.mined_texts import mined_texts
from lenience.evaluation.names import named
from lenience.evaluation.pages import Mining, example, write_report
from lenience.evaluation.plots import AXES, plot
from lenience.evaluation.quality import beside_target
from lenience.evaluation.table import (
    SHARES,
    ComparedSetting,
    Frontier,
    FrontierRow,
    allocation,
    table,
)
from lenience.heads.head import Head, Inputs
from lenience.mining.search import MineConfig, mine
from lenience.rules.names import family, short_name
from lenience.rules.parsing import terms
from lenience.rules.registry import RULES as ALL_RULES
from lenience.rules.settings import JUDGED, expand, grid
from lenience.runs.answers import Answer
from lenience.tasks import load_task, take

RULES = ["exact", "topk:2"]


def configured(rules, **given) -> CompareConfig:
    options = {name: given.pop(name) for name in names() if name in given}
    return CompareConfig(tuple(rules), options=options, **given)


def compare(
    pair, task, rules, out=None, progress=None, **given
) -> tuple[list[tuple], dict]:
    """What progress was told, and the frontier."""
    told: list[tuple] = []

    def show(phase: str, done: int, total: int) -> None:
        told.append((phase, done, total))
        if progress:
            progress(phase, done)

    config = configured(rules, **given)
    return told, comparing.compare(pair, task, config, out, show).to_json()


def result(tokens: int, passes: int, correct: bool, **counts: float) -> Answer:
    counts = {"tokens": tokens, "target_passes": passes, "correct": correct, **counts}
    return Answer(id="x", rule="x", answer=None, **counts)


FIXTURES = Path(__file__).parent / "fixtures"


def setting(rule: str, window: int, why: str = "given") -> ComparedSetting:
    return ComparedSetting(Decoder.of(rule=rule, window=window), why)


def rows(settings, answers, timings) -> list[dict]:
    return [row.to_json() for row in table(settings, answers, timings, Decoder())]


def test_the_tables_figures_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    right = rng.random((40, 2)) < 0.7
    answers = [
        [result(10, 10, bool(a)) for a, _ in right],
        [result(5, 0, bool(b)) for _, b in right],
        [result(12 + i % 3, 4, bool(b)) for i, (_, b) in enumerate(right)],
    ]
    settings = [
        setting("target", 0),
        setting("draft", 0),
        setting("topk:2", 8, "fastest"),
    ]
    # seconds of the first ten
    _, draft, lenient = rows(settings, answers, [[1.0, 0.25, 0.5]] * 10)
    lost = int((right[:, 0] & ~right[:, 1]).sum())
    assert lost > 0 and (lenient["n"], lenient["timed_n"]) == (40, 10)
    assert lenient["accuracy"] == right[:, 1].mean()
    assert lenient["paired_loss"] == lost / 40
    assert lenient["paired_gain"] == (~right[:, 0] & right[:, 1]).sum() / 40
    # Clopper–Pearson
    low, high = (
        beta.ppf(0.025, lost, 41 - lost),
        beta.ppf(0.975, lost + 1, 40 - lost),
    )
    assert lenient["paired_loss_interval"] == pytest.approx([low, high])
    assert lenient["tokens_per_pass"] == sum(12 + i % 3 for i in range(40)) / 160
    assert lenient["tokens_per_second"] == pytest.approx(
        sum(12 + i % 3 for i in range(10)) / 5
    )
    assert (draft["draft_share"], draft["accepted_per_pass"]) == (1, None)
    assert lenient["flops_per_token"] is None
    assert draft["tokens_per_second"] == 20 and draft["tokens_per_pass"] is None
    assert lenient["share_of_cap"] == lenient["tokens_per_second"] / 20
    assert lenient["seconds_per_correct"] == 5 / right[:10, 1].sum()
    low, high = lenient["tokens_per_pass_interval"]
    assert low < lenient["tokens_per_pass"] < high and high - low < 0.3


def test_what_was_drafted_is_told_without_corrections() -> None:
    """By hand; of an answer that the target never read all is the draft's."""
    mixed = [
        result(
            10,
            4,
            True,
            accepted_exact=5,
            accepted_lenient=1,
            flops=40,
            flops_as_sprinter=30,
        ),
        result(6, 0, True, accepted_lenient=6, flops=8, flops_as_sprinter=8),
    ]
    plain = [result(10, 10, True, flops=100, flops_as_sprinter=110)] * 2
    settings = [setting("target", 0), setting("topk:2", 8, "fastest")]
    alone, gated = rows(settings, [plain, mixed], [[1.0, 1.0]] * 2)
    assert (alone["accepted_per_pass"], alone["draft_share"]) == (0, 0)
    assert gated["accepted_per_pass"] == (6 + 6) / 4 and gated["draft_share"] == 12 / 16
    assert gated["accepted_exact_per_pass"] == 5 / 4
    assert (alone["flops_per_token"], alone["flops_per_token_as_sprinter"]) == (10, 11)
    assert (gated["flops_per_token"], gated["flops_per_token_as_sprinter"]) == (
        48 / 16,
        38 / 16,
    )
    unknown = [mixed[0], result(6, 0, True)]
    assert (
        rows(settings, [plain, unknown], [[1.0, 1.0]] * 2)[1]["flops_per_token"] is None
    )


def test_a_comparison_of_an_earlier_version_is_read() -> None:
    known = json.loads((FIXTURES / "earlier_frontier_row.json").read_text())
    assert not {"draft_share", "options"} & known.keys()
    row = FrontierRow.read(known, "earlier_frontier_row.json")
    assert row.tokens_per_pass == known["tokens_per_pass"] and row.draft_share is None


def test_random_allocation_is_what_it_gives_on_average() -> None:
    rng = np.random.default_rng(1)
    right = rng.random((30, 2)) < [0.8, 0.5]
    answers = [
        [result(10 + i, 10 + i, bool(a)) for i, (a, _) in enumerate(right)],
        [result(7, 0, bool(b)) for _, b in right],
    ]
    seconds = [[1.0 + i / 10, 0.2] for i in range(30)]
    settings = [setting("target", 0), setting("draft", 0)]
    line = [point.to_json() for point in allocation(settings, answers, seconds)]
    assert [point["share"] for point in line] == list(SHARES)
    for point in line[::5]:
        to_draft = rng.random((20000, 30)) < point["share"]
        accuracy = np.where(to_draft, right[:, 1], right[:, 0]).mean()
        loss = (to_draft & right[:, 0] & ~right[:, 1]).mean()
        tokens, passes, taken = (
            np.where(to_draft, *pair).sum(1).mean()
            for pair in (
                (7, 10 + np.arange(30)),
                (0, 10 + np.arange(30)),
                (0.2, np.array(seconds)[:, 0]),
            )
        )
        assert point["accuracy"] == pytest.approx(accuracy, abs=0.003) and point[
            "paired_loss"
        ] == pytest.approx(loss, abs=0.003)
        assert point["tokens_per_second"] == pytest.approx(tokens / taken, rel=0.01)
        assert point["tokens_per_pass"] == (
            pytest.approx(tokens / passes, rel=0.01) if passes else None
        )
        assert point["seconds_per_correct"] == pytest.approx(
            taken / (30 * accuracy), rel=0.01
        )


def test_all_stands_for_a_grid_of_every_rule(llama: Pair, tmp_path: Path) -> None:
    assert {terms(rule)[0].name for rule in grid()} == set(ALL_RULES) - {
        "judge",
        "diversed",
    }
    greedy, sampled = expand(["all"], 0.0), expand(["all"], 0.7)
    assert sampled == list(grid()) and {"speculative", "block"} <= set(sampled) - set(
        greedy
    )
    assert not any(rule.startswith("mentored") for rule in greedy)
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    listed = [
        {"recall": recall, "threshold": recall / 2, "accepted": 0.5}
        for recall in (0.1, *JUDGED)
    ]
    Head(
        torch.ones(width),
        0.0,
        Inputs(),
        0.5,
        llama.fingerprints,
        {"thresholds": listed},
    ).save(tmp_path)
    judge = f"judge:{tmp_path}"
    assert expand(["all", judge], 0.0) == [
        *greedy,
        *(f"{judge}@{recall / 2}" for recall in JUDGED),
    ]
    assert expand([judge, "exact"], 0.0) == [judge, "exact"], (
        "a judge's own threshold, where not all are asked for"
    )
    assert expand(["all", f"{judge}@0.3", "target", "topk:9"], 0.0) == [
        *greedy,
        f"{judge}@0.3",
        "target",
        "topk:9",
    ]


def test_sampling_is_compared_by_its_seed(llama: Pair) -> None:
    given = (llama, ParityTask(), ["exact", "mentored:0.5"])
    _, frontier = compare(
        *given, windows=(3,), limit=6, timed=1, repeats=1, temperature=0.8, seed=4
    )
    exact = next(row for row in frontier["rows"] if row["rule"] == "exact")
    assert exact["paired_loss"] == exact["paired_gain"] == 0, (
        "the same draws as the target alone"
    )
    outs = llama.generate_batch(
        [s.prompt for s in take(ParityTask(), "test", 6)],
        rule="mentored:0.5",
        window=3,
        max_new_tokens=24,
        temperature=0.8,
        seed=4,
    )
    mentored = frontier["rows"][-1]
    assert mentored["tokens_per_pass"] == sum(len(o.tokens) for o in outs) / sum(
        o.target_passes for o in outs
    )
    with pytest.raises(InputError, match="no greedy form"):
        compare(*given, limit=2)


def test_compare_measures_what_generate_does(llama: Pair) -> None:
    task = ParityTask()
    progress, frontier = compare(
        llama, task, RULES, windows=(3,), limit=6, timed=3, batch_size=4
    )
    assert [row["rule"] for row in frontier["rows"]] == ["target", "draft", *RULES]
    assert {row["window"] for row in frontier["rows"]} == {0, 3}
    samples = [sample for sample, _ in zip(task.samples("test"), range(6))]
    for row in frontier["rows"]:
        outs = [
            llama.generate(
                sample.prompt, rule=row["rule"], window=row["window"], max_new_tokens=24
            )
            for sample in samples
        ]
        assert row["accuracy"] == np.mean(
            [task.correct(out.text, sample) for out, sample in zip(outs, samples)]
        )
        if row["rule"] != "draft":
            assert row["tokens_per_pass"] == sum(len(out.tokens) for out in outs) / sum(
                out.target_passes for out in outs
            )
    exact = next(row for row in frontier["rows"] if row["rule"] == "exact")
    assert exact["paired_loss"] == exact["paired_gain"] == 0
    assert {(phase, total) for phase, _, total in progress} == {
        ("decoding", 24),
        ("timing", 3),
    }


def test_windows_are_chosen_by_speed_on_other_prompts(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set] = {"tuning": set(), "reported": set()}
    generate = Pair.generate

    def slow_but_at_four(self: Pair, prompt, decoder: Decoder):
        out = generate(self, prompt, decoder)
        seen["tuning" if stage else "reported"].add(prompt)
        out.seconds = 1.0 if decoder.window == 4 else 2.0
        return out

    monkeypatch.setattr(Pair, "generate", slow_but_at_four)
    stage = True

    def follow(phase: str, done: int) -> None:
        nonlocal stage
        stage = phase == "choosing windows"

    _, frontier = compare(
        llama,
        ParityTask(),
        RULES,
        progress=follow,
        windows=(2, 4, 8),
        limit=5,
        tuning=3,
    )
    assert [(row["rule"], row["window"]) for row in frontier["rows"]] == [
        ("target", 0),
        ("draft", 0),
        ("exact", 4),
        ("topk:2", 4),
        ("exact", 8),
        ("topk:2", 8),
    ]
    warm_up = take(ParityTask(), "test", 1)[0].prompt
    assert len(seen["tuning"] - {warm_up}) == 3 and len(seen["reported"]) == 5
    assert not (seen["tuning"] - {warm_up}) & seen["reported"]


def test_a_stopped_comparison_goes_on(llama: Pair, tmp_path: Path) -> None:
    class Stop(Exception): ...

    def run(progress=None) -> tuple[list[tuple], dict]:
        given = {"windows": (2, 4), "limit": 8, "tuning": 2, "timed": 4}
        return compare(llama, ParityTask(), RULES, tmp_path, progress, **given)

    def stop(*at: object) -> None:
        def progress(*told: object) -> None:
            if told == at:
                raise Stop

        with pytest.raises(Stop):
            run(progress)

    stop("decoding", 11)
    kept = (tmp_path / "compare.jsonl").read_text()
    assert len(kept.splitlines()) == 11
    stop("timing", 2)
    timed = (tmp_path / "timings.jsonl").read_text()
    assert len(timed.splitlines()) == 2
    before = len((tmp_path / "compare.jsonl").read_text().splitlines())
    progress, frontier = run()
    assert {phase for phase, *_ in progress} == {"decoding", "timing"}
    assert len((tmp_path / "compare.jsonl").read_text().splitlines()) == before, (
        "nothing is decoded again"
    )
    assert (tmp_path / "compare.jsonl").read_text().startswith(kept)
    assert (tmp_path / "timings.jsonl").read_text().startswith(timed)
    whole = compare(
        llama, ParityTask(), RULES, windows=(2, 4), limit=8, tuning=2, timed=4
    )[1]
    for row, same in zip(frontier["rows"], whole["rows"]):
        if row["window"] == same["window"]:  # a machine's moods may choose another
            assert [row[key] for key in ("n", "accuracy", "tokens_per_pass")] == [
                same[key] for key in ("n", "accuracy", "tokens_per_pass")
            ]
    with pytest.raises(InputError, match="tuning"):
        compare(
            llama,
            ParityTask(),
            ["exact"],
            windows=(2, 4),
            limit=8,
            tuning=3,
            out=tmp_path,
        )


def test_times_of_another_machine_are_measured_again(
    llama: Pair, tmp_path: Path
) -> None:
    given = {"windows": (4,), "limit": 3, "timed": 2, "out": tmp_path}
    compare(llama, ParityTask(), RULES, **given)
    kept = [
        json.loads(line)
        for line in (tmp_path / "timings.jsonl").read_text().splitlines()
    ]
    (tmp_path / "timings.jsonl").write_text(
        "".join(
            json.dumps({**record, "machine": "another", "seconds": [9.0] * 4}) + "\n"
            for record in kept
        )
    )
    _, frontier = compare(llama, ParityTask(), RULES, **given)
    assert all(row["tokens_per_second"] > 30 for row in frontier["rows"]), (
        "9 seconds an answer were another machine's"
    )
    assert len((tmp_path / "timings.jsonl").read_text().splitlines()) == 4


def test_a_comparison_with_a_judge_that_was_fitted_anew_is_another_one(
    llama: Pair, tmp_path: Path
) -> None:
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    head = Head(torch.ones(width), 0.0, Inputs(), 0.5, llama.fingerprints)
    head.save(tmp_path / "judge")
    given = (llama, ParityTask(), [f"judge:{tmp_path / 'judge'}"])
    compare(*given, windows=(3,), limit=2, out=tmp_path / "c")
    head.threshold = 0.75  # as another --recall gives it
    head.save(tmp_path / "judge")
    with pytest.raises(InputError, match="was trained again since"):
        compare(*given, windows=(3,), limit=2, out=tmp_path / "c")


def test_a_comparison_under_another_generation_config_is_another_one(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "windows": [4],
        "limit": 2,
        "timed": 1,
        "repeats": 1,
        "out": tmp_path / "cmp",
    }
    compare(llama, ParityTask(), RULES, **options)
    monkeypatch.setattr(llama.target.model.generation_config, "repetition_penalty", 1.3)
    with pytest.raises(
        InputError, match=r"generation_config repetition_penalty None, not 1\.3"
    ):
        compare(llama, ParityTask(), RULES, **options)


def test_what_cannot_be_compared_is_told_before_any_work(
    llama: Pair, tmp_path: Path
) -> None:
    rows = [
        {"id": "a", "prompt": "w1", "split": "test", "reference": "1"},
        {"id": "b", "prompt": "w2", "split": "test"},
        {"id": "c", "prompt": "w1 " * 300, "split": "train"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = load_task(str(tmp_path / "t.jsonl"), answer="last-number")
    with pytest.raises(InputError, match="sample b has no reference"):
        compare(llama, task, ["exact"], windows=(4,))
    with pytest.raises(InputError, match="sample c: the prompt has 300 tokens"):
        mine(llama, task, tmp_path / "run")
    with pytest.raises(InputError, match="max_new_tokens -5"):
        mine(llama, ParityTask(), tmp_path / "run", MineConfig(max_new_tokens=-5))
    assert not (tmp_path / "run").exists()


def test_a_wrong_option_leaves_no_folder(llama: Pair, tmp_path: Path) -> None:
    for wrong, says in (
        ({"temperature": -1.0}, "temperature"),
        ({"seed": 2**70}, "64 bits"),
        ({"windows": [-1]}, "window -1"),
        ({"tree": "auto"}, "tree auto cannot be compared"),
    ):
        with pytest.raises(InputError, match=says):
            compare(
                llama,
                ParityTask(),
                RULES,
                **{"windows": [4], "limit": 2, "out": tmp_path / "cmp", **wrong},
            )
        assert not (tmp_path / "cmp").exists()


def frontier_of(found: list[dict]) -> Frontier:
    about = {
        "versions": {},
        "pair": "",
        "models": {},
        "tokenizer": "",
        "task": "",
        "split": "",
    }
    about |= {
        "task_version": None,
        "machine": "",
        "drafter": "model",
        "stop": "fixed",
        "seed": 0,
    }
    about |= {"max_new_tokens": 1, "temperature": 0, "top_k": None, "top_p": None}
    return Frontier(**about, rows=found, allocation=[], examples=[])


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        # of the target, the draft, strict decoding, top-2 (loses one in 200), top-9 (one in 10)
        (
            (1.0, 0.1, 0.5, 0.4, 0.2),
            ("topk:2 at window 8", "2.50 times the target", "1.25 times"),
        ),
        (
            (1.0, 0.1, 0.4, 0.5, 0.2),
            ("strict decoding", "2.50 times the target alone; it loses"),
        ),
        ((0.3, 0.1, 0.4, 0.5, 0.2), ("the target alone", "at most 1% was faster")),
    ],
)
def test_the_fastest_that_hardly_loses_is_recommended(
    seconds: tuple[float, ...], says: tuple[str, ...]
) -> None:
    wrong = (0, 150, 0, 1, 20)
    answers = [[result(10, 5, i >= some) for i in range(200)] for some in wrong]
    names = ("target", "draft", "exact", "topk:2", "topk:9")
    settings = [
        setting(name, 8, "fastest" if i > 1 else "") for i, name in enumerate(names)
    ]
    told = recommended(frontier_of(rows(settings, answers, [list(seconds)] * 5)))
    assert all(one in told for one in says), told
    assert ("0.5% of 200 prompts" in told) == ("topk:2" in told)


def test_accuracies_near_1_are_on_the_plot() -> None:
    answers = [[result(10, 5, i >= wrong) for i in range(500)] for wrong in (2, 300, 2)]
    found = rows(
        [setting("target", 0), setting("draft", 0), setting("exact", 8, "fastest")],
        answers,
        [[1.0, 0.5, 0.5]] * 5,
    )
    figure = plot(frontier_of(found))
    low, high = figure.axes[0].get_ylim()
    assert low < found[0]["accuracy"] == 0.996 < high


@pytest.mark.filterwarnings("error")
def test_a_long_label_leaves_the_plots_axes_alone() -> None:
    """Of a stop condition the kind alone stands there."""
    answers = [[result(10, 5, True)] * 9] * 3
    settings = [
        setting("target", 0),
        setting("draft", 0),
        setting("exact", 8, "fastest"),
    ]
    found = rows(settings, answers, [[1.0, 0.5, 0.4]] * 5)
    widths = []
    for rule in ("exact", "judge:" + "long" * 40 + "@0.5"):
        found[2] |= {"rule": rule, "options": {"stop": f"head:{'folder' * 20}@0.5"}}
        figure = plot(frontier_of(found))
        figure.draw_without_rendering()
        assert "stop=head, w 8" in " ".join(
            text.get_text() for text in figure.axes[0].texts
        )
        widths.append([axis.get_position().width for axis in figure.axes])
    assert widths[0] == pytest.approx(widths[1])


def test_the_ring_is_around_what_is_certified() -> None:
    """Not around the same rule and window with another drafter."""
    names = ("target", "draft", "exact", "exact")
    answers = [[result(10, passes, True)] * 9 for passes in (10, 10, 4, 2)]
    settings = [
        setting(name, 8, "fastest" if i > 1 else "") for i, name in enumerate(names)
    ]
    found = rows(settings, answers, [[1.0, 0.5, 0.5, 0.4]] * 5)
    found[3]["options"] = {"drafter": "medusa"}
    told = certificate("exact")
    assert told.certified is not None
    for options, at in (
        ({"drafter": "medusa"}, [5.0]),
        ({}, [2.5]),
        ({"stop": "heuristic"}, []),
    ):
        row = told.certified.model_copy(update={"window": 8, "options": options})
        axis = plot(frontier_of(found), row).axes[0]
        rings = [line for line in axis.get_lines() if line.get_label() == "certified"]
        assert [float(x) for ring in rings for x in ring.get_xdata()] == at


def test_a_label_covers_marks_and_labels_that_it_stands_over() -> None:
    place = (100.0, 50.0, 40.0)  # from 100 to 140, and a label high
    assert _covered(place, [], [(120, 54)]) == 1
    assert _covered(place, [], [(96, 46), (120, 70), (150, 54)]) == 0, (
        "its own, above, beside"
    )
    assert _covered(place, [(120.0, 55.0, 40.0), (120.0, 70.0, 40.0)], [(120, 54)]) == 2


def test_a_rule_is_shortened_but_not_changed() -> None:
    rule = "judge:a/run/judge,floor=0.1@0.9&topk:4|judge:a/run/mlp,budget=3@0.99"
    assert short_name(rule) == "judge,floor=0.1@0.9&topk:4|mlp,budget=3@0.99"
    assert (
        short_name('judge:"a/run/judge"@0.9') == "judge@0.9"
        and short_name("draft") == "draft"
    )


def test_judges_of_one_name_are_told_apart() -> None:
    rules = [
        "judge:a/run/judge@0.9",
        "judge:b/run/judge@0.9",
        "judge:a/run/mlp@0.9",
        "exact",
    ]
    rules.insert(3, "judge@0.9")
    answers = [[result(10, 5, True)]] * 7
    settings = [
        setting("target", 0),
        setting("draft", 0),
        *(setting(rule, 8) for rule in rules),
    ]
    found = [
        row.to_json()
        for row in named(table(settings, answers, [[1.0] * 7], Decoder()))[2:]
    ]
    assert [row["name"] for row in found] == [
        "a/run/judge@0.9",
        "b/run/judge@0.9",
        "mlp@0.9",
        "built-in judge@0.9",
        "exact",
    ]
    families = ["a/run/judge", "b/run/judge", "mlp", "built-in judge", "exact"]
    assert [row["family"] for row in found] == families
    strict = table(settings, answers, [[1.0] * 7], Decoder())[-1]
    options = [
        {"drafter": f"eagle:{run}/eagle", "stop": f"head:{run}/stop@0.5"}
        for run in ("c", "d/c")
    ]
    rows = [
        strict.model_copy(update={"options": one})
        for one in (*options, {"stop": "fixed"})
    ]
    assert [row.name for row in named(rows)] == [
        "exact, drafter=eagle:c/eagle, stop=head:c/stop@0.5",
        "exact, drafter=eagle:d/c/eagle, stop=head:d/c/stop@0.5",
        "exact, stop=fixed",
    ]


def test_a_missing_judge_is_told_before_any_work(llama: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no judge\.json"):
        compare(llama, ParityTask(), [f"judge:{tmp_path}@0.5"], limit=2)


def test_rules_are_drawn_with_their_kind() -> None:
    drawn = [
        "target",
        "draft",
        "exact",
        "topk:2",
        "judge:run/judge@0.99",
        'exact|judge:"a:b/m@p"@0.5',
        "judge:run/mlp",
    ]
    assert [family(rule) for rule in drawn] == [
        "target",
        "draft",
        "exact",
        "topk",
        "judge",
        "m@p",
        "mlp",
    ]
    assert [short_name(rule) for rule in drawn[3:]] == [
        "topk:2",
        "judge@0.99",
        "exact|m@p@0.5",
        "mlp",
    ]


def test_a_report_marks_the_important_tokens_of_mined_answers(
    llama: Pair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mined(llama, ParityTask(), run, limit=8)
    texts = mined_texts(llama.models, ParityTask(), run, count=8)
    by_prompt = {
        llama.target.decode(record["prompt_ids"]): record for record in lines(run)
    }
    for text in texts:
        record = by_prompt[text.prompt]
        marked = {i: token for i, token in enumerate(text.tokens) if token.kind}
        assert marked.keys() == {found["position"] for found in record["mismatches"]}
        for found in record["mismatches"]:
            token = marked[found["position"]]
            draft, target = (
                llama.target.decode([found[name]], special=True)
                for name in ("draft_token", "target_token")
            )
            kept, other = (target, draft) if found["important"] else (draft, target)
            assert (token.text.strip(), token.other.strip()) == (kept, other)
            assert token.kind == ("important" if found["important"] else "harmless")
    assert len(texts) > 1
    _, frontier = compare(llama, ParityTask(), RULES, windows=(4,), limit=5, tuning=2)
    page = tmp_path / "report.html"
    write_report(page, Frontier(**{**frontier, "mined": texts[:2]}))
    spans = re.findall(r'<span class="t (important|harmless)" title', page.read_text())
    shown = [token for text in texts[:2] for token in text.tokens]
    assert spans == [token.kind for token in shown if token.kind]


@pytest.mark.parametrize(
    "changed",
    [
        {"task": "another"},
        {"labels": {"by": "likelihood"}},
        {"policy": {"rule": "topk:2"}},
        {"models": {"target": {"name": "t", "fingerprint": "x", "dtype": "float32"}}},
    ],
)
def test_mined_answers_of_other_runs_are_not_shown(
    changed: dict, llama: Pair, tmp_path: Path
) -> None:
    mined(llama, ParityTask(), tmp_path, limit=8)
    assert mined_texts(llama.models, ParityTask(), tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**about, **changed}))
    assert mined_texts(llama.models, ParityTask(), tmp_path) == ()
    assert mined_texts(llama.models, ParityTask(), tmp_path / "none") == ()


def test_the_report_stands_alone_and_holds_every_token(
    llama: Pair, tmp_path: Path
) -> None:
    _, frontier = compare(llama, ParityTask(), RULES, windows=(4,), limit=5, tuning=2)
    write_report(
        tmp_path / "report.html",
        Frontier(**frontier),
        Mining(samples=3, mismatches=9, important_share=0.25, judge_auc=0.875),
    )
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert all(link.startswith("#") for link in links), "nothing is fetched"
    assert "<svg" in page and "25.0 %" in page and "0.875" in page
    assert "Recommended here: " in page and page.index("Recommended") < page.index(
        "<svg"
    )
    assert page.count('tabindex="0"') == len(frontier["rows"])
    shown = example(Frontier(**frontier))
    assert shown is not None
    spans = re.findall(r'<span class="t ([a-z-]+)" title', page)
    assert spans == [origin for _, origin, _ in shown.result.trace]
    for i, row in enumerate(frontier["rows"]):
        assert f'<td title="{row["rule"]}">' in page
        shown_on = sum(f'id="mark-{i}-{number}"' in page for number in range(3))
        assert shown_on == sum(row[key] is not None for key, _ in AXES), (
            "a mark for every figure"
        )
    data = json.loads(
        re.findall(
            r'<script type="application/json" id="data">(.*?)</script>', page, re.S
        )[0]
    )
    assert [len(prompt["results"]) for prompt in data["prompts"]] == [
        len(frontier["rows"])
    ] * 3
    traces = [
        result["trace"]
        for sample in frontier["examples"]
        for result in sample["results"]
    ]
    assert [
        result["trace"] for prompt in data["prompts"] for result in prompt["results"]
    ] == traces


def test_a_decoder_that_names_its_window_leaves_the_other_to_choose(
    llama: Pair, tmp_path: Path
) -> None:
    """Also where it names the default one, so that both are the same options."""
    config = {"windows": (2, 4), "limit": 2, "tuning": 2, "timed": 1, "repeats": 1}
    chosen = CompareConfig(("exact",), **config)
    named = CompareConfig(settings=("exact; window=8",), **config)
    both = CompareConfig(("exact",), settings=("exact; window=8",), **config)
    rows = comparing.compare(llama, ParityTask(), both).rows
    assert {(row.window, row.why) for row in rows if row.rule == "exact"} >= {
        (8, "given")
    }
    assert {row.window for row in rows if row.rule == "exact"} & {2, 4}
    comparing.compare(llama, ParityTask(), chosen, tmp_path)
    joined = comparing.compare(llama, ParityTask(), named, tmp_path).rows
    assert {(row.rule, row.why) for row in joined} == {
        (row.rule, row.why) for row in rows
    }


def test_further_rules_join_a_comparison_and_nothing_is_decoded_again(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "windows": (2, 4),
        "limit": 6,
        "tuning": 2,
        "timed": 2,
        "repeats": 1,
        "out": tmp_path,
    }
    _, first = compare(llama, ParityTask(), ["exact", "topk:2"], **given)
    answers = (tmp_path / "compare.jsonl").read_text()
    timed = [
        json.loads(line)
        for line in (tmp_path / "timings.jsonl").read_text().splitlines()
    ]
    decoded: list[str] = []
    as_completed = Pair.as_completed

    def watched(self: Pair, prompts: list, decoder: Decoder, **more: object) -> object:
        if len(prompts) > 1:  # what is timed is decoded one by one
            decoded.append(str(decoder.rule))
        return as_completed(self, prompts, decoder, **more)

    monkeypatch.setattr(Pair, "as_completed", watched)
    _, both = compare(llama, ParityTask(), ["topk:3"], **given)
    assert set(decoded) == {"topk:3"}
    assert (tmp_path / "compare.jsonl").read_text().startswith(answers)
    of_first = [row for row in both["rows"] if row["rule"] != "topk:3"]
    assert [(row["rule"], row["window"], row["why"]) for row in of_first] == [
        (row["rule"], row["window"], row["why"]) for row in first["rows"]
    ]
    for before, row in zip(first["rows"], of_first):
        assert row["accuracy"] == before["accuracy"]
    assert {row["why"] for row in both["rows"] if row["rule"] == "topk:3"} >= {
        "fastest"
    }
    times = [
        json.loads(line)
        for line in (tmp_path / "timings.jsonl").read_text().splitlines()
    ]
    assert len(times) == 2 * len(timed), (
        "of each sample once more, all decoders in turn"
    )
    assert all(len(one["seconds"]) == len(both["rows"]) for one in times[len(timed) :])
    decoded.clear()
    _, again = compare(llama, ParityTask(), ["exact"], **given)
    assert not decoded and again["rows"] == both["rows"]
    # as earlier versions wrote them: a list of the settings' seconds, and no decoders
    lists = [{**one, "seconds": list(one["seconds"].values())} for one in timed]
    (tmp_path / "timings.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in lists)
    )
    compare(llama, ParityTask(), ["exact"], **given)
    assert set(decoded) <= {"topk:3"}


def test_a_comparison_with_any_stop_strings_is_gone_on_with(
    llama: Pair, tmp_path: Path
) -> None:
    options = {"stop_strings": ("\n\n", 'it"s; over')}
    config = CompareConfig(
        ("exact",), windows=(2,), options=options, limit=2, tuning=1, timed=1, repeats=1
    )
    first = comparing.compare(llama, ParityTask(), config, tmp_path).to_json()
    again = comparing.compare(llama, ParityTask(), config, tmp_path).to_json()
    assert again == first and first["stop_strings"] == list(options["stop_strings"])


def test_a_comparison_of_another_version_is_told(llama: Pair, tmp_path: Path) -> None:
    config = CompareConfig(
        ("exact",), windows=(2,), limit=2, tuning=1, timed=1, repeats=1
    )
    comparing.compare(llama, ParityTask(), config, tmp_path)
    asked = json.loads((tmp_path / "compare.json").read_text())
    del asked["settings"]
    (tmp_path / "compare.json").write_text(json.dumps(asked))
    with pytest.raises(
        InputError, match=r"compare.json: has no settings, .*another folder"
    ):
        comparing.compare(llama, ParityTask(), config, tmp_path)


@pytest.mark.parametrize("name", ["rule", "window"])
def test_options_of_a_comparison_name_neither_rule_nor_window(name: str) -> None:
    with pytest.raises(InputError, match=f"options: give {name} in {name}s"):
        CompareConfig(("exact",), options={name: "exact" if name == "rule" else 4})


def test_a_lost_comparison_is_a_whole_loss() -> None:
    """Answers that a grader compares with the target's: won 1, drawn 1/2, lost 0."""
    grader = SimpleNamespace(points=lambda triples: [1.0, 0.5, 0.0], at_par=0.5)
    answers = [SimpleNamespace(text=text, verdict="") for text in "abc"]
    quality = beside_target(grader, "123", answers, answers)
    assert quality.lost.tolist() == [0, 0, 1] and quality.gained.tolist() == [1, 0, 0]
