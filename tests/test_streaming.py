"""Fitting to states that stay in their files: the heads are those of scikit-learn, in less memory
than the states take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from lenience.core.errors import InputError
from lenience.heads.fitting import Examples, FitConfig, fit_head
from lenience.heads.head import Inputs
from lenience.heads.streaming import (
    LogisticProblem,
    Standardised,
    StreamedRows,
    fit_together,
)


def states(
    folder: Path, m: int, width: int, files: int
) -> tuple[StreamedRows, np.ndarray]:
    """Random states in files, of like scale in no column, and what they are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(m, width)) * rng.uniform(0.1, 9, width) + rng.normal(
        size=width
    )
    x = torch.tensor(x, dtype=torch.float16)
    paths = []
    for i, part in enumerate(x.chunk(files)):
        paths.append(folder / f"{i:05d}.safetensors")
        save_file({"x": part.contiguous()}, paths[-1])
    return StreamedRows.of(paths), x.float().numpy()


def test_penalties_and_folds_are_fitted_as_each_alone(tmp_path: Path) -> None:
    rows, x = states(tmp_path, m=900, width=12, files=7)
    rng = np.random.default_rng(1)
    labels = (
        expit((x - x.mean(0)) / x.std(0) @ rng.normal(size=12)) > rng.random(900)
    ) * 1.0
    problems = [
        LogisticProblem(c, rng.random(900) < 0.8) for c in (1e-4, 1e-2, 1.0, 100.0)
    ]
    found = fit_together(
        Standardised.of(rows), (labels, np.ones_like(labels)), problems
    )
    standardised = (x - x.mean(0)) / (x.std(0) + 1e-6)
    for k, problem in enumerate(problems):
        model = LogisticRegression(C=problem.c, max_iter=5000, tol=1e-9)
        model.fit(standardised[problem.rows], labels[problem.rows])
        wanted = [*model.coef_[0], model.intercept_[0]]
        np.testing.assert_allclose(found[:, k], wanted, rtol=5e-3, atol=2e-3)


def test_soft_labels_are_each_label_as_sure_as_it_is(tmp_path: Path) -> None:
    rows, x = states(tmp_path, m=400, width=5, files=3)
    shares = np.random.default_rng(2).random(400)
    (found,) = fit_together(
        Standardised.of(rows),
        (shares, np.ones(400)),
        [LogisticProblem(1.0, np.ones(400, bool))],
    ).T
    twice = np.concatenate([(x - x.mean(0)) / x.std(0)] * 2)
    model = LogisticRegression(C=1.0, max_iter=5000, tol=1e-9)
    model.fit(twice, np.repeat([1, 0], 400), np.concatenate([shares, 1 - shares]))
    np.testing.assert_allclose(found[:-1], model.coef_[0], rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("kept", [False, True])
def test_a_head_from_files_is_the_one_from_memory(kept: bool, tmp_path: Path) -> None:
    rows, x = states(tmp_path, m=1200, width=10, files=5)
    rng = np.random.default_rng(3)
    harmless = expit(x @ rng.normal(size=10) / 9 + 2) > rng.random(1200)
    samples = np.repeat(np.arange(120), 10)
    which = rng.random(1200) < 0.7 if kept else np.ones(1200, bool)
    in_files = Examples(rows, harmless, samples).rows(which)
    in_memory = Examples(x, harmless, samples).rows(which)
    assert len(in_files) == len(in_memory)
    one, other = (fit_head(e, Inputs(), {}, FitConfig()) for e in (in_files, in_memory))
    assert one.metrics["c"] == other.metrics["c"]
    assert one.metrics["auc_out_of_fold"] == pytest.approx(
        other.metrics["auc_out_of_fold"], abs=2e-3
    )
    torch.testing.assert_close(one.weight, other.weight, rtol=2e-2, atol=2e-3)
    assert one.threshold == pytest.approx(other.threshold, abs=0.01)
    with pytest.raises(InputError, match="do not fit into memory"):
        fit_head(in_files, Inputs(), {}, FitConfig("mlp"))


LIMITED = """
import json, resource, sys
from pathlib import Path
import numpy as np, torch
from lenience.heads.fitting import Examples, FitConfig, fit_head
from lenience.heads.head import Inputs
from lenience.heads.streaming import StreamedRows
torch.set_num_threads(1)
rows = StreamedRows.of(sorted(Path(sys.argv[1]).glob("*.safetensors")))
m = len(rows)
harmless = np.load(sys.argv[1] + "/harmless.npy")
import sklearn.linear_model, sklearn.model_selection, sklearn.metrics, scipy.stats
used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.ones(m * rows.width, dtype=np.float32)
    sys.exit("all states have room")
except MemoryError:
    pass
head = fit_head(Examples(rows, harmless, np.arange(m) // 20), Inputs(), {}, FitConfig())
print(json.dumps(head.metrics["auc_out_of_fold"]))
"""


def test_more_states_than_memory_holds(tmp_path: Path) -> None:
    """150 MB of states in float32, fitted where a process may take 100 MB more than it has."""
    m, width, files = 60_000, 640, 30
    rng = np.random.default_rng(4)
    direction, harmless = rng.normal(size=width), []
    for i in range(files):
        x = rng.normal(size=(m // files, width)).astype(np.float16)
        harmless.append(expit(x @ direction / 10 + 1) > rng.random(m // files))
        save_file({"x": torch.from_numpy(x)}, tmp_path / f"{i:05d}.safetensors")
    np.save(tmp_path / "harmless.npy", np.concatenate(harmless))
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(100 << 20)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) > 0.85
