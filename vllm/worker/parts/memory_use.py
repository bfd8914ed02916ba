"""Lists what the memory of a device is used for, for the errors of a KV cache that is too small."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig


@dataclass(frozen=True)
class MemoryUse:
    """A use of the memory that the KV cache might have had."""

    what: str
    num_bytes: int
    fix: str
    """Advice for making it smaller; an imperative without a capital."""
    setting: str = ""
    """The flag or variable that has decided it, with its value."""

    def __str__(self) -> str:
        setting = f" ({self.setting})" if self.setting else ""
        return f"{self.what} {format_bytes(self.num_bytes)}{setting}"


@dataclass(frozen=True)
class CacheBudget:
    """The memory of the KV cache, and why it is not more.

    Args:
        num_bytes: of the cache.
        setting: the flag that has said how much it is; None: it has what the others leave.
        others: the other uses of the same memory.
    """

    num_bytes: int
    setting: str | None = None
    others: Sequence[MemoryUse] = ()

    @property
    def reason(self) -> str:
        """Return why the cache has so little memory: a sentence for an error."""
        size = format_bytes(self.num_bytes)
        if self.setting is not None:
            return f"It has {size} by {self.setting}"
        return ", ".join([f"The memory is divided into: KV cache {size}", *_listed(self.others)])

    @property
    def fix(self) -> str:
        """Return advice for giving the cache more: an imperative without a capital. It is about the
        largest of the other uses."""
        if self.setting is not None:
            return f"raise {self.setting}"
        return _fix(self.others)


def division(uses: Sequence[MemoryUse]) -> str:
    """Return what has the memory and how to change that, as sentences for an error."""
    fix = _fix(uses)
    return f"The memory is divided into: {', '.join(_listed(uses))}. {fix[0].upper()}{fix[1:]}"


def _listed(uses: Sequence[MemoryUse]) -> list[str]:
    """Return the texts of uses, the largest first."""
    return [str(use) for use in sorted(uses, key=lambda use: -use.num_bytes) if use.num_bytes > 0]


def _fix(uses: Sequence[MemoryUse]) -> str:
    """Return what makes the largest use smaller."""
    largest = max(uses, key=lambda use: use.num_bytes, default=None)
    return largest.fix if largest and largest.num_bytes > 0 else "use a smaller model"


def unused_share(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of what gpu_memory_utilization keeps free."""
    utilization = config.cache.gpu_memory_utilization
    flag = "--gpu-memory-utilization"
    return MemoryUse("unused", num_bytes, f"raise {flag}", f"{flag} {utilization:g}")


def weights_use(num_bytes: int, *more_fixes: str) -> MemoryUse:
    """Return the use of the weights of the model.

    Args:
        num_bytes: of the weights.
        more_fixes: what else makes them smaller on this device, as imperatives without a capital.
    """
    fixes = ("use a smaller model or dtype", "use more devices (--tensor-parallel-size)")
    return MemoryUse("weights", num_bytes, ", or ".join([*fixes, *more_fixes]))


def draft_use(num_bytes: int) -> MemoryUse:
    """Return the use of the weights of the draft model."""
    fix = "use a smaller draft model, or leave --speculative-config out"
    return MemoryUse("draft model", num_bytes, fix, "--speculative-config")


def states_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of the recurrent states of all requests."""
    setting = f"--max-num-seqs {config.scheduler.max_num_seqs}"
    return MemoryUse("recurrent states", num_bytes, "lower --max-num-seqs", setting)


def adapters_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of the LoRA adapters on the device."""
    lora = config.lora
    setting = f"--max-loras {lora.num_slots}, --max-lora-rank {lora.max_lora_rank}"
    fix = "lower --max-loras or --max-lora-rank"
    return MemoryUse("LoRA adapters", num_bytes, fix, setting)


def embeddings_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of the table of embeddings that prompts bring."""
    setting = f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}"
    fix = "lower --max-num-batched-tokens"
    if config.model.enable_prompt_embeds:
        fix += " or leave --enable-prompt-embeds out"
    return MemoryUse("embeddings of prompts", num_bytes, fix, setting)


def items_use(num_bytes: int, what: str = "keys and values of images and sounds") -> MemoryUse:
    """Return the use of what cross-attention layers read."""
    return MemoryUse(what, num_bytes, "lower --max-num-seqs")


def launches_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of forward passes while they run."""
    setting = f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}"
    return MemoryUse("forward passes", num_bytes, "lower --max-num-batched-tokens", setting)


def graphs_use(config: VllmConfig, num_bytes: int) -> MemoryUse:
    """Return the use of HPU graphs."""
    name = "VLLM_GRAPH_RESERVED_MEM"
    setting = f"{name}={config.hpu.graph_reserved_mem:g}"
    return MemoryUse("HPU graphs", num_bytes, f"lower {name}", setting)
