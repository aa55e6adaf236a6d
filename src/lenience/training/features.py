"""Hidden states of mined mismatches and other training data of heads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lenience.core.errors import InputError
from lenience.core.files import digest, replacing
from lenience.core.progress import Progress, silent
from lenience.core.protocols import Rule
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.decoding.soundness import check_states
from lenience.heads.fitting import Examples
from lenience.heads.head import Inputs, Role
from lenience.heads.streaming import StreamedRows
from lenience.models.memory import free_bytes
from lenience.models.pass_cache import LAST, States
from lenience.models.session import Session
from lenience.runs.journal import Journal
from lenience.runs.record import MinedSample, Mismatch, read_run
from lenience.training.stop_examples import (
    Labelled,
    decided_states,
    gate_states,
    stop_states,
)
from lenience.training.window_values import as_in_windows, values_drafted_on

COPIES = 4
"""Number of copies of the inputs that training in memory makes."""
SHARD = 100
"""Number of journal records per shard of features."""
STOP_SAMPLES = 200
"""Number of samples decoded to observe a rule's rejections: some ten thousand tokens, enough to
train a head on a single state."""


def compute_features(
    pair: Pair,
    folder: Path,
    inputs: Inputs,
    role: Role = "judge",
    progress: Progress = silent,
    of: Rule | None = None,
) -> None:
    """Compute the hidden states of a run's labelled mismatches into RUN/features, or the training
    rows of a head with another `role`. Shards of unchanged records are kept. `of` is the rule whose
    rejections a stop learns. Raises InputError if the run has other models."""
    check_models(pair, folder)
    records = journal_records(folder)[: None if of is None else STOP_SAMPLES]
    shards = _shards(folder, inputs, role, of)
    for begin in range(0, len(records), SHARD):
        part = records[begin : begin + SHARD]
        path = shards / f"{begin // SHARD:05d}.safetensors"
        made_of = digest(part)
        if _digest_of(path) != made_of:
            samples = []
            for line, record in enumerate(part, begin + 1):
                samples.append(
                    MinedSample.read(record, f"{folder / 'journal.jsonl'}, line {line}")
                )
            labelled = _labelled(pair, folder, samples, inputs, role=role, of=of)
            numbers = []
            for i, (x, _) in enumerate(labelled):
                numbers.append(torch.full((len(x),), begin + i))
            tensors = {
                "x": torch.cat([x for x, _ in labelled]),
                LABELS[role]: torch.cat([y for _, y in labelled]),
                "sample": torch.cat(numbers),
            }
            with replacing(path) as new:
                save_file(tensors, new, metadata={"records": made_of})
        progress("hidden states", begin + len(part), len(records))
    for path in sorted(shards.glob("*.safetensors"))[-(-len(records) // SHARD) :]:
        path.unlink()  # left over from a longer journal


def _labelled(
    pair: Pair,
    folder: Path,
    samples: list[MinedSample],
    inputs: Inputs,
    role: Role,
    of: Rule | None,
) -> list[Labelled]:
    """Return the training rows of some of a run's samples. Raises RunError if a state is NaN or
    infinite."""
    if of is not None:
        labelled = decided_states(pair, samples, inputs, of)
    elif role == "stop":
        sampling = sampling_of(folder)
        labelled = [stop_states(pair, sample, inputs, sampling) for sample in samples]
    else:
        labelled = SOURCES[role](pair, samples, inputs)
    for sample, (states, _) in zip(samples, labelled):
        check_states(states, f"{pair.name}, sample {sample.id}")
    return labelled


def mined_samples(folder: Path) -> list[MinedSample]:
    """Return the samples of a run's journal. Raises InputError as `journal_records` does, and for a
    sample that cannot be read."""
    journal = folder / "journal.jsonl"
    found = list[MinedSample]()
    for line, record in enumerate(journal_records(folder), 1):
        found.append(MinedSample.read(record, f"{journal}, line {line}"))
    return found


def journal_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's journal. Raises InputError if the journal is empty or contains
    a sample twice."""
    records = Journal(folder / "journal.jsonl").resume()
    if not records:
        fix = f"mine samples first (lenience mine --out {folder})"
        raise InputError(f"{folder}: its journal is empty; {fix}")
    lines: dict[str, int] = {}
    for line, record in enumerate(records, 1):
        first = lines.setdefault(str(record.get("id")), line)
        if first != line:
            what = f"sample {record['id']} is in lines {first} and {line}"
            raise InputError(f"{folder / 'journal.jsonl'}: {what}; delete one of them")
    return records


def check_models(pair: Pair, folder: Path) -> None:
    """Raise InputError if a run was mined with other models."""
    run = read_run(folder)
    for role, model in run.models.items():
        lm = pair.models.get(role)
        if lm is None or model.fingerprint != lm.fingerprint:
            fix = "name the pair it was mined with"
            raise InputError(
                f"{folder}: was mined with another {role} ({model.name}); {fix}"
            )


def sampling_of(folder: Path) -> Decoder:
    """Return a decoder with the sampling options of a run's answers."""
    run = read_run(folder)
    return Decoder(
        temperature=run.temperature,
        top_k=run.top_k,
        top_p=run.top_p,
        seed=run.draw_seed or 0,
    )


def _shards(folder: Path, inputs: Inputs, role: Role, of: Rule | None) -> Path:
    after = "+".join(inputs.tokens)
    stop = f"stop-{after}-drawn" if sampling_of(folder).temperature else f"stop-{after}"
    names = {"judge": str(inputs), "stop": stop, "gate": f"gate-{after}-whole-prompts"}
    name = names[role]
    if of is not None:  # another head at the same path makes another rule
        heads = [head.head.fingerprint for head in of.heads]
        name += f"-{digest([str(Decoder(rule=of).without_paths().rule), heads])}"
    return folder / "features" / name


