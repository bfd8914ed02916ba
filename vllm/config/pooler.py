"""Define settings of pooling: how a model computes one result from the hidden states of a
prompt.
"""

from dataclasses import dataclass
from typing import Literal

from vllm.config.fields import check_one_of
from vllm.errors import ConfigError

ModelTask = Literal[
    "auto", "generate", "pooling", "embed", "embedding", "classify", "score", "reward"
]
PoolingTask = Literal["embed", "classify", "score", "reward"]
PoolingType = Literal["CLS", "LAST", "MEAN", "ALL", "STEP"]
Activation = Literal["none", "normalize", "softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Pooling of one model, resolved from its files and the user's settings."""

    task: PoolingTask
    """Kind of result. embed: a vector; classify: a probability per label; score: one value for a
    pair; reward: values per token."""

    pooling_type: PoolingType
    """Tokens whose hidden states count: the first (CLS), the last, the mean of all, each on its
    own (ALL), or each that is `step_tag_id` (STEP)."""

    activation: Activation = "none"
    """Activation function of the result. normalize: scale to length 1."""

    is_causal: bool = True
    """Whether the model is a decoder. Otherwise every token sees all others, and there is no KV
    cache."""

    step_tag_id: int | None = None
    """STEP: the token at the end of a step."""

    returned_token_ids: tuple[int, ...] = ()
    """Indices of the values to return; empty: all."""

    labels: tuple[str, ...] = ()
    """Names of the values that a classifier returns, in order; empty if it has no head."""

    matryoshka_dimensions: tuple[int, ...] = ()
    """Sizes to which embeddings may be shortened; empty with `is_matryoshka`: any size."""

    is_matryoshka: bool = False
    """Whether embeddings may be shortened to fewer dimensions."""

    def __post_init__(self) -> None:
        check_one_of(self, "pooling_type", ("CLS", "LAST", "MEAN", "ALL", "STEP"))
        check_one_of(self, "activation", ("none", "normalize", "softmax", "sigmoid"))
        if self.pooling_type == "STEP" and self.step_tag_id is None:
            raise ConfigError(
                "pooling_type STEP needs step_tag_id: set it in override_pooler_config"
            )

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt have to run in one step, without chunking and prefix
        caching.
        """
        return not self.is_causal or self.pooling_type != "LAST"
