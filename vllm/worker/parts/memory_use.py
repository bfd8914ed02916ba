"""Lists the uses of a device's memory, for errors about a KV cache that is too small."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig


@dataclass(frozen=True)
class MemoryUse:
    """One use of memory that is then missing for the KV cache."""

    what: str
    num_bytes: int
    fix: str
    """Advice for using less memory; an imperative without a capital."""
    setting: str = ""
    """The flag or variable that has decided it, with its value."""

    def __str__(self) -> str:
        setting = f" ({self.setting})" if self.setting else ""
        return f"{self.what} {format_bytes(self.num_bytes)}{setting}"


@dataclass(frozen=True)
class CacheBudget:
    """The memory of the KV cache, and why it is not larger.

    Args:
        num_bytes: bytes of the cache.
        setting: the flag that decides its size; None: the cache gets what the other uses leave.
        others: the other uses of the same memory.
    """

    num_bytes: int
    setting: str | None = None
    others: Sequence[MemoryUse] = ()

    @property
    def reason(self) -> str:
        """Sentence for an error: why the cache has so little memory."""
        size = format_bytes(self.num_bytes)
        if self.setting is not None:
            return f"It has {size} by {self.setting}"
        return ", ".join([f"The memory is divided into: KV cache {size}", *_listed(self.others)])

    @property
    def fix(self) -> str:
        """Advice for getting a larger cache: an imperative that starts in lower case.

        It is about the largest of the other uses.
        """
        if self.setting is not None:
            return f"raise {self.setting}"
        return _fix(self.others)


def division(uses: Sequence[MemoryUse]) -> str:
    """Return sentences for an error: how the memory is divided, and how to change it."""
    fix = _fix(uses)
    return f"The memory is divided into: {', '.join(_listed(uses))}. {fix[0].upper()}{fix[1:]}"


def _listed(uses: Sequence[MemoryUse]) -> list[str]:
    """Return the texts of the uses, the largest first."""
    return [str(use) for use in sorted(uses, key=lambda use: -use.num_bytes) if use.num_bytes > 0]


def _fix(uses: Sequence[MemoryUse]) -> str:
    """Return advice that makes the largest use smaller."""
    largest = max(uses, key=lambda use: use.num_bytes, default=None)
    return largest.fix if largest and largest.num_bytes > 0 else "use a smaller model"


def unused_share(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory that `gpu_memory_utilization` leaves unused, as a use."""
    utilization = config.cache.gpu_memory_utilization
    flag = "--gpu-memory-utilization"
    return MemoryUse("unused", num_bytes, f"raise {flag}", f"{flag} {utilization:g}")


def weights_use(num_bytes: int, *more_fixes: str) -> MemoryUse:
    """Return the memory of the model's weights as a use.

    Args:
        num_bytes: bytes of the weights.
        more_fixes: other advice for making them smaller, as imperatives in lower case.
    """
    fixes = ("use a smaller model or dtype", "use more devices (--tensor-parallel-size)")
    return MemoryUse("weights", num_bytes, ", or ".join([*fixes, *more_fixes]))


def draft_use(num_bytes: int) -> MemoryUse:
    """Return the memory of the draft model's weights as a use."""
    fix = "use a smaller draft model, or leave --speculative-config out"
    return MemoryUse("draft model", num_bytes, fix, "--speculative-config")


def states_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory of the recurrent states of all requests as a use."""
    setting = f"--max-num-seqs {config.scheduler.max_num_seqs}"
    return MemoryUse("recurrent states", num_bytes, "lower --max-num-seqs", setting)


def adapters_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory of the LoRA adapters on the device as a use."""
    lora = config.lora
    setting = f"--max-loras {lora.num_slots}, --max-lora-rank {lora.max_lora_rank}"
    fix = "lower --max-loras or --max-lora-rank"
    return MemoryUse("LoRA adapters", num_bytes, fix, setting)


def embeddings_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory of the table of given embeddings as a use."""
    setting = f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}"
    fix = "lower --max-num-batched-tokens"
    if config.model.enable_prompt_embeds:
        fix += " or leave --enable-prompt-embeds out"
    return MemoryUse("embeddings of prompts", num_bytes, fix, setting)


def items_use(num_bytes: int, what: str = "keys and values of images and sounds") -> MemoryUse:
    """Return the memory of items that cross-attention layers read as a use."""
    return MemoryUse(what, num_bytes, "lower --max-num-seqs")


def launches_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory of running forward passes as a use."""
    setting = f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}"
    return MemoryUse("forward passes", num_bytes, "lower --max-num-batched-tokens", setting)


def graphs_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the memory of HPU graphs as a use."""
    name = "VLLM_GRAPH_RESERVED_MEM"
    setting = f"{name}={config.hpu.graph_reserved_mem:g}"
    return MemoryUse("HPU graphs", num_bytes, f"lower {name}", setting)
