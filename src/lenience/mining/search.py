"""The search for important tokens (AutoJudge, Garipov 2025, algorithm 1), and the hidden states of what it finds."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.core.noise import Noise, race
from lenience.core.types import Step
from lenience.decoding.loop import Request, decode
from lenience.decoding.options import Options
from lenience.decoding.pair import Pair
from lenience.decoding.response import Limits
from lenience.heads.head import Inputs, Role
from lenience.models.session import Session, common
from lenience.rules.strict import Exact
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import check_prompts, describe
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


@dataclass
class Found:
    """What the search found on one prompt."""

    own: list[int]
    """The target's own response."""
    final: list[int]
    """The response after all harmless swaps."""
    mismatches: list[Mismatch]
    """In order."""
    answer: str | None
    """The target's own answer, which every other one is compared with."""


class Miner:
    """Searches one prompt at a time. `predict` gives the draft's greedy token for each position of a response from a start
    on; what the target is asked is asked of the caller, so that many searches can be decoded together."""

    def __init__(
        self,
        task: Task,
        predict: Callable[[list[int], list[int], int], list[int]],
        decode: Callable[[list[int]], str],
        eos_ids: frozenset[int],
        max_new_tokens: int,
    ):
        self.task, self.predict, self.decode = task, predict, decode
        self.eos_ids, self.max_new_tokens = eos_ids, max_new_tokens

    def search(self, prompt: list[int]) -> Generator[tuple[list[int], int], list[int], Found]:
        """Yields (ids, limit) and wants sent how the target goes on after those ids, greedily, until EOS, which is
        included, or `limit` new tokens; returns what was found."""
        own = yield prompt, self.max_new_tokens
        answer = self.task.answer(self.decode(own))
        response, found, start = own, list[Mismatch](), 0
        while start < len(response):
            guesses = dict(enumerate(self.predict(prompt, response, start), start))
            # the response up to a mismatch is settled, and so are the draft's guesses as long as no swap is adopted
            mismatches = [i for i in guesses if guesses[i] != response[i]]
            start = len(response)
            for i in mismatches:
                swapped, same = yield from self._swap(prompt, response[:i], guesses[i], answer)
                found.append(Mismatch(i, response[i], guesses[i], None if same is None else not same))
                if same:
                    response, start = swapped, i + 1
                    break
        return Found(own, response, found, answer)

    def _swap(
        self, prompt: list[int], before: list[int], token: int, answer: str | None
    ) -> Generator[tuple[list[int], int], list[int], tuple[list[int], bool | None]]:
        """Put `token` after `before` and let the target go on: the new response, and whether its answer is the same."""
        if answer is None:
            return [], None
        response = [*before, token]
        if token not in self.eos_ids and len(response) < self.max_new_tokens:
            response += yield prompt + response, self.max_new_tokens - len(response)
        return response, self.task.same(self.task.answer(self.decode(response)), answer)


