"""Calls that go to the cores of all replicas, and what they have changed there."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.engine.process.core_changes import CoreChanges
from vllm.engine.process.core_supervisor import CoreSupervisor
from vllm.errors import CapacityError, EngineDeadError, RequestError


class ReplicaCalls:
    """Calls the core of every replica that is ready, all at the same time.

    Args:
        replicas: all of them.
        changes: where it is noted what the calls change, for a core that is started again.
    """

    def __init__(self, replicas: Sequence[CoreSupervisor], changes: CoreChanges) -> None:
        self._all = replicas
        self._changes = changes

    @property
    def sleeping_parts(self) -> list[str]:
        """Tags of the parts that sleep in all replicas."""
        return self._changes.sleeping_parts

    async def call(self, name: str, *args: Any) -> list[Any]:
        """Call a method of the core of every replica that is ready, all at the same time.

        Returns:
            Their results. A failure of one is raised when all have ended.

        Raises:
            As `CoreSupervisor.call`.
        """
        return _all_of(await self._call_ready(name, *args))

    async def sleep(self, level: int) -> None:
        """Let all replicas sleep. If one has requests, none sleeps.

        Raises:
            As `EngineCore.sleep`.
        """
        async with self._changes.lock:
            results = await self._call_ready("sleep", level)
            if _has_changed(results):
                self._changes.note_sleep(level)
            elif len(self._all) > 1 and any(isinstance(e, CapacityError) for e in results.values()):
                await self.call("wake_up", None)  # the replicas that had no requests
            _all_of(results)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Wake all replicas, or parts of them.

        Raises:
            As `EngineCore.wake_up`.
        """
        async with self._changes.lock:
            results = await self._call_ready("wake_up", tags)
            if _has_changed(results):
                self._changes.note_wake_up(tags)
            _all_of(results)

    async def reload_weights(self, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Call `reload_weights` of all workers.

        Raises:
            As `call`.
        """
        async with self._changes.lock:
            call = ("collective_rpc", "reload_weights", None, args, kwargs)
            results = await self._call_ready(*call)
            if _has_changed(results):
                self._changes.note_reload(args, kwargs)
            return _all_of(results)

    async def stop_profile(self) -> list[str]:
        """End the traces of all replicas.

        Returns:
            A sentence about each replica that has recorded none.

        Raises:
            RequestError: no replica has a trace.
            As `call`.
        """
        results = await self._call_ready("collective_rpc", "stop_profile", None, [], {})
        failures = [each for each in results.values() if isinstance(each, BaseException)]
        for failure in failures:
            if len(failures) == len(results) or not isinstance(failure, RequestError):
                raise failure
        missing = []
        for index, each in enumerate(self._all):
            if not each.startup.is_ready:
                missing.append(f"replica {index} has no trace: its state is {each.startup.phase!r}")
            elif index not in results or isinstance(results[index], RequestError):
                again = ", as it was started again" if each.num_restarts_done else ""
                missing.append(f"replica {index} has no trace{again}")
        return missing

    async def _call_ready(self, name: str, *args: Any) -> dict[int, Any]:
        """The results of a call to every replica that is ready, by its index. A failure is a
        result.

        Raises:
            EngineDeadError: none is ready.
        """
        ready = [index for index, each in enumerate(self._all) if each.startup.is_ready]
        if not ready:
            raise self._all[0].dead_error
        calls = [self._all[index].call(name, *args) for index in ready]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return dict(zip(ready, results, strict=True))


def _has_changed(results: Mapping[int, Any]) -> bool:
    """Whether a call has changed the cores: none has refused it. One that has died meanwhile is
    changed when it is started again."""
    failures = [each for each in results.values() if isinstance(each, BaseException)]
    is_lost = all(isinstance(failure, EngineDeadError) for failure in failures)
    return is_lost and len(failures) < len(results)


def _all_of(results: Mapping[int, Any]) -> list[Any]:
    """The results of a call, in the order of the replicas; raises its first failure."""
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return list(results.values())
