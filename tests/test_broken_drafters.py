"""Files of drafters that are broken, or of something else: each is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from safetensors.torch import save_file
from test_drafters import random_heads
from test_eagle import CONFIG, SIZE, tensors

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.drafting.datastore import _load, build_store
from lenience.drafting.eagle import eagle_lm

INNER = 12


def refused(pair: Pair, drafter: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as told:
        pair.generate("w1", drafter=drafter, max_new_tokens=4)
    assert "\n" not in str(told.value) and str(told.value).startswith(
        drafter.replace(":", " ", 1)
    )


def medusa(**changes: Any) -> dict[str, Any]:
    """Two heads as they are published, with other tensors in some places; None leaves one out."""
    made: dict[str, Any] = {}
    for i in range(2):
        made[f"{i}.0.linear.weight"] = torch.ones(SIZE, SIZE)
        made[f"{i}.0.linear.bias"] = torch.ones(SIZE)
        made[f"{i}.1.weight"] = torch.ones(VOCABULARY, SIZE)
    made |= {name.replace("_", "."): part for name, part in changes.items()}
    return {name: part for name, part in made.items() if part is not None}


MEDUSA = {
    "a list": ([torch.ones(1)], "a list and no table"),
    "a tensor": (torch.ones(2), "a Tensor and no table"),
    "nothing": (None, "a NoneType and no table"),
    "no heads": ({}, "it has no heads"),
    "keys that are numbers": ({0: torch.ones(1)}, "it has '0'"),
    "values that are numbers": ({"0.0.linear.weight": 3}, "it has '0.0.linear.weight'"),
    "Medusa-2's": (
        {"medusa_head.0.0.linear.weight": torch.ones(1)},
        "it has 'medusa_head",
    ),
    "no bias": (medusa(**{"1_0_linear_bias": None}), "block 0 of head 1 has no bias"),
    "a head of another size": (
        medusa(**{"1_0_linear_weight": torch.ones(SIZE + 1, SIZE)}),
        "block 0 of head 1: its weight is 33 × 32, not 32 × 32",
    ),
    "a matrix of another width": (
        medusa(**{"1_1_weight": torch.ones(VOCABULARY, SIZE + 1)}),
        "head 1's matrix is 48 × 33, not 48 × 32",
    ),
    "a matrix for one head alone": (
        medusa(**{"1_1_weight": None}),
        "head 1 has no matrix",
    ),
    "a head that is missing": (
        {name.replace("1.", "2.", 1): part for name, part in medusa().items()},
        "cannot be read",
    ),
}


@pytest.mark.parametrize("which", MEDUSA)
def test_medusa_files(which: str, llama: Pair, tmp_path: Path) -> None:
    saved, match = MEDUSA[which]
    torch.save(saved, tmp_path / "medusa_lm_head.pt")
    refused(llama, f"medusa:{tmp_path}", match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "a Git LFS pointer",
        ),
        (b"not a file of torch", "not a PyTorch file"),
        (b"", "not a PyTorch file"),
    ],
)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_files_of_something_else(
    kind: str, content: bytes, match: str, llama: Pair, tmp_path: Path
) -> None:
    """Told without torch's advice to load them all the same."""
    name = "medusa_lm_head.pt" if kind == "medusa" else "pytorch_model.bin"
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    refused(llama, f"{kind}:{tmp_path}", match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"heads": 5}, "head 3 has nothing"),
        ({"heads": 0}, "0 heads"),
        ({"fingerprints": None}, "fingerprints is no table"),
        ({"metrics": []}, "metrics is no table"),
        ({"fingerprint": "x"}, "come from different training runs"),
    ],
)
def test_our_own_heads(
    changes: dict[str, Any], match: str, llama: Pair, tmp_path: Path
) -> None:
    random_heads("blockwise", 3).save(tmp_path)
    about = json.loads((tmp_path / "blockwise.json").read_text())
    (tmp_path / "blockwise.json").write_text(json.dumps(about | changes))
    refused(llama, f"blockwise:{tmp_path}", match)


