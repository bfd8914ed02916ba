"""The media rules of a model, and the work of a process that reads media: decoding, cropping,
resizing.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vllm import envs
from vllm.config import VllmConfig
from vllm.errors import ConfigError, RequestError
from vllm.inputs import plural, singular
from vllm.multimodal.audio.sound import read_sound
from vllm.multimodal.images.image import Color, image_pixels
from vllm.multimodal.images.settings import check_resized
from vllm.multimodal.interface.checks import SETTINGS_FILE
from vllm.multimodal.interface.family import EncoderInput, MediaFamily, TokenLookup, VideoFrames
from vllm.multimodal.interface.source import MediaSource, refuse
from vllm.multimodal.interface.speech import SpeechRules
from vllm.multimodal.processor_settings import override_settings, read_settings
from vllm.multimodal.video.frames import FrameChoice, read_frames
from vllm.utils.files.json_file import read_json_object

_OVERRIDES = "mm_processor_kwargs"
"""Field of a request with settings."""
_SIDE = 64
"""Height and width in pixels of an image that every family accepts."""

Job = Callable[[MediaSource], EncoderInput]


def family_class(name: str) -> type[MediaFamily]:
    """Return the class of a family, given its module name in `vllm.multimodal.families`."""
    return import_module(f"vllm.multimodal.families.{name}").Family


def job_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return the arguments of `make_job` for the model of an engine that reads media.

    Raises:
        ConfigError: the settings of the image processor are missing, or cannot be used.
    """
    arch = config.model.resolved_arch
    assert arch.media_config is not None and arch.media_module is not None
    rules = family_class(arch.media_module)
    settings = read_settings(rules, config.model.resolved_path)
    return {
        "family": arch.media_module,
        "config": dict(arch.media_config),
        "settings": override_settings(rules, settings, config.multimodal.mm_processor_kwargs),
        "max_pixels": envs.get().VLLM_MAX_IMAGE_PIXELS,
        "background": config.multimodal.background,
        "max_seconds": envs.get().VLLM_MAX_AUDIO_DECODE_DURATION_S,
        "video": {
            "num_frames": config.multimodal.video.num_frames,
            "fps": config.multimodal.video.fps,
            "max_given": config.multimodal.max_frames,
            "max_pixels": envs.get().VLLM_MAX_IMAGE_PIXELS,
        },
        "expected": config.multimodal.largest_image,
    }


def family_of_model(config: VllmConfig) -> MediaFamily | None:
    """Return the media rules of the model; None if it reads only text."""
    if config.model.resolved_arch.media_config is None:
        return None
    given = job_arguments(config)
    return family_class(given["family"])(given["config"], given["settings"])


def speech_of_model(config: VllmConfig, token_id: TokenLookup) -> SpeechRules | None:
    """Return the transcription rules of the model of an engine; None if it does not transcribe.

    Args:
        config: complete and consistent.
        token_id: looks up tokens of the tokenizer; raises ConfigError if there is none.

    Raises:
        ConfigError: config.json, generation_config.json or the settings of the feature extractor
            cannot be used.
    """
    family = family_of_model(config)
    if family is None:
        return None
    return family.speech(_generation_config(config), token_id)


def _generation_config(config: VllmConfig) -> dict[str, Any]:
    """Return the content of generation_config.json; {} if the model has none."""
    folder = Path(config.model.hf_config_path or config.model.resolved_path)
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def make_job(
    family: str,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    max_pixels: int,
    background: Color,
    max_seconds: float,
    video: Mapping[str, Any],
    expected: tuple[int, int] | None = None,
) -> Job:
    """Return the function that reads an image, sound or video for one model.

    Args:
        family: module of `vllm.multimodal.families`.
        config: config.json of the whole model.
        settings: settings of its image processor or feature extractor, with defaults.
        max_pixels: limit of width x height of a file.
        background: colour of transparent pixels.
        max_seconds: limit of a sound.
        video: fields of a `FrameChoice`.
        expected: width and height of the largest image that is expected; None: any. Images with
            more embeddings are errors.

    Raises:
        ConfigError: the family does not accept the config or the settings.
    """
    rules = family_class(family)
    usual = rules(config, settings)
    _import_processors(usual)
    choice = FrameChoice(**video)
    most = {modality: _cost(usual, modality, choice) for modality in rules.modalities}
    limit = None if expected is None else ImageLimit.of(usual, *expected)

    def process(own: MediaFamily, source: MediaSource) -> EncoderInput:
        if source.modality == "image":
            pixels = image_pixels(source, max_pixels=max_pixels, background=background)
            given = own.process(pixels)
            if limit is not None:
                limit.check(num_embeddings(own, given))
            return given
        if source.modality == "audio":
            rate = own.sampling_rate
            return own.process_audio(
                read_sound(source, sampling_rate=rate, max_seconds=max_seconds)
            )
        return own.process_video(read_frames(source, choice))

    def read(source: MediaSource) -> EncoderInput:
        try:
            if not source.overrides:
                return process(usual, source)
            changed = override_settings(rules, settings, source.overrides)
            check_resized(changed, settings)
            own = rules(config, changed)
            try:
                cost = _cost(own, source.modality, choice)
            except MemoryError as error:
                raise RequestError(
                    f"mm_processor_kwargs: with these sizes, {singular(source.modality)} could "
                    "need more memory than there is. Choose smaller sizes, such as the defaults "
                    "of the model's processor",
                    param="mm_processor_kwargs",
                ) from error
            _check_cost(source.modality, cost, most[source.modality])
            return process(own, source)
        except ConfigError as error:  # some settings are only checked at their first use
            if not source.overrides:
                raise
            reason = str(error).removeprefix(f"{SETTINGS_FILE}: ").removeprefix(f"{_OVERRIDES}: ")
            raise RequestError(f"{_OVERRIDES}: {reason}", param=_OVERRIDES) from error
        except RequestError as error:
            if error.param in (source.where, _OVERRIDES):
                raise
            raise refuse(source.where, str(error)) from error

    return read


