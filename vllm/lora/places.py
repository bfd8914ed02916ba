"""Which layers of a model adapters can change. Knows numbers and sizes, no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.ops.low_rank import AdaptedLayer, LowRank


@dataclass
class AdaptedPlaces:
    """The layers of a model that adapters can change."""

    layers: list[AdaptedLayer] = field(default_factory=list)
    """By their numbers."""
    num_parts: int = 0
    """Projections of all of them."""
    head: AdaptedLayer | None = None
    """The output head, which is one of them; None: it is on another rank."""
    embedding: AdaptedLayer | None = None
    """The input embedding, which is one of them, with a token of the vocabulary as each input;
    None: it is on another rank."""

    experts: range = range(0)
    """Numbers of the projections of experts, two layers for each expert of this rank."""

    def add(self, layer: AdaptedLayer) -> AdaptedLayer:
        """Add a layer, whose numbers are the next ones. Returns it."""
        assert (layer.number, layer.first_part) == (len(self.layers), self.num_parts)
        self.layers.append(layer)
        self.num_parts += len(layer.parts)
        return layer

    @staticmethod
    def part_of(place: AdaptedLayer | None, parts: Sequence[LowRank | None]) -> LowRank | None:
        """What the parts of an adapter add to a layer with one projection."""
        return None if place is None else parts[place.first_part]
