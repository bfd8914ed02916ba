"""Read the files of a LoRA adapter in the format of peft: its config, and its weights as
safetensors or, by older releases, as a pickle.

Independent of models: names and shapes are read here, and compared with a model elsewhere.
"""

import hashlib
import json
import re
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError, NotFoundError, RequestError
from vllm.lora.request import LoRARequest
from vllm.messages import AdapterRef, CacheKey
from vllm.transformers_utils.hub import resolve_adapter_folder
from vllm.utils.background_work import Pause, no_pause
from vllm.utils.files.json_file import as_integer
from vllm.utils.text.patterns import compile_pattern

CONFIG_FILE = "adapter_config.json"
NAME_PREFIX = "base_model.model."
"""Begins the names of tensors, before the name of a module."""
_WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file with weights; the first one that exists is read."""

_MLX_FILE = "adapters.safetensors"

_DEFAULT_RANK, _DEFAULT_ALPHA = 8, 8
"""Values of peft for absent keys."""
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 2048
_MAX_SHOWN = 80
_HASHED_AT_ONCE = 1 << 20
"""Number of bytes that are hashed at once, in less than a millisecond."""
_MAX_HASHES = 1024
_hashes: dict[tuple[tuple[Path, ...], tuple[tuple[int, ...], ...]], str] = {}
"""Hashes by files and their versions."""
_hash_lock = threading.Lock()
MERGE = "Merge the adapter into the weights of its model (merge_and_unload of peft)"
_TRAIN = "Train a LoRA adapter without it"
_REFUSED: Mapping[str, tuple[str, str]] = {
    "use_dora": ("DoRA is", MERGE),
    "lora_bias": ("biases of the adapter are", MERGE),
    "layer_replication": ("replicated layers are", MERGE),
    "alora_invocation_tokens": ("activated LoRA is", _TRAIN),
    "arrow_config": (
        "adapters that choose among adapters are",
        "Name one of these adapters in each request",
    ),
    "use_qalora": ("adapters with pooled inputs are", _TRAIN),
    "use_bdlora": ("adapters of diagonal blocks are", MERGE),
    "kasa_config": ("adapters with singular values are", MERGE),
    "velora_config": ("VeLoRA is", MERGE),
    "monteclora_config": ("MonteCLoRA is", MERGE),
}
"""Keys of adapter_config.json that ask for what is not supported; its name, and what to do."""
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout"),
        *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "runtime_config"),
    }
)
"""Keys for the training, or which the tensors say as well."""
_READ = frozenset(
    {
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"),
        *("bias", "init_lora_weights", "target_parameters", "modules_to_save"),
        *("trainable_token_indices", "ensure_weight_tying"),
    }
)
_MERGED_TYPES = frozenset(
    {
        *("ADALORA", "BOFT", "BONE", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HRA", "IA3"),
        *("LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "RANDLORA", "ROAD", "SHIRA"),
        *("TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT"),
    }
)
"""Values of peft_type of adapters that peft can merge."""
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of all experts of a layer, in the order in which peft wraps them; experts without
gates have `up_proj` instead of `gate_up_proj`."""
ACCEPTED_PARAMETERS = f"{', '.join(EXPERT_PARAMETERS[:-1])} and {EXPERT_PARAMETERS[-1]}"
"""The accepted parameters as a list in words, for messages."""
_CONVERT = (
    "Save it with path_initial_model_for_weight_conversion of peft's save_pretrained, which makes "
    "an adapter for the original weights"
)
_CHANGE_WEIGHTS = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), _CONVERT),
    "loftq": f"{MERGE} as they were in training",
}
"""Values of init_lora_weights with which peft has also changed the weights of the model, and what
to do."""
_MAX_PATTERN_CHARS = 256
_MAX_REPEATS = 2
"""Maximum number of repetitions in a pattern of modules: with more of them, a pattern could take
minutes to compare."""


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of adapter_config.json that determine the scale of the weights."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    uses_rslora: bool
    is_transposed: bool
    """Whether the weights that the adapter changes are [inputs, outputs] in the checkpoint."""
    parameters: tuple[str, ...] = ()
    """Ends of the names of parameters that have the matrices of all experts of a layer."""
    base: str = ""
    """Name or folder of the model that it was trained on; empty: not known."""
    unknown: tuple[str, ...] = ()
    """Keys that have a value, and that nothing here reads."""
    saved_modules: tuple[str, ...] = ()
    """Ends of the names of modules whose trained weights are saved whole."""
    token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Trained tokens by the end of the name of their table; the input embedding has an empty name
    if the config does not name it."""
    ties_tables: bool = False
    """Whether the input embedding and an output head that shares its weights have one adapter."""

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor on B @ A of a module (alpha / rank; alpha / sqrt(rank) with rsLoRA).

        Args:
            module: name in the model, such as model.layers.0.self_attn.q_proj.
            rank: rank of its matrices.
        """
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / rank**0.5 if self.uses_rslora else alpha / rank

    def saves(self, module: str) -> bool:
        """Return whether the trained weights of a module are saved whole."""
        return any(_ends_with(module, end) for end in self.saved_modules)

    def tokens_of(self, module: str, *, is_input: bool) -> tuple[int, ...]:
        """Return the tokens whose rows of a table are trained.

        Args:
            module: name of the table in the file.
            is_input: whether it is the input embedding.
        """
        found = [ids for end, ids in self.token_ids.items() if end and _ends_with(module, end)]
        return found[0] if found else self.token_ids.get("", ()) if is_input else ()

    def parameter_of(self, experts: str, is_inner: bool) -> str | None:
        """Return to which parameter of the experts the tensors of an adapter belong.

        Their names do not contain the parameter, because peft nests one wrapper for each parameter.

        Args:
            experts: name of the module.
            is_inner: whether the tensors belong to its base_layer.
        """
        found = [
            name
            for name in EXPERT_PARAMETERS
            if any(f".{experts}.{name}".endswith(f".{end}") for end in self.parameters)
        ]
        index = len(found) - (2 if is_inner else 1)
        return found[index] if index >= 0 else None

    def for_module(self, *names: str) -> "AdapterConfig":
        """Return a config in which a module's settings apply to all modules.

        Args:
            names: names of the module; the first one that a pattern matches decides. The
                file and the model name some modules differently.
        """
        rank, alpha = self.rank, self.alpha
        for name in reversed(names):
            rank = _of_pattern(self.rank_pattern, name, rank)
            alpha = _of_pattern(self.alpha_pattern, name, alpha)
        return replace(self, rank=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})

    def rank_of(self, module: str) -> int:
        """Return the rank that the matrices of a module must have."""
        return _of_pattern(self.rank_pattern, module, self.rank)


