"""Methods of the survey (Xia 2024) that lenience does not have, each tried in a few lines.

    python studies/survey.py OUT [--run RUN] [--problems 40]

Writes OUT/survey.json and prints it:

- `lookahead`: Lookahead decoding (Fu 2024), greedy. The target guesses n-grams by Jacobi iteration
  in the same pass that verifies earlier guesses. `tokens_per_pass` and `read_per_pass`, the tokens
  that a pass runs over, for several sizes W (window), N (n-gram) and G (guesses); the answers are
  checked against the target's own. `speed` is relative to the target alone (one token a pass),
  timed in turns on the same answers, caches and Python included;
- `several`: the probability that one of k tokens drawn from the draft is kept, as a mean over
  positions of the target's own sampled answers: SpecTr's k-sequential selection (Sun 2023, K-SEQ)
  with its best factor, SpecInfer's recursive rejection of k independent draws (Miao 2024), the same
  of draws without replacement (what `tree=` does in lenience), and the largest that any lossless
  method can reach with k independent draws, where the vocabulary's likely part is small enough to
  enumerate pairs (k = 2);
- `ngram_model`: an n-gram model as the draft (n up to 4, counted on the run's answers; the longest
  context seen decides), beside the pair's draft model and `ngram`, at window 4.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined import add_run, mined
from numpy.typing import NDArray
from rich.progress import track
from scipy.optimize import brentq

from lenience.core.trees import Parents
from lenience.decoding.pair import Pair
from lenience.models.session import Session, tree_cache
from lenience.tasks import Task, take

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

SIZES = ((5, 3, 5), (7, 4, 7), (15, 5, 15))
"""(W, N, G) of Lookahead decoding; the last is the paper's for a model of 7 B."""
DRAWS = (1, 2, 4)
WINDOW = 4
MASS = 1e-5
"""Probability of the least likely tokens that sums over the vocabulary leave out."""


# ---- Lookahead decoding


@dataclass
class Lookahead:
    """Lookahead decoding of one answer.

    The lookahead branch has N − 1 levels of W tokens; token c of level l is guessed to stand
    1 + c + l places after the last token, behind tokens 0 … c of level 0 and token c of the levels
    between. This is a tree: level 0 is a chain, and each of its tokens has a chain of its own. What
    the target predicts after the last level completes W n-grams, and becomes the last level.
    """

    width: int
    levels: int
    """Number of levels: N − 1."""
    guesses: int
    window: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """N-grams without their first token, the latest last, by their first token."""

    @classmethod
    def start(
        cls, size: tuple[int, int, int], prompt: list[int], rng: np.random.Generator
    ) -> Lookahead:
        width, n, guesses = size
        window = rng.choice(prompt, (n - 1, width)).tolist()
        return cls(width, n - 1, guesses, window)

    def tree(
        self, last: int
    ) -> tuple[list[int], list[int], list[list[int]], list[int]]:
        """Return the tokens and parents of a pass, the nodes of each guessed n-gram, and the nodes
        of the last level."""
        tokens: list[int] = []
        parents: list[int] = []

        def add(token: int, parent: int) -> int:
            tokens.append(token)
            parents.append(parent)
            return len(tokens) - 1

        level: list[int] = []
        for c in range(self.width):
            level.append(add(self.window[0][c], level[-1] if level else -1))
        for row in self.window[1:]:
            level = [add(token, parent) for token, parent in zip(row, level)]
        paths = []
        for guess in list(self.pool[last])[-self.guesses :]:
            path: list[int] = []
            for token in guess:
                path.append(add(token, path[-1] if path else -1))
            paths.append(path)
        return tokens, parents, paths, level

    def learn(self, predicted: Sequence[int]) -> None:
        """Take in what the target predicts after the last level."""
        for c, token in enumerate(predicted):
            first, *rest = (row[c] for row in self.window)
            kept = self.pool[first]
            kept.pop((*rest, token), None)
            kept[(*rest, token)] = None
        self.window = [*self.window[1:], list(predicted)]


def lookahead_answer(
    pair: Pair, prompt: list[int], limit: int, size: tuple[int, int, int]
) -> tuple[list[int], int, int]:
    """Return the answer, the passes and the tokens that they ran over."""
    state = Lookahead.start(size, prompt, np.random.default_rng(0))
    session = session_for(pair, len(prompt) + limit)
    answer: list[int] = []
    passes = 0
    read = 0
    last = prompt[-1]
    ends = pair.target.eos_ids
    while len(answer) < limit and ends.isdisjoint(answer[-size[1] :]):
        tokens, parents, paths, level = state.tree(last)
        ids = prompt + answer + tokens
        greedy = read_tree(session, ids, parents)
        passes += 1
        read += len(tokens) + 1
        state.learn([greedy[1 + node] for node in level])
        answer += longest(tokens, paths, greedy)
        last = answer[-1]
    # a guess may go on after an EOS
    last_places = (i + 1 for i, token in enumerate(answer) if token in ends)
    return answer[: min([limit, *last_places])], passes, read


