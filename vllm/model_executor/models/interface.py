"""The interface of models that runners and the loader use. Independent of model families."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import Stage, TPGroup
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor, NamedTensors
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.multimodal.images.tower_config import TOWER_PARTS

_AROUND_TOWERS = ("multi_modal_projector.", "mm_projector.", "connector.", "image_newline")
TOWER_PREFIXES = tuple(
    f"{level}{part}"
    for level in ("", "model.")
    for part in (*(f"{tower}." for tower in TOWER_PARTS), *_AROUND_TOWERS)
)
"""Beginnings of the names of tensors of multimodal checkpoints that encode images or sounds."""
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of names that torch adds where it has wrapped a module."""


def without_wrappers(name: str) -> str:
    """Return the name of a module or tensor as it is if torch has not wrapped any module.

    >>> without_wrappers("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    if "_wrapped_module" not in name and "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class LoadableModel(nn.Module, ABC):
    """A module whose parameters a checkpoint fills.

    Modules are named as in the checkpoint, so most families need none of the renames below.

    Attributes:
        dtype: data type of activations, and of parameters unless a layer says otherwise.
        outer_names: beginning of the names of all tensors of this checkpoint, and what it is in
            other checkpoints of the family. None: the names are the usual ones.
    """

    outer_names: tuple[str, str] | None = None

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Beginning of a checkpoint name -> its replacement here; only the first one that fits is
    replaced."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Part of a checkpoint name -> its replacement here; all that occur are replaced."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
        *("rotary_emb.original_inv_freq", ".masked_bias", ".causal_mask", ".position_ids"),
    )
    """Ends of checkpoint names that are not weights."""

    ignored_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of checkpoint names of parts that are not loaded."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.arch = arch
        self.tp = tp
        self.dtype = torch.get_default_dtype()

    def renamed(self, name: str) -> str:
        """Return the name in the model of the module or tensor with this name in a checkpoint."""
        for prefix, replacement in self.checkpoint_prefixes.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        for part, replacement in self.checkpoint_names.items():
            name = name.replace(part, replacement)
        return name

    def inner_name(self, name: str) -> str | None:
        """Return the usual name of a tensor or module of the checkpoint (`outer_names`); None if it
        does not belong to this model.
        """
        if self.outer_names is not None:
            prefix, inner = self.outer_names
            if name.startswith(TOWER_PREFIXES):
                return None
            if name.startswith(prefix) and not self.renamed(name).startswith("lm_head."):
                name = inner + name.removeprefix(prefix)
        return without_wrappers(name)

    def convert(self, name: str, source: CheckpointTensor) -> NamedTensors:
        """Convert a tensor of the checkpoint to one or several tensors of this model.

        Args:
            name: after `checkpoint_prefixes` and `checkpoint_names`.
            source: the tensor.

        Returns:
            Names and tensors. The default returns the tensor unchanged.
        """
        return ((name, source),)

    def is_ignored(self, name: str) -> bool:
        """Return whether the checkpoint tensor of this name is not loaded."""
        return name.endswith(self.ignored_tensors) or name.startswith(self.ignored_prefixes)

    @classmethod
    def variant_of(cls, arch: ModelArch) -> "type[LoadableModel]":
        """Return the class to build, for families in which it depends on more than the
        architecture's name.
        """
        return cls

    def check_tensors(self) -> None:
        """Check the checkpoint once, after `convert` was called with all of its tensors.

        Raises:
            WeightLoadError: a tensor is missing of a group that belongs together.
        """

    def check(self) -> None:
        """Check the model once, after all weights are loaded, or allocated without values.

        Raises:
            ConfigError: the model cannot run.
        """

    def check_values(self) -> None:
        """Check the values of the weights once. Not called for weights that have no values.

        Raises:
            ConfigError: the model cannot run with them.
        """

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Return the layers of the decoder or encoder, in the order they run.

        On an accelerator the lazy graph may be cut after each, each may be compiled separately, and
        the weights of some may be kept on the host.
        """