def _ends_with(module: str, end: str) -> bool:
    return f".{module}".endswith(f".{end}")


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    # As in peft, a key is a regular expression that matches the end of a module's name.
    for key, value in pattern.items():
        if _compiled(key).fullmatch(module):
            return value
    return default


@lru_cache(maxsize=_MAX_PATTERNS)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})")


def weights_file(folder: Path) -> Path:
    """Return the path of the file with the weights of an adapter."""
    paths = [folder / name for name in _WEIGHTS_FILES]
    return next((path for path in paths if path.exists()), paths[0])


def check_files(folder: Path, max_rank: int) -> AdapterConfig:
    """Read and check adapter_config.json.

    Raises:
        RequestError: a file is missing or wrong, or the adapter needs an unsupported feature.
    """
    path = folder / CONFIG_FILE
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise RequestError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes")
        given = json.loads(path.read_text(encoding="utf-8-sig"))
    except RequestError:
        raise
    except RecursionError:
        raise RequestError(f"{path} is nested too deeply") from None
    except OSError as error:
        raise _unreadable(folder, error, CONFIG_FILE) from None
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from None
    config = _read_config(path, given)
    largest = max([config.rank, *config.rank_pattern.values()])
    if largest > max_rank:
        raise RequestError(
            f"{path}: the rank r is {shown(largest)}, and max_lora_rank is {max_rank}. Start the "
            f"engine with max_lora_rank={shown(largest)}"
        )
    return config


