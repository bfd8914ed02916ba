"""Sounds for examples."""

from dataclasses import dataclass
from pathlib import Path

from vllm.assets.base import find_asset
from vllm.utils.media import Samples, read_file, read_wav


@dataclass(frozen=True)
class AudioAsset:
    """A sound: a WAV file in the folder that `VLLM_ASSETS_CACHE` names. The package has none.

    Attributes:
        name: name of the file, without its suffix.
    """

    name: str

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises:
            RequestError: there is none of this name.
        """
        return find_asset(self.name, (".wav",))

    @property
    def audio_and_sample_rate(self) -> tuple[Samples, int]:
        """The samples of the sound (several channels mixed to one), and the samples per second.

        Raises:
            RequestError: there is no such file, or it is not a WAV file.
        """
        return read_wav(read_file(self.path))
