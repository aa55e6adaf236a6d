"""What Python users hand over and get back: prompts in any form, seeds, log-probabilities, help."""

from __future__ import annotations

import json
import pydoc

import numpy as np
import pytest
import torch

from lenience import InputError, load_pair
from lenience.cli import main
from lenience.cli.choices import models_of
from lenience.core.profile import Profile
from lenience.decoding.decoder import Decoder
from lenience.decoding.options import names
from lenience.decoding.pair import Pair

PROMPTS, PAD = [[5, 9, 13], [7, 21]], 0


@pytest.mark.parametrize(
    "how", [{}, {"rule": "topk:3"}, {"tree": "dynamic:8"}, {"window": 0}]
)
def test_log_probabilities_are_those_of_the_targets_own_pass(
    how: dict, llama: Pair
) -> None:
    out = llama.generate(PROMPTS[0], logprobs=True, max_new_tokens=30, **how)
    ids = torch.tensor([out.prompt_tokens + out.tokens])
    with torch.inference_mode():
        whole = torch.log_softmax(llama.target.model(ids).logits[0].double(), -1)
    start = len(out.prompt_tokens) - 1
    wanted = [whole[start + i, token].item() for i, token in enumerate(out.tokens)]
    assert out.logprobs == pytest.approx(wanted, abs=1e-4)
    assert llama.generate(PROMPTS[0], max_new_tokens=4).logprobs == [None] * 4


def test_a_seed_that_is_not_given_is_drawn_for_each_prompt_and_told(
    llama: Pair,
) -> None:
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
    assert [
        out.tokens for out in llama.generate_batch(padded, max_new_tokens=9)
    ] == wanted
    texts = llama.tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    alone = [
        llama.generate(text, max_new_tokens=9).tokens for text in ("w1 w2 w3", "w4")
    ]
    assert [
        out.tokens for out in llama.generate_batch(texts, max_new_tokens=9)
    ] == alone
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
        ({"prompts": [[True, False]]}, "a prompt is text"),
        ({"prompts": torch.tensor([[1, 2], [PAD, 2]])}, f"the padding token {PAD}"),
        (
            {"prompts": {"input_ids": torch.tensor([[2, PAD], [1, 2]])}},
            f"padding token {PAD}",
        ),
        (
            {"prompts": [[1]], "batch_size": "a"},
            "batch_size 'a': must be a whole number",
        ),
        ({"prompts": [[1]], "profile": 3}, r"give a Profile\(\)"),
        ({"prompts": [[1]], "stop_strings": 3}, "stop_strings 3"),
        (
            {"prompts": [[1]], "num_return_sequences": 2},
            "give generate_batch the prompt as often",
        ),
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
    assert str(Decoder().rule) in told


USER = {"role": "user", "content": "w5"}


@pytest.mark.parametrize(
    ("how", "prompt", "ids"),
    [
        ({}, "w5", [1, 5, 2]),
        ({"chat": True}, "w5", [1, 5, 2]),
        ({"chat": False}, "w5", [5]),
        ({"system": "w7"}, "w5", [3, 7, 1, 5, 2]),
        ({"system": "w7"}, [{"role": "system", "content": "w8"}], [3, 8, 2]),
        (
            {"system": "w7"},
            [{"role": "system", "content": "w8"}, USER],
            [3, 8, 1, 5, 2],
        ),
        (
            {"system": "w7"},
            [USER, {"role": "system", "content": "w8"}],
            [3, 7, 1, 5, 3, 8, 2],
        ),
        ({"template_options": {"enable_thinking": True}}, "w5", [9, 1, 5, 2]),
    ],
)
def test_text_goes_through_the_chat_template_as_asked(
    how: dict, prompt: object, ids: list[int], chatting: str, checkpoints
) -> None:
    pair = load_pair(chatting, checkpoints("llama")[1], dtype="float32", **how)
    assert pair.generate(prompt, max_new_tokens=2).prompt_tokens == ids
    by_draft = pair.generate(prompt, rule="draft", max_new_tokens=2)
    assert by_draft.prompt_tokens == ids, "the draft answers what the target is asked"


def test_a_certificate_binds_how_prompts_are_made(chatting: str) -> None:
    ways = [
        {},
        {"chat": False},
        {"system": "w7"},
        {"system": "w8"},
        {"template_options": {"enable_thinking": True}},
        {"template_options": {"enable_thinking": False}},
    ]
    bound = [load_pair(chatting, dtype="float32", **way) for way in ways]
    templates = [str(pair.binding(Decoder())["template"]) for pair in bound]
    assert len(set(templates)) == len(ways)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"chat": False, "system": "w7"},
            "system: .* is set to use no chat template",
        ),
        (
            {"template_options": {"thinking": True}},
            "template option thinking: .* has none",
        ),
        ({"template_options": {"enable_thinking": object()}}, "give JSON values"),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    how: dict, says: str, chatting: str
) -> None:
    with pytest.raises(InputError, match=says):
        load_pair(chatting, **how)
    with pytest.raises(InputError, match=r"chat: .* has no chat template"):
        load_pair(chat=True)


def test_a_run_remembers_how_prompts_are_made(
    chatting: str, checkpoints, tmp_path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "w{i}", "reference": "w1"}}\n' for i in range(5, 11))
    )
    run, draft = str(tmp_path / "run"), checkpoints("llama")[1]
    task = ["--task", str(rows), "--answer", "regex:w\\d+"]
    models = [
        "--target",
        chatting,
        "--draft",
        draft,
        "--dtype",
        "float32",
        "--no-compile",
    ]
    asked = ["--system", "w7", "--template-option", "enable_thinking=true"]
    mine = ["mine", "--out", run, "--limit", "2", "--max-new-tokens", "6"]
    main([*mine, *task, *models, *asked])
    (tmp_path / "run" / "lenience.toml").unlink()
    remembered = models_of(tmp_path / "run", None)
    assert (remembered.system, remembered.template_option) == (
        "w7",
        ("enable_thinking=true",),
    )
    main([*mine, *task, "--no-compile"])
    with pytest.raises(SystemExit):
        main([*mine, *task, "--system", "w8"])
    first = json.loads((tmp_path / "run" / "journal.jsonl").read_text().split("\n")[0])
    assert first["prompt_ids"][:3] == [9, 3, 7]
