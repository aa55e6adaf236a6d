"""The loop, held against transformers' own generation and against distributions that are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import CONFIGS, save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import LlamaConfig

from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.noise import Noise, gumbel_argmax, uniform
from lenience.core.profile import Profile
from lenience.core.types import Draft, Reading
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.decoding.response import TextStream, pieces, until_stop
from lenience.models.kv_cache import Forward, PlainCache
from lenience.rules.parsing import parse_rule

PROMPTS = [
    [5, 9, 13],
    [7],
    [3, 3, 8, 40, 2, 21, 30, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
]


def plain_greedy(pair: Pair, prompt: list[int], new: int, **options) -> list[int]:
    out = pair.target.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new,
        do_sample=False,
        attention_mask=torch.ones(1, len(prompt)),
        **options,
    )
    return out[0, len(prompt) :].tolist()


WINDOWS = (0, 1, 2, 3, 4, 6, 9, 16)


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_is_the_targets_greedy_output(
    name: str, pairs: Callable[[str], Pair]
) -> None:
    pair = pairs(name)
    accepted = 0
    for prompt in PROMPTS:
        wanted = plain_greedy(pair, prompt, 48)
        for window in WINDOWS if name == "llama" else (0, 1, 4, 9):
            out = pair.generate(prompt, rule="exact", window=window, max_new_tokens=48)
            assert out.tokens == wanted, f"window {window}"
            assert len(out.trace) == len(out.tokens)
            assert out.accepted_lenient == 0
            accepted += out.accepted_exact
    assert accepted > 0, (
        "a draft that is never right would not test the roll-back after a partly accepted window"
    )


def test_the_pseudo_rules_decode_with_one_model(llama: Pair) -> None:
    prompt = PROMPTS[0]
    out = llama.generate(prompt, rule="target", max_new_tokens=20)
    assert out.tokens == plain_greedy(llama, prompt, 20)
    assert (out.target_passes, out.draft_passes, out.tokens_per_pass) == (
        len(out.tokens),
        0,
        1.0,
    )
    drafted = llama.generate(prompt, rule="draft", max_new_tokens=20)
    assert (drafted.target_passes, drafted.draft_passes) == (0, 20)
    swapped = Pair(llama.draft, llama.target, "swapped")
    assert llama.generate(
        prompt, rule="draft", max_new_tokens=20
    ).tokens == plain_greedy(swapped, prompt, 20)


def test_a_window_accepted_whole_gives_a_bonus_token(
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    target, _ = checkpoints("llama")
    twins = load_pair(target, target, dtype="float32")
    out = twins.generate(PROMPTS[0], window=4, max_new_tokens=10)
    assert [entry.origin for entry in out.trace] == ["draft"] * 4 + ["bonus"] + [
        "draft"
    ] * 4 + ["bonus"]
    assert (out.target_passes, out.tokens_per_pass, out.accepted_exact) == (2, 5.0, 8)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_nothing_is_counted_past_eos(
    window: int, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    plain = plain_greedy(pair, PROMPTS[0], 30)
    end = next(token for token in plain[3:] if plain.index(token) >= 3)
    ids = [end, 47]  # several EOS ids; the first one met ends the answer
    pair.target.model.generation_config.eos_token_id = ids
    out = pair.generate(PROMPTS[0], window=window, max_new_tokens=30)
    assert out.tokens == plain[: plain.index(end) + 1]
    assert out.finish == "eos"
    assert len(out.trace) == len(out.tokens)
    assert out.accepted_exact + out.accepted_lenient == sum(
        entry.origin.startswith("draft") for entry in out.trace
    )


def test_what_the_strict_rule_would_have_kept_counts_though_it_is_rejected(
    checkpoints,
) -> None:
    target, _ = checkpoints("llama")
    twins = load_pair(target, target, dtype="float32")
    # rejects what matches
    out = twins.generate(PROMPTS[0], rule="fuzzy:kl@0", window=4, max_new_tokens=5)
    assert [entry.origin for entry in out.trace] == ["correction"] * 4 + ["bonus"]
    assert (
        out.accepted_exact == 4 + 3 + 2 + 1
        and out.accepted_lenient == -out.accepted_exact
    )


@pytest.mark.parametrize("new", [1, 2, 5])
def test_max_new_tokens_is_kept_to(new: int, llama: Pair) -> None:
    out = llama.generate(PROMPTS[0], window=8, max_new_tokens=new)
    assert out.tokens == plain_greedy(llama, PROMPTS[0], 5)[:new]
    assert out.finish == "length"


def test_the_context_is_filled_and_not_passed(llama: Pair) -> None:
    prompt = [1 + i % 40 for i in range(250)]
    out = llama.generate(prompt, window=8, max_new_tokens=50)
    assert out.tokens == plain_greedy(llama, prompt, 6)
    assert out.finish == "context"
    with pytest.raises(InputError, match="256 tokens"):
        llama.generate([1] * 256)


def test_a_stop_string_ends_text_and_tokens(llama: Pair) -> None:
    whole = llama.generate(PROMPTS[0], max_new_tokens=30)
    words = whole.text.split()
    stop = f"{words[6]} {words[7]}"  # spans two tokens
    place = whole.text.index(stop)
    alone = llama.generate(PROMPTS[0], max_new_tokens=30, stop_strings=stop)
    assert alone.text == whole.text[:place]
    with pytest.raises(InputError, match="empty"):
        llama.generate(PROMPTS[0], stop_strings=["x", ""])
    for window in (1, 8):
        out = llama.generate(
            PROMPTS[0],
            max_new_tokens=30,
            window=window,
            stop_strings=[stop, "not there"],
        )
        assert (out.text, out.finish) == (whole.text[:place], "stop")
        assert (
            out.tokens == whole.tokens[: len(whole.text[: place + len(stop)].split())]
        )


def test_the_streams_text_is_the_answers_text(built_in: Pair) -> None:
    prompt = (
        "Ann has 12 apples. Bob has 5 more apples than Ann. How many apples do they have "
        "together? Answer:"
    )
    whole = built_in.generate(prompt)
    steps = list(built_in.stream(prompt, stop_strings=["never said"]))
    assert "".join(step.text for step in steps) == whole.text
    assert [token for step in steps for token in step.tokens] == whole.tokens
    assert "".join(pieces(built_in.target, whole.tokens)) == whole.text


def test_incomplete_characters_are_held_back() -> None:
    class Bytes:
        eos_ids = frozenset({0})

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    text = "snow ☃ and é, " * 9
    stream = TextStream(Bytes())
    parts = [stream.push(byte) for byte in text.encode()]
    assert "".join(parts) + stream.flush() == text
    assert not any("�" in part for part in parts)


def test_padded_embeddings_of_one_vocabulary_may_differ(
    tmp_path, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    target, _ = checkpoints("llama")
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": 64})
    for rule in ("exact", "topk:3"):
        for a, b in ((target, tmp_path / "wide"), (tmp_path / "wide", target)):
            save_model(tmp_path / "wide", config, seed=5)
            pair = load_pair(str(a), str(b), dtype="float32")
            out = pair.generate(PROMPTS[0], rule=rule, max_new_tokens=40)
            assert rule != "exact" or out.tokens == plain_greedy(pair, PROMPTS[0], 40)


# ---- sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
    ],
)
def test_exact_sampling_is_plain_sampling_with_the_same_seed(
    options: dict, llama: Pair
) -> None:
    for seed in range(3):
        wanted = llama.generate(
            PROMPTS[1], rule="target", max_new_tokens=25, seed=seed, **options
        ).tokens
        for window in (1, 5):
            out = llama.generate(
                PROMPTS[1],
                rule="exact",
                window=window,
                max_new_tokens=25,
                seed=seed,
                **options,
            )
            assert out.tokens == wanted
    assert (
        llama.generate(PROMPTS[1], temperature=1.0, seed=1).tokens
        != llama.generate(PROMPTS[1], temperature=1.0, seed=2).tokens
    )


@pytest.mark.parametrize("rule", ["exact", "speculative"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.7},
    ],
)
def test_sampled_pairs_of_tokens_follow_the_target(rule: str, options: dict) -> None:
    """Two positions, five tokens, distributions written down here; 20,000 seeds; chi-square at
    1e-4."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    rng = np.random.default_rng(3)
    first, drafted = torch.tensor(rng.normal(0, 1.2, (2, 5)), dtype=torch.float32)
    # by first token
    second = torch.tensor(rng.normal(0, 1.2, (5, 5)), dtype=torch.float32)
    second_draft = torch.tensor(rng.normal(0, 1.2, (5, 5)), dtype=torch.float32)

    def warp(logits: torch.Tensor) -> np.ndarray:
        logits = TemperatureLogitsWarper(options["temperature"])(None, logits)
        if "top_k" in options:
            logits = TopKLogitsWarper(options["top_k"])(None, logits)
        if "top_p" in options:
            logits = TopPLogitsWarper(options["top_p"])(None, logits)
        return torch.softmax(logits.double(), -1).numpy()

    wanted = warp(first[None])[0][:, None] * warp(second)  # [5, 5]
    counts = np.zeros((5, 5))
    decide = parse_rule(rule)
    rows = 20_000  # one seed each, decided together
    ctx = Context(
        [Row(Noise.for_prompt(seed, [1]), [1]) for seed in range(rows)], **options
    )
    one, zeros = torch.ones(rows, dtype=torch.long), torch.zeros(rows, 3, 1)
    a = ctx.draw(drafted.expand(rows, 1, 5))[:, 0]
    b = ctx.draw(second_draft[a][:, None], 1)[:, 0]
    draft = Draft(
        torch.stack([a, b], 1),
        2 * one,
        torch.stack([drafted.expand(rows, 5), second_draft[a]], 1),
    )
    logits = torch.stack([first.expand(rows, 5), second[a], first.expand(rows, 5)], 1)
    verdicts = decide(draft, Reading(logits, zeros), ctx)
    written = [
        [*verdict.drafted[: verdict.num_accepted], verdict.next_token][:2]
        for verdict in verdicts
    ]
    for row in ctx.rows:
        row.position = 1
    # where rejected at once, the next cycle drafts from the correction
    start = torch.tensor([tokens[0] for tokens in written])
    c = ctx.draw(second_draft[start][:, None])
    logits = torch.stack([second[start], first.expand(rows, 5)], 1)
    again = decide(
        Draft(c, one, second_draft[start][:, None]), Reading(logits, zeros[:, :2]), ctx
    )
    for tokens, verdict in zip(written, again):
        if len(tokens) == 1:
            tokens.append(
                verdict.drafted[0] if verdict.num_accepted else verdict.next_token
            )
        counts[tokens[0], tokens[1]] += 1
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    # cells with few expected draws are put together
    expected, seen = wanted[possible] * counts.sum(), counts[possible]
    rare = expected < 5
    expected = (
        np.append(expected[~rare], expected[rare].sum()) if rare.any() else expected
    )
    seen = np.append(seen[~rare], seen[rare].sum()) if rare.any() else seen
    assert chisquare(seen, expected).pvalue > 1e-4


