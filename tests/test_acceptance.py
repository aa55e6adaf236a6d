"""How rules join, what limits them, and their ends: strict decoding at one, the draft's own tokens
at the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules import VOCABULARY, decide, greedy, reading, window

import lenience
from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading
from lenience.decoding.pair import Pair
from lenience.rules.base import Lenient
from lenience.rules.combine import AllOf, AnyOf, _Opinion
from lenience.rules.lenient import TopK, Typical
from lenience.rules.strict import Exact

STRICT = [
    "topk:1",
    "topk:9,ratio=1",
    "topk:9,margin=0",
    "typical:1,9",
    "fuzzy:kl@0",
    "fuzzy:js@0",
    "fuzzy:tv@0",
    "lenient:1",
    "kl:0",
    "kl:9,guard=0",
    "ensemble:1",
    "cascade:chow@0",
    "cascade:diff@-1",
    "cascade:opt@-inf",
    "cascade:token1@-1",
    "cascade:token2@0",
    "cascade:token3@0",
    "cascade:diff,budget=0@1",
    "fly:99",
    "random:0",
    "topk:9,floor=1",
    "topk:48,budget=0",
    "fuzzy:tv,budget=0@1.1",
    "random:1,budget=0",
    "typical:0,0,budget=0",
    "fly:0,1,budget=0",
    "ensemble:0,budget=0",
    "topk:48,begin=<a>,end=<b>",
    "topk:48&fuzzy:js@0",
]
LOOSE = [
    "topk:48",
    "typical:0,0",
    "fuzzy:kl@inf",
    "fuzzy:js@0.7",
    "fuzzy:tv@1.01",
    "lenient:1e-30",
    "kl:inf,guard=1",
    "ensemble:0",
    "cascade:chow@1",
    "cascade:diff@1",
    "cascade:opt@inf",
    "cascade:token1@1",
    "cascade:token2@1",
    "cascade:token3@1",
    "topk:48,overshoot=1e30",
    "random:1",
    "topk:48&fuzzy:js@0.7",
    "exact|random:1",
    "topk:48,budget=99",
]


@pytest.mark.parametrize("spec", STRICT)
def test_the_strict_end_is_strict_decoding(spec: str, llama: Pair) -> None:
    exact = llama.generate([5, 9], rule="target", max_new_tokens=30)
    assert llama.generate([5, 9], rule=spec, max_new_tokens=30).tokens == exact.tokens


@pytest.mark.parametrize("spec", LOOSE)
def test_the_loose_end_keeps_all_that_is_drafted(spec: str, llama: Pair) -> None:
    out = llama.generate([5, 9], rule=spec, window=4, max_new_tokens=20)
    assert {entry.origin for entry in out.trace} <= {"draft", "draft-lenient", "bonus"}
    assert out.accepted_lenient > 0
    drafted, target = (
        llama.generate([5, 9], rule="draft", max_new_tokens=4),
        out.tokens[:4],
    )
    assert drafted.tokens == target, "the draft's own tokens"
    assert (
        llama.generate([5, 9, *target], rule="target", max_new_tokens=1).tokens
        == out.tokens[4:5]
    ), "and a bonus"


@pytest.mark.parametrize(
    "spec",
    [
        "topk:3,budget=0",
        "fuzzy:tv,budget=0@2",
        "ensemble:0,budget=0",
        "mentored:9,budget=0",
        "lenient:1",
        "fly:0,1,budget=0",
        "ensemble:1",
        "ensemble:0,overshoot=1",
        "cascade:diff@-1",
        "cascade:opt@-inf",
        "cascade:token1@-1",
        "mentored:0",
        "speculative|random:0",
        "random:1,budget=0",
        "kl:0",
    ],
)
def test_the_strict_end_is_speculative_sampling_when_sampling(
    spec: str, llama: Pair
) -> None:
    options = {"temperature": 0.9, "top_k": 12, "max_new_tokens": 24}
    for seed in range(2):
        strict = llama.generate([5, 9], rule="speculative", seed=seed, **options)
        assert (
            llama.generate([5, 9], rule=spec, seed=seed, **options).tokens
            == strict.tokens
        )


RULES = [
    "exact",
    "speculative",
    "block",
    "lenient:0.3",
    "topk:2,margin=0.5",
    "typical:0.1,0.4",
    "fuzzy:js,top=5@0.2",
    "kl:0.5",
    "ensemble:0.4",
    "cascade:opt@0.2",
    "cascade:token3@0.5",
    "topk:4,overshoot=2",
    "fly:0.2,1",
    "mentored:0.3",
    "random:0.3",
    "exact|topk:2&fuzzy:tv@0.4",
    "topk:4,floor=0.05,budget=3",
    "topk:9,begin=w3,end=w7",
]


@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_gives_what_each_prompt_alone_gives(
    spec: str, temperature: float, llama: Pair
) -> None:
    if spec.startswith("mentored") and not temperature:
        return
    prompts = [[5, 9], [7], [1, 2, 3, 4, 5, 6]]
    options = {
        "rule": spec,
        "window": 5,
        "max_new_tokens": 16,
        "temperature": temperature,
        "seed": 3,
    }
    together = llama.generate_batch(prompts, batch_size=2, **options)
    assert [out.tokens for out in together] == [
        llama.generate(prompt, **options).tokens for prompt in prompts
    ]


# ---- limits


@given(
    exact=st.lists(st.booleans(), min_size=1, max_size=8),
    masks=st.lists(
        st.lists(st.booleans(), min_size=8, max_size=8), min_size=2, max_size=2
    ),
    budgets=st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=2, max_size=2),
    used=st.integers(0, 4),
    joined=st.booleans(),
)
@settings(max_examples=300)
def test_budgets_are_spent_from_left_to_right(
    exact, masks, budgets, used: int, joined: bool
) -> None:
    n = len(exact)
    terms = (TopK(2, budget=budgets[0]), Typical(0.1, 0.1, budget=budgets[1]))
    ctx = Context([Row(Noise.for_prompt(0, []), lenient=used)])
    opinions = {
        term: _Opinion(torch.tensor([mask[:n]]), None, None)
        for term, mask in zip(terms, masks)
    }
    parts, strict = (Exact(), *terms) if joined else terms, torch.tensor([exact])
    rule = AnyOf(tuple(AllOf((part,)) for part in parts))
    accepted, counted = rule._within_budgets(opinions, strict, strict & joined, ctx)
    wanted, counts, left = [], [], used
    for i in range(n):
        says = [
            exact[i] if budget is not None and left >= budget else mask[i]
            for mask, budget in zip(masks, budgets)
        ]
        counts.append(left)
        wanted.append(any(says) or (joined and exact[i]))
        left += wanted[-1] and not exact[i]
    assert accepted[0].tolist() == wanted
    assert counted is None or counted[0].tolist() == counts


def test_a_budget_lasts_for_the_whole_request(llama: Pair) -> None:
    free = llama.generate([5, 9], rule="topk:48", max_new_tokens=60)
    lenient = [
        i for i, entry in enumerate(free.trace) if entry.origin == "draft-lenient"
    ]
    assert len(lenient) > 4
    out = llama.generate([5, 9], rule="topk:48,budget=3", max_new_tokens=60)
    assert sum(entry.origin == "draft-lenient" for entry in out.trace) == 3
    start = lenient[2] + 1
    assert out.tokens[:start] == free.tokens[:start]
    rest = llama.generate(
        [5, 9, *out.tokens[:start]], rule="target", max_new_tokens=60 - start
    )
    assert out.tokens[start:] == rest.tokens, "then strict decoding"


def test_a_floor_is_a_probability_of_the_target() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05, 1e-9, 1e-9]] * 2).log().numpy()
    for token, kept in ((2, 1), (3, 0)):
        assert (
            decide(
                lenience.rule("topk:6,floor=0.1"),
                window([token]),
                reading(logits),
                greedy(),
            ).num_accepted
            == kept
        )
    everything = torch.zeros(1, VOCABULARY)
    assert (
        decide(
            lenience.rule("random:1,floor=0.1"),
            window([3], everything),
            reading(logits),
            greedy(),
        ).num_accepted
        == 0
    )


def test_a_floor_holds_for_what_an_ensemble_puts_in_its_place() -> None:
    """The mixture's most probable token is below the floor: it is neither kept nor the
    correction."""
    target, drafted = (
        torch.tensor([[*p, 1e-9, 1e-9, 1e-9]]).log()
        for p in ((0.6, 0.399, 0.001), (0.01, 0.01, 0.98))
    )
    for floor, wanted in ((0.05, 0), (0.0005, 2), (0.7, 0)):
        for token in (1, 2):
            draft = window([token], drafted)
            verdict = decide(
                lenience.rule(f"ensemble:0.3,floor={floor}"),
                draft,
                reading(target.repeat(2, 1).numpy()),
                greedy(),
            )
            assert verdict.num_accepted == (token == wanted) and (
                verdict.num_accepted or verdict.next_token == wanted
            )


def test_a_span_lies_between_its_two_texts(llama: Pair) -> None:
    """w3 opens and w7 closes, whether they are prompted or drafted."""
    tokenizer = make_tokenizer()
    ctx = Context(
        [Row(Noise.for_prompt(0, []), [1, 3, 2], position=0)], decode=tokenizer.decode
    )

    def inside(tokens: list[int]) -> list[bool]:
        return ctx.in_span("w3", "w7", torch.tensor([tokens]))[0].tolist()

    assert inside([1, 7, 1, 1, 3, 2]) == [True, True, False, False, False, True]
    ctx.rows[0].prefix += [1, 7, 1]
    ctx.rows[0].position += 3
    assert inside([2, 3, 2, 37]) == [False, False, True, True], "37 holds w3 and w7"
    free = llama.generate([47, 9], rule="topk:48", max_new_tokens=60)
    end = (
        next(
            i
            for i in range(10, 50)
            if free.tokens[i] > 9 and free.tokens[i] not in free.tokens[:i]
        )
        + 1
    )
    limited = llama.generate(
        [47, 9],
        rule=f"topk:48,begin=w47,end=w{free.tokens[end - 1]}",
        max_new_tokens=60,
    )
    assert limited.tokens[:end] == free.tokens[:end] and limited.accepted_lenient
    rest = llama.generate(
        [47, 9, *limited.tokens[:end]], rule="target", max_new_tokens=60 - end
    ).tokens
    until = [*rest, 47].index(47) + 1  # where it opens again
    assert limited.tokens[end : end + until] == rest[:until] and until > 2


def test_markers_may_be_cut_into_tokens_anywhere() -> None:
    texts = {1: "<th", 2: "ink", 3: ">", 4: "a", 5: "</think", 6: "> b"}
    ctx = Context(
        [Row(Noise.for_prompt(0, []), [4, 1, 2], position=1)],
        decode=lambda ids: "".join(texts[i] for i in ids),
    )
    assert ctx.in_span(
        "<think>", "</think>", torch.tensor([[3, 4, 5, 6, 4]])
    ).tolist() == [[False, True, True, True, False]]


def test_one_marker_may_hold_the_other() -> None:
    texts = {1: "```", 2: "python", 3: " a", 4: "$", 5: "/"}
    ctx = Context(
        [Row(Noise.for_prompt(0, []), [3], position=1)],
        decode=lambda ids: "".join(texts[i] for i in ids),
    )
    got = ctx.in_span("```python", "```", torch.tensor([[1, 2, 3, 3, 1, 3]]))
    assert got.tolist() == [[False, False, True, True, True, False]]
    assert ctx.in_span("$", "/$", torch.tensor([[4, 3, 5, 4, 3]])).tolist() == [
        [False, True, True, True, False]
    ]
    with pytest.raises(InputError, match="as different texts"):
        lenience.rule("topk:2,begin=$$,end=$$")


# ---- joining


def test_or_binds_weaker_than_and() -> None:
    rule = lenience.rule("exact|topk:2&typical:0.1,0.3|random:0.5")
    assert isinstance(rule, AnyOf)
    assert [[term.name for term in part.terms] for part in rule.parts] == [
        ["exact"],
        ["topk", "typical"],
        ["random"],
    ]
    assert (
        str(rule) == "exact|topk:2&typical:0.1,0.3|random:0.5"
        and lenience.rule(str(rule)) == rule
    )


@pytest.mark.parametrize(
    "spec, says",
    [
        ("topk:99999999999999999999", "32 bits"),
        ("exact&topk:2", "joined by |"),
        ("block|topk:2", "cannot be combined"),
        ("ensemble:0.5|exact", "cannot be combined"),
        ("mentored:1&topk:2", "cannot be combined"),
        ("cascade:opt@0.1|exact", "cannot be combined"),
        ("cascade:best@0.1", "one of chow, diff"),
        ("cascade:chow@2", "threshold 2: must be"),
        ("topk:2,overshoot=0.5", "overshoot 0.5: must be at least 1"),
        ("fly|topk:3", "cannot be combined"),
        ("topk:2&", "a rule is missing"),
        ("topk:2,floor=2", "floor 2: must be"),
        ("topk:2,budget=-1", "budget -1"),
        ("topk:2,begin=x", "give both"),
        ("fuzzy:hellinger@0.1", "one of kl, js, tv"),
        ("fuzzy:kl", "needs threshold: write fuzzy:kl@T"),
        ("judge:x@0.9,budget=2,budget=3", "budget is given twice"),
        ("lenient:0", "above 0"),
        ("lenient:1.5", "at most 1"),
        ("random:2", "at most 1"),
        ("exact:floor=0.1", "no argument 'floor'"),
        ("kl:x", "a number"),
        ("topk:2,ratio=3", "at most 1"),
        ("typical:0.1", "needs delta"),
        ("topk:2,budget=x", "a whole number"),
        ("fly:0.3,0", "at least 1"),
    ],
)
def test_what_cannot_be_joined_or_is_out_of_range_is_told(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        lenience.rule(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *STRICT[:6],
        *LOOSE,
        *RULES,
        'topk:2,begin="<a b>",end=</a>',
        "judge:x,budget=3@0.5",
        "fuzzy:js,top=10@0.4",
    ],
)
def test_every_spec_survives(spec: str) -> None:
    rule = lenience.rule(spec)
    assert lenience.rule(str(rule)) == rule


def test_a_judge_may_be_anded(judge: str, llama: Pair) -> None:
    alone = llama.generate([5, 9], rule=judge, max_new_tokens=60)
    both = llama.generate([5, 9], rule=f"{judge}&topk:2", max_new_tokens=60)
    assert (
        llama.generate([5, 9], rule=f"{judge}&topk:48", max_new_tokens=60).tokens
        == alone.tokens
    )
    exact = llama.generate([5, 9], max_new_tokens=60)
    assert (
        llama.generate([5, 9], rule=f"{judge}&topk:1", max_new_tokens=60).tokens
        == exact.tokens
    )
    assert both.tokens not in (alone.tokens, exact.tokens)


def test_a_users_own_rule_may_be_lenient(llama: Pair) -> None:
    class Even(Lenient):
        name = "even"

        def accepts(self, draft, reading, ctx):
            return draft.tokens % 2 == 0

    out = llama.generate([5, 9], rule=Even(), max_new_tokens=40)
    assert (
        all(
            entry.token % 2 == 0
            for entry in out.trace
            if entry.origin == "draft-lenient"
        )
        and out.accepted_lenient
    )


# ---- transformers


@pytest.mark.parametrize("weight", [0.3, 0.6])
def test_ensemble_is_transformers_assistant_ensemble_weight(
    weight: float, llama: Pair, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 9]])
    assistant = llama.draft.model
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    wanted = llama.target.model.generate(
        ids,
        assistant_model=assistant,
        assistant_ensemble_weight=weight,
        do_sample=False,
        max_new_tokens=40,
    )[0, 2:]
    out = llama.generate([5, 9], rule=f"ensemble:{weight}", window=4, max_new_tokens=40)
    assert out.tokens == wanted.tolist()
    assert out.tokens != llama.generate([5, 9], max_new_tokens=40).tokens


# ---- trusted tokens


@pytest.mark.parametrize(
    "spec",
    [
        "exact",
        "speculative",
        "block",
        "topk:1",
        "fuzzy:tv@0.1",
        "lenient:0.9",
        "exact|random:0",
        "topk:9,budget=1",
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_trusted_tokens_comes_what_the_target_says_there(
    spec: str, temperature: float
) -> None:
    """The target wants 3, 4, 5, 0 in turn, whatever is drafted; of three drafted tokens two are
    trusted."""
    target = (
        30
        * torch.nn.functional.one_hot(torch.tensor([[3, 4, 5, 0]]), VOCABULARY).float()
    )
    for tokens, accepted in (
        ([1, 1, 1], 2),
        ([1, 1, 5], 3),
        ([3, 1, 1], 2),
        ([1, 4, 1], 2),
    ):
        drafted = (
            30 * torch.nn.functional.one_hot(torch.tensor([tokens]), VOCABULARY).float()
        )
        draft = Draft(
            torch.tensor([tokens]),
            torch.tensor([3]),
            drafted,
            trusted=torch.tensor([2]),
        )
        ctx = Context([Row(Noise.for_prompt(0, [1]), [1])], temperature)
        (verdict,) = lenience.rule(spec)(
            draft, Reading(target, torch.zeros(1, 4, 1)), ctx
        )
        assert (verdict.num_accepted, verdict.next_token) == (
            accepted,
            [3, 4, 5, 0][accepted],
        )
        if spec != "block":  # which sees the window as a whole
            assert verdict.exact == [a == b for a, b in zip(tokens, [3, 4, 5])], (
                "what the strict rule says stays known"
            )
