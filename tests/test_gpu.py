"""benchmarks/gpu.py on a CPU, at toy size: every step runs, a cut loses nothing, and the results
make a section of docs/performance.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_figures
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_report
import gpu_scale
import gpu_serving
from gpu_bench import Bench, Item

from lenience.cli.commands import app

ROOT = Path(__file__).parents[1]


def rows_of(out: Path) -> list[dict[str, Any]]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if not row.get("begun")]


def dry_run(out: Path, *more: str) -> str:
    command = [sys.executable, "benchmarks/gpu.py", "--toy", "--out", str(out), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_dry_run_makes_every_measurement_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = dry_run(tmp_path, "--minutes", "30", "--only", "right", "windows", "fast")
    rows = {row["key"]: row for row in rows_of(tmp_path)}
    assert [row for row in rows.values() if "failed" in row or "skipped" in row] == []
    assert "no time left" not in said and "right: no" not in said
    right = [row for key, row in rows.items() if key.startswith("right/")]
    assert len(right) == 2 * 2 * (11 + 3)  # dtypes x plain and recorded x variants
    assert all(row["different"] == 0 for row in right)
    exact = [row for key, row in rows.items() if key.startswith("right/llama, float32")]
    assert all(row["same"] == row["prompts"] for row in exact)
    assert sum(key.startswith("windows/") for key in rows) == 4
    assert sum(key.startswith("fast/") for key in rows) == 9 + 7 + 3

    before = len(rows_of(tmp_path))
    assert dry_run(tmp_path, "--minutes", "1", "--only", "windows", "fast") == ""
    assert [row["key"] for row in rows_of(tmp_path)[before:]] == ["machine"]

    results = gpu_report.last_results(tmp_path / "results.jsonl")
    kept = {"results": results, "answers": gpu_report.answers_by_kind(results)}
    (tmp_path / gpu_report.KEPT.name).write_text(json.dumps(kept))
    page = tmp_path / "page.md"
    page.write_text(gpu_report.section(kept))
    monkeypatch.setattr(test_figures, "RESULTS", tmp_path)
    assert list(test_figures.told_of(page)) == []
    for wanted in (
        "recorded, trees in a batch, float32",
        "tree 64",
        "judge, exported, batch 2",
    ):
        assert wanted in page.read_text()


@pytest.mark.parametrize("toy", [True, False])
def test_a_target_is_trained_and_each_command_after_it_is_understood(
    toy: bool, tmp_path: Path
) -> None:
    """What the commands do is tested where they are: this is how they are called."""
    bench = Bench(tmp_path, torch.device("cpu"), toy=toy)
    if toy:
        trained = gpu_scale.train_large(bench, tmp_path / "target")
        assert trained["steps"] >= 1 and trained["loss"] < 8
        assert (tmp_path / "target" / "model.safetensors").is_file()
    commands = gpu_scale.commands(
        bench, tmp_path / "target", tmp_path / "draft", tmp_path / "run"
    )
    assert list(commands) == ["mine", "fit", "compare", "tune", "certify"]
    for name, arguments in commands.items():
        command, bound, _ = app.parse_args(
            [*arguments, "--json"], exit_on_error=False, print_error=False
        )
        assert command.__name__ == name and bound.kwargs["json"] is True


def test_the_steps_of_a_larger_target_end_with_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run in the order in which each needs the ones before, and a failed one is told."""
    told: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        told.append(command[3])
        failed = command[3] == "tune"
        return subprocess.CompletedProcess(command, failed, '{"done": 1}', "no luck")

    monkeypatch.setattr(gpu_scale, "subprocess", SimpleNamespace(run=run))
    bench = Bench(tmp_path, torch.device("cpu"), toy=True)
    bench.begin()
    assert bench.run("scale", gpu_scale.scale(bench), until=float("inf"))
    rows = {row["key"]: row for row in rows_of(tmp_path)[1:]}
    assert told == ["mine", "fit", "compare", "tune", "certify"]
    assert "no luck" in rows["scale/tune"]["failed"]
    assert rows["scale/certify"]["told"] == {"done": 1}
    assert "SmolLM2" in rows["scale/SmolLM2, train"]["skipped"]


