"""A worker process of a mining run, which takes samples and returns records as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from lenience.core.errors import InputError, RunError
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.task_models import task_for
from lenience.mining.search import Miner, search
from lenience.mining.work import SampleBatch, WorkerPlan, identity_of
from lenience.models.threads import limit_threads
from lenience.tasks import load_task, take


class Worker:
    """A pair and a task, with the search on their samples."""

    def __init__(self, plan: Mapping[str, Any]):
        known = WorkerPlan(**plan)
        if known.threads:
            limit_threads(known.threads)
        self.pair = load_pair(**known.pair)
        self.task = task_for(self.pair, load_task(**known.task))
        self._samples: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return the identity of the pair and the task, which the driver compares with its own."""
        return identity_of(self.pair, self.task)

    def mine(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the journal record of each sample in a part as it is finished. Raises InputError
        for an id that the task lacks."""
        if self._samples is None:
            self._samples = {
                sample.id: sample for sample in take(self.task, "train", None)
            }
        asked = SampleBatch(**part)
        missing = [id for id in asked.ids if id not in self._samples]
        if missing:
            raise InputError(
                f"task {self.task.name!r}: a worker's task has no sample {missing[0]}"
            )
        samples = [self._samples[id] for id in asked.ids]
        decoder = Decoder.of(asked.decoder)
        found = search(
            self.pair,
            self.task,
            samples,
            decoder,
            asked.batch_size,
            find=Miner.decode if asked.answers_only else Miner.search,
        )
        for mined in found:
            yield mined.to_json()


def serve(requests: TextIO, replies: TextIO) -> None:
    """Run a worker. The first line of `requests` is its plan, and each further line a part. The
    worker writes a line to `replies` when it is ready, one per record, and one at the end of a
    part. It ends when `requests` ends."""

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message, separators=(",", ":")) + "\n")
        replies.flush()

    try:
        worker = Worker(json.loads(requests.readline()))
        reply(ready=worker.identity())
        for line in requests:
            for record in worker.mine(json.loads(line)):
                reply(mined=record)
            reply(done=True)
    except (InputError, RunError) as error:
        reply(error=str(error), is_input=isinstance(error, InputError))


def main() -> None:
    # keep output of libraries out of the JSON lines
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin, replies)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)  # the driver is gone, or was interrupted too


if __name__ == "__main__":
    main()
