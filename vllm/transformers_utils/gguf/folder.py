"""Convert a GGUF file to a model folder: its metadata as JSON files, and links to the weights.

So all other code reads a GGUF model like any other model. The folder is stored in the Hugging Face
folder, and created again if the file has changed.
"""

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.transformers_utils.gguf.config import read_config, read_generation_config, read_pooling
from vllm.transformers_utils.gguf.header import SUFFIX
from vllm.transformers_utils.gguf.model import GGUFModel, files_of_model, open_model
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files, warn_of_missing_rule
from vllm.version import __version__

logger = init_logger(__name__)

WITHOUT_TOKENIZER = "no-tokenizer.txt"
"""Says why a folder has no tokenizer."""


def unpack(path: Path) -> Path:
    """Return the model folder for a GGUF file, and create it if necessary.

    Args:
        path: path of the file; for a split model, of any of its files.

    Raises:
        ConfigError: it is damaged, a part is missing, or its model is not supported.
    """
    paths = [part.absolute() for part in files_of_model(path)]
    states = tuple((part.stat().st_size, part.stat().st_mtime_ns) for part in paths)
    return _unpack(tuple(paths), states)


@functools.lru_cache(maxsize=8)
def _unpack(paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> Path:
    from huggingface_hub import constants

    text = json.dumps([__version__, [str(path) for path in paths], states])
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    parent = Path(constants.HF_HOME) / "gguf-metadata"
    target = parent / f"{paths[0].stem[:80]}-{key}"
    model = open_model(paths)
    warn_of_missing_rule(model)
    if target.is_dir():
        return target
    files = _files_of(model)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        made = target = Path(tempfile.mkdtemp(prefix="vllm-gguf-"))
        logger.warning(
            "%s: cannot write next to the GGUF file, so its metadata is written to %s", error, made
        )
    for name, content in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(content, encoding="utf-8")
    for path in paths:
        name = path.name if path.suffix == SUFFIX else path.name + SUFFIX
        (made / name).symlink_to(path)
    if made != target:
        try:
            made.rename(target)
        except OSError:  # another process has created it meanwhile
            shutil.rmtree(made)
            if not target.is_dir():
                raise
    return target


def _files_of(model: GGUFModel) -> dict[str, str]:
    files = {
        "config.json": json.dumps(read_config(model), indent=1),
        "generation_config.json": json.dumps(read_generation_config(model)),
        **{name: json.dumps(content) for name, content in read_pooling(model).items()},
    }
    try:
        return files | tokenizer_files(model)
    except ConfigError as error:
        return files | {WITHOUT_TOKENIZER: f"{model.paths[0]}: {error}"}
