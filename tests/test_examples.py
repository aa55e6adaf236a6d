"""The scripts and the notebook of examples/ run as they stand."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "generate.py": "accepted only by the judge: ['",
    "batch.py": "streaming:",
    "own_task.py": "judge@0.99: ",
    "custom_rule.py": "distance 0.9: ",
    "certify.py": "certified: judge@0.999",
}
"""Something that each script prints."""
WITH_SERVERS = {"certify_server.py"}
"""Scripts that are run by test_endpoints.py."""


def test_each_script_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS) | WITH_SERVERS


@pytest.mark.parametrize("name", SAYS)
def test_the_script_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), "cell", "exec"), namespace)
    assert "passes of the target" in capsys.readouterr().out
