"""What every registered rule, drafter and task must do, whoever adds one."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_drafter
from lenience.drafting.registry import DRAFTERS
from lenience.rules.parsing import parse_rule
from lenience.rules.registry import RULES
from lenience.tasks import TASKS

RULE_SETTINGS = [setting for term in RULES.values() for setting in term.grid]
DRAFTER_SETTINGS = [
    setting for drafter in DRAFTERS.values() for setting in drafter.grid
]
VOCABULARY = 7


def cycle(
    seed: int, rows: int, width: int, temperature: float
) -> tuple[Draft, Reading, Context]:
    """A random window for each of some rows, of at most `width` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, width), generator=generator)
    lengths = torch.randint(width + 1, (rows,), generator=generator)
    drafted = 3 * torch.randn(rows, width, VOCABULARY, generator=generator)
    logits = 3 * torch.randn(rows, width + 1, VOCABULARY, generator=generator)
    noise = [Noise.for_prompt(seed, [row]) for row in range(rows)]
    ctx = Context([Row(one, [1], 5) for one in noise], temperature)
    reading = Reading(logits, torch.zeros(rows, width + 1, 2))
    return Draft(tokens, lengths, drafted), reading, ctx


def temperature_of(setting: str) -> float:
    return 0.8 if parse_rule(setting).needs.sampling else 0.0


@pytest.mark.parametrize("setting", RULE_SETTINGS)
def test_a_rules_setting_is_its_text(setting: str) -> None:
    assert parse_rule(str(parse_rule(setting))) == parse_rule(setting)


def test_every_rule_says_some_settings_or_asks_a_head() -> None:
    assert {name for name, term in RULES.items() if not term.grid} == {
        "judge",
        "diversed",
    }


@pytest.mark.parametrize("setting", RULE_SETTINGS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), width=st.integers(1, 5))
def test_a_verdict_keeps_a_prefix_and_one_token_more(
    setting: str, seed: int, width: int
) -> None:
    draft, reading, ctx = cycle(seed, 3, width, temperature_of(setting))
    verdicts = parse_rule(setting)(draft, reading, ctx)
    for row, verdict in enumerate(verdicts):
        length = int(draft.lengths[row])
        assert verdict.drafted == draft.tokens[row, :length].tolist()
        assert verdict.path == list(range(verdict.num_accepted))
        assert verdict.num_accepted <= length == len(verdict.exact)
        assert verdict.next_token in range(VOCABULARY)


@pytest.mark.parametrize("setting", RULE_SETTINGS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_a_row_is_decided_alone_as_among_others(setting: str, seed: int) -> None:
    draft, reading, ctx = cycle(seed, 3, 4, temperature_of(setting))
    together = parse_rule(setting)(draft, reading, ctx)
    for row, verdict in enumerate(together):
        alone = Reading(reading.logits[[row]], reading.hidden[[row]])
        own = Context([ctx.rows[row]], ctx.temperature)
        assert parse_rule(setting)(draft.rows([row]), alone, own) == [verdict]


@pytest.mark.parametrize("setting", RULE_SETTINGS)
def test_tokens_proposed_for_certain_are_decided_or_refused_by_name(
    setting: str, repeating: str, llama: Pair
) -> None:
    """Distributions of the draft's, where it has none, must not be made up."""
    rule = parse_rule(setting)
    options = {
        "rule": setting,
        "drafter": repeating,
        "temperature": temperature_of(setting),
    }
    if Parts.PROBS in rule.needs.window:
        says = f"{re.escape(str(rule))}.*drafter {repeating} has none"
        with pytest.raises(InputError, match=says):
            llama.generate("w1 w2", **options)
        return
    out = llama.generate("w1 w2", **options, max_new_tokens=24)
    assert len(out.tokens) == 24 or out.finish == "eos"
    draft, reading, ctx = cycle(1, 3, 4, options["temperature"])
    certain = Draft(draft.tokens, draft.lengths)
    sure = torch.full(draft.logits.shape, -torch.inf).scatter(
        2, draft.tokens[..., None], 0.0
    )
    with_probs = rule(Draft(draft.tokens, draft.lengths, sure), reading, ctx)
    assert rule(certain, reading, ctx) == with_probs, "a probability of 1 says the same"


@pytest.mark.parametrize("setting", DRAFTER_SETTINGS)
def test_a_drafter_changes_no_strict_answer(setting: str, llama: Pair) -> None:
    assert str(parse_drafter(setting)) == setting
    prompts = ["w1 w2 w3", "w7 w7 w9 w2"]
    strict = llama.generate_batch(
        prompts, rule="exact", drafter=setting, max_new_tokens=24
    )
    alone = llama.generate_batch(prompts, rule="target", max_new_tokens=24)
    assert [out.tokens for out in strict] == [out.tokens for out in alone]
    assert any(out.drafted for out in strict)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_same_samples_each_time_and_knows_its_own_references(
    name: str,
) -> None:
    task = TASKS[name]()
    samples = list(islice(task.samples("test"), 20))
    assert samples == list(islice(task.samples("test"), 20))
    assert len({sample.id for sample in samples}) == len(samples) > 0
    assert task.name == name
    for sample in samples:
        assert task.same(sample.reference, sample.reference, sample) is (
            None if sample.reference is None else True
        )
        assert task.same(None, sample.reference, sample) is None
        assert task.answer("", sample) is None
    scores = task.score([("", sample) for sample in samples])
    assert [score.correct for score in scores] == [False] * len(samples)
    assert all(0 <= score.loss <= 1 for score in scores)


def test_a_tree_is_not_taken_for_a_chain() -> None:
    draft, reading, ctx = cycle(0, 2, 3, 0.0)
    tree = replace(draft, parents=[[-1, -1, 0], [-1, 0, 1]])
    assert tree.rows([1]).parents == [[-1, 0, 1]]
    with pytest.raises(AssertionError, match="chains"):
        parse_rule("exact")(tree, reading, ctx)
