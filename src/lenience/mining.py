"""The search for important tokens (AutoJudge, Garipov 2025, algorithm 1), and the hidden states of what it finds."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lenience import __version__
from lenience.core import Context, Noise, Row
from lenience.errors import InputError
from lenience.heads import Inputs
from lenience.journal import Journal, open_run, read_json
from lenience.model import Session
from lenience.pair import Pair, Sessions
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW = 4
"""Tokens drafted in a cycle of the continuations; they are exact, so it changes their speed alone."""


@dataclass
class Mismatch:
    """A position, counted in new tokens from 0, where the draft would have put another token."""

    position: int
    target_token: int
    draft_token: int
    important: bool | None
    """None where the answer could not be parsed."""


class Miner:
    """Mines one sample at a time. `continue_` goes on with the target from ids until a number of new tokens, EOS
    included; `predict` gives the draft's greedy token for each position of a response."""

    def __init__(
        self,
        task: Task,
        continue_: Callable[[list[int], int], list[int]],
        predict: Callable[[list[int], list[int], int], list[int]],
        decode: Callable[[list[int]], str],
        eos_ids: frozenset[int],
        max_new_tokens: int,
    ):
        self.task, self.continue_, self.predict, self.decode = task, continue_, predict, decode
        self.eos_ids, self.max_new_tokens = eos_ids, max_new_tokens

    def mine(self, prompt: list[int]) -> tuple[list[int], list[int], list[Mismatch], str | None]:
        """The target's own response, the response after all harmless swaps, the mismatches in order, and the target's own
        answer, which is what every other one is compared with."""
        own = self.continue_(prompt, self.max_new_tokens)
        answer = self.task.answer(self.decode(own))
        response, found, start = own, [], 0
        while start < len(response):
            guesses = self.predict(prompt, response, start)
            at = next((i for i in range(start, len(response)) if guesses[i - start] != response[i]), None)
            if at is None:
                break
            # the response up to here is settled, and so are the draft's guesses as long as no swap is adopted
            adopted = False
            for i in range(at, len(response)):
                guess = guesses[i - start]
                if guess == response[i]:
                    continue
                swapped, same = self._swap(prompt, response[:i], guess, answer)
                found.append(Mismatch(i, response[i], guess, None if same is None else not same))
                if same:
                    response, start, adopted = swapped, i + 1, True
                    break
            if not adopted:
                break
        return own, response, found, answer

    def _swap(self, prompt: list[int], before: list[int], token: int, answer: str | None) -> tuple[list[int], bool | None]:
        """Put `token` after `before` and let the target go on: the new response, and whether its answer is the same."""
        if answer is None:
            return [], None
        response = [*before, token]
        if token not in self.eos_ids and len(response) < self.max_new_tokens:
            response += self.continue_(prompt + response, self.max_new_tokens - len(response))
        return response, self.task.same(self.task.answer(self.decode(response)), answer)


def pair_miner(pair: Pair, task: Task, max_new_tokens: int, sessions: Sessions) -> Miner:
    """A Miner on real models. Both caches are kept from one continuation to the next, so that only what changed is read."""
    processors = pair.target.processors(sampling=False) or None

    def continue_(ids: list[int], limit: int) -> list[int]:
        return pair.generate(ids, rule="exact", window=WINDOW, max_new_tokens=limit, sessions=sessions).tokens

    def predict(prompt: list[int], response: list[int], start: int) -> list[int]:
        rows = len(response) - start
        reading = sessions.draft.read([prompt + response[:-1]], rows)
        ctx = Context([Row(Noise.for_prompt(0, []), prompt)], processors=processors)
        logits = ctx.process(reading.logits, torch.tensor([response[:-1]]))  # [1, rows, V]
        return logits[0, :, : pair.target.width].argmax(-1).tolist()

    return Miner(task, continue_, predict, pair.target.decode, pair.target.eos_ids, max_new_tokens)


def describe(pair: Pair, task: Task, **options: Any) -> dict[str, Any]:
    """What run.json records: versions, models with fingerprints, task and options."""
    import transformers

    models = {role: {"name": lm.name, "fingerprint": lm.fingerprint,
                     "dtype": str(lm.model.dtype).removeprefix("torch.")}
              for role, lm in (("target", pair.target), ("draft", pair.draft))}  # fmt: skip
    return {
        "versions": {"lenience": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "pair": pair.name,
        "models": models,
        "tokenizer": pair.target.tokenizer_fingerprint,
        "task": task.name,
        "task_version": getattr(task, "version", None),
        **options,
    }


def mine(
    pair: Pair, task: Task, folder: Path, *, limit: int | None = None, max_new_tokens: int | None = None
) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Mine the first `limit` training samples of a task into a run folder; what its journal holds is not done again.

    Yields (samples done, samples wanted, the record just finished), at first with None. Raises InputError where the
    folder was made with other models or options, or its journal is broken.
    """
    samples = take(task, "train", limit)
    max_new_tokens = check_prompts(pair, task, samples, max_new_tokens)
    open_run(folder, describe(pair, task, split="train", max_new_tokens=max_new_tokens, seed=0))
    journal = Journal(folder / "journal.jsonl")
    finished = {record["id"] for record in journal.resume()}
    done = sum(sample.id in finished for sample in samples)
    yield done, len(samples), None
    for sample in samples:
        if sample.id not in finished:
            record = mine_sample(pair, task, sample, max_new_tokens)
            journal.append(record)
            done += 1
            yield done, len(samples), record


def check_prompts(pair: Pair, task: Task, samples: Sequence[Sample], max_new_tokens: int | None) -> int:
    """Raise InputError, before any work, for the first sample whose prompt a model cannot read; returns the length limit."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens}: must be 1 or more")
    for sample in samples:
        try:
            pair.draft.encode(pair.target.encode(sample.prompt))  # both must have room for it
        except InputError as error:
            raise InputError(f"task {task.name!r}, sample {sample.id}: {error}") from None
    return max_new_tokens or task.max_new_tokens


