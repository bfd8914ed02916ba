"""The interface of a family of models with images, sound or videos, without its weights. Knows no
families.

A family has two files of one name: in `families/` the size and the tokens of an image, and in
`vllm.model_executor.media.families` the modules that encode it. This package loads no torch; an
image processor is imported when an image is processed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from vllm.errors import RequestError
from vllm.messages import END_OF_REQUEST
from vllm.multimodal.interface.speech import SpeechRules

IntArray = npt.NDArray[np.int32]

EMBEDDINGS = "embeddings"
"""Name of the only tensor of an item that a request brings as embeddings [n, width]."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The input of the encoder of a model for one image, sound or video."""

    tensors: dict[str, npt.NDArray[Any]]
    """By name. Pixels are uint8, cut and resized, before they are scaled and normalised: the
    encoder does that. All other tensors are small."""
    grid: tuple[int, ...]
    """Decides which tokens represent the item, and their positions. Only the family knows the
    meaning of the integers; the integers of a video also tell it from an image."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The tokens that represent one image, sound or video in a prompt."""

    token_ids: list[int]
    is_embedding: list[bool]
    """One per token: its embedding is the next one that the encoder makes of the item. The
    embeddings of the others are looked up."""
    num_states: int = 0
    """Hidden states of the encoder that cross-attention layers read. They replace no embeddings.
    0: the model has no such layers."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """One image, sound or video of a prompt, after its placeholder has been replaced."""

    start: int
    """Index of the first token of its expansion."""
    num_tokens: int
    """Tokens of its expansion."""
    grid: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """(index, n) of the tokens of its expansion that are embeddings, one after the other."""


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames that have been chosen from a video."""

    pixels: npt.NDArray[np.uint8]
    """[n, height, width, 3] in RGB."""
    seconds: npt.NDArray[np.float64]
    """[n]: when each frame is shown, from the beginning of the video."""


