"""How weights get from disk into the model."""

from dataclasses import dataclass, field
from typing import Literal

from vllm.config.checks import check_one_of

LoadFormat = Literal["auto", "safetensors", "pt", "dummy"]


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Where weights come from and in which form."""

    load_format: LoadFormat = "auto"
    """Form of the weights. auto: safetensors, else .bin (read with weights_only); dummy: seeded
    random weights, for measuring without a checkpoint."""

    download_dir: str | None = None
    """Folder for downloaded models. Not set: the Hugging Face cache."""

    hf_token: str | bool | None = field(default=None, repr=False)
    """Token for models of the Hugging Face hub that need one; given without a token, or true:
    that of `hf auth login`. Not set: HF_TOKEN, or that of `hf auth login`."""

    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    """Files of a repository that are not downloaded."""

    use_tqdm_on_load: bool = True
    """Show a progress bar while loading weights."""

    def __post_init__(self) -> None:
        check_one_of(self, "load_format", ("auto", "safetensors", "pt", "dummy"))
