"""Judges that look ahead: their numbers against numpy, what decoding gives them against plain
passes of transformers, and what they are fitted to against what decoding gives."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from lenience import InputError
from lenience.core.files import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.heads import lookahead
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.window_values import as_in_windows, values_drafted_on

VOCABULARY = ["a", "7", "b", "+", "9c"]


KINDS = lookahead.kinds_of(
    lambda pattern: torch.tensor(
        [bool(re.search(pattern, word)) for word in VOCABULARY]
    )
)


def by_hand(target: np.ndarray, draft: np.ndarray, token: int) -> list[float]:
    p, q = log_softmax(target), log_softmax(draft)
    first, second = np.argsort(-p)[:2]
    kinds = [
        bool(re.search(pattern, VOCABULARY[one]))
        for one in (token, first)
        for pattern in (r"[0-9]", "[a-z]")
    ]
    return [
        p[token],
        p[first],
        p[second],
        np.log((p >= p[token]).sum()),
        -(np.exp(p) * p).sum(),
        first == token,
        q[token],
        q.max(),
        -(np.exp(q) * q).sum(),
        (np.exp(p) * (p - q)).sum(),
        (np.exp(q) * (q - p)).sum(),
        q[first],
        *kinds,
    ]


def test_a_tokens_numbers_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    target, draft = 3 * rng.normal(size=(2, 6, 5))
    tokens = rng.integers(0, 5, 6)
    found = lookahead.token_values(
        torch.tensor(target), torch.tensor(draft), torch.tensor(tokens), KINDS
    )
    wanted = [by_hand(*row) for row in zip(target, draft, tokens)]
    np.testing.assert_allclose(found.numpy(), np.array(wanted, dtype=float), atol=1e-5)
    alone = lookahead.token_values(
        torch.tensor(target), None, torch.tensor(tokens), KINDS
    )
    kept = [*range(6), *range(12, 16)]
    np.testing.assert_allclose(alone.numpy(), found.numpy()[:, kept], atol=1e-6)
    impossible = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, 3.0]])
    values = lookahead.token_values(impossible, impossible, torch.tensor([1]), KINDS)
    assert values[0, 0] == lookahead.FLOOR and values.isfinite().all()


def later_by_hand(values: np.ndarray, length: int, at: int, n: int) -> list[float]:
    """What is read of the token at a place of one row's window."""
    after = [values[j] for j in range(at + 1, min(length, at + 1 + n))]
    empty = np.zeros_like(values[0])
    rows = [*after, *[empty] * (n - len(after))]
    read = [
        *values[at],
        *[1.0] * len(after),
        *[0.0] * (n - len(after)),
        *np.concatenate(rows),
    ]
    read += [*np.min(rows, 0), *np.max(rows, 0)]
    run = 0
    while run < len(after) and after[run][lookahead.AGREES]:
        run += 1
    read.append(run / n)
    wordless = [row for row in after if not row[lookahead.HAS_LETTER]]
    sure = [row for row in after if row[lookahead.BEST] >= np.log(0.9)]
    groups = (after, wordless, sure)
    own = [[row[lookahead.OWN] for row in among] for among in groups]
    read += [len(among) / n for among in groups]
    read += [
        np.mean([row[lookahead.AGREES] for row in among] or [0.0]) for among in groups
    ]
    return [
        *read,
        *(np.mean(one or [0.0]) for one in own),
        *(min([*one, 0.0]) for one in own),
    ]


@pytest.mark.parametrize("n", [1, 3, 9])
def test_what_is_read_of_the_tokens_to_come_follows_its_definition(n: int) -> None:
    rng = np.random.default_rng(n)
    values = lookahead.token_values(
        torch.tensor(4 * rng.normal(size=(3, 6, 5))),
        torch.tensor(rng.normal(size=(3, 6, 5))),
        torch.tensor(rng.integers(0, 5, (3, 6))),
        KINDS,
    )
    lengths = [6, 2, 0]
    found = lookahead.of_windows(values, torch.tensor(lengths), n)
    assert found.shape[-1] == lookahead.width(True, n)
    for b, length in enumerate(lengths):
        for at in range(length):
            wanted = later_by_hand(values[b].double().numpy(), length, at, n)
            np.testing.assert_allclose(found[b, at].numpy(), wanted, atol=1e-5)


def test_with_nothing_to_look_ahead_to_a_head_reads_the_token_alone() -> None:
    values = torch.randn(2, 4, lookahead.numbers(True))
    assert torch.equal(lookahead.of_windows(values, torch.tensor([4, 2]), 0), values)


def transformers_values(
    pair: Pair, prefix: list[int], drafted: list[int]
) -> torch.Tensor:
    """[1, W, S] by one plain pass of each model."""
    ids = torch.tensor([prefix + drafted])
    with torch.no_grad():
        logits = [
            lm.model(ids).logits[:, len(prefix) - 1 : -1]
            for lm in (pair.target, pair.draft)
        ]
    kinds = lookahead.kinds_of(pair.target.token_mask)
    return lookahead.token_values(*logits, torch.tensor([drafted]), kinds)


