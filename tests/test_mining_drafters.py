"""Mining with any drafter, and a target's answers without a draft: labels equal algorithm 1 by
the book, with each drafter's token computed by `transformers` alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_drafters import random_heads
from test_eagle import by_formula, tensors, write
from test_mining import ParityTask, brute_force, lines, mined
from transformers import DynamicCache

import lenience
from lenience.core.errors import InputError
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.heads import DraftHeads
from lenience.heads.head import Inputs, load_head
from lenience.mining.crew import ProcessCrew
from lenience.mining.search import MineConfig, mine
from lenience.mining.work import WorkerPlan
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.fit_drafter import DrafterPlan, fit_drafter

Guessed = Callable[[list[int], list[int]], int | None]


def by_lookup(prompt: list[int], response: list[int]) -> int | None:
    """Prompt lookup: the token after the latest match of the longest end, of at most three."""
    text = prompt + response
    for n in range(3, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end]
    return None


def by_medusa(pair: Pair, heads: DraftHeads) -> Guessed:
    """The first Medusa head on the state before the last token, which the target has not read."""

    def guessed(prompt: list[int], response: list[int]) -> int | None:
        if not response:  # the first cycle reads the prompt
            return None
        read = torch.tensor([(prompt + response)[:-1]])
        out = pair.target.model(read, output_hidden_states=True)
        x = out.hidden_states[-1][0, -1]
        for block in heads.blocks[0]:
            x = x + torch.nn.functional.silu(x @ block["weight"].T + block["bias"])
        assert heads.matrices is not None
        return int((x @ heads.matrices[0].T).argmax())

    return guessed


def by_skipping(pair: Pair, skipped: int) -> Guessed:
    """The target without a layer, on the keys and values of the whole target."""
    whole = pair.target.model

    def guessed(prompt: list[int], response: list[int]) -> int | None:
        if not response:
            return None
        text = prompt + response
        cache = DynamicCache()
        whole(torch.tensor([text[:-1]]), past_key_values=cache)
        part = copy.deepcopy(whole)
        kept = [i for i in range(len(part.model.layers)) if i + 1 != skipped]
        part.model.layers = torch.nn.ModuleList(part.model.layers[i] for i in kept)
        cache.layers = [cache.layers[i] for i in kept]
        for new, layer in enumerate(part.model.layers):
            layer.self_attn.layer_idx = new
        at = torch.tensor([[len(text) - 1]])
        logits = part(
            torch.tensor([text[-1:]]), past_key_values=cache, position_ids=at
        ).logits
        return int(logits[0, -1].argmax())

    return guessed


def by_eagle(pair: Pair, version: int) -> Guessed:
    weights = tensors(version)

    def guessed(prompt: list[int], response: list[int]) -> int | None:
        text = prompt + response
        if not response or len(text) < 2:
            return None
        return by_formula(version, weights, pair.target, text, window=1)[0]

    return guessed


def drafters(pair: Pair, folder: Path) -> dict[str, tuple[str, Guessed]]:
    heads = random_heads("medusa", 2)
    heads.save(folder / "medusa")
    # as they are read from the file
    saved = DraftHeads(
        "medusa",
        [
            [{k: v.half().float() for k, v in b.items()} for b in h]
            for h in heads.blocks
        ],
        [m.half().float() for m in heads.matrices or ()],
        {},
        {},
    )
    return {
        "ngram": ("ngram", by_lookup),
        "medusa": (f"medusa:{folder / 'medusa'}", by_medusa(pair, saved)),
        "skip": ("skip:1", by_skipping(pair, 1)),
        "exit": ("exit:1", by_skipping(pair, 2)),
        "eagle": (f"eagle:{write(folder / 'eagle', 1)}", by_eagle(pair, 1)),
        "eagle-3": (f"eagle:{write(folder / 'eagle3', 3)}", by_eagle(pair, 3)),
    }


@pytest.fixture
def alone(llama: Pair) -> Pair:
    """A target without a draft model."""
    return Pair(llama.target, None, "alone")


@pytest.mark.parametrize(
    "name", ["ngram", "medusa", "skip", "exit", "eagle", "eagle-3"]
)
@torch.no_grad()
def test_each_drafter_is_mined_by_the_book(
    name: str, alone: Pair, tmp_path: Path
) -> None:
    spec, guessed = drafters(alone, tmp_path)[name]
    drafter = Decoder.of(drafter=spec).drafter
    run = tmp_path / "run"
    mined(alone, ParityTask(), run, limit=4, batch_size=3, drafter=drafter)
    labels = set()
    for record in lines(run):
        final, found = brute_force(alone, ParityTask(), record["prompt_ids"], guessed)
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found
        labels |= {important for *_, important in found}
    assert labels >= {True, False}


@pytest.mark.parametrize("drafter", ["ngram", "skip:1"])
def test_a_batch_and_workers_find_the_same(
    drafter: str, checkpoints: Callable, tmp_path: Path
) -> None:
    target, _ = checkpoints("llama")
    pair = lenience.load_pair(target, dtype="float32", compile=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            f'{{"id": "{i}", "prompt": "w{i % 7 + 1} w{i % 11 + 1} w{i % 7 + 1}"}}\n'
            for i in range(12)
        )
    )
    options = {"spec": str(rows), "answer": "regex:(w[0-9]+)"}
    task = lenience.tasks.load_task(**options)
    config = MineConfig(
        limit=6,
        max_new_tokens=12,
        drafter=Decoder.of(drafter=drafter).drafter,
    )
    plan = {"target": target, "dtype": "float32", "compile": False}
    crew = ProcessCrew(WorkerPlan(plan, options, threads=1), 2)
    try:
        mine(pair, task, tmp_path / "crew", config, crew=crew)
    finally:
        crew.close()
    mine(pair, task, tmp_path / "one", replace(config, batch_size=1))
    mine(pair, task, tmp_path / "many", config)
    found = [lines(tmp_path / name) for name in ("crew", "one", "many")]
    assert sum(len(record["mismatches"]) for record in found[0])
    for other in found[1:]:
        assert [record["mismatches"] for record in other] == [
            record["mismatches"] for record in found[0]
        ]


def test_answers_only_are_the_targets_own(alone: Pair, tmp_path: Path) -> None:
    config = MineConfig(limit=14, answers_only=True)
    counts = mine(alone, ParityTask(), tmp_path / "run", config)
    assert (counts.samples, counts.mismatches) == (14, 0)
    records = lines(tmp_path / "run")
    prompts = [record["prompt_ids"] for record in records]
    own = alone.generate_batch(prompts, rule="target", max_new_tokens=24)
    assert [record["response_ids"] for record in records] == [o.tokens for o in own]
    assert all(record["final_ids"] == record["response_ids"] for record in records)
    # heads of the target's own need nothing else
    plan = DrafterPlan("medusa", tmp_path / "medusa", heads=2, epochs=1)
    fit_drafter(alone, tmp_path / "run", plan)
    drafter = f"medusa:{plan.out}"
    out = alone.generate(prompts[0], drafter=drafter, max_new_tokens=24)
    assert out.tokens == own[0].tokens
    with pytest.raises(InputError, match="holds the target's answers and no mismatch"):
        fit_run(alone, tmp_path / "run", HeadPlan(Inputs(("target",)), tmp_path / "j"))


def test_a_judge_knows_the_drafter_it_was_mined_with(
    alone: Pair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    skip = Decoder.of(drafter="skip:1").drafter
    mined(alone, ParityTask(), run, limit=16, drafter=skip)
    plan = HeadPlan(Inputs(("target",)), run / "judge")
    fit_run(alone, run, plan)
    assert load_head(plan.out).drafter == {"spec": "skip:1", "heads": []}
    rule = f"judge:{plan.out}@0.5"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone.generate([3, 4], rule=rule, drafter="skip:1", max_new_tokens=8)
    with pytest.warns(UserWarning, match="was mined with drafter skip:1"):
        alone.generate([3, 4], rule=rule, drafter="ngram", max_new_tokens=8)
    other = tmp_path / "other"
    mined(
        alone, ParityTask(), other, limit=2, drafter=Decoder.of(drafter="ngram").drafter
    )
    with pytest.raises(
        InputError, match=r"was mined with drafter ngram, and .* skip:1"
    ):
        fit_run(alone, run, replace(plan, also=(other,)))
    with pytest.raises(InputError, match="leave out --ahead"):
        fit_run(alone, run, replace(plan, inputs=Inputs(("target",), ahead=2)))


def test_what_cannot_be_mined_is_refused(alone: Pair, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match="name --draft, or a --drafter such as"):
        mine(alone, ParityTask(), run)
    for drafter, match in (
        ("suffix:finished=true", "depend on earlier answers"),
        ("ngram|suffix", "proposes several tokens at a position"),
    ):
        with pytest.raises(InputError, match=match):
            MineConfig(drafter=Decoder.of(drafter=drafter).drafter)
    ngram = Decoder.of(drafter="ngram").drafter
    with pytest.raises(InputError, match="swaps no tokens in"):
        MineConfig(drafter=ngram, answers_only=True)
    mined(alone, ParityTask(), run, limit=1, drafter=ngram)
    with pytest.raises(InputError, match="was made with drafter"):
        mine(alone, ParityTask(), run, MineConfig(limit=2, answers_only=True))
    with pytest.raises(InputError, match="was made with drafter"):
        mine(
            alone,
            ParityTask(),
            run,
            MineConfig(limit=2, drafter=Decoder.of(drafter="suffix").drafter),
        )


def test_a_sampled_run_is_not_resumed_greedily(llama: Pair, tmp_path: Path) -> None:
    mined(llama, ParityTask(), tmp_path, limit=1, temperature=0.7)
    with pytest.raises(InputError, match=r"was made with temperature 0.7, not 0.0"):
        mine(llama, ParityTask(), tmp_path, MineConfig(limit=2))
