"""Define settings for loading weights."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm.config.fields import check_one_of
from vllm.errors import ConfigError

LoadFormat = Literal[
    "auto", "safetensors", "pt", "dummy", "sharded_state", "gguf", "mistral", "bitsandbytes"
]


_OTHER_READERS = {
    "hf": "auto",
    **dict.fromkeys(("runai_streamer", "fastsafetensors"), "safetensors"),
}
"""Formats of newer releases that read the same files in other ways."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Source and format of the weights."""

    load_format: LoadFormat = field(default="auto", metadata={"same_as": _OTHER_READERS})
    """Format of the weight files. auto: the first of these that the folder has: safetensors, .bin
    (read with weights_only), GGUF, mistral. mistral: consolidated*.safetensors with params.json, as
    Mistral AI publishes them. dummy: random weights, to measure without a checkpoint.
    sharded_state: one file per rank, written by tools/save_sharded_state.py. bitsandbytes: like
    auto, together with quantization=bitsandbytes."""

    download_dir: str | None = None
    """Folder for downloaded models. Default: the Hugging Face cache."""

    hf_token: str | bool | None = field(default=None, repr=False)
    """Token for private or gated models of the Hugging Face hub. The flag without a value, or true:
    the token saved by `hf auth login`. Default: HF_TOKEN, or the token saved by `hf auth login`."""

    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    """Patterns of file names that are not downloaded from a repository of the Hugging Face hub."""

    use_tqdm_on_load: bool = True
    """Show a progress bar while loading weights."""

    cpu_offload_gb: float = 0.0
    """GiB of weights to keep in host memory, for a model that is larger than the card. Whole layers
    are kept there, and each step copies them to the card, which is slow. Needs enforce_eager. No
    effect on cpu."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cpu_offload_gb) and self.cpu_offload_gb >= 0):
            raise ConfigError(f"cpu_offload_gb must be at least 0, got {self.cpu_offload_gb}")
        check_one_of(self, "load_format", get_args(LoadFormat))

    @property
    def cpu_offload_bytes(self) -> int:
        """Bytes of weights to store in host memory instead of the card."""
        return int(self.cpu_offload_gb * 2**30)
