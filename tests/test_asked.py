"""What Python users hand over and get back: prompts in any form, seeds, log-probabilities, help."""

from __future__ import annotations

import pydoc

import numpy as np
import pytest
import torch

from lenience import InputError
from lenience.core.profile import Profile
from lenience.decoding.options import Decoding, names
from lenience.decoding.pair import Pair

PROMPTS = [[5, 9, 13], [7, 21]]


@pytest.mark.parametrize("how", [{}, {"rule": "topk:3"}, {"tree": "dynamic:8"}, {"window": 0}])
def test_log_probabilities_are_those_of_the_targets_own_pass(how: dict, llama: Pair) -> None:
    out = llama.generate(PROMPTS[0], logprobs=True, max_new_tokens=30, **how)
    ids = torch.tensor([out.prompt_tokens + out.tokens])
    with torch.inference_mode():
        whole = torch.log_softmax(llama.target.model(ids).logits[0].double(), -1)
    start = len(out.prompt_tokens) - 1
    wanted = [whole[start + i, token].item() for i, token in enumerate(out.tokens)]
    assert out.logprobs == pytest.approx(wanted, abs=1e-4)
    assert llama.generate(PROMPTS[0], max_new_tokens=4).logprobs == [None] * 4


def test_a_seed_that_is_not_given_is_drawn_for_each_prompt_and_told(llama: Pair) -> None:
    same = [PROMPTS[0]] * 4
    sampled = {"temperature": 1.0, "max_new_tokens": 20}
    outs = llama.generate_batch(same, **sampled)
    assert len({tuple(out.tokens) for out in outs}) > 1
    for out in outs:
        assert llama.generate(PROMPTS[0], seed=out.seed, **sampled).tokens == out.tokens
    drawn = {llama.generate(PROMPTS[0], seed=None, **sampled).seed for _ in range(3)}
    assert len(drawn) == 3
    alike = llama.generate_batch(same, seed=5, **sampled)
    assert len({tuple(out.tokens) for out in alike}) == 1 and alike[0].seed == 5
    assert llama.generate(PROMPTS[0], max_new_tokens=2).seed is None


def test_a_padded_batch_is_its_prompts(llama: Pair) -> None:
    wanted = [out.tokens for out in llama.generate_batch(PROMPTS, max_new_tokens=9)]
    ids = torch.tensor([PROMPTS[0], [0, *PROMPTS[1]]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    padded = {"input_ids": ids, "attention_mask": mask}
    assert [out.tokens for out in llama.generate_batch(padded, max_new_tokens=9)] == wanted
    even = np.array([PROMPTS[0], PROMPTS[0]])
    outs = llama.generate_batch(even, max_new_tokens=9)
    assert [out.tokens for out in outs] == [wanted[0]] * 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompts": "w1"}, "is one text"),
        ({"prompts": 5}, "give a list of them"),
        ({"prompts": {"input_ids": [1, 2]}}, "are the ids of one"),
        ({"prompts": [1, 2]}, "a prompt is text"),
        ({"prompts": [[1]], "batch_size": "a"}, "batch_size 'a': must be a whole number"),
        ({"prompts": [[1]], "profile": 3}, r"give a Profile\(\)"),
        ({"prompts": [[1]], "stop_strings": 3}, "stop_strings 3"),
        ({"prompts": [[1]], "num_return_sequences": 2}, "give generate_batch the prompt as often"),
    ],
)
def test_what_is_wrong_is_one_line(asked: dict, says: str, llama: Pair) -> None:
    with pytest.raises(InputError, match=says) as told:
        llama.generate_batch(**asked)
    assert "\n" not in str(told.value)


def test_none_is_the_default(llama: Pair) -> None:
    nothing = dict.fromkeys([*names(), "batch_size"], None)
    nothing |= {"max_new_tokens": 7}
    (out,) = llama.generate_batch([PROMPTS[0]], profile=Profile(), **nothing)
    assert out.tokens == llama.generate(PROMPTS[0], max_new_tokens=7).tokens


def test_help_tells_every_option() -> None:
    told = pydoc.plain(pydoc.render_doc(Pair.generate))
    for name in names():
        assert f"\n    {name}: " in told, name
    assert "seed: int | None = None" in told
    assert Decoding().rule in told
