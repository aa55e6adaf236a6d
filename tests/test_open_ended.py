"""Tasks without right answers: graders, turns that hold the target's own answers; and whole runs of
benchmarks on a tiny pair of characters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from capabilities import needs
from local_server import LocalHandler, LocalServer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lenience
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.cli import main
from lenience.cli.choices import Models, TaskChoice, choice_of, remember
from lenience.core.errors import InputError, RunError
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import without_long
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.human import take_grades, write_page
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.runs.uses import prompt_digest
from lenience.tasks import Graded, Sample
from lenience.tasks.code import HumanEval
from lenience.tasks.grader import RIGHT, GraderServer
from lenience.training.fit import HeadPlan, fit_run

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
Judge = Callable[[str, str], Any]
"""Gives a verdict, None for an empty reply, or a whole choice of the API."""


class Server:
    """A grader with OpenAI's API on the loopback, that judges by a rule and may fail at first."""

    def __init__(self, judge: Judge, failures: list[int] | None = None):
        self.judge, self.failures, self.asked = judge, failures or [], 0
        lock = threading.Lock()
        server = self

        class Handler(LocalHandler):
            def reply(self, status: int, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "scripted"}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.asked += 1
                    status = server.failures.pop() if server.failures else 200
                if status != 200:
                    self.reply(status, {"error": "no"})
                    return
                text = asked["messages"][-1]["content"]
                a, b = (
                    text.split(f"[Answer {one}]\n")[1].split(
                        f"\n[End of answer {one}]"
                    )[0]
                    for one in "AB"
                )
                said = server.judge(a, b)
                if isinstance(said, dict):  # a whole choice
                    self.reply(200, {"choices": [said]})
                    return
                content = None if said is None else f"Because.\n{said}"
                self.reply(200, {"choices": [{"message": {"content": content}}]})

        self._http = LocalServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.close()


def by_length(a: str, b: str) -> str:
    """The longer answer is better."""
    return "[[C]]" if len(a) == len(b) else "[[A]]" if len(a) > len(b) else "[[B]]"


def by_digits(a: str, b: str) -> str:
    """An answer is worse whose sum of digits is odd."""
    odd = [sum(int(c) for c in text if c.isdigit()) % 2 for text in (a, b)]
    return "[[C]]" if odd[0] == odd[1] else "[[B]]" if odd[0] else "[[A]]"


