"""LoRA adapters in the linear layers of a model: y += x @ A.T @ B.T for the tokens of an adapter
(Hu et al. 2021, arXiv 2106.09685).

The layers get the method `WithAdapters` around their own once they are loaded, so model files and
weight formats know nothing of adapters. How the products are made is up to the launch
(`LaunchAdapters`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm.attention import ContextHolder, share_context
from vllm.errors import RequestError, WeightLoadError
from vllm.logger import init_logger
from vllm.lora.files import AdapterConfig, check_files, weights_file
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import Slice, Source
from vllm.model_executor.loader.checkpoint import read_bin
from vllm.model_executor.loader.weights import checkpoint_name, renamed
from vllm.model_executor.models.interface import CausalLM
from vllm.ops.low_rank import AdaptedLayer, LowRank

logger = init_logger(__name__)

_PREFIX = "base_model.model."
_ENDINGS = {".lora_A.weight": 0, ".lora_B.weight": 1}


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


@dataclass(frozen=True)
class _Target:
    """One projection of the checkpoint."""

    number: int
    """Of the projection among all that can be adapted."""
    layer: ParallelLinear
    place: Slice

    @property
    def input_size(self) -> int:
        """Over all ranks."""
        return self.place.total if self.place.dim == 1 else self.layer.input_size

    @property
    def output_size(self) -> int:
        """Over all ranks."""
        return self.place.total if self.place.dim == 0 else self.layer.output_size

    def of_rank(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank needs of A [r, input_size] and B [output_size, r]: the slice of the
        dimension that is split; padding is zero."""
        if self.layer.tp.size == 1:
            return a, b
        if self.place.dim == 1:
            return self._slice(a, torch.empty(len(a), self.place.size, dtype=a.dtype)), b
        return a, self._slice(b, torch.empty(self.place.size, b.shape[1], dtype=b.dtype))

    def _slice(self, whole: Tensor, part: Tensor) -> Tensor:
        replace(self.place, offset=0).copy(part, _source(whole), self.layer.tp)
        return part


