"""Models whose checkpoints also have an encoder of images or sounds.

The encoder is loaded if this package supports it for the family; otherwise only text works.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import ClassVar

from torch import Tensor, nn

from vllm.attention import ContextHolder, ReadsContext
from vllm.config import ModelArch
from vllm.config.families import family_of
from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.slice import (
    DENSE_DTYPES,
    CheckpointTensor,
    NamedTensors,
    dtype_name,
)
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.deepseek import DeepseekV3ForCausalLM
from vllm.model_executor.models.fused_weights import split_transposed_experts
from vllm.model_executor.models.gemma import Gemma3ForCausalLM
from vllm.model_executor.models.gemma3n import Gemma3nForCausalLM
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.glm import Glm4ForCausalLM
from vllm.model_executor.models.interface import TOWER_PREFIXES, CausalLM, LoadableModel
from vllm.model_executor.models.llama import MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from vllm.model_executor.models.llama4 import Llama4ForCausalLM
from vllm.model_executor.models.mixture import Qwen3MoeForCausalLM
from vllm.model_executor.models.mllama import MllamaForCausalLM
from vllm.model_executor.models.phi import Phi3ForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.routed import Glm4MoeForCausalLM
from vllm.model_executor.models.transformers_model import TransformersForCausalLM
from vllm.model_executor.models.whisper import WhisperForCausalLM

_ENCODER = "media_encoder."


class _LanguageModel(CausalLM):
    """A language model, together with the encoder of images or sounds if the family has one.

    It renames tensors: transformers has moved the language model in checkpoints since 4.52.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "language_model.": "",
        "model.language_model.": "model.",
    }
    ignored_prefixes: ClassVar[tuple[str, ...]] = TOWER_PREFIXES

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        if arch.media_module is not None:
            self.media_encoder = make_encoder(arch)

    def is_ignored(self, name: str) -> bool:
        return super().is_ignored(name) and not self._is_of_encoder(name)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        if not self._is_of_encoder(name):
            return super().convert(name, source)
        # The encoder is on another pipeline stage.
        if not isinstance(self.media_encoder, MediaEncoder):
            return ((_ENCODER + name, source),)
        own = self.media_encoder.parameter_name(name.removeprefix("model."))
        if own is None:
            return ()
        if source.dtype not in (*DENSE_DTYPES, None):
            raise WeightLoadError(
                f"tensor {name} has the dtype {dtype_name(source.dtype)} in the checkpoint, and "
                f"encoders are not read from quantized weights. Use a checkpoint whose "
                f"quantization leaves the encoder out, or serve text only: set the counts of "
                f"--limit-mm-per-prompt to 0"
            )
        return ((_ENCODER + own, source),)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        first, last = super().modules_around_layers()
        encoder = self.media_encoder
        return (first if encoder is None else [*first, encoder]), last

    def _is_of_encoder(self, name: str) -> bool:
        encoder = self.media_encoder
        if encoder is None or name.endswith(self.ignored_tensors):
            return False
        prefixes = encoder_class(self.arch).prefixes
        return name.removeprefix("model.").startswith(prefixes)


class _AnyLanguageModel(_LanguageModel):
    """A `_LanguageModel` whose language model may be of several families; its config names the
    family.
    """

    @classmethod
    def variant_of(cls, arch: ModelArch) -> type[LoadableModel]:
        text: type[CausalLM] = ModelRegistry.resolve(family_of(arch.model_type).architectures[0])
        return _joined(cls, text)


@cache
def _joined(media: type[CausalLM], text: type[CausalLM]) -> type[CausalLM]:
    """Create a class that joins a language model with an encoder of images or sounds."""
    return type(media.__name__, (media, text), {"__doc__": media.__doc__})


def encoder_class(arch: ModelArch) -> type[MediaEncoder]:
    """Return the encoder class of a model that has an encoder."""
    module = import_module(f"vllm.model_executor.media.families.{arch.media_module}")
    return module.Encoder


