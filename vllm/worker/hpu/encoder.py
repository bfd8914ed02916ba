"""Runs the encoder of images or sounds on a card, in a few padded sizes compiled at the start."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vllm.bucketing import format_bytes
from vllm.bucketing.encoder_sizes import encoder_sizes, split_into_sizes
from vllm.config import VllmConfig
from vllm.distributed import Rendezvous, TPGroup
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.media.encoder import MediaEncoder
from vllm.model_executor.models.interface import LayeredModel
from vllm.model_executor.models.text_of_images import make_encoder
from vllm.multimodal.interface.family import MediaFamily
from vllm.multimodal.job import family_of_model, largest_image
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.memory.memory_profile import Attempt, attempt
from vllm.worker.parts.encoded_media import agreement

logger = init_logger(__name__)

_AGREED = 32
"""Images that ranks agree on in one exchange."""
_MAX_PADDING = 2.0
"""A forward pass is padded to so many times its size at most, where that saves compiling."""


class CardEncoder:
    """Runs the encoder of a model on a card; see `Encodes`.

    Args:
        config: config of the engine.
        encoder: loaded, on the card; on other pipeline stages on the meta device.
        family: makes the images of the warm-up.
        bridge: the card.
        tp: the ranks that encode the same images.
        is_here: images are encoded on this stage. Other stages only list the same warm-up steps.

    Attributes:
        agree: asks the other ranks which images they have encoded; None: there are no other ranks.
        sizes: sizes of forward passes, padding included, in units of the encoder.
    """

    def __init__(
        self,
        config: VllmConfig,
        encoder: MediaEncoder,
        family: MediaFamily,
        bridge: HabanaBridge,
        tp: TPGroup,
        *,
        is_here: bool,
    ) -> None:
        self._tp = tp
        self.agree = agreement(tp, self._add) if is_here else None
        self._encoder, self._bridge, self.is_here = encoder, bridge, is_here
        self._modality = family.modalities[0]
        self._small = encoder.divide(as_tensors(family.small().tensors))[0]
        smallest = encoder.size_of(self._small)
        self._largest = max(smallest, self._largest_size(config, family))
        self.sizes = encoder_sizes(
            smallest, self._largest, encoder.unit, config.hpu.multimodal_buckets
        )
        self._is_measured = not config.multimodal.skip_mm_profiling
        self._warm: set[int] = set()
        self._graphs: dict[int, Any] = {}
        """HPU graphs by size."""
        self._run: Any = _Run(encoder)
        if not bridge.is_lazy and not config.model.enforce_eager:
            dynamo: Any = torch._dynamo.config
            wanted = 1 + len(self.sizes)
            dynamo.cache_size_limit = max(dynamo.cache_size_limit, wanted)
            self._run = bridge.compile(
                self._run, fullgraph=config.hpu.compile_fullgraph, dynamic=False
            )

    def _largest_size(self, config: VllmConfig, family: MediaFamily) -> int:
        """Return the size, in units, of the largest image that is expected and fits in a prompt."""
        encoder, max_model_len = self._encoder, config.scheduler.max_model_len
        image = largest_image(family, config.multimodal.largest_image)
        largest = encoder.size_of(as_tensors(image.tensors))
        most = encoder.max_units(max_model_len)
        if most is None or largest <= most:
            return largest
        logger.info(
            "The encoder of %s is warmed up for at most %d %s: the settings of the processor "
            "allow %s of %d, but these do not fit into max_model_len (%d)",
            *(self.reads, most, encoder.unit, self.reads, largest, max_model_len),
        )
        return most

    @property
    def reads(self) -> str:
        """Kind of items that the encoder reads, for messages."""
        return self._encoder.reads

    @property
    def unit(self) -> str:
        """Name of the unit in which sizes are counted, for messages."""
        return self._encoder.unit

    @property
    def max_embeddings(self) -> int | None:
        """Number of embeddings of the largest image, or frame of a video, that fits a size; None:
        all images have one size.
        """
        units = self._encoder.max_units(1)
        return None if units is None else self.sizes[-1] // units

    def divide(self, item: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        return self._encoder.divide(item)

    def join(self, found: Sequence[Tensor], item: Mapping[str, Tensor]) -> Tensor:
        return self._encoder.join(found, item)

    @torch.inference_mode()
    def encode(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode parts in as many forward passes as needed. Waits for the card."""
        counts = [self._encoder.size_of(part) for part in parts]
        if max(counts) > self.sizes[-1]:
            raise ValueError(
                f"{self.reads} must have at most {self.sizes[-1]} {self.unit}, the size of the "
                f"largest forward pass of the encoder, got {max(counts)}"
            )
        found: list[Tensor] = []
        for indices, least in split_into_sizes(counts, self.sizes):
            some, size = [parts[index] for index in indices], self._cheapest(least)
            if size not in self._warm:
                logger.warning(
                    "The encoder of %s compiles its size of %d %s now, which was not warmed up: "
                    "requests wait for this, once per size",
                    *(self.reads, size, self.unit),
                )
            embeddings = self._forward(some, size).cpu()
            found += [each.clone() for each in self._encoder.split(embeddings, some)]
        return found

    def _cheapest(self, size: int) -> int:
        """Return the size to pad to: a compiled one if it is not much larger, else `size`."""
        most = size * _MAX_PADDING
        # `_warm` can contain sizes that are not in `sizes`: they were compiled to measure their
        # memory and then given up.
        warm = [each for each in self.sizes if each in self._warm and size <= each <= most]
        return min(warm, default=size)

    def _forward(self, items: Sequence[Mapping[str, Tensor]], size: int) -> Tensor:
        prepared = self._encoder.prepare(items, size)
        on_card = [tensor.to(self._bridge.device) for tensor in prepared.values()]
        self._bridge.mark_step()  # run earlier operations first: they belong to other graphs
        run = self._graphs.get(size, self._run)
        embeddings: Tensor = run(tuple(prepared), *on_card)
        self._bridge.mark_step()
        self._warm.add(size)
        return embeddings

    def _add(self, values: Tensor) -> Tensor:
        """Sum values [n] on the host over the ranks. All calls have the same shape."""
        found = []
        for part in values.split(_AGREED):
            self._bridge.mark_step()  # run earlier operations first: they belong to other graphs
            padded = pad(part, (0, _AGREED - len(part))).to(self._bridge.device)
            found.append(self._tp.all_reduce(padded).cpu()[: len(part)])
        return torch.cat(found)

    # ---- the start ------------------------------------------------------------------------

    def warm_up_agreement(self) -> None:
        """Compile the exchange between ranks. All of them must call it."""
        if self.agree is not None:
            self.agree([True])

    def measure(self, resident_bytes: int, max_bytes: int, rendezvous: Rendezvous | None) -> int:
        """Run larger and larger forward passes, and measure their memory.

        Sizes that need too much memory are disabled, and images that need them are refused later.

        Args:
            resident_bytes: bytes in use on the card apart from its workspace.
            max_bytes: maximum number of bytes that a forward pass may need.
            rendezvous: the other ranks, which then use the same sizes; None: there are none.

        Returns:
            The device memory that forward passes need.

        Raises:
            ConfigError: the card does not hold even the smallest one, or not all tiles of an image.
        """
        needed, num_sizes, refused = 0, len(self.sizes), None
        if self.is_here and self._is_measured:
            needed, num_sizes, refused = self._measure(resident_bytes, max_bytes)
        if rendezvous is not None:
            num_sizes = rendezvous.minimum("sizes of the encoder", num_sizes)
        if num_sizes == len(self.sizes):
            return needed
        given_up, self.sizes = self.sizes[num_sizes:], self.sizes[:num_sizes]
        is_enough = bool(self.sizes) and self.sizes[-1] >= self._largest
        if not self.sizes or (self.max_embeddings is None and not is_enough):
            at_least = "" if refused is None else f" (at least {format_bytes(refused)})"
            raise ConfigError(
                f"no memory for the encoder of {self.reads}: a forward pass of {given_up[0]} "
                f"{self.unit} needs more than the {format_bytes(max_bytes)} that are left"
                f"{at_least}. Lower --max-num-batched-tokens or --max-model-len, "
                f"or send no {self.reads} (--limit-mm-per-prompt {self._modality}=0)"
            )
        if is_enough:
            logger.info(
                "The encoder of %s runs at most %d %s at a time, because the card has only %s of "
                "memory for it",
                *(self.reads, self.sizes[-1], self.unit, format_bytes(max_bytes)),
            )
            return needed
        logger.warning(
            "Images may have at most %d %s (%d embeddings): the card has %s for a forward pass of "
            "the encoder, which is too little for %s. Lower max_pixels (--mm-processor-kwargs), so "
            "that larger images are made smaller instead of refused",
            *(self.sizes[-1], self.unit, self.max_embeddings, format_bytes(max_bytes)),
            ", ".join(map(str, given_up)),
        )
        return needed

    def _measure(self, resident_bytes: int, max_bytes: int) -> tuple[int, int, int | None]:
        """Measure forward passes up to the largest size that fits on the card.

        A card keeps the workspace of a forward pass. So the next size to run is the largest that
        fits even if memory grows with the square of its size, or else the next larger one, if that
        fits when memory grows in proportion to its size.

        Returns:
            The memory that forward passes need, the number of sizes that fit, and the memory that
            the smallest of the other sizes needs at least; None: it was not run.
        """
        sizes, needed = self.sizes, 0
        held, lost, refused = -1, len(sizes), None
        index = 0
        while index < lost:
            attempted = self._attempt(sizes[index], resident_bytes)
            # Keep the smallest size if it runs at all: without it no item could be encoded.
            is_above = index > 0 and attempted.has_grown and attempted.needed_bytes > max_bytes
            if attempted.refused_bytes is not None or is_above:
                lost, refused = index, attempted.needed_bytes
                index = (held + lost) // 2
                if index <= held:
                    break
                continue
            held, needed = index, max(needed, attempted.needed_bytes)
            reach = max_bytes / max(1, attempted.needed_bytes)
            if not attempted.has_grown:
                reach = max(_MAX_PADDING**2, reach)
            if held + 1 >= lost or sizes[held + 1] / sizes[held] > reach:
                lost = held + 1
                break
            fits = [i for i in range(held + 1, lost) if (sizes[i] / sizes[held]) ** 2 <= reach]
            index = max(fits, default=held + 1)
        return needed, lost, refused

    def warm_up(self, size: int) -> None:
        """Run a forward pass of this size with one small image and padding."""
        if not self.is_here:
            return
        with torch.inference_mode():
            self._forward([self._small], size).cpu()

    def give_up(self, size: int, reason: str) -> None:
        """Disable a size.

        Raises:
            ConfigError: it is the only one.
        """
        if self.sizes == (size,):
            raise ConfigError(
                f"no memory for the encoder of {self.reads}: {size} {self.unit}: {reason}"
            )
        self.sizes = tuple(each for each in self.sizes if each != size)
        logger.warning(
            "The encoder of %s cannot run %d %s at a time, and runs fewer instead: %s",
            *(self.reads, size, self.unit, reason),
        )

    def capture(self, size: int) -> None:
        """Capture the HPU graph of a size."""
        if self.is_here:
            self._graphs[size] = self._bridge.wrap_in_hpu_graph(_Run(self._encoder))
            self.warm_up(size)

    def release(self, size: int) -> None:
        """Discard the HPU graph of a size, if it has one, and free its memory."""
        graph = self._graphs.pop(size, None)
        if graph is not None:
            graph.clear_cache()

    @property
    def graph_sizes(self) -> list[int]:
        """The sizes that have an HPU graph, in the order of their capture."""
        return list(self._graphs)

    def _attempt(self, size: int, resident_bytes: int) -> Attempt:
        # Each rank encodes on its own, so no rank waits for another one.
        return attempt(self._bridge, lambda: self.warm_up(size), resident_bytes)


def card_encoder(
    config: VllmConfig, model: LayeredModel, bridge: HabanaBridge
) -> CardEncoder | None:
    """Make the encoder runner of a model; None if the model reads only text."""
    family = family_of_model(config)
    if family is None:
        return None
    if model.stage.is_first:
        assert model.media_encoder is not None
        return CardEncoder(config, model.media_encoder, family, bridge, model.tp, is_here=True)
    with torch.device("meta"):
        encoder = make_encoder(config.model.resolved_arch)
    return CardEncoder(config, encoder, family, bridge, model.tp, is_here=False)


class _Run(nn.Module):
    """The operators of an encoder as a module whose arguments are tensors."""

    def __init__(self, encoder: MediaEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def forward(self, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        return self._encoder.run(**dict(zip(names, tensors, strict=True)))


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy numpy arrays to tensors on the host."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