def mine_sample(pair: Pair, task: Task, sample: Sample, max_new_tokens: int) -> dict[str, Any]:
    """One journal record."""
    began = time.perf_counter()
    prompt = pair.target.encode(sample.prompt)
    room = min(lm.context or 1 << 30 for lm in (pair.target, pair.draft)) - len(prompt)
    max_new_tokens = min(max_new_tokens, room)
    sessions = Sessions(Session(pair.target), Session(pair.draft))
    miner = pair_miner(pair, task, max_new_tokens, sessions)
    own, final, mismatches, answer = miner.mine(prompt)
    return {
        "id": sample.id,
        "prompt_ids": prompt,
        "response_ids": own,
        "final_ids": final,
        "mismatches": [asdict(mismatch) for mismatch in mismatches],
        "answers": {"target": answer, "final": task.answer(pair.target.decode(final)), "reference": sample.reference},
        "cost": {
            "target_passes": sessions.target.passes,
            "target_tokens": sessions.target.tokens_read,
            "draft_tokens": sessions.draft.tokens_read,
            "seconds": round(time.perf_counter() - began, 3),
        },
    }


# ---- hidden states of the mismatches

SHARD = 100
"""Journal records in a shard of features."""


def features(pair: Pair, folder: Path, inputs: Inputs) -> Iterator[tuple[int, int]]:
    """Compute the hidden states of a run's labelled mismatches into RUN/features; shards of the same records are kept.

    Yields (records done, records). Raises InputError where the run is of other models.
    """
    run = read_json(folder / "run.json")
    for role, lm in (("target", pair.target), ("draft", pair.draft)):
        if run["models"][role]["fingerprint"] != lm.fingerprint:
            raise InputError(
                f"{folder}: was mined with another {role} ({run['models'][role]['name']}); name the pair it was mined with"
            )
    records = Journal(folder / "journal.jsonl").resume()
    if not records:
        raise InputError(f"{folder}: its journal is empty; mine some samples first (lenience mine --out {folder})")
    place = folder / "features" / str(inputs)
    place.mkdir(parents=True, exist_ok=True)
    for begin in range(0, len(records), SHARD):
        part = records[begin : begin + SHARD]
        path = place / f"{begin // SHARD:05d}.safetensors"
        digest = hashlib.blake2b(json.dumps(part).encode(), digest_size=8).hexdigest()
        if _digest_of(path) != digest:
            rows = [_states(pair, record, inputs) for record in part]
            sample = [torch.full((len(x),), begin + i) for i, (x, _) in enumerate(rows)]
            tensors = {"x": torch.cat([x for x, _ in rows]), "important": torch.cat([y for _, y in rows]),
                       "sample": torch.cat(sample)}  # fmt: skip
            new = path.with_suffix(".new")
            save_file(tensors, new, metadata={"records": digest})
            new.replace(path)
        yield begin + len(part), len(records)
    for path in sorted(place.glob("*.safetensors"))[-(-len(records) // SHARD) :]:
        path.unlink()  # of a longer journal


def load_features(folder: Path, inputs: Inputs) -> tuple[NDArray, NDArray, NDArray]:
    """x [m, F] float32, important [m] bool, sample [m] int: every labelled mismatch of a run, in the journal's order."""
    import numpy as np

    shards = []
    for path in sorted((folder / "features" / str(inputs)).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shards.append([file.get_tensor(name).float().numpy() for name in ("x", "important", "sample")])
    x, important, sample = (np.concatenate(column) for column in zip(*shards))
    return x, important.astype(bool), sample.astype(int)


def _digest_of(path: Path) -> str | None:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata()["records"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None


def _states(pair: Pair, record: dict[str, Any], inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One record's labelled mismatches: their states [m, F] and whether each is important [m].

    What stands before a mismatch was settled when it was tried, so one pass over the final response holds every state
    but those after a token that the response did not keep; these take one more token each, from right to left so that
    each is a roll-back.
    """
    kept = [Mismatch(**mismatch) for mismatch in record["mismatches"] if mismatch["important"] is not None]
    whole = record["prompt_ids"] + record["final_ids"]
    start = len(record["prompt_ids"])
    states: dict[tuple[str, str], list[torch.Tensor]] = {}  # by token and model, the last mismatch first
    for model in inputs.models:
        session = Session(getattr(pair, model))
        path = session.read([whole], len(record["final_ids"]) + 1).hidden[0].cpu()  # [T + 1, H], row p: before position p
        for mismatch in reversed(kept):
            at = mismatch.position
            for token in inputs.tokens:
                wanted = mismatch.draft_token if token == "draft" else mismatch.target_token
                if token == "previous":
                    row = path[at]
                elif record["final_ids"][at] == wanted:
                    row = path[at + 1]
                else:
                    row = session.read([[*whole[: start + at], wanted]]).hidden[0, 0].cpu()
                states.setdefault((token, model), []).append(row)
    if not kept:
        width = sum(getattr(pair, model).hidden_size for model in inputs.models) * len(inputs.tokens)
        return torch.empty(0, width, dtype=path.dtype), torch.empty(0, dtype=torch.uint8)
    x = torch.cat([torch.stack(states[token, model][::-1]) for token in inputs.tokens for model in inputs.models], -1)
    return x.contiguous(), torch.tensor([mismatch.important for mismatch in kept], dtype=torch.uint8)
