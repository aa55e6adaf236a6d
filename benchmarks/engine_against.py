"""The engine's speed in this checkout against another checkout, on the built-in pair. Prints one
JSON object.

    git worktree add ../before COMMIT
    python benchmarks/engine_against.py ../before [--pairs 7] [--turns 3] [--prompts 4]

Each checkout runs in its own process. The two processes decode the same prompts in turn, so that
both see the same machine. Several pairs of processes are started one after the other, since two
processes with the same code differ by a few percent (where their memory lies). For each decoder,
`ratios` holds a pair's median over turns of this checkout's tokens per second over the other's.
`ratio` is the median over pairs, with its 95 % interval (order statistics). `same_tokens` is true
if both gave the same tokens in every turn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from recording import recorded
from rich.console import Console
from rich.progress import track
from scipy.stats import binom

ROOT = Path(__file__).parents[1]
MAX_NEW_TOKENS = 160
LEAST_PAIRS = 6
"""Fewest pairs of which smallest and largest are a 95 % interval of the median."""
DECODERS: dict[str, dict[str, Any]] = {
    "target": {"rule": "target"},
    "exact, window 4": {"rule": "exact", "window": 4},
    "exact, window 16": {"rule": "exact", "window": 16},
    "exact, window 4, batch": {"rule": "exact", "window": 4, "batch_size": 8},
    "exact, medusa": {"rule": "exact", "window": 3, "drafter": "medusa"},
    "exact, ngram": {"rule": "exact", "window": 4, "drafter": "ngram"},
    "exact, tree": {"rule": "exact", "window": 8, "tree": "dynamic:8"},
    "topk:2": {"rule": "topk:2", "window": 8},
    "judge": {"rule": "judge@0.99", "window": 8},
    "speculative": {
        "rule": "speculative",
        "window": 4,
        "temperature": 1.0,
        "seed": 0,
    },
}
"""Options of the compared decoders. Names and values exist in both checkouts."""


def serve(prompts: int) -> None:
    """Answer requests on the standard input, one decoder name per line. The answer is a line with
    the number of tokens, their digest and the seconds. The first line has the package's folder."""
    import lenience
    from lenience import load_pair
    from lenience.tasks import WordMath

    print(json.dumps({"package": lenience.__file__}), flush=True)
    pair = load_pair(compile=True)
    texts = [sample.prompt for sample in islice(WordMath().samples("test"), prompts)]
    for line in sys.stdin:
        options = dict(DECODERS[line.strip()], max_new_tokens=MAX_NEW_TOKENS)
        size = options.pop("batch_size", 1)
        began = time.perf_counter()
        outs = pair.generate_batch(texts, batch_size=size, **options)
        seconds = time.perf_counter() - began
        tokens = [list(out.tokens) for out in outs]
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
        told = {"tokens": sum(map(len, tokens)), "digest": digest, "seconds": seconds}
        print(json.dumps(told), flush=True)


class Checkout:
    """A process that decodes with the code of a checkout."""

    def __init__(self, folder: Path, prompts: int):
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        command = [sys.executable, __file__, "--serve", "--prompts", str(prompts)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        package = Path(self._line("the start")["package"])
        if not package.is_relative_to(folder.resolve()):
            raise SystemExit(f"{folder}: its process imported {package}")

    def decode(self, name: str) -> dict[str, Any]:
        """Decode the prompts. Raises SystemExit if the process has ended."""
        assert self.process.stdin
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        answer = self._line(name)
        answer["speed"] = answer["tokens"] / answer["seconds"]
        return answer

    def _line(self, what: str) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r}: ended at {what}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def interval(ratios: list[float]) -> list[float]:
    """Return the 95 % interval of the median, from order statistics."""
    ranked = sorted(ratios)
    n = len(ranked)
    low = int(binom.ppf(0.025, n, 0.5))
    return [ranked[max(0, low - 1)], ranked[min(n - 1, n - low)]]


Turn = tuple[dict[str, Any], dict[str, Any]]
"""The answers of both checkouts, this one's first."""


def turns_of(
    checkouts: list[Checkout], name: str, turns: int, first: int
) -> list[Turn]:
    """Return the answers of a decoder in two checkouts, after a warm-up. Checkout `first` begins
    the first turn, and then every other one."""
    for checkout in checkouts:
        checkout.decode(name)
    timed = []
    for turn in range(turns):
        order = (0, 1) if (turn + first) % 2 == 0 else (1, 0)
        answers = {which: checkouts[which].decode(name) for which in order}
        timed.append((answers[0], answers[1]))
    return timed


def summary(pairs: list[list[Turn]]) -> dict[str, Any]:
    """Return the speeds of a decoder from the turns of each pair of processes."""
    ratios = []
    for timed in pairs:
        of_turns = [here["speed"] / other["speed"] for here, other in timed]
        ratios.append(median(of_turns))
    every = [turn for timed in pairs for turn in timed]
    return {
        "ratio": median(ratios),
        "interval": interval(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "same_tokens": all(here["digest"] == other["digest"] for here, other in every),
        "tokens_per_second": median([here["speed"] for here, _ in every]),
    }


def timed_pairs(given: argparse.Namespace) -> dict[str, list[list[Turn]]]:
    """Return the turns of each pair of processes, by decoder."""
    found: dict[str, list[list[Turn]]] = {name: [] for name in DECODERS}
    for pair in track(range(given.pairs), "pairs", console=Console(stderr=True)):
        started = {}
        for folder in (ROOT, given.other) if pair % 2 else (given.other, ROOT):
            started[folder] = Checkout(folder, given.prompts)
        checkouts = [started[ROOT], started[given.other]]
        for name, timed in found.items():
            timed.append(turns_of(checkouts, name, given.turns, pair % 2))
        for checkout in checkouts:
            checkout.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, nargs="?", help="folder of the checkout")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of processes")
    parser.add_argument("--turns", type=int, default=3, help="turns of each pair")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.prompts)
    if given.other is None or not (given.other / "src/lenience").is_dir():
        parser.error(f"{given.other}: name the folder of another checkout")
    if given.pairs < LEAST_PAIRS:
        parser.error(f"--pairs {given.pairs}: must be {LEAST_PAIRS} or more")
    if given.turns < 1:
        parser.error(f"--turns {given.turns}: must be 1 or more")
    found = timed_pairs(given)
    revision = subprocess.run(
        ["git", "-C", str(given.other), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    about = {
        "against": revision.stdout.strip(),
        "turns": given.turns,
        "prompts": given.prompts,
    }
    rows = {name: summary(pairs) for name, pairs in found.items()}
    print(json.dumps(recorded({**about, "rows": rows}), indent=1))


if __name__ == "__main__":
    main()