def make_encoder(arch: ModelArch) -> MediaEncoder:
    """Make the encoder of a model that has one, without weights."""
    assert arch.media_config is not None
    return encoder_class(arch)(arch.media_config, arch.embedding_size)


class LlavaForConditionalGeneration(_AnyLanguageModel):
    """LLaVA 1.5 (arXiv 2310.03744), with language models of several families."""


class LlavaNextForConditionalGeneration(_AnyLanguageModel):
    """LLaVA-NeXT (LLaVA 1.6) and Granite Vision, with language models of several families."""


class InternVLForConditionalGeneration(_AnyLanguageModel):
    """InternVL 3 and 3.5 in the format of transformers (arXiv 2504.10479), with language models of
    several families."""


class Idefics3ForConditionalGeneration(_AnyLanguageModel):
    """Idefics3 (arXiv 2408.12637) and SmolVLM."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.text_model.": "model."}


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM 2 (arXiv 2504.05299)."""


class MllamaForConditionalGeneration(_LanguageModel, MllamaForCausalLM):
    """Llama 3.2 11B and 90B Vision (Meta 2024, arXiv 2407.21783)."""


class Gemma3ForConditionalGeneration(_LanguageModel, Gemma3ForCausalLM):
    """Gemma 3 4B, 12B and 27B (arXiv 2503.19786); tokens of an image attend to each other in both
    directions.
    """


class _LanguageModelOfTowers(_LanguageModel):
    """A `_LanguageModel` with the tensor names of checkpoints that also have an audio tower."""

    ignored_prefixes: ClassVar[tuple[str, ...]] = tuple(
        f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    )


class Gemma3nForConditionalGeneration(_LanguageModelOfTowers, Gemma3nForCausalLM):
    """Gemma 3n E2B and E4B (Google 2025); only text input is supported."""


class Gemma4ForConditionalGeneration(_LanguageModelOfTowers, Gemma4ForCausalLM):
    """Gemma 4 (Google 2026); only text input is supported."""


class Llama4ForConditionalGeneration(_LanguageModel, Llama4ForCausalLM):
    """Llama 4 Scout and Maverick (Meta 2025) from multimodal checkpoints; only text input is
    supported.
    """


class Phi4MultimodalForCausalLM(_LanguageModel, Phi3ForCausalLM):
    """Phi-4-multimodal (Microsoft 2025, arXiv 2503.01743), of which text input is served.

    Its checkpoint also has the adapters for images and sounds, which text does not use.
    """

    checkpoint_names: ClassVar[Mapping[str, str]] = {".base_layer.": "."}
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("model.embed_tokens_extend.",)

    def is_ignored(self, name: str) -> bool:
        return super().is_ignored(name) or ".lora_A." in name or ".lora_B." in name


class Mistral3ForConditionalGeneration(_LanguageModel, MistralForCausalLM):
    """Mistral Small 3.1 and 3.2, and Ministral 3 (Mistral AI 2025)."""


class Qwen2VLForConditionalGeneration(_LanguageModel, Qwen2ForCausalLM):
    """Qwen2-VL (arXiv 2409.12191) and QVQ."""


class Qwen2_5_VLForConditionalGeneration(_LanguageModel, Qwen2ForCausalLM):
    """Qwen2.5-VL (arXiv 2502.13923)."""


