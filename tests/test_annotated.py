"""Judge Decoding's data: which tokens are erroneous, the states that the judge reads, and decoding
with it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import last_json, run

from lenience import InputError
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs
from lenience.training.annotated import (
    Annotated,
    annotated_states,
    marked_answers,
    read_annotated,
)

INPUTS = Inputs(("target",), ("draft",), (-1,))


def row(wrong: str, begin: int, end: int, correct: str = " w1 w2") -> Annotated:
    return Annotated("w5 w9", correct, wrong, (begin, end), "f, line 1")


def test_tokens_before_the_error_are_right_and_those_after_it_are_left_out(
    llama: Pair,
) -> None:
    wrong = " w3 w44 w5 w6"
    prompt, (right, bad) = marked_answers(
        llama.target, row(wrong, wrong.index("44"), wrong.index(" w6"))
    )
    assert prompt == [5, 9]
    assert (right.ids, right.wrong) == ([1, 2], [False, False])
    assert (bad.ids, bad.wrong) == ([3, 44, 5], [False, True, True])


@pytest.mark.parametrize("layer", [-1, 1, 2, None])
def test_the_states_are_those_of_transformers(llama: Pair, layer: int | None) -> None:
    """hidden_states[k] is what the k-th layer gives, and the last entry what the final norm makes
    of the last one."""
    made = row(" w3 w4", 4, 6)
    (x, wrong), *_ = annotated_states(
        llama.target, [made], Inputs(("target",), ("draft",), (layer,))
    )
    whole = torch.tensor([[5, 9, 3, 4]])
    norms = []
    hook = llama.target.model.model.norm.register_forward_pre_hook(
        lambda _, args: norms.append(args[0])
    )
    with torch.inference_mode():
        out = llama.target.model(whole, output_hidden_states=True)
    hook.remove()
    wanted = {
        None: out.hidden_states[-1],
        1: out.hidden_states[1],
        2: norms[0],
        -1: norms[0],
    }[layer]
    np.testing.assert_allclose(x[2:], wanted[0, 2:], atol=1e-4)
    assert wrong.tolist() == [False, False, False, True]


def test_decoding_reads_the_layer_that_the_judge_names(
    llama: Pair, tmp_path: Path
) -> None:
    size = llama.target.hidden_size
    whole_weight = torch.randn(2 * size, generator=torch.Generator().manual_seed(3))
    known = {
        part: value for part, value in llama.fingerprints.items() if part != "draft"
    }
    for name, layers in {"1": (1,), "-1": (-1,), "1,norm": (1, None)}.items():
        weight, folder = whole_weight[: size * len(layers)], tmp_path / name
        Head(weight, 0.0, Inputs(("target",), ("draft",), layers), 0.5, known).save(
            folder
        )
        out = llama.generate(
            [5, 9], rule=f'judge:"{folder}"', window=4, max_new_tokens=30
        )
        asked = [
            (i, entry)
            for i, entry in enumerate(out.trace)
            if entry.origin == "draft-lenient"
        ]
        assert asked
        for i, entry in asked:
            with torch.inference_mode():
                norms = []
                hook = llama.target.model.model.norm.register_forward_pre_hook(
                    lambda _, args, norms=norms: norms.append(args[0])
                )
                whole = llama.target.model(
                    torch.tensor([[5, 9, *out.tokens[: i + 1]]]),
                    output_hidden_states=True,
                )
                hook.remove()
            after = {
                -1: norms[0],
                1: whole.hidden_states[1],
                None: whole.hidden_states[-1],
            }
            state = torch.cat([after[layer][0, -1] for layer in layers])
            assert entry.score == pytest.approx(
                float(torch.sigmoid(state @ weight)), abs=1e-4
            )
    with pytest.raises(InputError, match="different layers"):
        llama.decoder({"rule": f"judge:{tmp_path / '1'}|judge:{tmp_path / '-1'}"})
    Head(weight[:size], 0.0, Inputs(("target",), ("draft",), (9,)), 0.5, known).save(
        tmp_path / "9"
    )
    with pytest.raises(InputError, match=r"layer 9: target .* has 2"):
        llama.generate([5], rule=f"judge:{tmp_path / '9'}")


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", "line 2: JSONDecodeError"),
        ("[]", "line 2: TypeError"),
        ('{"question": "w1"}', "line 2: KeyError 'correct'"),
        (
            '{"question": "w1", "correct": "w1", "wrong": "w2", "error": [0, 9]}',
            "is no span of the 2 characters",
        ),
        (
            '{"question": "w1", "correct": "w1", "wrong": "w2", "error": [1, 1]}',
            "is no span",
        ),
        (
            '{"question": "w1", "correct": "", "wrong": "w2", "error": [0, 1]}',
            "must be texts",
        ),
        (
            '{"question": "w1", "correct": "w1", "wrong": "w2  w3", "error": [2, 3]}',
            "holds no token",
        ),
        (
            '{"question": 5, "correct": "w1", "wrong": "w2", "error": [0, 1]}',
            "line 2: a prompt is text",
        ),
        (
            '{"question": "w1", "correct": "zz", "wrong": "w2", "error": [0, 1]}',
            "line 2: .*lacks: 'zz'",
        ),
        (
            '{"question": "zz", "correct": "w1", "wrong": "w2", "error": [0, 1]}',
            "line 2: ",
        ),
    ],
)
def test_broken_rows_are_told_by_their_line(
    line: str, says: str, llama: Pair, tmp_path: Path
) -> None:
    good = '{"question": "w1", "correct": "w1", "wrong": "w2", "error": [0, 2]}'
    (tmp_path / "f.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(InputError, match=says.replace("[", r"\[")):
        list(
            annotated_states(llama.target, read_annotated(tmp_path / "f.jsonl"), INPUTS)
        )


def test_the_command_fits_and_the_judge_decodes(checkpoints, tmp_path: Path) -> None:
    target, draft = checkpoints("llama")
    rng, path = random.Random(0), tmp_path / "errors.jsonl"
    with path.open("w") as file:
        for _ in range(40):  # w40 is always an error
            words = [f"w{rng.randint(1, 39)}" for _ in range(8)]
            wrong = " ".join([*words[:4], "w40", *words[4:]])
            at = wrong.index("w40")
            file.write(
                json.dumps(
                    {
                        "question": "w5 w9",
                        "correct": " ".join(words),
                        "wrong": wrong,
                        "error": [at, at + 3],
                    }
                )
                + "\n"
            )
    pair = ["--target", target, "--draft", draft]
    # the judge reads the target alone
    alone = ("--target", target)
    told = last_json(run("fit", "--from", "annotated", path, *alone, "--json"))
    assert (
        told["auc_out_of_fold"] > 0.95
        and told["important"] == 40
        and told["head"] == "adamw"
    )
    about = json.loads((tmp_path / "errors" / "judge" / "judge.json").read_text())
    assert about["inputs"]["layers"] == [-1] and "draft" not in about["fingerprints"]
    assert about["threshold"] == told["threshold"] == 0.5
    other = last_json(
        run("fit", "--from", "annotated", path, *pair, "--recall", 0.9, "--json")
    )
    by_recall = {row["recall"]: row["threshold"] for row in other["thresholds"]}
    assert other["threshold"] == by_recall[0.9] != 0.5
    rule = f"judge:{tmp_path / 'errors' / 'judge'}@0.5"
    out = last_json(
        run(
            "generate", "w5 w9", "--rule", rule, *pair, "--max-new-tokens", 20, "--json"
        )
    )
    assert len(out["tokens"]) > 0