def load_features(
    folder: Path,
    inputs: Inputs,
    role: Role = "judge",
    tau: float = 1.0,
    of: Rule | None = None,
    in_files: bool = False,
) -> Examples:
    """Return all computed rows, in the journal's order. With `in_files` the states stay in their
    files, except for a judge that looks ahead. A gate learns to reject a token whose probability
    under the draft is more than `tau` times that under the target."""
    paths = sorted(_shards(folder, inputs, role, of).glob("*.safetensors"))
    label = _column(paths, LABELS[role])
    sample = _column(paths, "sample")
    x: np.ndarray | StreamedRows
    if inputs.ahead is not None:
        x = as_in_windows(_column(paths, "x"), inputs, seed=0)
    else:
        x = StreamedRows.of(paths) if in_files else _column(paths, "x")
    important = label > tau if role == "gate" else label.astype(bool)
    return Examples(x, ~important, sample.astype(int))


def fit_in_memory(
    runs: Sequence[Path], inputs: Inputs, role: Role, of: Rule | None
) -> bool:
    """Return True if memory has room to train on all features computed for some runs."""
    size = 0
    for run in runs:
        rows = StreamedRows.of(
            sorted(_shards(run, inputs, role, of).glob("*.safetensors"))
        )
        size += 4 * len(rows) * rows.width
    return COPIES * size <= (free_bytes(torch.device("cpu")) or sys.maxsize)


def _column(paths: Sequence[Path], name: str) -> np.ndarray:
    """Return a column of some shards, concatenated, as float32."""
    parts = []
    for path in paths:
        with safe_open(path, "pt") as file:
            parts.append(file.get_tensor(name).float().numpy())
    return np.concatenate(parts)


def _digest_of(path: Path) -> str | None:
    """Return the digest of a shard's records; None for a missing or broken shard."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata()["records"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None


def _judge_inputs(
    pair: Pair, samples: Sequence[MinedSample], inputs: Inputs
) -> list[Labelled]:
    """Return, for each sample, the inputs [m, F] of its labelled mismatches, including look-ahead
    values if the judge looks ahead, and whether each mismatch is important [m]."""
    labelled = [_mismatch_states(pair, sample, inputs) for sample in samples]
    if inputs.ahead is None:
        return labelled
    ahead = values_drafted_on(pair, samples, list(map(_known, samples)), inputs)
    found = list[Labelled]()
    for (x, y), more in zip(labelled, ahead):
        found.append((torch.cat([x.float(), more], -1), y))
    return found


def _known(sample: MinedSample) -> list[Mismatch]:
    found = list[Mismatch]()
    for mismatch in sample.mismatches:
        if mismatch.important is not None:
            found.append(mismatch)
    return found


def _mismatch_states(pair: Pair, sample: MinedSample, inputs: Inputs) -> Labelled:
    """Return the states [m, H] of a sample's labelled mismatches, and whether each mismatch is
    important [m]."""
    labelled = _known(sample)
    by_token = {}
    for model in inputs.models:
        states_by_token = _states_by_token(pair, sample, labelled, inputs, model)
        for token, states in states_by_token.items():
            by_token[token, model] = states
    if not labelled:
        sizes = {role: lm.hidden_size for role, lm in pair.models.items()}
        width = replace(inputs, ahead=None).width(sizes)
        nothing = torch.empty(0, width, dtype=pair.target.model.dtype)
        return nothing, torch.empty(0, dtype=torch.uint8)
    order = []
    for token in inputs.tokens:
        for model in inputs.models:
            order.append(by_token[token, model])
    important = torch.tensor(
        [mismatch.important for mismatch in labelled], dtype=torch.uint8
    )
    return torch.cat(order, -1).contiguous(), important


def _states_by_token(
    pair: Pair,
    sample: MinedSample,
    labelled: Sequence[Mismatch],
    inputs: Inputs,
    model: str,
) -> dict[str, Tensor]:
    """Return a model's states [m, H] at a sample's labelled mismatches, keyed by the token after
    which each state is taken.

    The text before a mismatch was already final when the mismatch was tried. So one pass over the
    final response gives every state, except those after tokens that the response did not keep. Each
    of these needs one more token; going from right to left, each is a roll-back.
    """
    whole = sample.prompt_ids + sample.final_ids
    start = len(sample.prompt_ids)
    layers = inputs.layers if model == "target" else LAST.layers
    session = Session(pair.models[model], states=States(layers))
    reading = session.read([whole], len(sample.final_ids) + 1)
    along = reading.hidden[0].cpu()  # [T + 1, H], row p: before position p
    states: dict[str, list[Tensor]] = {token: [] for token in inputs.tokens}
    for mismatch in reversed(labelled):
        at = mismatch.position
        for token in inputs.tokens:
            wanted = mismatch.draft_token if token == "draft" else mismatch.target_token
            if token == "previous":
                state = along[at]
            elif sample.final_ids[at] == wanted:
                state = along[at + 1]
            else:
                state = (
                    session.read([[*whole[: start + at], wanted]]).hidden[0, 0].cpu()
                )
            states[token].append(state)
    return {token: torch.stack(rows[::-1]) for token, rows in states.items() if rows}


SOURCES: dict[Role, Callable[[Pair, Sequence[MinedSample], Inputs], list[Labelled]]] = {
    "judge": _judge_inputs,
    "gate": gate_states,
}
"""Function that returns a head's states and labels, by role; stops use `stop_states`, which also
takes the run's sampling options."""
LABELS: dict[Role, str] = {"judge": "important", "stop": "important", "gate": "ratio"}
"""Name of the label column in the shards, by role."""
