"""A disk that is full in the middle of training: an error that names the file, and nothing lost."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lenience.core.errors import RunError
from lenience.core.files import replacing
from lenience.decoding.pair import Pair
from lenience.models.lm import save_model
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

ROOM = 4096
"""Bytes that a file may have on the full disk."""


@contextmanager
def full_disk() -> Iterator[None]:
    """Let writes beyond ROOM fail, as on a full disk (RLIMIT_FSIZE; Python ignores its signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


PLANS = {
    "eagle": {},
    "medusa": {},
    "blockwise": {},
    "model": {"layers": 1},
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_full_disk_loses_no_finished_epoch(
    kind: str, llama: Pair, tmp_path: Path
) -> None:
    prompts = [[1 + i, 1 + 7 * i % 40] for i in range(12)]
    outs = llama.generate_batch(prompts, rule="target", max_new_tokens=30)
    answers = [(out.prompt_tokens, out.tokens) for out in outs]
    plan = DrafterPlan(kind, tmp_path / "whole", epochs=4, **PLANS[kind])
    fit_to_answers(llama, answers, plan)
    again = replace(plan, out=tmp_path / "again")
    full: list[float] = []

    def fills(what: str, done: float, total: float) -> None:
        if done == 2 and total == 4 and not full:
            full.append(done)
            raise _DiskIsFull

    with pytest.raises(_DiskIsFull):
        fit_to_answers(llama, answers, again, fills)
    kept = (again.out / "training.safetensors").read_bytes()
    with full_disk(), pytest.raises(RunError) as told:
        fit_to_answers(llama, answers, again)
    path = again.out / "training.safetensors"
    assert str(told.value).startswith(f"{path}: cannot be written (")
    assert os.strerror(27) in str(told.value), "the cause"
    assert path.read_bytes() == kept, "the epochs that were finished"
    assert not list(again.out.glob("*.new"))
    seen: list[tuple[float, float]] = []
    fit_to_answers(
        llama, answers, again, lambda what, done, total: seen.append((done, total))
    )
    epochs = [done for done, total in seen if total == plan.epochs]
    assert epochs[0] == 2
    weights = sorted(plan.out.glob("*.safetensors"))
    assert weights
    for one in weights:
        assert one.read_bytes() == (again.out / one.name).read_bytes()


class _DiskIsFull(Exception):
    """What ends the first call, after two epochs."""


def test_whatever_writes_weights_names_the_file(llama: Pair, tmp_path: Path) -> None:
    with full_disk():
        with (
            pytest.raises(RunError, match=r"x\.safetensors: cannot be written"),
            replacing(tmp_path / "x.safetensors") as new,
        ):
            save_file({"a": torch.zeros(5000)}, new)
        with pytest.raises(RunError, match="draft: cannot be written"):
            save_model(llama.draft.model, llama.tokenizer, tmp_path / "draft")
    assert not (tmp_path / "x.safetensors").exists()
