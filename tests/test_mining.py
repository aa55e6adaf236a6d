"""Algorithm 1 on a scripted model whose right labels are known by hand; runs that are killed;
features."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import lenience
from lenience import InputError
from lenience.core.noise import Noise, uniform
from lenience.core.recall import Recall, Recollection
from lenience.decoding import scheduler
from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import Continue, Dialogue, Predict
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.decoding.scheduler import LONGEST_ON_CPU
from lenience.heads.head import Inputs
from lenience.mining.forecast import forecast
from lenience.mining.search import MineConfig, Miner, SearchResult, mine, search
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.runs.record import MinedAnswers, MinedSample, MiningCost, Mismatch
from lenience.tasks import Sample, Task
from lenience.training.features import compute_features, load_features
from lenience.training.fit import HeadPlan, fit_run

# ---- a scripted model: a response is a list of numbers, 0 is EOS, and the answer is what follows
# the last 9

EOS = 0


class LastAfterNine(Task):
    name, max_new_tokens = "scripted", 20

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        parts = text.split()
        return parts[-1 - parts[::-1].index("9") + 1] if "9" in parts[:-1] else None


class ScriptedTarget:
    eos_ids = frozenset({EOS})

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(token) for token in ids if token != EOS)


def mismatch(
    position: int, target: int, draft: int, important: bool | None
) -> Mismatch:
    return Mismatch(
        position=position, target_token=target, draft_token=draft, important=important
    )


def mined(pair: Pair, task: object, folder: Path, **config) -> list[int]:
    """Mine; gives how many samples were done each time that progress was told."""
    done: list[int] = []
    mine(
        pair, task, folder, MineConfig(**config), lambda phase, n, total: done.append(n)
    )
    return done


def scripted(
    target: dict[tuple[int, ...], list[int]],
    guesses: dict[tuple[int, ...], int],
    limit: int = 20,
) -> tuple[SearchResult, list[tuple[int, ...]]]:
    """What is found where `target` says how each prefix (without the prompt) goes on, and `guesses`
    what the draft puts after a prefix, where it differs from what stands there; and the prefixes
    that the target was asked to go on from."""

    asked: list[tuple[int, ...]] = []

    def reply(question: Continue | Predict) -> list[int]:
        ids = question.ids[1:]
        if isinstance(question, Continue):
            asked.append(tuple(ids))
            return target[tuple(ids)][: question.limit]
        return [
            guesses.get(tuple(ids[:i]), ids[i])
            for i in range(question.start - 1, len(ids))
        ]

    sample = Sample("scripted", "", None)
    search = Miner(LastAfterNine(), sample, ScriptedTarget(), limit).search([100])
    question = next(search)
    while True:
        try:
            question = search.send(reply(question))
        except StopIteration as end:
            return end.value, asked


def test_labels_known_by_hand() -> None:
    # Own answer 7. Swapping 1→2 keeps the answer (adopted, and the rest is worded anew), then 5→6
    # changes it to 8 (kept),
    # then EOS after the answer is reached.
    found, asked = scripted(
        target={(): [1, 5, 9, 7, 0], (2,): [4, 5, 9, 7, 0], (2, 4, 6): [9, 8, 0]},
        guesses={(): 2, (2, 4): 6},
    )
    mismatches = [mismatch(0, 1, 2, False), mismatch(2, 5, 6, True)]
    assert found == SearchResult(
        [100], [1, 5, 9, 7, 0], [2, 4, 5, 9, 7, 0], mismatches, "7"
    )
    assert asked == [(), (2,), (2, 4, 6)]


def test_mismatches_of_an_adopted_response_are_found_afresh() -> None:
    # In the own response the draft would miss position 2; after the adopted swap at 0 it is
    # position 1 that it misses.
    found, _ = scripted(
        target={(): [1, 5, 6, 9, 7, 0], (2,): [5, 6, 9, 7, 0], (2, 3): [9, 7, 0]},
        guesses={(): 2, (1, 5): 3, (2,): 3},
    )
    assert found.mismatches == [mismatch(0, 1, 2, False), mismatch(1, 5, 3, False)]
    assert found.final_response == [2, 3, 9, 7, 0]


def test_a_swap_that_changes_the_answer_is_not_kept_for_the_next_one() -> None:
    found, asked = scripted(
        target={(): [1, 5, 9, 7, 0], (2,): [9, 8, 0], (1, 4): [9, 7, 0]},
        guesses={(): 2, (1,): 4},
    )
    assert found.mismatches == [mismatch(0, 1, 2, True), mismatch(1, 5, 4, False)]
    assert found.final_response == [1, 4, 9, 7, 0]
    assert (2,) in asked and (1, 4) in asked


def test_an_answer_that_cannot_be_parsed_is_another_one_and_the_targets_own_abstains() -> (
    None
):
    found, _ = scripted(target={(): [1, 9, 7, 0], (2,): [3, 0]}, guesses={(): 2})
    assert found.mismatches == [mismatch(0, 1, 2, True)]
    assert found.final_response == [1, 9, 7, 0]
    # neither own nor swapped answer can be parsed: None == None is not "the same"
    found, asked = scripted(target={(): [1, 3, 0]}, guesses={(): 2, (1, 3): 4})
    assert found.answer is None and found.final_response == [1, 3, 0]
    assert found.mismatches == [mismatch(0, 1, 2, None), mismatch(2, 0, 4, None)]
    assert asked == [()]


def test_eos_is_a_token_like_any_other() -> None:
    # The draft ends too early (position 2, before the answer is whole) and goes on where the target
    # ends (position 4).
    found, asked = scripted(
        target={(): [1, 9, 7, 6, 0], (1, 9, 7, 6, 3): [9, 5, 0]},
        guesses={(1, 9): EOS, (1, 9, 7, 6): 3},
    )
    # "1 9" has nothing after the 9
    assert found.mismatches == [
        mismatch(2, 7, 0, True),
        mismatch(4, 0, 3, True),
    ]
    assert found.final_response == [1, 9, 7, 6, 0]
    assert (1, 9, 0) not in asked, "nothing is continued after an EOS"


def test_the_whole_length_is_bounded_throughout() -> None:
    endless = {
        (): [1, 9, 7, 1, 1, 1, 1, 1],
        (2,): [9, 7, 1, 1, 1, 1, 1, 1, 1],
        (2, 9, 7, 1, 1, 3): [9, 7, 7, 7],
    }
    found, _ = scripted(target=endless, guesses={(): 2, (2, 9, 7, 1, 1): 3}, limit=6)
    assert len(found.target_response) == 6
    assert found.mismatches == [mismatch(0, 1, 2, False), mismatch(5, 1, 3, False)]
    assert found.final_response == [2, 9, 7, 1, 1, 3]


@given(seed=st.integers(0, 10_000), agree=st.integers(0, 9), limit=st.integers(1, 14))
def test_what_takes_no_important_token_has_the_targets_answer(
    seed: int, agree: int, limit: int
) -> None:
    """Appendix A on models that are functions of their prefixes: whoever takes the draft's token
    but where it is important has the target's answer, if there is one."""

    def says(who: str, prefix: tuple[int, ...]) -> int:
        draws = random.Random(f"{seed} {who} {prefix}")
        return draws.choice([0, 1, 2, 9, 9, 3])

    def draft(prefix: tuple[int, ...]) -> int:
        same = random.Random(f"{seed} agree {prefix}").randrange(10) < agree
        return says("target" if same else "draft", prefix)

    def written(
        choose: Callable[[tuple[int, ...]], int],
        prefix: tuple[int, ...] = (),
        most: int = limit,
    ) -> list[int]:
        tokens = list(prefix)
        while len(tokens) < most and (not tokens or tokens[-1] != EOS):
            tokens.append(choose(tuple(tokens)))
        return tokens[len(prefix) :]

    def reply(question: Continue | Predict) -> list[int]:
        ids = tuple(question.ids[1:])
        if isinstance(question, Continue):
            return written(lambda p: says("target", p), ids, len(ids) + question.limit)
        return [draft(ids[:i]) for i in range(question.start - 1, len(ids))]

    task = LastAfterNine()
    search = Miner(task, Sample("s", "", None), ScriptedTarget(), limit).search([100])
    question = next(search)
    try:
        while True:
            question = search.send(reply(question))
    except StopIteration as end:
        found: SearchResult = end.value

    def answer(tokens: list[int]) -> str | None:
        return task.answer(ScriptedTarget().decode(tokens))

    own = answer(written(lambda p: says("target", p)))
    assert found.answer == own
    if own is None:
        assert all(one.important is None for one in found.mismatches)
        return
    important = {one.position: one for one in found.mismatches if one.important}

    def leniently(prefix: tuple[int, ...]) -> int:
        return says("target", prefix) if len(prefix) in important else draft(prefix)

    assert (
        written(leniently) == found.final_response
        and answer(found.final_response) == own
    )
    if answer(written(draft)) != own:
        assert important


