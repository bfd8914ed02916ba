"""The list of buckets whose recipes are on disk, in the folder with the bridge's recipes.

The names of the bridge's files do not tell the bucket. With the list, a later start knows which
recipes will be read instead of compiled, for its time estimate and for the choice of its first
buckets. The list is a hint: a recipe that is no longer on disk is compiled. Only rank 0 writes it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from vllm.bucketing import Bucket, Phase
from vllm.config import VllmConfig
from vllm.env.recipe_folder import RecipeFolder
from vllm.logger import init_logger
from vllm.platforms.habana.versions import find_installed
from vllm.utils.files.whole_file import write_whole
from vllm.version import __version__

logger = init_logger(__name__)

FILE_NAME = "vllm_recipes.json"
_FORMAT, _VERSION = "vllm recipes", 1
_MAX_CONFIGURATIONS = 16


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Entry(msgspec.Struct):
    """The buckets of one configuration, as stored in the file."""

    fields: dict[str, str]
    buckets: list[tuple[str, _Count, _Count, Annotated[int, msgspec.Meta(ge=0)]]]
    """Phase, batch, query length and blocks."""

    @property
    def found(self) -> set[Bucket]:
        phases = {str(phase): phase for phase in Phase}
        return {Bucket(phases[name], *sizes) for name, *sizes in self.buckets if name in phases}


class _Content(msgspec.Struct):
    """The content of the file: the entries of all configurations."""

    format: str
    version: int
    configurations: list[_Entry]


class RecipeManifest:
    """The list of buckets with recipes on disk, for one configuration.

    Args:
        path: path of the file; None: recipes are not kept.
        fields: settings that recipes depend on, in addition to the bucket.
        is_writer: whether this rank writes the file.

    Attributes:
        found: buckets whose recipes are on disk, by the list that existed at the start.
    """

    def __init__(
        self, path: Path | None, fields: Mapping[str, str], *, is_writer: bool = True
    ) -> None:
        self._path = path
        self._fields = dict(fields)
        self._is_writer = is_writer
        self._has_failed = False
        self.found: frozenset[Bucket] = frozenset()
        if path is None:
            return
        others = []
        for entry in _read(path):
            if entry.fields == self._fields:
                self.found = frozenset(entry.found)
                return
            others.append(entry.fields)
        if others and is_writer:
            logger.info(
                "The compiled recipes in %s belong to a different configuration: %s. They are "
                "compiled again",
                *(path.parent, self._difference(others)),
            )

    @classmethod
    def of(
        cls, config: VllmConfig, mode: str, num_blocks: int, rank: int, card: str
    ) -> "RecipeManifest":
        """Make the list for the configuration of an engine.

        Args:
            config: config of the engine.
            mode: mode in which the model runs.
            num_blocks: number of blocks of the KV cache, the null block included.
            rank: rank of this card.
            card: name of the kind of card.
        """
        folder = RecipeFolder.parse(config.hpu.recipe_cache)
        path = None if folder is None else folder.path / FILE_NAME
        if path is not None and folder is not None and folder.is_emptied and not rank:
            _delete(path)  # the bridge itself deletes the recipes in this folder
        model, limits = config.model, config.scheduler
        fields = {
            "model": model.path or model.model,
            "dtype": model.dtype_name,
            "quantization": model.quantization,
            "kv_cache_dtype": config.cache.kv_cache_dtype,
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
            "mode": mode,
            "block_size": config.cache.block_size,
            "num_blocks": num_blocks,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_draft_tokens": limits.max_draft_tokens,
            "max_loras": limits.max_loras,
            "max_lora_rank": config.lora.max_lora_rank if limits.max_loras else 0,
            "merged_prefill": config.hpu.merged_prefill,
            "contiguous_pa": config.hpu.contiguous_pa,
            "prompt_attention": config.hpu.prompt_attention,
            "card": card,
            "gaudi_software": find_installed().bridge,
            "torch": torch.__version__,
            "vllm": __version__,
        }
        texts = {name: str(value) for name, value in fields.items()}
        return cls(path, texts, is_writer=not rank)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Record that the recipes of these buckets are on disk now. If that fails, warn once."""
        if self._path is None or not self._is_writer:
            return
        entries = _read(self._path)  # another engine may have written the file meanwhile
        own = next((entry for entry in entries if entry.fields == self._fields), None)
        known = set() if own is None else own.found
        new = sorted(known.union(buckets))
        if len(new) == len(known):
            return
        sizes = [(str(b.phase), b.batch, b.query_len, b.blocks) for b in new]
        entry = _Entry(fields=self._fields, buckets=sizes)
        kept = [entry, *(each for each in entries if each is not own)][:_MAX_CONFIGURATIONS]
        content = _Content(format=_FORMAT, version=_VERSION, configurations=kept)
        try:
            write_whole(self._path, msgspec.json.encode(content) + b"\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot be written: %s. The next start will not know which compiled "
                    "recipes are on disk",
                    *(self._path, error),
                )
            self._has_failed = True

    def _difference(self, others: Iterable[Mapping[str, str]]) -> str:
        """Return the fields in which the most similar configuration in the file differs, for the
        log.
        """
        differing = [
            [name for name in self._fields if other.get(name) != self._fields[name]]
            for other in others
        ]
        nearest = min(zip(differing, others, strict=True), key=lambda each: len(each[0]))
        return ", ".join(
            f"{name} is {self._fields[name]} but it was {nearest[1].get(name)}"
            for name in nearest[0]
        )


def _delete(path: Path) -> None:
    """Delete the list if it exists; log a warning if that fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("The list of recipes %s cannot be deleted: %s", path, error)


def _read(path: Path) -> list[_Entry]:
    """Read the configurations of a file; empty if it does not exist, is damaged, or is newer."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_Content)
        is_ours = (content.format, content.version) == (_FORMAT, _VERSION)
        return content.configurations if is_ours else []
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        logger.warning("The list of recipes %s cannot be read: %s", path, error)
        return []
