"""Read the files of an adapter for a model, and compare them with it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import torch
from torch import Tensor

from vllm.errors import RequestError, WeightLoadError
from vllm.logger import init_logger
from vllm.lora.adapted_layers import AdaptedLayers
from vllm.lora.files import (
    ACCEPTED_PARAMETERS,
    NAME_PREFIX,
    AdapterConfig,
    check_files,
    shown,
    weights_file,
)
from vllm.lora.layers import AdapterLayers
from vllm.lora.tables import TableReader
from vllm.lora.targets import Target
from vllm.lora.weights import check_header, is_finite, open_weights, source_of
from vllm.model_executor.layers.slice import DENSE_DTYPES, CheckpointTensor
from vllm.ops.lora_weights import LoRAWeights
from vllm.utils.background_work import Pause, no_pause

logger = init_logger(__name__)

_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_ENDING = re.compile(
    r"\.lora_(?:(?P<linear>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<table>[AB])(?:\.[^.]+)?)$"
)
"""End of the name of a tensor. Between its two parts peft has the name of the adapter in memory,
which other tools have left there when they saved it."""
_INNER = ".base_layer"
"""End of the name of experts with a second parameter that is adapted, in an adapter's file."""
_LONGEST_NAME = 512
"""Maximum number of characters in the name of a tensor."""


