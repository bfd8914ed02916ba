"""LoRA adapters in the linear layers of a model: y += x @ A.T @ B.T for the tokens of an adapter
(Hu et al. 2021, arXiv 2106.09685).

The layers get the method `WithAdapters` around their own once they are loaded, so model files and
weight formats know nothing of adapters. How the products are made is up to the launch
(`LaunchAdapters`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from torch import Tensor

from vllm.attention import ContextHolder, share_context
from vllm.errors import ConfigError, RequestError, WeightLoadError
from vllm.logger import init_logger
from vllm.lora.experts import ExpertsWithAdapters, can_adapt
from vllm.lora.files import AdapterConfig, check_files, shown, weights_file
from vllm.lora.places import AdaptedPlaces
from vllm.lora.weights import check_header, is_close, is_finite, open_weights, source_of
from vllm.model_executor.layers.embedding import (
    DenseTable,
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import DENSE_DTYPES, Slice, Source
from vllm.model_executor.loader.stage import Absent
from vllm.model_executor.loader.weights import checkpoint_name, renamed
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.low_rank import AdaptedExpert, AdaptedExperts, AdaptedLayer, LowRank
from vllm.utils.pace import Rest, no_rest

logger = init_logger(__name__)

_PREFIX = "base_model.model."
_ENDINGS = {
    ".lora_A.weight": 0,
    ".lora_B.weight": 1,
    ".lora_embedding_A": 0,
    ".lora_embedding_B": 1,
}
_INNER = ".base_layer"
"""End of the name of experts with a second parameter that is adapted, in an adapter's file."""
_UNCHANGED = ".base_layer.weight"
"""End of the name of a weight of the model, which peft saves for embeddings and heads."""
_LONGEST_NAME = 512
"""Of a tensor."""


class WithAdapters(LinearMethod):
    """A method whose result is added to for tokens with an adapter.

    Args:
        inner: of the layer, its weights loaded.
        place: of the layer among those of the model.
        launch: has the adapters of the launch.
    """

    def __init__(self, inner: LinearMethod, place: AdaptedLayer, launch: ContextHolder) -> None:
        self.inner = inner
        self.place = place
        self.launch = launch

    def create_weights(self, layer: ParallelLinear) -> None:
        raise AssertionError("adapters come after the weights")

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self.inner.apply(layer, x, bias)
        context = self.launch.context
        if context is None or context.adapters is None:
            return y
        if x.dim() == 2:
            return context.adapters.adapt(self.place, x, y)
        rows = context.adapters.adapt(self.place, x.flatten(0, -2), y.flatten(0, -2))
        return rows.view(y.shape)


