"""Hidden states of mined mismatches, and what else heads are fitted to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.core.noise import Noise, race
from lenience.decoding.options import Options
from lenience.decoding.pair import Pair
from lenience.heads.head import Inputs, Role
from lenience.mining.search import Mismatch
from lenience.models.session import Session
from lenience.runs.journal import Journal

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