def session_for(pair: Pair, tokens: int) -> Session:
    """Return a session of the target with room for `tokens` and the largest tree."""
    room = tokens + max(2 * width * (n - 1) + guesses for width, n, guesses in SIZES)
    return Session(pair.target, 1, room, tree_cache(pair.target, 1, room))


def read_tree(session: Session, ids: list[int], parents: Parents) -> list[int]:
    """Return the target's most probable token after the prefix and after each node of the tree."""
    n = len(parents)
    reading = session.read([ids], n + 1, parents=[parents] if n else None)
    greedy: list[int] = reading.logits[0].argmax(-1).tolist()
    return greedy


def longest(
    tokens: Sequence[int], paths: Sequence[Sequence[int]], greedy: Sequence[int]
) -> list[int]:
    """Return the tokens that the best guess keeps, with the target's own after them."""
    best: list[int] = [greedy[0]]
    for path in paths:
        kept: list[int] = []
        wanted = greedy[0]
        for node in path:
            if tokens[node] != wanted:
                break
            kept.append(wanted)
            wanted = greedy[1 + node]
        if len(kept) + 1 > len(best):
            best = [*kept, wanted]
    return best


def alone(pair: Pair, prompt: list[int], limit: int) -> tuple[list[int], int, int]:
    """Decode a token a pass in the same way."""
    session = session_for(pair, len(prompt) + limit)
    answer: list[int] = []
    while len(answer) < limit and not (answer and answer[-1] in pair.target.eos_ids):
        answer += read_tree(session, prompt + answer, [])
    return answer, len(answer), len(answer)


def lookahead(pair: Pair, prompts: list[list[int]], limit: int) -> list[dict[str, Any]]:
    """Decode prompts with each size, in turns with the target alone."""
    sizes: list[tuple[int, int, int] | None] = [None, *SIZES]
    totals = {size: np.zeros(4) for size in sizes}
    same = dict.fromkeys(SIZES, 0)
    for prompt in track(prompts, "lookahead"):
        own: list[int] = []
        for size in sizes:
            began = time.perf_counter()
            if size is None:
                answer, passes, read = alone(pair, prompt, limit)
                own = answer
            else:
                answer, passes, read = lookahead_answer(pair, prompt, limit, size)
                same[size] += answer == own
            seconds = time.perf_counter() - began
            totals[size] += [len(answer), passes, read, seconds]
    base = totals[None]
    return [
        {
            "size": size,
            "same": same[size] if size else len(prompts),
            "prompts": len(prompts),
            "tokens_per_pass": tokens / passes,
            "read_per_pass": read / passes,
            "tokens_per_second": tokens / seconds,
            "speed": (tokens / seconds) / (base[0] / base[3]),
        }
        for size, (tokens, passes, read, seconds) in totals.items()
    ]


# ---- several draws for one position


def k_seq(p: NDArray, q: NDArray, k: int) -> float:
    """Return the acceptance of k-sequential selection: draws are accepted one after the other with
    probability min(1, p / (rho q)), where rho is the smallest factor for which a correction exists,
    1 − (1 − beta)^k = rho · beta with beta = Σ min(q, p / rho)."""
    if k == 1:
        return float(np.minimum(p, q).sum())

    def beta(rho: float) -> float:
        return float(np.minimum(q, p / rho).sum())

    def excess(rho: float) -> float:
        return 1 - (1 - beta(rho)) ** k - rho * beta(rho)

    rho = 1.0 if excess(1.0) <= 0 else float(brentq(excess, 1.0, float(k)))
    return 1 - (1 - beta(rho)) ** k


def recursive(p: NDArray, q: NDArray, k: int) -> float:
    """Return the acceptance of recursive rejection of k independent draws: after a rejection the
    next draw is verified against the normalised positive part of p − q."""
    left = 1.0
    for _ in range(k):
        kept = float(np.minimum(p, q).sum())
        left *= 1 - kept
        rest = np.maximum(p - q, 0)
        if rest.sum() < 1e-12:
            return 1.0
        p = rest / rest.sum()
    return 1 - left


def without_replacement(p: NDArray, q: NDArray, k: int) -> float:
    """Return the acceptance of recursive rejection of k draws without replacement (SpecInfer's
    variant in Sequoia, Chen 2024), by enumerating the draws."""
    if k == 0 or q.sum() < 1e-12:
        return 0.0
    q = q / q.sum()
    kept = np.minimum(p, q)
    total = float(kept.sum())
    if k == 1:
        return total
    rest = np.maximum(p - q, 0)
    if rest.sum() < 1e-12:
        return 1.0
    rest = rest / rest.sum()
    rejected = q - kept
    for x in np.flatnonzero(rejected > 1e-4):
        others = q.copy()
        others[x] = 0
        total += float(rejected[x]) * without_replacement(rest, others, k - 1)
    return total


