"""Express trained rows of the input embedding or of the output head as low-rank weights.

peft saves them instead of the matrices A and B: whole tables (`modules_to_save`), or the rows of
some tokens (`trainable_token_indices`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.lora.files import MERGE, AdapterConfig, shown
from vllm.lora.layers import AdapterLayers
from vllm.lora.methods import HeadWithAdapters
from vllm.lora.weights import ROWS_COMPARED, is_close, is_finite
from vllm.model_executor.layers.embedding import (
    DenseTable,
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.slice import DENSE_DTYPES, CheckpointTensor
from vllm.model_executor.layers.stored.stored_linear import StoredTable
from vllm.ops.lora_weights import LoRAWeights
from vllm.utils.background_work import Pause

logger = init_logger(__name__)

_COPY = re.compile(
    r"(?:\.token_adapter)?(?:(?P<base>\.base_layer|\.original_module)"
    r"|(?P<trained>\.modules_to_save(?:\.[^.]+)?))?\.weight$"
)
"""End of the name of a whole weight. `base`: a weight of the model. `trained`: a trained weight;
peft removes this part of the name when it saves, and other tools do not."""
_TOKENS = re.compile(r"\.(?:token_adapter\.)?trainable_tokens_delta(?:\.[^.]+)?$")
"""End of the name of the trained rows of some tokens."""


@dataclass(frozen=True)
class ChangedRows:
    """The rows of a table [V, D] that an adapter replaces."""

    ids: Tensor
    """[K] int64, indices of the rows."""
    difference: Tensor
    """[K, D] float32, the new rows minus the rows of the model."""

    @property
    def rank(self) -> int:
        """Rank of the difference between the two tables, at most."""
        return min(self.difference.shape)

    def weights(self, num_rows: int, dtype: torch.dtype, *, is_head: bool) -> LoRAWeights:
        """Return the weights that add the difference to the table.

        Args:
            num_rows: V.
            dtype: dtype of the weights.
            is_head: whether the table is an output head, whose outputs are the V rows. V is the
                number of inputs of an embedding.
        """
        count, size = self.difference.shape
        difference = self.difference.to(dtype)
        # The difference is rows [V, r] @ values [r, D].
        if count <= size:
            rows = torch.zeros(num_rows, count, dtype=dtype)
            rows[self.ids, torch.arange(count)] = 1
            values = difference
        else:
            rows = torch.zeros(num_rows, size, dtype=dtype)
            rows[self.ids] = difference
            values = torch.eye(size, dtype=dtype)
        return LoRAWeights(values, rows) if is_head else tied(LoRAWeights(values, rows))


def tied(weights: LoRAWeights) -> LoRAWeights:
    """Return the weights for an embedding that change its table as these change an output head with
    the same table, or the other way round.
    """
    return LoRAWeights(weights.b.T, weights.a.T)


def merged(first: LoRAWeights | None, second: LoRAWeights) -> LoRAWeights:
    """Return weights that add what two weights of a projection add."""
    if first is None:
        return second
    return LoRAWeights(torch.cat([first.a, second.a]), torch.cat([first.b, second.b], dim=1))


def changed_rows(
    given: CheckpointTensor,
    first: int,
    count: int,
    known: Callable[[Tensor], Tensor],
    pause: Pause,
) -> ChangedRows:
    """Compare a saved table with the table of the model.

    Args:
        given: the saved table, [V, D].
        first: index of the first row that is compared.
        count: number of rows that are compared.
        known: returns rows of the model, given their indices.
        pause: called between two reads.
    """
    ids, differences = [], []
    for start in range(first, first + count, ROWS_COMPARED):
        pause()
        end = min(start + ROWS_COMPARED, first + count)
        numbers = torch.arange(start, end)
        saved, own = given.read((slice(start, end),)), known(numbers)
        rounding = max(torch.finfo(each.dtype).eps for each in (saved, own))
        difference = saved.float() - own.float()
        # `<=` is False for NaN, so such a row is kept, and refused later.
        is_same = (difference.abs() <= rounding * own.float().abs()).all(dim=1)
        ids.append(numbers[~is_same])
        differences.append(difference[~is_same])
    return ChangedRows(torch.cat(ids), torch.cat(differences))


RowReader = Callable[[Tensor], Tensor]
"""Returns rows of the part of a table that this rank has, on the host, given their indices."""


class _HostRows:
    """Reads rows of a table of the model, without work for the device while steps run.

    Args:
        layer: the table. If it is on a device, it is copied to the host now, and again when its
            weights were loaded again.
    """

    def __init__(self, layer: VocabParallelEmbedding) -> None:
        self._layer = layer
        self._copy: Tensor | None = None
        self._version = -1
        if (weight := self._weight()) is not None and weight.device.type != "cpu":
            self._copy_to_host(weight)

    def _weight(self) -> Tensor | None:
        return self._layer._parameters.get("weight")  # None: the CPU kernels have packed it

    def _copy_to_host(self, weight: Tensor) -> Tensor:
        if self._copy is None or self._version != weight._version:
            self._version, self._copy = weight._version, weight.detach().cpu()
        return self._copy

    def __call__(self, ids: Tensor) -> Tensor:
        weight = self._weight()
        if weight is None:
            return _method_of(self._layer).embed(self._layer, ids)
        return (weight if weight.device.type == "cpu" else self._copy_to_host(weight))[ids]


def _method_of(layer: VocabParallelEmbedding) -> EmbeddingMethod:
    method = layer.method
    return method.inner if isinstance(method, HeadWithAdapters) else method


@dataclass(frozen=True)
class _Name:
    """The name of a tensor that belongs to a whole weight or to rows of a table."""

    module: str
    """Name of the module in the model."""
    in_file: str
    """Name of the module in the file."""
    kind: str
    """tokens, base, trained, or whole: a whole weight, trained if the config says so."""


class TableReader:
    """Reads the trained rows of the input embedding and of the output head.

    Args:
        layers: layers that adapters can change.
        dtype: dtype of the adapter weights in memory.
        max_rank: maximum rank of the difference from a table of the model; None: not limited.
    """

    def __init__(self, layers: AdapterLayers, dtype: torch.dtype, max_rank: int | None) -> None:
        self._layers = layers
        self._dtype = dtype
        self._max_rank = max_rank
        self._tables = {
            path: module
            for path, module in layers.model.named_modules()
            if isinstance(module, VocabParallelEmbedding)
        }
        self._rows: dict[str, RowReader] = {}
        for path, layer in self._tables.items():
            shared = self._layers.table if _is_tied(layer) else None
            known = None if shared is None else self._rows.get(shared[0])
            self._rows[path] = known or _HostRows(layer)

    def name_of(self, name: str) -> _Name | None:
        """Parse the name of a tensor; None if it is neither a whole weight nor rows of tokens."""
        if ".lora_" in name:
            return None
        if tokens := _TOKENS.search(name):
            in_file = name[: tokens.start()]
            return _Name(self._layers.module_of(in_file), in_file, "tokens")
        if copy := _COPY.search(name):
            in_file = name[: copy.start()]
            module = self._layers.module_of(in_file)
            kinds = [kind for kind, found in copy.groupdict().items() if found]
            return _Name(module, in_file, kinds[0] if kinds else "whole")
        return None

    def read(
        self,
        path: Path,
        config: AdapterConfig,
        tensors: Mapping[str, CheckpointTensor],
        pause: Pause,
    ) -> dict[str, ChangedRows]:
        """Return the rows that an adapter replaces, by the name of their table in the model.

        Copies of weights of the model, which peft saves with some adapters, replace nothing. They
        are compared with the weights of the model, if these can be read.

        Raises:
            RequestError: the adapter replaces other weights, or rows of another vocabulary.
        """
        ignored: list[str] = []
        found: dict[str, ChangedRows] = {}
        for name, source in tensors.items():
            pause()
            parsed = self.name_of(name)
            if parsed is None or self._layers.is_elsewhere(parsed.module):
                continue
            layer = self._tables.get(parsed.module)
            if layer is None:
                if parsed.kind != "base" or parsed.module not in self._layers.targets:
                    raise RequestError(
                        f"{path}: {name} replaces a weight of {parsed.module}. Adapters may "
                        "replace only weights of the input embedding and of the output head "
                        f"({', '.join(self._tables)}). {MERGE}"
                    )
                ignored.append(name)
                continue
            if source.dtype not in (None, *DENSE_DTYPES):
                raise RequestError(
                    f"{path}: {name} has the dtype {source.dtype}; accepted are "
                    f"{', '.join(map(str, DENSE_DTYPES))}"
                )
            if parsed.kind == "tokens":
                rows = self._rows_of_tokens(path, config, name, parsed, source)
            else:
                saves = config.saves(parsed.in_file) or config.saves(parsed.module)
                is_trained = parsed.kind == "trained" or (parsed.kind == "whole" and saves)
                self._check_shape(path, name, layer, source)
                if not is_trained and self._is_same(parsed.module, source, pause):
                    ignored.append(name)
                    continue
                rows = self._rows_of_copy(parsed.module, source, pause)
            if len(rows.ids):
                self._check_rows(path, name, parsed.module, rows)
                logger.info(
                    "%s replaces the weights of %d tokens in %s", path, len(rows.ids), parsed.module
                )
                found[parsed.module] = rows
        if ignored:
            logger.info(
                "%s also has %d weights of the base model, which are ignored: %s%s",
                *(path, len(ignored), ", ".join(ignored[:3]), ", ..." if len(ignored) > 3 else ""),
            )
        return found

    def add(
        self,
        config: AdapterConfig,
        tables: Mapping[str, ChangedRows],
        parts: list[LoRAWeights | None],
    ) -> None:
        """Add replaced rows to the weights of an adapter, and copy weights to a tied table.

        Args:
            config: config of the adapter.
            tables: replaced rows, by the name of their table in the model.
            parts: weights by the index of the projection. Changed.
        """
        own = dict(tables)
        table, head = self._layers.table, self._tied_head()
        are_tied = bool(config.token_ids) or config.ties_tables
        if table and head and are_tied and table[0] in own and head not in own:
            own[head] = own[table[0]]
        for module, rows in own.items():
            is_head = not self._layers.is_table(module)
            num_rows = self._tables[module].num_embeddings
            self._put(module, rows.weights(num_rows, self._dtype, is_head=is_head), parts)
        if not config.ties_tables or table is None or head is None:
            return
        numbers = [self._number_of(module) for module in (table[0], head)]
        for module, number, other in zip((table[0], head), numbers, numbers[::-1], strict=True):
            weights = parts[other]
            if parts[number] is None and weights is not None:
                self._put(module, tied(weights), parts)

    def _tied_head(self) -> str | None:
        """Return the name of an output head that adapters can change and that shares the weights of
        the input embedding; None if there is none.
        """
        for path, layer in self._tables.items():
            if _is_tied(layer) and path in self._layers.targets:
                return path
        return None

    def _number_of(self, module: str) -> int:
        """Return the index of a table among the projections."""
        embedding = self._layers.adapted_layers.embedding
        if self._layers.is_table(module):
            assert embedding is not None
            return embedding.first_part
        return self._layers.targets[module].number

    def _put(self, module: str, weights: LoRAWeights, parts: list[LoRAWeights | None]) -> None:
        """Add weights for a whole table to the weights of its projection on this rank."""
        number = self._number_of(module)
        own: list[LoRAWeights | None] = [None] * len(parts)
        if self._layers.is_table(module):
            own[number] = weights
        else:
            self._layers.targets[module].put(weights.a, weights.b, own)
        added = own[number]
        assert added is not None
        parts[number] = merged(parts[number], added)

    def _rows_of_tokens(
        self,
        path: Path,
        config: AdapterConfig,
        name: str,
        parsed: _Name,
        source: CheckpointTensor,
    ) -> ChangedRows:
        layer = self._tables[parsed.module]
        ids = config.tokens_of(parsed.in_file, is_input=self._layers.is_table(parsed.module))
        wanted = [len(ids), layer.embedding_dim]
        if list(source.shape) != wanted or max(ids, default=-1) >= layer.num_embeddings:
            raise RequestError(
                f"{path}: {name} has the shape {list(source.shape)}, but {wanted} is expected for "
                f"trainable_token_indices {shown(list(ids))} and a vocabulary of "
                f"{layer.num_embeddings} tokens. Is it an adapter of a different model?"
            )
        numbers, given = torch.tensor(ids, dtype=torch.int64), source.read(()).float()
        is_here = (numbers >= layer.first_id) & (numbers < layer.first_id + layer.local_size)
        numbers, given = numbers[is_here], given[is_here]
        own = self._rows[parsed.module](numbers - layer.first_id)
        return ChangedRows(numbers, given - own.float())

    def _check_shape(
        self, path: Path, name: str, layer: VocabParallelEmbedding, source: CheckpointTensor
    ) -> None:
        wanted = [layer.num_embeddings, layer.embedding_dim]
        if list(source.shape) != wanted:
            raise RequestError(
                f"{path}: {name} {list(source.shape)} differs from the weight of this model "
                f"({wanted}); an adapter that changes the size of the vocabulary is not supported. "
                f"{MERGE}"
            )

    def _is_same(self, module: str, source: CheckpointTensor, pause: Pause) -> bool:
        """Return whether a table is the model's, or the model's is quantized in its checkpoint."""
        method = _method_of(self._tables[module])
        if not isinstance(method, DenseTable) or isinstance(method, StoredTable):
            return True
        first, count = _range_of(self._tables[module])

        def known(start: int, end: int) -> Tensor:
            return self._rows[module](torch.arange(start, end))

        return is_close(source.narrow(0, first, count), known, pause)

    def _rows_of_copy(self, module: str, source: CheckpointTensor, pause: Pause) -> ChangedRows:
        first, count = _range_of(self._tables[module])
        known = self._rows[module]
        return changed_rows(source, first, count, lambda ids: known(ids - first), pause)

    def _check_rows(self, path: Path, name: str, module: str, rows: ChangedRows) -> None:
        if not is_finite(rows.difference):
            raise RequestError(f"{path}: all values of {name} must be finite")
        is_input = self._layers.is_table(module)
        if not is_input and module not in self._layers.targets:
            raise RequestError(
                f"{path}: {name} replaces weights of {module}, which adapters may not change. Name "
                f"{module.rpartition('.')[2]} in lora_target_modules"
            )
        if is_input and self._tables[module].tp.size > 1:
            raise RequestError(
                f"{path}: {name} replaces weights of the input embedding, which is not "
                f"supported with tensor parallelism. {MERGE}"
            )
        limit, num_tokens = rows.rank, len(rows.ids)
        if self._max_rank is not None and limit > self._max_rank:
            raise RequestError(
                f"{path}: {name} replaces the weights of {num_tokens} tokens in {module}: on this "
                f"device, they must be at most max_lora_rank ({self._max_rank}). {MERGE}, or "
                f"start the engine with max_lora_rank={limit}"
            )


def _is_tied(layer: VocabParallelEmbedding) -> bool:
    return isinstance(layer, ParallelLMHead) and layer.is_tied


def _range_of(layer: VocabParallelEmbedding) -> tuple[int, int]:
    """Return the first row of a table that this rank has, and the number of its rows."""
    first = min(layer.first_id, layer.num_embeddings)
    return first, min(layer.local_size, layer.num_embeddings - first)