@pytest.fixture
def far_seeing(llama: Pair, tmp_path: Path) -> Head:
    """Random weights, on what it looks ahead to only."""
    inputs = Inputs(ahead=3)
    sizes = {role: lm.hidden_size for role, lm in llama.models.items()}
    weight = (
        torch.randn(inputs.width(sizes), generator=torch.Generator().manual_seed(2)) / 8
    )
    weight[: -lookahead.width(True, 3)] = 0
    Head(weight, 0.0, inputs, 0.5, llama.fingerprints).save(tmp_path)
    return Head(weight, 0.0, inputs, 0.5, llama.fingerprints)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_gives_a_judge_what_plain_passes_give(
    batch_size: int, far_seeing: Head, llama: Pair, tmp_path: Path
) -> None:
    prompts = [[1, 2, 3], [7, 9], [30, 4, 4, 5]]
    options = {"rule": f"judge:{tmp_path}@0.5", "window": 5, "max_new_tokens": 30}
    scored = 0
    for out in llama.generate_batch(prompts, batch_size=batch_size, **options):
        done = 0
        origins = "".join(
            "d" if one.origin.startswith("draft") else " " for one in out.trace
        )
        for kept in map(len, origins.removesuffix(" ").split(" ")):  # by each cycle
            prefix = out.prompt_tokens + out.tokens[:done]
            room = min(5, 30 - done - 1)
            drafted = (
                llama.generate(prefix, rule="draft", max_new_tokens=room).tokens
                if room
                else []
            )
            if drafted:
                values = transformers_values(llama, prefix, drafted)
                read = lookahead.of_windows(values, torch.tensor([len(drafted)]), 3)
                wanted = read[0] @ far_seeing.weight[-read.shape[-1] :]
                for i, entry in enumerate(out.trace[done : done + kept + 1]):
                    if entry.score is not None:
                        assert entry.score == pytest.approx(
                            float(wanted[i].sigmoid()), abs=1e-4
                        )
                        scored += 1
            done += kept + 1
    assert scored > 20


@pytest.mark.parametrize("models", [("target", "draft"), ("target",)])
def test_a_judge_is_fitted_to_what_decoding_gives(
    models: tuple[str, ...], built_in: Pair
) -> None:
    n, inputs = 4, Inputs(models, ahead=4)
    size = lookahead.numbers("draft" in models)
    columns = slice(None) if "draft" in models else [*range(6), *range(12, 16)]
    samples = list(
        islice(mined_samples(Journal(EMBEDDED / "run" / "journal.jsonl")), 3)
    )
    labelled = [
        [one for one in sample.mismatches[:6] if one.important is not None]
        for sample in samples
    ]
    labelled[1] = labelled[1][:2]
    for sample, mismatches, kept in zip(
        samples, labelled, values_drafted_on(built_in, samples, labelled, inputs)
    ):
        assert kept.shape == (len(mismatches), (1 + n) * size + 1)
        for row, mismatch in zip(kept, mismatches):
            prefix = sample.prompt_ids + sample.final_ids[: mismatch.position]
            start = [*prefix, mismatch.draft_token]
            with torch.no_grad():
                out = built_in.draft.model.generate(
                    torch.tensor([start]), max_new_tokens=n, do_sample=False
                )
            drafted = [mismatch.draft_token, *out[0, len(start) :].tolist()]
            if mismatch.draft_token in built_in.target.eos_ids:
                drafted = drafted[:1]
            assert row[-1] == len(drafted) - 1
            wanted = transformers_values(built_in, prefix, drafted)[0][:, columns]
            found = row[:-1].view(1 + n, size)
            np.testing.assert_allclose(found[: len(drafted)], wanted, atol=2e-3)
            assert not found[len(drafted) :].any()


def test_learning_sees_windows_that_end_anywhere() -> None:
    inputs, n = Inputs(("target",), ahead=3), 3
    size = lookahead.numbers(False)
    raw = torch.rand(400, (1 + n) * size).numpy().astype(np.float32)
    x = np.concatenate([np.ones((400, 2), np.float32), raw, np.full((400, 1), 2.0)], 1)
    read = as_in_windows(x, inputs, seed=0)
    known = read[:, 2 + size : 2 + size + n]
    assert set(known.sum(1)) == {0, 1, 2}, (
        "no further than the two tokens that there are"
    )
    np.testing.assert_allclose(read[:, : 2 + size], x[:, : 2 + size])
    values = torch.from_numpy(raw[:1]).view(1, 1 + n, size)
    length = torch.tensor([1 + int(known[0].sum())])
    wanted = lookahead.of_windows(values, length, n)[0, 0]
    np.testing.assert_allclose(read[0, 2:], wanted, atol=1e-6)


def test_a_judge_that_looks_ahead_is_fitted_and_asked(
    built_in_exported: Pair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = (
        (EMBEDDED / "run" / "journal.jsonl").read_text().splitlines(keepends=True)[:30]
    )
    (run / "journal.jsonl").write_text("".join(lines))
    (run / "run.json").write_text((EMBEDDED / "run" / "run.json").read_text())
    plan = HeadPlan(Inputs(ahead=6), run / "judge", FitConfig())
    head = fit_run(built_in_exported, run, plan)
    assert head.metrics["auc_out_of_fold"] > 0.8
    prompt = next(iter(mined_samples(Journal(run / "journal.jsonl")))).prompt_ids
    rule = f"judge:{run / 'judge'}@0.5"
    out = built_in_exported.generate(prompt, rule=rule, window=8, max_new_tokens=80)
    assert out.accepted_lenient > 0


def test_what_a_judge_cannot_look_ahead_to_is_told(
    llama: Pair, repeating: str, tmp_path
) -> None:
    with pytest.raises(InputError, match="ahead 65: must be from 0 to 64"):
        Inputs(ahead=65)
    inputs = Inputs(ahead=2)
    sizes = {role: lm.hidden_size for role, lm in llama.models.items()}
    Head(torch.zeros(inputs.width(sizes)), 0.0, inputs, 0.5, llama.fingerprints).save(
        tmp_path
    )
    with pytest.raises(InputError, match="repeat has none"):
        llama.generate("w1", rule=f"judge:{tmp_path}", drafter=repeating)
