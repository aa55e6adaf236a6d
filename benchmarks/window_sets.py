"""What a certificate for several windows covers, and what it does not.

    python benchmarks/window_sets.py --problems 1000

answers problems with lenient rules on the built-in pair at each window, and once more with a window
that is drawn anew for each pass, as an engine's window changes with its load. It counts the
problems that the target alone answers rightly and a rule wrongly: at each window, at any of them
(the loss that `certify --windows` bounds), and with drawn windows, which no certificate covers. The
results go to benchmarks/results/window-sets.json.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recording import write_results

from lenience.core.context import Row
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.stops import Stop
from lenience.tasks import Sample, WordMath, take

KEPT = Path(__file__).parent / "results/window-sets.json"
WINDOWS = (2, 4, 8, 16)
RULES = ("judge@0.9", "judge@0.97", "judge@0.99", "topk:2,ratio=0.3")
MOST = 320


@dataclass(frozen=True)
class Drawn(Stop):
    """Draw a window anew for each pass."""

    name = "drawn"

    def max_tokens(self, row: Row, window: int) -> int:
        if self not in row.memory:
            row.memory[self] = random.Random(str(row.prefix))
        return row.memory[self].choice(WINDOWS)


def losses(
    pair: Pair, samples: Sequence[Sample], decoder: Decoder, right: Sequence[bool]
) -> list[bool]:
    """Return for each sample whether the target alone is right and the decoder wrong."""
    found = correct(pair, samples, decoder)
    return [before and not now for before, now in zip(right, found)]


def correct(pair: Pair, samples: Sequence[Sample], decoder: Decoder) -> list[bool]:
    task = WordMath()
    prompts = [sample.prompt for sample in samples]
    outs = pair.generate_batch(prompts, decoder, batch_size=32)
    return [task.correct(out.text, sample) for out, sample in zip(outs, samples)]


def of_rule(
    pair: Pair, samples: Sequence[Sample], rule: str, right: Sequence[bool]
) -> dict[str, Any]:
    """Return the numbers of problems that a rule loses."""
    decoder = Decoder.of(rule=rule, window=max(WINDOWS), max_new_tokens=MOST)
    at = {
        window: losses(pair, samples, replace(decoder, window=window), right)
        for window in WINDOWS
    }
    drawn = losses(pair, samples, replace(decoder, stop=Drawn()), right)
    at_any = [any(lost) for lost in zip(*at.values())]
    beyond = sum(lost and not known for lost, known in zip(drawn, at_any))
    return {
        "rule": rule,
        "lost": {str(window): sum(at[window]) for window in WINDOWS},
        "lost_at_any": sum(at_any),
        "lost_with_drawn_windows": sum(drawn),
        "lost_with_drawn_windows_alone": beyond,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=KEPT)
    given = parser.parse_args()
    pair = load_pair(compile=True)
    samples = take(WordMath(), "test", given.problems)
    target = Decoder.of(rule="target", max_new_tokens=MOST)
    right = correct(pair, samples, target)
    rows = [of_rule(pair, samples, rule, right) for rule in RULES]
    shared = {"problems": len(samples), "right": sum(right)}
    write_results(given.out, {**shared, "windows": list(WINDOWS), "rules": rows})


if __name__ == "__main__":
    main()
