"""Define the settings of the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm.config.arch.config_object import config_object
from vllm.config.arch.model_arch import ModelArch
from vllm.config.fields import check_at_least, check_one_of
from vllm.config.parallel import ParallelConfig
from vllm.config.pooler import ModelTask, PoolerConfig
from vllm.config.quantization.inc import IncConfig
from vllm.errors import ConfigError
from vllm.utils.text.patterns import compile_pattern

if TYPE_CHECKING:
    from vllm.config.arch.config_object import ConfigObject

ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
TokenizerMode = Literal["auto", "slow", "mistral"]
ModelImpl = Literal["auto", "vllm", "transformers"]
HeadQuantization = Literal["auto", "int8"]

_DTYPE_NAMES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of the model and its tokenizer."""

    model: str = ""
    """Folder or Hugging Face name of the model. Default: the bundled demonstration model."""

    model_impl: ModelImpl = "auto"
    """Code that runs the model. vllm: the model classes of this package; transformers: the classes
    of the transformers library, with the attention and linear layers of this package; auto:
    transformers for architectures that this package does not have."""

    task: ModelTask = "auto"
    """Task of the model: generate, embed (or embedding), classify, score or reward. auto: chosen by
    its architecture and files; pooling: chosen among all but generate. A generative model can also
    embed."""

    served_model_name: tuple[str, ...] = ()
    """Names of the model in requests; answers have the first one. Default: the value of --model."""

    hf_config_path: str | None = None
    """Folder or Hugging Face name from which config.json and generation_config.json are read,
    instead of from the model. Default: the value of --model."""

    tokenizer: str | None = None
    """Folder or name of the tokenizer. Default: the value of --model."""

    tokenizer_mode: TokenizerMode = field(default="auto", metadata={"same_as": {"hf": "auto"}})
    """How the tokenizer is loaded. auto: the fast tokenizer (tokenizer.json), or tekken.json if the
    model has no other file. slow: always the Python tokenizer. mistral: tekken.json."""

    skip_tokenizer_init: bool = False
    """Run without a tokenizer: prompts and outputs are token ids."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    revision: str | None = None
    """Branch, tag or commit of the model on the Hugging Face hub. Default: the main branch."""

    code_revision: str | None = None
    """Branch, tag or commit of the code that comes with the model, for `trust_remote_code`.
    Default: the value of --revision."""

    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer on the Hugging Face hub. Default: the value of
    --revision if --tokenizer is not given, otherwise the main branch."""

    dtype: ModelDType = "auto"
    """Data type of weights and activations. auto: the data type of the checkpoint."""

    quantization: str | None = field(default=None, metadata={"aliases": ("-q",)})
    """Quantize the weights of an unquantized checkpoint: int8, int4, bitsandbytes (4 bits), fp8, or
    inc with the file of `quant_config`. A quantized checkpoint may be named by its own format: fp8,
    gptq, awq, compressed-tensors. Default: as in the checkpoint."""

    lm_head_quantization: HeadQuantization = "auto"
    """Format of the weights of the output head (lm_head), and of the token embeddings if both share
    one tensor. auto: the format of the checkpoint, or the one that --quantization gives. int8: on
    the CPU, round them to int8 while loading if they would be unquantized otherwise; this also
    applies to a draft model."""

    quant_config: str | None = None
    """JSON file of Intel Neural Compressor (INC), written by `vllm calibrate`: it says what to
    measure, or which FP8 scales to use. Implies quantization=inc. Default: the value of
    QUANT_CONFIG."""

    seed: int = 0
    """Random seed for sampling, for requests that give no seed."""

    max_model_len: int | None = field(
        default=None, metadata={"same_as": {"auto": None, "-1": None}}
    )
    """Maximum number of tokens of a request, prompt and output together. Default, auto or -1: the
    maximum in the model's config.json. A smaller value needs less memory."""

    disable_sliding_window: bool = False
    """Use full attention in all layers of a model with sliding windows. max_model_len must then be
    at most the size of the window."""

    max_logprobs: int = 20
    """Maximum number of log-probabilities per token that a request may ask for. -1: the size of the
    vocabulary."""

    enable_prompt_embeds: bool = False
    """Accept embeddings as prompts instead of tokens (`prompt_embeds`)."""

    logits_processor_pattern: str | None = None
    """Regular expression for the names of logits processors that requests may use, such as
    my_module[.]my_function. It must match the whole name. Clients can call everything that matches,
    with any arguments, so allow only logits processors. Default: none are allowed."""

    generation_config: str = "auto"
    """Source of the default sampling parameters. auto: generation_config.json of the model. vllm:
    the defaults of this engine. Any other value: a folder with a generation_config.json."""

    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Default sampling parameters as JSON, such as {"temperature": 0.5}. They override the values
    from --generation-config."""

    override_pooler_config: Mapping[str, Any] = field(default_factory=dict)
    """Pooling settings as JSON that override the settings in the model's files. Keys: pooling_type,
    normalize, softmax, step_tag_id, returned_token_ids."""

    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values as JSON that replace values in the model's config.json, such as
    {"max_position_embeddings": 8192}."""

    enforce_eager: bool = False
    """Neither compile the model nor record HPU graphs. The start is faster and needs less memory,
    but the model runs more slowly."""

    enable_sleep_mode: bool = False
    """Allow sleep mode: calling `sleep` releases the memory of the weights and the KV cache, and
    `wake_up` restores them."""

    arch: ModelArch | None = field(default=None, metadata={"cli": False})
    """Facts read from the model's config; set by the time an engine starts."""

    path: str | None = field(default=None, metadata={"cli": False})
    """Local folder of the model; set by the time an engine starts."""

    inc: IncConfig | None = field(default=None, metadata={"cli": False})
    """Content of the file of `quant_config`; set by the time an engine starts."""

    pooler: PoolerConfig | None = field(default=None, metadata={"cli": False})
    """Set by the time an engine starts, for a pooling model; None: the model generates."""

    def __post_init__(self) -> None:
        check_one_of(self, "dtype", ("auto", "half", "float16", "bfloat16", "float", "float32"))
        check_one_of(self, "tokenizer_mode", get_args(TokenizerMode))
        check_one_of(self, "model_impl", get_args(ModelImpl))
        check_one_of(self, "lm_head_quantization", get_args(HeadQuantization))
        check_one_of(self, "task", get_args(ModelTask))
        if self.max_model_len is not None:
            check_at_least(self, 1, "max_model_len")
        if self.max_logprobs != -1:
            check_at_least(self, 0, "max_logprobs")
        if self.logits_processor_pattern is not None:
            try:
                compile_pattern(self.logits_processor_pattern)
            except ValueError as error:
                raise ConfigError(
                    f"logits_processor_pattern {self.logits_processor_pattern!r} is not a regular "
                    f"expression: {error}"
                ) from None
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError(
                "served_model_name must not be empty: give names that requests may use, or leave "
                "it out"
            )

    @property
    def resolved_arch(self) -> ModelArch:
        """Architecture of the model; available after the config is resolved."""
        assert self.arch is not None
        return self.arch

    @property
    def resolved_path(self) -> str:
        """Folder of the model; available after the config is resolved."""
        assert self.path is not None
        return self.path

    @property
    def is_measured(self) -> bool:
        """Whether layers record the largest values of their inputs (`QUANT_CONFIG` with mode
        MEASURE).
        """
        return self.inc is not None and self.inc.mode == "MEASURE"

    # ---- names of vLLM's config, which programs read -----------------------------------------

    @property
    def hf_config(self) -> "ConfigObject":
        """A new config object of transformers for the model; changes of it have no effect."""
        return config_object(self.resolved_arch)

    @property
    def hf_text_config(self) -> "ConfigObject":
        """A new config object of transformers for the language model."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        """The classes of the model that config.json names."""
        names = self.resolved_arch.hf_config.get("architectures")
        return list(names or [self.resolved_arch.architecture])

    @property
    def architecture(self) -> str:
        """The class of the model in config.json."""
        return self.resolved_arch.architecture

    @property
    def is_multimodal_model(self) -> bool:
        """Whether the model also reads images, sounds or videos."""
        return self.resolved_arch.media_config is not None

    def get_vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return self.resolved_arch.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of the hidden states."""
        return self.resolved_arch.hidden_size

    def get_inputs_embeds_size(self) -> int:
        """Return the size of the embeddings that the model reads."""
        return self.resolved_arch.embedding_size

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        return self.resolved_arch.head_size

    def get_sliding_window(self) -> int | None:
        """Return the smallest sliding window of the layers; None if there is none."""
        windows = [each for each in self.resolved_arch.layer_windows if each is not None]
        return min(windows, default=None)

    def get_total_num_kv_heads(self) -> int:
        """Return the number of key/value heads of the model."""
        return self.resolved_arch.num_kv_heads

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Return the number of key/value heads of one worker."""
        size = parallel_config.tensor_parallel_size
        return max(1, self.resolved_arch.num_kv_heads // size)

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Return the number of attention heads of one worker."""
        return self.resolved_arch.num_heads // parallel_config.tensor_parallel_size

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Return the number of layers, divided by the number of pipeline stages and rounded up."""
        return -(-self.resolved_arch.num_layers // parallel_config.pipeline_parallel_size)

    @property
    def dtype_name(self) -> str:
        """Name of the torch dtype in which the model runs."""
        name = self.resolved_arch.dtype if self.dtype == "auto" else self.dtype
        return _DTYPE_NAMES.get(name, name)
