"""Find the tokenizer class that `AutoTokenizer` chooses for a model folder, without importing it.

Importing `AutoTokenizer` loads torch and the configurations of all models, which takes seconds;
importing a tokenizer class does not. Two small files and the table of families give the same choice
for the supported families; for any other model it is None, and `AutoTokenizer` is used.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.families import family_of
from vllm.config.families.table import GENERIC
from vllm.transformers_utils.transformers_version import is_version_4
from vllm.utils.files.json_file import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NAMES_OF_VERSION_5 = ("TokenizersBackend", "PythonBackend")
"""Names that transformers 5 also has for `GENERIC`."""
_NAMES_OF_GENERIC = {
    *(GENERIC, "PreTrainedTokenizer", *_NAMES_OF_VERSION_5),
    *("BloomTokenizer", "BloomTokenizerFast"),
}


def tokenizer_class(folder: Path) -> "type[PreTrainedTokenizerFast] | None":
    """Return the class that `AutoTokenizer.from_pretrained(folder)` would create; None: unknown.

    Raises:
        ConfigError: tokenizer_config.json or config.json is not a JSON object.
    """
    paths = [folder / name for name in ("tokenizer_config.json", "config.json")]
    if not (folder / "tokenizer.json").is_file() or not all(path.is_file() for path in paths):
        return None
    settings, config = (read_json_object(path) for path in paths)
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(named, str) or "auto_map" in settings or "auto_map" in config:
        return None

    import transformers

    model_type = config.get("model_type")
    if is_version_4():
        # For all model types: version 4 lacks some class names that transformers 5 writes.
        choice: str | None = (
            GENERIC if named in _NAMES_OF_VERSION_5 else named.removesuffix("Fast") + "Fast"
        )
    else:
        choice = _chosen_by_version_5(named, model_type, folder)
    return None if choice is None else getattr(transformers, choice, None)


def special_tokens_of_version_5(folder: Path) -> dict[str, Any]:
    """Return arguments with which transformers 4 can read special tokens that version 5 has
    written.

    Version 5 writes a list where version 4 expects names. Empty: version 4 can read the folder
    unchanged.

    Raises:
        ConfigError: tokenizer_config.json is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not is_version_4() or not path.is_file():
        return {}
    tokens = read_json_object(path).get("extra_special_tokens")
    if not isinstance(tokens, list):
        return {}
    return {"additional_special_tokens": tokens, "extra_special_tokens": {}}


def _chosen_by_version_5(named: str, model_type: object, folder: Path) -> str | None:
    family = family_of(model_type)
    registered = family.tokenizer
    if registered is None:
        return None
    if family.has_mistral_tokenizer and importlib.util.find_spec("mistral_common"):
        return None
    if registered == GENERIC or family.replaces_tokenizer:
        return registered
    if named in _NAMES_OF_GENERIC:
        return GENERIC
    named = named.removesuffix("Fast")
    if named == "LlamaTokenizer":
        has_byte_level = _has_byte_level(folder)
        if has_byte_level is not False:
            return None if has_byte_level is None else GENERIC
    return named


def _has_byte_level(folder: Path) -> bool | None:
    """Return whether tokenizer.json is byte-level BPE; None if the installed transformers does not
    check this.

    `LlamaTokenizer` would split the text at spaces, as SentencePiece does.
    """
    from transformers import PreTrainedTokenizerFast

    check = getattr(PreTrainedTokenizerFast, "_tokenizer_json_has_byte_level", None)
    return None if check is None else bool(check(str(folder)))