def test_a_draft_has_a_temperature_of_its_own(llama: Pair) -> None:
    options = {"temperature": 1.0, "window": 6, "max_new_tokens": 6}
    greedily = llama.generate([5, 9], rule="draft", max_new_tokens=6).tokens
    assert 0 not in greedily
    for seed in range(3):  # all that is drafted is kept
        out = llama.generate(
            [5, 9], rule="random:1", draft_temperature=0, seed=seed, **options
        )
        assert out.tokens[:5] == greedily[:5]
    drawn = {
        tuple(llama.generate([5, 9], rule="random:1", seed=seed, **options).tokens)
        for seed in range(3)
    }
    assert len(drawn) > 1
    # `exact` is plain sampling, whatever is drafted
    for seed in range(5):
        plain = llama.generate(
            [5, 9], rule="target", seed=seed, temperature=1.0, max_new_tokens=30
        )
        for draft_temperature in (0.0, 0.5, 2.0):
            out = llama.generate(
                [5, 9],
                seed=seed,
                temperature=1.0,
                max_new_tokens=30,
                draft_temperature=draft_temperature,
            )
            assert out.tokens == plain.tokens
    for wrong in (
        {"drafter": "ngram"},
        {"tree": "dynamic:4"},
        {"draft_temperature": -1},
    ):
        with pytest.raises(InputError, match="draft_temperature"):
            llama.generate([5, 9], **{"draft_temperature": 0.0, **options, **wrong})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"drafter": "ngram"}, "drafter ngram has none; take --drafter model or leave"),
        ({"drafter": "model|suffix"}, "drafter model|suffix has none; take --drafter"),
        ({"tree": "dynamic:4"}, "a tree has none; take --tree chain or leave it out"),
    ],
)
def test_a_draft_temperature_needs_one_model_that_samples_chains(
    llama: Pair, options: dict[str, str], why: str
) -> None:
    said = "draft_temperature 0.5: needs tokens that a single model samples, and "
    with pytest.raises(InputError, match=re.escape(said + why)):
        llama.generate([5, 9], temperature=1.0, draft_temperature=0.5, **options)


