"""A row is decided alone as among others, whatever rule, drafter, tree and stop are joined: over
the whole product of the registries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import test_dflash
import torch
from conftest import prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from test_batch import assert_same
from test_drafters import random_heads
from test_eagle import write

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.drafting.datastore import build_store
from lenience.drafting.registry import DRAFTERS, STOPS, TREES
from lenience.heads.head import Head, Inputs
from lenience.rules.registry import RULES

PARTS: dict[str, tuple[Any, ...]] = {
    "rule": (
        "exact",
        "speculative",
        "block",
        "lenient:0.2",
        "topk:3",
        "typical:0.09,0.3",
        "rollback:2",
        "fuzzy:js@0.2",
        "kl:0.4",
        "ensemble:0.5",
        "cascade:opt@0.2",
        "diversed:{folder}/mixture",
        "fly:0.3,3",
        "mentored:0.2",
        "random:0.6",
        "judge:{folder}/judge@0.5",
        "topk:3,budget=2&fuzzy:tv@0.45",
    ),
    "drafter": (
        "model",
        "ngram",
        "suffix",
        "medusa:{folder}/medusa",
        "blockwise:{folder}/blockwise",
        "eagle:{folder}/eagle3",
        "dflash:{folder}/dflash",
        "exit:1",
        "skip:1",
        "datastore:{folder}/store,shortest=1",
        "suffix|model",
        "ngram>model",
    ),
    "tree": (
        "chain",
        "cartesian:2,2",
        "cartesian:2,2,draw=without-replacement",
        "dynamic:6",
        "planned:6",
        "shape:0,0,1",
    ),
    "stop": (
        "fixed",
        "heuristic",
        "confidence:0.3",
        "fallback:0.3",
        "entropy:0.5",
        "head:{folder}/stop@0.5",
        "gate:{folder}/gate@0.5",
    ),
    "temperature": (0.0, 0.9),
}
REGISTRIES: dict[str, tuple[Mapping[str, Any], set[str]]] = {
    "rule": (RULES, set()),
    # the target must hold its layer: tests/test_mtp.py
    "drafter": (DRAFTERS, {"mtp"}),
    "tree": (TREES, {"auto"}),  # which is a choice among the others
    "stop": (STOPS, set()),
}
PROMPTS = [[5, 6, 7], [*range(1, 16)], [9], [3, 3, 3, 3, 8, 8]]
Case = tuple[Any, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> Path:
    """Heads with random weights, and a datastore."""
    made = tmp_path_factory.mktemp("product")
    for kind in ("medusa", "blockwise"):
        random_heads(kind, 3).save(made / kind)
    write(made / "eagle3", 3)
    test_dflash.write(made / "dflash")
    build_store(
        iter([[5, 6, 7, 9, 3, 8]]), llama.target.tokenizer_fingerprint, made / "store"
    )
    generator = torch.Generator().manual_seed(3)
    both = llama.target.hidden_size + llama.draft.hidden_size
    for role, inputs, width in (
        ("judge", Inputs(tokens=("draft",)), both),
        ("mixture", Inputs(tokens=("previous",)), both),
        ("stop", Inputs(("draft",), ("previous",)), llama.draft.hidden_size),
        ("gate", Inputs(("draft",), ("draft",)), llama.draft.hidden_size),
    ):
        weight = torch.randn(width, generator=generator) / 2
        Head(weight, 0.5, inputs, 0.5, llama.fingerprints, role=role).save(made / role)
    return made


@pytest.fixture(scope="module")
def options_of(folder: Path, llama: Pair) -> Callable[[Case], dict[str, Any] | None]:
    """Options of a case; None for parts that are refused together."""
    known: dict[Case, dict[str, Any] | None] = {}

    def get(case: Case) -> dict[str, Any] | None:
        if case not in known:
            given = dict(zip(PARTS, case))
            texts = {
                name: part.format(folder=folder) if isinstance(part, str) else part
                for name, part in given.items()
            }
            options = {**texts, "window": 4, "max_new_tokens": 12, "seed": 3}
            try:
                llama.decoder(options)
                known[case] = options
            except InputError:
                known[case] = None
        return known[case]

    return get


def check(
    pair: Pair, options: dict[str, Any], prompts: list[list[int]], size: int
) -> None:
    together = pair.generate_batch(prompts, batch_size=size, **options)
    assert_same(together, pair.generate_batch(prompts, batch_size=1, **options))


@pytest.mark.parametrize("part", REGISTRIES)
def test_every_registered_part_is_here(part: str) -> None:
    registry, left_out = REGISTRIES[part]
    shown = " ".join(map(str, PARTS[part]))
    assert [name for name in registry.keys() - left_out if name not in shown] == []


def pairwise(allows: Callable[[Case], bool]) -> list[Case]:
    """Return cases that hold every two values of different parts which some allowed case among a
    few thousand holds."""
    rng, axes = random.Random(0), list(PARTS.values())
    cases = rng.sample(list(itertools.product(*axes)), 4000)
    chosen: list[Case] = []
    seen: set[tuple[Any, ...]] = set()
    for at_least in (9, 7, 5, 4, 3, 2, 1):  # cases that bring most first
        for case in cases:
            twos = {
                (i, a, j, b)
                for (i, a), (j, b) in itertools.combinations(enumerate(case), 2)
            }
            if len(twos - seen) >= at_least and allows(case):
                chosen.append(case)
                seen |= twos
    return chosen


@pytest.fixture(scope="module")
def cover(options_of: Callable[[Case], dict[str, Any] | None]) -> list[Case]:
    return pairwise(lambda case: options_of(case) is not None)


SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
def test_rows_among_others_as_alone_in_a_pairwise_cover(
    share: int,
    llama: Pair,
    options_of: Callable[[Case], dict[str, Any] | None],
    cover: list[Case],
) -> None:
    assert len(cover) > 100
    for case in cover[share::SHARES]:
        options = options_of(case)
        assert options is not None
        try:
            check(llama, options, PROMPTS, size=3)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("rule", ["exact", "topk:3"])
@pytest.mark.parametrize(
    "drafter", ["exit:1", "skip:1", "eagle:{folder}/eagle3", "model"]
)
def test_a_prompt_that_comes_again_is_answered_as_at_first(
    llama: Pair, folder: Path, drafter: str, rule: str
) -> None:
    """In the row that still has its keys and values."""
    spec = drafter.format(folder=folder)
    options = {
        "rule": rule,
        "drafter": spec,
        "window": 4,
        "max_new_tokens": 12,
        "seed": 3,
    }
    for prompt in PROMPTS:
        alone = llama.generate(prompt, **options)
        assert_same(
            llama.generate_batch([prompt] * 3, batch_size=1, **options), [alone] * 3
        )


@given(
    st.tuples(*map(st.sampled_from, PARTS.values())), prompt_lists(5), st.integers(2, 4)
)
@quick(120)
def test_rows_among_others_as_alone(llama: Pair, options_of, case, asked, size) -> None:
    options = options_of(case)
    if options is not None:
        check(llama, options, asked, size)
