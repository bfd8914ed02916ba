"""Define the settings of the paged KV cache: block size, memory budget, prefix caching."""

import typing
from dataclasses import dataclass, field
from typing import Literal

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

CacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]


_OTHER_HASHES = dict.fromkeys(("sha256_cbor", "xxhash", "xxhash_cbor"), "sha256")
"""Hash functions of newer releases. Outputs do not depend on the function."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Settings for the blocks and memory of the KV cache."""

    block_size: int = field(metadata={"auto": True})
    """Tokens per KV block. Default: 128 on hpu, 16 on cpu."""

    # Scripts for the Gaudi fork abbreviate the flag.
    gpu_memory_utilization: float = field(default=0.9, metadata={"aliases": ("--gpu-memory-util",)})
    """Fraction (0 to 1) of the free device memory, measured after the weights are loaded, that the
    engine may use. The KV cache and HPU graphs take their memory from it."""

    num_gpu_blocks_override: int | None = None
    """Number of KV blocks. Default: as many as fit into the memory."""

    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache per device in bytes, recurrent (Mamba) states included. Replaces
    gpu_memory_utilization. Default: VLLM_CPU_KVCACHE_SPACE on cpu; otherwise derived from
    gpu_memory_utilization."""

    kv_cache_dtype: CacheDType = "auto"
    """Data type of the KV cache. auto: the dtype of the model. fp8 and fp8_inc mean fp8_e4m3. FP8
    needs half the memory of bfloat16. Its scales are read from the checkpoint or from the files of
    QUANT_CONFIG; otherwise they are 1 (see --calculate-kv-scales)."""

    calculate_kv_scales: bool = False
    """Calculate the scales of an FP8 KV cache at the start, one for each key/value head, with one
    forward pass over random tokens (the same at every start). Layers with scales in the checkpoint
    or in QUANT_CONFIG keep them."""

    enable_prefix_caching: bool = True
    """Keep the KV cache of finished requests, and reuse it for requests with the same prefix."""

    prefix_caching_hash_algo: Literal["sha256", "builtin"] = field(
        default="sha256", metadata={"same_as": _OTHER_HASHES}
    )
    """Hash function of the prefix cache. builtin also means sha256, because collisions of Python's
    own hash can be provoked."""

    num_kept_states: int = 16
    """Number of recurrent states that the prefix cache keeps, for models with Mamba, DeltaNet or
    short convolution layers. Fewer are kept if they would take more than a quarter of the cache
    memory. 0: no prefix caching for these models. On a Gaudi card, each recurrent state needs one
    more forward pass of its prompt."""

    num_gpu_blocks: int | None = field(default=None, metadata={"cli": False})
    """Number of KV blocks on the device, in the config of a running `LLMEngine`; None: not measured
    yet."""

    @property
    def num_cpu_blocks(self) -> int:
        """Number of KV blocks in host memory: none, because a preempted request is computed again
        instead of being swapped out.
        """
        return 0

    @property
    def cache_dtype(self) -> CacheDType:
        """The value of `kv_cache_dtype`, under the name of vLLM's config."""
        return self.kv_cache_dtype

    def __post_init__(self) -> None:
        check_at_least(self, 1, "block_size")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            given = self.gpu_memory_utilization
            hint = (
                (f". It is a fraction: write {given:g} % as {given / 100:g}")
                if 2 <= given <= 100
                else ""
            )
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {given}{hint}"
            )
        if self.num_gpu_blocks_override is not None:
            # At least 2: block 0 is the null block, and a request needs a block.
            check_at_least(self, 2, "num_gpu_blocks_override")
        if self.kv_cache_memory_bytes is not None:
            check_at_least(self, 1, "kv_cache_memory_bytes")
        check_at_least(self, 0, "num_kept_states")
        check_one_of(self, "kv_cache_dtype", typing.get_args(CacheDType))
        check_one_of(self, "prefix_caching_hash_algo", ("sha256", "builtin"))
