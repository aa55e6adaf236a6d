"""The step `serving` of benchmarks/gpu.py: the rules inside vLLM and SGLang.

Each measurement is a process of its own, `python benchmarks/gpu_serving.py SETTING`, which answers
problems of the built-in task and prints the tokens and the seconds as JSON. An engine that is not
installed is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu_bench import Bench, Item, Result, Skipped
from vllm_engine import fit_judge

from lenience.core.files import EMBEDDED
from lenience.tasks import WordMath, take

MOST = 320
"""Maximum number of tokens of an answer."""
WINDOW = 8
WARM_UP = 4
LENIENT = "topk:2,ratio=0.3"
JUDGE = "judge"
"""Stands for a judge of the target's states, which is fitted to the built-in run."""


@dataclass(frozen=True)
class Setting:
    """An engine to be measured."""

    engine: str
    rule: str | None
    """None without the plugin."""
    rows: int
    """Maximum number of requests that run together."""
    problems: int
    asynchronous: bool = True
    """Whether the next step is scheduled before this one is decided."""
    toy: bool = False

    @property
    def name(self) -> str:
        scheduling = "" if self.asynchronous else ", synchronous"
        return f"{self.engine}, {self.rule or 'plain'}, {self.rows} at once{scheduling}"


def serving(bench: Bench) -> Iterator[Item]:
    """Yield the measurements. The engine without the plugin comes first: the answers of the others
    are compared with its answers."""
    problems = 8 if bench.toy else 64
    for engine in ("vllm", "sglang"):
        for rows in (8,) if bench.toy else (1, 32):
            shared: dict[str, Any] = {
                "rows": rows,
                "problems": problems,
                "toy": bench.toy,
            }
            for rule in (
                None,
                "exact",
                LENIENT,
                *([JUDGE] if engine == "vllm" else []),
            ):
                setting = Setting(engine, rule, **shared)
                yield setting.name, partial(measured, bench, setting)
            setting = Setting(engine, "exact", **shared, asynchronous=False)
            yield setting.name, partial(measured, bench, setting)


def measured(bench: Bench, setting: Setting) -> Result:
    """Return the speed of a setting, and how many answers are those of the same engine without the
    plugin, if it has answered."""
    if find_spec(setting.engine) is None:
        raise Skipped(f"{setting.engine} is not installed")
    asked = setting
    if setting.rule == JUDGE:
        asked = replace(setting, rule=fit_judge(bench.out))
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(asdict(asked))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().split("\n")[-1])
    found = json.loads(done.stdout.strip().split("\n")[-1])
    tokens = found["tokens"]
    row = {
        **asdict(setting),
        "tokens_per_second": sum(map(len, tokens)) / found["seconds"],
    }
    plain = bench.out / f"plain-{setting.engine}-{setting.rows}.json"
    if setting.rule is None:
        plain.write_text(json.dumps(tokens))
    elif plain.exists():
        before = json.loads(plain.read_text())
        row["same_as_plain"] = sum(a == b for a, b in zip(tokens, before))
    return row


def answer(setting: Setting) -> dict[str, Any]:
    """Answer the problems in this process."""
    samples = take(WordMath(), "test", setting.problems + WARM_UP)
    prompts = [str(sample.prompt) for sample in samples]
    run = {"vllm": _vllm, "sglang": _sglang}[setting.engine](setting)
    run(prompts[:WARM_UP])
    began = time.perf_counter()
    found = run(prompts[WARM_UP:])
    seconds = time.perf_counter() - began
    return {"tokens": found, "seconds": seconds}


def _vllm(setting: Setting) -> Any:
    """Return what answers prompts with vLLM."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if setting.rule:
        options["additional_config"] = {"lenience": {"rule": setting.rule}}
    if torch.cuda.is_available():
        options["async_scheduling"] = setting.asynchronous
    llm = LLM(
        model=str(EMBEDDED / "target"),
        dtype="float32" if setting.toy else "bfloat16",
        max_model_len=1024,
        max_num_seqs=setting.rows,
        enable_prefix_caching=False,
        enforce_eager=setting.toy,
        speculative_config={
            "method": "draft_model",
            "model": str(EMBEDDED / "draft"),
            "num_speculative_tokens": WINDOW,
        },
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=MOST)

    def run(prompts: list[str]) -> list[list[int]]:
        outs = llm.generate(prompts, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    return run


def _sglang(setting: Setting) -> Any:
    """Return what answers prompts with SGLang."""
    if setting.rule:
        os.environ["LENIENCE_RULE"] = setting.rule
    else:
        os.environ.pop("LENIENCE_RULE", None)
    import sglang

    engine = sglang.Engine(
        model_path=str(EMBEDDED / "target"),
        dtype="bfloat16",
        context_length=1024,
        max_running_requests=setting.rows,
        disable_radix_cache=True,
        disable_overlap_schedule=not setting.asynchronous,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(EMBEDDED / "draft"),
        speculative_num_steps=WINDOW,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=WINDOW + 1,
        log_level="error",
    )
    params = {"temperature": 0, "max_new_tokens": MOST}

    def run(prompts: list[str]) -> list[list[int]]:
        return [out["output_ids"] for out in engine.generate(prompts, params)]

    return run


if __name__ == "__main__":
    print(json.dumps(answer(Setting(**json.loads(sys.argv[1])))))
