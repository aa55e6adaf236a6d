"""What drafters and trees bring on the built-in pair, one by one: strictly when greedy, and by the
lossless rules when sampling. Prints one JSON object.

    python tools/embedded/heads.py --kind eagle --answers 2000 --work heads-work
    python tools/embedded/heads.py --kind blockwise --answers 2000 --work heads-work
    lenience fit RUN --drafter model --out distilled
    python benchmarks/drafters.py --distilled distilled --eagle heads-work/eagle \\
        --blockwise heads-work/blockwise-4

Decoders take turns on the same prompts; every greedy answer is asserted to be the target's. The
datastore is of the answers in the mining run that comes with the pair.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from recording import recorded

from lenience.core.files import EMBEDDED
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.drafting.datastore import build_store
from lenience.models.prompts import Prompt
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import WordMath

NEW = 160
WINDOWS = (2, 3, 4, 6, 8, 16)
TREES = ("dynamic:8", "dynamic:16")
SAMPLED_TREES = ("cartesian:4,2,1", "planned:16")
DRAWS = {
    "speculative": ("with-replacement", "without-replacement"),
    "block": ("with-replacement",),
}
"""How each lossless rule takes the children of a tree drawn."""


@dataclass(frozen=True)
class Decoder:
    """One of what is compared."""

    pair: Pair
    options: dict[str, Any]


def further() -> dict[str, dict[str, Any]]:
    """Return trees of the draft model, drafters that are joined, and the target's own layers."""
    model = {"drafter": "model", "window": 16}
    trees = ("dynamic:16,temperature=1.5", "dynamic:32,temperature=1.5", "planned:16")
    found = {f"model, {tree}": {**model, "tree": tree} for tree in trees}
    for drafter in (
        "ngram|model",
        "ngram>model",
        "model:2+ngram",
        "exit:6",
        "skip:4,5",
    ):
        found[f"{drafter}, window 4"] = {"drafter": drafter, "window": 4}
    for drafter in ("suffix|model", "exit:6"):
        found[f"{drafter}, dynamic:8"] = {
            "drafter": drafter,
            "tree": "dynamic:8",
            "window": 16,
        }
    return found


def greedy(
    pair: Pair, distilled: Pair | None, fitted: dict[str, str | None], store: Path
) -> dict[str, Decoder]:
    """Return what is compared strictly, by name; `distilled` is the target with a draft that
    learned from it, `fitted` has folders of other drafters for it, by their names."""
    drafters = [
        ("model", "model", pair, WINDOWS),
        ("ngram", "ngram", pair, (2, 4, 8)),
        ("suffix", "suffix", pair, (4, 8)),
        ("datastore", f"datastore:{store}", pair, (4, 8)),
        ("medusa", "medusa", pair, (2, 3, 4)),
    ]
    if distilled is not None:
        drafters.append(("distilled model", "model", distilled, (*WINDOWS, 12)))
    of_fitted = {"eagle": (3, 4, 6, 8, 16), "blockwise": (2, 3, 4)}
    for name, folder in fitted.items():
        if folder is not None:
            drafters.append((name, f"{name}:{folder}", pair, of_fitted[name]))
    found = {"target": Decoder(pair, {"rule": "target"})}
    for name, drafter, models, windows in drafters:
        for window in windows:
            found[f"{name}, window {window}"] = Decoder(
                models, {"drafter": drafter, "window": window}
            )
        for tree in () if drafter == "ngram" else TREES:
            found[f"{name}, {tree}"] = Decoder(
                models, {"drafter": drafter, "tree": tree, "window": 16}
            )
    found |= {name: Decoder(pair, options) for name, options in further().items()}
    return {
        name: replace(decoder, options={"rule": "exact", **decoder.options})
        for name, decoder in found.items()
    }


def sampled(pair: Pair) -> dict[str, Decoder]:
    """Return what is compared when sampling, by name: chains, and trees whose children are
    drawn."""
    found = {"target": Decoder(pair, {"rule": "target"})}
    for rule, draws in DRAWS.items():
        for window in (4, 8, 16):
            found[f"{rule}, window {window}"] = Decoder(
                pair, {"rule": rule, "window": window}
            )
        for tree in SAMPLED_TREES:
            for draw in draws:
                options = {"rule": rule, "tree": f"{tree},draw={draw}", "window": 16}
                found[f"{rule}, {tree}, {draw}"] = Decoder(pair, options)
    return {
        name: replace(decoder, options={**decoder.options, "temperature": 1.0})
        for name, decoder in found.items()
    }


def measure(
    prompts: Sequence[Prompt], repeats: int, decoders: dict[str, Decoder]
) -> dict[str, Any]:
    """Return tokens per pass and per second of each decoder, by name."""
    speeds: dict[str, list[float]] = defaultdict(list)
    about: dict[str, dict[str, Any]] = {}
    plain = decoders["target"]
    alone = [plain.pair.generate(prompt, **asked(plain)).tokens for prompt in prompts]
    for turn in range(repeats + 1):
        for name, decoder in decoders.items():
            few = prompts[: 5 if turn == 0 else None]  # the first turn warms up
            began = time.perf_counter()
            profile = Profile()
            options = {**asked(decoder), "profile": profile}
            outs = [decoder.pair.generate(prompt, **options) for prompt in few]
            seconds = time.perf_counter() - began
            if "temperature" not in decoder.options:
                assert [out.tokens for out in outs] == alone[: len(few)], name
            if turn == 0:
                continue
            tokens = sum(len(out.tokens) for out in outs)
            speeds[name].append(tokens / seconds)
            passes = sum(out.target_passes for out in outs)
            drafted = sum(out.draft_passes for out in outs)
            about[name] = {
                "tokens_per_pass": tokens / passes,
                "draft_passes_per_pass": drafted / passes,
                "draft_ms_per_pass": 1000 * profile.seconds["draft"] / passes,
            }
    return {
        name: {
            **about[name],
            "tokens_per_second": median(of),
            "range": [min(of), max(of)],
        }
        for name, of in speeds.items()
    }


def asked(decoder: Decoder) -> dict[str, Any]:
    return {"max_new_tokens": NEW, **decoder.options}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eagle", help="a folder that `tools/embedded/heads.py` made")
    parser.add_argument("--blockwise", help="another one")
    parser.add_argument(
        "--distilled", help="a folder that `lenience fit --drafter model` made"
    )
    given = parser.parse_args()
    pair = load_pair(compile=True)
    distilled = None
    if given.distilled is not None:
        target = str(EMBEDDED / "target")
        distilled = load_pair(target, given.distilled, compile=True, dtype="float32")
    prompts = [
        sample.prompt for sample in islice(WordMath().samples("test"), given.prompts)
    ]
    fitted = {"eagle": given.eagle, "blockwise": given.blockwise}
    with tempfile.TemporaryDirectory() as store:
        mined = mined_samples(Journal(EMBEDDED / "run" / "journal.jsonl"))
        texts = (sample.prompt_ids + sample.response_ids for sample in mined)
        build_store(texts, pair.target.tokenizer_fingerprint, Path(store))
        rows = measure(
            prompts, given.repeats, greedy(pair, distilled, fitted, Path(store))
        )
    drawn = measure(prompts, given.repeats, sampled(pair))
    figures = {
        "machine": machine(pair),
        "prompts": len(prompts),
        "rows": rows,
        "sampled": drawn,
    }
    print(json.dumps(recorded(figures), indent=1))


if __name__ == "__main__":
    main()
