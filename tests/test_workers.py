"""Mining by several workers: the journal is that of one process, whoever is killed and when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from capabilities import needs

from lenience.core.errors import InputError, RunError
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.mining.crew import Crew, HiredWorker, ProcessCrew
from lenience.mining.search import MineConfig, mine
from lenience.mining.work import SampleBatch, WorkerPlan
from lenience.runs.journal import Journal
from lenience.tasks import Task, load_task

TASK = '''
from lenience.tasks.base import Sample, Task


class Parity(Task):
    """Whether the last new tokens' ids add up to an odd number."""

    name, max_new_tokens = "parity", 24

    def samples(self, split):
        for i in range(60):
            last = i % 3 + (2 if split == "train" else 30)
            yield Sample(f"{split}-{i}", f"w{1 + i % 40} w{1 + (7 * i) % 40} w{last}", None)

    def answer(self, text, sample=None):
        numbers = [int(word[1:]) for word in text.split()[-6:]]
        return str(sum(numbers) % 2) if len(numbers) == 6 else None
'''
SAMPLES = 24
"""Number of mined samples: enough to kill a worker twice on the way."""
KILLED = int(os.environ.get("LENIENCE_KILLED_RUNS", "1"))
"""Runs of which the driver or a worker is killed at a random place."""


@pytest.fixture(scope="module")
def plan(checkpoints, tmp_path_factory: pytest.TempPathFactory) -> WorkerPlan:
    target, draft = checkpoints("llama")
    file = tmp_path_factory.mktemp("task") / "parity.py"
    file.write_text(TASK)
    pair = {"target": target, "draft": draft, "dtype": "float32", "compile": False}
    return WorkerPlan(pair, {"spec": f"{file}:Parity"}, threads=1)


@pytest.fixture(scope="module")
def pair(plan: WorkerPlan) -> Pair:
    return load_pair(**plan.pair)


@pytest.fixture(scope="module")
def task(plan: WorkerPlan) -> Task:
    return load_task(**plan.task)


def lines(folder: Path) -> list[dict]:
    records = list(Journal(folder / "journal.jsonl"))
    for record in records:
        del record["cost"]["seconds"]
    return records


@pytest.fixture(scope="module")
def whole(
    pair: Pair, task: Task, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("whole")
    mine(pair, task, folder, MineConfig(limit=SAMPLES, batch_size=2))
    return lines(folder)


def processes(crew: ProcessCrew) -> list[subprocess.Popen]:
    return [one._process for one in crew._processes]


def test_a_lost_workers_samples_are_done_by_others(
    plan: WorkerPlan,
    pair: Pair,
    task: Task,
    whole: list[dict],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    crew, killed = ProcessCrew(plan, 2), list[int]()

    def kill(phase: str, done: int, total: int) -> None:
        if done in (6, 14):
            alive = [one for one in processes(crew) if one.poll() is None]
            alive[0].kill()
            killed.append(done)

    config = MineConfig(limit=SAMPLES, batch_size=2)
    counts = mine(pair, task, tmp_path, config, kill, crew)
    assert killed == [6, 14]
    assert counts.samples == SAMPLES and lines(tmp_path) == whole
    assert len(processes(crew)) == 4
    assert all(one.poll() is not None for one in processes(crew)), "none is left behind"
    assert (
        "ended with status -9; other workers take its samples"
        in capsys.readouterr().err
    )


DRIVER = """
import json, sys
from pathlib import Path
from lenience.decoding.loading import load_pair
from lenience.mining.crew import ProcessCrew
from lenience.mining.search import MineConfig, mine
from lenience.mining.work import WorkerPlan
from lenience.tasks import load_task
plan = WorkerPlan(**json.loads(sys.argv[1]))
crew = ProcessCrew(plan, 2)
def tell(phase, done, total):
    print(done, *(one._process.pid for one in crew._processes), flush=True)
config = MineConfig(limit=int(sys.argv[3]), batch_size=2)
mine(load_pair(**plan.pair), load_task(**plan.task), Path(sys.argv[2]), config, tell, crew)
"""


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize("seed", range(KILLED))
def test_a_driver_or_workers_killed_anywhere_leave_the_same_journal(
    seed: int, plan: WorkerPlan, whole: list[dict], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    whom = ("driver", "worker")[seed % 2]
    for place in (rng.randrange(1, SAMPLES - 1), None):
        command = [
            sys.executable,
            "-c",
            DRIVER,
            json.dumps(plan.to_json()),
            str(tmp_path),
            str(SAMPLES),
        ]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        workers: list[int] = []
        for told in run.stdout:
            done, *pids = map(int, told.split())
            workers = pids or workers
            if place is not None and done >= place and pids:
                time.sleep(rng.random() / 20)
                os.kill(
                    run.pid if whom == "driver" else rng.choice(pids), signal.SIGKILL
                )
                place = None
        status = run.wait()
        assert status == (
            -signal.SIGKILL if whom == "driver" and place is None and status else 0
        )
        until = time.monotonic() + 20
        while not all(map(gone, workers)) and time.monotonic() < until:
            time.sleep(0.1)
        assert all(map(gone, workers)), "a worker outlives its driver"
        ids = [record["id"] for record in Journal(tmp_path / "journal.jsonl")]
        assert len(ids) == len(set(ids))
    assert lines(tmp_path) == whole


def test_what_workers_cannot_do_is_told(
    plan: WorkerPlan,
    pair: Pair,
    task: Task,
    checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MineConfig(limit=4)
    monkeypatch.setattr("lenience.mining.crew.LOST_IN_A_ROW", 2)
    with pytest.raises(InputError, match="workers 0"):
        ProcessCrew(plan, 0)
    other = checkpoints("qwen3")[0]
    elsewhere = replace(plan, pair={**plan.pair, "target": other, "draft": other})
    with pytest.raises(
        RunError, match="worker 1: has another target, draft than the driver"
    ):
        mine(pair, task, tmp_path / "other", config, crew=ProcessCrew(elsewhere, 1))
    nowhere = replace(plan, pair={**plan.pair, "target": str(tmp_path / "none")})
    with pytest.raises(InputError, match="none"):
        mine(pair, task, tmp_path / "nowhere", config, crew=ProcessCrew(nowhere, 1))
    # which torch refuses with an error that nobody expects
    broken = replace(plan, threads=-1)
    with pytest.raises(RunError, match="every worker was lost 2 times"):
        mine(pair, task, tmp_path / "broken", config, crew=ProcessCrew(broken, 1))


# ---- on a Ray cluster of several nodes on this machine


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield made
    ray.shutdown()
    made.shutdown()


def ray_crew(plan: WorkerPlan, cluster) -> Crew:
    from lenience.mining.ray_crew import RayCrew

    return RayCrew(plan, cluster.address)


class Watched:
    """A crew that counts the samples of each worker, in the order in which workers came. The first
    two go on after a number of samples when a third has mined one."""

    def __init__(self, crew: Crew, alone: int):
        self.crew = crew
        self.most = crew.most
        self.at_once = crew.at_once
        self.alone = alone
        self.mined = list[int]()
        self.helped = Event()

    def hire(self, number: int) -> HiredWorker | None:
        worker = self.crew.hire(number)
        if worker is None:
            return None
        place = len(self.mined)
        self.mined.append(0)
        mine_part = worker.mine

        def counted(part: SampleBatch) -> Iterator[dict]:
            for record in mine_part(part):
                if place < 2 and sum(self.mined) >= self.alone:
                    assert self.helped.wait(300)
                self.mined[place] += 1
                if place == 2:
                    self.helped.set()
                yield record

        worker.mine = counted
        return worker

    def stop(self) -> None:
        self.crew.stop()

    def close(self) -> None:
        self.crew.close()


@needs("ray")
def test_a_lost_node_loses_nothing_and_an_added_one_helps(
    plan: WorkerPlan, pair: Pair, task: Task, whole: list[dict], tmp_path: Path, cluster
) -> None:
    """Each node has room for one worker, so the third worker is the added node's."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    crew = Watched(ray_crew(plan, cluster), alone=9)
    happened = list[str]()

    def change(phase: str, done: int, total: int) -> None:
        if done == 3:
            cluster.add_node(num_cpus=1)
            happened.append("added")
        elif done == 9:
            assert crew.helped.wait(300)
            cluster.remove_node(nodes[0], allow_graceful=False)
            happened.append("lost")

    config = MineConfig(limit=SAMPLES, batch_size=2)
    mine(pair, task, tmp_path, config, change, crew)
    assert happened == ["added", "lost"] and lines(tmp_path) == whole
    assert len(crew.mined) == 3 and all(crew.mined)


@needs("ray")
def test_no_cluster_is_told(plan: WorkerPlan) -> None:
    from lenience.mining.ray_crew import RayCrew

    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nowhere"):
        with pytest.raises(
            InputError, match=f"--ray {address}: no Ray cluster answers"
        ):
            RayCrew(plan, address)