class HeadWithAdapters(EmbeddingMethod):
    """The same for an output head.

    Args:
        inner: of the head, its weights loaded.
        place: of the head among the layers of the model.
        launch: has the adapters of the rows of hidden states.
    """

    def __init__(self, inner: EmbeddingMethod, place: AdaptedLayer, launch: ContextHolder) -> None:
        self.inner = inner
        self.place = place
        self.launch = launch

    def create_weights(self, layer: VocabParallelEmbedding) -> None:
        raise AssertionError("adapters come after the weights")

    def embed(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        return self.inner.embed(layer, ids)

    def multiply(self, layer: VocabParallelEmbedding, hidden_states: Tensor) -> Tensor:
        logits = self.inner.multiply(layer, hidden_states)
        context = self.launch.context
        if context is None or context.adapters is None:
            return logits
        return context.adapters.adapt(self.place, hidden_states, logits)


@dataclass(frozen=True)
class _Target:
    """One projection of the checkpoint."""

    number: int
    """Of the projection among all that can be adapted."""
    layer: ParallelLinear | ParallelLMHead | Experts
    place: Slice
    other_size: int
    """Of the dimension that is not split."""

    @property
    def input_size(self) -> int:
        """Over all ranks."""
        return self.place.total if self.place.dim == 1 else self.other_size

    @property
    def output_size(self) -> int:
        """Over all ranks."""
        return self.place.total if self.place.dim == 0 else self.other_size

    def of_rank(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank needs of A [r, input_size] and B [output_size, r]: the slice of the
        dimension that is split; padding is zero."""
        if self.layer.tp.size == 1:
            return a, b
        if self.place.dim == 1:
            return self._slice(a, torch.empty(len(a), self.place.size, dtype=a.dtype)), b
        return a, self._slice(b, torch.empty(self.place.size, b.shape[1], dtype=b.dtype))

    def _slice(self, whole: Tensor, part: Tensor) -> Tensor:
        replace(self.place, offset=0).copy(part, source_of(whole), self.layer.tp)
        return part


class AdapterLayers:
    """The layers of a model that adapters can change.

    Args:
        model: loaded.
        max_rank: of an adapter.
        dtype: of the adapter weights in memory.
        names: of the model.
        modules: names of those that adapters may change, as q_proj or experts; None: all.
        has_experts: adapters may change experts where `modules` is None.

    Attributes:
        places: of the layers.

    Raises:
        ConfigError: the model has no module of one of these names.
    """

    def __init__(
        self,
        model: CausalLM,
        max_rank: int,
        dtype: torch.dtype,
        names: Sequence[str] = (),
        modules: Sequence[str] | None = None,
        *,
        has_experts: bool = True,
    ) -> None:
        self._model = model
        self._modules, self._has_experts = modules, has_experts
        self._seen: set[str] = set()
        """Names of modules that adapters could change."""
        self._left_out: set[str] = set()
        """Those of them that may not be changed."""
        self._names = [PurePath(name).name for name in names]
        self._max_rank = max_rank
        self._dtype = dtype
        self._targets: dict[str, _Target] = {}
        self._experts: dict[str, int] = {}
        """Module of experts that can be changed -> how many there are, on all ranks."""
        self.places = places = AdaptedPlaces()
        self._table: tuple[str, VocabParallelEmbedding] | None = None
        """The input embedding, and its name."""
        self._absent = {
            path for path, module in model.named_modules() if isinstance(module, Absent)
        }
        launch = share_context(model)
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLinear) or layer.is_held or layer.is_absorbed:
                continue
            if ".experts." in f".{path}." or layer.weight_dtype:
                continue  # adapters are of the model's dtype
            if not self._is_chosen(path, *layer.feature_slices):
                continue
            place = self._add(path, layer)
            layer.method = WithAdapters(layer.method, place, launch)
            if layer.is_of_head:
                places.of_head.append(place)
        for path, layer in model.named_modules():
            if isinstance(layer, ParallelLMHead):
                if not self._is_chosen(path):
                    continue
                place = self._add(path, layer)
                layer.method = HeadWithAdapters(layer.method, place, launch)
                places.of_head.append(place)
            elif isinstance(layer, VocabParallelEmbedding) and self._table is None:
                if not self._is_chosen(path):
                    continue
                self._table = path, layer
                sizes = layer.num_embeddings, ((0, layer.embedding_dim),)
                layer.adapted = AdaptedLayer(len(places.layers), places.num_parts, *sizes)
                places.embedding = places.add(layer.adapted)
        self._add_experts(launch)
        known = self._seen | {path.rpartition(".")[2] for path in self._absent}
        if unknown := [name for name in modules or () if name not in known]:
            raise ConfigError(
                f"lora_target_modules: {unknown[0]!r} is not the name of a module that adapters "
                f"can change; those of this model are {', '.join(sorted(self._seen))}"
            )

    def _is_chosen(self, path: str, *features: str, is_default: bool = True) -> bool:
        """Whether adapters may change a module, which has its own name and those of its parts.

        Args:
            is_default: they may where the engine was given no names.
        """
        names = {path.rpartition(".")[2], *features} - {""}
        self._seen |= names
        modules = self._modules
        is_chosen = is_default if modules is None else not names.isdisjoint(modules)
        if not is_chosen:
            self._left_out |= names
        return is_chosen

    def _add_experts(self, launch: ContextHolder) -> None:
        first = self.places.num_parts
        for path, layer in self._model.named_modules():
            if not isinstance(layer, Experts) or not can_adapt(layer):
                continue
            if not self._is_chosen(path, is_default=self._has_experts):
                continue
            self._experts[path] = len(layer.expert_ids) + len(layer.elsewhere)
            self._absent |= {f"{path}.{number}" for number in layer.elsewhere}
            start = len(self.places.layers)
            experts = [self._add_expert(f"{path}.{number}", layer) for number in layer.expert_ids]
            end = len(self.places.layers)
            self.places.alike += [range(start, end, 2), range(start + 1, end, 2)]
            adapted = AdaptedExperts(experts, layer.expert_ids.start)
            layer.method = ExpertsWithAdapters(layer.method, adapted, launch)
        self.places.experts = range(first, self.places.num_parts)

    def _add_expert(self, path: str, layer: Experts) -> AdaptedExpert:
        places, hidden, size = self.places, layer.hidden_size, layer.intermediate_size
        total, first = size * layer.tp.size, places.num_parts
        for number, (name, dim, offset) in enumerate(
            (("gate_proj", 0, 0), ("up_proj", 0, size), ("down_proj", 1, 0)), first
        ):
            place = Slice(dim, offset, size, total)
            self._targets[f"{path}.{name}"] = _Target(number, layer, place, hidden)
        halves = ((0, size), (size, size))
        gate_up = places.add(AdaptedLayer(len(places.layers), first, hidden, halves))
        down = AdaptedLayer(len(places.layers), first + 2, size, ((0, hidden),))
        return AdaptedExpert(gate_up, places.add(down))

    def _add(self, path: str, layer: ParallelLinear | ParallelLMHead) -> AdaptedLayer:
        first = self.places.num_parts
        for number, (name, part) in enumerate(layer.feature_slices.items(), first):
            target = checkpoint_name(path, name, "").removesuffix(".")
            other_size = layer.input_size if part.dim == 0 else layer.output_size
            self._targets[target] = _Target(number, layer, part, other_size)
        return self.places.add(_place(layer, len(self.places.layers), first))

    def load(self, folder: Path, rest: Rest = no_rest) -> list[LowRank | None]:
        """Read an adapter: what it adds to each projection, by its number.

        Args:
            folder: of its files.
            rest: between two tensors.

        Raises:
            RequestError: a file is missing or wrong, or does not fit the model.
        """
        config = check_files(folder, self._max_rank)
        self._compare_base(folder, config.base)
        path = weights_file(folder)
        parts: list[LowRank | None] = [None] * self.places.num_parts
        try:
            check_header(path, self.places.num_parts)
            with open_weights(path, rest) as tensors:
                self._check_unchanged(path, tensors, rest)
                for module, pair in self._pairs(path, list(tensors), rest).items():
                    rest()
                    given = (tensors[pair[0]], tensors[pair[1]])
                    experts = module.removesuffix(_INNER)
                    if experts in self._experts:
                        whole = pair[0].removeprefix(_PREFIX).partition(".lora_")[0]
                        stem = whole.removesuffix(_INNER)  # as peft calls the module
                        name = config.parameter_of(stem, is_inner=module != experts)
                        if name is None:
                            raise self._misfit(path, pair[0])
                        own = config.for_module(f"{stem}.{name}")
                        for number, a, b in self._by_expert(path, experts, own.rank, *given):
                            rest()
                            self._read(path, own, f"{experts}.{number}.{name}", a, b, parts)
                    else:
                        self._read(path, config, module, *given, parts)
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
        given_a: Source,
        given_b: Source,
        parts: list[LowRank | None],
    ) -> None:
        """Put what an adapter adds to a module in its place in `parts`."""
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
        if self._is_table(module):
            assert self.places.embedding is not None
            parts[self.places.embedding.first_part] = LowRank(a, b)
            return
        for target, source in self._projections(module, b, config):
            parts[target.number] = LowRank(*target.of_rank(a, source.read(())))

    def _by_expert(
        self, path: Path, experts: str, rank: int, a: Source, b: Source
    ) -> Iterator[tuple[int, Source, Source]]:
        """A and B of each expert of this rank, where a parameter has the matrices of all.

        Args:
            experts: name of their module.
            rank: r.
            a: [E * r, in_features], one expert after the other.
            b: [out_features, r * E], for each of r the columns of all experts.
        """
        count = self._experts[experts]
        if [a.shape[:1], b.shape[1:]] != [(count * rank,)] * 2:
            raise RequestError(
                f"{path}: {experts} has A {list(a.shape)} and B {list(b.shape)}, and rank {rank} "
                f"of {count} experts needs {count * rank} rows of A and columns of B. Is it an "
                f"adapter of another model?"
            )
        all_a, all_b = a.read(()).unflatten(0, (count, rank)), b.read(()).unflatten(1, (-1, count))
        for number in range(count):
            if not self._is_elsewhere(f"{experts}.{number}"):
                yield number, source_of(all_a[number]), source_of(all_b[:, :, number])

    def _compare_base(self, folder: Path, base: str) -> None:
        """Warn of an adapter of another model. It may be the same one under another name."""
        if base and self._names and PurePath(base).name not in self._names:
            logger.warning(
                "the LoRA adapter %s was trained on %s, and this model is %s; its outputs are only "
                "right if the weights are the same",
                folder,
                shown(base),
                self._names[0],
            )

    def _pairs(self, path: Path, names: list[str], rest: Rest) -> Mapping[str, list[str]]:
        """Module, by its name in the model -> names of its A and B in the file."""
        found: dict[str, list[str]] = {}
        for name in names:
            rest()
            if len(name) > _LONGEST_NAME or not name.isprintable():
                raise RequestError(
                    f"{path}: {shown(name)} is the name of no tensor of an adapter: it has more "
                    f"than {_LONGEST_NAME} characters, or some that cannot be printed"
                )
            if name.endswith(_UNCHANGED):
                continue
            ending = next((e for e in _ENDINGS if name.endswith(e)), None)
            if ending is None:
                raise self._misfit(path, name)
            module = self._module_of(name.removesuffix(ending))
            if self._is_elsewhere(module):
                continue
            if self._is_table(module) != ("_embedding_" in ending):
                raise self._misfit(path, name)
            pair = found.setdefault(module, ["", ""])
            if pair[_ENDINGS[ending]]:
                raise RequestError(
                    f"{path}: {pair[_ENDINGS[ending]]} and {name} are the same tensor of {module}"
                )
            pair[_ENDINGS[ending]] = name
        if not names:
            raise RequestError(f"{path} has no tensors")
        for module, pair in found.items():
            if not all(pair):
                missing = list(_ENDINGS)[pair.index("") + 2 * self._is_table(module)]
                raise RequestError(f"{path}: {module} has no {missing}")
        return found

    def _module_of(self, name: str) -> str:
        """The name in the model of a module of an adapter's file."""
        # With its parameter, as names are in a checkpoint.
        name = f"{name.removeprefix(_PREFIX)}.weight"
        return renamed(name, self._model).removesuffix(".weight")

    def _is_table(self, module: str) -> bool:
        """Whether a module is the input embedding."""
        return self._table is not None and module == self._table[0]

    def _is_elsewhere(self, module: str) -> bool:
        """Whether a module belongs to another stage of the pipeline, which checks it."""
        parts = module.split(".")
        paths = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return not paths.isdisjoint(self._absent)

    def _check_unchanged(self, path: Path, tensors: Mapping[str, Source], rest: Rest) -> None:
        """Compare the weights that peft has saved beside the adapter with those of the model, where
        these can be looked up."""
        for name, source in tensors.items():
            if not name.endswith(_UNCHANGED):
                continue
            module = self._module_of(name.removesuffix(_UNCHANGED))
            if self._is_elsewhere(module):
                continue
            layer = self._model.get_submodule(module) if self._knows_table(module) else None
            if not isinstance(layer, VocabParallelEmbedding):
                raise self._misfit(path, name)
            shape = [layer.num_embeddings, layer.embedding_dim]
            is_same = list(source.shape) == shape
            if is_same and isinstance(layer.method, DenseTable):
                first = min(layer.first_id, layer.num_embeddings)
                count = min(layer.local_size, layer.num_embeddings - first)
                given = source.narrow(0, first, count)
                is_same = is_close(given, layer.weight.detach(), rest)
            if not is_same:
                raise RequestError(
                    f"{path}: {name} {list(source.shape)} is not the weight of this model "
                    f"({shape}); an adapter with changed tokens is not supported. Merge it into "
                    f"the weights of its model (merge_and_unload of peft)"
                )

    def _knows_table(self, module: str) -> bool:
        return self._is_table(module) or module in self._targets

    def _misfit(self, path: Path, name: str) -> RequestError:
        names = [*self._targets, *([] if self._table is None else [self._table[0]])]
        known = sorted({target.rpartition(".")[2] for target in names})
        more = ""
        if self._left_out:
            others = ", ".join(sorted(self._left_out))
            more = f"These as well if lora_target_modules names them: {others}. "
        return RequestError(
            f"{path}: {name} does not belong to a layer that adapters can change here. "
            f"These can be changed: {', '.join(known)}. {more}Merge the adapter into the weights "
            f"of its model (merge_and_unload of peft)"
        )

    def _projections(
        self, module: str, rows: Tensor, config: AdapterConfig
    ) -> list[tuple[_Target, Source]]:
        """The projections that a module of a checkpoint holds, and which of its rows, one per
        output feature, they have. None: a part of it is not known here."""
        if (head := self._targets.get(module)) and isinstance(head.layer, ParallelLMHead):
            return [(head, source_of(rows))]  # as it is, whatever becomes of its weight
        found: list[tuple[_Target, Source]] = []
        # peft notes False for all modules where some are transposed and some are not.
        for is_transposed in (config.is_transposed, not config.is_transposed):
            try:
                parts = self._convert(module, rows.T if is_transposed else rows)
                found = [(target, source.picked(module)) for target, source in parts]
            except (RuntimeError, WeightLoadError):
                continue
            if all(source.shape == (t.output_size, rows.shape[1]) for t, source in found):
                break
        return found

    def _convert(self, module: str, weight: Tensor) -> list[tuple[_Target, Source]]:
        # As a weight of the checkpoint is, so that the rows go where those of the weight went.
        found = list(self._model.convert(f"{module}.weight", source_of(weight)))
        expert, _, name = module.rpartition(".")
        if name == "gate_up_proj" and expert.rpartition(".")[0] in self._experts:
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=False)
            found = [(f"{expert}.{half}.weight", source_of(rows)) for half, rows in halves]
        names = [name.removesuffix(".weight") for name, _ in found]
        if not all(name in self._targets for name in names):
            return []
        targets = [self._targets[name] for name in names]
        return [(target, source) for target, (_, source) in zip(targets, found, strict=True)]

    def _check(
        self,
        path: Path,
        config: AdapterConfig,
        module: str,
        a_shape: list[int],
        b_shape: list[int],
    ) -> None:
        """Compare shapes before any memory is taken."""
        rank = config.rank_of(module)
        if self._is_table(module):
            place = self.places.embedding
            assert place is not None
            sizes = [[rank, place.in_features], [place.out_features, rank]]
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
                f"another model?"
            )

    def _compare(
        self, path: Path, module: str, rank: int, shapes: list[list[int]], wanted: list[list[int]]
    ) -> None:
        kind = "lora_embedding_" if self._is_table(module) else "lora_"
        for letter, shape, size in zip("AB", shapes, wanted, strict=True):
            if shape != size:
                raise RequestError(
                    f"{path}: {module}.{kind}{letter} has the shape {shape}, and {size} is "
                    f"expected for this model and rank {rank}. Is it an adapter of another model?"
                )


def _place(layer: ParallelLinear | ParallelLMHead, number: int, first_part: int) -> AdaptedLayer:
    slices: Iterator[Slice] = iter(layer.feature_slices.values())
    parts = tuple((p.offset, p.size) if p.dim == 0 else (0, layer.output_size) for p in slices)
    return AdaptedLayer(number, first_part, layer.input_size, parts)
