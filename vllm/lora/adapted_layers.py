"""Lists the layers of a model that adapters can change, with indices and sizes, without weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.ops.lora_weights import AdaptedLayer, LoRAWeights


@dataclass
class AdaptedLayers:
    """The layers of a model that adapters can change, with indices and sizes."""

    layers: list[AdaptedLayer] = field(default_factory=list)
    """The layers, in the order of their numbers."""
    num_parts: int = 0
    """Number of projections in all layers."""
    of_head: list[AdaptedLayer] = field(default_factory=list)
    """Layers that compute logits: the output head, and the layers before it; none: they are on
    another rank."""
    embedding: AdaptedLayer | None = None
    """The input embedding, which is one of them, with a token of the vocabulary as each input;
    None: it is on another rank."""

    experts: range = range(0)
    """Indices of the projections of experts, two layers for each expert of this rank."""
    alike: list[range] = field(default_factory=list)
    """Indices of layers that have the same sizes: one matmul of all experts of a layer."""

    def add(self, in_features: int, parts: Sequence[tuple[int, int]]) -> AdaptedLayer:
        """Add a layer with the next indices.

        Args:
            in_features, parts: as in `AdaptedLayer`.
        """
        layer = AdaptedLayer(len(self.layers), self.num_parts, in_features, tuple(parts))
        self.layers.append(layer)
        self.num_parts += len(parts)
        return layer

    def stacks(self) -> list[range]:
        """Return ranges of layers whose weights can be stacked: layers of the same sizes; each
        other layer forms its own range.
        """
        found = {number for numbers in self.alike for number in numbers}
        alone = (number for number in range(len(self.layers)) if number not in found)
        return [*(range(number, number + 1) for number in alone), *self.alike]

    def embedding_of(self, parts: Sequence[LoRAWeights | None]) -> LoRAWeights | None:
        """Return the weights that an adapter adds to the input embedding, or None."""
        return None if self.embedding is None else parts[self.embedding.first_part]

    def change_head(self, parts: Sequence[LoRAWeights | None]) -> bool:
        """Return whether an adapter changes the output head."""
        starts = ((layer.first_part, len(layer.parts)) for layer in self.of_head)
        return any(parts[first + n] is not None for first, count in starts for n in range(count))

    def change_experts(self, parts: Sequence[LoRAWeights | None]) -> bool:
        """Return whether an adapter changes experts."""
        return any(parts[number] is not None for number in self.experts)
