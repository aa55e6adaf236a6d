"""Rules against definitions of a few lines, and their specs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

import lenience
from lenience import InputError
from lenience.core import Context, Draft, Noise, Reading, Row, Rule, Verdict, uniform
from lenience.heads import Head, Inputs, load_head
from lenience.pair import Pair
from lenience.rules import AnyOf, Exact, Judge, Speculative, TopK

VOCABULARY = 6
windows = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n),
        hnp.arrays(np.float32, (n + 1, VOCABULARY), elements=st.floats(-9, 9, width=32), unique=True),
    )
)


def window(tokens: list[int], logits: torch.Tensor | None = None, hidden: torch.Tensor | None = None) -> Draft:
    """A draft of one row."""
    return Draft(
        torch.tensor([tokens]),
        torch.tensor([len(tokens)]),
        None if logits is None else logits[None],
        None if hidden is None else hidden[None],
    )


def reading(logits: np.ndarray, hidden: torch.Tensor | None = None) -> Reading:
    return Reading(torch.tensor(logits)[None], torch.zeros(1, len(logits), 3) if hidden is None else hidden[None])


def greedy() -> Context:
    return sampling(0, 0.0)


def sampling(seed: int, temperature: float, position: int = 0, **options) -> Context:
    return Context([Row(Noise.for_prompt(seed, [1]), [1], position)], temperature, **options)


def decide(rule: Rule, draft: Draft, read: Reading, ctx: Context) -> Verdict:
    (verdict,) = rule(draft, read, ctx)
    return verdict


@given(windows)
def test_exact_keeps_the_longest_prefix_that_the_target_would_pick(made: tuple[list[int], np.ndarray]) -> None:
    tokens, logits = made
    best = logits.argmax(-1)
    kept = 0
    while kept < len(tokens) and tokens[kept] == best[kept]:
        kept += 1
    verdict = decide(Exact(), window(tokens), reading(logits), greedy())
    assert (verdict.accepted, verdict.token) == (kept, best[kept])
    assert verdict.exact == [token == top for token, top in zip(tokens, best)]


@given(windows, st.integers(1, VOCABULARY))
def test_topk_ranks_a_token_at_its_own_position(made: tuple[list[int], np.ndarray], k: int) -> None:
    tokens, logits = made
    ok = [int((row > row[token]).sum()) < k for token, row in zip(tokens, logits)]
    kept = ok.index(False) if False in ok else len(ok)
    verdict = decide(TopK(k), window(tokens), reading(logits), greedy())
    assert (verdict.accepted, verdict.token) == (kept, logits[kept].argmax())


def test_topk_is_not_read_one_position_late() -> None:
    logits = np.array([[9, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9], [9, 0, 0, 0, 0, 0]], dtype=np.float32)
    verdict = decide(TopK(1), window([0, 0]), reading(logits), greedy())
    assert (verdict.accepted, verdict.token) == (1, 5)  # row 1 allows token 5 alone; row 2 would have allowed token 0


@given(windows)
def test_topk_1_is_exact_and_topk_of_everything_accepts_everything(made: tuple[list[int], np.ndarray]) -> None:
    tokens, logits = made
    assert decide(TopK(1), window(tokens), reading(logits), greedy()) == decide(
        Exact(), window(tokens), reading(logits), greedy()
    )
    assert decide(TopK(VOCABULARY), window(tokens), reading(logits), greedy()).accepted == len(tokens)


@given(windows, st.data(), st.integers(0, 1000), st.floats(0.3, 2))
def test_speculative_follows_its_definition(made, data, seed: int, temperature: float) -> None:
    tokens, logits = made
    n = len(tokens)
    drafted = data.draw(hnp.arrays(np.float32, (n, VOCABULARY), elements=st.floats(-9, 9, width=32)))
    ctx = sampling(seed, temperature, position=7)

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp((x.astype(np.float64) - x.max(-1, keepdims=True)) / temperature)
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(logits), softmax(drafted)
    keys = [ctx.rows[0].noise.key(7 + i, "accept") for i in range(n)]
    margins = [p[i, t] / q[i, t] - float(uniform(torch.tensor(key))) for i, (t, key) in enumerate(zip(tokens, keys))]
    if min(abs(margin) for margin in margins) < 1e-5:
        return  # float32 may fall on either side
    kept = next((i for i, margin in enumerate(margins) if margin <= 0), n)
    verdict = decide(Speculative(), window(tokens, torch.tensor(drafted)), reading(logits), ctx)
    assert verdict.accepted == kept
    if kept < n:
        assert p[kept, verdict.token] > q[kept, verdict.token] - 1e-6  # the rest is positive there


@given(windows)
def test_speculative_is_exact_when_greedy(made: tuple[list[int], np.ndarray]) -> None:
    tokens, logits = made
    drafted = torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float() * 5
    a = decide(Speculative(), window(tokens, drafted), reading(logits), greedy())
    b = decide(Exact(), window(tokens, drafted), reading(logits), greedy())
    assert (a.accepted, a.token) == (b.accepted, b.token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_token_is_never_accepted(temperature: float, tmp_path: Path) -> None:
    save_head(tmp_path)
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor([4])])
    ctx = sampling(0, temperature, processors=processors)
    logits = ctx.process(torch.zeros(1, 3, VOCABULARY), torch.tensor([[4, 4]]))
    for rule in ("topk:6", f"judge:{tmp_path}@0", "exact", "speculative"):
        draft = window([4, 4], torch.zeros(2, VOCABULARY), torch.zeros(3, 2))
        verdict = decide(lenience.rule(rule), draft, Reading(logits, torch.zeros(1, 3, 3)), ctx)
        assert verdict.accepted == 0 and verdict.token != 4
    ctx = sampling(0, 1.0, top_k=2)
    cut = torch.arange(12.0).reshape(2, 6)
    assert decide(lenience.rule("topk:6"), window([0]), reading(cut.numpy()), ctx).accepted == 0


def test_a_lenient_correction_is_the_targets_choice_when_greedy_and_its_draw_when_sampling() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2, 1e-9, 1e-9, 1e-9]] * 2, dtype=np.float32))
    assert decide(TopK(1), window([2]), reading(logits), greedy()).token == 0
    seen = np.zeros(6)
    for seed in range(4000):
        seen[decide(TopK(1), window([2]), reading(logits), sampling(seed, 1.0)).token] += 1
    np.testing.assert_allclose(seen[:3] / 4000, [0.5, 0.3, 0.2], atol=0.03)


# ---- the judge


DRAFTED = Inputs(tokens=("draft",))


def save_head(folder: Path, **about) -> None:
    """score = sigmoid(first number of the target's state + ten times the second of the draft's)."""
    given = {"fingerprints": {"target": "a", "draft": "b", "tokenizer": "c"}, "threshold": 0.5} | about
    Head(torch.tensor([1.0, 0, 0, 0, 10.0]), 0.0, DRAFTED, **given).save(folder)


def test_the_judge_reads_the_state_after_the_drafted_token(tmp_path: Path) -> None:
    save_head(tmp_path)
    logits = np.zeros((4, VOCABULARY), dtype=np.float32)
    logits[:, 5] = 1  # the target always wants token 5
    target, draft = torch.zeros(4, 3), torch.zeros(4, 2)
    target[1, 0], target[3, 0] = 1.5, 1.5  # after the first and the third drafted token
    draft[2, 1] = 0.1
    draft[3, 1] = -0.3  # third: 1.5 - 3
    verdict = decide(Judge(str(tmp_path), 0.7), window([1, 2, 3], None, draft), reading(logits, target), greedy())
    wanted = [1 / (1 + np.exp(-x)) for x in (1.5, 1.0, -1.5)]
    assert verdict.accepted == 2 and verdict.token == 5
    np.testing.assert_allclose(verdict.scores, wanted, rtol=1e-6)
    assert verdict.exact == [False] * 3


def test_the_judge_is_asked_only_where_the_strict_rule_rejects(tmp_path: Path) -> None:
    save_head(tmp_path)
    logits = np.zeros((3, VOCABULARY), dtype=np.float32)
    logits[:, 5] = 1
    draft = window([5, 1], None, torch.zeros(3, 2))
    verdict = decide(Judge(str(tmp_path), 0.9), draft, reading(logits), greedy())
    assert verdict.scores == [None, 0.5]
    assert (verdict.accepted, verdict.exact) == (1, [True, False])
    loose = decide(Judge(str(tmp_path), 0.5), draft, reading(logits), greedy())
    assert (loose.accepted, loose.token) == (2, 5)


def test_a_judge_alone_means_exact_or_judge(tmp_path: Path, llama: Pair) -> None:
    width = llama.target.hidden_size + llama.draft.hidden_size
    head = Head(torch.randn(width, generator=torch.Generator().manual_seed(1)), 0.0, DRAFTED, 0.5, llama.fingerprints)
    head.save(tmp_path)
    lenient = llama.generate([5, 9], rule=f"judge:{tmp_path}@0.5", max_new_tokens=40)
    same = llama.generate([5, 9], rule=f"exact|judge:{tmp_path}", max_new_tokens=40)
    assert lenient.tokens == same.tokens
    assert lenient.accepted_lenient > 0
    exact = llama.generate([5, 9], max_new_tokens=40)
    assert llama.generate([5, 9], rule=f"judge:{tmp_path}@1.1", max_new_tokens=40).tokens == exact.tokens
    everything = llama.generate([5, 9], rule=f"judge:{tmp_path}@0", max_new_tokens=40)
    assert {entry.origin for entry in everything.trace} <= {"draft", "draft-lenient", "bonus"}
    sampled = llama.generate([5, 9], rule=f"judge:{tmp_path}@1.1", temperature=1.0, max_new_tokens=40)
    assert sampled.tokens == llama.generate([5, 9], rule="speculative", temperature=1.0, max_new_tokens=40).tokens


def test_a_judge_refuses_other_models_unless_told(tmp_path: Path, llama: Pair) -> None:
    width = llama.target.hidden_size + llama.draft.hidden_size
    for part in ("target", "draft", "tokenizer"):
        Head(torch.zeros(width), 0.0, DRAFTED, 0.5, llama.fingerprints | {part: "other"}).save(tmp_path / part)
        with pytest.raises(InputError, match=f"another {part}"):
            llama.generate([1], rule=f"judge:{tmp_path / part}@0.5")
        assert llama.generate([1], rule=f"judge:{tmp_path / part},unchecked=true@0.5", max_new_tokens=2).tokens


@pytest.mark.parametrize("spoil, says", [
    (lambda folder: (folder / "judge.json").unlink(), "no judge.json"),
    (lambda folder: (folder / "judge.json").write_text("{"), "broken"),
    (lambda folder: (folder / "judge.json").write_text("{}"), "broken"),
    (lambda folder: (folder / "judge.safetensors").write_bytes(b"xx"), "broken"),
])  # fmt: skip
def test_a_broken_judge_is_told(spoil, says: str, tmp_path: Path) -> None:
    save_head(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=says):
        load_head(tmp_path)


# ---- specs


@pytest.mark.parametrize("spec", ["exact", "speculative", "topk:3", "judge:runs/a/judge@0.9", "judge:runs/a/judge",
                                  'judge:"a folder, with @ and |"@0.999999', "exact|judge:j@0.5", "speculative|topk:2",
                                  "judge:j,unchecked=true@0.25"])  # fmt: skip
def test_a_rules_text_is_its_spec(spec: str) -> None:
    rule = lenience.rule(spec)
    assert str(rule) == spec
    assert lenience.rule(str(rule)) == rule


@given(path=st.text(st.characters(codec="utf-8", exclude_characters='"'), min_size=1), threshold=st.floats(0, 1))
@settings(max_examples=200)
def test_any_path_and_threshold_survive_the_spec(path: str, threshold: float) -> None:
    rule = AnyOf((Exact(), Judge(path, threshold)))
    assert lenience.rule(str(rule)) == rule


def test_arguments_may_be_named() -> None:
    assert lenience.rule("topk:k=4") == TopK(4)
    assert lenience.rule("judge:path=x@0.5") == Judge("x", 0.5)


@pytest.mark.parametrize("spec, says", [
    ("tokp:3", "there is no rule 'tokp'"), ("", "there is no rule ''"), ("topk", "topk needs k"), ("topk:x", "whole number"),
    ("topk:0", "at least 1"), ("topk:3@0.5", "takes no @threshold"), ("topk:3,4", "at most 1"), ("topk:j=3", "no argument 'j'"),
    ("judge:x@high", "a number"), ("exact:1", "at most 0"), ('judge:"x@0.5', "not closed"), ("exact|", "there is no rule ''"),
    ("judge:x@0.5@0.6", "a number"), ("judge:x,unchecked=maybe@1", "true or false"), ("judge:@0.5", "must be given"), ("judge:x@90", "a score is a probability"), ("judge:x@nan", "a score is a probability"),
    ("exact|speculative", "two strict rules"),
])  # fmt: skip
def test_wrong_specs_are_told(spec: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        lenience.rule(spec)
