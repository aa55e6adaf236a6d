"""Rules against definitions of a few lines, and their specs."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import binomtest, chisquare
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

import lenience
from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.needs import Needs
from lenience.core.noise import Noise, uniform
from lenience.core.numeric import argmax
from lenience.core.protocols import Rule
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs, load_head
from lenience.heads.scores import by_recall, thresholds
from lenience.rules import divergence
from lenience.rules.base import Term
from lenience.rules.combine import AllOf, AnyOf, as_rule
from lenience.rules.judge import Judge
from lenience.rules.lenient import TopK
from lenience.rules.parsing import parse_rule
from lenience.rules.strict import Exact, Speculative

VOCABULARY = 6
windows = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n),
        hnp.arrays(
            np.float32,
            (n + 1, VOCABULARY),
            elements=st.floats(-9, 9, width=32),
            unique=True,
        ),
    )
)


def window(
    tokens: list[int],
    logits: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> Draft:
    """A draft of one row."""
    return Draft(
        torch.tensor([tokens]),
        torch.tensor([len(tokens)]),
        None if logits is None else logits[None],
        None if hidden is None else hidden[None],
    )


def reading(logits: np.ndarray, hidden: torch.Tensor | None = None) -> Reading:
    return Reading(
        torch.tensor(logits)[None],
        torch.zeros(1, len(logits), 3) if hidden is None else hidden[None],
    )


def greedy() -> Context:
    return sampling(0, 0.0)


def sampling(seed: int, temperature: float, position: int = 0, **options) -> Context:
    return Context(
        [Row(Noise.for_prompt(seed, [1]), [1], position)], temperature, **options
    )


def decide(rule: Rule | Term, draft: Draft, read: Reading, ctx: Context) -> Verdict:
    (verdict,) = parse_rule(rule)(draft, read, ctx)
    return verdict


@given(windows)
def test_exact_keeps_the_longest_prefix_that_the_target_would_pick(
    made: tuple[list[int], np.ndarray],
) -> None:
    tokens, logits = made
    best = logits.argmax(-1)
    kept = 0
    while kept < len(tokens) and tokens[kept] == best[kept]:
        kept += 1
    verdict = decide(Exact(), window(tokens), reading(logits), greedy())
    assert (verdict.num_accepted, verdict.next_token) == (kept, best[kept])
    assert verdict.exact == [token == top for token, top in zip(tokens, best)]


def test_topk_is_not_read_one_position_late() -> None:
    logits = np.array(
        [[9, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9], [9, 0, 0, 0, 0, 0]], dtype=np.float32
    )
    verdict = decide(TopK(1), window([0, 0]), reading(logits), greedy())
    # row 1 allows token 5 alone; row 2 would have allowed token 0
    assert (verdict.num_accepted, verdict.next_token) == (
        1,
        5,
    )


@given(windows, st.data(), st.integers(0, 1000), st.floats(0.3, 2))
def test_speculative_follows_its_definition(
    made, data, seed: int, temperature: float
) -> None:
    tokens, logits = made
    n = len(tokens)
    drafted = data.draw(
        hnp.arrays(np.float32, (n, VOCABULARY), elements=st.floats(-9, 9, width=32))
    )
    ctx = sampling(seed, temperature, position=7)

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp((x.astype(np.float64) - x.max(-1, keepdims=True)) / temperature)
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(logits), softmax(drafted)
    keys = [ctx.rows[0].noise.key(7 + i, "accept") for i in range(n)]
    margins = [
        p[i, t] / q[i, t] - float(uniform(torch.tensor(key)))
        for i, (t, key) in enumerate(zip(tokens, keys))
    ]
    if min(abs(margin) for margin in margins) < 1e-5:
        return  # float32 may fall on either side
    kept = next((i for i, margin in enumerate(margins) if margin <= 0), n)
    verdict = decide(
        Speculative(), window(tokens, torch.tensor(drafted)), reading(logits), ctx
    )
    assert verdict.num_accepted == kept
    if kept < n:
        # the rest is positive there
        assert p[kept, verdict.next_token] > q[kept, verdict.next_token] - 1e-6


@given(windows)
def test_speculative_is_exact_when_greedy(made: tuple[list[int], np.ndarray]) -> None:
    tokens, logits = made
    drafted = torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 5
    a = decide(Speculative(), window(tokens, drafted), reading(logits), greedy())
    b = decide(Exact(), window(tokens, drafted), reading(logits), greedy())
    assert (a.num_accepted, a.next_token) == (b.num_accepted, b.next_token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_is_never_accepted(
    temperature: float, tmp_path: Path
) -> None:
    save_head(tmp_path)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor([4])])
    ctx = sampling(0, temperature, processors=processors)
    logits = ctx.process(torch.zeros(1, 3, VOCABULARY), torch.tensor([[4, 4]]))
    for rule in ("topk:6", f"judge:{tmp_path}@0", "exact", "speculative"):
        draft = window([4, 4], torch.zeros(2, VOCABULARY), torch.zeros(3, 2))
        verdict = decide(
            lenience.rule(rule), draft, Reading(logits, torch.zeros(1, 3, 3)), ctx
        )
        assert verdict.num_accepted == 0 and verdict.next_token != 4
    ctx = sampling(0, 1.0, top_k=2)
    cut = torch.arange(12.0).reshape(2, 6)
    assert (
        decide(
            lenience.rule("topk:6"), window([0]), reading(cut.numpy()), ctx
        ).num_accepted
        == 0
    )


def test_a_lenient_correction_is_the_targets_choice_when_greedy_and_its_draw_when_sampling() -> (
    None
):
    logits = np.log(np.array([[0.5, 0.3, 0.2, 1e-9, 1e-9, 1e-9]] * 2, dtype=np.float32))
    assert decide(TopK(1), window([2]), reading(logits), greedy()).next_token == 0
    seen = np.zeros(6)
    for seed in range(4000):
        seen[
            decide(
                TopK(1), window([2]), reading(logits), sampling(seed, 1.0)
            ).next_token
        ] += 1
    np.testing.assert_allclose(seen[:3] / 4000, [0.5, 0.3, 0.2], atol=0.03)


# ---- training-free rules against definitions in float64


HARD = st.one_of(
    # what differs differs as a probability too
    st.integers(-9000, 9000).map(lambda thousandths: thousandths / 1000),
    # forbidden, impossible, equal, certain
    st.sampled_from([-np.inf, -100.0, 0.0, 0.0, 5.0, 60.0]),
)
hard_windows = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n),
        hnp.arrays(np.float64, (n + 1, VOCABULARY), elements=HARD)
        .map(np.float32)
        .filter(lambda x: np.isfinite(x).any(-1).all()),
        hnp.arrays(np.float64, (n, VOCABULARY), elements=HARD)
        .map(np.float32)
        .filter(lambda x: np.isfinite(x).any(-1).all()),
    )
)


def softmax(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    e = np.exp(
        (x.astype(np.float64) - x.astype(np.float64).max(-1, keepdims=True))
        / temperature
    )
    return e / e.sum(-1, keepdims=True)


def plogp(p: np.ndarray) -> np.ndarray:
    return p * np.log(np.where(p > 0, p, 1))


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(
        (plogp(p) - p * np.where(q > 0, np.log(np.where(q > 0, q, 1)), -1000)).sum()
    )


def js(p: np.ndarray, q: np.ndarray) -> float:
    return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2


def tv(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum() / 2)


def lumped(divergence, k: int):
    def of(p: np.ndarray, q: np.ndarray) -> float:
        best = np.argsort(-p, kind="stable")
        if p[best[k - 1]] - p[best[k]] < 1e-6:
            return np.nan  # which of them is taken is left open
        return divergence(*(np.append(x[best[:k]], x[best[k:]].sum()) for x in (p, q)))

    return of


def below(divergence, threshold: float):
    return lambda p, q, token: threshold - divergence(p, q)


# by its spec, what a rule asks of p (target), q (draft) and the token: accept where it is above 0,
# or at least 0 with a "≥"
DEFINITIONS = {
    "topk:1": lambda p, q, token: (
        0.5 - list(np.argsort(-p, kind="stable")).index(token)
    ),
    "topk:3": lambda p, q, token: (
        2.5 - list(np.argsort(-p, kind="stable")).index(token)
    ),
    "topk:3,margin=0.2": lambda p, q, token: min(
        2.5 - list(np.argsort(-p, kind="stable")).index(token), p[token] - p.max() + 0.2
    ),
    "topk:6,ratio=0.3": lambda p, q, token: p[token] - 0.3 * p.max(),
    "topk:6,floor=0.05": lambda p, q, token: p[token] - 0.05,
    "lenient:0.4": lambda p, q, token: p[token] - 0.4 * p.max(),
    "typical:0.3,0.5": lambda p, q, token: (
        p[token] - min(0.3, 0.5 * np.exp(plogp(p).sum()))
    ),
    "typical:0.09,0.3": lambda p, q, token: (
        p[token] - min(0.09, 0.3 * np.exp(plogp(p).sum()))
    ),
    "rollback:1.5": lambda p, q, token: p[token] - np.exp(-1.5),
    "fuzzy:kl@0.8": below(kl, 0.8),
    "fuzzy:js@0.3": below(js, 0.3),
    "fuzzy:tv@0.5": below(tv, 0.5),
    "fuzzy:kl,top=2@0.8": below(lumped(kl, 2), 0.8),
    "fuzzy:js,top=2@0.3": below(lumped(js, 2), 0.3),
    "fuzzy:tv,top=3@0.5": below(lumped(tv, 3), 0.5),
    "exact|kl:1.5,guard=0.7": lambda p, q, token: (
        1.0 if token == p.argmax() else min(0.7 - p.max(), 1.5 - kl(p, q))
    ),
    "kl:1.5,guard=1": lambda p, q, token: (
        1.0 if token == p.argmax() else 1.5 - kl(p, q)
    ),
    "fuzzy:js@0.4&topk:4": lambda p, q, token: min(
        0.4 - js(p, q), 3.5 - list(np.argsort(-p, kind="stable")).index(token)
    ),
    "fuzzy:js@0.1|topk:2": lambda p, q, token: max(
        0.1 - js(p, q), 1.5 - list(np.argsort(-p, kind="stable")).index(token)
    ),
    "topk:6,overshoot=2": lambda p, q, token: 2 * p[token] - q[token],
    "exact|fuzzy:kl,overshoot=1.5@9": lambda p, q, token: (
        1.0 if token == p.argmax() else min(9 - kl(p, q), 1.5 * p[token] - q[token])
    ),
    "random:0": lambda p, q, token: -0.5,
    "exact|random:0": lambda p, q, token: 0.5 if token == p.argmax() else -0.5,
    "random:1": lambda p, q, token: 1.0,
}


@pytest.mark.parametrize("spec", DEFINITIONS)
@given(made=hard_windows)
@settings(max_examples=60)
def test_a_rule_follows_its_definition(spec: str, made) -> None:
    tokens, logits, drafted = made
    p, q = softmax(logits), softmax(drafted)
    asked = [DEFINITIONS[spec](p[i], q[i], token) for i, token in enumerate(tokens)]
    asked = [
        -1.0 if logits[i, token] == -np.inf else value
        for i, (token, value) in enumerate(zip(tokens, asked))
    ]
    if not all(abs(value) > 1e-5 for value in asked):
        return  # float32 may fall on either side
    kept = next((i for i, value in enumerate(asked) if value < 0), len(tokens))
    verdict = decide(
        lenience.rule(spec),
        window(tokens, torch.tensor(drafted)),
        reading(logits),
        greedy(),
    )
    assert (verdict.num_accepted, verdict.next_token) == (kept, logits[kept].argmax())
    assert verdict.exact == [
        token == row.argmax() for token, row in zip(tokens, logits)
    ]


@given(hard_windows)
def test_divergences_stay_within_their_bounds(made) -> None:
    _, logits, drafted = made
    p, q = (torch.log_softmax(torch.tensor(x), -1) for x in (logits[:-1], drafted))
    assert (divergence.js(p, q) <= math.log(2)).all() and (
        divergence.tv(p, q) <= 1
    ).all()
    assert (divergence.kl(p, q) >= 0).all() and (divergence.js(p, q) >= 0).all()
    assert not divergence.kl(p, p).any() and not divergence.tv(p, p).any()
    for mine, theirs in ((divergence.kl, kl), (divergence.js, js), (divergence.tv, tv)):
        wanted = [theirs(a, b) for a, b in zip(softmax(logits[:-1]), softmax(drafted))]
        np.testing.assert_allclose(mine(p, q), wanted, rtol=2e-3, atol=2e-5)


def test_the_divergences_of_disjoint_distributions_are_the_largest() -> None:
    p = torch.tensor([[0.0, -torch.inf]])
    assert divergence.js(p, p.flip(-1)).item() == pytest.approx(math.log(2))
    assert divergence.tv(p, p.flip(-1)).item() == 1
    assert divergence.kl(p, p.flip(-1)).item() > 100


@given(made=hard_windows, seed=st.integers(0, 1000), temperature=st.floats(0.3, 2))
def test_when_sampling_rules_read_the_distributions_at_the_requests_temperature(
    made, seed: int, temperature: float
) -> None:
    tokens, logits, drafted = made
    p, q = softmax(logits, temperature), softmax(drafted, temperature)
    for spec in ("typical:0.3,0.5", "fuzzy:kl@0.8", "topk:3,margin=0.2"):
        asked = [DEFINITIONS[spec](p[i], q[i], token) for i, token in enumerate(tokens)]
        asked = [
            -1.0 if logits[i, token] == -np.inf else value
            for i, (token, value) in enumerate(zip(tokens, asked))
        ]
        if any(abs(value) < 1e-4 for value in asked):
            continue
        kept = next((i for i, value in enumerate(asked) if value < 0), len(tokens))
        ctx = sampling(seed, temperature)
        verdict = decide(
            lenience.rule(spec),
            window(tokens, torch.tensor(drafted)),
            reading(logits),
            ctx,
        )
        assert verdict.num_accepted == kept
        assert p[kept, verdict.next_token] > 0


@given(made=hard_windows, weight=st.floats(0, 1))
def test_greedy_ensembles_keep_the_mixtures_best(made, weight: float) -> None:
    tokens, logits, drafted = made
    p, q = softmax(logits), softmax(drafted)
    mixed = np.vstack([weight * p[:-1] + (1 - weight) * q, p[-1:]])
    mixed[logits == -np.inf] = -1
    if any(a - b < 1e-6 for b, a in np.sort(mixed)[:, -2:]):
        return
    best = mixed.argmax(-1)
    kept = next((i for i, token in enumerate(tokens) if token != best[i]), len(tokens))
    verdict = decide(
        lenience.rule(f"ensemble:{weight}"),
        window(tokens, torch.tensor(drafted)),
        reading(logits),
        greedy(),
    )
    assert (verdict.num_accepted, verdict.next_token) == (kept, best[kept])


# what stays with the draft in a cascade: p and q at temperature 1, TV at the request's
STAYS = {
    "chow": lambda p, q, tv, alpha: np.full(len(p), q.max() - (1 - alpha)),
    "diff": lambda p, q, tv, alpha: np.full(len(p), q.max() - (p.max() - alpha)),
    "opt": lambda p, q, tv, alpha: np.full(len(p), q.max() - (p.max() - alpha * tv)),
    "token1": lambda p, q, tv, alpha: q - (p.max() - alpha),
    "token2": lambda p, q, tv, alpha: p - (p.max() - alpha),
    "token3": lambda p, q, tv, alpha: p - (1 - alpha) * p.max(),
}


@pytest.mark.parametrize("kind", STAYS)
@given(made=hard_windows, alpha=st.floats(0, 1))
@settings(max_examples=60)
def test_greedy_cascades_keep_the_drafts_best_where_it_stays(
    kind: str, made, alpha: float
) -> None:
    tokens, logits, drafted = made
    p, q = softmax(logits), softmax(drafted)
    best = list(logits.argmax(-1))
    for i in range(len(tokens)):
        own = q[i].argmax()
        margin = STAYS[kind](p[i], q[i], float(own != best[i]), alpha)[own]
        if abs(margin) < 1e-5:
            return  # float32 may fall on either side
        if margin > 0 and logits[i, own] > -np.inf:
            best[i] = own
    kept = next((i for i, token in enumerate(tokens) if token != best[i]), len(tokens))
    verdict = decide(
        lenience.rule(f"cascade:{kind}@{alpha}"),
        window(tokens, torch.tensor(drafted)),
        reading(logits),
        greedy(),
    )
    assert (verdict.num_accepted, verdict.next_token) == (kept, best[kept])


@pytest.mark.parametrize("rule", ["ensemble:0.2", "cascade:diff,overshoot={}@1"])
@given(made=hard_windows, most=st.floats(1, 4))
@settings(max_examples=60)
def test_greedy_mixtures_emit_nothing_above_the_overshoot_but_the_targets_choice(
    rule: str, made, most: float
) -> None:
    """Neither as an accepted token nor as the correction."""
    tokens, logits, drafted = made
    p, q = softmax(logits), softmax(drafted)
    spec = rule.format(most) if "{}" in rule else f"{rule},overshoot={most}"
    draft = window(tokens, torch.tensor(drafted))
    verdict = decide(lenience.rule(spec), draft, reading(logits), greedy())
    emitted = [*verdict.drafted[: verdict.num_accepted], verdict.next_token]
    for i, token in enumerate(emitted[: len(tokens)]):
        over = q[i, token] > most * p[i, token] * (1 + 1e-4) + 1e-6
        assert not over or p[i, token] > p[i].max() - 1e-6


@given(
    exact=st.lists(st.booleans(), min_size=1, max_size=12),
    unsure=st.lists(st.booleans(), min_size=12, max_size=12),
    ahead=st.integers(1, 4),
)
def test_fly_looks_ahead(exact: list[bool], unsure: list[bool], ahead: int) -> None:
    logits = np.zeros((len(exact) + 1, VOCABULARY), np.float32)
    logits[:, 0] = 1e-3  # the target's choice
    for i, even in enumerate(unsure[: len(exact)]):
        # three of six equal ones: 3 · ln 6 / 6 = 0.896 nats
        logits[i, 0] = 1e-3 if even else 30
    tokens = [0 if same else 1 for same in exact]
    kept = 0
    while kept < len(exact) and (
        exact[kept]
        or (
            unsure[kept]
            and kept + ahead < len(exact)
            and all(exact[kept + 1 : kept + 1 + ahead])
        )
    ):
        kept += 1
    for entropy, wanted in ((0.89, kept), (0.9, [*exact, False].index(False))):
        rule = lenience.rule(f"fly:{entropy},{ahead}")
        verdict = decide(
            rule,
            window(tokens, torch.zeros(len(exact), VOCABULARY)),
            reading(logits),
            greedy(),
        )
        assert (verdict.num_accepted, verdict.next_token) == (wanted, 0)


@given(hard_windows, st.lists(st.floats(0, 3), min_size=2, max_size=4, unique=True))
@settings(max_examples=30, deadline=None)
def test_more_lenient_settings_accept_no_fewer(made, thresholds: list[float]) -> None:
    tokens, logits, drafted = made
    t = sorted(thresholds)
    ladders = [
        [f"fuzzy:{kind}@{x}" for x in t for kind in [divergence]]
        for divergence in ("kl", "js", "tv")
    ] + [
        [f"topk:{k}" for k in (1, 2, 4, 6)],
        [f"topk:5,margin={x}" for x in t],
        [f"topk:5,ratio={1 - x / 3}" for x in t],
        [f"lenient:{max(1e-3, 1 - x / 3)}" for x in t],
        [f"typical:{1 - x / 3},1" for x in t],
        [f"kl:{x}" for x in t],
        [f"kl:1,guard={x / 3}" for x in t],
        [f"fly:{3 - x},2" for x in t],
        [f"rollback:{x}" for x in t],
        [f"random:{x / 3}" for x in t],
        [f"topk:6,budget={k}" for k in (0, 1, 2, 3)],
        [f"topk:6,floor={1 - x / 3}" for x in t],
        [f"topk:6,overshoot={1 + x}" for x in t],
        [f"ensemble:0,overshoot={1 + x}" for x in t],
    ]
    for ladder in ladders:
        for ctx in (greedy(), sampling(3, 0.8)):
            kept = [
                decide(
                    lenience.rule(spec),
                    window(tokens, torch.tensor(drafted)),
                    reading(logits),
                    ctx,
                ).num_accepted
                for spec in ladder
            ]
            assert kept == sorted(kept), ladder


# ---- rules that sample


# a language of three tokens: what comes next depends on all that came before
def language(seed: int) -> dict[tuple[int, ...], np.ndarray]:
    rng = np.random.default_rng(seed)
    prefixes = (
        [()] + [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    )
    return {prefix: rng.dirichlet([2.0] * 3) for prefix in prefixes}


TARGET, DRAFT = language(1), language(9)
SEQUENCES = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]


def draw(rng: np.random.Generator, probs: np.ndarray) -> int:
    return int(rng.choice(3, p=probs))


def decode_many(rule: Rule, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of three tokens [rows, 3] whose first ones come from one window of two drafted
    tokens and the verdict on it, the rest from the target; and how many drafted ones were kept
    [rows]."""
    rng = np.random.default_rng(seed)
    drafted = []
    for _ in range(rows):
        first = draw(rng, DRAFT[()])
        drafted.append((first, draw(rng, DRAFT[first,])))
    log = {prefix: np.log(probs).astype(np.float32) for prefix, probs in TARGET.items()}
    draft_log = {
        prefix: np.log(probs).astype(np.float32) for prefix, probs in DRAFT.items()
    }
    made = Draft(
        torch.tensor(drafted),
        torch.full((rows,), 2),
        torch.tensor(np.array([[draft_log[()], draft_log[(a,)]] for a, _ in drafted])),
    )
    read = Reading(
        torch.tensor(np.array([[log[()], log[(a,)], log[(a, b)]] for a, b in drafted])),
        torch.zeros(rows, 3, 1),
    )
    # no text opens a span
    ctx = Context(
        [Row(Noise.for_prompt(seed, [i]), [i]) for i in range(rows)], 1.0, decode=str
    )
    done, kept = [], []
    for verdict in rule(made, read, ctx):
        tokens = [*verdict.drafted[: verdict.num_accepted], verdict.next_token]
        while len(tokens) < 3:
            tokens.append(draw(rng, TARGET[tuple(tokens)]))
        done.append(tokens)
        kept.append(verdict.num_accepted)
    return np.array(done), np.array(kept)