# ---- on real models


class ParityTask:
    """For random models: the answer is whether the first new tokens' ids, read from the text, add
    up to an odd number."""

    name, max_new_tokens = "parity", 24
    stop_strings = ()

    def samples(self, split: str):
        for i in range(60):
            last = i % 3 + (2 if split == "train" else 30)
            yield Sample(
                f"{split}-{i}", f"w{1 + i % 40} w{1 + (7 * i) % 40} w{last}", None
            )

    def answer(self, text: str) -> str | None:
        numbers = [int(word[1:]) for word in text.split()[-6:]]
        return str(sum(numbers) % 2) if len(numbers) == 6 else None

    def same(self, a: str | None, b: str | None) -> bool | None:
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        return self.answer(text) == "0"


def lines(folder: Path) -> list[dict]:
    records = list(Journal(folder / "journal.jsonl"))
    for record in records:
        del record["cost"]["seconds"]
    return records


@cache
def greedy(model: torch.nn.Module, ids: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Generate with transformers alone, once for each question."""
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=most,
        do_sample=False,
        attention_mask=torch.ones(1, len(ids)),
    )
    return tuple(out[0, len(ids) :].tolist())


def brute_force(
    pair: Pair,
    task: ParityTask,
    prompt: list[int],
    guessed: Callable[[list[int], list[int]], int | None] | None = None,
) -> tuple[list[int], list[tuple]]:
    """Algorithm 1 with plain generation from scratch for every step. `guessed` gives a drafter's
    token after a prompt and the beginning of a response; by default that of the draft model."""

    def generated(model: torch.nn.Module, ids: list[int], most: int) -> list[int]:
        return list(greedy(model, tuple(ids), most))

    def stopped(response: list[int]) -> list[int]:
        """Up to the token with which the text first holds a stop string."""
        for n in range(1, len(response)):
            if any(
                stop in pair.target.decode(response[:n]) for stop in task.stop_strings
            ):
                return response[:n]
        return response

    def answer_of(response: list[int]) -> str | None:
        text = pair.target.decode(response)
        ends = [text.index(stop) for stop in task.stop_strings if stop in text]
        return task.answer(text[: min(ends, default=len(text))])

    limit = task.max_new_tokens
    response = stopped(generated(pair.target.model, prompt, limit))
    answer, at, found = answer_of(response), 0, []
    while at < len(response):
        if guessed is None:
            guess = generated(pair.draft.model, prompt + response[:at], 1)[0]
        else:
            guess = guessed(prompt, response[:at])
        if guess not in (None, response[at]):
            swapped = [*response[:at], guess]
            if guess != 0 and len(swapped) < limit:
                swapped += generated(
                    pair.target.model, prompt + swapped, limit - len(swapped)
                )
            swapped = stopped(swapped)
            same = task.same(answer_of(swapped), answer)
            found.append(
                (at, response[at], guess, None if answer is None else not same)
            )
            response = swapped if same else response
        at += 1
    return response, found


def by_gumbel(
    pair: Pair, task: ParityTask, prompt: list[int], temperature: float, seed: int
):
    """Algorithm 1 for sampled answers (AutoJudge, appendix A): both models take the token of the
    largest log-probability plus Gumbel noise, which is the place's own; each token by a pass from
    scratch."""
    noise = Noise.for_prompt(seed, prompt)

    def says(model: torch.nn.Module, response: list[int]) -> int:
        with torch.inference_mode():
            logits = (
                model(torch.tensor([prompt + response])).logits[0, -1].double().numpy()
            )
        lanes = np.arange(1, len(logits) + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        key = np.uint64(noise.key(len(response), "token") % 2**64)
        numbers = uniform(torch.from_numpy((lanes + key).view(np.int64))).numpy()
        return int((logits / temperature - np.log(-np.log(numbers))).argmax())

    def continued(response: list[int]) -> list[int]:
        whole = list(response)
        while len(whole) < task.max_new_tokens and whole[-1:] != [0]:
            whole.append(says(pair.target.model, whole))
        return whole

    def answer(response: list[int]) -> str | None:
        return task.answer(pair.target.decode(response))

    response = continued([])
    own, at, found = answer(response), 0, []
    while at < len(response):
        guess = says(pair.draft.model, response[:at])
        if guess != response[at]:
            swapped = continued([*response[:at], guess])
            same = task.same(answer(swapped), own)
            found.append((at, response[at], guess, None if own is None else not same))
            response = swapped if same else response
        at += 1
    return response, found


@pytest.mark.parametrize(("in_flight", "seed"), [(1, 0), (3, 0), (3, 7)])
def test_sampled_answers_are_mined_under_one_noise(
    in_flight: int,
    seed: int,
    llama: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "IN_FLIGHT_ON_CPU", in_flight)
    task = ParityTask()
    mined(llama, task, tmp_path, limit=6, temperature=0.7, draw_seed=seed, batch_size=4)
    own, labels = [], set()
    for record in lines(tmp_path):
        final, found = by_gumbel(llama, task, record["prompt_ids"], 0.7, seed)
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found
        own.append(record["response_ids"])
        labels |= {important for *_, important in found}
    assert labels >= {True, False}
    prompts = [record["prompt_ids"] for record in lines(tmp_path)]
    options = {"rule": "target", "temperature": 0.7, "seed": seed, "max_new_tokens": 24}
    assert own == [out.tokens for out in llama.generate_batch(prompts, **options)]


@pytest.mark.parametrize(
    ("temperature", "name"),
    [*zip(cycle([0.0, 0.7]), sorted(CONFIGS.keys() - {"llama", "qwen2"}))],
)
def test_architectures_are_mined_by_the_book(
    name: str,
    temperature: float,
    pairs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "IN_FLIGHT_ON_CPU", 3)
    pair, task = pairs(name), ParityTask()
    mined(pair, task, tmp_path, limit=3, temperature=temperature)
    for record in lines(tmp_path):
        prompt = record["prompt_ids"]
        if temperature:
            final, found = by_gumbel(pair, task, prompt, temperature, seed=0)
        else:
            final, found = brute_force(pair, task, prompt)
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found


def test_judges_of_sampled_answers_are_bound_to_the_temperature(
    llama: Pair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mined(llama, ParityTask(), run, limit=16, temperature=0.7)
    with pytest.raises(InputError, match="was made with temperature"):
        mine(llama, ParityTask(), run, MineConfig(limit=17, temperature=0.8))
    head = fit_run(llama, run, HeadPlan(Inputs(), run / "judge"))
    assert head.temperature == 0.7
    rule = f"judge:{run / 'judge'}@0.5"
    llama.generate([3, 4], rule=rule, temperature=0.7, seed=0, max_new_tokens=8)
    for temperature in (0.0, 1.0):
        with pytest.raises(InputError, match="learned from answers at temperature"):
            llama.generate([3, 4], rule=rule, temperature=temperature)
    llama.generate(
        [3, 4], rule=f"judge:{run / 'judge'},unchecked=true@0.5", max_new_tokens=8
    )
    with pytest.raises(InputError, match="leave out --ahead"):
        fit_run(llama, run, HeadPlan(Inputs(ahead=4), run / "ahead"))
    greedy = tmp_path / "greedy"
    mined(llama, ParityTask(), greedy, limit=2)
    with pytest.raises(InputError, match="fit one judge for each"):
        fit_run(llama, run, HeadPlan(Inputs(), run / "both", also=(greedy,)))


SEARCHED: dict[tuple[tuple[str, ...], tuple[int, ...]], tuple[list[int], list]] = {}
"""What searches from scratch found, by stop strings and prompt."""


@pytest.mark.parametrize(("batch_size", "in_flight"), [(1, 1), (5, 1), (1, 3), (4, 5)])
@pytest.mark.parametrize("stops", [False, True])
def test_mining_equals_a_search_from_scratch(
    batch_size: int,
    in_flight: int,
    stops: bool,
    llama: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "IN_FLIGHT_ON_CPU", in_flight)
    task = ParityTask()
    if (
        stops
    ):  # of two tokens each, that the target says, so that a swap may complete one
        prompts = [one.prompt for one in list(task.samples("train"))[:30]]
        outs = llama.generate_batch(prompts, max_new_tokens=24)
        said = (out.tokens[14:16] for out in outs if len(out.tokens) >= 16)
        task.stop_strings = tuple(map(llama.target.decode, said))
    mined(llama, task, tmp_path, limit=8, batch_size=batch_size)
    labels, lengths = set(), set()
    for record in lines(tmp_path):
        lengths.add(len(record["final_ids"]))
        asked = (task.stop_strings, tuple(record["prompt_ids"]))
        if asked not in SEARCHED:
            SEARCHED[asked] = brute_force(llama, task, record["prompt_ids"])
        final, found = SEARCHED[asked]
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found
        labels |= {important for *_, important in found}
    assert labels >= {True, False}
    assert not stops or len(lengths) > 2


def test_only_what_changed_is_read(llama: Pair, tmp_path: Path) -> None:
    class Long(ParityTask):
        def samples(self, split: str):
            for sample in super().samples(split):
                yield Sample(
                    sample.id,
                    " ".join(["w3"] * 150) + " " + sample.prompt,
                    sample.reference,
                )

    mined(llama, Long(), tmp_path, limit=7, batch_size=3)
    assert sum(len(record["mismatches"]) for record in lines(tmp_path)) > 20
    for record in lines(tmp_path):
        # a pass reads a window and the token before it, and after a swap that was not adopted what
        # stands up to the next one;
        # only the first reads the prompt, which a fresh prefill at each swap would read again
        new = len(record["prompt_ids"]) + len(record["final_ids"])
        assert (
            record["cost"]["target_tokens"]
            <= new + (LONGEST_ON_CPU + 1) * record["cost"]["target_passes"]
        )


def again(
    prompts: list[list[int]], limit: int, times: int
) -> Dialogue[list[list[int]]]:
    """How the target goes on from prompts, asked several times."""
    answers = []
    for _ in range(times):
        for ids in prompts:
            answers.append((yield Continue(ids, limit)))
    return answers


@pytest.mark.parametrize("window", [2, 8, 32])
def test_what_was_said_before_is_recalled(
    window: int, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LONGEST_ON_CPU", window)
    prompts = [
        [3, 4, 5],
        [7],
        [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7, 6, 5, 4, 3, 2, 1, 3, 4],
    ]
    own = [
        llama.generate(ids, rule="target", max_new_tokens=60).tokens for ids in prompts
    ]
    dialogues = [again(prompts, 60, 3), again(prompts[::-1], 60, 1)]
    capacity = 60 + max(map(len, prompts))
    first, second = sorted(
        llama.converse(dialogues, size=2, capacity=capacity), key=lambda one: one.number
    )
    assert first.result == own * 3 and second.result == own[::-1]
    assert first.cost.target_passes < 2.2 * second.cost.target_passes


def test_ids_that_the_draft_lacks_are_not_read_by_it(
    checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = checkpoints("llama")
    model = AutoModelForCausalLM.from_pretrained(target)
    size = model.config.vocab_size
    torch.manual_seed(0)
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[size:] *= 8  # so that they are said
    model.save_pretrained(tmp_path / "wider")
    AutoTokenizer.from_pretrained(target).save_pretrained(tmp_path / "wider")
    pair = load_pair(str(tmp_path / "wider"), draft, dtype="float32", compile=False)
    prompts = [[3, 4, 5], [7, 8]]
    own = [
        pair.generate(ids, rule="target", max_new_tokens=40).tokens for ids in prompts
    ]
    assert any(token >= size for tokens in own for token in tokens)
    read = Session.read

    def watched(session: Session, sequences: list[list[int]], *args, **options):
        # a lookup past an embedding's end may give anything, and raise nothing
        assert all(token < session.lm.vocab_size for ids in sequences for token in ids)
        return read(session, sequences, *args, **options)

    monkeypatch.setattr(Session, "read", watched)
    (ended,) = pair.converse([again(prompts, 40, 3)], size=1, capacity=43)
    assert ended.result == own * 3


def test_the_cost_of_a_search_does_not_depend_on_its_company(llama: Pair) -> None:
    prompts = [[[3, 4, i], [i]] for i in range(2, 10)]
    found = []
    for size in (1, 3, 8):
        ended = llama.converse(
            [again(some, 30, 2) for some in prompts], size=size, capacity=40
        )
        costs = [(one.number, one.cost) for one in ended]
        found.append(
            sorted(
                (n, c.target_passes, c.target_tokens, c.draft_tokens) for n, c in costs
            )
        )
    assert found[0] == found[1] == found[2]


def test_continuations_in_flight_share_passes_whatever_the_company(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(name: str, in_flight: int, batch_size: int) -> list[tuple[int, int, int]]:
        monkeypatch.setattr(scheduler, "IN_FLIGHT_ON_CPU", in_flight)
        mined(llama, ParityTask(), tmp_path / name, limit=9, batch_size=batch_size)
        costs = [record["cost"] for record in lines(tmp_path / name)]
        return [
            (c["target_passes"], c["target_tokens"], c["unused_tokens"]) for c in costs
        ]

    alone, few, many = (cost(f"at {n}", 4, n) for n in (1, 3, 8))
    assert alone == few == many
    by_one = cost("one in flight", 1, 3)
    passes, tokens, unused = (sum(column) for column in zip(*few))
    passes_by_one, _, unused_by_one = (sum(column) for column in zip(*by_one))
    assert unused_by_one == 0 < unused < tokens
    assert passes < 0.75 * passes_by_one


def test_the_longest_end_is_looked_up_and_the_latest_of_equals() -> None:
    known = Recollection()
    for text in ([1, 2, 3, 4, 5], [9, 2, 3, 4, 6], [8, 1, 2, 3, 4, 7]):
        Recall(known, 0, []).end(text)

    def following(end: list[int], least: int = 3) -> list[int] | None:
        place = known.find(end, least)
        return None if place is None else known.following(place, 9)[0]

    assert following([2, 3, 4]) == [7] and following([0, 1, 2, 3, 4]) == [7]
    assert following([9, 2, 3, 4]) == [6]
    assert following([3, 4]) is None and following([2, 3, 4], least=4) is None


def test_what_the_draft_wanted_is_known_of_what_was_kept() -> None:
    known = Recollection()
    one = Recall(known, 0, [1, 2], [None, None])
    one.ahead = [3, 4, 5]  # 3 and 4 were proposed; 3 was kept, and 6 follows
    one.go_on([1, 2, 3, 6])
    one.ahead = [7, 8]  # 7 was kept; of what follows nothing was asked
    one.end([1, 2, 3, 6, 7, 9, 9])
    place = known.find([1, 2, 3], 3)
    assert place is not None
    assert known.following(place, 9) == ([6, 7, 9, 9], [4, 7, 8, None])


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_mining import ParityTask
from lenience.mining.search import MineConfig, mine
from lenience.decoding.loading import load_pair
pair = load_pair({target!r}, {draft!r}, dtype="float32")
def show(phase, done, total):
    print(done, flush=True)
mine(pair, ParityTask(), Path({out!r}), MineConfig(limit=40), show)
"""


def test_a_killed_run_goes_on_to_the_same_journal(
    checkpoints, llama: Pair, tmp_path: Path
) -> None:
    target, draft = checkpoints("llama")
    script = SCRIPT.format(
        tests=str(Path(__file__).parent),
        target=target,
        draft=draft,
        out=str(tmp_path / "killed"),
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if int(line) >= 5:
            os.kill(run.pid, signal.SIGKILL)
            break
    assert run.wait() == -signal.SIGKILL
    journal = tmp_path / "killed" / "journal.jsonl"
    assert 5 <= len(lines(tmp_path / "killed")) < 40
    with journal.open("ab") as file:  # what a crash in the middle of a write leaves
        file.write(b'{"id":"train-5","prom')
    for folder in ("killed", "whole"):
        mined(llama, ParityTask(), tmp_path / folder, limit=40)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    mined(llama, ParityTask(), tmp_path / "first", limit=40, first=True)
    assert [record["id"] for record in lines(tmp_path / "first")] == [
        f"train-{i}" for i in range(40)
    ]


def test_a_second_process_is_refused_and_told_which_is_the_first(
    checkpoints, llama: Pair, tmp_path: Path
) -> None:
    target, draft = checkpoints("llama")
    out = tmp_path / "run"
    script = SCRIPT.format(
        tests=str(Path(__file__).parent), target=target, draft=draft, out=str(out)
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    run.stdout.readline()
    os.kill(run.pid, signal.SIGSTOP)
    with pytest.raises(InputError, match=f"process {run.pid} is at its mining"):
        mined(llama, ParityTask(), out, limit=40)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert mined(llama, ParityTask(), out, limit=40)[-1] == 40


def test_a_sample_that_stands_twice_is_refused(llama: Pair, tmp_path: Path) -> None:
    mined(llama, ParityTask(), tmp_path, limit=3)
    journal = tmp_path / "journal.jsonl"
    first, *others = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([first, *others, first]))
    id = json.loads(first)["id"]
    with pytest.raises(InputError, match=f"sample {id} is in lines 1 and 4"):
        compute_features(llama, tmp_path, Inputs())


def test_finished_samples_are_not_done_again_and_a_torn_line_is_told(
    llama: Pair, tmp_path: Path, capsys
) -> None:
    task = ParityTask()
    mined(llama, task, tmp_path, limit=3)
    before = (tmp_path / "journal.jsonl").read_text()
    assert mined(llama, task, tmp_path, limit=3) == [3]
    assert (tmp_path / "journal.jsonl").read_text() == before
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"id": "tor')
    assert mined(llama, task, tmp_path, limit=4) == [3, 4]
    assert "torn last line" in capsys.readouterr().err
    assert (tmp_path / "journal.jsonl").read_text().startswith(before)


def test_a_journal_broken_in_its_middle_is_an_error_and_loses_nothing(
    llama: Pair, tmp_path: Path
) -> None:
    mined(llama, ParityTask(), tmp_path, limit=3)
    journal = tmp_path / "journal.jsonl"
    parts = journal.read_text().splitlines(keepends=True)
    journal.write_text(parts[0] + parts[1][:40] + "\n" + parts[2])
    before = journal.read_text()
    with pytest.raises(InputError, match=r"journal.jsonl, line 2: broken"):
        mined(llama, ParityTask(), tmp_path, limit=5)
    assert journal.read_text() == before


def test_a_run_of_other_options_or_models_is_refused(
    pairs, llama: Pair, tmp_path: Path
) -> None:
    mined(llama, ParityTask(), tmp_path, limit=1)
    with pytest.raises(InputError, match="max_new_tokens 24, not 10"):
        mined(llama, ParityTask(), tmp_path, limit=1, max_new_tokens=10)
    with pytest.raises(InputError, match="models target"):
        mined(
            Pair(llama.draft, llama.target, llama.name), ParityTask(), tmp_path, limit=1
        )
    with pytest.raises(InputError, match="another target"):
        compute_features(
            Pair(llama.draft, llama.target, llama.name), tmp_path, Inputs()
        )


def test_a_model_is_known_by_its_fingerprint_wherever_it_lies(
    checkpoints, llama: Pair, tmp_path: Path
) -> None:
    mined(llama, ParityTask(), tmp_path / "run", limit=1)
    folders = [
        shutil.copytree(folder, tmp_path / Path(folder).name)
        for folder in checkpoints("llama")
    ]
    moved = load_pair(*map(str, folders), dtype="float32")
    assert mined(moved, ParityTask(), tmp_path / "run", limit=2) == [1, 2]


def test_a_response_may_fill_the_context(llama: Pair, tmp_path: Path) -> None:
    class Long(ParityTask):
        max_new_tokens = 100

        def samples(self, split: str):
            for i in range(3):
                yield Sample(
                    f"{split}-{i}",
                    " ".join(f"w{1 + (i + j) % 40}" for j in range(240)),
                    None,
                )

    mined(llama, Long(), tmp_path, limit=3)
    for record in lines(tmp_path):
        assert len(record["prompt_ids"]) + len(record["response_ids"]) <= 256
    assert sum(len(record["mismatches"]) for record in lines(tmp_path)) > 5
    compute_features(llama, tmp_path, Inputs())


@pytest.mark.parametrize(
    ("models", "layers"),
    [
        (("target", "draft"), (None,)),
        (("target",), (None,)),
        (("draft",), (None,)),
        (("target", "draft"), (1, None)),
    ],
)
def test_features_equal_the_states_of_passes_from_scratch(
    models: tuple[str, ...], layers: tuple[int | None, ...], llama: Pair, tmp_path: Path
) -> None:
    mined(llama, ParityTask(), tmp_path, limit=4)
    inputs = Inputs(models, ("draft", "previous", "target"), layers)
    compute_features(llama, tmp_path, inputs)
    examples = load_features(tmp_path, inputs)
    x, important, sample = examples.x, ~examples.harmless, examples.samples
    row = 0
    for i, record in enumerate(lines(tmp_path)):
        for mismatch in record["mismatches"]:
            if mismatch["important"] is None:
                continue
            prefix = record["prompt_ids"] + record["final_ids"][: mismatch["position"]]
            wanted = []
            for last in ([mismatch["draft_token"]], [], [mismatch["target_token"]]):
                for model in models:
                    with torch.inference_mode():
                        hidden = getattr(llama, model).model(
                            torch.tensor([prefix + last]), output_hidden_states=True
                        )
                    wanted += [
                        hidden.hidden_states[layer or -1][0, -1].numpy()
                        for layer in (layers if model == "target" else (None,))
                    ]
            np.testing.assert_allclose(
                x[row], np.concatenate(wanted), atol=2e-4, rtol=1e-3
            )
            assert (important[row], sample[row]) == (mismatch["important"], i)
            row += 1
    assert row == len(x) > 20


def test_whole_shards_of_features_are_kept(llama: Pair, tmp_path: Path) -> None:
    mined(llama, ParityTask(), tmp_path, limit=3)
    compute_features(llama, tmp_path, Inputs())
    shard = tmp_path / "features" / str(Inputs()) / "00000.safetensors"
    before = shard.stat().st_mtime_ns
    compute_features(llama, tmp_path, Inputs())
    assert shard.stat().st_mtime_ns == before
    # left from a longer journal
    (shard.parent / "00001.safetensors").write_bytes(shard.read_bytes())
    mined(llama, ParityTask(), tmp_path, limit=4)
    compute_features(llama, tmp_path, Inputs())
    labelled = sum(
        m["important"] is not None
        for record in lines(tmp_path)
        for m in record["mismatches"]
    )
    assert len(load_features(tmp_path, Inputs())) == labelled
    journal = tmp_path / "journal.jsonl"
    journal.write_text(
        journal.read_text().replace('"important":true', '"important":false')
    )
    compute_features(llama, tmp_path, Inputs())
    assert load_features(tmp_path, Inputs()).harmless.all()


def test_a_mined_sample_of_the_built_in_task(built_in: Pair) -> None:
    """A mined sample of the built-in task: harmless swaps are in its final response, important ones
    are not."""
    task = lenience.task("wordmath")
    sample = next(iter(task.samples("train")))
    (found,) = search(built_in, task, [sample], Decoder.of(max_new_tokens=320), 1)
    record = found.to_json()
    assert (
        record["answers"]["target"]
        == record["answers"]["final"]
        == task.answer(built_in.target.decode(record["final_ids"]))
    )
    swapped = [m for m in record["mismatches"] if m["important"] is False]
    assert swapped and all(
        record["final_ids"][m["position"]] == m["draft_token"] for m in swapped
    )
    kept = [m for m in record["mismatches"] if m["important"]]
    assert all(record["final_ids"][m["position"]] == m["target_token"] for m in kept)
    json.dumps(record)


# ---- what it will take


def mined_sample(number: int, important: int, harmless: int) -> MinedSample:
    labels = [True] * important + [False] * harmless
    return MinedSample(
        id=str(number),
        prompt_ids=[1],
        response_ids=[2],
        final_ids=[2],
        mismatches=[mismatch(i, 1, 2, label) for i, label in enumerate(labels)],
        answers=MinedAnswers(target="1", final="1", reference=None),
        cost=MiningCost(
            target_passes=10, target_tokens=20, draft_tokens=30, seconds=0.5
        ),
    )


def test_a_forecast_known_by_hand() -> None:
    samples = [
        mined_sample(i, important, 4) for i, important in enumerate([1, 3, 1, 3])
    ]
    found = forecast(samples, 100)
    assert (found.pilot, found.important, found.mismatches) == (4, 2.0, 6.0)
    # s = 2 / sqrt(3), half of the interval 3.1824 * s / 2
    half = 3.182446 * (2 / 3**0.5) / 2
    assert found.important_interval == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert found.samples == 50 and found.seconds == 25.0
    assert (found.target_passes, found.target_tokens, found.draft_tokens) == (
        500,
        1000,
        1500,
    )
    assert found.samples_interval[0] == -(-100 // (2 + half))
    unsure = forecast([mined_sample(0, 0, 1), mined_sample(1, 2, 1)], 10)
    assert unsure.samples == 10 and unsure.samples_interval[1] is None
    for few in ([], samples[:1], [mined_sample(0, 0, 1)] * 3):
        with pytest.raises(InputError, match="too few for an estimate; give --limit"):
            forecast(few, 10)