@pytest.fixture(autouse=True)
def replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graders say is kept for one test: another's server may come to have the same address."""
    monkeypatch.setenv("LENIENCE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any) -> Server:
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def rows(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def questions(folder: Path, n: int = 6) -> Path:
    content = [
        {"question_id": i, "category": "math" if i % 2 else "writing",
         "turns": [f"Say {i}.", f"And {i + 1}?"]}
        for i in range(n)
    ]  # fmt: skip
    return rows(folder / "question.jsonl", content)


SAMPLE = Sample("1", "Say it.", None)


def test_a_grader_is_asked_in_both_orders(serve: Any, tmp_path: Path) -> None:
    server = serve(by_length)
    task = lenience.task(
        "mtbench:turns=first", data=questions(tmp_path), grader=server.url
    )
    assert task.measure == "win rate" and task.beside_target
    triples = [("longer", "short", SAMPLE), ("a", "bcd", SAMPLE), ("ab", "cd", SAMPLE)]
    assert task.points(triples) == [1.0, 0.0, 0.5]
    assert server.asked == 6
    assert task.points([("same ", "same", SAMPLE)]) == [0.5] and server.asked == 6
    assert [task.same("longer", "short", SAMPLE), task.same("a", "bcd", SAMPLE)] == [
        True,
        False,
    ]
    assert (
        task.loss("a", "bcd", SAMPLE) == 1.0
        and task.loss("longer", "short", SAMPLE) == 0.0
    )
    assert task.grading == {"pairs": 3, "decided": 2, "inconsistent": 0, "unread": 0}
    again = lenience.task(
        "mtbench:turns=first", data=questions(tmp_path), grader=server.url
    )
    assert again.points(triples) == [1.0, 0.0, 0.5] and server.asked == 6  # kept


def test_a_worse_answer_is_lost_by_every_loss(
    serve: Any, pair: Pair, tmp_path: Path
) -> None:
    own: set[str] = set()  # the target's answers, which are always better
    own.add(RIGHT)
    server = serve(lambda a, b: "[[A]]" if a in own else "[[B]]")
    task = lenience.task(
        "mtbench:turns=first", data=questions(tmp_path, 150), grader=server.url
    )
    prompts = [one.prompt for one in task.samples("train")]
    outs = pair.generate_batch(prompts, rule="target", max_new_tokens=8, batch_size=64)
    own |= {out.text.strip() for out in outs}
    found = {}
    for loss in ("task", "disagreement"):
        asked = CertifyConfig(
            rules=("topk:4",), max_drop=0.5, confidence=0.9, loss=loss, limit=40,
            options={"max_new_tokens": 8, "window": 4},
        )  # fmt: skip
        tried = certify(pair, task, tmp_path / loss, asked).tried
        found[loss] = [(one.n, one.losses) for one in tried]
    assert found["task"][0][1] > 0 and found["disagreement"][0][1] > 0


def test_what_both_orders_do_not_say_is_a_tie_and_counted(
    serve: Any, tmp_path: Path
) -> None:
    replies = {"first": "[[A]]", "dumb": "no idea", "last": "[[A]] at first, but [[B]]"}
    server = serve(lambda a, b: replies[next(k for k in replies if k in a + b)])
    task = lenience.task(
        "mtbench:turns=first", data=questions(tmp_path), grader=server.url
    )
    pairs = [("first", "x"), ("dumb", "x"), ("last", "x")]
    assert task.points([(a, b, SAMPLE) for a, b in pairs]) == [0.5] * 3
    assert task.grading == {"pairs": 3, "decided": 0, "inconsistent": 2, "unread": 2}


def test_a_grader_that_does_not_grade_is_refused(serve: Any, tmp_path: Path) -> None:
    for reply, message in (
        (None, "20 of 20 replies hold no verdict"),
        ("I can't.", '20 of 20 replies hold no verdict, such as "Because. I can\'t."'),
        ("[[A]]", "prefers an answer by its place in 10 of 10 pairs"),
    ):
        server = serve(lambda a, b, reply=reply: reply)
        task = lenience.task(
            "mtbench:turns=first", data=questions(tmp_path), grader=server.url
        )
        assert task.points([(f"{i}", "x", SAMPLE) for i in range(9)]) == [0.5] * 9
        with pytest.raises(InputError, match=message):
            task.points([("9", "x", SAMPLE)])


@pytest.mark.parametrize("reply", [None, "[[A]]", "[[C]]", "I cannot say."])
def test_a_grader_that_cannot_tell_nonsense_is_refused_before_anything_is_mined(
    reply: str | None, serve: Any, pair: Pair, tmp_path: Path
) -> None:
    server = serve(lambda a, b: reply)
    task = lenience.task(
        "mtbench:turns=first", data=questions(tmp_path), grader=server.url
    )
    with pytest.raises(
        InputError, match=r"does not tell 'The capital of France is Paris\.' from"
    ):
        mine(pair, task, tmp_path / "run", MineConfig(max_new_tokens=8))
    assert server.asked == 2 and not (tmp_path / "run" / "journal.jsonl").exists()


def test_replies_without_a_verdict_are_asked_for_again(
    serve: Any, tmp_path: Path
) -> None:
    server = serve(lambda a, b: None)
    data = questions(tmp_path)
    task = lenience.task("mtbench:turns=first", data=data, grader=server.url)
    assert (
        task.points([("longer", "short", SAMPLE)] * 2) == [0.5] * 2
        and server.asked == 2
    )
    server.judge = by_length
    task = lenience.task("mtbench:turns=first", data=data, grader=server.url)
    assert task.points([("longer", "short", SAMPLE)]) == [1.0] and server.asked == 4


def test_an_interrupt_ends_what_waits_for_a_grader(
    chars: tuple[Path, Path], serve: Any, tmp_path: Path
) -> None:
    over = threading.Event()
    server = serve(
        lambda a, b: by_length(a, b) if RIGHT in (a, b) else str(over.wait(100))
    )
    command = [
        sys.executable,
        "-m",
        "lenience",
        "mine",
        "--task",
        "mtbench:turns=first",
    ]
    command += ["--data", str(questions(tmp_path, 60)), "--grader", server.url]
    command += [
        "--target",
        str(chars[0]),
        "--draft",
        str(chars[1]),
        "--max-new-tokens",
        "8",
    ]
    command += ["--out", str(tmp_path / "run"), "--no-compile"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts background jobs with interrupts ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and server.asked < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        over.set()
    assert server.asked > 2 and process.returncode == 1 and "lenience: stopped;" in said


def test_failures_for_the_moment_are_tried_again_and_others_end(serve: Any) -> None:
    ask = [[{"role": "user", "content": "[Answer A]\na\n[End of answer A]\n"
             "[Answer B]\nb\n[End of answer B]"}]]  # fmt: skip
    server = serve(by_length, [500, 429, 503])
    assert (
        GraderServer(server.url, wait=0.01).ask(ask) == ["Because.\n[[C]]"]
        and server.asked == 4
    )
    server = serve(by_length, [500] * 9)
    with pytest.raises(RuntimeError, match="chat/completions failed \\(500"):
        GraderServer(server.url, wait=0.01).ask(ask)
    assert server.asked == 5
    server = serve(by_length, [401] * 9)
    with pytest.raises(RuntimeError, match="401"):
        GraderServer(server.url, wait=0.01).ask(ask)
    assert server.asked == 1
    with pytest.raises(
        InputError, match=r"Connection refused.*check that the server runs"
    ):
        GraderServer("http://127.0.0.1:9/v1", wait=0.001)
    with pytest.raises(InputError, match="write URL or URL,model=NAME"):
        GraderServer(f"{server.url},temperature=1")
    assert GraderServer(f"{server.url},model=mine").source.startswith("mine at http")


@pytest.fixture(scope="module")
def chars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair whose tokens are characters, most of what it says digits; the draft is the target with
    some noise."""
    letters = ["<eos>", "\n", *map(chr, range(32, 127))]
    inner = Tokenizer(
        WordLevel({one: i for i, one in enumerate(letters)}, unk_token=" ")
    )
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    target = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in target.model.layers:
            for name, part in layer.named_parameters():
                if part.dim() > 1:  # so that what it says depends on the prompt
                    part *= 12 if "self_attn" in name else 6
        target.model.embed_tokens.weight *= 20
        target.lm_head.weight[0] = 0
        for likely in "0123456789 ":
            target.lm_head.weight[letters.index(likely)] *= 4
    draft = LlamaForCausalLM(config)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        draft.lm_head.weight += 0.02 * torch.randn_like(draft.lm_head.weight)
    folder = tmp_path_factory.mktemp("chars")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def pair(chars: tuple[Path, Path]) -> Pair:
    return load_pair(*map(str, chars), compile=False)


def test_second_turns_hold_the_targets_own_answers(pair: Pair, tmp_path: Path) -> None:
    task = lenience.task("mtbench:sets=whole", data=questions(tmp_path, 3))
    with pytest.raises(InputError, match="mtbench:turns=first"):
        list(task.samples("test"))
    config = CompareConfig(
        rules=("exact", "topk:3"),
        windows=(4,),
        timed=1,
        repeats=1,
        options={"max_new_tokens": 12},
    )
    task.max_new_tokens = 12
    frontier = compare(pair, task, config)
    samples = list(task.samples("test"))
    assert [one.id for one in samples] == ["0-1", "0-2", "1-1", "1-2", "2-1", "2-2"]
    assert [one.group for one in samples] == ["0", "0", "1", "1", "2", "2"]
    first, second = samples[:2]
    own = pair.generate(first.prompt, rule="target", max_new_tokens=12).text.strip()
    assert second.prompt == [*first.prompt, {"role": "assistant", "content": own},
                             {"role": "user", "content": "And 1?"}]  # fmt: skip
    assert frontier.measure == "agreement" and frontier.rows[0].accuracy == 1.0
    by_rule = {row.rule: row for row in frontier.rows}
    assert by_rule["exact"].accuracy == 1.0 and by_rule["exact"].paired_loss == 0.0
    lenient = by_rule["topk:3"]
    assert lenient.accuracy < 1 and lenient.paired_loss == pytest.approx(
        1 - lenient.accuracy
    )


def test_the_command_certifies_on_turns_that_hold_the_targets_own_answers(
    chars: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No prompt is read before the models that answer first turns are loaded."""
    target, draft = map(str, chars)
    asked = ["certify", str(tmp_path / "run"), "--target", target, "--draft", draft]
    asked += ["--task", "mtbench:sets=whole", "--data", str(questions(tmp_path, 12))]
    asked += ["--rule", "topk:3", "--loss", "disagreement", "--max-drop", "0.5"]
    asked += ["--split", "test", "--plan", "--pilot", "4", "--max-new-tokens", "12"]
    main([*asked, "--window", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["pilot"] == 4


def human_rows(n: int, hopeless: int = 0) -> list[dict[str, Any]]:
    """Functions that digits alone may complete rightly, but for `hopeless` of every ten."""
    return [
        {
            "task_id": f"Own/{i}", "entry_point": "f", "canonical_solution": "2",
            "prompt": f"def f(x):\n    return {i * 7919 % 1000} +",
            "test": "def check(candidate):\n"
                    "    assert candidate(1) % 2 == "
                    f"{1 if i % 10 >= hopeless else 2}\n",
        }
        for i in range(n)
    ]  # fmt: skip


def gsm_rows(n: int) -> list[dict[str, Any]]:
    return [{"question": f"{i} and {i}?", "answer": f"#### {2 * i}"} for i in range(n)]


def task_of(name: str, folder: Path, serve: Any) -> Any:
    if name == "gsm8k":
        return lenience.task("gsm8k", data=rows(folder / "gsm.jsonl", gsm_rows(150)))
    if name == "humaneval":
        return lenience.task(
            "humaneval", data=rows(folder / "human.jsonl", human_rows(200))
        )
    server = serve(by_digits)
    return lenience.task(
        "mtbench:turns=first", data=questions(folder, 150), grader=server.url
    )


@pytest.mark.parametrize(
    "name", ["gsm8k", pytest.param("humaneval", marks=needs("sandbox")), "graded"]
)
def test_from_mining_to_a_certificate(
    name: str, pair: Pair, serve: Any, tmp_path: Path
) -> None:
    task, run = task_of(name, tmp_path, serve), tmp_path / "run"
    length = 3 if name == "humaneval" else 8
    counts = mine(pair, task, run, MineConfig(limit=100, max_new_tokens=length))
    assert counts.samples == 100 and counts.important >= 10
    assert counts.mismatches - counts.important - counts.abstained >= 10
    plan = HeadPlan(
        Inputs(("target", "draft"), ("draft", "previous")), run / "judge", FitConfig()
    )
    fit_run(pair, run, plan)
    judge = f"judge:{run / 'judge'}@0.9"
    config = CompareConfig(
        rules=("exact", judge, "topk:4"), windows=(4,), timed=2, repeats=1,
        options={"max_new_tokens": length}, limit=20,
    )  # fmt: skip
    frontier = compare(pair, task, config, tmp_path / "compared")
    measure = {"gsm8k": "accuracy", "humaneval": "pass@1", "graded": "win rate"}[name]
    assert frontier.measure == measure
    by_rule = {row.rule: row for row in frontier.rows}
    assert by_rule["exact"].paired_loss == 0.0 and by_rule["topk:4"].n == 20
    if name == "graded":
        assert by_rule["exact"].accuracy == 0.5 and by_rule["topk:4"].paired_loss > 0
        assert frontier.grading and frontier.grading["inconsistent"] == 0
    if name == "humaneval":
        assert sum((by_rule["exact"].verdicts or {}).values()) == 20
    loss = {"gsm8k": "disagreement", "humaneval": "disagreement", "graded": "task"}[
        name
    ]
    asked = CertifyConfig(
        rules=(judge,), max_drop=0.4, confidence=0.9, loss=loss, limit=20,
        options={"max_new_tokens": length, "window": 4}, thresholds=(0.9, 0.99),
        allow_weak_target=True,
    )  # fmt: skip
    certificate = certify(pair, task, run, asked)
    assert 0 < certificate.n <= 20 and certificate.tried
    said = {
        "gsm8k": "final answer is not",
        "humaneval": "passes its tests",
        "graded": "prefers",
    }
    assert said[name] in certificate.loss_is
    assert (certificate.grading is not None) == (name == "graded")
    if name == "humaneval":  # two programs that fail agree
        weak = replace(
            asked,
            rules=("topk:2",),
            thresholds=(),
            allow_weak_target=False,
            max_drop=0.05,
        )
        data = rows(tmp_path / "hopeless.jsonl", human_rows(200, hopeless=8))
        hopeless = lenience.task("humaneval", data=data)
        with pytest.raises(
            InputError, match=r"the target answers (\d|none) of 20 prompts rightly"
        ):
            certify(pair, hopeless, tmp_path / "other", weak)
    if name == "graded":
        with pytest.raises(
            InputError, match="compared with the target's own; give --loss task"
        ):
            certify(pair, task, run, CertifyConfig(rules=(judge,)))


def test_a_graded_mine_that_is_killed_goes_on_to_the_same_journal(
    chars: tuple[Path, Path], pair: Pair, serve: Any, tmp_path: Path
) -> None:
    server = serve(by_digits)
    data = questions(tmp_path, 60)
    command = [
        sys.executable,
        "-m",
        "lenience",
        "mine",
        "--task",
        "mtbench:turns=first",
    ]
    command += ["--data", str(data), "--grader", server.url, "--max-new-tokens", "8"]
    command += ["--target", str(chars[0]), "--draft", str(chars[1]), "--limit", "30"]
    command += ["--out", str(tmp_path / "killed"), "--batch-size", "4", "--no-compile"]
    journal = tmp_path / "killed" / "journal.jsonl"
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if journal.exists() and journal.read_text().count("\n") >= 5:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 5 <= journal.read_text().count("\n") < 30
    task = lenience.task("mtbench:turns=first", data=data, grader=server.url)
    mine(pair, task, tmp_path / "killed", MineConfig(limit=30, max_new_tokens=8))
    mine(pair, task, tmp_path / "whole", MineConfig(limit=30, max_new_tokens=8))

    def records(name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / name / "journal.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        for one in found:
            one["cost"].pop("seconds")
        return found

    assert records("killed") == records("whole") and len(records("whole")) == 30


def test_a_local_model_grades(chars: tuple[Path, Path], tmp_path: Path) -> None:
    from lenience.decoding.task_models import ModelGrader

    grader = ModelGrader(str(chars[0]), device="cpu")
    task = lenience.task("mtbench:turns=first", data=questions(tmp_path), grader=grader)
    assert isinstance(task, Graded) and task.points([("a", "b", SAMPLE)]) == [0.5]
    # random
    assert task.grading == {
        "pairs": 1,
        "decided": 0,
        "inconsistent": 0,
        "unread": 2,
    }


def test_people_grade_blinded_pairs(pair: Pair, tmp_path: Path) -> None:
    task = lenience.task(
        "gsm8k:sets=whole", data=rows(tmp_path / "gsm.jsonl", gsm_rows(30))
    )
    out = tmp_path / "compared"
    with pytest.raises(InputError, match="holds no comparison"):
        write_page(out)
    config = CompareConfig(
        rules=("exact", "topk:4"),
        windows=(4,),
        timed=1,
        repeats=1,
        options={"max_new_tokens": 8},
    )
    compare(pair, task, config, out)
    page = write_page(out)
    assert page.pairs > 5 and page.pairs + page.alike == 30
    html = page.path.read_text()
    shown = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert len(shown) == page.pairs and "topk" not in html and "target" not in html
    own = {
        (one["id"], one["text"])
        for one in map(json.loads, (out / "compare.jsonl").read_text().splitlines())
        if one["rule"] == "target"
    }
    ids = {
        prompt: id
        for id, prompt in json.loads((out / "prompts.json").read_text()).items()
    }
    is_left = [(ids[one["prompt"]], one["left"]) in own for one in shown]
    assert 0 < sum(is_left) < len(shown)
    # the first is a tie, then the other's answer is better, but for the last
    said = ["right" if left else "left" for left in is_left]
    said[0], said[-1] = "tie", "left" if is_left[-1] else "right"
    name = html.split('page = "')[1].split('"')[0]
    filled = tmp_path / "grades.json"
    filled.write_text(json.dumps({"page": name, "grades": dict(enumerate(said))}))
    ((setting, grades),) = take_grades(out, filled).items()
    assert "topk:4" in setting
    assert (grades.n, grades.wins, grades.ties, grades.losses) == (
        page.pairs, page.pairs - 2, 1, 1
    )  # fmt: skip
    assert grades.win_rate == pytest.approx((page.pairs - 1.5) / page.pairs)
    low, high = grades.win_rate_interval
    assert low < grades.win_rate < high <= 1
    kept = [
        row["human"] for row in json.loads((out / "frontier.json").read_text())["rows"]
    ]
    assert [one["wins"] for one in kept if one] == [grades.wins]
    assert "graded by people" in (out / "report.html").read_text()
    again = compare(pair, task, config, out)
    assert [row.human.wins for row in again.rows if row.human] == [grades.wins]
    for content, message in (
        ({"page": "other", "grades": {"0": "tie"}}, "belongs to another page"),
        ({"page": name, "grades": {"0": "best"}}, "a grade must be left, tie or right"),
        ({"page": name, "grades": {"99": "tie"}}, "a grade must be left, tie or right"),
        ({"page": name, "grades": {}}, "no pair is graded yet"),
        (["tie"], "is not what the page saves"),
    ):
        filled.write_text(json.dumps(content))
        with pytest.raises(InputError, match=message):
            take_grades(out, filled)
    with pytest.raises(InputError, match="cannot be read"):
        take_grades(out, tmp_path / "none.json")
    assert f"lenience grade {out} --take FILE" in html
    with pytest.raises(InputError, match="is missing in"):
        write_page(out, ["topk:9"])
    with pytest.raises(InputError, match="a new page would lose its grades"):
        write_page(out)


def test_what_two_settings_say_alike_is_graded_once(pair: Pair, tmp_path: Path) -> None:
    task = lenience.task(
        "gsm8k:sets=whole", data=rows(tmp_path / "gsm.jsonl", gsm_rows(20))
    )
    out = tmp_path / "compared"
    config = CompareConfig(
        settings=("topk:4; window=4", "topk:5; window=4"), windows=(4,), timed=1, repeats=1,
        options={"max_new_tokens": 8},
    )  # fmt: skip
    compare(pair, task, config, out)
    page = write_page(out)
    html = page.path.read_text()
    shown = json.loads(html.split('id="data">')[1].split("</script>")[0])
    contents = {(one["prompt"], *sorted((one["left"], one["right"]))) for one in shown}
    assert len(contents) == len(shown) == page.pairs
    filled = tmp_path / "grades.json"
    name = html.split('page = "')[1].split('"')[0]
    said = dict.fromkeys(range(page.pairs), "tie")
    filled.write_text(json.dumps({"page": name, "grades": said}))
    grades = take_grades(out, filled)
    assert len(grades) == 2 and sum(one.n for one in grades.values()) > page.pairs


def test_another_option_of_a_runs_benchmark_keeps_its_files_and_grader(
    tmp_path: Path,
) -> None:
    run, data = tmp_path / "run", questions(tmp_path)
    grader = "http://127.0.0.1:1/v1,model=one"
    remember(run, Models(), TaskChoice(task="mtbench", data=str(data), grader=grader))
    fold = choice_of(run, TaskChoice(task="mtbench:fold=0"))
    assert (fold.task, fold.data, fold.grader) == ("mtbench:fold=0", str(data), grader)
    assert choice_of(run, TaskChoice(task="wordmath")).grader is None
    code = rows(tmp_path / "human.jsonl", human_rows(10))
    unsafe = TaskChoice(task="humaneval", data=str(code), unsafe_local=True).load()
    assert isinstance(unsafe, HumanEval) and unsafe.sandbox.kind == "none"
    with pytest.raises(
        InputError, match="is a server's address; begin it with http://"
    ):
        TaskChoice(task="mtbench", data=str(data), grader="localhost:8000/v1").load()
    with pytest.raises(
        InputError, match="is not an address; write http://HOST:PORT/v1"
    ):
        lenience.task("mtbench", data=data, grader="/models/grader")
    with pytest.raises(InputError, match="there is no task 'mtbenhc'"):
        lenience.task("mtbenhc", data=data)


def test_prompts_that_are_too_long_are_named_or_left_out(
    pair: Pair, tmp_path: Path
) -> None:
    content = gsm_rows(12)
    content[3]["question"] = "x" * 5000
    task = lenience.task("gsm8k:sets=whole", data=rows(tmp_path / "gsm.jsonl", content))
    asked = CertifyConfig(
        rules=("topk:2",), loss="disagreement", options={"max_new_tokens": 8}
    )
    long = (
        r"sample gsm-3: the prompt has 50\d\d tokens, .* or leave out long prompts "
        r"\(--skip-long\)"
    )
    with pytest.raises(InputError, match=long):
        certify(pair, task, tmp_path / "run", asked)
    with pytest.raises(InputError, match=long):
        mine(pair, task, tmp_path / "mined", MineConfig(max_new_tokens=8))
    shorter = without_long(pair, task)
    counts = mine(pair, shorter, tmp_path / "mined", MineConfig(max_new_tokens=8))
    assert counts.samples == 11 and shorter.left_out == {"gsm-3"}


def test_prompts_that_a_judge_has_learned_from_are_counted(
    pair: Pair, tmp_path: Path
) -> None:
    task = lenience.task(
        "gsm8k:sets=whole", data=rows(tmp_path / "gsm.jsonl", gsm_rows(80))
    )
    mine(pair, task, tmp_path / "run", MineConfig(limit=50, max_new_tokens=8))
    plan = HeadPlan(
        Inputs(("target",), ("draft",)), tmp_path / "run" / "judge", FitConfig()
    )
    fit_run(pair, tmp_path / "run", plan)
    config = CompareConfig(
        rules=(f"judge:{tmp_path / 'run' / 'judge'}@0.9",), windows=(4,), timed=1, repeats=1,
        options={"max_new_tokens": 8},
    )  # fmt: skip
    assert compare(pair, task, config).learned_from == 50


def test_five_judges_decode_what_they_have_not_seen(
    chars: tuple[Path, Path], pair: Pair, tmp_path: Path
) -> None:
    data, run = rows(tmp_path / "gsm.jsonl", gsm_rows(120)), tmp_path / "run"
    command = [
        "mine",
        "--task",
        "gsm8k:sets=whole",
        "--data",
        str(data),
        "--out",
        str(run),
    ]
    command += [
        "--target",
        str(chars[0]),
        "--draft",
        str(chars[1]),
        "--max-new-tokens",
        "8",
    ]
    main([*command, "--no-compile", "--batch-size", "64"])
    learned = []
    for fold in range(5):
        out = run / f"judge-{fold}"
        main(["fit", str(run), "--fold", str(fold), "--out", str(out)])
        task = lenience.task("gsm8k", data=data, fold=fold)
        tested = {
            prompt_digest(pair.target.encode(one.prompt))
            for one in task.samples("test")
        }
        known = set(load_head(out).prompts or ())
        assert len(known) + len(tested) == 120 and not known & tested
        learned.append(tested)
    assert len(set().union(*learned)) == 120
    with pytest.raises(SystemExit):
        main(["fit", str(run), "--fold", "5"])


def test_rows_without_references_are_compared_by_agreement(
    pair: Pair, tmp_path: Path
) -> None:
    data = rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i}?"} for i in range(60)])
    task = lenience.task(str(data), answer="last-number")
    config = CompareConfig(
        rules=("exact", "topk:4"),
        windows=(4,),
        timed=1,
        repeats=1,
        options={"max_new_tokens": 6},
    )
    frontier = compare(pair, task, config)
    by_rule = {row.rule: row for row in frontier.rows}
    assert frontier.measure == "agreement" and by_rule["exact"].n == 12
    assert (
        by_rule["exact"].accuracy == 1.0
        and by_rule["target"].seconds_per_correct is None
    )
    own, lenient = (
        [task.answer(pair.generate(one.prompt, rule=rule, window=4, max_new_tokens=6).text)
         for one in task.samples("test")]
        for rule in ("target", "topk:4")
    )  # fmt: skip
    agree = sum(a == b for a, b in zip(own, lenient)) / 12
    assert by_rule["topk:4"].accuracy == pytest.approx(agree) and agree < 1


@pytest.mark.parametrize("where", ["reasoning_content", "reasoning"])
def test_a_grader_that_only_thinks_is_named(
    serve: Callable[..., Server], where: str
) -> None:
    asked = "[Answer A]\n1\n[End of answer A]\n[Answer B]\n2\n[End of answer B]"
    question = [{"role": "user", "content": asked}]

    def thinks(finish: str) -> Callable[[str, str], Any]:
        message = {"content": None, where: "perhaps [[B]]"}
        return lambda a, b: {"message": message, "finish_reason": finish}

    with pytest.raises(RunError, match=f"all of it is in {where}; turn reasoning off"):
        GraderServer(serve(thinks("stop")).url).ask([question])
    with pytest.raises(RunError, match="its thought used up all 1024 tokens"):
        GraderServer(serve(thinks("length")).url).ask([question])
    parts = [{"type": "text", "text": "So "}, {"type": "text", "text": "[[A]]"}]
    whole = {"message": {"content": parts}, "finish_reason": "stop"}
    assert GraderServer(serve(lambda a, b: whole).url).ask([question]) == ["So [[A]]"]
