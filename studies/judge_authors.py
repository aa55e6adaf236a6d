"""Probes of Judge Decoding (Bachmann 2025) on annotated answers by several authors, for any target.

    python studies/judge_authors.py OUT --target MODEL --annotated FILE [--weaker MODEL]
        [--quantization int8] [--layers 10,20,30,norm] [--probes 150] [--max-new-tokens 128]

FILE has the rows that `lenience fit --from annotated` reads, with a field `author`;
benchmarks/real_inputs.py makes one for the target of docs/real.md. Answers are compared by their
last number. Heads are linear, trained at a decay of 0.01, and score questions out of fold. Their
threshold is the paper's, 0.5.

Writes OUT/judge_authors.json and prints it. Each probe's result is kept in OUT, from which a second
call resumes:

- `layers`: the AUC of a head on the target's state after each of some layers;
- `authors`: for each author, the AUC of a head that learned from the other authors alone, and of
  one that learned from all; and for the author's right solutions, the share of tokens accepted and
  the number accepted before the first rejection, by strict verification and with each head;
- `first_objection`: whether the first rejection in an answer with an error is at the error, before
  it or after it;
- `self_correction`: how often the target's answer is right if it continues a solution from just
  after an error, from the same place of the right solution, and from the question alone;
- `quantized`: the AUC of heads that learned from the states of the target, or of its weights in 8
  bits (torchao), on the states of either;
- `weaker`: how many tokens of the target's own right answers a weaker model accepts, strictly, and
  how often each of the two models is right on these questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from judge_decoding import aucs, run_length
from judge_probes import FOLDS, out_of_fold, shares, standardised
from numpy.typing import NDArray
from rich.progress import track

from lenience import load_pair
from lenience.core.files import write_json
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig, Hyperparameters, fit_stopped
from lenience.models.lm import LM
from lenience.models.pass_cache import States
from lenience.models.session import Session
from lenience.tasks.finding import answers
from lenience.training.annotated import marked_answers, read_annotated

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

THRESHOLD = 0.5
LAST_NUMBER = answers("last-number", None)
ANSWERS = ("correct", "wrong")


@dataclass(frozen=True)
class Tokens:
    """Tokens of annotated answers, one row per token. The wrong answer ends with its error."""

    states: NDArray
    """[m, L, H]: the target's states after each token, by layer."""
    own: NDArray
    """[m]: True where the token is the target's own most probable one."""
    wrong: NDArray
    """[m]: True where the token is erroneous."""
    rows: NDArray
    """[m]: index of the annotated row."""
    of_wrong: NDArray
    """[m]: True for the tokens of the wrong answer."""

    def examples(self, layer: int) -> Examples:
        """Return the standardised states of a layer, labelled; annotated rows are the samples."""
        return standardised(Examples(self.states[:, layer], ~self.wrong, self.rows))


def read_tokens(lm: LM, path: Path, layers: Sequence[int | None]) -> Tokens:
    """Read the answers of an annotated file with the target."""
    parts: dict[str, list[NDArray]] = {}
    session_states = States(tuple(layers))
    rows = read_annotated(path)
    for index, row in enumerate(track(rows, "reading the answers")):
        prompt, marked = marked_answers(lm, row)
        session = Session(lm, states=session_states)
        for name, answer in zip(ANSWERS, marked):
            n = len(answer.ids)
            reading = session.read([prompt + answer.ids], n + 1)
            # the last state before the answer predicts its first token
            own = reading.greedy_tokens[0, :-1].numpy() == np.array(answer.ids)
            states = reading.hidden[0, 1:].float().numpy()
            found = {
                "states": states.reshape(n, len(layers), -1),
                "own": own,
                "wrong": np.array(answer.wrong),
                "rows": np.full(n, index),
                "of_wrong": np.full(n, name == "wrong"),
            }
            for key, values in found.items():
                parts.setdefault(key, []).append(values)
    return Tokens(**{key: np.concatenate(values) for key, values in parts.items()})


def scores_of_strangers(examples: Examples, strangers: NDArray) -> NDArray:
    """Return the logits [m] of a head that learned from no row of `strangers` [m]. Rows of others
    get none (NaN)."""
    trained = fit_stopped(
        examples.rows(~strangers), FitConfig("adamw"), Hyperparameters(decay=0.01)
    )
    scores = np.full(len(strangers), np.nan)
    scores[strangers] = trained.logits(examples.in_memory[strangers])
    return scores


def probability(logits: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-logits))


def by_answer(tokens: Tokens, chosen: NDArray, values: NDArray) -> list[NDArray]:
    """Return the values of each answer with chosen tokens, in order."""
    keys = tokens.rows[chosen]
    return [values[chosen][keys == key] for key in np.unique(keys)]


