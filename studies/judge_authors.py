"""Probes of Judge Decoding (Bachmann 2025) on annotated answers by several authors, for any target.

    python studies/judge_authors.py OUT --target MODEL --annotated FILE [--weaker MODEL]
        [--quantization int8] [--layers 10,20,-1,norm] [--probes 150] [--max-new-tokens 128]

FILE has the rows that `lenience fit --from annotated` reads, with a field `author`;
benchmarks/real_inputs.py makes one for the target of docs/real.md. Heads are linear on the target's
state after a token, with the rate and the decay of the first setting that `fit` tries, and score
questions that they have not learned from. Where no layer is named, the state is that of the last
layer before the norm, as in the paper. A token is accepted if it is the target's own most probable
one, or if the head's probability is at least the paper's threshold, 0.5.

Writes OUT/judge_authors.json and prints it. Each probe's result is kept in OUT, from which a second
call with the same settings resumes:

- `layers`: the AUC of a head on the state of each layer, and its difference from that of the last
  layer before the norm, paired;
- `authors`: for each author, the AUC of heads that learned from the other authors alone (`without`)
  and from as many questions of all authors (`with`), and the difference, paired; the share of
  accepted tokens in the author's right solutions, and the number of tokens before the first
  rejection, by strict verification and with either head; the share of the author's errors that are
  accepted;
- `first_objection`: by author, whether the first rejection in an answer with an error is at the
  error, before it or after it, by strict verification and with the heads of all authors;
- `self_correction`: how often the target's answer is right if it continues a solution from just
  after a wrong number, from the same place with the right number, and from the question alone. The
  number is not the answer, nor the last number of the solution;
- `quantized`: the AUC of heads that learned from the states of the target, or of its weights in 8
  bits (torchao), on the states of either;
- `weaker`: how many tokens of the target's own right answers a weaker model accepts, strictly, and
  how often each of the two models is right on these questions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from judge_decoding import run_length
from judge_probes import FOLDS, shares
from numpy.typing import NDArray
from paired import mcnemar
from rich.progress import track
from sklearn.metrics import roc_auc_score

from lenience import load_pair
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples, FitConfig, Hyperparameters, fit_stopped
from lenience.models.lm import LM
from lenience.models.pass_cache import States
from lenience.models.session import Session
from lenience.tasks.finding import answers
from lenience.training.annotated import marked_answers, read_annotated

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import resumed, write_results

THRESHOLD = 0.5
LAST_NUMBER = answers("last-number", None)
ANSWERS = ("correct", "wrong")
LAST_LAYER = "-1"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
RESAMPLES = 500
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Tokens of annotated answers. The wrong answer of a row ends with its error."""

    states: NDArray
    """[m, L, H]: the target's states after each token, by layer."""
    own: NDArray
    """[m]: True where the token is the target's own most probable one."""
    wrong: NDArray
    """[m]: True where the token is erroneous."""
    rows: NDArray
    """[m]: index of the annotated row."""
    questions: NDArray
    """[m]: number of the row's question; rows with the same question share it."""
    of_wrong: NDArray
    """[m]: True for the tokens of the wrong answer."""

    def folds(self) -> list[NDArray]:
        """Return the tokens [m] of each fold; all rows of a question are in one fold."""
        return [self.questions % FOLDS == k for k in range(FOLDS)]


def read_tokens(lm: LM, path: Path, layers: Sequence[int | None]) -> Tokens:
    """Read the answers of an annotated file with the target."""
    parts: dict[str, list[NDArray]] = {}
    states = States(tuple(layers))
    numbers: dict[str, int] = {}
    for index, row in enumerate(track(read_annotated(path), "reading the answers")):
        prompt, marked = marked_answers(lm, row)
        session = Session(lm, states=states)
        question = numbers.setdefault(json.dumps(row.question), len(numbers))
        for name, answer in zip(ANSWERS, marked):
            n = len(answer.ids)
            reading = session.read([prompt + answer.ids], n + 1)
            # the last state before the answer predicts its first token
            own = reading.greedy_tokens[0, :-1].numpy() == np.array(answer.ids)
            hidden = reading.hidden[0, 1:].float().numpy()
            found = {
                "states": hidden.reshape(n, len(layers), -1),
                "own": own,
                "wrong": np.array(answer.wrong),
                "rows": np.full(n, index),
                "questions": np.full(n, question),
                "of_wrong": np.full(n, name == "wrong"),
            }
            for key, values in found.items():
                parts.setdefault(key, []).append(values)
    return Tokens(**{key: np.concatenate(values) for key, values in parts.items()})


# ---- heads


