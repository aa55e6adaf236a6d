"""Plain values that the driver sends to workers, which may be on other machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.tasks import Task


@dataclass(frozen=True)
class WorkerPlan:
    """Plain values from which a worker on any machine makes its pair and its task."""

    pair: dict[str, Any] = field(default_factory=dict)
    """Arguments of `load_pair`."""
    task: dict[str, Any] = field(default_factory=lambda: {"spec": "wordmath"})
    """Arguments of `load_task`."""
    threads: int | None = None
    """Number of threads of a worker on a CPU; None for all cores."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SampleBatch:
    """A batch of samples that a worker takes at once, with their options."""

    ids: list[str]
    decoder: dict[str, Any]
    """Options of the target's answers."""
    batch_size: int
    """Number of concurrent searches."""
    answers_only: bool = False
    """True to record the target's answers without a search."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def identity_of(pair: Pair, task: Task) -> dict[str, Any]:
    """Return a pair's fingerprints, and a task's name and version, as plain values for comparison
    with those of another process."""
    return {**pair.fingerprints, "task": [task.name, task.version]}