def joint(language: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """[27]: the probability of each sequence."""
    return np.array(
        [np.prod([language[s[:i]][s[i]] for i in range(3)]) for s in SEQUENCES]
    )


def counted(done: np.ndarray) -> np.ndarray:
    return np.bincount(done @ [9, 3, 1], minlength=27)


@pytest.mark.parametrize(
    "spec",
    [
        "exact",
        "speculative",
        "block",
        "lenient:1",
        "ensemble:1",
        "mentored:0",
        "topk:2,budget=0",
        "fuzzy:kl@0",
        "topk:3,begin=a,end=b",
        "speculative|random:0",
    ],
)
def test_lossless_rules_and_strict_ends_keep_the_targets_distribution(
    spec: str,
) -> None:
    rows = 6000
    done, _ = decode_many(lenience.rule(spec), rows, seed=5)
    assert chisquare(counted(done), joint(TARGET) * rows).pvalue > 1e-3


def test_a_lossy_rule_fails_the_test_that_lossless_ones_pass() -> None:
    done, _ = decode_many(lenience.rule("lenient:0.3"), 6000, seed=5)
    assert chisquare(counted(done), joint(TARGET) * 6000).pvalue < 1e-6


def many_windows(
    rule: Rule, rows: int, seed: int, window: int = 3, length: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of two tokens [rows, length], decoded window after window with the draws of the
    library; and what the target gives each of the possible ones."""
    rng = np.random.default_rng(seed)
    prefixes = [
        p for n in range(length + window + 1) for p in product(range(2), repeat=n)
    ]
    target, drafted = (
        {p: np.log(rng.dirichlet([1.0] * 2)) for p in prefixes} for _ in range(2)
    )
    all_rows = [Row(Noise.for_prompt(seed, [i])) for i in range(rows)]
    while left := [row for row in all_rows if row.position < length]:
        ctx = Context(left, 1.0, fresh_noise_per_window=rule.needs.whole_window)
        tokens, logits = torch.empty(len(left), 0, dtype=torch.long), []
        for w in range(window):
            seen = [(*row.prefix, *more) for row, more in zip(left, tokens.tolist())]
            logits.append(
                torch.tensor(np.array([drafted[p] for p in seen]), dtype=torch.float32)[
                    :, None
                ]
            )
            tokens = torch.cat([tokens, ctx.draw(logits[-1], w)], 1)
        seen = [
            [(*row.prefix, *more[:w]) for w in range(window + 1)]
            for row, more in zip(left, tokens.tolist())
        ]
        read = Reading(
            torch.tensor(np.array([[target[p] for p in row] for row in seen])).float(),
            torch.zeros(len(left), window + 1, 1),
        )
        made = Draft(tokens, torch.full((len(left),), window), torch.cat(logits, 1))
        for row, verdict in zip(left, rule(made, read, ctx)):
            row.prefix += [*verdict.drafted[: verdict.num_accepted], verdict.next_token]
            row.position = len(row.prefix)
    sequences = list(product(range(2), repeat=length))
    chances = np.array(
        [np.exp(sum(target[s[:i]][s[i]] for i in range(length))) for s in sequences]
    )
    done = np.array([row.prefix[:length] for row in all_rows])
    return np.bincount(
        done @ 2 ** np.arange(length)[::-1], minlength=len(sequences)
    ), chances


@pytest.mark.parametrize(
    "spec",
    [
        "exact",
        "speculative",
        "block",
        "lenient:1",
        "mentored:0",
        "topk:2,budget=0&fuzzy:kl@99",
        "topk:2,budget=0|fuzzy:kl@0",
        "topk:2,begin=a,end=b&typical:0,0",
    ],
)
@pytest.mark.parametrize("seed", [6, 8])
def test_what_is_lossless_stays_so_over_many_windows(spec: str, seed: int) -> None:
    rule = lenience.rule(spec)
    with patch.object(
        Context,
        "in_span",
        lambda ctx, begin, end, tokens: torch.zeros_like(tokens, dtype=torch.bool),
    ):
        counts, chances = many_windows(rule, 8000, seed)
    assert chisquare(counts, chances * 8000).pvalue > 1e-3


def test_a_rule_that_looks_ahead_draws_anew_for_each_window(llama: Pair) -> None:
    seen = []

    class Spy(Exact):
        needs = Needs(whole_window=True)

        def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> torch.Tensor:
            seen.append(ctx.fresh_noise_per_window)
            return super().accepts(draft, reading, ctx)

    llama.generate([5, 9], rule=Spy(), temperature=1.0, max_new_tokens=5)
    assert set(seen) == {True}
    assert lenience.rule("block").needs.whole_window
    assert not lenience.rule("exact").needs.whole_window


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("spec", "drafted"), [("{}", 0), ("{}", 1), ("exact|{}", 1)])
def test_random_accepts_its_share_of_what_it_is_asked(
    rate: float, spec: str, drafted: int
) -> None:
    """By itself of all tokens, matching (0) or not (1); beside `exact` of those that do not."""
    n = 4000
    logits = torch.tensor([0.9, 0.1]).log().expand(n, 2, 2)
    made = Draft(torch.full((n, 1), drafted), torch.ones(n, dtype=torch.long))
    ctx = Context([Row(Noise.for_prompt(seed, [1]), [1]) for seed in range(n)], 0.0)
    rule = lenience.rule(spec.format(f"random:{rate}"))
    verdicts = rule(made, Reading(logits, torch.zeros(n, 2, 3)), ctx)
    kept = sum(verdict.num_accepted for verdict in verdicts)
    assert binomtest(kept, n, rate).pvalue > 1e-3


def test_block_keeps_as_many_more_as_its_paper_says() -> None:
    """Sun 2024, section 2: of windows of two tokens, drafted with 2/3 and 1/3 where the target has
    1/3 and 2/3, speculative sampling keeps 10/9 on average and block verification 11/9."""
    rows, rng = 20000, np.random.default_rng(6)
    target, drafted = (
        torch.tensor(probs).log().expand(rows, -1, -1)
        for probs in ([[1 / 3, 2 / 3]] * 3, [[2 / 3, 1 / 3]] * 2)
    )
    made = Draft(
        torch.tensor(rng.random((rows, 2)) < 1 / 3).long(),
        torch.full((rows,), 2),
        drafted,
    )
    ctx = Context([Row(Noise.for_prompt(6, [i]), [i]) for i in range(rows)], 1.0)
    for name, wanted in (("speculative", 10 / 9), ("block", 11 / 9)):
        kept = [
            verdict.num_accepted
            for verdict in lenience.rule(name)(
                made, Reading(target, torch.zeros(rows, 3, 1)), ctx
            )
        ]
        assert np.mean(kept) == pytest.approx(
            wanted, abs=4 * np.std(kept) / math.sqrt(rows)
        )


def test_lenience_gives_no_token_more_than_its_factor_allows() -> None:
    factor, rows = 0.5, 6000
    done, _ = decode_many(lenience.rule(f"lenient:{factor}"), rows, seed=8)
    share = np.bincount(done[:, 0], minlength=3) / rows
    chance = np.minimum(1, TARGET[()] / (factor * DRAFT[()]))
    rest = np.maximum(TARGET[()] - DRAFT[()], 0)
    wanted = DRAFT[()] * chance + (1 - (DRAFT[()] * chance).sum()) * rest / rest.sum()
    np.testing.assert_allclose(share, wanted, atol=0.02)
    assert (wanted <= TARGET[()] / factor + 1e-12).all()


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.8])
def test_a_sampled_ensemble_is_the_mixture(weight: float) -> None:
    rows = 6000
    done, _ = decode_many(lenience.rule(f"ensemble:{weight}"), rows, seed=9)
    wanted = weight * TARGET[()] + (1 - weight) * DRAFT[()]
    assert chisquare(np.bincount(done[:, 0], minlength=3), wanted * rows).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.1, 0.45, 0.8])
@pytest.mark.parametrize("kind", STAYS)
def test_a_sampled_cascade_has_its_distribution(kind: str, alpha: float) -> None:
    p, q = TARGET[()], DRAFT[()]
    stays = STAYS[kind](p, q, tv(p, q), alpha) >= 0
    wanted = q * stays + p * q[~stays].sum()
    done, _ = decode_many(lenience.rule(f"cascade:{kind}@{alpha}"), 6000, seed=9)
    first = np.bincount(done[:, 0], minlength=3)
    assert chisquare(first, wanted * 6000).pvalue > 1e-3


def test_a_cascade_reads_its_conditions_at_temperature_1() -> None:
    """At temperature 0.5 the draft's largest probability is 0.8 and not 0.67."""
    logits = np.log(np.array([[0.5, 0.5], [0.5, 0.5]], np.float32))
    drafted = torch.log(torch.tensor([[2 / 3, 1 / 3]]))
    for alpha, least in ((0.25, 0), (0.4, 1)):
        rule = lenience.rule(f"cascade:chow@{alpha}")
        kept = [
            decide(rule, window([0], drafted), reading(logits), sampling(seed, 0.5))
            for seed in range(200)
        ]
        # speculative sampling accepts with 0.5 / 0.8
        assert all(verdict.num_accepted for verdict in kept) == bool(least)


@pytest.mark.parametrize(("alpha", "stays"), [(1.0, True), (0.5, False)])
def test_opt_allows_more_where_the_models_are_further_apart(
    alpha: float, stays: bool
) -> None:
    """The target is surer by 0.2, and the distance is 0.3."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.2, 0.4])
    logits = np.log(np.array([p, p], np.float32))
    draft = window([2], torch.log(torch.tensor(q[None])).float())
    rule = lenience.rule(f"cascade:opt@{alpha}")
    verdicts = [
        decide(rule, draft, reading(logits), sampling(seed, 1.0)) for seed in range(60)
    ]
    assert all(verdict.num_accepted for verdict in verdicts) == stays


@pytest.mark.parametrize("most", [1.0, 1.3, 2.0, 9.0])
def test_an_overshoot_caps_what_an_ensemble_and_random_acceptance_produce(
    most: float,
) -> None:
    """No token has more than `most` times its probability under the target."""
    p, q = TARGET[()], DRAFT[()]
    kept = np.minimum(q, most * p)
    left = 1 - kept.sum()
    rest = np.maximum(p - q, 0)
    for spec, after in ((f"ensemble:0,overshoot={most}", rest / rest.sum()),
                        (f"random:1,overshoot={most}", p)):  # fmt: skip
        done, _ = decode_many(lenience.rule(spec), 6000, seed=9)
        first = np.bincount(done[:, 0], minlength=3)
        assert chisquare(first, (kept + left * after) * 6000).pvalue > 1e-3


@pytest.mark.parametrize("kind", ["chow", "token2"])
def test_a_sampled_cascade_keeps_its_floor_and_its_overshoot(kind: str) -> None:
    """Tokens below the floor have the target's mass alone; capped ones at most C times it, and what
    is left is spread as the target is."""
    p, q = TARGET[()], DRAFT[()]
    alpha = 1.0  # all tokens stay
    floor = float(np.sort(p)[1]) - 1e-3
    stays = p >= floor
    wanted = q * stays + p * q[~stays].sum()
    rule = lenience.rule(f"cascade:{kind},floor={floor}@{alpha}")
    done, _ = decode_many(rule, 6000, seed=9)
    first = np.bincount(done[:, 0], minlength=3)
    # a drafted token below the floor is never accepted, so its mass is drawn anew
    kept = np.minimum(q, wanted) * stays
    rest = np.maximum(wanted - q, 0)
    expected = kept + (1 - kept.sum()) * rest / rest.sum()
    possible = expected > 0
    assert not first[~possible].any()
    assert chisquare(first[possible], expected[possible] * 6000).pvalue > 1e-3
    rule = lenience.rule(f"cascade:{kind},overshoot=1.2@{alpha}")
    done, _ = decode_many(rule, 6000, seed=9)
    first = np.bincount(done[:, 0], minlength=3)
    capped = np.minimum(q, 1.2 * p)
    wanted = capped + p * (1 - capped.sum())
    kept = np.minimum(np.minimum(q, wanted), 1.2 * p)
    rest = np.maximum(wanted - q, 0)
    expected = kept + (1 - kept.sum()) * rest / rest.sum()
    assert chisquare(first, expected * 6000).pvalue > 1e-3


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.35, 0.6])
def test_fuzzys_sequences_stay_within_the_sum_of_its_divergences(
    threshold: float,
) -> None:
    """The output's distribution is the draft's where the divergence is below the threshold and the
    target's elsewhere, so over two drafted tokens the total variation is at most 2 T, and KL(target
    ‖ output) at most 2 T (the chain rule)."""
    rows = 6000
    done, _ = decode_many(lenience.rule(f"fuzzy:tv@{threshold}"), rows, seed=10)
    near = {
        prefix: tv(TARGET[prefix], DRAFT[prefix]) < threshold
        for prefix in [(), (0,), (1,), (2,)]
    }
    mixed = {
        prefix: DRAFT[prefix] if near.get(prefix) else TARGET[prefix]
        for prefix in TARGET
    }
    if not near[()]:  # after a rejection the target goes on
        mixed = TARGET
    assert chisquare(counted(done), joint(mixed) * rows).pvalue > 1e-3
    assert np.abs(joint(mixed) - joint(TARGET)).sum() / 2 <= 2 * threshold
    noise = math.sqrt(27 / rows)
    assert (
        np.abs(counted(done) / rows - joint(TARGET)).sum() / 2 <= 2 * threshold + noise
    )


@given(
    hnp.arrays(
        np.float64, (2, 5), elements=st.one_of(st.just(0.0), st.floats(0.01, 1))
    ).filter(lambda x: x.sum(-1).all()),
    st.one_of(st.just(0.0), st.floats(0.001, 3)),
    st.integers(0, 100),
)
@settings(max_examples=100, deadline=None)
def test_mentored_decoding_accepts_most_within_its_divergence(
    weights, most: float, seed: int
) -> None:
    p, q = weights / weights.sum(-1, keepdims=True)
    found = divergence.mentor(torch.tensor(p), torch.tensor(q), most).numpy()
    assert (
        found.sum() == pytest.approx(1, abs=1e-7)
        and (found >= 0).all()
        and not found[p == 0].any()
    )
    assert kl(p, found) <= most + 1e-7
    rng = np.random.default_rng(seed)
    for _ in range(30):  # nothing else that stays within it accepts more
        other = rng.dirichlet([0.5] * 5) * (p > 0)
        if rng.random() < 0.5:
            other = found * rng.uniform(0.8, 1.25, 5)
        other = other / other.sum() if other.sum() else p
        low, high = 0.0, 1.0
        for _ in range(
            50
        ):  # as far from the target towards it as the divergence allows
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if kl(p, (1 - middle) * p + middle * other) <= most
                else (low, middle)
            )
        other = (1 - low) * p + low * other
        assert np.minimum(other, q).sum() <= np.minimum(found, q).sum() + 1e-6


def test_mentored_decodes_its_distribution_and_has_no_greedy_form(llama: Pair) -> None:
    rows = 6000
    done, kept = decode_many(lenience.rule("mentored:0.1"), rows, seed=11)
    wanted = divergence.mentor(
        torch.tensor(TARGET[()]), torch.tensor(DRAFT[()]), 0.1
    ).numpy()
    assert chisquare(np.bincount(done[:, 0], minlength=3), wanted * rows).pvalue > 1e-3
    assert (kept > 0).mean() == pytest.approx(
        np.minimum(wanted, DRAFT[()]).sum(), abs=0.02
    )
    with pytest.raises(InputError, match="no greedy form"):
        llama.generate([1], rule="mentored:0.1")


# ---- the judge


DRAFTED = Inputs(tokens=("draft",))


def save_head(folder: Path, **about) -> None:
    """score = sigmoid(first number of the target's state + ten times the second of the draft's)."""
    given = {
        "fingerprints": {"target": "a", "draft": "b", "tokenizer": "c"},
        "threshold": 0.5,
    } | about
    Head(torch.tensor([1.0, 0, 0, 0, 10.0]), 0.0, DRAFTED, **given).save(folder)


def test_the_judge_reads_the_state_after_the_drafted_token(tmp_path: Path) -> None:
    save_head(tmp_path)
    logits = np.zeros((4, VOCABULARY), dtype=np.float32)
    logits[:, 5] = 1  # the target always wants token 5
    target, draft = torch.zeros(4, 3), torch.zeros(4, 2)
    target[1, 0], target[3, 0] = 1.5, 1.5  # after the first and the third drafted token
    draft[2, 1] = 0.1
    draft[3, 1] = -0.3  # third: 1.5 - 3
    verdict = decide(
        Judge(str(tmp_path), 0.7),
        window([1, 2, 3], None, draft),
        reading(logits, target),
        greedy(),
    )
    wanted = [1 / (1 + np.exp(-x)) for x in (1.5, 1.0, -1.5)]
    assert verdict.num_accepted == 2 and verdict.next_token == 5
    np.testing.assert_allclose(verdict.scores, wanted, rtol=1e-6)
    assert verdict.exact == [False] * 3


def test_a_logit_bounds_scores_that_are_one_as_probabilities(tmp_path: Path) -> None:
    save_head(tmp_path)
    target = torch.zeros(3, 3)
    target[1:, 0] = torch.tensor([45.0, 39.0])  # their probabilities are 1 in float64
    logits = np.zeros((3, VOCABULARY), dtype=np.float32)
    logits[:, 5] = 1
    draft = window([1, 2], None, torch.zeros(3, 2))
    for rule, kept in (
        (Judge(str(tmp_path), logit=40.0), 1),
        (Judge(str(tmp_path), logit=38.0), 2),
        (Judge(str(tmp_path), 1.0), 0),
    ):
        verdict = decide(rule, draft, reading(logits, target), greedy())
        assert verdict.num_accepted == kept


def test_a_recall_stands_for_its_threshold(tmp_path: Path) -> None:
    scores, important = np.arange(40) / 40, np.arange(40) < 20
    metrics = {
        "thresholds": thresholds(scores, important),
        "by_recall": by_recall(scores, important),
    }
    save_head(tmp_path, metrics=metrics)
    for recall, rejected in ((0.5, 10), (0.87, 18), (0.999, 20), (1.0, 20)):
        rule = Judge(str(tmp_path), recall=recall)
        # the lowest of ascending scores that is accepted
        assert int((scores >= rule.bound).argmax()) == rejected
        assert rule == lenience.rule(f"judge:{tmp_path}@recall={recall}").terms[-1]
    with pytest.raises(InputError, match=r"no threshold for recall 0.123; it has 0.5,"):
        _ = Judge(str(tmp_path), recall=0.123).bound
    # a head of an earlier version lists ten
    save_head(tmp_path / "old", metrics={"thresholds": metrics["thresholds"]})
    assert Judge(str(tmp_path / "old"), recall=0.9).bound == pytest.approx(17 / 40)
    with pytest.raises(InputError, match=r"no threshold for recall 0.87"):
        _ = Judge(str(tmp_path / "old"), recall=0.87).bound


def test_the_judge_is_asked_only_where_the_strict_rule_rejects(tmp_path: Path) -> None:
    save_head(tmp_path)
    logits = np.zeros((3, VOCABULARY), dtype=np.float32)
    logits[:, 5] = 1
    draft = window([5, 1], None, torch.zeros(3, 2))
    verdict = decide(Judge(str(tmp_path), 0.9), draft, reading(logits), greedy())
    assert verdict.scores == [None, 0.5]
    assert (verdict.num_accepted, verdict.exact) == (1, [True, False])
    loose = decide(Judge(str(tmp_path), 0.5), draft, reading(logits), greedy())
    assert (loose.num_accepted, loose.next_token) == (2, 5)
    # where it rejects nothing, there is nothing to ask: not even states
    verdict = decide(
        Judge(str(tmp_path), 0.9), window([5, 5]), reading(logits), greedy()
    )
    assert (verdict.num_accepted, verdict.next_token) == (2, 5)
    assert (verdict.scores, verdict.exact) == ([None, None], [True, True])


@given(
    seed=st.integers(0, 1000),
    threshold=st.floats(0.05, 0.95),
    by=st.floats(0.1, 3),
    digits=st.sets(st.integers(0, VOCABULARY - 1)),
)
@settings(max_examples=60)
def test_a_judge_is_surer_where_it_is_told_to_be(
    judge_folder: Path, seed: int, threshold: float, by: float, digits: set[int]
) -> None:
    """Where the drafted token or the target's own is one of some."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, VOCABULARY)).astype(np.float32)
    states = torch.from_numpy(rng.normal(size=(5, 3)).astype(np.float32))
    drafted = rng.integers(0, VOCABULARY, 4).tolist()
    ctx = greedy()
    ctx.token_mask = lambda pattern: torch.tensor(
        [pattern == r"\d" and token in digits for token in range(VOCABULARY)]
    )
    rule = Judge(str(judge_folder), threshold, strict=r"\d", by=by)
    draft = window(drafted, None, torch.zeros(5, 2))
    verdict = decide(rule, draft, reading(logits, states), ctx)
    kept = 0
    for i, token in enumerate(drafted):
        own = int(logits[i].argmax())
        least = np.log(threshold / (1 - threshold)) + by * (
            token in digits or own in digits
        )
        if token != own and float(states[i + 1, 0]) < least:
            break
        kept += 1
    assert verdict.num_accepted == kept


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surer")
    save_head(folder)
    return folder


def test_the_tokens_that_a_judge_is_surer_of_are_told_by_their_text(
    built_in: Pair,
) -> None:
    mask = built_in.target.token_mask(r"\d|[-+*/=]")
    texts = [built_in.target.tokenizer.decode([id]) for id in range(len(mask))]
    wanted = {
        id for id, text in enumerate(texts) if any(c in "0123456789-+*/=" for c in text)
    }
    assert set(mask.nonzero()[:, 0].tolist()) == wanted and 20 < len(wanted) < len(mask)


def test_a_judge_alone_means_exact_or_judge(tmp_path: Path, llama: Pair) -> None:
    width = llama.target.hidden_size + llama.draft.hidden_size
    head = Head(
        torch.randn(width, generator=torch.Generator().manual_seed(1)),
        0.0,
        DRAFTED,
        0.5,
        llama.fingerprints,
    )
    head.save(tmp_path)
    lenient = llama.generate([5, 9], rule=f"judge:{tmp_path}@0.5", max_new_tokens=40)
    same = llama.generate([5, 9], rule=f"exact|judge:{tmp_path}", max_new_tokens=40)
    assert lenient.tokens == same.tokens
    assert lenient.accepted_lenient > 0
    exact = llama.generate([5, 9], max_new_tokens=40)
    assert (
        llama.generate(
            [5, 9], rule=f"judge:{tmp_path}@{math.nextafter(1, 2)}", max_new_tokens=40
        ).tokens
        == exact.tokens
    )
    everything = llama.generate([5, 9], rule=f"judge:{tmp_path}@0", max_new_tokens=40)
    assert {entry.origin for entry in everything.trace} <= {
        "draft",
        "draft-lenient",
        "bonus",
    }
    sampled = llama.generate(
        [5, 9],
        rule=f"judge:{tmp_path}@{math.nextafter(1, 2)}",
        temperature=1.0,
        max_new_tokens=40,
        seed=0,
    )
    drawn = {"rule": "speculative", "temperature": 1.0, "max_new_tokens": 40, "seed": 0}
    assert sampled.tokens == llama.generate([5, 9], **drawn).tokens


def test_a_judge_refuses_other_models_unless_told(tmp_path: Path, llama: Pair) -> None:
    width = llama.target.hidden_size + llama.draft.hidden_size
    for part in ("target", "draft", "tokenizer"):
        Head(
            torch.zeros(width), 0.0, DRAFTED, 0.5, llama.fingerprints | {part: "other"}
        ).save(tmp_path / part)
        with pytest.raises(InputError, match=f"another {part}"):
            llama.generate([1], rule=f"judge:{tmp_path / part}@0.5")
        assert llama.generate(
            [1], rule=f"judge:{tmp_path / part},unchecked=true@0.5", max_new_tokens=2
        ).tokens


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda folder: (folder / "judge.json").unlink(), "no judge.json"),
        (lambda folder: (folder / "judge.json").write_text("{"), "broken"),
        (lambda folder: (folder / "judge.json").write_text("{}"), "broken"),
        (lambda folder: (folder / "judge.safetensors").write_bytes(b"xx"), "broken"),
    ],
)
def test_a_broken_judge_is_told(spoil, says: str, tmp_path: Path) -> None:
    save_head(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=says):
        load_head(tmp_path)


