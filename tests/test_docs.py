"""The examples in README and docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{i}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(compile(code, "example", "exec"), namespace)
    assert len(namespace) > 1


def test_every_file_that_the_docs_name_exists() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(
            r"`([\w.-]+/[\w./-]+\.(?:py|md|json|svg|png))`", page.read_text()
        ):
            if not name.startswith(("run/", "RUN/")):
                assert (ROOT / name).exists(), f"{page.name} names {name}"


LINKED = re.compile(r"\[([^\]]*`[^\]]*)\]\(([^)#]+\.py)\)")
"""A link to a file of the source, with code in its text."""


def test_every_name_that_the_docs_link_stands_in_that_file() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for text, target in LINKED.findall(page.read_text()):
            source = (page.parent / target).read_text()
            for code in re.findall(r"`([^`]+)`", text):
                if code.endswith(".py") or ":" in code:  # a file, or a spec
                    continue
                for name in re.findall(r"[A-Za-z_]\w+", code.split("(")[0]):
                    made = rf"\b(def|class) {name}\b|^\s*{name} *[:=]"
                    assert re.search(made, source, re.M), (
                        f"{page.name}: {name} in {target}"
                    )