@pytest.mark.parametrize("draft_temperature", [None, 0.0, 2.0])
def test_a_whole_decode_follows_the_targets_distribution(
    draft_temperature: float | None, llama: Pair
) -> None:
    """The marginal of the third token over 500 seeds against the one computed from the target's
    own logits, whatever temperature the draft has."""
    with torch.inference_mode():
        probs = {}

        def next_probs(prefix: tuple[int, ...]) -> np.ndarray:
            if prefix not in probs:
                logits = (
                    llama.target.model(torch.tensor([[7, *prefix]])).logits[0, -1] / 1.0
                )
                top = logits.topk(3)
                kept = torch.full_like(logits, float("-inf")).scatter(
                    0, top.indices, top.values
                )
                probs[prefix] = torch.softmax(kept.double(), -1).numpy()
            return probs[prefix]

        wanted = np.zeros(48)
        for a in np.flatnonzero(next_probs(())):
            for b in np.flatnonzero(next_probs((a,))):
                if 0 not in (a, b):
                    wanted += (
                        next_probs(())[a] * next_probs((a,))[b] * next_probs((a, b))
                    )
    seen = np.zeros(48)
    for seed in range(500):
        tokens = llama.generate(
            [7],
            rule="speculative",
            temperature=1.0,
            draft_temperature=draft_temperature,
            top_k=3,
            window=2,
            max_new_tokens=3,
            seed=seed,
        ).tokens
        if len(tokens) == 3:
            seen[tokens[2]] += 1
    assert seen[wanted == 0].sum() == 0
    expected = wanted / wanted.sum() * seen.sum()
    big = expected >= 5
    assert (
        chisquare(
            np.append(seen[big], seen[~big].sum() + 1e-9),
            np.append(expected[big], expected[~big].sum() + 1e-9),
        ).pvalue
        > 1e-4
    )


