"""Builds a model and loads its weights.

The order keeps the peak at one copy of the model: nothing is allocated before the format of every
weight is known, a checkpoint tensor is read directly into its parameter, and a layer is finished by
its method as soon as it is complete, before the next one gets memory.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm.config import ModelArch, ModelConfig, VllmConfig
from vllm.config.arch.speculators import SPECULATORS
from vllm.config.parallel import check_tensor_split
from vllm.config.quantization.settings_error import naming_settings_file
from vllm.distributed import Stage, TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.logger import init_logger
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.stored.stored_experts import DeviceExperts
from vllm.model_executor.layers.weight_method import MethodLayer, WeightMethod
from vllm.model_executor.loader.checkpoint import iterate_tensors
from vllm.model_executor.loader.gguf_file import stored_format
from vllm.model_executor.loader.layer_finisher import (
    MAX_BUILT,
    FinisherWithoutValues,
    LayerFinisher,
)
from vllm.model_executor.loader.outer_names import find_outer_names
from vllm.model_executor.loader.sharded_state import shards_of, tensors_once
from vllm.model_executor.loader.stage import keep_stage
from vllm.model_executor.loader.weights import load_parameters, load_weights, names_in_checkpoint
from vllm.model_executor.model_memory import model_storages
from vllm.model_executor.models.interface import CausalLM, LoadableModel, PoolingModel
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.quantization import (
    CheckpointNames,
    Quantization,
    head_quantization_of,
    quantization_of,
)
from vllm.model_executor.speculators.interface import Speculator
from vllm.platforms.cpu import allocate_weight, machine_memory_bytes
from vllm.transformers_utils.gguf.header import SUFFIX
from vllm.utils.files.weight_files import find_files, shard_name
from vllm.utils.imports import load_class
from vllm.utils.process import startup_progress
from vllm.utils.process.process_memory import move_to_huge_pages

logger = init_logger(__name__)


@torch.no_grad()
def load_model(
    config: VllmConfig,
    tp: TPGroup,
    device: torch.device,
    dense_format: Quantization | None = None,
    choose_host_layers: Callable[[LoadableModel], Iterable[nn.Module]] | None = None,
    stage: Stage | None = None,
    *,
    has_values: bool = True,
) -> CausalLM | PoolingModel:
    """Load the model of `config` with its weights on `device`, ready to run.

    The result is a `PoolingModel` if `config.model.pooler` is set.

    Args:
        config: `model.resolved_arch` and, unless the format is dummy, `model.resolved_path`
            are set.
        tp: the ranks that share the model; only this rank's part is read.
        device: where the parameters go.
        dense_format: storage format for the layers that other formats leave dense; None: dense
            torch weights.
        choose_host_layers: called with the model, still without memory; returns the modules whose
            parameters are kept in host memory.
        stage: stage of the pipeline; only its layers are read. None: all layers.
        has_values: False: parameters get uninitialised memory only.

    Raises:
        ConfigError: the architecture or format is not supported, or cannot be split over tp.
        WeightLoadError: the checkpoint is missing, damaged or does not fit the model.
    """
    arch = config.model.resolved_arch
    is_pooling = config.model.pooler is not None
    last_embeds = config.speculative.method in SPECULATORS
    files: list[Path] = []
    if config.load.load_format != "dummy":
        files = find_files(Path(config.model.resolved_path), config.load.load_format)
    if config.load.load_format == "sharded_state":
        own = stage or Stage(0, arch.num_layers)
        files = shards_of(files, tp, own, last_embeds=last_embeds)
    with naming_settings_file(arch.hf_config):
        formats = _formats(config.model, files, device, dense_format)
        for quantization in formats:
            quantization.start(tp, stage)
        dtype = getattr(torch, config.model.dtype_name)
        build = partial(
            build_model,
            arch,
            tp,
            dtype,
            is_pooling=is_pooling,
            formats=formats,
            files=files,
            stage=stage,
            last_embeds=last_embeds,
        )
        model = build(has_values=has_values)
        if device.type == "cpu" and has_values:
            _check_memory(model, build, config.model.quantization is not None)
        on_host = [] if choose_host_layers is None else list(choose_host_layers(model))
        _read(model, config, files, formats, tp, device, on_host, has_values=has_values)
    return model


@torch.no_grad()
def load_speculator(
    class_path: str,
    config: VllmConfig,
    target: CausalLM,
    device: torch.device,
    dense_format: Quantization | None = None,
    *,
    has_values: bool = True,
) -> Speculator:
    """Load the speculator (draft model) of `config` with its weights on `device`, ready to run.

    Args:
        class_path: module:Class of the network.
        config: config of the speculator: `VllmConfig.of_draft_model`.
        target: the loaded model whose tokens it predicts.
        device: where the parameters go.
        dense_format: format of unquantized weights; see `load_model`.
        has_values: see `load_model`.

    Raises:
        WeightLoadError: the checkpoint is missing, damaged or does not fit the config.
    """
    speculator_class: type[Speculator] = load_class(class_path)
    files: list[Path] = []
    names: frozenset[str] | None = None
    if config.load.load_format != "dummy":
        folder = Path(config.model.resolved_path)
        if (folder / shard_name(0)).exists():
            raise WeightLoadError(
                f"{folder} is a sharded checkpoint with one file for each rank "
                "(tools/save_sharded_state.py). Such files do not contain the weights of the "
                "speculator. Load the original checkpoint, without --load-format sharded_state, "
                "or leave --speculative-config out"
            )
        files = speculator_class.find_files(folder, config.load.load_format)
        names = _names_in(files)
    hf_config = config.model.resolved_arch.hf_config
    with naming_settings_file(hf_config):
        formats = _formats(config.model, [], device, dense_format)
    for quantization in formats:
        quantization.start(target.tp)
    _check_split(config.model.resolved_arch, target.tp)
    dtype = getattr(torch, config.model.dtype_name)
    with torch.device("meta"), _default_dtype(dtype):
        model = speculator_class(config.model.resolved_arch, target, names).eval()
        with naming_settings_file(hf_config):
            _use_formats(model, formats, files)
    try:
        with naming_settings_file(hf_config):
            _read(model, config, files, formats, target.tp, device, has_values=has_values)
    except WeightLoadError as error:
        where = files[0].parent if files else config.model.model
        raise WeightLoadError(f"the speculator '{where}': {error}") from None
    return model


def _formats(
    model: ModelConfig, files: list[Path], device: torch.device, dense_format: Quantization | None
) -> list[Quantization]:
    """Return the formats that may provide the method of a layer, in the order of their
    precedence.
    """
    asked = quantization_of(model, device.type)
    found = (asked, stored_format(files), head_quantization_of(model), dense_format)
    return [each for each in found if each is not None]


def _read(
    model: LoadableModel,
    config: VllmConfig,
    files: list[Path],
    formats: Sequence[Quantization],
    tp: TPGroup,
    device: torch.device,
    on_host: Sequence[nn.Module] = (),
    *,
    has_values: bool = True,
) -> None:
    """Allocate the parameters of a model on the meta device, and load them; see `load_model`."""
    started = time.perf_counter()
    num_bytes = _parameter_bytes(model)
    phase = f"loading {num_bytes / 2**30:.2f} GiB of weights"
    startup_progress.report(phase)

    finisher = LayerFinisher(model)
    if not has_values:
        finisher = _allocate(model, device, on_host)
    elif config.load.load_format == "dummy":
        materialize(model, device, on_host)
        _fill_with_dummy_weights(model, config.model.seed)
    else:
        _check_size(num_bytes, files)
        memory = ParameterMemory(model, device, on_host)
        show_bar = config.load.use_tqdm_on_load
        with closing(
            iterate_tensors(
                files, show_bar, lambda done: startup_progress.report(phase, done, len(files))
            )
        ) as tensors:
            if config.load.load_format == "sharded_state":
                once = tensors_once(tensors)
                load_parameters(model, once, prepare=memory.allocate, finish=finisher.finish_filled)
            else:
                load_weights(
                    model, tensors, tp, prepare=memory.allocate, finish=finisher.finish_filled
                )
        materialize_buffers(model, device)
    for module in model.modules():
        finisher.finish(module)  # modules that have no parameters of their own
    for quantization in formats:
        quantization.finish_model(model)
    model.check()
    if has_values:
        model.check_values()
    if device.type == "cpu" and has_values and num_bytes >= _MIN_HUGE_BYTES:
        storages = model_storages(model)
        move_to_huge_pages((storage.data_ptr(), storage.nbytes) for storage in storages)
    log_dequantized(model)
    logger.info(
        "Loading model weights took %.4f GiB and %.2f s",
        num_bytes / 2**30,
        time.perf_counter() - started,
    )


def log_dequantized(model: nn.Module) -> None:
    """Log in one line which quantized layers were dequantized and take as much memory as dense
    ones.
    """
    names = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, MethodLayer) and layer.method.is_dequantized
    ]
    if names:
        logger.warning(
            "%d quantized layers are dequantized in memory, because this device has no kernel for "
            "their format: %s%s. They take as much memory as unquantized layers; "
            "docs/quantization.md lists the formats that stay small",
            *(len(names), ", ".join(names[:3]), ", ..." if len(names) > 3 else ""),
        )


_MIN_HUGE_BYTES = 8 << 20
"""A processor keeps the addresses of about as much memory in small pages, so smaller models gain
nothing from huge pages."""
_LARGEST_RATIO = 64
"""Largest ratio of the memory of parameters to the size of files. Weights of 1.5 bits become at
most float32."""
_SMALL_BYTES = 256 << 20
"""Bytes that are allocated without a check of the memory: errors in a small file are better
reported by its reader."""


def _check_size(num_bytes: int, files: Sequence[Path]) -> None:
    """Check that the sizes of config.json fit the checkpoint, before memory is allocated."""
    in_files = sum(path.stat().st_size for path in files)
    if num_bytes > max(_SMALL_BYTES, _LARGEST_RATIO * in_files):
        raise WeightLoadError(
            f"the sizes in config.json need {num_bytes / 2**30:.4g} GiB of weights, but the files "
            f"of the checkpoint have {in_files / 2**30:.4g} GiB. Does config.json belong to a "
            "different model, or are files missing?"
        )


def build_model(
    arch: ModelArch,
    tp: TPGroup,
    dtype: torch.dtype,
    *,
    is_pooling: bool = False,
    formats: Sequence[Quantization] = (),
    files: list[Path] | None = None,
    stage: Stage | None = None,
    last_embeds: bool = False,
    has_values: bool = True,
) -> CausalLM | PoolingModel:
    """Build the model in eval mode with parameters on the meta device: shapes without memory.

    Args:
        arch: architecture of the model.
        tp: the ranks that share it.
        dtype: data type of parameters.
        is_pooling: build a `PoolingModel`; a generative model becomes an embedding model.
        formats: asked for the method of each layer, in this order; a layer that no format supports
            has dense weights.
        files: files of the checkpoint, for formats that depend on which tensors exist.
        stage: the pipeline stage to build; None: the whole model.
        last_embeds: see `keep_stage`.
        has_values: False: only a few of the experts that are alike are built.

    Raises:
        ConfigError: the architecture is not supported, or cannot be split over tp.
    """
    model_class = _model_class(arch, is_pooling)
    _check_split(arch, tp)
    with torch.device("meta"), _default_dtype(dtype):
        model = model_class(arch, tp)
        if stage is not None and stage.count > 1:
            keep_stage(model, stage, last_embeds=last_embeds)
        if files and files[0].suffix != SUFFIX:
            find_outer_names(model, _names_in(files[:1]), partial(_names_in, files[1:]))
        _use_formats(model, formats, files or [], has_values=has_values)
    return model.eval()


def _names_in(files: list[Path]) -> frozenset[str]:
    return frozenset(name for name, _ in iterate_tensors(files, show_progress=False))


def _use_formats(
    model: LoadableModel,
    formats: Sequence[Quantization],
    files: list[Path],
    *,
    has_values: bool = True,
) -> None:
    """Give each layer the weight method of the first format that supports it."""

    @cache
    def tensor_names() -> frozenset[str]:
        return _names_in(files)

    names = CheckpointNames(
        partial(names_in_checkpoint, model=model),
        lambda name: name in tensor_names(),
        has_files=bool(files),
    )
    for format_ in formats:
        format_.use_names(names)

    def method_of(name: str, layer: MethodLayer) -> WeightMethod[Any] | None:
        methods = (format_.method_of(name, layer) for format_ in formats)
        return next((method for method in methods if method is not None), None)

    for name, layer in model.named_modules():
        if isinstance(layer, MethodLayer):
            method = method_of(name, layer)
            if method is None:
                continue
            if not has_values and isinstance(layer, Experts) and isinstance(method, DeviceExperts):
                layer.built_ids = layer.expert_ids[:MAX_BUILT]
                layer.use_method(method)
                if _are_alike(name, layer, method_of):
                    continue
                layer.built_ids = layer.expert_ids
            layer.use_method(method)


def _are_alike(
    name: str, layer: Experts, method_of: Callable[[str, MethodLayer], WeightMethod[Any] | None]
) -> bool:
    """Return whether the experts of a layer, of which some are built, all have the same format."""
    parts = layer._modules.get(str(layer.built_ids.start))
    for part, linear in [] if parts is None else parts.named_children():
        assert isinstance(linear, MethodLayer)
        names = (f"{name}.{number}.{part}" for number in layer.expert_ids)
        if len({_settings_of(method_of(each, linear)) for each in names}) > 1:
            return False
    return True


def _settings_of(method: WeightMethod[Any] | None) -> Hashable:
    """Return the type and the settings of a method, without the name of its layer."""
    settings = {} if method is None else vars(method)
    return type(method), repr({key: value for key, value in settings.items() if key != "name"})


def _model_class(arch: ModelArch, is_pooling: bool) -> type[CausalLM] | type[PoolingModel]:
    found = ModelRegistry.resolve(arch.architecture)
    if issubclass(found, LoadableModel):
        found = found.variant_of(arch)
    if is_pooling and issubclass(found, PoolingModel):
        return found
    if not issubclass(found, CausalLM):
        wanted = "PoolingModel or CausalLM" if is_pooling else "CausalLM"
        raise ConfigError(
            f"{found.__qualname__} is not a subclass of {wanted}. Register a model "
            f"class of that type"
        )
    if not is_pooling:
        return found
    from vllm.model_executor.models.pooling_decoders import embedding_class

    return embedding_class(found)


def materialize(model: nn.Module, device: torch.device, on_host: Iterable[nn.Module] = ()) -> None:
    """Give every meta parameter uninitialised memory on `device`, and move the buffers there.

    Tied parameters stay tied. Parameters of the modules `on_host` get host memory.
    """
    memory = ParameterMemory(model, device, on_host)
    for module in model.modules():
        memory.allocate(module)
    materialize_buffers(model, device)


def materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to `device`. They are tables that no checkpoint fills."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            assert not buffer.is_meta, f"buffer {name} has no memory"
            setattr(module, name, buffer.to(device))


class ParameterMemory:
    """Replaces parameters on the meta device by uninitialised ones with memory.

    Args:
        model: built on the meta device.
        device: where the parameters go.
        on_host: modules whose parameters are kept on the host, submodules included.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, on_host: Iterable[nn.Module] = ()
    ) -> None:
        self._device = device
        self._on_host = {module for outer in on_host for module in outer.modules()}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                self._owners.setdefault(id(param), []).append((module, name))

    def allocate(self, module: nn.Module) -> None:
        """Allocate the parameters of a module itself; parameters that have memory are not
        changed.
        """
        for param in list(module.parameters(recurse=False)):
            if param.is_meta:
                # Not empty_like: for a meta tensor it imports sympy.
                device = torch.device("cpu") if module in self._on_host else self._device
                if device.type == "cpu":
                    memory = allocate_weight(param.shape, param.dtype)
                else:
                    memory = torch.empty(param.shape, dtype=param.dtype, device=device)
                new = nn.Parameter(memory, requires_grad=False)
                for owner, name in self._owners.pop(id(param)):
                    setattr(owner, name, new)