def best_of_two(p: NDArray, q: NDArray) -> float:
    """Return the largest acceptance of two independent draws: the largest flow from pairs of draws
    to the tokens of the target, each of which takes at most its probability."""
    # by the max-flow min-cut theorem: the least p(S) + 1 − q(S)² over sets S of tokens, as a pair
    # is lost where both of its tokens are in S; the sets of least p / q suffice
    order = np.argsort(p / np.maximum(q, 1e-300))
    of_target = np.concatenate([[0.0], p[order].cumsum()])
    of_draft = np.concatenate([[0.0], q[order].cumsum()])
    return float(np.min(of_target + 1 - of_draft**2))


def several(pair: Pair, prompts: list[list[int]], limit: int) -> list[dict[str, Any]]:
    """Return the mean acceptance of each method at positions of the target's sampled answers."""
    rows: dict[int, list[list[float]]] = {k: [] for k in DRAWS}
    for prompt in track(prompts, "several draws"):
        out = pair.generate(
            prompt, rule="target", temperature=1.0, seed=0, max_new_tokens=limit
        )
        ids = prompt + out.tokens
        n = len(out.tokens)
        both = [
            Session(lm).read([ids], n + 1).logits[0, :n].double().softmax(-1)
            for lm in (pair.target, pair.require_draft("several draws"))
        ]
        for i in range(0, n, 7):
            p, q = _likely(both[0][i], both[1][i])
            for k in DRAWS:
                drawn = without_replacement(p, q, k) if k <= 2 else float("nan")
                best = best_of_two(p, q) if k == 2 else float("nan")
                rows[k].append([k_seq(p, q, k), recursive(p, q, k), drawn, best])
    names = ("k_seq", "recursive", "without_replacement", "best")
    found = []
    for k, values in rows.items():
        means = np.mean(values, 0)
        told = {
            name: float(mean) for name, mean in zip(names, means) if np.isfinite(mean)
        }
        found.append({"draws": k, "positions": len(values), **told})
    return found


def _likely(p: torch.Tensor, q: torch.Tensor) -> tuple[NDArray, NDArray]:
    """Return both distributions over the tokens that either finds likely, and the rest as one."""
    keep = (p > MASS) | (q > MASS)
    return tuple(  # type: ignore[return-value]
        np.append(x[keep].numpy(), max(0.0, 1 - float(x[keep].sum()))) for x in (p, q)
    )


# ---- an n-gram model


@dataclass
class NgramModel:
    """Counts of what follows each context of up to n − 1 tokens."""

    n: int
    counts: dict[tuple[int, ...], Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    def learn(self, ids: Sequence[int], begin: int) -> None:
        for i in range(begin, len(ids)):
            for length in range(min(self.n, i + 1)):
                self.counts[tuple(ids[i - length : i])][ids[i]] += 1

    def next(self, ids: Sequence[int]) -> int:
        """Return the most frequent token after the longest context that was seen."""
        for length in range(self.n - 1, -1, -1):
            context = tuple(ids[len(ids) - length :])
            if context in self.counts:
                return self.counts[context].most_common(1)[0][0]
        raise ValueError("the model has learned nothing")


def ngram_model(
    pair: Pair, run: Path, prompts: list[list[int]], limit: int
) -> list[dict[str, Any]]:
    """Return the tokens per pass of greedy windows by an n-gram model along the target's answers,
    and those of other drafters."""
    records = [json.loads(line) for line in (run / "journal.jsonl").open()]
    rows = []
    answers = pair.generate_batch(prompts, rule="target", max_new_tokens=limit)
    for n in (2, 3, 4):
        model = NgramModel(n)
        for record in records:
            model.learn(
                record["prompt_ids"] + record["response_ids"], len(record["prompt_ids"])
            )
        passes = sum(
            _passes(model, prompt, out.tokens) for prompt, out in zip(prompts, answers)
        )
        tokens = sum(len(out.tokens) for out in answers)
        rows.append({"drafter": f"{n}-gram model", "tokens_per_pass": tokens / passes})
    for drafter in ("model", "ngram"):
        outs = pair.generate_batch(
            prompts, rule="exact", drafter=drafter, window=WINDOW, max_new_tokens=limit
        )
        tokens = sum(len(out.tokens) for out in outs)
        passes = sum(out.target_passes for out in outs)
        rows.append({"drafter": drafter, "tokens_per_pass": tokens / passes})
    return rows


def _passes(model: NgramModel, prompt: list[int], answer: list[int]) -> int:
    """Return the number of passes in which windows of the model write an answer."""
    done = 0
    passes = 0
    while done < len(answer):
        ids = prompt + answer[:done]
        kept = 0
        while kept < WINDOW and done + kept < len(answer):
            token = model.next(ids)
            if token != answer[done + kept]:
                break
            ids.append(token)
            kept += 1
        done += kept + 1
        passes += 1
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run(parser)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=40)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    source = mined(given.run)
    pair = source.pair()
    task: Task = source.task
    limit = task.max_new_tokens
    prompts = [
        pair.target.encode(sample.prompt)
        for sample in take(task, "test", given.problems)
    ]
    about = {
        "pair": pair.name,
        "task": task.label,
        "lookahead": lookahead(pair, prompts, limit),
        "several": several(pair, prompts, limit),
        "ngram_model": ngram_model(pair, source.run, prompts, limit),
    }
    write_results(given.out / "survey.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
