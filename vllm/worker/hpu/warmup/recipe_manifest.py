"""The list of buckets whose recipes are on disk, in the folder where the bridge keeps the recipes.

The names of the files of the bridge do not tell the bucket. From the list a later start knows which
recipes will be read instead of compiled, for its estimate and for the choice of its first buckets.
The list is a hint: a recipe that is no longer on disk is compiled. Only rank 0 writes it.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm.bucketing import Bucket, Phase
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.version import __version__

logger = init_logger(__name__)

FILE_NAME = "vllm_recipes.json"
_FORMAT, _VERSION = "vllm recipes", 1
_MOST_CONFIGURATIONS = 16


class RecipeManifest:
    """The buckets of one configuration in the list.

    Args:
        path: of the file; None: recipes are not kept.
        fields: settings on which recipes depend, in addition to the bucket.
        is_writer: this rank writes.

    Attributes:
        found: buckets whose recipes are on disk, by the list that was there at the start.
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
            if entry["fields"] == self._fields:
                self.found = frozenset(_buckets(entry))
                return
            others.append(entry["fields"])
        if others and is_writer:
            logger.info(
                "The recipes in %s are for another configuration: %s. They are compiled again",
                *(path.parent, self._difference(others)),
            )

    @classmethod
    def of(cls, config: VllmConfig, mode: str, num_blocks: int, rank: int) -> "RecipeManifest":
        """Return the list for the configuration of an engine.

        Args:
            config: of the engine.
            mode: in which the model runs.
            num_blocks: of the KV cache, the null block included.
            rank: of this card.
        """
        folder, _, options = (config.hpu.recipe_cache or "").partition(",")
        is_deleted = options.partition(",")[0].strip().lower() in ("true", "1")
        path = Path(folder.strip()) / FILE_NAME if folder.strip() else None
        if path is not None and is_deleted and not rank:
            path.unlink(missing_ok=True)  # the bridge deletes the recipes
        model, limits = config.model, config.scheduler
        fields = {
            "model": model.path or model.model,
            "dtype": model.dtype_name,
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
            "contiguous_pa": config.hpu.contiguous_pa,
            "prompt_attention": config.hpu.prompt_attention,
            "torch": torch.__version__,
            "vllm": __version__,
        }
        texts = {name: str(value) for name, value in fields.items()}
        return cls(path, texts, is_writer=not rank)

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Note that the recipes of buckets are on disk now. If that fails, there is one warning."""
        if self._path is None or not self._is_writer:
            return
        entries = _read(self._path)  # another engine may have written since
        own = next((e for e in entries if e["fields"] == self._fields), None)
        known = set() if own is None else set(_buckets(own))
        new = sorted(known.union(buckets))
        if len(new) == len(known):
            return
        entry = {
            "fields": self._fields,
            "buckets": [[str(b.phase), b.batch, b.query_len, b.blocks] for b in new],
        }
        kept = [entry, *(e for e in entries if e is not own)][:_MOST_CONFIGURATIONS]
        content = {"format": _FORMAT, "version": _VERSION, "configurations": kept}
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            part.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot be written: %s. The next start does not know which recipes are on "
                    "disk",
                    *(self._path, error),
                )
            self._has_failed = True

    def _difference(self, others: Iterable[Mapping[str, str]]) -> str:
        """The fields in which the most similar configuration differs."""
        differing = [
            [name for name in self._fields if other.get(name) != self._fields[name]]
            for other in others
        ]
        nearest = min(zip(differing, others, strict=True), key=lambda each: len(each[0]))
        return ", ".join(
            f"{name} is {self._fields[name]} and was {nearest[1].get(name)}" for name in nearest[0]
        )


def _read(path: Path) -> list[dict[str, Any]]:
    """The configurations of a file; none if there is no such file, or it is damaged or newer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            return []
        entries = [dict(entry) for entry in content["configurations"]]
        for entry in entries:
            _buckets(entry)
            dict(entry["fields"])
        return entries
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("The list of recipes %s is not read: %s", path, error)
        return []


def _buckets(entry: Mapping[str, Any]) -> list[Bucket]:
    phases = {str(phase): phase for phase in Phase}
    return [Bucket(phases[name], *map(int, sizes)) for name, *sizes in entry["buckets"]]
