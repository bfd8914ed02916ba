"""The work of a process that reads images: decode, cut and resize."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from vllm import envs
from vllm.config import VllmConfig
from vllm.errors import ConfigError, RequestError
from vllm.multimodal.images.image import Color, image_pixels
from vllm.multimodal.images.settings import (
    check_resized,
    override_settings,
    read_processor_settings,
)
from vllm.multimodal.interface.family import EncoderInput, MediaFamily
from vllm.multimodal.interface.source import MediaSource, refuse

_SIDE = 64
"""Pixels of an image that every family accepts."""

Job = Callable[[MediaSource], EncoderInput]


def family_class(name: str) -> type[MediaFamily]:
    """Return the class of a family by its module in `vllm.multimodal.families`."""
    found: type[MediaFamily] = import_module(f"vllm.multimodal.families.{name}").Family
    return found


def job_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return the arguments of `make_job` for the images of the model of an engine that reads some.

    Raises:
        ConfigError: the settings of the image processor are missing, or cannot be used.
    """
    arch = config.model.resolved_arch
    assert arch.media_config is not None
    settings = read_processor_settings(config.model.resolved_path)
    return {
        "family": arch.media_module,
        "config": dict(arch.media_config),
        "settings": override_settings(settings, config.multimodal.mm_processor_kwargs),
        "max_pixels": envs.get().VLLM_MAX_IMAGE_PIXELS,
        "background": config.multimodal.background,
    }


def family_of_model(config: VllmConfig) -> MediaFamily | None:
    """Return the rules of the images of a model; None: it reads text only."""
    if config.model.resolved_arch.media_config is None:
        return None
    given = job_arguments(config)
    return family_class(given["family"])(given["config"], given["settings"])


def make_job(
    family: str,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    max_pixels: int,
    background: Color,
) -> Job:
    """Return the function that reads an image for one model.

    Args:
        family: module of `vllm.multimodal.families`.
        config: config.json of the whole model.
        settings: of its image processor, with defaults.
        max_pixels: limit of width x height of a file.
        background: colour of transparent pixels.

    Raises:
        ConfigError: the family does not accept the config or the settings.
    """
    rules = family_class(family)
    usual = rules(config, settings)
    usual.process(np.zeros((_SIDE, _SIDE, 3), np.uint8))  # imports the image processor
    most = _cost(usual)

    def read(source: MediaSource) -> EncoderInput:
        own = usual
        if source.overrides:
            try:
                changed = override_settings(settings, source.overrides)
                check_resized(changed, settings)
                own = rules(config, changed)
            except ConfigError as error:
                raise RequestError(str(error), param="mm_processor_kwargs") from error
            _check_cost(_cost(own), most)
        pixels = image_pixels(source, max_pixels=max_pixels, background=background)
        try:
            return own.process(pixels)
        except RequestError as error:
            raise refuse(source.where, str(error)) from error

    return read


def num_embeddings(rules: MediaFamily, given: EncoderInput) -> int:
    """Return how many embeddings the encoder makes of an item.

    Args:
        rules: of the model.
        given: of the item.
    """
    ids: dict[str, int] = {}
    found = rules.expand(given.grid, lambda token: ids.setdefault(token, len(ids)))
    return sum(found.is_embedding)


def _cost(rules: MediaFamily) -> tuple[int, int]:
    """Return the most embeddings that an image can have, and the most bytes of pixels."""
    largest = rules.largest()
    return num_embeddings(rules, largest), largest.tensors["pixels"].nbytes


def _check_cost(cost: tuple[int, int], most: tuple[int, int]) -> None:
    """Refuse settings of a request with which an image can be larger than the engine has memory
    for.

    Raises:
        RequestError: names both numbers.
    """
    for what, size, limit in zip(("embeddings", "bytes of pixels"), cost, most, strict=True):
        if size > limit:
            raise RequestError(
                f"mm_processor_kwargs: an image could have {size} {what}, and the engine was "
                f"started for images of at most {limit}. Choose smaller sizes, or start it with "
                f"larger ones (--mm-processor-kwargs)",
                param="mm_processor_kwargs",
            )
