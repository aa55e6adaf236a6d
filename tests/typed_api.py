"""Calls of the public API whose types mypy checks (`make types`). Nothing here runs."""

from __future__ import annotations

from typing import assert_type

import lenience
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair


def right(pair: Pair) -> None:
    assert_type(lenience.load_pair("folder", dtype="float32", device="cpu"), Pair)
    assert_type(pair.generate("a", rule="exact", window="auto", seed=1), Generation)
    assert_type(pair.generate_batch(["a"], temperature=0.5), list[Generation])


def wrong(pair: Pair) -> None:
    """Each line is an error for mypy, which also reports an ignored line without one."""
    lenience.load_pair("folder", devise="cpu")  # type: ignore[call-arg]
    lenience.load_pair("folder", compile="yes")  # type: ignore[arg-type]
    pair.generate("a", windows=4)  # type: ignore[call-arg]
    pair.generate("a", window="wide")  # type: ignore[arg-type]
    pair.generate_batch(["a"], rule=3)  # type: ignore[arg-type]
