"""How long a datastore takes to build, and how long a query. Prints one JSON object.

    python benchmarks/datastore.py

Its tokens are drawn by Zipf's law, and each is followed half of the time by what followed it last,
so that there are long matches; the queries are ends of texts of the same kind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from recording import recorded

from lenience.decoding.machine import processor
from lenience.drafting.datastore import Datastore, build_store
from lenience.drafting.parsing import parse_tree

VOCABULARY = 128_000


def text(n: int, rng: np.random.Generator) -> list[int]:
    drawn = (rng.zipf(1.2, n) % VOCABULARY).tolist()
    repeats = rng.random(n) < 0.5
    last = dict[int, int]()
    tokens = [int(drawn[0])]
    for token, again in zip(drawn[1:], repeats[1:]):
        before = tokens[-1]
        token = last.get(before, token) if again else token
        last[before] = token
        tokens.append(token)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--queries", type=int, default=2000)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    documents = [text(1000, rng) for _ in range(given.tokens // 1000)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        build_store(iter(documents), "tokenizer", Path(folder))
        seconds = time.perf_counter() - began
        spec = Datastore(folder)
        asked = [text(60, rng) for _ in range(given.queries)]
        rows = {}
        for name in ("chain", "dynamic:16"):
            tree = parse_tree(name)
            took = list[float]()
            drafted = 0
            for prefix in asked:
                began = time.perf_counter()
                grown = spec.look_up(prefix, 8, tree, frozenset())
                took.append(1e3 * (time.perf_counter() - began))
                drafted += len(grown.tokens)
            p95 = float(np.quantile(took, 0.95))
            rows[name] = {
                "ms": median(took),
                "ms_p95": p95,
                "drafted": drafted / len(asked),
            }
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    about = {"machine": processor(), "tokens": given.tokens, "queries": given.queries}
    told = {**about, "build_seconds": seconds, "bytes": size, "rows": rows}
    print(json.dumps(recorded(told), indent=1))


if __name__ == "__main__":
    main()
