"""Share the checks of both engines for calls that load, drop or pin LoRA adapters ahead of
requests.
"""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.errors import RequestError
from vllm.messages import AdapterRef

POLL_S = 0.005
"""Seconds between two checks whether an adapter is loaded, which happens in the background."""


def check_on(config: VllmConfig) -> None:
    """Refuse a call about adapters if LoRA is off.

    Raises:
        RequestError: LoRA is off.
    """
    if not config.lora.enable_lora:
        raise RequestError(
            "lora_id: the engine was started without LoRA. Start it with enable_lora=True",
            param="lora_id",
        )


def call_of(adapter: AdapterRef) -> tuple[str, str, str, int]:
    """Return the arguments of the worker's `load_adapter`."""
    return adapter.name, adapter.path, adapter.key, adapter.number


def is_loaded(answers: Sequence[str | None]) -> bool:
    """Return whether all workers have loaded an adapter, given the answers of `load_adapter`.

    Raises:
        RequestError: one of them cannot load it.
    """
    for reason in answers:
        if reason:
            raise RequestError(reason, param="lora_request")
    return None not in answers


def check_pinned(lora_id: int, answers: Sequence[bool], config: VllmConfig) -> bool:
    """Return True if all workers have pinned an adapter.

    Raises:
        RequestError: the adapter is not loaded, or too many are pinned.
    """
    if not all(answers):
        most = config.lora.num_in_host_memory
        raise RequestError(
            f"pin_lora: cannot pin the adapter {lora_id}: it is not loaded (load it with "
            f"add_lora), or too many adapters are pinned. With max_cpu_loras={most}, at most "
            f"{max(1, most - 1)} can be pinned: unpin others or raise max_cpu_loras",
            param="lora_id",
        )
    return True