class AdapterReader:
    """Reads adapters for the layers of a model.

    Args:
        layers: layers that adapters can change.
        max_rank: largest allowed rank.
        dtype: dtype of the adapter weights in memory.
        names: names of the model.
        is_padded: whether adapters are padded to `max_rank`. It then also limits the trained rows
            of tables.
    """

    def __init__(
        self,
        layers: AdapterLayers,
        max_rank: int,
        dtype: torch.dtype,
        names: Sequence[str] = (),
        *,
        is_padded: bool = False,
    ) -> None:
        self._layers = layers
        self._max_rank = max_rank
        self._dtype = dtype
        self._names = [PurePath(name).name for name in names]
        self._tables = TableReader(layers, dtype, max_rank if is_padded else None)

    @property
    def adapted_layers(self) -> AdaptedLayers:
        """The layers that adapters can change."""
        return self._layers.adapted_layers

    def load(self, folder: Path, pause: Pause = no_pause) -> list[LoRAWeights | None]:
        """Read an adapter, and return its weights for each projection, by index; None: not changed.

        Args:
            folder: folder of its files.
            pause: called between two tensors.

        Raises:
            RequestError: a file is missing or wrong, or does not fit the model.
        """
        config = check_files(folder, self._max_rank)
        self._compare_base(folder, config.base)
        if config.unknown:
            logger.warning(
                "the LoRA adapter %s has keys in its config that are not known and are ignored: "
                "%s. If they change how it is computed, outputs are wrong",
                *(folder, shown(list(config.unknown))),
            )
        path = weights_file(folder)
        parts: list[LoRAWeights | None] = [None] * self.adapted_layers.num_parts
        try:
            check_header(path, self.adapted_layers.num_parts)
            with open_weights(path, pause) as tensors:
                tables = self._tables.read(path, config, tensors, pause)
                for module, pair in self._pairs(path, list(tensors), pause).items():
                    pause()
                    given = (tensors[pair[0]], tensors[pair[1]])
                    experts = module.removesuffix(_INNER)
                    whole = pair[0].removeprefix(NAME_PREFIX).partition(".lora_")[0]
                    if experts in self._layers.experts:
                        stem = whole.removesuffix(_INNER)  # the name that peft gives the module
                        name = config.parameter_of(stem, is_inner=module != experts)
                        if name is None:
                            raise RequestError(
                                f"{path}: {pair[0]} is for a parameter of experts that is missing "
                                "in target_parameters of the adapter's config "
                                f"({shown(list(config.parameters))}). Add it there: {stem} accepts "
                                f"{ACCEPTED_PARAMETERS}"
                            )
                        own = config.for_module(f"{stem}.{name}")
                        for number, a, b in self._by_expert(path, experts, name, own.rank, *given):
                            pause()
                            self._read(path, own, f"{experts}.{number}.{name}", a, b, parts)
                    else:
                        self._read(path, config.for_module(whole, module), module, *given, parts)
                self._tables.add(config, tables, parts)
        except WeightLoadError as error:
            raise RequestError(str(error)) from None
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error}") from None
        return parts

    def _read(
        self,
        path: Path,
        config: AdapterConfig,
        module: str,
        given_a: CheckpointTensor,
        given_b: CheckpointTensor,
        parts: list[LoRAWeights | None],
    ) -> None:
        """Store the weights that an adapter has for a module in `parts`."""
        self._check(path, config, module, list(given_a.shape), list(given_b.shape))
        for dtype in (given_a.dtype, given_b.dtype):
            if dtype not in (None, *DENSE_DTYPES):
                raise RequestError(
                    f"{path}: {module} has the dtype {dtype}; accepted are "
                    f"{', '.join(map(str, DENSE_DTYPES))}"
                )
        a, b = given_a.read(()).to(self._dtype), given_b.read(()).float()
        b = (b * config.scale_of(module, len(a))).to(self._dtype)
        if not (is_finite(a) and is_finite(b)):
            raise RequestError(
                f"{path}: {module} has values that are NaN, infinite, or too large for "
                f"{str(self._dtype).removeprefix('torch.')}"
            )
        if self._layers.is_table(module):
            assert self.adapted_layers.embedding is not None
            parts[self.adapted_layers.embedding.first_part] = LoRAWeights(a, b)
            return
        for target, source in self._projections(module, b, config):
            target.put(a, source.read(()), parts)

    def _projections(
        self, module: str, rows: Tensor, config: AdapterConfig
    ) -> list[tuple[Target, CheckpointTensor]]:
        return self._layers.projections(module, rows, is_transposed=config.is_transposed)

    def _by_expert(
        self,
        path: Path,
        experts: str,
        name: str,
        rank: int,
        a: CheckpointTensor,
        b: CheckpointTensor,
    ) -> Iterator[tuple[int, CheckpointTensor, CheckpointTensor]]:
        """Yield A and B of each expert of this rank, if a parameter contains the matrices of all
        experts.

        Args:
            path: path of the file, for errors.
            experts: name of the expert module.
            name: name of the parameter.
            rank: r.
            a: [E * r, in_features], one expert after another.
            b: [out_features, r * E], for each of r the columns of all experts. If peft takes a
                matrix [in, out] for [out, in], as for Llama 4, a belongs to outputs and b to
                inputs.
        """
        layer = self._layers.experts[experts]
        count = len(layer.expert_ids) + len(layer.elsewhere)
        inputs, outputs = self._layers.sizes_of_experts(experts, name)
        wanted = (count * rank, inputs), (outputs, count * rank)
        swapped = (count * rank, outputs), (inputs, count * rank)
        given = tuple(a.shape), tuple(b.shape)
        if given not in (wanted, swapped):
            raise RequestError(
                f"{path}: {name} of {experts} has A {list(a.shape)} and B {list(b.shape)}, but "
                f"rank {rank} of {count} experts needs {list(wanted[0])} and {list(wanted[1])}. "
                "Is it an adapter of a different model?"
            )
        all_a = a.read(()).unflatten(0, (count, rank))
        all_b = b.read(()).unflatten(1, (-1, count)).permute(2, 0, 1)
        if given != wanted:
            all_a, all_b = all_b.mT, all_a.mT
        for number in range(count):
            if not self._layers.is_elsewhere(f"{experts}.{number}"):
                yield number, source_of(all_a[number]), source_of(all_b[number])

    def _compare_base(self, folder: Path, base: str) -> None:
        """Log a warning if an adapter was trained on a model with another name. It may be the same
        model.
        """
        if base and self._names and PurePath(base).name not in self._names:
            logger.warning(
                "the LoRA adapter %s was trained on %s, but this model is %s: outputs are right "
                "only if both models have the same weights",
                folder,
                shown(base),
                self._names[0],
            )

    def _pairs(self, path: Path, names: list[str], pause: Pause) -> Mapping[str, list[str]]:
        """Return the names of A and B in the file, by the name of their module in the model."""
        found: dict[str, list[str]] = {}
        for name in names:
            pause()
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise RequestError(
                    f"{path}: {shown(name)} is not the name of an adapter's tensor: it has more "
                    f"than {_LONGEST_NAME} characters, or some that cannot be printed"
                )
            if self._tables.name_of(name) is not None:
                continue
            ending = _ENDING.search(name)
            if ending is None:
                raise self._misfit(path, name)
            module = self._layers.module_of(name[: ending.start()])
            if self._layers.is_elsewhere(module):
                continue
            if self._layers.is_table(module) != (ending["table"] is not None):
                raise self._misfit(path, name)
            pair = found.setdefault(module, ["", ""])
            number = "AB".index(ending["table"] or ending["linear"])
            if pair[number]:
                raise RequestError(
                    f"{path}: {pair[number]} and {name} name the same tensor of {module}"
                )
            pair[number] = name
        if not names:
            raise RequestError(f"{path} has no tensors")
        for module, pair in found.items():
            if not all(pair):
                missing = _ENDINGS[pair.index("") + 2 * self._layers.is_table(module)]
                raise RequestError(f"{path}: {module} has no {missing}")
        return found

    def _misfit(self, path: Path, name: str) -> RequestError:
        names = [
            *self._layers.targets,
            *([] if self._layers.table is None else [self._layers.table[0]]),
        ]
        known = sorted({target.rpartition(".")[2] for target in names})
        more = ""
        if self._layers.left_out:
            others = ", ".join(sorted(self._layers.left_out))
            more = f"These as well if lora_target_modules names them: {others}. "
        return RequestError(
            f"{path}: {name} does not belong to a layer that adapters can change in this engine. "
            f"Accepted layers: {', '.join(known)}. {more}Merge the adapter into the weights of "
            "its model (merge_and_unload of peft)"
        )

    def _check(
        self,
        path: Path,
        config: AdapterConfig,
        module: str,
        a_shape: list[int],
        b_shape: list[int],
    ) -> None:
        """Compare the shapes of A and B with the model before any memory is allocated."""
        rank = config.rank_of(module)
        for letter, shape in zip("AB", (a_shape, b_shape), strict=True):
            if 0 in shape:
                raise RequestError(
                    f"{path}: lora_{letter} of {module} is empty (its shape is {shape}). DeepSpeed "
                    "ZeRO-3 writes such files if the weights are not gathered: save the adapter "
                    "again with stage3_gather_16bit_weights_on_model_save"
                )
        if self._layers.is_table(module):
            layer = self.adapted_layers.embedding
            assert layer is not None
            sizes = [[rank, layer.in_features], [layer.out_features, rank]]
            self._compare(path, module, rank, [a_shape, b_shape], sizes)
            return
        stand_in = torch.empty(b_shape, device="meta") if len(b_shape) == 2 else None
        found = [] if stand_in is None else self._projections(module, stand_in, config)
        if not found:
            raise self._misfit(path, module)
        output_size = sum(target.output_size for target, _ in found)
        sizes = [[rank, found[0][0].input_size], [output_size, rank]]
        self._compare(path, module, rank, [a_shape, b_shape], sizes)
        shapes = [list(source.shape) for _, source in found]
        if shapes != [[target.output_size, rank] for target, _ in found]:
            raise RequestError(
                f"{path}: fan_in_fan_out of {module} does not fit the model. Is it an adapter of "
                "a different model?"
            )

    def _compare(
        self, path: Path, module: str, rank: int, shapes: list[list[int]], wanted: list[list[int]]
    ) -> None:
        kind = "lora_embedding_" if self._layers.is_table(module) else "lora_"
        for letter, shape, size in zip("AB", shapes, wanted, strict=True):
            if shape != size:
                raise RequestError(
                    f"{path}: {module}.{kind}{letter} has the shape {shape}, but {size} is "
                    f"expected for this model and rank {rank}. Is it an adapter of a different "
                    "model?"
                )