def scores_of(
    x: NDArray, tokens: Tokens, learned: NDArray, asked: Mapping[str, NDArray]
) -> dict[str, NDArray]:
    """Return the logits of a head that learned from the rows `learned` [m] of the states x [m, H],
    on each of the states `asked`. The scale is that of the learned rows."""
    mean = x[learned].mean(0)
    scale = x[learned].std(0) + 1e-6
    examples = Examples(
        (x[learned] - mean) / scale, ~tokens.wrong[learned], tokens.questions[learned]
    )
    head = fit_stopped(examples, FitConfig("adamw"), Hyperparameters(decay=0.01))
    return {name: head.logits((rows - mean) / scale) for name, rows in asked.items()}


def out_of_fold(
    x: NDArray, tokens: Tokens, others: NDArray | None = None, most: int | None = None
) -> dict[str, NDArray]:
    """Return the logits [m] of heads on the states x [m, H], and on the states `others` if given,
    each row scored by a head without its question. A head learns from at most `most` questions."""
    asked = {"own": x} if others is None else {"own": x, "others": others}
    scores = {name: np.zeros(len(x)) for name in asked}
    for held in tokens.folds():
        learned = ~held
        if most is not None:
            learned &= np.isin(
                tokens.questions, some_of(tokens.questions[learned], most)
            )
        found = scores_of(
            x, tokens, learned, {name: rows[held] for name, rows in asked.items()}
        )
        for name, logits in found.items():
            scores[name][held] = logits
    return scores


def some_of(questions: NDArray, most: int) -> NDArray:
    """Return at most `most` different questions, drawn at random."""
    known = np.unique(questions)
    return np.random.default_rng(0).permutation(known)[:most]


def probability(logits: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-logits))


def accepted_by(tokens: Tokens, logits: NDArray) -> NDArray:
    """Return True for the tokens [m] that are accepted with a head."""
    return tokens.own | (probability(logits) >= THRESHOLD)


def compared(
    tokens: Tokens, scores: Mapping[str, NDArray], which: NDArray
) -> dict[str, Any]:
    """Return the AUC of each of the scores on the tokens `which` [m], and of the first minus each
    other, with 95 % intervals over resampled questions."""
    harmless = ~tokens.wrong[which]
    of = {name: values[which] for name, values in scores.items()}
    first, *others = of

    def figures(rows: NDArray) -> dict[str, float]:
        aucs = {
            name: float(roc_auc_score(harmless[rows], of[name][rows])) for name in of
        }
        for name in others:
            aucs[f"{first} minus {name}"] = aucs[first] - aucs[name]
        return aucs

    known, groups = np.unique(tokens.questions[which], return_inverse=True)
    rows_of = [np.flatnonzero(groups == i) for i in range(len(known))]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        picked = rng.integers(len(rows_of), size=len(rows_of))
        drawn.append(figures(np.concatenate([rows_of[i] for i in picked])))
    told = {}
    for name, value in figures(np.arange(len(harmless))).items():
        interval = np.percentile([row[name] for row in drawn], [2.5, 97.5])
        told[name] = {"value": value, "interval": interval.tolist()}
    return told


# ---- authors


def by_answer(tokens: Tokens, chosen: NDArray, values: NDArray) -> list[NDArray]:
    """Return the values of each answer with chosen tokens, in order."""
    keys = tokens.rows[chosen]
    return [values[chosen][keys == key] for key in np.unique(keys)]


def verified(tokens: Tokens, chosen: NDArray, accepted: NDArray) -> dict[str, Any]:
    """Return the mean share of accepted tokens of the chosen answers, with its 95 % interval over
    resampled answers, and the mean number of tokens before the first rejection."""
    found = by_answer(tokens, chosen, accepted)
    shares_of = np.array([row.mean() for row in found])
    rng = np.random.default_rng(0)
    drawn = shares_of[rng.integers(len(found), size=(RESAMPLES, len(found)))].mean(1)
    before = [run_length(row.tolist()) for row in found]
    return {
        "share_accepted": float(shares_of.mean()),
        "share_accepted_interval": np.percentile(drawn, [2.5, 97.5]).tolist(),
        "tokens_before_a_rejection": float(np.mean(before)),
    }


def errors_accepted(
    tokens: Tokens, chosen: NDArray, accepted: NDArray
) -> dict[str, Any]:
    """Return the share of errors of which every token is accepted."""
    return shares(
        [bool(row.all()) for row in by_answer(tokens, chosen & tokens.wrong, accepted)]
    )