class AdapterLayers:
    """The layers of a model that adapters can change.

    Args:
        model: loaded.
        max_rank: of an adapter.
        dtype: of the adapter weights in memory.
        names: of the model.

    Attributes:
        places: of the layers, by their numbers.
        num_parts: projections of all layers.
    """

    def __init__(
        self, model: CausalLM, max_rank: int, dtype: torch.dtype, names: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._names = [PurePath(name).name for name in names]
        self._max_rank = max_rank
        self._dtype = dtype
        self._targets: dict[str, _Target] = {}
        self.places: list[AdaptedLayer] = []
        self.num_parts = 0
        launch = share_context(model)
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLinear) or layer.is_held or layer.is_absorbed:
                continue
            if ".experts." in f".{path}." or not layer.has_launch_rows:
                continue
            place = _place(layer, len(self.places), self.num_parts)
            for number, (name, part) in enumerate(layer.feature_slices.items(), self.num_parts):
                target = checkpoint_name(path, name, "").removesuffix(".")
                self._targets[target] = _Target(number, layer, part)
            self.places.append(place)
            self.num_parts += len(place.parts)
            layer.method = WithAdapters(layer.method, place, launch)

    def load(self, folder: Path) -> list[LowRank | None]:
        """Read an adapter: what it adds to each projection, by its number.

        Raises:
            RequestError: a file is missing or wrong, or does not fit the model.
        """
        config = check_files(folder, self._max_rank)
        self._compare_base(folder, config.base)
        path = weights_file(folder)
        parts: list[LowRank | None] = [None] * self.num_parts
        try:
            with _open_weights(path) as tensors:
                for module, pair in self._pairs(path, list(tensors)).items():
                    sources = [tensors[name] for name in pair]
                    self._check(path, config, module, *(list(s.shape) for s in sources))
                    a, b = (source.read(()) for source in sources)
                    if not (a.isfinite().all() and b.isfinite().all()):
                        raise RequestError(f"{path}: {module} has values that are NaN or infinite")
                    b = b.float() * config.scale_of(module, len(a))
                    a = a.to(self._dtype)
                    for target, source in self._projections(module, b, config):
                        own_a, own_b = target.of_rank(a, source.read(()).to(self._dtype))
                        parts[target.number] = LowRank(own_a, own_b)
        except WeightLoadError as error:
            raise RequestError(str(error)) from None
        except (SafetensorError, OSError) as error:
            raise RequestError(f"{path} cannot be read: {error}") from None
        return parts

    def _compare_base(self, folder: Path, base: str) -> None:
        """Warn of an adapter of another model. It may be the same one under another name."""
        if base and self._names and PurePath(base).name not in self._names:
            logger.warning(
                "the LoRA adapter %s was trained on %s, and this model is %s; its outputs are only "
                "right if the weights are the same",
                folder,
                base,
                self._names[0],
            )

    def _pairs(self, path: Path, names: list[str]) -> Mapping[str, list[str]]:
        """Module, by its name in the model -> names of its A and B in the file."""
        found: dict[str, list[str]] = {}
        for name in names:
            ending = next((e for e in _ENDINGS if name.endswith(e)), None)
            if ending is None:
                raise self._misfit(path, name)
            module = name.removesuffix(ending).removeprefix(_PREFIX)
            # With its parameter, as names are in a checkpoint.
            module = renamed(f"{module}.weight", self._model).removesuffix(".weight")
            found.setdefault(module, ["", ""])[_ENDINGS[ending]] = name
        if not found:
            raise RequestError(f"{path} has no tensors")
        for module, pair in found.items():
            if not all(pair):
                missing = list(_ENDINGS)[pair.index("")]
                raise RequestError(f"{path}: {module} has no {missing}")
        return found

    def _misfit(self, path: Path, name: str) -> RequestError:
        known = sorted({target.rpartition(".")[2] for target in self._targets})
        return RequestError(
            f"{path}: {name} does not belong to a layer that adapters can change here. "
            f"These can be changed: {', '.join(known)}. Merge the adapter into the weights "
            f"of its model (merge_and_unload of peft)"
        )

    def _projections(
        self, module: str, rows: Tensor, config: AdapterConfig
    ) -> list[tuple[_Target, Source]]:
        """The projections that a module of a checkpoint holds, and which of its rows, one per
        output feature, they have. None: a part of it is not known here.

        Raises:
            RuntimeError: the rows cannot be shared out.
        """
        # As a weight of the checkpoint is, so that the rows go where those of the weight went.
        weight = _source(rows.T if config.is_transposed else rows)
        found = list(self._model.convert(f"{module}.weight", weight))
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
        stand_in = torch.empty(b_shape, device="meta") if len(b_shape) == 2 else None
        try:
            found = [] if stand_in is None else self._projections(module, stand_in, config)
        except RuntimeError:
            found = []
        if not found:
            raise self._misfit(path, module)
        rank = config.rank_of(module)
        output_size = sum(target.output_size for target, _ in found)
        for name, shape, wanted in (
            ("lora_A", a_shape, [rank, found[0][0].input_size]),
            ("lora_B", b_shape, [output_size, rank]),
        ):
            if shape != wanted:
                raise RequestError(
                    f"{path}: {module}.{name} has the shape {shape}, and {wanted} is expected "
                    f"for this model and rank {rank}. Is it an adapter of another model?"
                )
        if any(list(source.shape) != [target.output_size, rank] for target, source in found):
            raise RequestError(
                f"{path}: fan_in_fan_out of {module} does not fit the model. Is it an adapter of "
                f"another model?"
            )


def _place(layer: ParallelLinear, number: int, first_part: int) -> AdaptedLayer:
    slices: Iterator[Slice] = iter(layer.feature_slices.values())
    parts = tuple((p.offset, p.size) if p.dim == 0 else (0, layer.output_size) for p in slices)
    return AdaptedLayer(number, first_part, layer.input_size, parts)


@contextmanager
def _open_weights(path: Path) -> Iterator[dict[str, Source]]:
    """The tensors of a file, which are read when they are asked for."""
    if path.suffix != ".safetensors":
        yield dict(read_bin(path))
        return
    with safe_open(path, framework="pt") as file:

        def source(name: str) -> Source:
            shape = torch.Size(file.get_slice(name).get_shape())
            return Source(shape, lambda index: file.get_tensor(name)[index])

        yield {name: source(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _source(tensor: Tensor) -> Source:
    return Source(tensor.shape, lambda index: tensor[index])