def verified(tokens: Tokens, chosen: NDArray, accepted: NDArray) -> dict[str, float]:
    """Return how much of the chosen answers is accepted."""
    found = by_answer(tokens, chosen, accepted)
    before = [run_length(row.tolist()) for row in found]
    return {
        "share_accepted": float(np.mean([row.mean() for row in found])),
        "tokens_before_a_rejection": float(np.mean(before)),
    }


def authors_of(
    tokens: Tokens, examples: Examples, within: NDArray, author: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of each author; `within` [m] are out-of-fold logits of heads that learned
    from all authors."""
    names = np.array(author)[tokens.rows]
    told = {}
    for name in track(sorted(set(author)), "authors"):
        held = names == name
        without = scores_of_strangers(examples, held)
        right = held & ~tokens.of_wrong
        heads = {"judge without the author": without, "judge of all authors": within}
        told[name] = {
            "tokens": int(held.sum()),
            "erroneous": int(tokens.wrong[held].sum()),
            "answers": len(np.unique(tokens.rows[held])),
            **aucs("without", without[held], examples.rows(held)),
            **aucs("with", within[held], examples.rows(held)),
            "strict": verified(tokens, right, tokens.own),
        }
        for head, scores in heads.items():
            accepted = tokens.own | (probability(scores) >= THRESHOLD)
            told[name][head] = verified(tokens, right, accepted)
    return told


def first_objections(tokens: Tokens, logits: NDArray) -> dict[str, Any]:
    """Return where the first rejection stands in the answers with an error, cut after it."""
    accepted = tokens.own | (probability(logits) >= THRESHOLD)
    at: dict[str, list[bool]] = {
        "at the error": [],
        "before it": [],
        "not by its end": [],
    }
    kept = by_answer(tokens, tokens.of_wrong, accepted)
    marked = by_answer(tokens, tokens.of_wrong, tokens.wrong)
    for answer, wrong in zip(kept, marked):
        first = run_length(answer.tolist())
        where = "not by its end"
        if first < len(answer):
            where = "at the error" if wrong[first] else "before it"
        for name, found in at.items():
            found.append(name == where)
    return {"n": len(kept), **{name: shares(found) for name, found in at.items()}}


def is_right(text: str, solution: str) -> bool:
    """Return whether the last numbers of a text and of a solution are equal."""
    wanted = LAST_NUMBER.find(solution)
    found = LAST_NUMBER.find(text)
    assert wanted is not None, f"a solution without a number: {solution}"
    return found is not None and bool(LAST_NUMBER.same(found, wanted))


def self_correction(
    pair: Pair, rows: Sequence[dict[str, Any]], length: int
) -> dict[str, Any]:
    """Let the target continue after an error, after as much of the right solution, and after the
    question."""
    lm = pair.target
    told: dict[str, Any] = {"n": len(rows)}
    starts: dict[str, Callable[[dict[str, Any]], str]] = {
        "error": lambda row: row["wrong"][: row["error"][1]],
        "right solution": lambda row: row["correct"][: row["error"][1]].rpartition(" ")[
            0
        ],
        "question": lambda row: "",
    }
    for name, start in track(starts.items(), "self-correction"):
        begun = [start(row) for row in rows]
        prompts = []
        for row, text in zip(rows, begun):
            ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append([*lm.encode(row["question"]), *ids])
        outs = pair.generate_batch(
            prompts, rule="target", max_new_tokens=length, batch_size=16
        )
        right = [
            is_right(text + out.text, row["correct"])
            for row, text, out in zip(rows, begun, outs)
        ]
        told[f"right after {name}"] = shares(right)
    return told


def read_by_weaker(
    target: str, weaker: str, rows: Sequence[dict[str, Any]], length: int
) -> dict[str, Any]:
    """Let a weaker model verify the answers of the target, and answer the questions itself."""
    questions = [row["question"] for row in rows]
    answered = {}
    for name in (target, weaker):
        pair = load_pair(name, compile=True)
        outs = pair.generate_batch(
            questions, rule="target", max_new_tokens=length, batch_size=16
        )
        right = [is_right(out.text, row["correct"]) for row, out in zip(rows, outs)]
        answered[name] = (outs, right)
    lm = pair.target  # the weaker one, which was loaded last
    kept = []
    for row, out, is_kept in zip(rows, *answered[target]):
        if is_kept:
            ids = list(out.tokens)
            sequence = [lm.encode(row["question"]) + ids]
            reading = Session(lm).read(sequence, len(ids) + 1)
            same = reading.greedy_tokens[0, :-1].numpy() == np.array(ids)
            kept.append(same)
    return {
        "n": len(rows),
        "answers": len(kept),
        "share_accepted": float(np.mean([row.mean() for row in kept])),
        "tokens_before_a_rejection": float(
            np.mean([run_length(row.tolist()) for row in kept])
        ),
        "target right": shares(answered[target][1]),
        "weaker right": shares(answered[weaker][1]),
    }


def with_quantized(tokens: Tokens, others: Tokens) -> dict[str, Any]:
    """Return the AUC, out of fold, of heads that learned from the states of the target or of its
    quantized form, on the states of either. Both are standardised as the head's own states are."""
    x = {"target": tokens.states[:, -1], "quantized": others.states[:, -1]}
    told: dict[str, Any] = {
        "tokens": len(tokens.rows),
        "own": int(tokens.own.sum()),
        "own_in_both": int((tokens.own & others.own).sum()),
        "own_in_quantized": int(others.own.sum()),
        "rows": [],
    }
    for learned in x:
        mean = x[learned].mean(0)
        scale = x[learned].std(0) + 1e-6
        examples = {
            name: Examples((x[name] - mean) / scale, ~tokens.wrong, tokens.rows)
            for name in x
        }
        scores = {name: np.zeros(len(tokens.rows)) for name in x}
        for k in track(range(FOLDS), f"heads of the {learned}"):
            held = tokens.rows % FOLDS == k
            head = fit_stopped(
                examples[learned].rows(~held),
                FitConfig("adamw"),
                Hyperparameters(decay=0.01),
            )
            for name in x:
                scores[name][held] = head.logits(examples[name].in_memory[held])
        for name in x:
            found = aucs("auc", scores[name], examples[name])
            told["rows"].append({"learned_from": learned, "scored": name, **found})
    return told


def layer_of(text: str) -> int | None:
    return None if text == "norm" else int(text)


class Probes:
    """The probes of a target, each run once. Rows of the self-correction and of the weaker model
    are spread evenly over the file."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        text = given.annotated.read_text(encoding="utf-8")
        self.rows = [json.loads(line) for line in text.splitlines()]
        step = max(1, len(self.rows) // given.probes)
        self.spread = self.rows[::step][: given.probes]
        self.layers = [layer_of(name) for name in given.layers.split(",")]

    @cached_property
    def tokens(self) -> Tokens:
        pair = load_pair(self.given.target, compile=False)
        return read_tokens(pair.target, self.given.annotated, self.layers)

    @cached_property
    def scores(self) -> NDArray:
        """Return the out-of-fold logits [m] of heads on the last of the layers."""
        return out_of_fold(self.tokens.examples(-1), "linear")

    def by_layer(self) -> list[dict[str, Any]]:
        told = []
        for i, layer in enumerate(track(self.layers, "layers")):
            examples = self.tokens.examples(i)
            scores = out_of_fold(examples, "linear")
            name = "norm" if layer is None else layer
            told.append({"layer": name, **aucs("auc", scores, examples)})
        return told

    def authors(self) -> dict[str, Any]:
        names = [row["author"] for row in self.rows]
        return authors_of(self.tokens, self.tokens.examples(-1), self.scores, names)

    def first_objection(self) -> dict[str, Any]:
        return first_objections(self.tokens, self.scores)

    def quantized(self) -> dict[str, Any]:
        quantized = load_pair(
            self.given.target, compile=False, quantization=self.given.quantization
        )
        others = read_tokens(quantized.target, self.given.annotated, self.layers[-1:])
        return with_quantized(self.tokens, others)

    def self_correction(self) -> dict[str, Any]:
        pair = load_pair(self.given.target, compile=True)
        return self_correction(pair, self.spread, self.given.max_new_tokens)

    def weaker(self) -> dict[str, Any]:
        by_others = [row for row in self.spread if row["author"] != "target"]
        return read_by_weaker(
            self.given.target, self.given.weaker, by_others, self.given.max_new_tokens
        )

    def run(self) -> dict[str, Any]:
        """Return the results of all probes; those in OUT are not run again."""
        probes: dict[str, Callable[[], Any]] = {
            "layers": self.by_layer,
            "authors": self.authors,
            "first_objection": self.first_objection,
            "self_correction": self.self_correction,
        }
        if self.given.quantization:
            probes["quantized"] = self.quantized
        if self.given.weaker:
            probes["weaker"] = self.weaker
        told: dict[str, Any] = {"rows": len(self.rows)}
        for name, probe in probes.items():
            path = self.given.out / f"{name}.json"
            if not path.exists():
                write_json(path, probe())
            told[name] = json.loads(path.read_text(encoding="utf-8"))
        return told


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--annotated", type=Path, required=True)
    parser.add_argument("--weaker", help="a weaker model with the same tokenizer")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--layers", default="5,10,15,20,25,30,norm")
    parser.add_argument("--probes", type=int, default=150)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    told = Probes(given).run()
    write_results(given.out / "judge_authors.json", told)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
