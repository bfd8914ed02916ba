"""Send calls to the cores of all replicas, and record what they have changed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.engine.process.core_calls import CoreCalls
from vllm.engine.process.core_supervisor import CoreSupervisor
from vllm.engine.process.replay_log import ReplayLog
from vllm.errors import CapacityError, EngineDeadError, RequestError
from vllm.executor import Worker

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


_EMPTIES_PREFIX_CACHES = CoreCalls.reset_prefix_cache, CoreCalls.sleep


class ReplicaCalls:
    """Calls the core of every replica that is ready, all at the same time.

    Args:
        replicas: all replicas.
        changes: log of the changes that calls make, for restarted cores.
        forget_prefixes: called when the prefix caches of all replicas were emptied.
    """

    def __init__(
        self,
        replicas: Sequence[CoreSupervisor],
        changes: ReplayLog,
        forget_prefixes: Callable[[], None],
    ) -> None:
        self._all = replicas
        self._changes = changes
        self._forget_prefixes = forget_prefixes
        self._notes: dict[Callable[..., Any], Callable[..., None]] = {
            CoreCalls.sleep: changes.note_sleep,
            CoreCalls.wake_up: changes.note_awake,
        }

    @property
    def sleeping_parts(self) -> list[str]:
        """Tags of the parts that sleep in all replicas."""
        return self._changes.sleeping_parts

    async def call(
        self,
        method: Callable[Concatenate[CoreCalls, _Args], _Result],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> list[_Result]:
        """Call a method of the core of every replica that is ready, all at the same time.

        If one replica cannot sleep because it has requests, none sleeps.

        Returns:
            The results. If a call fails, its error is raised after all calls have ended.

        Raises:
            The errors of `CoreSupervisor.call`.
        """
        note = self._notes.get(method)
        if note is None:
            results = await self._call_ready(method, *args, **kwargs)
        else:
            async with self._changes.lock:
                results = await self._call_ready(method, *args, **kwargs)
                if _has_changed(results):
                    note(*args, **kwargs)
                elif method is CoreCalls.sleep and _are_at_odds(results):
                    _all_of(await self._call_ready(CoreCalls.wake_up))
        found = _all_of(results)
        if method in _EMPTIES_PREFIX_CACHES:
            self._forget_prefixes()
        return found

    async def reload_weights(self, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Call `reload_weights` of all workers.

        Raises:
            The errors of `call`.
        """
        async with self._changes.lock:
            call = (Worker.reload_weights.__name__, None, args, kwargs)
            results = await self._call_ready(CoreCalls.collective_rpc, *call)
            if _has_changed(results):
                self._changes.note_reload(args, kwargs)
            return _all_of(results)

    async def stop_profile(self) -> list[str]:
        """Stop the profiler traces of all replicas.

        Returns:
            One sentence for each replica that has recorded no trace.

        Raises:
            RequestError: no replica has a trace.
            Also the errors of `call`.
        """
        results = await self._call_ready(CoreCalls.call_workers, Worker.stop_profile.__name__)
        failures = [each for each in results.values() if isinstance(each, BaseException)]
        for failure in failures:
            if len(failures) == len(results) or not isinstance(failure, RequestError):
                raise failure
        missing = []
        for index, each in enumerate(self._all):
            if not each.startup.is_ready:
                missing.append(f"replica {index} has no trace: its state is {each.startup.phase!r}")
            elif index not in results or isinstance(results[index], RequestError):
                again = (
                    (", because it was restarted after the trace began")
                    if each.num_restarts_done
                    else ""
                )
                missing.append(f"replica {index} has no trace{again}")
        return missing

    async def _call_ready(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> dict[int, Any]:
        """Call every replica that is ready, and return the results by its index. A failure is
        returned as a result.

        Raises:
            EngineDeadError: no replica is ready.
        """
        ready = [index for index, each in enumerate(self._all) if each.startup.is_ready]
        if not ready:
            raise self._all[0].dead_error
        calls = [self._all[index].call(method.__name__, *args, **kwargs) for index in ready]
        results = await asyncio.gather(*calls, return_exceptions=True)
        return dict(zip(ready, results, strict=True))


def _has_changed(results: Mapping[int, Any]) -> bool:
    """Return whether a call has changed the cores, because none has refused it.

    A core that has died meanwhile does not count: it is changed when it is restarted.
    """
    failures = [each for each in results.values() if isinstance(each, BaseException)]
    is_lost = all(isinstance(failure, EngineDeadError) for failure in failures)
    return is_lost and len(failures) < len(results)


def _are_at_odds(results: Mapping[int, Any]) -> bool:
    """Return whether some of several cores have refused a call because they have requests."""
    return len(results) > 1 and any(isinstance(each, CapacityError) for each in results.values())


def _all_of(results: Mapping[int, Any]) -> list[Any]:
    """Return the results of a call, in the order of the replicas; raise its first failure."""
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return list(results.values())
