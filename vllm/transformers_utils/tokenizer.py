"""Load tokenizers. transformers is imported at the first call, because that is slow."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.config import ModelConfig
from vllm.errors import ConfigError
from vllm.transformers_utils.gguf.folder import WITHOUT_TOKENIZER
from vllm.transformers_utils.processor_template import template_of_folder
from vllm.transformers_utils.tekken import TEKKEN, load_tekken
from vllm.transformers_utils.tokenizer_class import special_tokens_of_version_5, tokenizer_class
from vllm.utils.files.json_file import read_json_object
from vllm.utils.files.lfs import pointer_problem
from vllm.utils.imports import without_collections, without_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyTokenizer: TypeAlias = "PreTrainedTokenizerBase"
"""Any tokenizer, in the annotations of programs written for vLLM."""

_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", TEKKEN)
"""Files of tokenizers. The folder of a model must have at least one of them."""


_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""Packages that read `tokenizer.model`, and their modules."""

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files next to `tokenizer.json`."""

_PARTS = (
    ("tokenizer.json", "model", dict, "object"),
    ("tokenizer.json", "added_tokens", list, "list"),
    ("tokenizer_config.json", "added_tokens_decoder", dict, "object"),
)
"""File, key, type of its value, and name of the type."""

_MISTRAL_FILES = ("tokenizer.model.v*", "tokenizer.mm.model.v*")


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of an engine; None with skip_tokenizer_init.

    Raises:
        ConfigError: there is no tokenizer, or its files are damaged.
    """
    if model.skip_tokenizer_init:
        return None
    with without_collections():
        return get_tokenizer(
            model.tokenizer or model.resolved_path,
            tokenizer_mode=model.tokenizer_mode,
            trust_remote_code=model.trust_remote_code,
        )