class _WithAddedStates(_LanguageModel, DecoderForCausalLM, ReadsContext):
    """A model whose encoder also returns values to add to hidden states after the first layers."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.launch = ContextHolder()

    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        context = self.launch.context
        added = None if context is None else context.added
        if added is not None:
            for layer in range(first, min(end, added.num_layers)):
                hidden_states = super().run_layers(hidden_states, positions, layer, layer + 1)
                hidden_states = added.add_to(hidden_states, layer)
            first = max(first, min(end, added.num_layers))
        if first == end:
            return hidden_states
        return super().run_layers(hidden_states, positions, first, end)

    def check(self) -> None:
        super().check()
        encoder, stage = self.media_encoder, self.stage
        num_added = encoder.num_added if isinstance(encoder, MediaEncoder) else 0
        if not stage.is_first or not num_added:
            return
        if num_added >= self.num_layers:
            raise ConfigError(
                f"config.json: the image encoder adds values to the first {num_added} layers, so "
                f"the language model must have more layers, got {self.num_layers}"
            )
        if stage.end_layer < num_added:
            raise ConfigError(
                f"pipeline_parallel_size={stage.count}: the first stage has {stage.end_layer} "
                f"layers, but images need at least {num_added} in it. Use fewer stages, or send "
                "no images (--limit-mm-per-prompt image=0)"
            )


class Qwen3VLForConditionalGeneration(_WithAddedStates, Qwen3ForCausalLM):
    """Qwen3-VL, dense (arXiv 2511.21631)."""


class Qwen3VLMoeForConditionalGeneration(_WithAddedStates, Qwen3MoeForCausalLM):
    """Qwen3-VL with experts (arXiv 2511.21631)."""

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Split tensors with the weights of all experts.

        Published ones are [experts, in, out]; transformers 5 saves them as [experts, out, in].
        """
        size = self.arch.hidden_size
        inner = self.arch.config_size("moe_intermediate_size")
        sizes = {"gate_up_proj": (size, 2 * inner), "down_proj": (inner, size)}
        published = sizes.get(name.rpartition(".experts.")[2])
        if published and published == source.shape[1:] and published[0] != published[1]:
            return split_transposed_experts(name, source)
        return super().convert(name, source)


class Glm4vForConditionalGeneration(_LanguageModel, Glm4ForCausalLM):
    """GLM-4.1V and GLM-4.6V-Flash (arXiv 2507.01006)."""


class Glm4vMoeForConditionalGeneration(_LanguageModel, Glm4MoeForCausalLM):
    """GLM-4.5V and GLM-4.6V (arXiv 2507.01006)."""


class _Qwen(_LanguageModel):
    """A `_LanguageModel` that also skips the layers for multi-token prediction."""

    ignored_prefixes: ClassVar[tuple[str, ...]] = (*_LanguageModel.ignored_prefixes, "mtp.")


class Qwen3_5ForConditionalGeneration(_Qwen, Qwen3_5ForCausalLM):
    """Qwen 3.5 and 3.6, dense (Qwen team 2026)."""


class Qwen3_5MoeForConditionalGeneration(_Qwen, Qwen3_5MoeForCausalLM):
    """Qwen 3.5 and 3.6 with experts (Qwen team 2026)."""


class KimiK25ForConditionalGeneration(_LanguageModel, DeepseekV3ForCausalLM):
    """Kimi K2.5 and K2.6 (Moonshot AI 2026); only text input is supported.

    transformers 5.24 saves layers under the name `blocks`, which published checkpoints use for the
    layers of the vision tower.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "language_model.model.blocks.": "model.layers.",
        **_LanguageModel.checkpoint_prefixes,
    }


class KimiVLForConditionalGeneration(_LanguageModel, DeepseekV3ForCausalLM):
    """Kimi-VL (arXiv 2504.07491); only text input is supported."""


class WhisperForConditionalGeneration(_LanguageModel, WhisperForCausalLM):
    """Whisper, tiny to large-v3 and turbo (arXiv 2212.04356): speech to text."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = WhisperForCausalLM.checkpoint_prefixes


class Qwen2AudioForConditionalGeneration(_LanguageModel, Qwen2ForCausalLM):
    """Qwen2-Audio (arXiv 2407.10759)."""


class VoxtralForConditionalGeneration(_AnyLanguageModel):
    """Voxtral (arXiv 2507.13264), with language models of Llama and Mistral."""


class TransformersForConditionalGeneration(_LanguageModel, TransformersForCausalLM):
    """A multimodal checkpoint whose language model runs with the modules of transformers."""
