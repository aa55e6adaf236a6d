"""The command line, run as a user would: exit status, one line of error, the JSON line, and the
whole path on tiny models."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lenience
from lenience.cli.commands import COMMAND_EXAMPLES, app, main
from lenience.core.files import EMBEDDED
from lenience.decoding.auto_window import CANDIDATES
from lenience.drafting.registry import DRAFTERS, STOPS, TREES
from lenience.rules.registry import RULES
from lenience.tasks import BENCHMARKS

PROBLEM = (
    "Ann has 12 apples. Bob has 5 more apples than Ann. How many apples do they have together? "
    "Answer:"
)


def spawn(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lenience.cli", *map(str, args)],
        capture_output=True,
        text=True,
        input=stdin,
    )


def run(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As `spawn`, in this process: its seconds of imports are paid once."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "stdin", io.StringIO(stdin)),
    ):
        try:
            main([*map(str, args)])
        except SystemExit as stopped:
            status = stopped.code
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


KEYS = Path(__file__).parents[1] / "docs" / "json.md"


def documented(args: list[str]) -> tuple[set[str], set[str]]:
    """The keys that the guide names for a command, and those that it names for some options."""
    told = {}
    for line in KEYS.read_text().splitlines():
        if line.startswith("| `"):
            command, keys, *other = (
                re.findall("`([^`]+)`", cell) for cell in line[2:].split("|")
            )
            told[command[0]] = set(keys), {key for cell in other for key in cell}
    keys, other = told[
        next(name for name in reversed(told) if {*name.split()} <= {*args})
    ]
    return (keys | told["certify"][0] if "tune" in args else keys), other


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    """The object that a command printed, whose keys are those of the guide."""
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    keys, other = documented([*map(str, done.args)])
    assert keys <= set(told) <= keys | other
    return told


def test_what_mining_will_take_is_told_and_the_pilot_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "a run"
    short = ("--out", out, "--no-compile", "--json")
    done = run("mine", *short, "--plan", 100, "--limit", 3)
    told = last_json(done)
    plan = told["plan"]
    assert plan["pilot"] == 3 and told["important"] == pytest.approx(
        3 * plan["important"]
    )
    assert plan["samples"] == -(-100 * 3 // told["important"])
    assert f"next: lenience mine --out '{out}' --limit {plan['samples']}" in done.stderr
    journal = (out / "journal.jsonl").read_text().splitlines()
    assert last_json(run("mine", *short, "--limit", 4))["samples"] == 4
    assert (out / "journal.jsonl").read_text().splitlines()[:3] == journal
    assert run("mine", *short, "--plan", 0).returncode == 2


def test_generate_prints_the_answer() -> None:
    done = spawn("generate", PROBLEM)
    assert done.returncode == 0 and done.stdout.strip().endswith(
        "The final answer is 29."
    )
    told = last_json(spawn("generate", "--json", "--rule", "topk:2", stdin=PROBLEM))
    assert told["text"].endswith(".") and told["finish"] == "eos"
    assert (
        len(told["trace"])
        == len(told["tokens"])
        == round(told["tokens_per_pass"] * told["target_passes"])
    )


def test_a_profile_says_where_the_time_goes() -> None:
    done = run(
        "generate",
        PROBLEM,
        "--profile",
        "--window",
        "auto",
        "--stop",
        "confidence:0.5",
        "--json",
    )
    told = last_json(done)
    assert told["window"] in CANDIDATES
    assert f"window {told['window']} was picked" in " ".join(done.stderr.split())
    assert told["profile"]["cycles"] == told["target_passes"]
    assert set(told["profile"]["seconds"]) == {
        "draft",
        "target",
        "rule",
        "cache",
        "rest",
    }
    for said in ("warmed up", "passes of the target", "ms a cycle", "100.0%"):
        assert said in done.stderr


def test_show_colours_without_losing_text() -> None:
    done = run("generate", PROBLEM, "--show")
    plain = run("generate", PROBLEM)
    marks = str.maketrans("", "", "«»‹›[]()")
    assert done.stdout.translate(marks).startswith(
        plain.stdout.strip().translate(marks)
    )


@pytest.mark.parametrize(
    "args, says",
    [
        (["generate", "x", "--rule", "tokp:3"], "there is no rule 'tokp'"),
        (["generate", "Zebra"], "'Zebra'"),
        (
            ["generate", "Ann", "--target", "no/where", "--draft", "no/where"],
            "target 'no/where'",
        ),
        (["generate", "Ann", "--window", "-1"], "window -1"),
        (["generate", "Ann", "--windw", "1"], "--windw"),
        (["generate", "Ann", "--rule", "topk:2|"], "a rule is missing"),
        (["generate", "Ann", "--rule", "all"], "every rule in a comparison"),
        (["generate", "Ann", "--rule", "certified"], "write certified:RUN"),
        (
            ["generate", "--messages", "{tmp}/no"],
            "/no: cannot be read (No such file or directory)",
        ),
        (["grade", "{tmp}", "--take", "{tmp}/no"], "has no page of pairs"),
        (["mine", "--out", __file__], "is a file; name a folder"),
        (["compare", "--rule", "exact", "--out", __file__], "is a file; name a folder"),
        (["generate", "Ann", "--window", "x"], "--window"),
        (["generate", "Ann", "--stop", "head:{tmp}@0.5"], "no stop.json"),
        (["certify", "{tmp}"], "has no judge"),
        (["certify", "{tmp}", "--rule", "topk", "--max-drop", "2"], "max_drop 2.0"),
        (["certify", "{tmp}", "--rule", "topk", "--ids", "{tmp}/none"], "--ids"),
        (["certify", "{tmp}", "--rule", "target"], "that draft"),
        (["audit", "{tmp}", "{tmp}/none"], "cannot be read"),
        (["generate", "x", "--rule", "certified:{tmp}"], "there is no certificate"),
        (["compare", "--rule", "certified:{tmp}"], "certified"),
        (
            ["fit", "{tmp}", "--of", "topk:2"],
            "--of: names the rule that a stop learns from; give --stop",
        ),
        (
            ["fit", "{tmp}", "--stop", "--of", "target"],
            "--of target: rejects no tokens",
        ),
        (["fit", "{tmp}", "--stop", "--of", "topk"], "rule 'topk': topk needs k"),
        (
            ["compare", "--rule", "exact", "--stop", "confidence:2"],
            "confidence's least chance 2.0",
        ),
        (
            ["mine", "--out", "{tmp}/r", "--task", "mathword"],
            "there is no task 'mathword'",
        ),
        (["mine"], "--out"),
        (["fit", "{tmp}/nothing"], "holds no mining run; lenience mine --out"),
        (["fit", "{tmp}", "--ahead", "65"], "ahead 65: must be from 0 to 64"),
        (["fit", "{tmp}", "--stop", "--ahead", "2"], "--ahead: needs a judge"),
        (["tune", "{tmp}"], "has no judge"),
        (
            ["tune", "{tmp}", "--rule", "topk", "--prompts", "3"],
            "prompts 3: must be 16 or more",
        ),
        (
            ["tune", "{tmp}", "--rule", "topk", "--window", "0"],
            "window 0: must be 1 or more",
        ),
        (
            ["tune", "{tmp}", "--rule", "topk", "--stop", "confidence:2"],
            "least chance 2.0",
        ),
        (
            ["compare", "--setting", 'exact; stop="fixed'],
            "a double quote is not closed",
        ),
        (["compare", "--rule", "judge:{tmp}@0.5", "--limit", "2"], "no judge.json"),
        (["compare", "--rule", "judge:{tmp}@99"], "percent? write 0.99"),
        (["compare", "--rule", "judge:{tmp}@1.5"], "must be from 0 to 1"),
        (["compare", "--rule", "exact", "--limit", "0"], "--limit 0"),
        (["generate", "Ann", "--drafter", "medusa:{tmp}"], "no medusa.json in it"),
        (["generate", "Ann", "--drafter", "eagle:{tmp}"], "no config.json"),
        (
            ["generate", "Ann", "--drafter", "datastore:{tmp}"],
            "there is no datastore.json",
        ),
        (
            ["generate", "Ann", "--drafter", "ngram>suffix"],
            "suffix runs no model",
        ),
        (["generate", "Ann", "--drafter", "exit:9"], "the target has 8 layers"),
        (
            ["generate", "Ann", "--tree", "dynamic:1025"],
            "a tree of 1025 tokens or more",
        ),
        (
            ["generate", "Ann", "--tree", "dynamic:8", "--drafter", "ngram"],
            "needs trees, and drafter ngram has none; take another drafter or --tree chain",
        ),
        (["decode"], "decode"),
        (["generate", "Ann", "--dtype", "float99"], "float99"),
        (["demo", "--limit", "0"], "--limit 0"),
        (["fit", __file__], "--from annotated"),
        (["demo", "--fresh", "-1"], "--fresh -1"),
        (["certify", "{tmp}/nosuch"], "there is no such folder"),
        (
            ["certify", "{tmp}", "--rule", "topk:2", "--split", "tset"],
            "no split 'tset'",
        ),
        (["generate", "Ann", "--device", "cuda:7"], "cuda:7"),
        (["mine", "--out", "{tmp}/r", "--limit", "-1"], "limit -1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    args: list[str], says: str, tmp_path: Path
) -> None:
    done = run(*[arg.replace("{tmp}", str(tmp_path)) for arg in args])
    assert done.returncode == 2
    assert says in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "args, keeps", [(["generate", "Ann"], False), (["mine", "--out", "{tmp}/r"], True)]
)
def test_what_is_stopped_says_what_is_kept(
    args: list[str],
    keeps: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lenience.cli.choices.Models.load", stop)
    with pytest.raises(SystemExit) as ended:
        main([arg.replace("{tmp}", str(tmp_path)) for arg in args])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("lenience: stopped")
        and ("the same command resumes" in said) == keeps
    )


def test_a_marker_that_finds_no_answer_is_told(checkpoints, tmp_path: Path) -> None:
    target, draft = checkpoints("llama")
    (tmp_path / "own.jsonl").write_text(
        '{"prompt": "w1 w2", "reference": "w3", "split": "train"}\n'
    )
    task = [
        "--task",
        tmp_path / "own.jsonl",
        "--answer",
        "after:####",
        "--max-new-tokens",
        12,
    ]
    models = ["--target", target, "--draft", draft, "--no-compile"]
    done = run("mine", *models, *task, "--out", tmp_path / "r")
    told = " ".join(done.stderr.split())
    assert done.returncode == 0 and "in 1 of 1 samples no answer is found" in told
    assert (
        "1 of these responses end at the length limit: raise --max-new-tokens" in told
    )
    assert "next: lenience fit" not in told


def test_that_no_answer_is_right_is_told(checkpoints, tmp_path: Path) -> None:
    target, draft = checkpoints("llama")
    rows = ['{"prompt": "w1 w2", "reference": "99", "split": "test"}'] * 2
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    task = [
        "--task",
        tmp_path / "own.jsonl",
        "--answer",
        "last-number",
        "--max-new-tokens",
        8,
    ]
    models = ["--target", target, "--draft", draft, "--no-compile"]
    done = run(
        "compare", *models, *task, "--rule", "exact", "--timed", 1, "--window", 2
    )
    assert done.returncode == 0
    assert "accuracy is 0 for every decoder, so no loss can be seen" in " ".join(
        done.stderr.split()
    )


def test_windows_are_given_with_commas(tmp_path: Path) -> None:
    flags = ["--limit", 8, "--max-drop", 0.5, "--rule", "topk:2", "--no-compile"]
    made = last_json(run("certify", tmp_path, "--windows", "2,4", *flags, "--json"))
    assert made["binds"]["windows"] == [2, 4] and made["binds"]["window"] == 4
    for wrong, why in (
        (("--windows", "2 4"), "--windows 2 4: give numbers with commas"),
        (("--windows", "2,4", "--window", 8), "window: cannot be combined"),
        (("--windows", "0,4"), "windows 0: must be 1 or more"),
    ):
        done = run("certify", tmp_path, *wrong, *flags)
        assert done.returncode == 2 and why in done.stderr, done.stderr


def test_wrong_input_ends_a_process_with_2() -> None:
    done = spawn("generate", "x", "--rule", "tokp:3")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_a_failed_run_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from lenience.tasks import WordMath\nclass T(WordMath):\n    def answer(self, text):\n  "
        "      raise OSError('disk on fire')\n"
    )
    options = ["--task", f"{tmp_path}/broken.py:T", "--limit", 1, "--no-compile"]
    done = spawn("mine", *options, "--out", tmp_path / "r")
    assert (
        done.returncode == 1
        and "disk on fire" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_the_whole_path_on_a_users_own_pair_and_task(
    checkpoints, tmp_path: Path
) -> None:
    """Tiny random models and a JSONL task; the answers are worth nothing, but every command runs on
    from the last."""
    target, draft = checkpoints("llama")
    rows = [
        {
            "prompt": f"w{1 + i % 40} w{1 + 3 * i % 41} w{2 + i % 7}",
            "reference": f"w{i % 47}",
        }
        for i in range(60)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    models = ["--target", target, "--draft", draft]
    task = [
        "--task",
        tmp_path / "own.jsonl",
        "--answer",
        r"regex:(w\d+)",
        "--same",
        "text",
        "--max-new-tokens",
        16,
    ]
    folder = tmp_path / "run"
    mined = last_json(
        run("mine", *models, *task, "--out", folder, "--limit", 40, "--json")
    )
    assert mined["samples"] == 40 and 0 < mined["important"] < mined["mismatches"]
    again = run(
        "mine", *models, *task, "--out", folder, "--limit", 40, "--dtype", "bfloat16"
    )
    assert again.returncode == 2 and "dtype 'float32', not 'bfloat16'" in again.stderr
    fit = run("fit", folder, "--json", "--recall", 0.8)
    fitted = last_json(fit)
    low, high = fitted["auc_interval"]
    assert low <= fitted["auc_out_of_fold"] <= high
    assert f"{fitted['auc_out_of_fold']:.3f} ({low:.3f}–{high:.3f})" in " ".join(
        fit.stderr.split()
    )
    few = fitted["important"] < 100
    assert few == ("so mine about" in " ".join(fit.stderr.split()))
    shown = {row["threshold"] for row in fitted["thresholds"]}
    listed = [
        line
        for line in fit.stderr.splitlines()
        if re.match(r" +[\d.]+(–[\d.]+)? +(0\.|1 )", line)
    ]
    assert len(listed) == len(shown)
    assert {row["recall"] for row in fitted["thresholds"]} >= {0.9, 1.0}
    assert fitted["threshold"] == next(
        row["threshold"] for row in fitted["thresholds"] if row["recall"] == 0.8
    )
    curve = last_json(run("fit", folder, "--curve", "--json"))["curve"]
    assert [row["samples"] for row in curve] == sorted(
        {row["samples"] for row in curve}
    )
    whole = {key: fitted[key] for key in set(curve[-1]) - {"accepted"}}
    whole["accepted"] = next(
        r["accepted"] for r in fitted["thresholds"] if r["recall"] == 0.99
    )
    assert curve[-1] == whole and len(curve) > 1, (
        "all of the samples are what fit takes"
    )
    rules = [
        "--rule",
        "exact",
        "--rule",
        "topk:2",
        "--rule",
        f"judge:{folder}/judge@{fitted['threshold']}",
    ]
    told = last_json(
        run(
            "compare",
            *models,
            *task,
            *rules,
            "--limit",
            5,
            "--tuning",
            2,
            "--out",
            tmp_path / "cmp",
            "--json",
        )
    )
    assert {row["rule"].split(":")[0] for row in told["rows"]} == {
        "target",
        "draft",
        "exact",
        "topk",
        "judge",
    }
    assert (tmp_path / "cmp" / "report.html").stat().st_size > 10_000
    stop = last_json(run("fit", folder, "--stop", "--json"))["stop"]
    stopped = [
        "--rule",
        "exact",
        "--stop",
        f"head:{stop}@0.5",
        "--limit",
        5,
        "--tuning",
        2,
        "--out",
        tmp_path / "stopped",
    ]
    last_json(run("compare", *models, *task, *stopped, "--json"))
    assert (
        json.loads((tmp_path / "stopped" / "frontier.json").read_text())["stop"]
        == f"head:{stop}@0.5"
    )
    fresh = [
        folder,
        "--rule",
        "topk:1",
        "--loss",
        "disagreement",
        "--max-drop",
        0.8,
        *task,
        "--json",
    ]
    planned = last_json(run("certify", *fresh, "--plan", "--pilot", 2))
    # 0.2^3 ≤ the 0.045 of a first attempt, as much as may be spent by then
    assert [row["rule"] for row in planned["plan"]] == ["topk:1"] and planned[
        "least"
    ] == 3
    certified = last_json(run("certify", *fresh))
    assert certified["losses"] == 0 and certified["certified"]["rule"] == "topk:1"
    assert (certified["attempt"], certified["n"], certified["withdrawn"]) == (
        1,
        3,
        None,
    )
    live = tmp_path / "live.jsonl"
    live.write_text(
        "".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows[:12])
    )
    audited = last_json(
        run("audit", folder, live, "--share", 0.5, *task[:-2], "--json")
    )
    assert (
        audited["seen"] == 12
        and 0 < audited["audited"] < 12
        and audited["losses"] == 0
        and not audited["drifted"]
    )
    told = last_json(
        run("generate", "w1 w2", *models, "--rule", f"certified:{folder}", "--json")
    )
    plain = last_json(
        run(
            "generate",
            "w1 w2",
            *models,
            "--rule",
            "exact",
            "--max-new-tokens",
            16,
            "--json",
        )
    )
    assert told["tokens"] == plain["tokens"] and told["window"] == 8
    wrong = run(
        "generate", "w1 w2", *models, "--rule", f"certified:{folder}", "--window", 4
    )
    assert wrong.returncode == 2 and "certified with window 8, not 4" in wrong.stderr
    other = last_json(
        run(
            "fit",
            folder,
            "--models",
            "target",
            "--tokens",
            "previous",
            "--out",
            tmp_path / "judge2",
            "--json",
        )
    )
    assert other["mismatches"] == fitted["mismatches"]


def test_a_run_remembers_its_models_and_its_task(
    checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = checkpoints("llama")
    rows = [
        {
            "q": f"w{1 + i % 40} w{1 + 3 * i % 41} w{2 + i % 7}",
            "reference": f"w{i % 47}",
        }
        for i in range(60)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    named = [
        "--target",
        target,
        "--draft",
        draft,
        "--task",
        "own.jsonl",
        "--prompt-field",
        "q",
    ]
    named += ["--answer", r"regex:(w\d+)", "--same", "text"]
    told = last_json(run("init", "run", *named, "--json"))
    assert told == {"run": "run", "settings": "run/lenience.toml"}
    assert run("init", "run", *named).returncode == 2, (
        "what is there is not written over"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folder, short = "../run", ["--max-new-tokens", 16, "--json"]
    mined = last_json(run("mine", "--out", folder, "--limit", 6, *short))
    assert mined["samples"] == 6
    asked = ["--rule", "topk:1", "--loss", "disagreement", "--max-drop", 0.8]
    certified = last_json(run("certify", folder, *asked, *short))
    assert certified["certified"]["rule"] == "topk:1"
    (elsewhere / "live.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[:4])
    )
    assert last_json(run("audit", folder, "live.jsonl", "--json"))["seen"] == 4
    told = last_json(
        run("generate", "w1 w2", "--rule", f"certified:{folder}", "--json")
    )
    same = last_json(run("generate", "w1 w2", "--run", folder, *short))
    assert told["tokens"] == same["tokens"]
    fast = ["--window", 2, "--limit", 3, "--tuning", 1, "--timed", 1, "--repeats", 1]
    compared = last_json(
        run("compare", "--run", folder, "--rule", "exact", *fast, *short)
    )
    assert compared["task"].startswith("own.jsonl") and len(compared["rows"]) == 3
    settings = tmp_path / "run/lenience.toml"
    before = settings.read_text()
    refused = run("mine", "--out", folder, "--task", "wordmath", "--limit", 6, *short)
    assert refused.returncode == 2 and settings.read_text() == before, (
        "what failed is not kept"
    )
    other = run(
        "compare", "--run", folder, "--rule", "exact", "--draft", "nowhere", *short
    )
    assert other.returncode == 2 and "draft 'nowhere'" in other.stderr, (
        "the rest is remembered"
    )
    templated = ["--prompt-template", "{q} w1", "--rule", "exact", *fast, *short]
    assert (
        "prompt_template"
        in last_json(run("compare", "--run", folder, *templated))["task"]
    )
    (elsewhere / "text").mkdir()
    smiling = ["--prompt-template", "🙂 {q}", "--same", "text", "--answer", "boxed"]
    assert run("init", "two", "--task", "../own.jsonl", *smiling).returncode == 0
    kept = tomllib.loads(Path("two/lenience.toml").read_text())["task"]
    assert kept["same"] == "text" and kept["prompt_template"] == "🙂 {q}"
    assert kept["task"] == str(tmp_path / "own.jsonl")
    for text, says in (
        ("[task]\ntask = 5\n", "task must be a text"),
        ("[task]\nfoo = 'x'\n", "has foo, which is unknown"),
        ("[models]\nengine = 'vllm'\n", "has engine, which is unknown"),
        ("task", "cannot be read"),
        ("models = 'x'", "has models, which is unknown"),
    ):
        settings.write_text(text)
        done = run("certify", folder, *asked, *short)
        assert done.returncode == 2 and says in done.stderr
    assert run("compare", "--run", "nowhere").returncode == 2


def test_tuning_ends_in_a_certificate_that_decodes(checkpoints, tmp_path: Path) -> None:
    target, draft = checkpoints("llama")
    rows = [
        {"prompt": f"w{1 + i % 40} w{2 + i % 7}", "reference": "w1"} for i in range(40)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    models = ["--target", target, "--draft", draft]
    task = [
        "--task",
        tmp_path / "own.jsonl",
        "--answer",
        r"regex:(w\d+)",
        "--same",
        "text",
    ]
    asked = ["--rule", "topk:1", "--loss", "disagreement", "--max-drop", 0.8]
    few = [
        "--prompts",
        16,
        "--window",
        2,
        "--window",
        4,
        "--max-new-tokens",
        12,
        "--json",
    ]
    done = run("tune", tmp_path / "run", *models, *task, *asked, *few)
    told = last_json(done)
    assert "races on" in done.stderr and "the target alone" in done.stderr
    assert told["certified"]["losses"] == 0 and told["tried"][0]["rule"] == "exact"
    speeds = [told["races"][name]["tokens_per_second"] for name in ("alone", "strict")]
    assert told["certified"]["tokens_per_second"] >= max(speeds)
    decoded = run(
        "generate", "w1 w2", *models, "--rule", f"certified:{tmp_path}/run", "--json"
    )
    assert last_json(decoded)["window"] == told["certified"]["window"]


def test_the_demo_tells_the_whole_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """With fewer of the samples that come with the pair, and one window and two drafters that
    race."""
    few, lines = (
        tmp_path / "few",
        (EMBEDDED / "run" / "journal.jsonl").read_text().splitlines(True),
    )
    (few / "run").mkdir(parents=True)
    shutil.copy(EMBEDDED / "run" / "run.json", few / "run")
    (few / "run" / "journal.jsonl").write_text("".join(lines[:45]))
    monkeypatch.setattr("lenience.cli.demo.EMBEDDED", few)
    monkeypatch.setattr("lenience.cli.demo.RACED", 16)
    monkeypatch.setattr("lenience.cli.demo.WINDOWS", (8,))
    monkeypatch.setattr("lenience.cli.demo.DRAFTERS", ("model", "medusa"))
    monkeypatch.setattr("lenience.cli.demo.MAX_DROP", 0.4)  # certified on few prompts
    monkeypatch.setattr("lenience.cli.live.SCORED", 1)
    done = run("demo", "--out", tmp_path, "--fresh", 1, "--limit", 3, "--json")
    told = last_json(done)
    assert set(told) >= {
        "target_accuracy",
        "draft_accuracy",
        "important_share",
        "judge_auc",
        "rows",
        "seconds",
    }
    families = {re.split("[:@]", row["rule"])[0] for row in told["rows"]}
    assert families == {"target", "draft", "exact", "topk", "judge"}
    assert {"judge:", "judge@"} <= {row["rule"][:6] for row in told["rows"]}
    shipped = (few / "run" / "journal.jsonl").read_text()
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert (
        journal.startswith(shipped)
        and len(journal.splitlines()) == len(shipped.splitlines()) + 1
    )
    for name in (
        "run/run.json",
        "run/judge/judge.safetensors",
        "frontier.json",
        "report.html",
    ):
        assert (tmp_path / name).exists()
    exact = next(row for row in told["rows"] if row["rule"] == "exact")
    assert exact["paired_loss"] == 0 and exact["tokens_per_pass"] > 2
    assert told["gain"] in done.stderr.replace("\n", " ").replace("  ", " ")
    assert told["gain"] in html.unescape((tmp_path / "report.html").read_text())
    # what is left of the shipped run resumes it, and a judge fitted from it runs
    assert told["certificate"]["max_drop"] == 0.4 and told["certificate"]["n"] > 0
    assert not list(home.glob("ledger/*/*.jsonl"))  # it is no question of its user's
    assert list(tmp_path.glob("ledger/*/attempts.jsonl"))
    assert "The certificate" in (tmp_path / "report.html").read_text()
    judge = f"judge:{tmp_path}/run/judge@0.5"
    assert (
        last_json(run("generate", PROBLEM, "--rule", judge, "--window", 16, "--json"))[
            "accepted_lenient"
        ]
        > 0
    )


def test_help_is_in_the_order_of_use_with_examples_that_can_be_typed() -> None:
    whole = run("--help").stdout
    listed = [
        name for name in re.findall(r"│ (\w+) ", whole) if name in COMMAND_EXAMPLES
    ]
    assert listed == list(COMMAND_EXAMPLES)
    for name, example in COMMAND_EXAMPLES.items():
        told = run(name, "--help").stdout
        assert example in " ".join(told.split()) and "--empty" not in told
        command, bound, _ = app.parse_args(
            shlex.split(example)[1:], exit_on_error=False
        )
        assert command.__name__ == name
        assert bound.arguments or name in ("rules", "drafters", "tasks")


def test_the_version_is_told() -> None:
    assert spawn("--version").stdout.strip() == lenience.__version__


def test_lenience_alone_says_what_to_do_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([])
    out = capsys.readouterr().out
    assert "lenience demo --quick" in out and "--rule certified:run" in out
    typed = [line.split() for line in out.splitlines() if line.startswith("  lenience")]
    known = {*COMMAND_EXAMPLES, "--help", "COMMAND"}
    assert {words[1].rstrip(",") for words in typed} <= known


@pytest.mark.parametrize(
    ("command", "registries"),
    [
        ("rules", [RULES]),
        ("drafters", [DRAFTERS, TREES, STOPS]),
        ("tasks", [BENCHMARKS]),
    ],
)
def test_lists_hold_every_entry_with_a_sentence(
    command: str, registries: list[dict[str, type]], capsys: pytest.CaptureFixture[str]
) -> None:
    main([command, "--json"])
    entries = json.loads(capsys.readouterr().out)["entries"]
    names = {re.split(r"[:@\[]", entry["spec"])[0] for entry in entries}
    assert names >= {name for registry in registries for name in registry}
    assert all(entry["summary"].endswith((".", ")")) for entry in entries)
    assert all(len(entry["summary"].split()) <= 32 for entry in entries)
    main([command])
    shown = capsys.readouterr().out
    assert all(re.split(r"[:@\[]", entry["spec"])[0] in shown for entry in entries)


def test_a_target_without_a_draft_is_tuned_and_audited(
    checkpoints, tmp_path: Path
) -> None:
    """The drafters that race, and the certified one, need no draft model."""
    target, _ = checkpoints("llama")
    rows = []
    for i in range(120):
        prompt = f"w{i % 7 + 1} w{i % 11 + 1} w{i % 7 + 1} w{i % 5 + 1}"
        rows.append(json.dumps({"id": str(i), "prompt": prompt, "reference": "w1"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "live.jsonl").write_text("\n".join(rows[:8]))
    folder = tmp_path / "run"
    task = ("--task", tmp_path / "rows.jsonl", "--answer", "regex:(w[0-9]+)")
    given = ("--target", target, "--no-compile", "--max-new-tokens", 8)
    raced = ("--rule", "topk:2", "--drafter", "ngram", "--window", 2, "--prompts", 16)
    asked = ("--loss", "disagreement", "--max-drop", 0.9, "--limit", 60, "--json")
    told = last_json(run("tune", folder, *task, *given, *raced, *asked))
    raced = [entry["setting"] for chain in told["races"]["lenient"] for entry in chain]
    assert raced and all("drafter=ngram" in setting for setting in raced)
    # a rule races with the drafters that it can run with: ngram has no probabilities
    both = ("--rule", "fuzzy:js@0.3", "--drafter", "ngram", "--drafter", "skip:1")
    two = (*both, "--window", 2, "--prompts", 16)
    told = last_json(run("tune", tmp_path / "two", *task, *given, *two, *asked))
    raced = [entry["setting"] for chain in told["races"]["lenient"] for entry in chain]
    assert raced and all("drafter=skip:1" in setting for setting in raced)
    models = ("--target", target, "--no-compile")
    live = tmp_path / "live.jsonl"
    seen = last_json(run("audit", folder, live, *task, *models, "--share", 1, "--json"))
    assert seen["audited"] == 8