def _import_processors(rules: MediaFamily) -> None:
    """Process a small item of each modality, to import everything that is needed."""
    black = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    for modality in rules.modalities:
        if modality == "image":
            rules.process(black)
            continue
        with suppress(ImportError):  # without the package, each file is refused
            import av  # noqa: F401
        if modality == "audio":
            rules.process_audio(np.zeros(rules.sampling_rate, np.float32))
        else:
            rules.process_video(VideoFrames(np.stack([black] * 2), np.arange(2) / 2))


def largest_image(rules: MediaFamily, expected: tuple[int, int] | None) -> EncoderInput:
    """Return a black image that costs the encoder as much as any accepted image.

    Args:
        rules: rules of the model.
        expected: width and height of the largest image that is expected; None: any.
    """
    if expected is None or "image" not in rules.modalities:
        return rules.largest()
    width, height = expected
    return rules.process(np.zeros((height, width, 3), np.uint8))


def num_embeddings(rules: MediaFamily, given: EncoderInput) -> int:
    """Return how many embeddings or hidden states the encoder computes for an item.

    Args:
        rules: rules of the model.
        given: inputs of the encoder for the item.
    """
    found = rules.expand(given.grid, _AnyTokens())
    return sum(found.is_embedding) + found.num_states


@dataclass(frozen=True, slots=True)
class ImageLimit:
    """The largest image that is expected: width and height of `limit_mm_per_prompt`."""

    width: int
    height: int
    num_embeddings: int

    @classmethod
    def of(cls, rules: MediaFamily, width: int, height: int) -> "ImageLimit":
        """Compute the limit for images of a model."""
        image = largest_image(rules, (width, height))
        return cls(width, height, num_embeddings(rules, image))

    def check(self, count: int) -> None:
        """Check that an image does not have more embeddings than the limit.

        Raises:
            RequestError: it has; the message contains both counts.
        """
        if count > self.num_embeddings:
            raise RequestError(
                f"it becomes {count} embeddings, but at most {self.num_embeddings} are accepted, "
                f"the number for an image of {self.width} x {self.height} pixels. Send a smaller "
                "image, or start the engine with a larger width and height (--limit-mm-per-prompt)"
            )


def _cost(rules: MediaFamily, modality: str, choice: FrameChoice) -> tuple[int, int]:
    """Return the largest number of embeddings of an item, and of bytes of its tensors."""
    largest = rules.largest_of(modality, choice.num_frames)
    num_bytes = sum(tensor.nbytes for tensor in largest.tensors.values())
    return num_embeddings(rules, largest), num_bytes


class _AnyTokens:
    """A vocabulary in which every text is one token."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def text(self, text: str) -> list[int]:
        return [self(text)]


def _check_cost(modality: str, cost: tuple[int, int], most: tuple[int, int]) -> None:
    """Check that settings of a request do not allow items larger than the engine has memory for.

    Raises:
        RequestError: they do; the message contains both sizes.
    """
    for what, size, limit in zip(("embeddings", "bytes"), cost, most, strict=True):
        if size > limit:
            raise RequestError(
                f"mm_processor_kwargs: {singular(modality)} could have {size} {what}, but the "
                f"engine was started for {plural(modality)} of at most {limit}. Choose smaller "
                "sizes, or start it with larger ones (--mm-processor-kwargs)",
                param=_OVERRIDES,
            )
