"""What vLLM's drafters and the plugin's rules give on a language model. Prints one JSON object.

    python benchmarks/vllm_drafters.py --target TARGET --draft DRAFT --eagle EAGLE \\
        --judge judge:RUN/judge@0.99 --problems test.jsonl

Run it where vLLM is installed (docs/vllm.md), on a machine with nothing else to do. TARGET, DRAFT
and EAGLE are folders that benchmarks/real.py makes. Problems are rows with `question` and `answer`.

Each setting runs in a vLLM of its own, one request at a time: without a draft; with each drafter
without the plugin, with `exact` and with a lenient rule; and the judge with the draft model, whose
tokens it was mined on. A warm-up of four problems comes first. With `--asynchronous` the same
settings run again with asynchronous scheduling, as tests/asynchronous_vllm makes it run on a CPU.
With `--own N` lenience's own loop answers the first N problems with the same drafters and rules. It
begins, as vLLM does, with a token that is not drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from recording import recorded

MOST = 200
"""Maximum number of tokens of an answer."""
WARM_UP = 4
ASYNCHRONOUS = Path(__file__).parents[1] / "tests/asynchronous_vllm"


@dataclass(frozen=True)
class Setting:
    """A vLLM to be measured."""

    drafter: str | None = None
    """Method of --speculative-config; None without a draft."""
    model: str | None = None
    window: int = 0
    rule: str | None = None
    """None without the plugin."""
    asynchronous: bool = False


def settings(given: argparse.Namespace) -> Iterator[Setting]:
    drafters = (("ngram", None), ("eagle3", given.eagle), ("draft_model", given.draft))
    for asynchronous in (False, True) if given.asynchronous else (False,):
        yield Setting(asynchronous=asynchronous)
        for method, model in drafters:
            if asynchronous and method == "ngram":
                continue  # vLLM's V1 runner refuses the two together
            shared = method, model, given.window
            for rule in (None, "exact", given.rule):
                yield Setting(*shared, rule, asynchronous)
        if given.judge:
            shared = "draft_model", given.draft, given.window
            yield Setting(*shared, given.judge, asynchronous)


def measured(
    setting: Setting, target: str, problems: Path, limit: int
) -> dict[str, Any]:
    """Answer the problems in a process of its own."""
    asked = json.dumps([asdict(setting), target, str(problems), limit])
    first = str(ASYNCHRONOUS) if setting.asynchronous else ""
    path = os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, "--one", asked],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(setting: Setting, target: str, problems: Path, limit: int) -> dict[str, Any]:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    rows = rows[: limit + WARM_UP]
    llm = LLM(model=target, **_options(setting))
    config = llm.llm_engine.vllm_config.scheduler_config
    assert config.async_scheduling == setting.asynchronous
    params = SamplingParams(temperature=0, max_tokens=MOST)
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    llm.chat(asked[:WARM_UP], params, use_tqdm=False)
    before = _drafts(llm)
    began = time.perf_counter()
    outs = llm.chat(asked[WARM_UP:], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    windows = _drafts(llm) - before
    llm.llm_engine.engine_core.shutdown()
    tokens = [list(out.outputs[0].token_ids) for out in outs]
    texts = [out.outputs[0].text for out in outs]
    right = sum(
        _last_number(text) == _last_number(str(row["answer"]))
        for text, row in zip(texts, rows[WARM_UP:])
    )
    counts = [(out.kv_transfer_params or {}).get("lenience") for out in outs]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "windows": windows,
        "right": right,
        "kept_leniently": sum(count["kept_leniently"] for count in counts if count),
    }


def _options(setting: Setting) -> dict[str, Any]:
    """Return vLLM's arguments for a setting."""
    options: dict[str, Any] = {}
    if setting.drafter:
        speculative = {
            "method": setting.drafter,
            "num_speculative_tokens": setting.window,
        }
        if setting.model:
            speculative["model"] = setting.model
        else:
            speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        options["speculative_config"] = speculative
    if setting.rule:
        options["additional_config"] = {"lenience": {"rule": setting.rule}}
    return options | {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }


def _drafts(llm: Any) -> float:
    """Return the number of windows so far."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return float(found.get("vllm:spec_decode_num_drafts", 0))


def _last_number(text: str) -> Fraction | None:
    from lenience.tasks.numbers import numbers

    found = list(numbers(text))
    return found[-1].value if found else None


def own(
    setting: Setting, given: argparse.Namespace, theirs: Sequence[list[int]]
) -> int:
    """Return how many of the first answers lenience's own loop gives too."""
    from lenience.decoding.loading import load_pair

    specs = {
        "ngram": "ngram:max=3,oldest=true",
        "eagle3": f"eagle:{setting.model}",
        "draft_model": "model",
    }
    draft = setting.model if setting.drafter == "draft_model" else None
    pair = load_pair(given.target, draft, dtype="float32", compile=False)
    rows = [json.loads(line) for line in given.problems.read_text().splitlines()]
    rows = rows[WARM_UP : WARM_UP + given.own]
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    # without states, EAGLE drafts nothing before the first token; other drafters would
    begun = 0 if setting.drafter == "eagle3" else 1
    prompts = [
        pair.encode(prompt, pair.target) + tokens[:begun]
        for prompt, tokens in zip(asked, theirs)
    ]
    outs = pair.generate_batch(
        prompts,
        rule=setting.rule or "exact",
        drafter=specs[str(setting.drafter)],
        window=setting.window,
        max_new_tokens=MOST - begun,
        batch_size=8,
    )
    ours = [tokens[:begun] + list(out.tokens) for tokens, out in zip(theirs, outs)]
    return sum(a == b for a, b in zip(ours, theirs))


def row_of(
    setting: Setting, found: dict[str, Any], plain: Sequence[list[int]] | None
) -> dict[str, Any]:
    """Return a setting's figures. `plain` are the answers of the same drafter without the
    plugin."""
    total = sum(map(len, found["tokens"]))
    row = {
        "tokens_per_second": total / found["seconds"],
        "tokens": total,
        "windows": found["windows"],
        "right": found["right"],
        "kept_leniently": found["kept_leniently"],
        "answers": len(found["tokens"]),
    }
    if plain is not None:
        row["same_as_without_plugin"] = sum(
            a == b for a, b in zip(found["tokens"], plain)
        )
    return {**asdict(setting), **row}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--eagle")
    parser.add_argument("--judge", help="rule with a judge of the draft's tokens")
    parser.add_argument("--rule", default="topk:2,ratio=0.3", help="rule from logits")
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--own", type=int, default=0, metavar="N")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = options().parse_args()
    if given.one:
        setting, target, problems, limit = json.loads(given.one)
        found = one(Setting(**setting), target, Path(problems), limit)
        print(json.dumps(found))
        return
    plain: dict[Any, list[list[int]]] = {}
    rows = []
    for setting in settings(given):
        found = measured(setting, given.target, given.problems, given.limit)
        key = setting.drafter, setting.asynchronous
        if setting.rule is None:
            plain[key] = found["tokens"]
        row = row_of(setting, found, plain[key] if setting.rule else None)
        if given.own and setting.rule:
            asked = min(given.own, len(found["tokens"]))
            same = own(setting, given, found["tokens"])
            row |= {"same_as_own_loop": same, "asked_of_own_loop": asked}
        rows.append(row)
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(recorded({"settings": rows}), indent=1))


if __name__ == "__main__":
    main()