def shown(value: Any) -> str:
    """Format a value from a file for a message: one line, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _read_config(path: Path, given: Any) -> AdapterConfig:
    if not isinstance(given, dict):
        raise RequestError(f"{path} must be a JSON object, got {type(given).__name__}")
    peft_type = str(given.get("peft_type") or "LORA").upper()
    if peft_type != "LORA":
        todo = MERGE if peft_type in _MERGED_TYPES else "Train a LoRA adapter in its place"
        if peft_type == "XLORA":
            todo = "It chooses among LoRA adapters: name one of them in each request"
        raise RequestError(
            f"{path}: peft_type is {shown(given['peft_type'])}; only LORA is supported. {todo}"
        )
    for key, (what, todo) in _REFUSED.items():
        if given.get(key):
            raise RequestError(
                f"{path}: {key} is {shown(given[key])}; {what} not supported. {todo}"
            )
    if (given.get("bias") or "none") != "none" and _may_have_biases(weights_file(path.parent)):
        raise RequestError(
            f"{path}: bias is {shown(given['bias'])}; only 'none' is supported (or any value if "
            f"the file has no biases). {MERGE}"
        )
    start = given.get("init_lora_weights")
    for begin, todo in _CHANGE_WEIGHTS.items():
        if isinstance(start, str) and start.lower().startswith(begin):
            raise RequestError(
                f"{path}: init_lora_weights is {shown(start)}: this adapter was trained against "
                f"modified base weights, so it does not fit the original ones. {todo}"
            )
    for key in ("use_rslora", "fan_in_fan_out", "ensure_weight_tying"):
        if not isinstance(given.get(key) or False, bool):
            raise RequestError(f"{path}: {key} must be true or false, got {shown(given[key])}")
    rank: Any = as_integer(given.get("r", _DEFAULT_RANK))
    alpha: Any = given.get("lora_alpha", _DEFAULT_ALPHA)
    patterns = [given.get("rank_pattern") or {}, given.get("alpha_pattern") or {}]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise RequestError(f"{path}: rank_pattern and alpha_pattern must be objects")
    patterns[0] = {key: as_integer(value) for key, value in patterns[0].items()}
    for key, value in (("r", rank), *(("rank_pattern", v) for v in patterns[0].values())):
        if type(value) is not int or value < 1:
            raise RequestError(f"{path}: {key} must be an integer above 0, got {shown(value)}")
    for key, value in (
        ("lora_alpha", alpha),
        *(("alpha_pattern", v) for v in patterns[1].values()),
    ):
        if type(value) not in (int, float) or not abs(value) < 1e6:
            raise RequestError(
                f"{path}: {key} must be a number between -1e6 and 1e6, got {shown(value)}"
            )
    if sum(map(len, patterns)) > _MAX_PATTERNS:
        raise RequestError(
            f"{path}: rank_pattern and alpha_pattern may have at most {_MAX_PATTERNS} entries "
            f"together, got {sum(map(len, patterns))}. Use patterns that match several modules"
        )
    for key in (key for pattern in patterns for key in pattern):
        _check_pattern(path, key)
    known = _READ | _WITHOUT_EFFECT | _REFUSED.keys()
    base = given.get("base_model_name_or_path")
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        rank_pattern=patterns[0],
        alpha_pattern=patterns[1],
        uses_rslora=bool(given.get("use_rslora")),
        is_transposed=bool(given.get("fan_in_fan_out")),
        parameters=_read_parameters(path, given.get("target_parameters") or []),
        base=base if isinstance(base, str) else "",
        unknown=tuple(key for key, value in given.items() if value and key not in known),
        saved_modules=_read_saved_modules(path, given.get("modules_to_save") or []),
        token_ids=_read_token_ids(path, given.get("trainable_token_indices") or []),
        ties_tables=bool(given.get("ensure_weight_tying")),
    )


def _may_have_biases(path: Path) -> bool:
    """Return whether a weights file has a bias, or its header does not tell. Damage is reported
    when the file is loaded.
    """
    if path.suffix != ".safetensors":
        return True
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return length > _MAX_CONFIG_BYTES or any(
                name.endswith(".bias") for name in json.loads(file.read(length))
            )
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read_parameters(path: Path, given: Any) -> tuple[str, ...]:
    is_known = isinstance(given, list) and all(
        isinstance(name, str) and name.rpartition(".")[2] in ("weight", *EXPERT_PARAMETERS)
        for name in given
    )
    if not is_known:
        raise RequestError(
            f"{path}: target_parameters is {shown(given)}; it may name only weights of layers, "
            f"and {ACCEPTED_PARAMETERS} of experts. {MERGE}"
        )
    return tuple(given)


def _read_saved_modules(path: Path, given: Any) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise RequestError(
            f"{path}: modules_to_save must be a list of names of modules, got {shown(given)}"
        )
    return tuple(names)


def _read_token_ids(path: Path, given: Any) -> dict[str, tuple[int, ...]]:
    tables = given if isinstance(given, dict) else {"": given}
    for ids in tables.values():
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise RequestError(
                f"{path}: trainable_token_indices must be a list of token ids, or an object with "
                f"such a list for each module, got {shown(given)}"
            )
        if len(set(ids)) < len(ids):
            raise RequestError(
                f"{path}: trainable_token_indices is {shown(given)}, which names a token twice"
            )
    return {name: tuple(ids) for name, ids in tables.items() if ids}


def _check_pattern(path: Path, key: str) -> None:
    """Refuse a pattern in rank_pattern or alpha_pattern that is malformed or slow to match."""
    where = f"{path}: {key[:80]!r} in rank_pattern or alpha_pattern"
    plain = re.sub(r"\\\D", "", key)
    is_slow = re.search(r"\)[*+?{]|\(\?|\\\d", plain) is not None
    if is_slow or len(key) > _MAX_PATTERN_CHARS or len(re.findall(r"[*+{]", plain)) > _MAX_REPEATS:
        raise RequestError(
            f"{where} is too complex: at most {_MAX_PATTERN_CHARS} characters, {_MAX_REPEATS} "
            f"repeats (* + {{}}), and no repeated or special groups are accepted. Write the "
            f"names of the modules"
        )
    try:
        compile_pattern(key)
    except ValueError as error:
        raise RequestError(f"{where} is not a regular expression: {error}") from None


def content_key(folder: Path, pause: Pause = no_pause) -> str:
    """Hash the files of an adapter, for the keys of the prefix cache.

    An adapter that was trained again in the same folder has a different hash.

    Args:
        folder: folder of the adapter.
        pause: called between two pieces of a file. The file is read once, as long as it does not
            change.

    Raises:
        RequestError: a file cannot be read.
    """
    try:
        paths = (folder / CONFIG_FILE, weights_file(folder))
        stats = [path.stat() for path in paths]
        if not all(stat.S_ISREG(s.st_mode) for s in stats):
            raise RequestError(
                f"the LoRA adapter {folder}: {CONFIG_FILE} and {paths[1].name} must be plain files"
            )
        versions = tuple((s.st_size, s.st_mtime_ns, s.st_ino) for s in stats)
        with _hash_lock:  # other requests for the same files wait for this hash
            if (paths, versions) not in _hashes:
                if len(_hashes) >= _MAX_HASHES:
                    _hashes.clear()
                _hashes[paths, versions] = _hash_files(paths, pause)
            return _hashes[paths, versions]
    except OSError as error:
        raise _unreadable(folder, error, Path(error.filename or folder).name) from None


def _unreadable(folder: Path, error: OSError, name: str) -> RequestError:
    """Return the error about a file of an adapter that cannot be read."""
    advice = "Name a folder that peft's save_pretrained has written"
    if (folder / _MLX_FILE).is_file():
        advice = (
            f"It has {_MLX_FILE}, as mlx-lm writes adapters: fuse it into its model (mlx_lm.fuse), "
            "or convert it to the format of peft"
        )
    inner = next(iter(sorted(folder.glob(f"*/{CONFIG_FILE}"))), None)
    if inner is not None:
        advice = f"Its subfolder has an adapter: name {inner.parent}"
    return RequestError(
        f"the LoRA adapter {folder} cannot be read: {error.strerror or error} ({name}). {advice}"
    )


def _hash_files(paths: tuple[Path, ...], pause: Pause) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(_HASHED_AT_ONCE):
                digest.update(chunk)
                pause()
        digest.update(b"\0")
    return digest.hexdigest()


def adapter_folder(request: LoRARequest) -> Path:
    """Return the local folder of an adapter, which is downloaded if its path is a name on the hub.

    Raises:
        NotFoundError: the folder or repository does not exist.
        RequestError: the path is not valid.
    """
    try:
        return resolve_adapter_folder(request.path)
    except ConfigError as error:
        raise NotFoundError(
            f"the LoRA adapter {request.lora_name!r}: {error}. Name a folder that peft's "
            f"save_pretrained has written, or a repository on the Hugging Face hub",
            param="lora_path",
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"lora_path of the adapter {request.lora_name!r} is {shown(request.path)}, which is "
            f"not a usable path: {getattr(error, 'strerror', None) or error}. Name a folder that "
            "peft's save_pretrained has written, or a repository on the Hugging Face hub",
            param="lora_path",
        ) from None


def find_adapter(request: LoRARequest, max_rank: int, pause: Pause = no_pause) -> AdapterRef:
    """Check and hash the files of the adapter that a request names.

    Args:
        request: names the adapter.
        max_rank: largest allowed rank.
        pause: called between two pieces of a file, as in `content_key`.

    Raises:
        RequestError: files are missing or wrong.
    """
    folder = adapter_folder(request)
    key = content_key(folder, pause)
    check_files(folder, max_rank)
    return AdapterRef(name=request.lora_name, path=str(folder), key=key, number=request.lora_int_id)


def request_of(adapter: AdapterRef | None) -> LoRARequest | None:
    """Return the adapter in the form in which a request names it; None if there is none."""
    if adapter is None:
        return None
    return LoRARequest(adapter.name, adapter.number, adapter.path)


def adapter_keys(adapter: AdapterRef | None) -> tuple[CacheKey, ...]:
    """Return the prefix-cache keys for an adapter, which depend on its content, not on its name."""
    return () if adapter is None else (CacheKey(0, f"adapter:{adapter.key}"),)
