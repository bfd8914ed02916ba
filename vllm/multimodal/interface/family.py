"""The interface of a family of models with images, sound or videos, without weights.

A family has two files of the same name: one in `families/` for the size and the tokens of an image,
and one in `vllm.model_executor.media.families` for the modules that encode it. This package loads
no torch; an image processor is imported when an image is processed.
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

EMBEDDINGS = "embeddings"
"""Name of the only tensor of an item that a request brings as embeddings [n, width]."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The input of a model's encoder for one image, sound or video."""

    tensors: dict[str, npt.NDArray[Any]]
    """Tensors by name. Pixels are uint8, cut and resized, before they are scaled and normalised:
    the encoder does that. All other tensors are small."""
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
    """One image, sound or video of a prompt, after its placeholder was replaced by tokens."""

    start: int
    """Index of the first token of its expansion."""
    num_tokens: int
    """Number of tokens into which the item is expanded."""
    grid: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    """(index, n) of the tokens of its expansion that are embeddings, one after the other."""


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames that were selected from a video."""

    pixels: npt.NDArray[np.uint8]
    """[n, height, width, 3] in RGB."""
    seconds: npt.NDArray[np.float64]
    """[n]: when each frame is shown, from the beginning of the video."""


def grid_of_size(count: int, size: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the grid of given embeddings, for a model whose images all have the same number.

    See `MediaFamily.grid_of_embeddings`.

    Args:
        count: number of given embeddings.
        size: number that an image has.
        grid: grid that the request has.
    """
    if grid is not None:
        raise RequestError(
            "image_grid_thw is not used by this model, whose images have one size: leave it out"
        )
    if count != size:
        raise RequestError(f"an image of this model must have {size} embeddings, got {count}")
    return (size,)


class TokenLookup(Protocol):
    """Looks up tokens in the vocabulary of a model."""

    def __call__(self, token: str) -> int:
        """Return the id of a token; raise ConfigError if the vocabulary does not have it."""
        ...

    def text(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...


_SIDE = 64
"""Height and width in pixels of a small image."""


class MediaFamily(ABC):
    """The rules of one model for images, sound and videos.

    Args:
        config: config.json of the whole model.
        settings: settings of its image processor or feature extractor: `preprocessor_config.json`,
            or `image_processor` or `feature_extractor` of `processor_config.json`, with the
            overrides of the engine and of the request.

    Raises:
        ConfigError: a value is missing or cannot be used; the message names the file and the key.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """Kinds of media that the model reads: "image", "audio" and "video"."""
    required: ClassVar[str | None] = None
    """Modality of which every prompt must have one item; None: a prompt may have only text."""
    image_processor: ClassVar[str | None] = None
    """Class of the image processor in transformers of settings that name none; a key of
    `images.settings.DEFAULTS`."""
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
        """Return the text of the token that represents one item of a modality in a prompt.

        Empty: items have no placeholder, since they add no tokens to a prompt, and begin with its
        first token.
        """
        return self.placeholder

    def text_of(self, modality: str) -> str:
        """Return the text for one item of a modality in a message.

        It is used for chat templates that take strings.
        """
        return self.text_of_image

    def around(self, modality: str) -> tuple[str, str] | None:
        """Return tokens around a placeholder that its expansion also replaces, if the prompt has
        both.

        (token before, token after); None: only the placeholder is replaced.
        """
        return None

    def process(self, pixels: npt.NDArray[np.uint8]) -> EncoderInput:
        """Crop and resize an image like the image processor of transformers.

        Args:
            pixels: [height, width, 3] in RGB.

        Raises:
            RequestError: the image cannot be used, such as one of 1 x 5000 pixels.
        """
        raise NotImplementedError("this model reads no images")

    def process_audio(self, samples: npt.NDArray[np.float32]) -> EncoderInput:
        """Compute the features of a sound like the feature extractor of transformers.

        Args:
            samples: [n] from -1 to 1, one channel, `sampling_rate` per second.

        Raises:
            RequestError: the sound cannot be used, such as one without samples.
        """
        raise NotImplementedError("this model reads no sound")

    def process_video(self, frames: VideoFrames) -> EncoderInput:
        """Crop and resize the frames of a video like the video processor of transformers.

        Raises:
            RequestError: the video cannot be used.
        """
        raise NotImplementedError("this model reads no videos")

    def grid_of_embeddings(self, count: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the grid of an image whose embeddings are given in the request.

        Args:
            count: number of embeddings.
            grid: `image_grid_thw` of the request; None: it has none.

        Raises:
            RequestError: an image cannot have this number, or the family cannot know its grid.
        """
        raise RequestError("this model takes no embeddings of images: send the image")

    def num_embeddings_of(self, grid: tuple[int, ...]) -> int:
        """Return how many embeddings an image with this `image_grid_thw` has.

        Raises:
            RequestError: images of this model have no such grids.
        """
        raise RequestError("image_grid_thw is not used by this model: leave it out")

    @property
    def num_added(self) -> int:
        """Number of language-model layers after which values of an image are added to hidden
        states.

        These values follow each embedding (DeepStack).
        """
        return 0

    @abstractmethod
    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        """Return the tokens that replace the placeholder of an item in a prompt.

        Args:
            grid: grid of its `EncoderInput`.
            token_id: looks up tokens.
        """

    def num_parts(self, grid: tuple[int, ...]) -> int:
        """Return into how many parts the encoder divides an item, such as tiles.

        1 for an item in which everything attends to everything.

        Args:
            grid: grid of its `EncoderInput`.
        """
        return 1

    @abstractmethod
    def largest(self) -> EncoderInput:
        """Return a black image that costs the encoder as much as any image can.

        A model without images returns such a sound.
        """

    def largest_of(self, modality: str, max_frames: int) -> EncoderInput:
        """Return an item that costs the encoder as much as any item of its modality can.

        Args:
            modality: one of the modalities of the model.
            max_frames: maximum number of frames of a video.
        """
        return self.largest()

    def speech(self, generation: Mapping[str, Any], token_id: TokenLookup) -> SpeechRules | None:
        """Return the transcription rules of the model; None if it does not transcribe.

        Args:
            generation: generation_config.json of the model, {} if it has none.
            token_id: looks up tokens.

        Raises:
            ConfigError: a value cannot be used.
        """
        return None

    @property
    def transcribes(self) -> bool:
        """Whether the model can transcribe."""
        return type(self).speech is not MediaFamily.speech

    def small(self) -> EncoderInput:
        """Return a small item that the model accepts, for the warm-up."""
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
            items: items in the order of their tokens.
        """
        return None

    def seen_by(self, items: Sequence[PlacedItem]) -> list[tuple[int, int]]:
        """Return which tokens see each item by cross-attention: (first index, index after the
        last).

        Items that follow each other without other tokens are a group. A token sees the items up to
        it of the newest group, as in Llama 3.2. Generated tokens see the last group.

        Args:
            items: items in the order of their tokens.
        """
        end, found = END_OF_REQUEST, []
        for index in range(len(items) - 1, -1, -1):
            item = items[index]
            found.append((item.start, end))
            before = items[index - 1] if index else None
            if before is not None and before.start + before.num_tokens < item.start:
                end = item.start
        return found[::-1]