def authors_of(tokens: Tokens, layer: int, names: NDArray) -> dict[str, Any]:
    """Return the figures of each author; `names` [m] has the author of each token."""
    x = tokens.states[:, layer]
    told = {}
    for name in track(np.unique(names).tolist(), "authors"):
        held = names == name
        # all rows of a question are strange that has one by the author
        strange = np.isin(tokens.questions, tokens.questions[held])
        without = np.full(len(x), np.nan)
        without[held] = scores_of(x, tokens, ~strange, {"own": x[held]})["own"]
        most = len(np.unique(tokens.questions[~strange]))
        scores = {"with": out_of_fold(x, tokens, most=most)["own"], "without": without}
        right = held & ~tokens.of_wrong
        accepted = {"strict": tokens.own}
        accepted |= {key: accepted_by(tokens, scores[key]) for key in scores}
        told[name] = {
            "tokens": int(held.sum()),
            "errors": len(by_answer(tokens, held & tokens.wrong, tokens.own)),
            "questions_learned_from": most,
            "auc": compared(tokens, scores, held),
            "right_solutions": {
                key: verified(tokens, right, accepted[key]) for key in accepted
            },
            "errors_accepted": {
                key: errors_accepted(tokens, held, accepted[key]) for key in accepted
            },
        }
    return told


def first_objections(
    tokens: Tokens, accepted: Mapping[str, NDArray], names: NDArray
) -> dict[str, Any]:
    """Return where the first rejection is in the answers with an error, which end with it: by
    author and by who rejects."""
    told: dict[str, Any] = {}
    for author in np.unique(names).tolist():
        chosen = tokens.of_wrong & (names == author)
        marked = by_answer(tokens, chosen, tokens.wrong)
        told[author] = {"n": len(marked)}
        for who, values in accepted.items():
            places = []
            for kept, wrong in zip(by_answer(tokens, chosen, values), marked):
                first = run_length(kept.tolist())
                place = "not by its end"
                if first < len(kept):
                    place = "at the error" if wrong[first] else "before it"
                places.append(place)
            told[author][who] = {
                place: shares([found == place for found in places])
                for place in ("at the error", "before it", "not by its end")
            }
    return told


# ---- answers


def is_right(text: str, solution: str) -> bool:
    """Return whether the last numbers of a text and of a solution are equal."""
    wanted = LAST_NUMBER.find(solution)
    found = LAST_NUMBER.find(text)
    assert wanted is not None, f"a solution without a number: {solution}"
    return found is not None and bool(LAST_NUMBER.same(found, wanted))


def end_of_slip(row: Row) -> int | None:
    """Return the place after the wrong number, which is also that after the right number; None if
    the number is the answer or the last number, so that nothing is left to correct."""
    begin, end = row["error"]
    numbers = list(NUMBER.finditer(row["correct"]))
    at = [number for number in numbers if number.start() <= begin < number.end()]
    is_digit = len(row["wrong"]) == len(row["correct"]) and end == begin + 1
    if not is_digit or not at or at[0] is numbers[-1]:
        return None
    if LAST_NUMBER.same(at[0].group(), numbers[-1].group()):
        return None
    return at[0].end()


def continued(
    pair: Pair, rows: Sequence[Row], begun: Sequence[str], length: int
) -> list[bool]:
    """Let the target continue answers that have begun. Return which of them end right."""
    lm = pair.target
    prompts = []
    for row, text in zip(rows, begun):
        ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append([*lm.encode(row["question"]), *ids])
    outs = pair.generate_batch(
        prompts, rule="target", max_new_tokens=length, batch_size=16
    )
    return [
        is_right(text + out.text, row["correct"])
        for row, text, out in zip(rows, begun, outs)
    ]


def self_correction(pair: Pair, rows: Sequence[Row], length: int) -> dict[str, Any]:
    """Let the target continue after a wrong number, after the right one at the same place, and
    after the question. Each row has a number after which something is left to correct."""
    ends = [end_of_slip(row) for row in rows]
    starts = {
        "wrong number": [row["wrong"][:end] for row, end in zip(rows, ends)],
        "right number": [row["correct"][:end] for row, end in zip(rows, ends)],
        "question": [""] * len(rows),
    }
    marks = {
        name: np.array(continued(pair, rows, begun, length))
        for name, begun in starts.items()
    }
    right = {
        name: "".join(map(str, found.astype(int))) for name, found in marks.items()
    }
    authors = np.array([row["author"] for row in rows])
    told: dict[str, Any] = {"n": len(rows), "right": right}
    for name, found in marks.items():
        told[f"after {name}"] = shares(found.tolist())
        told[f"after {name}, by author"] = {
            author: shares(found[authors == author].tolist())
            for author in np.unique(authors).tolist()
        }
    told["paired"] = [
        mcnemar("wrong number", name, right).to_json()
        for name in ("right number", "question")
    ]
    return told


