"""The encoder of images on a card: forward passes of a few padded sizes, each compiled at the
start."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.bucketing import format_bytes
from vllm.bucketing.encoder_sizes import encoder_sizes, split_into_sizes
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.models.interface import LayeredModel
from vllm.model_executor.models.text_of_images import make_encoder
from vllm.model_executor.vision.encoder import MediaEncoder
from vllm.multimodal.family import MediaFamily
from vllm.multimodal.job import family_of_model
from vllm.platforms.habana.bridge import COMPILE_BACKEND, HabanaBridge
from vllm.worker.hpu.memory.memory_profile import Attempt, attempt, used_bytes
from vllm.worker.interface import WarmUpStep

logger = init_logger(__name__)

_MULTIPLE = 16
"""Numbers of patches are multiples of it, and of the blocks that an encoder merges."""
_SMALL = 64
"""Pixels of each side of the small image with which forward passes are warmed up."""


class CardEncoder:
    """Runs the encoder of a model on a card; see `Encodes`.

    Args:
        config: of the engine.
        encoder: loaded, on the card; of another stage of a pipeline, on the meta device.
        family: makes the images of the warm-up.
        bridge: the card.
        is_here: images are encoded on this stage. The others name the same steps of the warm-up.

    Attributes:
        sizes: of forward passes, padding included.
    """

    def __init__(
        self,
        config: VllmConfig,
        encoder: MediaEncoder,
        family: MediaFamily,
        bridge: HabanaBridge,
        *,
        is_here: bool,
    ) -> None:
        self._encoder, self._bridge, self.is_here = encoder, bridge, is_here
        self._small = _as_tensors(family.process(np.zeros((_SMALL, _SMALL, 3), np.uint8)).tensors)
        largest = encoder.size_of(_as_tensors(family.largest().tensors))
        smallest = encoder.size_of(self._small)
        self.sizes = encoder_sizes(
            smallest, largest, encoder.unit, _MULTIPLE, config.hpu.multimodal_buckets
        )
        self._run: Any = _Run(encoder)
        if not bridge.is_lazy and not config.model.enforce_eager:
            dynamo: Any = torch._dynamo.config
            wanted = 1 + len(self.sizes)
            dynamo.cache_size_limit = max(dynamo.cache_size_limit, wanted)
            self._run = torch.compile(
                self._run,
                backend=COMPILE_BACKEND,
                fullgraph=config.hpu.compile_fullgraph,
                dynamic=False,
            )

    @torch.inference_mode()
    def encode(self, items: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        """Encode images in as many forward passes as they need. Waits for the card."""
        counts = [self._encoder.size_of(item) for item in items]
        if max(counts) > self.sizes[-1]:
            raise ValueError(
                f"an image must have at most {self.sizes[-1]} {self._encoder.unit}, as the largest "
                f"forward pass of the encoder, got {max(counts)}"
            )
        found: list[Tensor] = []
        for indices, size in split_into_sizes(counts, self.sizes):
            some = [items[index] for index in indices]
            embeddings = self._forward(some, size).cpu()
            found += [each.clone() for each in self._encoder.split(embeddings, some)]
        return found

    def _forward(self, items: Sequence[Mapping[str, Tensor]], size: int) -> Tensor:
        prepared = self._encoder.prepare(items, size)
        on_card = [tensor.to(self._bridge.device) for tensor in prepared.values()]
        self._bridge.mark_step()  # what is queued is no part of it
        embeddings: Tensor = self._run(tuple(prepared), *on_card)
        self._bridge.mark_step()
        return embeddings

    # ---- the start ------------------------------------------------------------------------

    def measure(self) -> int:
        """Run the largest forward pass. Returns the device memory that it needs.

        Raises:
            ConfigError: the card does not hold it.
        """
        attempted = self._attempt(self.sizes[-1])
        if attempted is None:
            return 0
        if attempted.refused_bytes is not None:
            raise ConfigError(
                f"no memory for the encoder of images: a forward pass of {self.sizes[-1]} "
                f"{self._encoder.unit} needs at least {format_bytes(attempted.needed_bytes)}. "
                f"Lower max_pixels (--mm-processor-kwargs), or send no images "
                f"(--limit-mm-per-prompt image=0)"
            )
        return attempted.needed_bytes

    def warm_up_steps(self) -> Iterator[tuple[WarmUpStep, Callable[[], Any]]]:
        """Yield each forward pass of the warm-up and the function that runs it, the largest first,
        as a smaller one needs no more memory."""
        for index, size in enumerate(reversed(self.sizes), start=1):
            step = WarmUpStep(
                phase="warm-up: encoder of images",
                name=f"{size} {self._encoder.unit}",
                index=index,
                total=len(self.sizes),
            )
            yield step, partial(self._attempt, size)

    def _attempt(self, size: int) -> Attempt | None:
        if not self.is_here:
            return None

        def run() -> None:
            with torch.inference_mode():
                self._forward([self._small], size).cpu()

        # Ranks encode each by itself, so none waits for another.
        return attempt(self._bridge, run, used_bytes(self._bridge))


def card_encoder(
    config: VllmConfig, model: LayeredModel, bridge: HabanaBridge
) -> CardEncoder | None:
    """Return what runs the encoder of a model; None: it reads text only."""
    family = family_of_model(config)
    if family is None:
        return None
    if model.stage.is_first:
        assert model.media_encoder is not None
        return CardEncoder(config, model.media_encoder, family, bridge, is_here=True)
    with torch.device("meta"):
        encoder = make_encoder(config.model.resolved_arch)
    return CardEncoder(config, encoder, family, bridge, is_here=False)


class _Run(nn.Module):
    """The operators of an encoder, with tensors as its arguments."""

    def __init__(self, encoder: MediaEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def forward(self, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        return self._encoder.run(**dict(zip(names, tensors, strict=True)))


def _as_tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
