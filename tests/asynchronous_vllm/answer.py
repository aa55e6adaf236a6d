"""Answer prompts in vLLM with asynchronous scheduling: `answer.py ASKED TOLD` reads the engine's
arguments and the requests from one file, and writes the answers' tokens and counts to another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**asked["engine"])
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    params = [
        SamplingParams(**request["params"], extra_args=request["extra_args"])
        for request in asked["requests"]
    ]
    prompts = [request["prompt"] for request in asked["requests"]]
    outs = llm.generate(prompts, params, use_tqdm=False)
    metrics = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if hasattr(metric, "value")
    }
    told = [
        [list(out.outputs[0].token_ids), (out.kv_transfer_params or {}).get("lenience")]
        for out in outs
    ]
    Path(sys.argv[2]).write_text(
        json.dumps({"answers": told, "preempted": metrics["vllm:num_preemptions"]})
    )
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
