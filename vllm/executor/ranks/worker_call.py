"""Call workers by the name of a method, and find the class of the workers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import ParallelConfig, VllmConfig
from vllm.errors import ConfigError, RequestError
from vllm.executor.ranks.rank_wire import RankAssignment
from vllm.messages import EngineRequest
from vllm.platforms import resolve_platform
from vllm.utils.imports import load_class, load_user_class
from vllm.worker.interface import ENGINE_METHODS, USER_METHODS, Worker

WorkerMethod = str | Callable[..., Any]
"""Name of a method of the worker, or a function whose first argument is the worker."""


class WorkerCall(NamedTuple):
    """A call of a method of every worker."""

    method: WorkerMethod
    timeout: float | None
    """Seconds to wait; None: no limit. The call itself is not aborted."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def on(self, worker: Any) -> Any:
        """Call the method of one worker, which is loaded.

        Raises:
            RequestError: the worker has no such method, or the method does not accept these
                arguments.
        """
        return call_worker(worker, self.method, self.args, self.kwargs)


_ACCEPTED = (
    f"Accepted are {', '.join(sorted(USER_METHODS))}, and methods of a class of your own, given by "
    f"--worker-extension-cls package.module.Class"
)


def make_worker(config: VllmConfig, rank: int, assignment: RankAssignment | None = None) -> Worker:
    """Create the worker of a rank in this process, without loading it.

    Args:
        config: config of the engine.
        rank: rank of the worker.
        assignment: position of the rank on its machine; None: all ranks are on this machine.

    Raises:
        ConfigError: a class that `config.parallel` names cannot be used, or there is no device.
    """
    parallel = config.parallel
    platform = resolve_platform(config.device.device)
    if assignment is None:
        platform.set_rank(rank, parallel.world_size)
    elif assignment.has_own_devices:
        platform.set_rank(rank, parallel.world_size, 0, 1)
    else:
        platform.set_rank(rank, parallel.world_size, assignment.index, assignment.count)
    worker: Worker = resolve_worker_class(parallel, platform.worker_class)(config)
    if assignment is not None:
        worker.num_local_ranks = assignment.count
    return worker


def refuse_code(parallel: ParallelConfig, request: EngineRequest) -> None:
    """Refuse a request that contains code, which cannot be sent to other processes.

    Raises:
        RequestError: it has logits processors.
    """
    if request.sampling_params.logits_processors:
        raise RequestError(
            "logits_processors cannot be used with several workers (tensor_parallel_size * "
            f"pipeline_parallel_size is {parallel.world_size}, distributed_executor_backend is "
            f"{parallel.distributed_executor_backend or 'mp'!r}): they are code, which cannot be "
            "sent to the other processes",
            param="logits_processors",
        )


def name_to_send(method: WorkerMethod) -> str:
    """Return the name of a method, to be sent to workers in other processes.

    Raises:
        RequestError: it is a function, not the name of a method.
    """
    if callable(method):
        raise RequestError(
            "collective_rpc cannot send a function to the processes of several workers. Give "
            "the name of a method, and add methods of your own with worker_extension_cls",
            param="method",
        )
    return method


def refuse_engine_method(method: WorkerMethod) -> None:
    """Refuse a user's call of a method that only the engine may call.

    Raises:
        RequestError: only the engine may call the method, or it is neither a name nor a function.
    """
    if callable(method):
        return
    if not isinstance(method, str):
        raise RequestError(
            f"collective_rpc takes the name of a method or a function, not {method!r}",
            param="method",
        )
    if method in ENGINE_METHODS:
        raise RequestError(
            f"collective_rpc {method!r}: only the engine calls this method of the workers. "
            f"{_ACCEPTED}. For sleep mode and adapters, call the methods of the engine itself",
            param="method",
        )


def resolve_worker_class(parallel: ParallelConfig, platform_class: str) -> type:
    """Return the class of the workers, extended by the user's extension class if there is one.

    Args:
        parallel: config that names the classes.
        platform_class: worker class of the device, as "module:Class".

    Raises:
        ConfigError: a class cannot be imported, or the extension has a method that the worker class
            already has.
    """
    worker_class: type = (
        load_class(platform_class)
        if parallel.worker_cls == "auto"
        else load_user_class("worker_cls", parallel.worker_cls)
    )
    if not parallel.worker_extension_cls:
        return worker_class
    extension = load_user_class("worker_extension_cls", parallel.worker_extension_cls)
    both = sorted(n for n in dir(extension) if not n.startswith("__") and hasattr(worker_class, n))
    if both:
        raise ConfigError(
            f"worker_extension_cls={parallel.worker_extension_cls!r} defines {', '.join(both)}, "
            "which the worker has already. Choose other names"
        )
    return type(worker_class.__name__, (worker_class, extension), {})


def call_worker(
    worker: Any, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of a worker.

    Args:
        worker: a loaded worker.
        method: name of the method, or a function to call with the worker.
        args, kwargs: arguments of the call.

    Raises:
        RequestError: the worker has no such method, or the method does not accept these arguments.
    """
    if callable(method):
        return method(worker, *args, **kwargs)
    found = None if method.startswith("_") else getattr(worker, method, None)
    if not inspect.isroutine(found):
        raise RequestError(f"the workers have no method {method!r}. {_ACCEPTED}", param="method")
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError(f"the method {method!r} of the workers: {error}", param="args") from None
    return found(*args, **kwargs)