def _allocate(
    model: LoadableModel, device: torch.device, on_host: Sequence[nn.Module] = ()
) -> "FinisherWithoutValues":
    """Allocate a model layer by layer as if it were loaded, but without values."""
    memory, finisher = ParameterMemory(model, device, on_host), FinisherWithoutValues(model)
    for module in list(model.modules()):
        memory.allocate(module)
        finisher.finish_filled(module)
    materialize_buffers(model, device)
    return finisher


def _parameter_bytes(model: LoadableModel) -> int:
    return sum(param.nbytes for param in model.parameters())


def _check_memory(
    model: LoadableModel, build: Callable[..., LoadableModel], is_quantized_here: bool
) -> None:
    """Check that the weights fit the machine's memory, before any of it is allocated.

    Args:
        model: the model on the meta device.
        build: builds another model like it; takes `has_values`.
        is_quantized_here: weights are quantized as they are loaded, a layer at a time.
    """
    num_bytes = _parameter_bytes(model)
    if num_bytes <= _SMALL_BYTES:
        return
    total = machine_memory_bytes()
    if num_bytes > total and is_quantized_here:
        loaded = build(has_values=False)
        # The memory is never written, so the system does not allocate pages for it.
        _allocate(loaded, torch.device("cpu"))
        num_bytes = sum(map(len, model_storages(loaded)))
    if num_bytes > total:
        raise ConfigError(
            f"the weights of the model take {num_bytes / 2**30:.1f} GiB, and this machine has "
            f"{total / 2**30:.1f} GiB of memory. Check the sizes in config.json, choose a smaller "
            f"model or a quantized one, or use more machines"
        )


def _check_split(arch: ModelArch, tp: TPGroup) -> None:
    check_tensor_split(
        tp.size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        intermediate_size=arch.intermediate_size,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_NUM_DUMMY_VALUES = 1_000_003
"""Random values drawn; a prime, so that the rows of a weight that repeats them differ."""


@torch.no_grad()
def _fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter with seeded values that keep activations finite.

    Matrices are uniform with the spread of a trained model (1 / sqrt of the inputs), norm weights
    are one, biases zero. One block of random values is repeated: drawing each weight of a large
    model separately would take longer than reading a checkpoint.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.rand(_NUM_DUMMY_VALUES, generator=generator) * 2 - 1
    for name, param in model.named_parameters():
        if param.dim() < 2:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        values = (block * param.shape[-1] ** -0.5).to(device=param.device, dtype=param.dtype)
        flat = param.view(-1)
        for start in range(0, flat.numel(), _NUM_DUMMY_VALUES):
            part = flat[start : start + _NUM_DUMMY_VALUES]
            part.copy_(values[: part.numel()])
    for module in model.modules():
        if isinstance(module, MethodLayer):
            module.method.fill_indices(module)