def test_whole_medusa_files_are_read(llama: Pair, tmp_path: Path) -> None:
    """So that what is refused above is refused for what is changed; with and without matrices."""
    saved = medusa()
    for _ in range(2):
        torch.save(saved, tmp_path / "medusa_lm_head.pt")
        out = llama.generate("w1", drafter=f"medusa:{tmp_path}", max_new_tokens=9)
        assert out.drafted
        saved = {name: part for name, part in saved.items() if "linear" in name}


def eagle(**changes: Any) -> Callable[[Path], None]:
    """A checkpoint with other tensors, or another number of its configuration."""

    def write(folder: Path) -> None:
        made: dict[str, Any] = tensors(3)
        config = {
            **CONFIG,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        }
        for name, value in changes.items():
            if isinstance(value, torch.Tensor):
                made[name] = value
            elif value is None:
                del made[name]
            else:
                config[name] = value
        save_file(made, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))

    return write


ATTENTION = "layers.0.self_attn.q_proj.weight"
EAGLE = {
    "no head": (eagle(**{"lm_head.weight": None}), "lm_head.weight"),
    "no norm": (eagle(**{"norm.weight": None}), "norm.weight"),
    "a head of another width": (
        eagle(**{"lm_head.weight": torch.ones(30, SIZE + 1)}),
        "lm_head.weight is 30 × 33, not any × 32",
    ),
    "a norm of another width": (
        eagle(**{"norm.weight": torch.ones(1)}),
        "norm.weight is 1",
    ),
    "an attention of another width": (
        eagle(**{ATTENTION: torch.ones(SIZE, SIZE + 1)}),
        "q_proj.weight is 32 × 33, not 32 × 64",
    ),
    "an MLP of another width": (
        eagle(**{"layers.0.mlp.down_proj.weight": torch.ones(SIZE, 3)}),
        "down_proj.weight is 32 × 3",
    ),
    "a vocabulary below 0": (
        eagle(d2t=torch.full((30,), -1)),
        "d2t names a token below 0",
    ),
    "a shorter vocabulary": (
        eagle(d2t=torch.zeros(7, dtype=torch.long)),
        "d2t has no whole",
    ),
    "a vocabulary of fractions": (eagle(d2t=torch.zeros(30)), "d2t has no whole"),
    "few embeddings": (
        eagle(**{"embed_tokens.weight": torch.ones(4, SIZE)}),
        f"knows 4 tokens, and the target has {VOCABULARY}",
    ),
    "a configuration of nonsense": (eagle(num_attention_heads="four"), "config.json"),
    "another configuration": (
        eagle(intermediate_size=7),
        "gate_proj.weight is 40 × 32",
    ),
    "another kind": (eagle(speculators_model_type="dflash"), "its kind is dflash"),
    "positions of nonsense": (
        eagle(rope_scaling={"rope_type": "foo", "factor": 2.0}),
        "cannot be read",
    ),
    "no keys": (eagle(num_key_value_heads=0), "cannot be read"),
    "whole numbers": (
        eagle(**{"fc.weight": torch.ones(SIZE, 3 * SIZE, dtype=torch.long)}),
        "fc.weight has whole numbers",
    ),
    "norms of unequal parts": (
        eagle(
            **{
                "fc_norm.0.weight": torch.ones(2 * SIZE),
                "fc_norm.1.weight": torch.ones(SIZE),
            }
        ),
        "fc_norm.0 is not one of 2 equal parts of the 96",
    ),
    "norms of some layers": (
        eagle(
            **{"fc_norm.0.weight": torch.ones(48), "fc_norm.2.weight": torch.ones(48)}
        ),
        "fc_norm.1 is not one of 2 equal parts",
    ),
}


