"""Models, sessions, and what is refused at the door."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import CONFIGS, make_tokenizer, save_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_decode import PROMPTS, plain_greedy
from transformers import DynamicCache, LlamaConfig, RwkvConfig, T5Config
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

from lenience import InputError
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.pass_cache import cache_argument
from lenience.models.session import Session, common


@pytest.mark.parametrize("name", CONFIGS)
def test_rolling_back_equals_a_fresh_pass(
    name: str, pairs: Callable[[str], Pair]
) -> None:
    lm = pairs(name).target

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 30), st.lists(st.integers(0, 47), min_size=1, max_size=9)
            ),
            min_size=1,
            max_size=5,
        )
    )
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def check(edits: list[tuple[int, list[int]]]) -> None:
        session, tokens = Session(lm), [4] * 20
        session.read([tokens])
        for keep, new in edits:
            tokens = tokens[: max(1, keep)] + new
            rows = min(len(new), 3)
            got = session.read([tokens], rows)
            with torch.inference_mode():
                fresh = lm.model(torch.tensor([tokens])).logits[0, -rows:]
            torch.testing.assert_close(got.logits[0], fresh, atol=2e-4, rtol=1e-3)
            assert session.tokens() == [tokens]

    check()


def test_a_session_reads_only_what_is_new(llama: Pair) -> None:
    session = Session(llama.target)
    assert session.read([[1, 2, 3, 4, 5]]).tokens_read == [5]
    assert session.read([[1, 2, 3, 9]]).tokens_read == [1]
    # already read: only the rows that are asked for
    assert session.read([[1, 2, 3, 9]], 2).tokens_read == [2]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_beginning(a: list[int], b: list[int]) -> None:
    wanted = 0
    while wanted < min(len(a), len(b)) and a[wanted] == b[wanted]:
        wanted += 1
    assert common(a, b) == wanted
    assert common(a, a + b) == len(a)


def test_hidden_states_are_what_the_head_reads(llama: Pair) -> None:
    reading = Session(llama.target).read([[1, 2, 3, 4]], 3)
    with torch.inference_mode():
        torch.testing.assert_close(
            llama.target.model.get_output_embeddings()(reading.hidden), reading.logits
        )
        whole = llama.target.model(
            torch.tensor([[1, 2, 3, 4]]), output_hidden_states=True
        )
    torch.testing.assert_close(reading.hidden, whole.hidden_states[-1][:, -3:])


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 9, 21]},
        {"bad_words_ids": [[30], [41, 23]]},
        {"repetition_penalty": 1.2, "suppress_tokens": [8]},
    ],
)
def test_generation_settings_that_change_logits_are_honoured(
    setting: dict, checkpoints
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    before = plain_greedy(pair, PROMPTS[2], 30)
    for key, value in setting.items():
        setattr(pair.target.model.generation_config, key, value)
    wanted = plain_greedy(pair, PROMPTS[2], 30)
    assert wanted != before, "the setting changes nothing here, so nothing is tested"
    for window in (0, 1, 6):
        assert (
            pair.generate(PROMPTS[2], window=window, max_new_tokens=30).tokens == wanted
        )


@pytest.mark.parametrize("forced", [7, [7]])
def test_an_answer_of_the_maximum_length_ends_with_the_forced_eos(
    forced: int | list[int], checkpoints
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    pair.target.model.generation_config.forced_eos_token_id = forced
    wanted = plain_greedy(pair, PROMPTS[2], 12)
    assert len(wanted) == 12 and wanted[-1] == 7
    for window in (0, 1, 4, 8, 20):
        out = pair.generate(PROMPTS[2], window=window, max_new_tokens=12)
        assert out.tokens == wanted
        assert out.trace[-1].origin != "draft" or out.trace[-1].token != 7


@pytest.mark.parametrize(
    "key, value",
    [
        ("min_new_tokens", 4),
        ("guidance_scale", 2.0),
        ("num_beams", 3),
        ("forced_eos_token_id", [0, 1]),
        ("begin_suppress_tokens", [1]),
    ],
)
def test_other_generation_settings_are_refused_by_name(
    key: str, value: object, checkpoints
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    setattr(pair.target.model.generation_config, key, value)
    with pytest.raises(InputError, match=key):
        pair.generate([1, 2])


def test_min_p_is_refused_only_where_it_would_matter(checkpoints) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    pair.target.model.generation_config.min_p = 0.1
    assert pair.generate([1, 2], max_new_tokens=2).tokens
    with pytest.raises(InputError, match="min_p"):
        pair.generate([1, 2], temperature=1.0)


def test_the_chat_template_is_used_where_there_is_one(tmp_path, checkpoints) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    template = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"
    for lm in (pair.target, pair.draft):
        lm.tokenizer.chat_template = template
    assert pair.target.encode("w5 w6") == [1, 5, 6, 2]
    assert pair.target.encode(
        [{"role": "user", "content": "w5"}, {"role": "user", "content": "w7"}]
    ) == [1, 5, 1, 7, 2]
    assert pair.target.encode([5, 6]) == [5, 6]


def test_messages_without_a_template_are_refused(llama: Pair) -> None:
    with pytest.raises(InputError, match="no chat template"):
        llama.target.encode([{"role": "user", "content": "w5"}])


@pytest.mark.parametrize(
    "prompt, says",
    [("", "empty"), ([], "empty"), ([99], "outside 0…47"), ([-1], "outside")],
)
def test_unusable_prompts_are_refused(prompt, says: str, llama: Pair) -> None:
    with pytest.raises(InputError, match=says):
        llama.generate(prompt)


def test_unknown_words_are_named(built_in: Pair) -> None:
    with pytest.raises(InputError, match="'Zebra'"):
        built_in.generate("Ann has 3 Zebra. Answer:")


def test_vocabularies_that_differ_are_told_with_the_difference(
    tmp_path, checkpoints
) -> None:
    target, _ = checkpoints("llama")
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 50})
    save_model(tmp_path / "more", config, seed=1, words=50)
    with pytest.warns(
        UserWarning, match="2 tokens of the draft that the target lacks, such as 'w48'"
    ):
        load_pair(target, str(tmp_path / "more"))


def test_architectures_that_cannot_roll_back_are_refused_by_name(tmp_path) -> None:
    rwkv = RwkvConfig(vocab_size=48, hidden_size=16, num_hidden_layers=2)
    save_model(tmp_path / "rwkv", rwkv, seed=1)
    with pytest.raises(InputError, match="RwkvForCausalLM"):
        load_pair(str(tmp_path / "rwkv"), str(tmp_path / "rwkv"))
    t5 = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=48, d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8)
    )
    t5.save_pretrained(tmp_path / "t5")
    make_tokenizer().save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_pair(str(tmp_path / "t5"), str(tmp_path / "t5"))


def test_models_that_cannot_be_loaded_are_named(tmp_path, checkpoints) -> None:
    target, draft = checkpoints("llama")
    with pytest.raises(InputError, match="draft 'no/where': cannot be loaded"):
        load_pair(target, "no/where")
    with pytest.raises(InputError, match="name the target too"):
        load_pair(None, draft)
    with pytest.raises(InputError, match="no such option of loading"):
        load_pair(target, draft, precision="float32")
    broken = save_model(tmp_path / "broken", CONFIGS["llama"], seed=1)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        InputError, match=r"target .*broken.*safetensors file is corrupt"
    ):
        load_pair(str(broken), draft)


def test_from_pretrained_is_reached(checkpoints) -> None:
    target, draft = checkpoints("llama")
    pair = load_pair(
        target,
        draft,
        dtype="float32",
        target_kwargs={"attn_implementation": "eager", "device_map": {"": "cpu"}},
    )
    assert pair.target.model.config._attn_implementation == "eager"
    assert pair.generate(PROMPTS[0], max_new_tokens=20).tokens == plain_greedy(
        pair, PROMPTS[0], 20
    )


def test_a_fingerprint_is_of_the_weights_whatever_their_dtype(
    tmp_path, checkpoints
) -> None:
    target, draft = checkpoints("llama")
    single, half = (
        load_pair(target, draft, dtype="float32"),
        load_pair(target, draft, dtype="bfloat16"),
    )
    assert single.fingerprints == half.fingerprints
    assert single.target.fingerprint != single.draft.fingerprint
    with torch.no_grad():
        single.target.model.lm_head.weight[0, 0] += 1
    del single.target.__dict__["fingerprint"]
    assert single.target.fingerprint != half.target.fingerprint


def test_bfloat16_generates(checkpoints) -> None:
    pair = load_pair(*checkpoints("qwen3"), dtype="bfloat16")
    assert len(pair.generate(PROMPTS[0], rule="topk:2", max_new_tokens=12).tokens) == 12


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_handed_over_by_the_name_that_the_model_gives_it(name: str) -> None:
    """transformers 5.24 renamed past_key_values to cache."""
    space: dict = {"Module": torch.nn.Module}
    exec(
        f"class Model(Module):\n    def forward(self, input_ids, {name}=None): ...\n",
        space,
    )
    cache = DynamicCache()
    assert cache_argument(space["Model"](), cache) == {name: cache}


def test_layers_are_counted_from_either_end(llama: Pair) -> None:
    lm, layers = llama.target, llama.target.model.model.layers
    for layer, wanted in (
        (1, layers[0]),
        (2, layers[1]),
        (-1, layers[1]),
        (-2, layers[0]),
    ):
        assert lm.block(layer) is wanted
    for layer in (0, 3, -3):
        with pytest.raises(InputError, match=f"layer {layer}: target .* has 2"):
            lm.block(layer)