@given(
    seed=st.integers(0, 2**31),
    prompt=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    position=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_noise_depends_on_its_key_alone(
    seed: int, prompt: list[int], position: int
) -> None:
    noise = Noise.for_prompt(seed, prompt)
    first = noise.key(position, "accept")
    Noise.for_prompt(seed + 1, prompt).key(position, "accept")
    assert noise.key(position, "accept") == first
    others = {
        noise.key(position + 1, "accept"),
        noise.key(position, "token"),
        Noise.for_prompt(seed, [*prompt, 1]).key(position, "accept"),
    }
    assert first not in others and len(others) == 3


def test_noise_is_uniform_and_races_are_won_in_proportion() -> None:
    keys = torch.tensor(
        [Noise.for_prompt(0, [1, 2]).key(i, "accept") for i in range(10_000)]
    )
    for given_keys in (keys, torch.arange(10_000)):  # neighbouring keys must not show
        assert (
            chisquare(
                np.histogram(uniform(given_keys), bins=20, range=(0, 1))[0]
            ).pvalue
            > 1e-4
        )
        won = gumbel_argmax(
            torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(10_000, 4), given_keys
        )
        counts = np.bincount(won, minlength=4)
        assert (
            counts[1] == 0
            and chisquare(counts[[0, 2, 3]], [5000, 3000, 2000]).pvalue > 1e-4
        )


def test_uniform_is_the_published_splitmix64() -> None:
    """The generator's first outputs from seed 1234567, as its reference implementation prints
    them."""
    state = 1234567
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniform(
        torch.tensor(
            [(state + i * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63 for i in range(3)]
        )
    )
    np.testing.assert_allclose(
        got.numpy(), [value / 2**64 for value in wanted], rtol=0, atol=2**-52
    )
    extremes = uniform(torch.arange(-(2**17), 2**17))
    assert extremes.min() > 0 and extremes.max() < 1


def looping(read):
    """A cache's read that goes on by itself, as recorded passes and exported graphs do."""

    def loop(self: PlainCache, forward: Forward, profile: Profile):
        n, m = forward.lookahead, len(forward.rows)
        whole = forward.kv_length - n
        parts = [read(self, replace(forward, lookahead=0, kv_length=whole), profile)]
        counts = zip(forward.cached_lengths, forward.left_padding)
        lengths = [cached + forward.length - padding for cached, padding in counts]
        for k in range(n):
            after = Forward(
                rows=forward.rows,
                input_ids=parts[-1][0][:, -1:].argmax(-1).tolist(),
                left_padding=[0] * m,
                cached_lengths=[length + k for length in lengths],
                kv_length=whole + k + 1,
                num_states=1,
            )
            parts.append(read(self, after, profile))
        return tuple(torch.cat(side, 1) for side in zip(*parts))

    return loop


@pytest.mark.parametrize("on_device", [False, True])
def test_nothing_is_drafted_past_an_eos_or_a_limit(
    on_device: bool, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each window is what the draft alone says there, which ends at its EOS."""
    if on_device:  # windows are drafted in one read, and nobody looks at their tokens
        monkeypatch.setattr(PlainCache, "needs_host_tokens", False)
        monkeypatch.setattr(PlainCache, "can_loop", True)
        monkeypatch.setattr(PlainCache, "read", looping(PlainCache.read))
    new, window, ended = 40, 8, 0
    for prompt in ([1, 2, 3], [7, 7, 9, 2], [30, 4], [11, 12], [45, 3, 21]):
        ids = list(prompt)
        for step in llama.stream(
            prompt, rule="exact", window=window, max_new_tokens=new
        ):
            most = min(window, new - (len(ids) - len(prompt)) - 1)
            own = (
                llama.generate(ids, rule="draft", max_new_tokens=most).tokens
                if most
                else []
            )
            assert step.drafted == len(own)
            ended += len(own) < most
            ids += step.tokens
    assert ended, "some window ended at an EOS"


@pytest.mark.parametrize("rule", ["exact", "topk:3", "topk:8"])
def test_counts_end_where_the_answer_does(llama: Pair, rule: str) -> None:
    """At a stop string or an end token within a window."""
    cut = 0
    for prompt in ([3, 4, 5], [9, 8, 7, 6], [20], [11, 30], [5, 5, 6]):
        whole = llama.generate(prompt, rule=rule, window=6, max_new_tokens=40)
        for at in range(2, len(whole.tokens) - 1, 4):
            stop = llama.target.decode(whole.tokens[at - 1 : at + 1])
            out = llama.generate(
                prompt, rule=rule, window=6, max_new_tokens=40, stop_strings=(stop,)
            )
            origins = [entry.origin for entry in out.trace]
            kept = sum(origin.startswith("draft") for origin in origins)
            assert out.accepted_exact + out.accepted_lenient == kept
            assert 0 <= out.accepted_exact <= origins.count("draft")
            assert rule != "exact" or out.accepted_lenient == 0
            cut += out.finish == "stop" and origins[-1].startswith("draft")
    assert cut > 2


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    llama: Pair,
) -> None:
    tokens, text = until_stop(llama.target, [5, 7, 9, 11], ["w9 w11", "w7"])
    assert (tokens, text.strip()) == ([5, 7], llama.target.decode([5]))
    for stops in ([], ["w8"]):
        whole = ([5, 7, 9, 11], llama.target.decode([5, 7, 9, 11]))
        assert until_stop(llama.target, [5, 7, 9, 11], stops) == whole