@pytest.mark.parametrize("which", EAGLE)
def test_eagle_files(which: str, llama: Pair, tmp_path: Path) -> None:
    write, match = EAGLE[which]
    write(tmp_path)
    refused(llama, f"eagle:{tmp_path}", match)


def test_a_whole_eagle_file_is_read(llama: Pair, tmp_path: Path) -> None:
    eagle(speculators_model_type="eagle3")(tmp_path)
    assert llama.generate("w1", drafter=f"eagle:{tmp_path}", max_new_tokens=9).drafted


def test_a_checkpoint_is_its_configuration_too(llama: Pair, tmp_path: Path) -> None:
    """The same tensors with another one are another drafter, to models that are kept and to
    certificates."""
    found = {}
    for name, changes in (("one", {}), ("two", {"norm_before_residual": True})):
        (tmp_path / name).mkdir()
        eagle(**changes)(tmp_path / name)
        setup = llama.decoder({"drafter": f"eagle:{tmp_path / name}"})
        lm = eagle_lm(setup.drafter.head, llama.target)
        found[name] = (
            setup.drafter.head.fingerprint,
            lm.model.model.norm_before_residual,
        )
    assert found["one"][0] != found["two"][0]
    assert [flag for _, flag in found.values()] == [False, True]


def damaged(name: str, content: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        if isinstance(content, np.ndarray):
            np.save(folder / name, content)
        else:
            (folder / name).write_text(content)

    return damage


STORES = {
    "tokens in rows": (
        damaged("tokens.npy", np.zeros((6, 2), np.int32)),
        "32-bit numbers",
    ),
    "tokens that are fractions": (
        damaged("tokens.npy", np.zeros(6, np.float32)),
        "32-bit",
    ),
    "tokens that are short": (
        damaged("tokens.npy", np.zeros(3, np.int32)),
        "different corpora",
    ),
    "suffixes that are long": (
        damaged("suffixes.npy", np.zeros(6, np.int64)),
        "32-bit",
    ),
    "an empty file": (damaged("tokens.npy", ""), "is broken"),
    "no tokenizer": (
        damaged("datastore.json", '{"tokens": 5, "documents": 1, "fingerprint": "x"}'),
        "names no tokenizer",
    ),
    "a list": (damaged("datastore.json", "[1]"), "is broken"),
}


@pytest.mark.parametrize("which", STORES)
def test_datastores(which: str, llama: Pair, tmp_path: Path) -> None:
    damage, match = STORES[which]
    build_store(iter([[1, 2, 3, 4, 5]]), llama.target.tokenizer_fingerprint, tmp_path)
    assert llama.generate(
        "w1", drafter=f"datastore:{tmp_path}", max_new_tokens=4
    ).tokens
    damage(tmp_path)
    _load.cache_clear()  # the file's time may not have moved on
    refused(llama, f"datastore:{tmp_path}", match)


def test_drafters_on_the_hub(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published files as they are, fetched by the drafter's name."""
    monkeypatch.setenv("LENIENCE_HUB", str(tmp_path))
    for kind in ("medusa", "eagle"):
        folder = tmp_path / "org" / kind
        folder.mkdir(parents=True)
        if kind == "medusa":
            torch.save(medusa(), folder / "medusa_lm_head.pt")
        else:
            eagle()(folder)
        outs = [
            llama.generate("w1", drafter=f"{kind}:{path}", max_new_tokens=12)
            for path in (folder, f"hf:org/{kind}")
        ]
        assert outs[1].drafted == outs[0].drafted > 0
        assert outs[1].tokens == outs[0].tokens
    with pytest.raises(InputError, match="is missing in LENIENCE_HUB"):
        llama.generate("w1", drafter="medusa:hf:org/none")
    with pytest.raises(InputError, match="hf:none: is not a Hub name"):
        llama.generate("w1", drafter="medusa:hf:none")
    (tmp_path / "org" / "eagle" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="eagle hf:org/eagle: cannot be read"):
        llama.generate("w1", drafter="eagle:hf:org/eagle")