class _Search:
    """The search on one sample, between one continuation and the next. Its cost is counted as if it were decoded alone, so that
    it does not depend on the company."""

    def __init__(self, pair: Pair, task: Task, sample: Sample, max_new_tokens: int):
        self.pair, self.task, self.sample, self.began = pair, task, sample, time.perf_counter()
        self.prompt = pair.target.encode(sample.prompt)
        room = min(lm.context or 1 << 30 for lm in (pair.target, pair.draft)) - len(self.prompt)
        self.draft = Session(pair.draft, capacity=len(self.prompt) + min(max_new_tokens, room))
        self.ctx = Context([Row(Noise(0, b""), self.prompt)], processors=pair.target.processors(sampling=False) or None)
        self.cost = {"target_passes": 0, "target_tokens": 0, "draft_tokens": 0}
        miner = Miner(task, self._predict, pair.target.decode, pair.target.eos_ids, min(max_new_tokens, room))
        self._steps = miner.search(self.prompt)
        self._ids, self._tokens = list[int](), list[int]()  # the continuation that is being decoded
        self._unread = {"target": 0, "draft": 0}  # how many tokens of it a model has not read
        self._started = False

    def ask(self, number: int) -> Request | None:
        """The next continuation to decode; None where the search is over."""
        try:
            # nothing can be sent before the first continuation
            ids, limit = self._steps.send(self._tokens) if self._started else next(self._steps)
        except StopIteration as end:
            self.found: Found = end.value
            return None
        unread = len(ids) - min(common([*self._ids, *self._tokens[:-1]], ids), len(ids) - 1)
        self._ids, self._tokens, self._unread, self._started = list(ids), [], dict.fromkeys(self._unread, unread), True
        return Request(Row(self.ctx.rows[0].noise, list(ids)), Limits(self.pair.target, limit, len(ids)), number)

    def add(self, step: Step) -> None:
        self._tokens += step.tokens
        self.cost["target_passes"] += 1
        self.cost["target_tokens"] += self._unread["target"] + step.drafted
        self._unread["target"] = 1
        if step.drafted:
            self.cost["draft_tokens"] += self._unread["draft"] + step.drafted - 1
            whole = step.accepted_exact + step.accepted_lenient == step.drafted  # then its last token is unread as well
            self._unread["draft"] = 2 if whole else 1
        else:
            self._unread["draft"] += len(step.tokens)

    def record(self, together: int) -> dict[str, Any]:
        """The journal's record; `together` searches shared the time."""
        found, pair = self.found, self.pair
        return {
            "id": self.sample.id,
            "prompt_ids": self.prompt,
            "response_ids": found.own,
            "final_ids": found.final,
            "mismatches": [asdict(mismatch) for mismatch in found.mismatches],
            "answers": {
                "target": found.answer,
                "final": self.task.answer(pair.target.decode(found.final)),
                "reference": self.sample.reference,
            },
            "cost": {**self.cost, "seconds": round((time.perf_counter() - self.began) / together, 3)},
        }

    def _predict(self, prompt: list[int], response: list[int], start: int) -> list[int]:
        """The draft re-encodes the response in one parallel pass."""
        reading = self.draft.read([prompt + response[:-1]], len(response) - start)
        self.cost["draft_tokens"] += reading.read[0]
        logits = self.ctx.process(reading.logits, torch.tensor([response[:-1]]))  # [1, len(response) - start, V]
        return logits[0, :, : self.pair.target.width].argmax(-1).tolist()