def test_engines_that_are_not_installed_are_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_serving, "find_spec", lambda engine: None)
    bench = Bench(tmp_path, torch.device("cpu"), toy=True)
    bench.begin()
    assert bench.run("serving", gpu_serving.serving(bench), until=float("inf"))
    rows = {row["key"]: row for row in rows_of(tmp_path)[1:]}
    assert rows["serving/vllm, plain, 8 at once"]["skipped"] == "vllm is not installed"
    assert rows["serving/sglang, exact, 8 at once, synchronous"]["skipped"]
    assert len(rows) == 5 + 4


def test_answers_are_compared_with_the_engines_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with those of another rule, if the engine without the plugin has none."""

    def answered(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        rule = json.loads(command[-1])["rule"]
        tokens = [[1, 2], [3, 4 if rule in (None, "exact") else 5]]
        told = json.dumps({"tokens": tokens, "seconds": 2})
        return subprocess.CompletedProcess(command, 0, told, "")

    monkeypatch.setattr(gpu_serving, "find_spec", lambda engine: True)
    monkeypatch.setattr(gpu_serving.subprocess, "run", answered)
    bench = Bench(tmp_path, torch.device("cpu"), toy=True)
    shared = {"rows": 8, "problems": 2}
    lenient = gpu_serving.Setting("vllm", "topk:2", **shared)
    assert "same_as_plain" not in gpu_serving.measured(bench, lenient)
    plain = gpu_serving.measured(bench, gpu_serving.Setting("vllm", None, **shared))
    assert plain["tokens_per_second"] == 2 and "same_as_plain" not in plain
    again = gpu_serving.measured(bench, lenient)
    assert again["same_as_plain"] == 1
    exact = gpu_serving.measured(bench, replace(lenient, rule="exact"))
    rows = [{"key": "serving/a", **again}, {"key": "serving/b", **exact}]
    (table,) = gpu_report.serving_table([*rows, {"key": "serving/c", **plain}])
    assert "| a | 2 | 1 of 2 |" in table and "| b | 2 | 2 of 2 |" in table


class Killed(BaseException):
    """What ends the process in the middle of a measurement."""


def test_a_measurement_that_ends_its_process_is_begun_twice_and_then_left(
    tmp_path: Path,
) -> None:
    def ends() -> dict[str, Any]:
        raise Killed

    def fails() -> dict[str, Any]:
        raise RuntimeError("no")

    measured: list[str] = []

    def items() -> Iterator[Item]:
        yield "ends", ends
        yield "fails", fails
        yield "works", lambda: measured.append("works") or {"value": 1}

    def call(retry: bool = False) -> bool:
        bench = Bench(tmp_path, torch.device("cpu"), toy=True, retry=retry)
        bench.begin()
        return bench.run("step", items(), until=float("inf"))

    for _ in range(2):
        with pytest.raises(Killed):
            call()
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": "step/wor')  # cut while it was written
        file.write("\n")
    assert call() and measured == ["works"]
    assert call() and measured == ["works"]
    assert (
        sum(row["key"] == "step/fails" for row in Bench(tmp_path, None, True).results())
        == 2
    )
    with pytest.raises(Killed):
        call(retry=True)


def test_a_lost_device_ends_the_step(tmp_path: Path) -> None:
    def lost() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench = Bench(tmp_path, torch.device("cpu"), toy=True)
    bench.begin()
    later: list[str] = []
    items = [("lost", lost), ("later", lambda: later.append("x") or {})]
    assert not bench.run("step", iter(items), until=float("inf"))
    assert later == []


def test_a_half_written_line_is_ended_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"key": "cut')
    bench = Bench(tmp_path, torch.device("cpu"), toy=True)
    bench.begin()
    bench.write("a", {"value": 1})
    assert bench.results()[-1] == {"key": "a", "value": 1}
    assert bench.results()[0]["key"] == "machine"


def test_the_page_keeps_the_section_that_the_results_file_gives() -> None:
    page = gpu_report.PAGE.read_text()
    assert page.count(gpu_report.BEGIN) == page.count(gpu_report.END) == 1
    if gpu_report.KEPT.exists():
        text = gpu_report.section(json.loads(gpu_report.KEPT.read_text()))
        assert gpu_report.fill(page, text) == page
    else:
        assert "ever run on a GPU" in page
