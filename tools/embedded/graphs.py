"""Export the graphs that come with the built-in pair.

    python tools/embedded/graphs.py

writes src/lenience/embedded/graphs: a file for each state and shape of window that the demo and
the built-in heads need. The files hold no weights, so they are small, and serve models of the same
shape, such as a draft that `lenience fit --drafter model` has distilled. Each is checked against
the model's own pass whenever it is loaded.
"""

from __future__ import annotations

import shutil

from lenience.core.files import EMBEDDED
from lenience.decoding.checks import draft_of
from lenience.decoding.loading import load_pair
from lenience.models.compile import shipped_path
from lenience.models.lm import LM
from lenience.models.onnx_export import export_graph
from lenience.models.pass_cache import LAST, States
from lenience.rules.judge import Judge

FOLDER = EMBEDDED / "graphs"


def export(lm: LM, states: States, trees: bool = False) -> None:
    path = shipped_path(lm, states, trees)
    export_graph(lm, path, states, trees)
    print(
        f"{path.name}  {lm.role} {states} {'trees' if trees else 'chains'}",
        path.stat().st_size,
    )


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    pair = load_pair(compile=False)
    layers = Judge().needs.layers
    assert layers is not None, "the built-in judge reads the target's states"
    judged = States(layers)
    for states in (LAST, judged):
        for trees in (False, True):
            export(pair.target, states, trees)
    export(draft_of(pair.models, "a draft's graph"), LAST)


if __name__ == "__main__":
    main()
