"""What `LLM` offers besides generating and pooling: calls to the workers, and the model itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.engine.llm_engine import LLMEngine
from vllm.engine.metrics.reader import Metric

if TYPE_CHECKING:
    from torch import nn

_Result = TypeVar("_Result")


class ControlMethods:
    """Mixed into `LLM`, which has the engine."""

    llm_engine: LLMEngine

    def collective_rpc(
        self,
        method: str | Callable[..., _Result],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[_Result]:
        """Call a method of every worker; see `LLMEngine.collective_rpc`.

        Args:
            method: name of a method of the worker or of its `worker_extension_cls`; or a
                function, which gets the worker as its first argument.
            timeout: seconds to wait; the call itself is not ended.
            args, kwargs: of the call.

        Returns:
            One result per worker.
        """
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: "Callable[[nn.Module], _Result]") -> list[_Result]:
        """Call a function with the model of every worker.

        Linear layers may hold their weights in the layout of the kernels, not as a parameter; on
        the CPU that is so for bfloat16 and for quantized models.

        Returns:
            One result per worker.
        """
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache until `wake_up`; see `LLMEngine.sleep`.

        Args:
            level: 1 keeps the content of the weights; 2 keeps nothing, and `wake_up` reads the
                checkpoint again.

        Raises:
            RequestError: the LLM was made without `enable_sleep_mode=True`, or there is no such
                level.
        """
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory again.

        Args:
            tags: "weights", "kv_cache" or both; None is both.

        Raises:
            RequestError: sleep mode is off, or there is no such tag.
            WeightLoadError: the weights cannot be read again; they still sleep.
        """
        self.llm_engine.wake_up(tags)

    def start_profile(self) -> None:
        """Begin a trace of what the workers compute, in the folder VLLM_TORCH_PROFILER_DIR.

        Raises:
            RequestError: that is not set, or a trace is being recorded already.
        """
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        """End the trace and write it; returns when the file is complete.

        Raises:
            RequestError: no trace is being recorded.
        """
        self.llm_engine.stop_profile()

    def get_metrics(self) -> list[Metric]:
        """The metrics since the LLM was created: those of a server's /metrics, as objects
        of `vllm.engine.metrics.reader`.

        Raises:
            RequestError: the LLM was made without `disable_log_stats=False`.
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Drop all cached prefixes. Returns False and changes nothing while requests run."""
        return self.llm_engine.reset_prefix_cache()
