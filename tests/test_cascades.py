"""Drafters that draft for one another, and the target's own layers as a draft."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from conftest import CONFIGS, VOCABULARY, prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.loop import cycle
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSetup
from lenience.drafting.parsing import parse_drafter, parse_tree
from lenience.drafting.self_draft import without_layers
from lenience.drafting.stops import Fixed
from lenience.drafting.suffixes import Suffixes
from lenience.models.session import Session
from lenience.rules.parsing import parse_rule
from lenience.tasks import WordMath

JOINED = (
    "ngram>model", "suffix>model", "exit:1>model", "model:2+ngram", "ngram:2+model",
    "suffix:1+ngram", "exit:1", "skip:1", "skip:2", "ngram>exit:1", "ngram|skip:1",
)  # fmt: skip


def windows(
    spec: str, pair: Pair, text: list[int], window: int, temperature: float
) -> list[int]:
    """What a drafter proposes after a text."""
    setup = DrafterSetup(
        pair.target, pair.draft, 1, 256, Fixed(), parse_tree("chain"), keep_states=False,
        profile=Profile(),
    )  # fmt: skip
    row = Row(Noise(7, b"row"), list(text), position=3)
    ctx = Context([row], window=window, temperature=temperature)
    with torch.inference_mode():
        draft = parse_drafter(spec).build(setup).propose(ctx, [100])
    return draft.tokens[0, : int(draft.lengths[0])].tolist()


@quick(12)
@given(
    text=st.lists(st.integers(1, 6), min_size=1, max_size=30),
    window=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.7]),
    first=st.sampled_from(["ngram", "suffix:least=0.0,factor=3.0", "exit:1"]),
)
def test_a_vertical_cascade_proposes_what_its_last_does(
    llama: Pair, text: list[int], window: int, temperature: float, first: str
) -> None:
    alone = windows("model", llama, text, window, temperature)
    assert windows(f"{first}>model", llama, text, window, temperature) == alone


def test_a_vertical_cascade_saves_passes(built_in: Pair) -> None:
    (sample,) = islice(WordMath().samples("test"), 1)
    ids = built_in.target.encode(sample.prompt) * 3
    outs = [
        built_in.generate(
            ids, drafter=drafter, window=8, max_new_tokens=60, rule="exact"
        )
        for drafter in ("model", "ngram>model")
    ]
    assert outs[0].tokens == outs[1].tokens and outs[0].drafted == outs[1].drafted
    # the passes of the first count for none, as it has none
    assert outs[1].draft_passes < outs[0].draft_passes


@quick(12)
@given(
    text=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    count=st.integers(1, 4),
    window=st.integers(1, 8),
)
def test_a_horizontal_cascade_goes_on_where_its_first_ends(
    llama: Pair, text: list[int], count: int, window: int
) -> None:
    begun = windows("model", llama, text, min(count, window), 0.0)
    rest: list[int] = []
    whole, left = text + begun, window - len(begun)
    if begun[-1] != 0 and left:
        # the text alone is looked through for what stands at the end of both
        for n in range(3, 0, -1):
            ends = [e for e in range(n, len(text)) if text[e - n : e] == whole[-n:]]
            if ends:
                rest = whole[ends[-1] :][:left]
                break
    assert windows(f"model:{count}+ngram", llama, text, window, 0.0) == begun + rest


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=20),
    st.lists(st.integers(1, 4), max_size=5),
)
def test_matches_of_a_text_that_goes_on(text: list[int], ahead: list[int]) -> None:
    index = Suffixes()
    for token in text:
        index.add(token)
    whole = text + ahead
    ends = [whole[-n:] for n in range(1, len(whole) + 1)]

    def stands(part: list[int]) -> bool:
        # the text's own end is no match of itself
        n, last = (
            len(part),
            len(text) - (not ahead),
        )
        return any(text[i : i + n] == part for i in range(last - n + 1))

    longest = max((len(end) for end in ends if stands(end)), default=0)
    lengths = [length for _, length in index.matches(ahead)]
    assert max(lengths, default=0) == longest
    assert lengths == sorted(set(lengths), reverse=True)


@pytest.mark.parametrize("drafter", JOINED)
@quick(3)
@given(prompts=prompt_lists(4))
def test_joined_drafters_change_no_strict_answer(
    llama: Pair, drafter: str, prompts: list[list[int]]
) -> None:
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        alone = llama.generate_batch(prompts, rule="target", **options)
        for size in (1, 3):
            outs = llama.generate_batch(
                prompts,
                drafter=drafter,
                window=4,
                batch_size=size,
                rule="exact",
                **options,
            )
            assert [out.tokens for out in outs] == [out.tokens for out in alone]


@pytest.mark.parametrize("drafter", ["model:1+ngram", "ngram:1+model", "ngram>model"])
def test_joined_drafters_keep_the_targets_distribution(
    llama: Pair, drafter: str
) -> None:
    prompt, n = [*range(1, 20), 4], 6000
    setup = DrafterSetup(
        llama.target, llama.draft, n, 32, Fixed(), parse_tree("chain"), keep_states=False,
        profile=Profile(),
    )  # fmt: skip
    proposes = parse_drafter(drafter).build(setup)
    session, rule = Session(llama.target, n, 32), parse_rule("speculative")
    rows = [Row(Noise(seed, b""), list(prompt)) for seed in range(n)]
    ctx = Context(rows, window=2, temperature=1.0)
    new: list[list[int]] = [[] for _ in rows]
    drafted = 0
    while min(map(len, new)) < 2:
        draft, _, verdicts = cycle(session, proposes, rule, ctx, [2] * n)
        drafted += int(draft.lengths.sum())
        for row, tokens, verdict in zip(rows, new, verdicts):
            more = [verdict.drafted[i] for i in verdict.path]
            more += [] if verdict.next_token is None else [verdict.next_token]
            tokens += more
            row.prefix += more
            row.position += len(more)
    assert drafted > n
    first = torch.softmax(llama.target.model(torch.tensor([prompt])).logits[0, -1], -1)
    each = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    second = first @ torch.softmax(llama.target.model(each).logits[:, -1], -1)
    for place, wanted in enumerate((first, second)):
        found = torch.bincount(
            torch.tensor([tokens[place] for tokens in new]), minlength=VOCABULARY
        )
        expected = n * wanted.detach().double()
        rare = expected < 5
        cells = [(found[~rare].double(), expected[~rare])]
        cells.append((found[rare].sum()[None].double(), expected[rare].sum()[None]))
        chi2 = sum(float(((f - e) ** 2 / e).sum()) for f, e in cells if e.sum() > 0)
        freedom = int((~rare).sum()) + int(rare.any()) - 1
        assert chi2 < freedom + 5 * (2 * freedom) ** 0.5, (place, chi2, freedom)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_left_out_are_those_of_the_model(
    name: str,
    pairs: Callable[[str], Pair],
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    lm = pairs(name).target
    before = lm.model(torch.tensor([[4, 8, 15]])).logits
    part = without_layers(lm, [2])
    assert part.num_layers == 1 and lm.num_layers == 2
    shared = {weight.data_ptr() for weight in lm.model.parameters()}
    assert all(weight.data_ptr() in shared for weight in part.model.parameters())
    # by hand: a second copy, whose second layer hands on what it is given
    other = load_pair(checkpoints(name)[0], dtype="float32", compile=False).target
    block, ids = other.block(2), torch.tensor([[4, 8, 15]])
    given: list[object] = []
    watch = block.register_forward_hook(lambda _, args, out: given.append(out))
    other.model(ids, use_cache=False)
    watch.remove()
    in_tuple = isinstance(given[0], tuple)
    block.forward = lambda states, *args, **kwargs: (states,) if in_tuple else states
    wanted = other.model(ids, use_cache=False).logits
    torch.testing.assert_close(part.model(ids).logits, wanted)
    torch.testing.assert_close(lm.model(ids).logits, before)


@pytest.mark.usefixtures("graphs")
def test_own_layers_are_exported_with_the_target(
    checkpoints: Callable[[str], tuple[str, str]], llama: Pair
) -> None:
    pair = load_pair(checkpoints("llama")[0], dtype="float32", compile=True)
    out = pair.generate([5, 6, 7], drafter="exit:1", window=4, max_new_tokens=30)
    assert (
        out.tokens == llama.generate([5, 6, 7], rule="target", max_new_tokens=30).tokens
    )
    part = without_layers(pair.target, [2])
    assert part.backend is not None and out.drafted


def test_draws_that_helped_a_window_do_not_come_again() -> None:
    # rules that decide on whole windows name a window's draws by where it began
    row = Row(Noise(3, b"x"), [1, 2], position=10)
    ahead = Row(Noise(3, b"x"), [1, 2, 5], position=11, ahead=1)
    ctx = Context([row], temperature=1.0, fresh_noise_per_window=True)
    inner = Context([ahead], temperature=1.0, fresh_noise_per_window=True)
    later = Context(
        [Row(Noise(3, b"x"), [1, 2, 5], position=11)], fresh_noise_per_window=True
    )
    keys = ctx.noise_keys(3, "token")[0].tolist()
    assert inner.noise_keys(2, "token")[0].tolist() == keys[1:]
    assert not set(later.noise_keys(2, "token")[0].tolist()) & set(keys)


REFUSED = {
    "exit:2": "has 2 layers; name one before the last",
    "skip:3": "layers 1 to 2",
    "skip:1,2": "layers 1 to 2",
    "skip:1,1": "each once",
    "ngram>suffix": "suffix runs no model",
    "model>model": "model cannot draft for another drafter",
    "mtp>model": "mtp cannot draft for another drafter",
    "model:2+mtp": "mtp drafts from the target's own states only",
    "ngram+model": r"Write ngram:4\+model",
    "ngram:0+model": "name 1 or more",
    "ngram:1+suffix:1+model": "combines two drafters",
    "ngram>exit:1>model": "combines two drafters",
}


@pytest.mark.parametrize("drafter", REFUSED)
def test_what_cannot_be_joined_is_refused(llama: Pair, drafter: str) -> None:
    with pytest.raises(InputError, match=REFUSED[drafter]):
        llama.generate("w1", drafter=drafter)


def test_stops_end_windows_of_one_drafter(llama: Pair) -> None:
    with pytest.raises(InputError, match="a stop condition can end, and drafter"):
        llama.generate("w1", drafter="ngram>model", stop="heuristic")
    for drafter in ("ngram>model", "model:2+ngram"):
        with pytest.raises(
            InputError, match="tree dynamic:4: needs trees, and drafter"
        ):
            llama.generate("w1", drafter=drafter, tree="dynamic:4")


def test_specs_of_joined_drafters_are_read_back() -> None:
    for text in ("ngram>model", "model:4+ngram", "ngram:max=5:2+model", "suffix|ngram>model",
                 "ngram>skip:2,5", "exit:3:2+suffix", 'medusa:"/c++/a>b"',
                 'eagle:"/c++/run":2+ngram'):  # fmt: skip
        assert str(parse_drafter(text)) == text
        assert parse_drafter(str(parse_drafter(text))) == parse_drafter(text)


@quick(25)
@given(
    prompts=prompt_lists(5),
    drafter=st.sampled_from(["exit:1", "skip:1", "skip:2"]),
    tree=st.sampled_from(["chain", "cartesian:2,2", "dynamic:5"]),
    size=st.integers(1, 4),
)
def test_drafting_in_the_targets_cache_leaves_it_as_it_was(
    llama: Pair, prompts: list[list[int]], drafter: str, tree: str, size: int
) -> None:
    """Rows that end, begin, and are at their last token while others are drafted for."""
    options = {"max_new_tokens": 17, "window": 4}
    plain = [
        llama.generate(prompt, rule="target", **options).tokens for prompt in prompts
    ]
    outs = llama.generate_batch(
        prompts, drafter=drafter, tree=tree, batch_size=size, **options
    )
    assert [out.tokens for out in outs] == plain


def test_what_the_target_has_read_is_not_read_again(
    llama: Pair, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    """Windows are those of the first layers alone, by transformers; of the prompt nothing is
    read."""
    prompt, window, new = [*range(1, 40)], 4, 30
    first = AutoModelForCausalLM.from_pretrained(
        checkpoints("llama")[0], num_hidden_layers=1
    )
    whole = AutoModelForCausalLM.from_pretrained(checkpoints("llama")[0])

    def greedy(model: torch.nn.Module, text: list[int]) -> int:
        with torch.inference_mode():
            return int(model(torch.tensor([text])).logits[0, -1].argmax())

    text, passes, drafted = list(prompt), 0, 0
    while (left := new - (len(text) - len(prompt))) > 0:
        ahead = list(text)
        for _ in range(0 if passes == 0 else min(window, left - 1)):
            ahead.append(greedy(first, ahead))
            drafted += 1
        kept = len(text)
        while kept < len(ahead) and greedy(whole, ahead[:kept]) == ahead[kept]:
            kept += 1
        text = [*ahead[:kept], greedy(whole, ahead[:kept])]
        passes += 1
    out = llama.generate(prompt, drafter="exit:1", window=window, max_new_tokens=new)
    assert out.tokens == text[len(prompt) :]
    assert (out.target_passes, out.drafted) == (passes, drafted)
    assert out.draft_tokens < drafted + out.target_passes < len(prompt) + drafted
