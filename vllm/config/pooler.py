"""How a pooling model makes one result of the hidden states of a prompt."""

from dataclasses import dataclass
from typing import Literal

from vllm.config.fields import check_one_of
from vllm.errors import ConfigError

ModelTask = Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward"]
PoolingTask = Literal["embed", "classify", "score", "reward"]
PoolingType = Literal["CLS", "LAST", "MEAN", "ALL", "STEP"]
Activation = Literal["none", "normalize", "softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Pooling of one model, settled with the model's files and what the user said."""

    task: PoolingTask
    """embed: a vector; classify: a probability per label; score: one number for a pair; reward:
    numbers per token."""

    pooling_type: PoolingType
    """Tokens whose hidden states count: the first (CLS), the last, the mean of all, each on its
    own (ALL), or each that is `step_tag_id` (STEP)."""

    activation: Activation = "none"
    """What is done to the numbers at the end. normalize: length 1."""

    is_causal: bool = True
    """A decoder. Else every token sees every other one, and there is no KV cache."""

    step_tag_id: int | None = None
    """STEP: the token that ends a step."""

    returned_token_ids: tuple[int, ...] = ()
    """Indices of the numbers to return; empty: all."""

    labels: tuple[str, ...] = ()
    """Names of the numbers that a classifier gives, in order; empty when it has no head."""

    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes that embeddings may be cut to; with `is_matryoshka` and none named: any."""

    is_matryoshka: bool = False
    """Embeddings may be cut to fewer dimensions."""

    def __post_init__(self) -> None:
        check_one_of(self, "pooling_type", ("CLS", "LAST", "MEAN", "ALL", "STEP"))
        check_one_of(self, "activation", ("none", "normalize", "softmax", "sigmoid"))
        if self.pooling_type == "STEP" and self.step_tag_id is None:
            raise ConfigError(
                "pooling_type STEP needs step_tag_id: set it in override_pooler_config"
            )

    @property
    def needs_whole_prompts(self) -> bool:
        """Every token of a prompt has to go through the model in one step: neither split over
        several nor found in the prefix cache."""
        return not self.is_causal or self.pooling_type != "LAST"
