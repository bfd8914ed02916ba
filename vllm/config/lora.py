"""Define settings of LoRA adapters: how many a step may use, and how large they are."""

from dataclasses import dataclass
from typing import Literal

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

_USUAL_SLOTS = 4


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Settings of LoRA adapters."""

    enable_lora: bool = False
    """Accept requests with a LoRA adapter."""

    max_loras: int | None = None
    """Maximum number of different adapters in one step. Requests with other adapters wait. Default:
    4, or max_cpu_loras if that is less."""

    max_lora_rank: int = 16
    """Maximum rank of an adapter. Adapters with a larger rank are refused; a larger value needs
    more memory."""

    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory. If there are more, the least recently used one is
    dropped. Default: four times max_loras."""

    lora_target_modules: tuple[str, ...] | None = None
    """Names of the modules that adapters may change, such as q_proj, lm_head or experts. Other
    modules take no memory and no time for adapters. Default: all; on a card all but experts."""

    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Data type of adapter weights. auto: the data type of the model."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_lora_rank")
        for name in ("max_loras", "max_cpu_loras"):
            if getattr(self, name) is not None:
                check_at_least(self, 1, name)
        check_one_of(self, "lora_dtype", ("auto", "float16", "bfloat16", "float32"))
        if self.num_in_host_memory < self.num_slots:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras "
                f"({self.max_loras}). Raise the first or lower the second"
            )

    @property
    def num_slots(self) -> int:
        """Number of adapter slots: `max_loras`, or its default."""
        if self.max_loras is not None:
            return self.max_loras
        return min(_USUAL_SLOTS, self.max_cpu_loras or _USUAL_SLOTS)

    @property
    def num_in_host_memory(self) -> int:
        """Number of adapters in host memory: `max_cpu_loras`, or its default."""
        return self.max_cpu_loras or 4 * self.num_slots
