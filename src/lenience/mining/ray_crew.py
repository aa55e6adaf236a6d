"""Workers as actors on a Ray cluster. The crew grows with the cluster; nodes may come and go."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from threading import Event
from typing import Any

from lenience.core.errors import InputError, RunError, first_line
from lenience.mining.crew import HiredWorker, WorkerLost
from lenience.mining.work import SampleBatch, WorkerPlan
from lenience.mining.worker import Worker

POLL = 0.5
"""Seconds between checks of whether an actor has been placed."""
REACHED = 5.0
"""Seconds within which a cluster must accept a connection."""
NEEDS_RAY = "needs Ray: pip install 'lenience[ray]'"


class RayCrew:
    """Actors of Ray Core, each with a GPU if the cluster has any, else with `plan.threads` cores.
    One more actor is always requested, so that an added node gets a worker."""

    at_once = False

    def __init__(self, plan: WorkerPlan, address: str, most: int | None = None):
        """Take `address`: the address of a cluster, or "local" for a cluster on this machine
        alone."""
        try:
            import ray
        except ImportError:
            raise InputError(f"--ray {address}: {NEEDS_RAY}") from None
        self.plan = plan
        self.most = most
        self._ray = ray
        self._closed = Event()
        self._began = not ray.is_initialized()
        if self._began:
            options: dict[str, Any] = {"include_dashboard": False}
            if address != "local":
                _reach(address)
                options = {"address": address}
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)

    def hire(self, number: int) -> HiredWorker | None:
        ray: Any = self._ray
        on_cpu = self.plan.pair.get("device") == "cpu"
        gpus = 0 if on_cpu else ray.cluster_resources().get("GPU", 0)
        needs = {"num_gpus": 1} if gpus else {"num_cpus": self.plan.threads or 1}
        actor = ray.remote(Worker).options(**needs).remote(self.plan.to_json())
        ready = actor.identity.remote()
        while not self._closed.is_set():
            done, _ = ray.wait([ready], timeout=POLL)
            if done:
                return _Actor(ray, actor, self._known(ready))
        self._kill(actor)
        return None

    def _kill(self, actor: Any) -> None:
        if self._ray.is_initialized():  # otherwise ray.kill would start a new cluster
            self._ray.kill(actor)

    def _known(self, ready: Any) -> dict[str, Any]:
        """Return the identity of an actor that is ready. Raises the same errors as
        `HiredWorker.mine`."""
        try:
            identity: dict[str, Any] = self._ray.get(ready)
            return identity
        except Exception as error:
            raise _meant(error) from None

    def stop(self) -> None:
        self._closed.set()

    def close(self) -> None:
        self.stop()
        if self._began:
            self._ray.shutdown()


def _reach(address: str) -> None:
    """Raise InputError if nothing listens at a cluster's address, since Ray would wait for
    minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=REACHED).close()
    except (OSError, ValueError) as error:
        why = first_line(error)
        raise InputError(
            f"--ray {address}: no Ray cluster answers ({why}); name HOST:PORT of one, auto or local"
        ) from None


class _Actor:
    def __init__(self, ray: Any, actor: Any, identity: dict[str, Any]):
        self._ray = ray
        self._actor = actor
        self.identity = identity

    def mine(self, part: SampleBatch) -> Iterator[dict[str, Any]]:
        found = self._actor.mine.options(num_returns="streaming").remote(part.to_json())
        try:
            for record in found:
                yield self._ray.get(record)
        except Exception as error:
            raise _meant(error) from None

    def close(self) -> None:
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def _meant(error: Exception) -> Exception:
    """Return the error that a Ray error stands for: the worker's own error, or WorkerLost."""
    from ray.exceptions import RayTaskError

    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and isinstance(cause, InputError | RunError):
        return cause
    return WorkerLost(f"was lost ({type(error).__name__}: {first_line(error)})")