def search(pair: Pair, task: Task, samples: Sequence[Sample], max_new_tokens: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """The journal records of `samples`, as they are finished; `batch_size` searches are decoded together. A search keeps its
    row of the caches from one continuation to the next, so that only what changed is read."""
    fresh, active, done = iter(enumerate(samples)), dict[int, _Search](), list[dict[str, Any]]()
    size = min(batch_size, len(samples))

    def follow(ended: Request | None) -> Request | None:
        if ended:
            if request := active[ended.number].ask(ended.number):
                return request
            done.append(active.pop(ended.number).record(size))
        for number, sample in fresh:
            active[number] = _Search(pair, task, sample, max_new_tokens)
            return active[number].ask(number)
        return None

    longest = max((len(pair.target.encode(sample.prompt)) for sample in samples), default=0) + max_new_tokens
    session, drafter = pair.engine(size, longest, WINDOW, beside=[pair.draft])  # each search has one more
    ctx = Context(processors=pair.target.processors(sampling=False) or None)
    for request, step in decode(session, drafter, Exact(), ctx, follow, size):
        active[request.number].add(step)
        yield from done
        done.clear()
    yield from done


def mine(
    pair: Pair,
    task: Task,
    folder: Path,
    *,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Mine the first `limit` training samples of a task into a run folder, `batch_size` of them together; what its journal
    holds is not done again. A finished sample is in the journal at once; when all are, they are put into the task's order.

    Yields (samples done, samples wanted, the record just finished), at first with None. Raises InputError where the
    folder was made with other models or options, its journal is broken, or memory has no room for the caches.
    """
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be 1 or more")
    samples = take(task, "train", limit)
    max_new_tokens = check_prompts(pair, task, samples, max_new_tokens)
    open_run(folder, describe(pair, task, split="train", max_new_tokens=max_new_tokens, seed=0))
    journal = Journal(folder / "journal.jsonl")
    finished = {record["id"] for record in journal.resume()}
    done = sum(sample.id in finished for sample in samples)
    yield done, len(samples), None
    left = [sample for sample in samples if sample.id not in finished]
    for record in search(pair, task, left, max_new_tokens, batch_size):
        journal.append(record)
        done += 1
        yield done, len(samples), record
    journal.sort([sample.id for sample in samples])


# ---- hidden states of the mismatches

SHARD = 100
"""Journal records in a shard of features."""


def features(pair: Pair, folder: Path, inputs: Inputs, role: Role = "judge") -> Iterator[tuple[int, int]]:
    """Compute the hidden states of a run's labelled mismatches, or what a head of another `role` is fitted to, into
    RUN/features; shards of the same records are kept.

    Yields (records done, records). Raises InputError where the run is of other models.
    """
    run = read_json(folder / "run.json")
    for role_of, lm in (("target", pair.target), ("draft", pair.draft)):
        if run["models"][role_of]["fingerprint"] != lm.fingerprint:
            name = run["models"][role_of]["name"]
            raise InputError(f"{folder}: was mined with another {role_of} ({name}); name the pair it was mined with")
    records = Journal(folder / "journal.jsonl").resume()
    if not records:
        raise InputError(f"{folder}: its journal is empty; mine some samples first (lenience mine --out {folder})")
    place, label = _place(folder, inputs, role), _LABELS[role]
    place.mkdir(parents=True, exist_ok=True)
    for begin in range(0, len(records), SHARD):
        part = records[begin : begin + SHARD]
        path = place / f"{begin // SHARD:05d}.safetensors"
        digest = hashlib.blake2b(json.dumps(part).encode(), digest_size=8).hexdigest()
        if _digest_of(path) != digest:
            rows = _SOURCES[role](pair, part, inputs)
            sample = [torch.full((len(x),), begin + i) for i, (x, _) in enumerate(rows)]
            tensors = {"x": torch.cat([x for x, _ in rows]), label: torch.cat([y for _, y in rows]),
                       "sample": torch.cat(sample)}  # fmt: skip
            new = path.with_suffix(".new")
            save_file(tensors, new, metadata={"records": digest})
            new.replace(path)
        yield begin + len(part), len(records)
    for path in sorted(place.glob("*.safetensors"))[-(-len(records) // SHARD) :]:
        path.unlink()  # of a longer journal


def _place(folder: Path, inputs: Inputs, role: Role) -> Path:
    name = {"judge": str(inputs), "stop": "stop", "gate": f"gate-{'+'.join(inputs.tokens)}"}[role]
    return folder / "features" / name


def load_features(folder: Path, inputs: Inputs, role: Role = "judge", tau: float = 1.0) -> tuple[NDArray, NDArray, NDArray]:
    """x [m, F] float32, important [m] bool, sample [m] int: all that `features` has computed, in the journal's order. What
    is important to a gate is a token to which the draft gives more than `tau` times the target's probability."""
    import numpy as np

    shards = []
    for path in sorted(_place(folder, inputs, role).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shards.append([file.get_tensor(name).float().numpy() for name in ("x", _LABELS[role], "sample")])
    x, label, sample = (np.concatenate(column) for column in zip(*shards))
    return x, label > tau if role == "gate" else label.astype(bool), sample.astype(int)


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
        session = Session(getattr(pair, model), layer=inputs.layer)
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


DRAFTED = 64
"""How many tokens of an answer a stop is fitted to."""


def _drafted(pair: Pair, record: dict[str, Any], _inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some tokens of the target's own answer, evenly spread: the draft's states [m, H] before them, and whether the token
    that it would draft there is another one [m]."""
    response = record["response_ids"]
    reading = Session(pair.draft).read([record["prompt_ids"] + response], len(response) + 1)
    rows = torch.arange(0, len(response), max(1, -(-len(response) // DRAFTED)))
    ctx = Context([Row(Noise.for_prompt(0, []), record["prompt_ids"])], processors=pair.target.processors(sampling=False))
    logits = ctx.process(reading.logits, torch.tensor([response]))
    drafted = logits[0, :, : pair.target.width].argmax(-1).cpu()
    return reading.hidden[0].cpu()[rows].contiguous(), (drafted[rows] != torch.tensor(response)[rows]).to(torch.uint8)


PREFIXES = 12
"""How many prefixes of each kind a sample gives to a gate."""


def gated(pair: Pair, records: Sequence[dict[str, Any]], inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each record equally many prefixes of four kinds (SPRINTER): of the prompt as it is, of the prompt and what the draft,
    what the target, and what first the target and then the draft makes of it. For a token x drawn from the draft after
    each: the draft's states [m, F] and draft(x) / target(x) [m]. All is sampled at temperature 1."""
    longest = max(len(record["response_ids"]) for record in records)

    def go_on(starts: list[list[int]], rule: str) -> list[list[int]]:
        options: Options = {"rule": rule, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": longest}
        outs = pair.generate_batch(starts, batch_size=32, **options)
        return [start + out.tokens for start, out in zip(starts, outs)]

    prompts = [record["prompt_ids"] for record in records]
    by_draft, by_target = go_on(prompts, "draft"), go_on(prompts, "target")
    halves = [whole[: (len(prompt) + len(whole)) // 2] for prompt, whole in zip(prompts, by_target)]
    mixed, rows = go_on(halves, "draft"), []
    for number, prompt in enumerate(prompts):
        found = [_ratios(pair, prompt, 1, inputs)]
        found += [_ratios(pair, kind[number], len(prompt), inputs) for kind in (by_draft, by_target, mixed)]
        rows.append((torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])))
    return rows


def _ratios(pair: Pair, ids: list[int], first: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The states and the ratios after prefixes of `ids` that are evenly spread from `first` tokens on."""
    ends = len(ids) - (ids[-1] in pair.target.eos_ids)
    at = torch.linspace(first, max(first, ends), PREFIXES).long()  # how many tokens each prefix has
    ctx = Context([], 1.0, processors=pair.target.processors(sampling=True) or None)
    readings, probs = {}, {}
    session = Session(pair.draft)
    for lm, reads in ((pair.draft, session), (pair.target, Session(pair.target))):
        ctx.rows = [Row(Noise.for_prompt(0, ids), ids[:1])]
        readings[lm] = reads.read([ids], len(ids))
        logits = ctx.process(readings[lm].logits, torch.tensor([ids[1:]]))[0].cpu()
        probs[lm] = ctx.probs(logits[at - 1][:, : min(pair.draft.width, pair.target.width)])  # [m, V]
    keys = torch.tensor([ctx.rows[0].noise.key(n, "gate") for n in at.tolist()])
    drawn = race(probs[pair.draft], keys)  # [m]
    ratio = (probs[pair.draft] / probs[pair.target]).gather(1, drawn[:, None])[:, 0]
    states = readings[pair.draft].hidden[0].cpu()[at - 1]
    if "draft" in inputs.tokens:  # after the token; from right to left each is a roll-back
        after = [session.read([[*ids[:n], int(x)]]).hidden[0, 0].cpu() for n, x in zip(at.flip(0).tolist(), drawn.flip(0))]
        states = torch.stack(after[::-1])
    return states.contiguous(), ratio


_SOURCES: dict[Role, Callable[[Pair, Sequence[dict[str, Any]], Inputs], list[tuple[torch.Tensor, torch.Tensor]]]] = {
    "judge": lambda pair, records, inputs: [_states(pair, record, inputs) for record in records],
    "stop": lambda pair, records, inputs: [_drafted(pair, record, inputs) for record in records],
    "gate": gated,
}
_LABELS: dict[Role, str] = {"judge": "important", "stop": "important", "gate": "ratio"}
