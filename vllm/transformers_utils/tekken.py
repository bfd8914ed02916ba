"""Load tokenizers in the format of Mistral AI: `tekken.json`, byte-level BPE as ranks of byte
strings.

The file has no merges: two neighbours merge if their bytes together are a token; the token with the
lowest rank is created first. Special tokens have the first ids; the ids of the other tokens follow
in the order of their ranks. The file has no chat template either, so the version that it names
selects one.
"""

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.assets import CHAT_TEMPLATES
from vllm.errors import ConfigError
from vllm.transformers_utils.processor_template import template_of_folder
from vllm.transformers_utils.token_bytes import byte_level_text
from vllm.utils.files.json_file import read_json_object
from vllm.utils.text.bpe_merges import merges_in_order

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TEKKEN = "tekken.json"

_BOS, _EOS = "<s>", "</s>"
_ROLES = {"bos_token": _BOS, "eos_token": _EOS, "unk_token": "<unk>", "pad_token": "<pad>"}
_OLD_SPECIAL_TOKENS = (
    *("<unk>", _BOS, _EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files from before November 2024, which do not list them."""
_TEMPLATE_VERSIONS = {"v3": 3, "v7": 7, "v11": 11, "v13": 13}
_MAX_TOKENS = 2**24
"""Maximum number of tokens. A file that claims more is refused before they are created."""


def load_tekken(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder with a `tekken.json`.

    Its chat template comes from the folder (`chat_template.jinja`, `chat_template.json`,
    `tokenizer_config.json`), or else belongs to the version in the file; None for an unknown
    version.

    Raises:
        ConfigError: the file is damaged.
    """
    from transformers import PreTrainedTokenizerFast

    path = folder / TEKKEN
    content = read_json_object(path)
    config = content.get("config")
    if not isinstance(config, dict):
        raise _damaged(path, "has no object 'config'")
    special = _special_tokens(path, content, config)
    tokens = _tokens(path, content, config, len(special))
    names = [text for text, _ in special]
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=_make(path, config, special, tokens),
        clean_up_tokenization_spaces=False,
        **{role: token for role, token in _ROLES.items() if token in names},
    )
    tokenizer.name_or_path = str(folder)
    tokenizer.chat_template = _template_of(folder) or _template_for(config.get("version"))
    return tokenizer


def _special_tokens(
    path: Path, content: dict[str, Any], config: dict[str, Any]
) -> list[tuple[str, bool]]:
    """Return (text, whether it is a control token) of each special token, in the order of ids."""
    listed = content.get("special_tokens")
    if listed is None:
        listed = [{"rank": i, "token_str": text} for i, text in enumerate(_OLD_SPECIAL_TOKENS)]
    if not isinstance(listed, list) or not all(isinstance(token, dict) for token in listed):
        raise _damaged(path, "has 'special_tokens' that are not a list of objects")
    found: list[tuple[str, bool]] = []
    for rank, token in enumerate(listed):
        text = token.get("token_str")
        if token.get("rank") != rank or not isinstance(text, str) or not text:
            raise _damaged(path, f"has no 'rank' {rank} and 'token_str' in special_tokens[{rank}]")
        found.append((text, token.get("is_control") is not False))
    count = _count(path, config, "default_num_special_tokens", len(found))
    if count < len(found):
        raise _damaged(
            path, f"has {len(found)} special tokens, but default_num_special_tokens={count}"
        )
    found += [(f"<SPECIAL_{rank}>", True) for rank in range(len(found), count)]
    if len({text for text, _ in found}) != count:
        raise _damaged(path, "has a special token twice")
    return found


def _tokens(
    path: Path, content: dict[str, Any], config: dict[str, Any], num_special: int
) -> list[str]:
    """Return the other tokens in the order of ranks, written as in byte-level BPE."""
    listed = content.get("vocab")
    if not isinstance(listed, list):
        raise _damaged(path, "has no list 'vocab'")
    count = _count(path, config, "default_vocab_size", len(listed) + num_special) - num_special
    if not 256 <= count <= len(listed):
        raise _damaged(
            path,
            f"has {len(listed)} tokens and {num_special} special tokens, but "
            f"default_vocab_size={count + num_special}",
        )
    texts: list[str] = []
    for rank, token in enumerate(listed[:count]):
        try:
            is_next = token["rank"] == rank
            data = base64.b64decode(token["token_bytes"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise _damaged(
                path, f"has no 'rank' and 'token_bytes' in base64 in vocab[{rank}]"
            ) from None
        if not is_next or not data:
            raise _damaged(path, f"has a wrong 'rank' (not {rank}) or no bytes in vocab[{rank}]")
        texts.append(byte_level_text(data))
    known = set(texts)
    if len(known) != count:
        raise _damaged(path, "has a token twice")
    if lacking := [byte for byte in range(256) if byte_level_text(bytes([byte])) not in known]:
        raise _damaged(path, f"has no token for the byte {lacking[0]}")
    return texts


def _make(
    path: Path, config: dict[str, Any], special: list[tuple[str, bool]], tokens: list[str]
) -> "Tokenizer":
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise _damaged(path, "has no text 'pattern' in 'config'")
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises a plain Exception
        raise _damaged(
            path, f"has a 'pattern' that is not a regular expression: {error}"
        ) from error
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = list(merges_in_order(tokens, ranks))
    vocabulary = {token: rank + len(special) for token, rank in ranks.items()}
    # Special tokens are added last: if a text occurs twice, the special token wins.
    vocabulary |= {text: i for i, (text, _) in enumerate(special)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    for is_control in (True, False):
        made.add_tokens(
            [
                AddedToken(text, special=is_control, normalized=False)
                for text, controls in special
                if controls is is_control
            ]
        )
    ids = {text: i for i, (text, _) in enumerate(special)}
    if _BOS in ids:
        made.post_processor = processors.TemplateProcessing(
            single=f"{_BOS}:0 $A:0",
            pair=f"{_BOS}:0 $A:0 {_BOS}:1 $B:1",
            special_tokens=[(_BOS, ids[_BOS])],
        )
    return made


def _template_of(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return template_of_folder(folder, path.read_text(encoding="utf-8-sig"))
    path = folder / "tokenizer_config.json"
    template = read_json_object(path).get("chat_template") if path.is_file() else None
    return template_of_folder(folder, template if isinstance(template, str) else None)


def _template_for(version: object) -> str | None:
    """Return the chat template on which models with a tokenizer of this version were trained; None
    if it is unknown.
    """
    number = _TEMPLATE_VERSIONS.get(version) if isinstance(version, str) else None
    if number is None:
        return None
    text = (CHAT_TEMPLATES / "mistral.jinja").read_text(encoding="utf-8-sig")
    return f"{{%- set version = {number} -%}}\n{text}"


def _count(path: Path, config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
        raise _damaged(
            path, f"has {name}={value!r}, which is not an integer from 0 to {_MAX_TOKENS}"
        )
    return value


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}. Download the file again")