class LayeredModel(LoadableModel, ABC):
    """Token embeddings and layers over flattened tokens: the T tokens of all requests of a batch.

    Between two layers the hidden states are one tensor [T, hidden]. So a pipeline stage can run
    some of the layers, and embeddings of an image can replace embeddings of tokens.

    Attributes:
        stage: the layers that `forward` runs; all of them unless the loader says otherwise.
        media_encoder: encodes images on the first stage; None: the model reads text only.
    """

    media_encoder: MediaEncoder | None

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.media_encoder = None
        self.stage = Stage(0, arch.num_layers)

    def modules_around_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules outside the layers that only the first, and only the last pipeline
        stage runs.

        Modules in neither list are on every stage.
        """
        return [], []

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model, all stages together."""
        return self.arch.num_layers

    @property
    @abstractmethod
    def embedding(self) -> VocabParallelEmbedding:
        """The embedding table of tokens."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Look up the embeddings [T, embedding_size] of token ids [T] int64.

        A batch may replace some of them, by embeddings of images for example (`inputs_embeds` in
        transformers). Operations on both, such as
        adding learned positions, are in `run_layers`.
        """
        return self.embedding(input_ids)


class CausalLM(LayeredModel):
    """A decoder: embeddings, layers and output head."""

    @abstractmethod
    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers.

        Args:
            hidden_states: result of `embed` if `first` is 0; else [T, hidden], the output of layer
                `first` - 1. May be overwritten.
            positions: [P, T] int64, or [T] if a token has one position; see `LaunchContext`.
            first: index of the first layer to run.
            end: index after the last one; at least first + 1.

        Returns:
            [T, hidden], the input of layer `end`; after the last layer of the model, normed.
            The bits do not depend on how the layers are divided into calls.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute logits from hidden states of `forward`: [N, hidden] -> [N, vocab_size] on every
        rank.
        """

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Run the model: token ids [T] and positions [P, T] -> hidden states [T, hidden] after the
        norm.

        With pipeline parallelism, later stages take the output of the previous stage instead of
        token ids, and all but the last stage return the input of the next one.
        """
        stage = self.stage
        hidden_states = self.embed(inputs) if stage.is_first else inputs
        return self.run_layers(hidden_states, positions, stage.first_layer, stage.end_layer)

    def forward_and_inputs(
        self, inputs: Tensor, positions: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the model; return the result of `forward`, and the inputs of some layers.

        Args:
            inputs: inputs; see `forward`.
            positions: positions; see `forward`.
            layers: indices of layers of this stage, ascending and distinct, above 0.

        Returns:
            [T, hidden] after the norm, and [T, hidden] for each layer.
        """
        hidden_states = self.embed(inputs) if self.stage.is_first else inputs
        first, found = self.stage.first_layer, []
        for layer in layers:
            if layer > first:
                hidden_states = self.run_layers(hidden_states, positions, first, layer)
            found.append(hidden_states * 1)  # `* 1` copies: the layer may overwrite its input
            first = layer
        return self.run_layers(hidden_states, positions, first, self.stage.end_layer), found


class PoolingModel(LayeredModel):
    """An encoder or decoder whose hidden states are pooled, to embeddings or scores for example."""

    num_token_types: int = 1
    """Number of kinds of tokens that `forward` distinguishes in addition to their ids, such as the
    parts of a pair."""

    @abstractmethod
    def run_layers(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        first: int,
        end: int,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Run consecutive layers. For the other arguments see `CausalLM.run_layers`.

        Args:
            token_type_ids: [T] int64, read if `first` is 0; None: all are 0.
        """

    def forward(
        self, inputs: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Run the model: token ids, positions and token types, [T] int64 -> hidden states [T,
        hidden].

        Without token types all are 0. A pipeline stage takes and returns the same as a stage of
        `CausalLM`.
        """
        stage = self.stage
        hidden_states = self.embed(inputs) if stage.is_first else inputs
        first, end = stage.first_layer, stage.end_layer
        return self.run_layers(hidden_states, positions, first, end, token_type_ids)

    def head(self, pooled: Tensor) -> Tensor:
        """Compute the head: pooled hidden states [N, hidden] -> values [N, size], before any
        activation.

        Only the last pipeline stage pools.
        """
        return pooled
