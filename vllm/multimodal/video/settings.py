"""The settings of the video processors of transformers that this engine reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.interface.settings_file import WHOLE_FILE
from vllm.utils.files.json_file import read_json_object

_OWN_FILE = "video_preprocessor_config.json"
_CLASS = "video_processor_type"
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read_video_settings(folder: Path | str) -> dict[str, Any]:
    """Read the settings of videos from the folder of a model.

    Args:
        folder: folder of the model.

    Returns:
        "video_size": the smallest and the largest number of pixels, as shortest_edge and
        longest_edge; a missing one has the default of the family. None: the folder has no settings
        of videos, so the settings of images are used. "video_processor_type": the class of the
        processor, or None.

    Raises:
        ConfigError: a file is damaged.
    """
    whole, own = Path(folder) / WHOLE_FILE, Path(folder) / _OWN_FILE
    found = read_json_object(whole).get("video_processor") if whole.exists() else None
    if found is None and own.exists():
        found = read_json_object(own)
    if not isinstance(found, Mapping):
        return {"video_size": None, _CLASS: None}
    size = found.get("size")
    edges = dict(size) if isinstance(size, Mapping) else {}
    for key, edge in _EDGES.items():
        if found.get(key) is not None:
            edges[edge] = found[key]
    sizes = {key: value for key, value in edges.items() if value is not None}
    return {"video_size": sizes, _CLASS: found.get(_CLASS)}
