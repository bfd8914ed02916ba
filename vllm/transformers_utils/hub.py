"""Find the local folder of a model or an adapter; download it if the name is one on the hub."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config.load import LoadFormat
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.configs.mistral_params import PARAMS
from vllm.transformers_utils.gguf.folder import unpack
from vllm.transformers_utils.gguf.header import SUFFIX, is_gguf
from vllm.transformers_utils.gguf.model import find_model
from vllm.utils.files.weight_files import CONSOLIDATED
from vllm.utils.process import startup_progress

logger = init_logger(__name__)

_MAX_TRIES = 5
"""Maximum number of tries of a download whose connection is lost; what has arrived is kept. Newer
releases of huggingface_hub try again themselves."""
_LOST_CONNECTIONS = (
    "ChunkedEncodingError",
    "ConnectionError",
    "ReadTimeout",
    "RemoteProtocolError",
)
"""Types of requests and of httpx."""

_METADATA = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
_SAFETENSORS = ("*.safetensors",)
_PICKLES = ("*.bin", "*.pt")


def resolve_model_folder(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    ignore_patterns: Sequence[str] = (),
    load_format: LoadFormat = "auto",
    token: str | bool | None = None,
) -> Path:
    """Return the folder of a model: `name` itself if it is a folder, else a download from the hub.

    A GGUF file, local or as organisation/repository/file.gguf or organisation/repository:Q4_K_M on
    the hub, becomes a folder (`gguf.folder`).

    Weights are downloaded in one format only, safetensors before pickles; none for "dummy".
    `HF_HUB_OFFLINE`, `HF_TOKEN` and the other variables of huggingface_hub apply; `token` has
    priority over `HF_TOKEN`, and True is the token of `hf auth login`.

    Raises:
        ConfigError: no such folder or repository, or the download failed.
    """
    path = find_folder(name)
    if path is not None:
        return path

    def download(*patterns: str) -> Path:
        startup_progress.report(f"getting {repository} from the hub")
        return _download(repository, revision, download_dir, patterns, ignore_patterns, token)

    repository, file = _split_file(name)
    if file is not None:
        found = download(_parts_pattern(file)) / file
        if not found.is_file():
            raise ConfigError(
                f"the repository {repository!r} has no file {file!r}: name a file that the page of "
                "the repository lists under Files, with the same upper and lower case"
            )
        return unpack(found)
    repository, _, kind = name.partition(":")
    if kind:
        return unpack(_file_of_kind(download(*_patterns_of(kind)), repository, kind))
    if load_format == "gguf":
        raise ConfigError(
            f"model {name!r} with --load-format gguf: name one file of the repository, such as "
            f"{name}/model-Q8_0{SUFFIX}, or its kind, such as {name}:Q8_0"
        )
    if load_format == "dummy":
        return download(*_METADATA)
    if load_format == "pt":
        return download(*_METADATA, *_PICKLES)
    if load_format == "mistral":
        return download(*_METADATA, CONSOLIDATED)
    ignore_patterns = (*ignore_patterns, CONSOLIDATED)  # contains the same weights a second time
    folder = download(*_METADATA, *_SAFETENSORS)
    if load_format != "auto" or any(folder.glob("*.safetensors")):
        return folder
    folder = download(*_METADATA, *_PICKLES)
    if (folder / "config.json").is_file() or not (folder / PARAMS).is_file():
        return folder
    ignore_patterns = ignore_patterns[:-1]
    return download(*_METADATA, CONSOLIDATED)


def resolve_adapter_folder(name: str) -> Path:
    """Return the folder of a LoRA adapter: `name` itself if it is a folder, else a download from
    the hub, once per process.

    The variables of huggingface_hub apply.

    Raises:
        ConfigError: no such folder or repository, or the download failed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or _looks_like_path(name):
        raise ConfigError(f"{name} is not a folder")
    return _download_adapter(name)


@cache
def _download_adapter(name: str) -> Path:
    def download(file: str) -> Path:
        files = ("adapter_config.json", file)
        return _download(name, None, None, files, (), None, kind="LoRA adapter")

    folder = download("adapter_model.safetensors")
    if not (folder / "adapter_model.safetensors").is_file():
        folder = download("adapter_model.bin")
    return folder


