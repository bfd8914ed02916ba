"""The interface of models for runners and the loader. Independent of model families."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.config import ModelArch
from vllm.distributed import Stage, TPGroup
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.media.encoder import MediaEncoder


class LoadableModel(nn.Module, ABC):
    """Parameters that a checkpoint fills.

    Module names are those of the checkpoint, so most families need none of the renames below.

    Attributes:
        dtype: of activations, and of parameters unless a layer says otherwise.
    """

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Beginning of a checkpoint name -> what it is here; the first that fits is replaced."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Part of a checkpoint name -> what it is here; all that occur are replaced."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Ends of checkpoint names that are not weights."""

    ignored_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of checkpoint names of parts that are not loaded."""

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__()
        self.arch = arch
        self.tp = tp
        self.dtype = torch.get_default_dtype()

    def renamed(self, name: str) -> str:
        """Return the name in the model of what has this name in a checkpoint."""
        for prefix, replacement in self.checkpoint_prefixes.items():
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        for part, replacement in self.checkpoint_names.items():
            name = name.replace(part, replacement)
        return name

    def convert(
        self, name: str, source: CheckpointTensor
    ) -> Iterable[tuple[str, CheckpointTensor]]:
        """Convert a tensor of the checkpoint to one or several tensors of this model.

        Args:
            name: after `checkpoint_prefixes` and `checkpoint_names`.
            source: the tensor.

        Returns:
            Names and tensors. As it is, unless a family says otherwise.
        """
        return ((name, source),)

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor of this name in the checkpoint is not loaded."""
        return name.endswith(self.ignored_tensors) or name.startswith(self.ignored_prefixes)

    @classmethod
    def variant_of(cls, arch: ModelArch) -> "type[LoadableModel]":
        """Return the class of a model of this architecture, where it depends on more than its
        name."""
        return cls

    def check_tensors(self) -> None:
        """Check the checkpoint once, when `convert` has had all of its tensors.

        Raises:
            WeightLoadError: one of several that belong together is missing.
        """

    def check(self) -> None:
        """Check the model once, with all weights loaded.

        Raises:
            ConfigError: the model cannot run.
        """

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Return the layers of the decoder or encoder, in the order they run. On a card a mark may
        follow each, each may be compiled on its own, and the weights of some may be kept on the
        host."""


class LayeredModel(LoadableModel, ABC):
    """Token embeddings and layers over flattened tokens, T of one launch.

    Between two layers the hidden states are one tensor [T, hidden], so a stage of a pipeline can
    run some of the layers, and embeddings of an image can take the place of those of tokens.

    Attributes:
        stage: the layers that `forward` runs; all of them unless the loader says otherwise.
        media_encoder: encodes images on the first stage; None: the model reads text only.
    """

    media_encoder: MediaEncoder | None

    def __init__(self, arch: ModelArch, tp: TPGroup) -> None:
        super().__init__(arch, tp)
        self.media_encoder = None
        self.stage = Stage(0, arch.num_layers)

    def modules_beside_layers(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules outside the layers that only the first stage of a pipeline runs, and
        the ones that only the last stage does. Modules that are in neither list are on every
        stage."""
        return [], []

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.arch.num_layers

    @property
    @abstractmethod
    def embedding(self) -> VocabParallelEmbedding:
        """The table of the embeddings of tokens."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Look up the embeddings [T, embedding_size] of token ids [T] int64, some of which a launch
        may replace: the argument `inputs_embeds` of transformers. `run_layers` adds or multiplies
        what applies to both, such as learned positions."""
        embedded: Tensor = self.embedding(input_ids)
        return embedded


class CausalLM(LayeredModel):
    """A decoder: embeddings, layers and output head."""

    @abstractmethod
    def run_layers(self, hidden_states: Tensor, positions: Tensor, first: int, end: int) -> Tensor:
        """Run consecutive layers.

        Args:
            hidden_states: what `embed` has returned if `first` is 0; else [T, hidden], what the
                layers before `first` have returned. May be overwritten.
            positions: [P, T] int64, or [T] where a token has one; see `LaunchContext`.
            first: index of the first layer to run.
            end: index after the last one; a stage has one layer or more.

        Returns:
            [T, hidden], the input of layer `end`; after the last layer of the model, normed.
            It has the same bits however the layers are divided.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute logits from rows of the result of `forward`, [N, hidden] -> [N, vocab_size] on
        every rank."""

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Run the model: token ids [T] and positions [P, T], int64 -> hidden states [T, hidden]
        after the norm.

        A stage of a pipeline takes what the stage before has returned in place of token ids, and
        returns the input of the next stage; the last one returns hidden states after the norm.
        """
        stage = self.stage
        hidden_states = self.embed(inputs) if stage.is_first else inputs
        return self.run_layers(hidden_states, positions, stage.first_layer, stage.end_layer)

    def forward_and_inputs(
        self, inputs: Tensor, positions: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the result of `forward`, and the inputs of some layers.

        Args:
            inputs, positions: see `forward`.
            layers: of this stage, ascending and distinct, above 0.

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
    """An encoder or a decoder whose hidden states are the result, or lead to it."""

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
        """Run consecutive layers, as `CausalLM.run_layers` does.

        Args:
            token_type_ids: [T] int64, read if `first` is 0; None: all are 0.
        """

    def forward(
        self, inputs: Tensor, positions: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Run the model: token ids, positions and types, [T] int64 -> hidden states [T, hidden]. No
        types: all are 0. A stage of a pipeline takes and returns what a stage of a `CausalLM`
        does."""
        stage = self.stage
        hidden_states = self.embed(inputs) if stage.is_first else inputs
        first, end = stage.first_layer, stage.end_layer
        return self.run_layers(hidden_states, positions, first, end, token_type_ids)

    def head(self, pooled: Tensor) -> Tensor:
        """Apply the head: pooled hidden states [N, hidden] -> values [N, size], before any
        activation. Only the last stage of a pipeline pools."""
        return pooled
