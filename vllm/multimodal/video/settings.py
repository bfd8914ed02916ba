"""The settings of the video processors of transformers, as far as this engine reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.multimodal.interface.settings_file import WHOLE_FILE
from vllm.utils.files.json_file import read_json_object

_OWN_FILE = "video_preprocessor_config.json"
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def read_video_size(folder: Path | str) -> Mapping[str, Any] | None:
    """Return the fewest and the most pixels of videos as shortest_edge and longest_edge.

    Args:
        folder: of the model.

    Returns:
        None: the folder has no settings of videos, so the settings of images hold. An edge that is
        absent has the default of the family.

    Raises:
        ConfigError: a file is damaged.
    """
    whole, own = Path(folder) / WHOLE_FILE, Path(folder) / _OWN_FILE
    found = read_json_object(whole).get("video_processor") if whole.exists() else None
    if found is None and own.exists():
        found = read_json_object(own)
    if not isinstance(found, Mapping):
        return None
    size = found.get("size")
    edges = dict(size) if isinstance(size, Mapping) else {}
    for key, edge in _EDGES.items():
        if found.get(key) is not None:
            edges[edge] = found[key]
    return {key: value for key, value in edges.items() if value is not None}