def find_folder(name: str) -> Path | None:
    """Return the local folder of this name; None for a name on the hub. Does not contact the hub.

    Raises:
        ConfigError: the name is a path, but the folder or GGUF file does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        gguf = None if (path / "config.json").is_file() else find_model(path)
        return path if gguf is None else unpack(gguf)
    if is_gguf(path):
        return unpack(path)
    if path.exists():
        raise ConfigError(
            f"model {name!r} is a file; name the folder that holds its config.json, or a "
            f"{SUFFIX} file"
        )
    if _split_file(name)[1] is None and _looks_like_path(name):
        raise ConfigError(f"model folder {name!r} does not exist")
    return None


def is_offline() -> bool:
    """Return whether only the local cache is used for models on the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _split_file(name: str) -> tuple[str, str | None]:
    """Split organisation/repository/file.gguf into the repository and the GGUF file. For other
    names the file is None.
    """
    parts = name.split("/", 2)
    if len(parts) < 3 or not name.endswith(SUFFIX) or parts[0] in ("", ".", "..", "~"):
        return name, None
    return "/".join(parts[:2]), parts[2]


def _parts_pattern(file: str) -> str:
    """Return a pattern for all files of a split model; the file name itself if it is not split."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-*-of-\1", file)


def _patterns_of(kind: str) -> list[str]:
    """Return patterns for the GGUF files of one kind, such as Q4_K_M, in any case."""
    cases = dict.fromkeys((kind, kind.upper(), kind.lower()))
    return [f"*[-._]{each}{end}{SUFFIX}" for each in cases for end in ("", "-*")]


def _file_of_kind(folder: Path, repository: str, kind: str) -> Path:
    """Return the first GGUF file of one kind in a downloaded repository.

    Raises:
        ConfigError: there is none.
    """
    matches = (folder.rglob(pattern) for pattern in _patterns_of(kind))
    found = sorted({path for paths in matches for path in paths if "mmproj" not in path.name})
    if not found:
        raise ConfigError(
            f"the repository {repository!r} has no GGUF file of the kind {kind!r}: name a kind in "
            f"the names of its files, such as Q8_0, or a whole file, such as {repository}/NAME"
            f"{SUFFIX}"
        )
    return found[0]


def _looks_like_path(name: str) -> bool:
    """Return whether a name cannot be a name on the hub, which is `name` or `organisation/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name


def _download(
    name: str,
    revision: str | None,
    download_dir: str | None,
    allow_patterns: Sequence[str],
    ignore_patterns: Sequence[str],
    token: str | bool | None,
    kind: str = "model",
) -> Path:
    from huggingface_hub import snapshot_download

    phase = f"getting {name} from the hub"
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(allow_patterns),
                ignore_patterns=list(ignore_patterns),
                token=token,
                tqdm_class=_reporting_bar(f"{phase} (MiB)"),
            )
            break
        # Network, proxy, disk and hub raise exceptions of various types.
        except Exception as error:
            reason = _explain(error, revision)
            if not tries_left or type(error).__name__ not in _LOST_CONNECTIONS:
                raise ConfigError(f"cannot get {kind} {name!r}: {reason}") from error
            logger.warning(
                "the connection was lost; continuing the download of %s: %s", name, reason
            )
    return Path(folder)


def _reporting_bar(phase: str) -> Any:
    """Return a class of progress bars that also reports the downloaded MiB, if the installed
    huggingface_hub counts bytes.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_disk = options.get("unit") == "B" and not str(
                options.get("name", "")
            ).endswith("transfer")
            self._done = float(options.get("initial") or 0)
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_disk:
                self._done += n or 0
                done, total = (int(count or 0) >> 20 for count in (self._done, self.total))
                startup_progress.report(phase, done, total)
            return super().update(n)

    return Bar


def _explain(error: Exception, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated; accept its terms on huggingface.co, and set HF_TOKEN or --hf-token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such folder and no such repository on the hub; a private repository "
            "needs HF_TOKEN or --hf-token"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "there is no such folder, it is not in the cache, and HF_HUB_OFFLINE is set"
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        return f"there is no such folder, it is not in the cache, and the hub is unreachable{cause}"
    return " ".join(str(error).split()) or type(error).__name__