# ---- specs


@pytest.mark.parametrize(
    "spec",
    [
        "exact",
        "speculative",
        "topk:3",
        "judge:runs/a/judge@0.9",
        "judge:runs/a/judge",
        'judge:"a folder, with @ and |"@0.999999',
        "exact|judge:j@0.5",
        "speculative|topk:2",
        "judge:j,unchecked=true@0.25",
        "judge:j@recall=0.98",
        "judge:j,floor=0.1@logit=-11.427134",
        'judge:j,strict="\\d|[-+*/=]",by=2.5@0.25',
    ],
)
def test_a_rules_text_is_its_spec(spec: str) -> None:
    rule = lenience.rule(spec)
    assert str(rule) == spec
    assert lenience.rule(str(rule)) == rule


@given(
    path=st.text(st.characters(codec="utf-8", exclude_characters='"'), min_size=1),
    threshold=st.floats(0, 1),
)
@settings(max_examples=200)
def test_any_path_and_threshold_survive_the_spec(path: str, threshold: float) -> None:
    rule = AnyOf((AllOf((Exact(),)), AllOf((Judge(path, threshold),))))
    assert lenience.rule(str(rule)) == rule


def test_arguments_may_be_named() -> None:
    assert lenience.rule("topk:k=4") == as_rule(TopK(4))
    assert lenience.rule("judge:path=x@0.5") == as_rule(Judge("x", 0.5))
    surer = as_rule(Judge("x", 0.5, strict="a|b", by=2.0))
    assert lenience.rule('judge:x@0.5,strict="a|b",by=2') == surer, (
        "also after the threshold"
    )


