"""Every kind of causal language model that transformers knows is decoded as transformers does, or
refused by name. What became of each stands in the results file, and on docs/models.md."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import BertConfig, BertLMHeadModel

from lenience import InputError
from lenience.models import lm as lm_module
from lenience.models.copied_cache import CopiedCache
from lenience.models.lm import LM
from lenience.models.memory import token_bytes
from lenience.models.session import Session, check_trees, check_windows

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import architectures

KEPT = json.loads(architectures.RESULTS.read_text())
STATUS = {row["kind"]: row["status"] for row in KEPT["kinds"]}
KINDS = sorted(architectures.KINDS)
WITH_STATES = (
    "bamba",
    "falcon_h1",
    "inkling2_text",
    "jamba",
    "kimi_linear",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "zaya",
    "zamba2",
)
"""One kind of each sort of state: recurrences, convolutions, both, several in a layer, beside
attention or in the same layer."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_the_same_or_refused(kind: str) -> None:
    with architectures.quiet():
        found = architectures.survey(kind)
    same_version = KEPT["transformers"] == transformers.__version__
    assert found.status in ("same", "refused", "not built"), found
    if same_version:
        assert found.status == STATUS[kind], found


@pytest.mark.parametrize("kind", ["deepseek_v4", "minimax", "qwen4_exp_text"])
def test_a_cache_that_only_the_model_can_continue_is_copied(kind: str) -> None:
    with architectures.quiet():
        lm = LM(architectures.tiny_model(kind), architectures.tokenizer(), kind)
    with pytest.warns(UserWarning, match="each cycle takes two calls of the model"):
        check_windows(lm)
    assert isinstance(Session(lm).cache, CopiedCache)
    read_at_random(lm)
    (size,) = token_bytes(lm).values()
    assert size > 0
    with pytest.raises(InputError, match="keeps a state, which follows one path"):
        check_trees(lm, "--tree chain")


@pytest.mark.parametrize("kind", WITH_STATES)
@pytest.mark.parametrize("long_chunk", [128, 1], ids=["in chunks", "in steps"])
def test_states_after_any_readings_are_the_models_own(
    kind: str, long_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that share any part with what the row holds, against a pass over the whole."""
    monkeypatch.setattr(lm_module, "LONG_CHUNK", long_chunk)
    with architectures.quiet():
        model = architectures.tiny_model(kind)
        lm = LM(model, architectures.tokenizer(), kind)
        check_windows(lm)
    assert lm.has_states and not lm.copies_cache, "its states are not followed"
    read_at_random(lm)


def read_at_random(lm: LM) -> None:
    """Read sequences that share any part with what a row holds, in two rows of which one is a copy
    at times. Compare each with a pass over the whole."""
    model = lm.model
    rng = random.Random(0)
    session = Session(lm, 2, 8)
    rows: list[list[int]] = [[], []]
    for _ in range(60):
        row = rng.randrange(2)
        held = rows[row]
        del held[rng.randint(0, len(held)) :]
        held += [rng.randint(3, 90) for _ in range(rng.randint(1, 5))]
        del held[architectures.CONTEXT - 1 :]
        n = rng.randint(1, len(held))
        if rng.random() < 0.2:
            session.copy(row, 1 - row)
            rows[1 - row] = list(session.tokens()[1 - row])
        got = session.read([held], n, rows=[row]).logits[0]
        with torch.no_grad():
            own = model(torch.tensor([held])).logits[0, -n:]
        torch.testing.assert_close(got, own, atol=2e-5, rtol=1e-4)


def test_an_encoder_without_a_causal_mask_is_refused() -> None:
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
    )
    lm = LM(BertLMHeadModel(config), architectures.tokenizer(), "bert")
    with pytest.raises(InputError, match="attends to earlier tokens alone"):
        check_windows(lm)


def test_the_page_names_every_kind() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    named = set(page.replace("`", " ").replace(":", " ").split())
    assert set(STATUS) <= named
