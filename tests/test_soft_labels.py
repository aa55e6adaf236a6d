"""Labels beside algorithm 1's, resampled ones and those of a rule's own answers; and heads fitted
to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from test_decode import plain_greedy
from test_drafters import random_heads
from test_mining import ParityTask, lines, mined

from lenience import InputError
from lenience.decoding.decoder import Binding, Decoder
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig, fit_head
from lenience.heads.head import Inputs, load_head
from lenience.mining.resampling import TEMPERATURE, resamples, shares_harmless
from lenience.runs.journal import Journal
from lenience.runs.uses import prompt_digest
from lenience.training.fit import HeadPlan, fit_run

# ---- resampling


def test_important_swaps_are_continued_by_chance(llama: Pair, tmp_path: Path) -> None:
    task = ParityTask()
    mined(llama, task, tmp_path, limit=12, resamples=2)
    drawn = {
        (one.id, one.position, one.number): one.same for one in resamples(tmp_path)
    }
    expected = {}
    for record in lines(tmp_path):
        for mismatch in record["mismatches"]:
            if not mismatch["important"] or mismatch["draft_token"] == 0:
                continue
            at = mismatch["position"]
            response = [*record["final_ids"][:at], mismatch["draft_token"]]
            for number in (1, 2):
                out = llama.generate(
                    record["prompt_ids"] + response,
                    rule="target",
                    temperature=TEMPERATURE,
                    seed=number,
                    max_new_tokens=24,
                )
                text = llama.target.decode(response + out.tokens)
                same = task.same(task.answer(text), record["answers"]["target"])
                expected[record["id"], at, number] = same is True
    assert drawn == expected
    assert set(drawn.values()) >= {True, False}


def test_what_was_resampled_is_not_drawn_again(llama: Pair, tmp_path: Path) -> None:
    task, path = ParityTask(), tmp_path / "resamples.jsonl"
    mined(llama, task, tmp_path, limit=6, resamples=2)
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:3]) + '\n{"id": "tor')  # as a crash leaves it
    mined(llama, task, tmp_path, limit=6, resamples=2)
    again = path.read_text().splitlines()
    assert again[:3] == whole[:3] and sorted(again) == sorted(whole)
    mined(llama, task, tmp_path, limit=6, resamples=3)
    assert path.read_text().splitlines()[: len(whole)] == again


def test_shares_known_by_hand(tmp_path: Path) -> None:
    labels = {"a": [True, False, None, True], "b": [True]}
    for id, important in labels.items():
        mismatches = [
            {"position": i, "target_token": 1, "draft_token": 2, "important": one}
            for i, one in enumerate(important)
        ]
        Journal(tmp_path / "journal.jsonl").write(
            {
                "id": id,
                "prompt_ids": [1],
                "response_ids": [1],
                "final_ids": [1],
                "mismatches": mismatches,
                "answers": {"target": "1", "final": "1", "reference": None},
                "cost": {
                    "target_passes": 1,
                    "target_tokens": 1,
                    "draft_tokens": 1,
                    "seconds": 1,
                },
            }
        )
    with pytest.raises(InputError, match="nothing was resampled; lenience mine"):
        shares_harmless(tmp_path)
    for number, same in enumerate((True, False, True, None), 1):
        line = {"id": "a", "position": 0, "number": number, "same": same}
        Journal(tmp_path / "resamples.jsonl").write(line)
    # at 0 two of four continuations keep a's answer, and one cannot be parsed; the others were not
    # drawn
    assert shares_harmless(tmp_path) == [2 / 4, 1.0, 0.0, 0.0]


def test_a_soft_label_counts_as_that_many_of_each_kind() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    quarters = rng.binomial(4, 1 / (1 + np.exp(-2 * x[:, 0])))
    harmless, samples = quarters > 1, np.arange(400)
    shares = (quarters / 4).astype(np.float32)
    config = FitConfig()
    head = fit_head(Examples(x, harmless, samples, shares), Inputs(), {}, config)
    hard = fit_head(Examples(x, harmless, samples), Inputs(), {}, config)
    # the same likelihood, each row written four times, with as many labels of each kind
    mean, scale = x.mean(0), x.std(0) + 1e-6
    four = np.repeat((x - mean) / scale, 4, axis=0)
    labels = (np.arange(4) < quarters[:, None]).ravel()
    model = LogisticRegression(C=head.metrics["c"] / 4, max_iter=1000).fit(four, labels)
    np.testing.assert_allclose(head.weight.numpy() * scale, model.coef_[0], rtol=0.02)
    assert not np.allclose(hard.weight.numpy(), head.weight.numpy(), rtol=0.1)


@pytest.mark.parametrize("kind", ["mlp", "adam", "adamw"])
def test_every_kind_of_head_learns_soft_labels(kind: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4000, 2)).astype(np.float32)
    # what x[:, 1] says is in the soft labels alone
    harmless, samples = rng.random(4000) < 0.5, np.arange(4000)
    shares = np.where(harmless, 1.0, 1 / (1 + np.exp(-3 * x[:, 1]))).astype(np.float32)
    config = FitConfig(kind=kind, seed=3)  # type: ignore[arg-type]

    def leans(examples: Examples) -> float:
        """How much higher a fitted head scores where x[:, 1] is above 0."""
        logits = fit_head(examples, Inputs(), {}, config).logits(torch.from_numpy(x))
        return float(logits[x[:, 1] > 0].mean() - logits[x[:, 1] < 0].mean())

    hard = Examples(x, harmless, samples)
    assert leans(replace(hard, shares=shares)) > leans(hard) + 0.5


# ---- a rule's own answers


@pytest.mark.parametrize(
    "setting",
    [
        "{judge}@0.2; window=6",
        "topk:6; drafter=medusa:{heads}; window=3",
        "topk:6; tree=dynamic:8; window=6",
        "topk:6; drafter=medusa:{heads}; tree=cartesian:3,2; window=3",
    ],
)
def test_the_first_token_that_changes_the_answer_is_important(
    setting: str, llama: Pair, judge: str, tmp_path: Path
) -> None:
    task = ParityTask()
    random_heads("medusa", 3).save(tmp_path / "heads")
    named = setting.format(judge=judge.removesuffix("@0.5"), heads=tmp_path / "heads")
    policy = Decoder.parse(named)
    mined(llama, task, tmp_path, limit=30, batch_size=7, policy=policy)
    labels = set()
    for record in lines(tmp_path):
        prompt = record["prompt_ids"]
        out = llama.generate(prompt, **policy.changed(), max_new_tokens=24)
        own = plain_greedy(llama, prompt, 24)
        answer = task.answer(llama.target.decode(own))
        assert record["response_ids"] == own
        kept = [
            i for i, entry in enumerate(out.trace) if entry.origin == "draft-lenient"
        ]
        found, final = [], out.tokens
        same = task.same(task.answer(out.text), answer)
        lost = answer is not None and not same  # also where there is no answer any more
        for at in kept:
            token = plain_greedy(llama, prompt + out.tokens[:at], 1)[0]
            important = None if same is None else False
            if lost:
                settled = out.tokens[: at + 1]
                goes_on = settled[-1] != 0 and len(settled) < 24
                more = (
                    plain_greedy(llama, prompt + settled, 24 - len(settled))
                    if goes_on
                    else []
                )
                now = task.same(
                    task.answer(llama.target.decode(settled + more)), answer
                )
                important = not now
            found.append((at, token, out.tokens[at], important))
            if lost and important:
                break
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found
        for at, token, drafted, important in found:
            final = record["final_ids"]
            assert final[:at] == out.tokens[:at]
            assert important is None or final[at] == (token if important else drafted)
        if same is not None and all(important is not None for *_, important in found):
            assert record["answers"]["final"] == answer
        labels |= {important for *_, important in found}
    assert labels >= {True, False}
    plan = HeadPlan(Inputs(ahead=2), tmp_path / "judge", FitConfig())
    if "judge" not in setting:
        part = "drafter medusa:heads" if "medusa" in setting else "tree dynamic:8"
        with pytest.raises(
            InputError, match=f"mined with {part}, and a judge that looks ahead"
        ):
            fit_run(llama, tmp_path, plan)


def test_samples_that_the_head_has_learned_from_are_left_out(
    llama: Pair, judge: str, tmp_path: Path
) -> None:
    task, head = ParityTask(), load_head(Path(judge[len("judge:") : -len("@0.5")]))
    samples = list(task.samples("train"))
    learned = [prompt_digest(llama.target.encode(one.prompt)) for one in samples[:40]]
    replace(head, prompts=tuple(learned)).save(tmp_path / "judge")
    policy = Decoder.of(rule=f"judge:{tmp_path / 'judge'}@0.2")
    mined(llama, task, tmp_path / "out", policy=policy)
    assert {record["id"] for record in lines(tmp_path / "out")} <= {
        f"train-{i}" for i in range(40, 60)
    }
    with pytest.raises(InputError, match="was made with policy"):
        mined(llama, task, tmp_path / "out")


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (
            Decoder.of(rule="target"),
            "name a rule that decodes greedily and continues as the target does",
        ),
        (
            Decoder.of(rule="ensemble:0.5"),
            "name a rule that decodes greedily and continues as the target does",
        ),
        (Decoder.of(rule="exact", temperature=1.0), "greedily"),
        (
            replace(Decoder(), bound_to=Binding("certified:run", {})),
            "compare the certified rule",
        ),
    ],
)
def test_answers_that_cannot_be_held_to_account_are_refused(
    policy: Decoder, why: str, llama: Pair, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=why):
        mined(llama, ParityTask(), tmp_path, limit=2, policy=policy)


def test_a_head_learns_from_several_runs(
    llama: Pair, judge: str, tmp_path: Path
) -> None:
    task = ParityTask()
    mined(llama, task, tmp_path / "run", limit=25, resamples=1)
    policy = Decoder.of(rule=judge.replace("@0.5", "@0.2"), window=6)
    mined(llama, task, tmp_path / "own", limit=30, policy=policy)
    plan = HeadPlan(Inputs(), tmp_path / "one", FitConfig())
    one = fit_run(llama, tmp_path / "run", plan)
    both = fit_run(
        llama,
        tmp_path / "run",
        replace(plan, out=tmp_path / "both", also=(tmp_path / "own",)),
    )
    counted = {}
    for name in ("run", "own"):
        found = [
            one for record in lines(tmp_path / name) for one in record["mismatches"]
        ]
        counted[name] = sum(one["important"] is not None for one in found)
    assert one.metrics["mismatches"] == counted["run"]
    assert both.metrics["mismatches"] == sum(counted.values())
    prompts = {
        tuple(r["prompt_ids"]) for name in counted for r in lines(tmp_path / name)
    }
    assert set(both.prompts) == {prompt_digest(list(ids)) for ids in prompts}
    soft = fit_run(
        llama, tmp_path / "run", replace(plan, out=tmp_path / "soft", soft=True)
    )
    assert soft.metrics["soft"] and not torch.equal(soft.weight, one.weight)
    # a rule's own answers are labelled as they are
    plan = replace(plan, out=tmp_path / "all", also=(tmp_path / "own",), soft=True)
    assert fit_run(llama, tmp_path / "run", plan).metrics["mismatches"] == sum(
        counted.values()
    )
    with pytest.raises(InputError, match="own: nothing was resampled"):
        fit_run(llama, tmp_path / "own", replace(plan, also=()))