def read_by_weaker(
    target: str, weaker: str, rows: Sequence[Row], length: int
) -> dict[str, Any]:
    """Let a weaker model verify the right answers of the target, and answer the questions
    itself."""
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
    before = [run_length(row.tolist()) for row in kept]
    return {
        "n": len(rows),
        "answers": len(kept),
        "share_accepted": float(np.mean([row.mean() for row in kept])),
        "tokens_before_a_rejection": float(np.mean(before)),
        "target right": shares(answered[target][1]),
        "weaker right": shares(answered[weaker][1]),
    }


def with_quantized(x: NDArray, others: Tokens, tokens: Tokens) -> dict[str, Any]:
    """Return the AUC of heads that learned from the states x [m, H] of the target or from those of
    its quantized form, on the states of either, and paired differences from the target's own."""
    y = others.states[:, 0]
    of_target = out_of_fold(x, tokens, others=y)
    of_quantized = out_of_fold(y, tokens, others=x)
    scores = {
        "target on target": of_target["own"],
        "target on quantized": of_target["others"],
        "quantized on target": of_quantized["others"],
        "quantized on quantized": of_quantized["own"],
    }
    return {
        "tokens": len(x),
        "own": int(tokens.own.sum()),
        "own_in_both": int((tokens.own & others.own).sum()),
        "auc": compared(tokens, scores, np.ones(len(x), bool)),
    }


# ---- all probes


class Probes:
    """The probes of a target. Rows of the self-correction and of the weaker model are spread
    evenly over the file."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        text = given.annotated.read_text(encoding="utf-8")
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]
        self.layers: list[str] = given.layers.split(",")
        if LAST_LAYER not in self.layers:
            self.layers.append(LAST_LAYER)

    def spread(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return at most --probes rows, evenly spread."""
        most = self.given.probes
        return (
            [rows[i * len(rows) // most] for i in range(most)]
            if len(rows) > most
            else rows
        )

    @cached_property
    def tokens(self) -> Tokens:
        pair = load_pair(self.given.target, compile=False)
        layers = [None if name == "norm" else int(name) for name in self.layers]
        return read_tokens(pair.target, self.given.annotated, layers)

    @property
    def last(self) -> int:
        """Return the index of the last layer before the norm."""
        return self.layers.index(LAST_LAYER)

    @property
    def names(self) -> NDArray:
        """Return the author of each token [m]."""
        return np.array([row["author"] for row in self.rows])[self.tokens.rows]

    def by_layer(self) -> dict[str, Any]:
        order = [LAST_LAYER, *(name for name in self.layers if name != LAST_LAYER)]
        scores = {
            name: out_of_fold(
                self.tokens.states[:, self.layers.index(name)], self.tokens
            )["own"]
            for name in track(order, "layers")
        }
        return compared(self.tokens, scores, np.ones(len(self.tokens.rows), bool))

    def authors(self) -> dict[str, Any]:
        return authors_of(self.tokens, self.last, self.names)

    def first_objection(self) -> dict[str, Any]:
        logits = out_of_fold(self.tokens.states[:, self.last], self.tokens)["own"]
        accepted = {
            "strict": self.tokens.own,
            "judge": accepted_by(self.tokens, logits),
        }
        return first_objections(self.tokens, accepted, self.names)

    def quantized(self) -> dict[str, Any]:
        pair = load_pair(
            self.given.target, compile=False, quantization=self.given.quantization
        )
        others = read_tokens(pair.target, self.given.annotated, [int(LAST_LAYER)])
        return with_quantized(self.tokens.states[:, self.last], others, self.tokens)

    def self_correction(self) -> dict[str, Any]:
        pair = load_pair(self.given.target, compile=True)
        rows = [row for row in self.rows if end_of_slip(row) is not None]
        return self_correction(pair, self.spread(rows), self.given.max_new_tokens)

    def weaker(self) -> dict[str, Any]:
        rows = [row for row in self.spread(self.rows) if row["author"] != "target"]
        return read_by_weaker(
            self.given.target, self.given.weaker, rows, self.given.max_new_tokens
        )

    def run(self) -> dict[str, Any]:
        """Return the results of all probes; those in OUT are not run again. Raises SystemExit if
        they were made with other settings."""
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
        about = {name: str(value) for name, value in vars(self.given).items()}
        journal = resumed(self.given.out / "probes.jsonl", about)
        known = {record["probe"]: record["found"] for record in journal.resume()}
        for name, probe in probes.items():
            if name not in known:
                known[name] = probe()
                journal.write({"probe": name, "found": known[name]})
        return {"rows": len(self.rows), **known}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--annotated", type=Path, required=True)
    parser.add_argument("--weaker", help="a weaker model with the same tokenizer")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--layers", default="5,10,15,20,25,-1,norm")
    parser.add_argument("--probes", type=int, default=150)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    told = Probes(given).run()
    write_results(given.out / "judge_authors.json", told)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