def get_tokenizer(
    tokenizer_name: str,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a local folder or of a model on the Hugging Face hub.

    Args:
        tokenizer_name: folder or hub name.
        tokenizer_mode: "auto", "mistral" for `tekken.json` even if there is another file, or "slow"
            to prefer a Python implementation if the installed transformers has one.
        trust_remote_code: run Python code that comes with the tokenizer.
        revision: branch, tag or commit on the hub.
        download_dir: folder for downloads; None: the Hugging Face cache.
        kwargs: passed on to `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: there is no tokenizer, or its files are damaged.
    """
    folder = Path(tokenizer_name)
    if reason := _empty_file(folder):  # an empty `tokenizer.model` can be read, without tokens
        raise ConfigError(_failure(tokenizer_name, reason))
    try:
        if _is_tekken(folder, tokenizer_mode):
            return load_tekken(folder)
        chosen = None if tokenizer_mode == "slow" or kwargs else tokenizer_class(folder)
        if chosen is not None:
            tokenizer = chosen.from_pretrained(
                tokenizer_name, **special_tokens_of_version_5(folder)
            )
        else:
            with without_torch():
                from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                tokenizer_name,
                use_fast=tokenizer_mode != "slow",
                trust_remote_code=trust_remote_code,
                revision=revision,
                cache_dir=download_dir,
                **{**special_tokens_of_version_5(folder), **kwargs},
            )
    except ConfigError:
        raise
    except Exception as error:  # the library raises a plain Exception for a damaged file
        # The text of a KeyError is only the key, so use its repr.
        own_words = repr(error) if isinstance(error, LookupError) else str(error) or repr(error)
        if "trust_remote_code" in own_words:
            own_words = "it has its own code, which runs only with trust_remote_code"
        reason = (
            _missing_tokenizer_reason(folder)
            or _of_mistral(folder)
            or _not_downloaded(folder)
            or _of_sentencepiece(folder)
            or _damage(folder)
            or _without_merges(folder)
            or _of_newer_package(own_words)
            or (_of_file(folder, own_words) if _is_of_content(error) else None)
            or own_words
        )
        raise ConfigError(_failure(tokenizer_name, reason)) from error
    if not isinstance(tokenizer.chat_template, str | dict | None):
        reason = _damage(folder) or "its chat_template is not a text"
        raise ConfigError(_failure(tokenizer_name, reason))
    if len(tokenizer) == 0:
        raise ConfigError(_failure(tokenizer_name, "its vocabulary is empty"))
    if not isinstance(tokenizer.model_max_length, (int, float)):
        given = tokenizer.model_max_length
        raise ConfigError(
            _failure(
                tokenizer_name,
                f"model_max_length in tokenizer_config.json must be a number, got {given!r}",
            )
        )
    result: PreTrainedTokenizerBase = tokenizer
    result.chat_template = template_of_folder(folder, result.chat_template)
    return result


def _is_tekken(folder: Path, tokenizer_mode: str) -> bool:
    """Return whether to read `tekken.json`, because it is the only file or was requested."""
    has_tekken = (folder / TEKKEN).is_file()
    if tokenizer_mode == "mistral" and not has_tekken:
        raise ConfigError(
            f"tokenizer_mode='mistral' reads {TEKKEN}, and there is none in {str(folder)!r}. Leave "
            f"tokenizer_mode out"
        )
    return has_tekken and (tokenizer_mode == "mistral" or not (folder / "tokenizer.json").is_file())


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without tokenizer files. Does not open the files.

    Raises:
        ConfigError: the folder has no tokenizer files.
    """
    reason = _missing_tokenizer_reason(folder)
    if reason is not None:
        raise ConfigError(_failure(str(folder), reason))


def _missing_tokenizer_reason(folder: Path) -> str | None:
    """Return why a folder cannot have a tokenizer; None if it may have one, or is not a folder."""
    if not folder.is_dir() or any(
        path.is_file() for pattern in _FILES for path in folder.glob(pattern)
    ):
        return None
    if (folder / WITHOUT_TOKENIZER).is_file():
        return (folder / WITHOUT_TOKENIZER).read_text(encoding="utf-8-sig")
    if reason := _of_mistral(folder):
        return reason
    return f"the folder has none of {', '.join(_FILES)}"


def _damage(folder: Path) -> str | None:
    """Describe the damage in the structure of the JSON files of a tokenizer; None if there is none,
    or no file exists.
    """
    found = {}
    for name in ("tokenizer.json", *_SETTINGS):
        if (folder / name).is_file():
            try:
                found[name] = read_json_object(folder / name)
            except ConfigError as error:
                return str(error)
    for name, key, kind, shown in _PARTS:
        is_needed = name == "tokenizer.json" or key in found.get(name, {})
        if name in found and is_needed and not isinstance(found[name].get(key), kind):
            return f"{name} has no {shown} {key!r}"
    templates = found.get("tokenizer_config.json", {}).get("chat_template") or ""
    if isinstance(templates, list):
        is_named = all(
            isinstance(each, dict) and {"name", "template"} <= each.keys() for each in templates
        )
        templates = "" if is_named else templates
    if not isinstance(templates, str):
        return (
            "chat_template in tokenizer_config.json must be a text, or a list of objects with name "
            f"and template, got {str(templates)[:40]}"
        )
    for token, token_id in found.get("added_tokens.json", {}).items():
        if type(token_id) is not int:
            return (
                f"added_tokens.json must give an integer for each token, got {token_id!r} for "
                f"{token[:40]!r}"
            )
    return None


def _not_downloaded(folder: Path) -> str | None:
    """Name a file that is only a pointer of Git LFS; None if there is none."""
    files = (path for pattern in _FILES for path in sorted(folder.glob(pattern)))
    return next(filter(None, map(pointer_problem, files)), None)


def _empty_file(folder: Path) -> str | None:
    """Name a file without content, if it has the whole vocabulary; None if there is none."""
    if (folder / "tokenizer.json").is_file():
        return None
    files = (path for pattern in _FILES for path in sorted(folder.glob(pattern)))
    empty = next((path.name for path in files if not path.stat().st_size), None)
    return None if empty is None else f"{empty} is empty. Copy it again from the same model"


def _is_of_content(error: Exception) -> bool:
    """Return whether an error comes from the content of a file, and its message does not say so:
    tokenizers, sentencepiece and protobuf raise errors of their own, or built-in ones.
    """
    is_plain = type(error) is Exception or "protobuf" in type(error).__module__
    return is_plain or isinstance(error, (TypeError, AttributeError, LookupError, RuntimeError))


def _of_file(folder: Path, own_words: str) -> str | None:
    """Name the file that a library cannot read; None if this is not known.

    Args:
        folder: folder of the tokenizer.
        own_words: message of the library.
    """
    path, again = folder / "tokenizer.json", "Copy it again from the same model"
    if not path.is_file():
        found = next(iter(sorted(folder.glob("*.model"))), None)
        if found is None:
            return None
        return f"{found.name} is damaged, or has another format than its name says. {again}"
    from tokenizers import Tokenizer

    try:
        kind = type(Tokenizer.from_file(str(path)).model).__name__
    except Exception as error:  # the library raises a plain Exception for a damaged file
        return f"tokenizer.json cannot be read: {error}. {again}"
    settings = folder / "tokenizer_config.json"
    given = read_json_object(settings).get("tokenizer_class") if settings.is_file() else None
    return (
        f"tokenizer.json has a vocabulary of the kind {kind}, and the files next to it (class in "
        f"tokenizer_config.json: {given!r}) do not agree with it: {own_words.splitlines()[0]}. "
        "Copy all of these files again from the same model"
    )


def _without_merges(folder: Path) -> str | None:
    """Return why `vocab.json` is not enough; None if there is another file."""
    has_vocabulary = (folder / "vocab.json").is_file()
    if not has_vocabulary or any((folder / n).is_file() for n in ("tokenizer.json", "merges.txt")):
        return None
    return "vocab.json cannot be read without merges.txt. Copy it from the same model"


def _of_mistral(folder: Path) -> str | None:
    """Return why a tokenizer that exists only in the format of Mistral AI cannot be read; None if
    it can.
    """
    names = sorted(p.name for pattern in _MISTRAL_FILES for p in folder.glob(pattern))
    if not names or (folder / "tokenizer.json").is_file():
        return None
    return (
        f"{names[0]} cannot be read without tokenizer.json. Save tokenizer.json of the same "
        "model in the same folder"
    )


def _of_sentencepiece(folder: Path) -> str | None:
    """Return why `tokenizer.model` cannot be read, because a package is not installed; None if it
    can, or another file exists.
    """
    if not (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
        return None
    missing = [name for name, module in _SENTENCEPIECE.items() if not _is_installed(module)]
    if not missing:
        return None
    return (
        f"tokenizer.model needs {' and '.join(_SENTENCEPIECE)}, and {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not installed: pip install 'vllm[sentencepiece]'"
    )


def _of_newer_package(message: str) -> str | None:
    """Return what to do if the package tokenizers does not know a part of tokenizer.json; None if
    that is not what its message says.
    """
    if "untagged enum" not in message:
        return None
    from tokenizers import __version__

    return (
        f"tokenizer.json has a part that tokenizers {__version__} does not know. Install a newer "
        "release: pip install -U tokenizers transformers"
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the class is not installed
        return False


def _failure(tokenizer_name: str, reason: str) -> str:
    first_line = reason.strip().splitlines()[0].rstrip(" :")
    return (
        f"no usable tokenizer in {tokenizer_name!r}: {first_line}. Name one with tokenizer=..., "
        f"or set skip_tokenizer_init to work with token ids only"
    )
