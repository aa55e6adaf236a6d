"""What conditions that end drafting early bring on the built-in pair, strictly, one by one. Prints
one JSON object.

    python benchmarks/stops.py --work stops-work

Heads are fitted to the shipped samples first: `stop` as `lenience fit RUN --stop` does, `specdec`
with `--tokens draft --weight 6`. Decoders take turns on the same prompts; every answer is asserted
to be the target's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

from drafters import Decoder, measure
from recording import recorded

from lenience.core.files import EMBEDDED
from lenience.decoding.loading import load_pair
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Inputs
from lenience.tasks import WordMath
from lenience.training.fit import HeadPlan, fit_run

WINDOW = 16
"""The longest that any of the conditions may draft."""


def fitted(pair: Pair, work: Path) -> dict[str, dict[str, Any]]:
    """Fit both heads; what they came to, by name."""
    run = work / "run"
    told = {}
    if not run.exists():
        shutil.copytree(EMBEDDED / "run", run)
    for name, token, weight in (("stop", "previous", None), ("specdec", "draft", 6.0)):
        config = FitConfig(role="stop", weight=weight)
        head = fit_run(
            pair, run, HeadPlan(Inputs(("draft",), (token,)), work / name, config)
        )
        kept = ("auc_out_of_fold", "auc_interval", "mismatches", "important", "samples")
        told[name] = {key: head.metrics[key] for key in kept}
    return told


def decoders(pair: Pair, work: Path) -> dict[str, Decoder]:
    """Return what is compared, by name."""
    found: dict[str, dict[str, Any]] = {"target": {"rule": "target"}}
    found |= {
        f"fixed, window {window}": {"window": window} for window in (2, 3, 4, 8, 16)
    }
    specs = ["heuristic", "confidence:0.3", "confidence:0.5", "confidence:0.7"]
    specs += [
        "entropy:0.3",
        "entropy:0.5",
        "entropy:0.5,rate=0.9",
        "fallback:0.5",
        "fallback:0.7",
    ]
    found |= {spec: {"stop": spec, "window": WINDOW} for spec in specs}
    for name in ("stop", "specdec"):
        for threshold in (0.3, 0.5, 0.7):
            spec = f"head:{work / name}@{threshold}"
            found[f"head:{name}@{threshold}"] = {"stop": spec, "window": WINDOW}
    return {
        name: Decoder(pair, {"rule": "exact", **options})
        for name, options in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, required=True, help="where the heads are kept"
    )
    given = parser.parse_args()
    pair = load_pair(compile=True)
    heads = fitted(pair, given.work)
    prompts = [
        sample.prompt for sample in islice(WordMath().samples("test"), given.prompts)
    ]
    rows = measure(prompts, given.repeats, decoders(pair, given.work))
    about = {
        "machine": machine(pair),
        "prompts": len(prompts),
        "window": WINDOW,
        "heads": heads,
    }
    print(json.dumps(recorded({**about, "rows": rows}), indent=1))


if __name__ == "__main__":
    main()