def grid_of_size(count: int, size: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the grid of an image whose embeddings a request brings, where all images have equally
    many; see `MediaFamily.grid_of_embeddings`.

    Args:
        count: number of embeddings.
        size: that an image has.
        grid: that the request has.
    """
    if grid is not None:
        raise RequestError(
            "image_grid_thw is not used by this model, whose images have one size: leave it out"
        )
    if count != size:
        raise RequestError(f"an image of this model must have {size} embeddings, got {count}")
    return (size,)


class TokenLookup(Protocol):
    """The vocabulary of a model."""

    def __call__(self, token: str) -> int:
        """Return the id of a token; raise ConfigError if the vocabulary does not have it."""
        ...

    def text(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...


_SIDE = 64
"""Pixels of a small image."""


class MediaFamily(ABC):
    """Images, sound and videos of one model.

    Args:
        config: config.json of the whole model.
        settings: of its image processor or feature extractor: `preprocessor_config.json`, or
            `image_processor` or `feature_extractor` of `processor_config.json`, with the overrides
            of the engine and of the request.

    Raises:
        ConfigError: a value is missing or cannot be used; names the file and the key.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """Kinds of media that the model reads: "image", "audio" and "video"."""
    required: ClassVar[str | None] = None
    """Modality of which every prompt must have one item; None: a prompt may have only text."""
    placeholder: ClassVar[str]
    """Text of the token that represents one image, or one sound of a model without images, before
    it is expanded, such as `<image>`."""
    text_of_image: ClassVar[str]
    """Text that represents one such item in a message, for chat templates that take strings."""
    text_around: ClassVar[tuple[str, str]] = ("", "")
    """Text before and after an image, which the tokenizer reads with the text of the prompt."""
    sampling_rate: ClassVar[int] = 16_000
    """Samples per second of sound that the model reads."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.config = config
        self.settings = settings

    def placeholder_of(self, modality: str) -> str:
        """Return the text of the token that represents one item of a modality. Empty: items have no
        placeholders, as they add no tokens to a prompt, and begin with its first token."""
        return self.placeholder

    def text_of(self, modality: str) -> str:
        """Return the text that represents one item of a modality in a message, for chat templates
        that take strings."""
        return self.text_of_image

    def around(self, modality: str) -> tuple[str, str] | None:
        """Return the tokens before and after a placeholder that its expansion replaces as well, if
        the prompt has both; None: it replaces the placeholder only."""
        return None

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        """Cut and resize an image as the image processor of transformers does.

        Args:
            pixels: [height, width, 3] in RGB.

        Raises:
            RequestError: the image cannot be used, such as one of 1 x 5000 pixels.
        """
        raise NotImplementedError("this model reads no images")

    def process_audio(self, samples: npt.NDArray[np.float32]) -> EncoderInput:
        """Return the features of a sound, as the feature extractor of transformers makes them.

        Args:
            samples: [n] from -1 to 1, one channel, `sampling_rate` per second.

        Raises:
            RequestError: the sound cannot be used, such as one without samples.
        """
        raise NotImplementedError("this model reads no sound")

    def process_video(self, frames: VideoFrames) -> EncoderInput:
        """Cut and resize the frames of a video as the video processor of transformers does.

        Raises:
            RequestError: the video cannot be used.
        """
        raise NotImplementedError("this model reads no videos")

    def grid_of_embeddings(self, count: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the grid of an image whose embeddings a request brings.

        Args:
            count: number of embeddings.
            grid: `image_grid_thw` of the request; None: it has none.

        Raises:
            RequestError: an image cannot have so many, or the family cannot know its grid.
        """
        raise RequestError("this model takes no embeddings of images: send the image")

    def num_embeddings_of(self, grid: tuple[int, ...]) -> int:
        """Return how many embeddings an image has whose `image_grid_thw` a request brings.

        Raises:
            RequestError: images of this model have no such grids.
        """
        raise RequestError("image_grid_thw is not used by this model: leave it out")

    @property
    def num_added(self) -> int:
        """Number of layers of the language model after which values of an image are added to
        hidden states, which follow each embedding."""
        return 0

    @abstractmethod
    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        """Return the tokens that replace the placeholder of an image.

        Args:
            grid: of its `EncoderInput`.
            token_id: looks up tokens.
        """

    @abstractmethod
    def largest(self) -> EncoderInput:
        """Return a black image that costs the encoder as much as any image can. A model without
        images returns such a sound."""

    def largest_of(self, modality: str, max_frames: int) -> EncoderInput:
        """Return an item that costs the encoder as much as any can.

        Args:
            modality: one of the modalities of the model.
            max_frames: of a video.
        """
        return self.largest()

    def speech(self, generation: Mapping[str, Any], token_id: TokenLookup) -> SpeechRules | None:
        """Return how the model transcribes; None: it does not.

        Args:
            generation: generation_config.json of the model, {} if it has none.
            token_id: looks up tokens.

        Raises:
            ConfigError: a value cannot be used.
        """
        return None

    @property
    def transcribes(self) -> bool:
        """Whether `speech` returns rules."""
        return type(self).speech is not MediaFamily.speech

    def small(self) -> EncoderInput:
        """Return a small item, which every model accepts."""
        # Try three shapes, because a square image may be cut into more tiles than others.
        shapes = ((_SIDE, _SIDE), (_SIDE, 2 * _SIDE), (2 * _SIDE, _SIDE))
        found = [self.process(np.zeros((*shape, 3), np.uint8)) for shape in shapes]
        return min(found, key=lambda each: each.tensors["pixels"].size)

    def positions(
        self, num_tokens: int, items: Sequence[PlacedItem]
    ) -> npt.NDArray[np.int32] | None:
        """Return the positions [P, n] of the n tokens of a prompt; None: they are its indices.

        Args:
            num_tokens: n.
            items: in the order of their tokens.
        """
        return None

    def seen_by(self, items: Sequence[PlacedItem]) -> list[tuple[int, int]]:
        """Return which tokens see the hidden states of each item, where cross-attention layers read
        them: indices of the first one and after the last one.

        Items that follow each other without other tokens are a group. A token sees the items up to
        it of the newest group, as Llama 3.2 does. Generated tokens see the last group.

        Args:
            items: in the order of their tokens.
        """
        end, found = END_OF_REQUEST, []
        for index in range(len(items) - 1, -1, -1):
            item = items[index]
            found.append((item.start, end))
            before = items[index - 1] if index else None
            if before is not None and before.start + before.num_tokens < item.start:
                end = item.start
        return found[::-1]