@pytest.mark.parametrize(
    "spec, says",
    [
        ("tokp:3", "there is no rule 'tokp'"),
        ("", "a rule is missing"),
        ("topk", "topk needs k"),
        ("topk:x", "whole number"),
        ("topk:0", "at least 1"),
        ("topk:3,k=3", "topk's k is given twice"),
        ("topk:3@0.5", "takes no @threshold"),
        ("topk:3,4", "at most 1"),
        ("topk:j=3", "no argument 'j'"),
        ("judge:x@high", "a number"),
        ("exact:1", "at most 0"),
        ('judge:"x@0.5', "not closed"),
        ("exact|", "a rule is missing"),
        ("judge:x@0.5@0.6", "a number"),
        ("judge:x,unchecked=maybe@1", "true or false"),
        ("judge:@0.5", "must be given"),
        ("judge:x@90", "a score is a probability"),
        ("judge:x@nan", "a number"),
        ("judge:x@recall=2", "recall 2: must be in"),
        ("judge:x@recall=", "recall must be a number"),
        ("judge:x@precision=0.5", "takes no @precision"),
        ("judge:x,recall=0.5@0.5", "no argument 'recall'"),
        ("topk:3@logit=2", "takes no @logit"),
        ("judge:x@0.5,strict=a", "give both"),
        ("judge:x@0.5,by=2", "give both"),
        ("judge:x@0.5,strict=a,by=-1", "by -1: must be 0 or more"),
        ('judge:x@0.5,strict="(",by=1', "no regular expression"),
        ("exact|speculative", "two strict rules"),
    ],
)
def test_wrong_specs_are_told(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        lenience.rule(spec)


@pytest.mark.parametrize("mark", list("@,|&=;+> "))
def test_a_path_with_marks_of_specs_is_read_back(mark: str) -> None:
    """As journals and certificates hold a rule's own text."""
    for rule in (Judge(f"runs/a{mark}b/judge", 0.9), Judge(f"{mark}judge")):
        assert parse_rule(str(rule)).terms == (rule,), str(rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5,), (1, 1), (2, 3, 7), (1, 0, 4), (3, 5, 1000), (1, 9, 49152)]
)
def test_the_largest_of_each_row_is_the_one_that_torch_finds(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Among equal ones the first, a NaN before everything, and through a strided view too."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    several = values.clone()
    several[..., 1::3] = 9.0
    holed = values.clone()
    holed[..., -1:] = torch.nan
    nothing = torch.full(shape, -torch.inf, dtype=dtype)
    for case in (values, several, holed, nothing, several.transpose(0, -1)):
        found = argmax(case)
        assert found.dtype == torch.int64 and torch.equal(found, case.argmax(-1))
    learned = values.clone().requires_grad_()
    assert torch.equal(argmax(learned), values.argmax(-1))
