"""The images of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.family import MediaFamily


@dataclass(frozen=True, slots=True)
class MediaInput:
    """Limits of the images of prompts."""

    family: "MediaFamily | None" = None
    """None: the model reads text only."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By modality: how many items a prompt may have."""
