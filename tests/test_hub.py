"""Heads on the Hub, in whose place a folder serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_cli import run

from lenience import InputError
from lenience.certification.certificate import head_paths, is_certified
from lenience.core.files import EMBEDDED
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.evaluation.cards import push
from lenience.heads.head import load_head


@pytest.fixture
def fitted(judge: str) -> str:
    """The folder of a judge."""
    return judge.removeprefix("judge:").partition("@")[0]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENIENCE_HUB", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_pushed_head_decodes_as_the_one_in_its_folder(
    fitted: str, llama: Pair, hub: Path
) -> None:
    done = run("push", fitted, "org/a-judge", "--license", "apache-2.0", "--json")
    assert json.loads(done.stdout) == {
        "head": "hf:org/a-judge",
        "at": str(hub / "org/a-judge"),
    }
    there, here = (
        llama.generate([5, 9], rule=f"judge:{path}@0.4", max_new_tokens=40)
        for path in ("hf:org/a-judge", fitted)
    )
    assert there.trace == here.trace
    decoder = Decoder.of(rule="judge:hf:org/a-judge@0.4")
    assert head_paths(decoder, hub) == {"hf:org/a-judge": "hf:org/a-judge"}
    assert not is_certified(str(decoder.rule))


def test_the_card_says_what_the_head_is(fitted: str, hub: Path) -> None:
    push(Path(fitted), "org/a-judge", "apache-2.0", private=False)
    text = (hub / "org/a-judge/README.md").read_text()
    _, front, body = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["license"] == "apache-2.0" and about["library_name"] == "lenience"
    head = load_head(fitted)
    assert f"judge:hf:org/a-judge@{head.threshold:.6g}" in body
    for value in head.fingerprints.values():
        assert value in body
    assert "There is none: what it loses was not bounded." in body
    assert 'lenience.load_pair("TARGET", "DRAFT")' in body
    (Path(fitted).parent / "run.json").write_text(
        (EMBEDDED / "run/run.json").read_text()
    )
    push(Path(fitted), "org/built-in", "apache-2.0", private=False)
    assert "lenience.load_pair()\n" in (hub / "org/built-in/README.md").read_text()


@pytest.mark.parametrize("name", ["judge", "org/", "../x", "org/na me", "a/b/c"])
def test_a_wrong_name_is_refused(name: str, fitted: str, hub: Path) -> None:
    with pytest.raises(InputError, match="write org/name"):
        push(Path(fitted), name, None, private=True)
    with pytest.raises(InputError):
        load_head(f"hf:{name}")


def test_what_is_not_there_is_told(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hf:org/none: is missing"):
        load_head("hf:org/none")
    with pytest.raises(InputError, match="holds no head"):
        push(tmp_path, "org/none", None, private=False)
