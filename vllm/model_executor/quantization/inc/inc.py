"""FP8 weights and inputs with the scales of `QUANT_CONFIG` (`--quantization inc`).

Weights of a dense checkpoint are quantized while they are loaded; inputs are quantized with the
scale that was measured for their layer. Keys and values of an FP8 cache have scales as well. Of
experts only the weights are quantized. Routers, embeddings and output heads that are tied to
embeddings stay dense.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.config import IncConfig
from vllm.config.quantization.inc import SCALE_METHODS
from vllm.distributed import Stage, TPGroup, place_in_engine
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.layers.embedding import EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import RoundedExperts
from vllm.model_executor.layers.stored.stored_linear import RoundedLinear, StoredHead
from vllm.model_executor.quantization.inc.files import (
    AssumedMeasurements,
    Measurements,
    Node,
    file_path,
    find_file,
    missing_file,
    read_file,
    write_file,
)
from vllm.model_executor.quantization.inc.measure import (
    IncMeasure,
    attention_name,
    cache_names,
    can_be_fp8,
    expert_names,
    experts_can_be_fp8,
    head_can_be_fp8,
    measured_layers,
    prompts_can_be_fp8,
)
from vllm.model_executor.quantization.inc.scales import (
    RANGES,
    input_scale,
    round_weight,
    weight_scales,
)
from vllm.model_executor.quantization.interface import Quantization
from vllm.ops import get_ops
from vllm.ops.stored_weight import Fp8Weight

logger = init_logger(__name__)

_CUT = 4
"""Factor by which a scale may be too small for the largest weight: searches choose such scales."""
_ZERO = 2.0**-10
"""Threshold below which values become 0 in e4m3."""
_SAME = 0.02
"""Tolerance between the largest weight and the measured one: it was bfloat16, or another dtype."""


def create_inc(config: IncConfig | None) -> Quantization:
    """Create the format for the file of `QUANT_CONFIG`: measuring or quantizing.

    Raises:
        ConfigError: there is no file.
    """
    if config is None:
        raise ConfigError(
            "the checkpoint is quantized with 'inc', which is not supported; use the unquantized "
            "checkpoint with --quantization inc and QUANT_CONFIG"
        )
    return IncMeasure(config) if config.mode == "MEASURE" else Inc(config)


class Inc(Quantization):
    """Quantizes layers to FP8 with measured scales (`QUANT_CONFIG` with mode QUANTIZE).

    Args:
        config: the content of the file.
    """

    def __init__(self, config: IncConfig) -> None:
        self.config = config
        self.method = SCALE_METHODS[config.scale_method]
        self._measured: Measurements | None = None
        self._scales: Measurements | None = None
        self._used: dict[str, Node] = {}
        """Scales of this run, by the names of modules."""

    def start(self, tp: TPGroup, stage: Stage | None = None) -> None:
        config = self.config
        self._limit = get_ops().fp8_max
        if config.device_for_scales is not None:
            limit = RANGES[config.device_for_scales]
            if limit > self._limit:
                raise ConfigError(
                    f"QUANT_CONFIG {config.path}: device_for_scales is "
                    f"{config.device_for_scales!r}, whose FP8 values (e4m3) end at {limit:g}, but "
                    f"on this device they end at {self._limit:g}. Calibrate for this device"
                )
            self._limit = limit
        if config.is_dynamic:
            return
        prefix = config.dump_stats_path
        own = (prefix, *place_in_engine(tp, stage))
        self._scale_path = file_path(*own, config.scale_method)
        # A file measured without pipeline stages also covers the layers of each stage.
        sources = dict.fromkeys((own, (prefix, tp.rank, tp.size)))
        measured = next((path for source in sources if (path := find_file(*source))), None)
        scales = None if config.recalculates else find_file(*own, config.scale_method)
        if measured is None and scales is None:
            if not config.assumes_measurements:
                raise missing_file(config.path, *own)
            self._measured = AssumedMeasurements(file_path(*own))
        if measured is not None:
            self._measured = read_file(measured, "DynamicRange")
        if scales is not None:
            self._scales = read_file(scales, "Scale")

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if not can_be_fp8(name, layer, self.config):
            return None
        if not self.config.is_dynamic and not self._has(name):
            return None
        return RoundedLinear(name, lambda weight: self._round(name, weight))

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        if not head_can_be_fp8(name, layer, self.config) or not self._is_known(name):
            return None
        return StoredHead(RoundedLinear(name, lambda weight: self._round(name, weight)))

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        is_covered = experts_can_be_fp8(name, layer, self.config)
        if not is_covered or not self._is_known(expert_names(name, 0)[0]):
            return None

        def round_weights(
            number: int, gate_up: Tensor, down: Tensor
        ) -> tuple[Fp8Weight, Fp8Weight, Fp8Weight]:
            names = expert_names(name, number)
            both = self._round_alone(names[0], gate_up)
            half = len(gate_up) // 2
            gate, up = (
                replace(both, numbers=both.numbers[part], scales=both.scales[part])
                for part in (slice(half), slice(half, None))
            )
            return gate, up, self._round_alone(names[1], down)

        return RoundedExperts(name, round_weights)

    def finish_model(self, model: nn.Module) -> None:
        if self.config.is_dynamic:
            return
        for name, layer in measured_layers(model, self.config):
            names = cache_names(name, layer)
            if not all(self._has(cache) for cache in names):
                continue
            scales = (self._input_scale(names[0]), self._input_scale(names[-1]))
            layer.set_cache_scales(*scales)
            if prompts_can_be_fp8(name, layer, self.config):
                layer.measured_scales = self._prompt_scales(attention_name(name), scales)
        if self._scales is None and not self.config.assumes_measurements:
            self._save()

    # ---- single modules -------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        """Return whether the files have measurements of a module.

        Raises:
            ConfigError: there are none, although the module needs them.
        """
        source = self._scales or self._measured
        assert source is not None
        if source.find(name) is not None:
            return True
        if self.config.ignores_missing:
            return False
        raise ConfigError(
            f"{source.path}: Nodes.{name} is missing: the file is for a different model, or the "
            "module was blocked while it was measured. Measure this model with `vllm calibrate`, "
            f"or add the name to blocklist.names of {self.config.path}"
        )

    def _is_known(self, name: str) -> bool:
        """Return whether an output head or experts are quantized; files may lack their
        measurements.
        """
        if self.config.is_dynamic:
            return True
        source = self._scales or self._measured
        assert source is not None
        if source.find(name) is not None:
            return True
        logger.info("%s is not quantized: %s has no scales for it", name, source.path)
        return False

    def _round(self, name: str, weight: Tensor) -> Fp8Weight:
        if self.config.is_dynamic:
            return self._round_alone(name, weight)
        self._check_model(name, _largest(name, weight))
        scale = self._input_scale(name)
        rounded = self._round_alone(name, weight)
        return replace(rounded, input_scale=scale, rounds_inputs=True)

    def _round_alone(self, name: str, weight: Tensor) -> Fp8Weight:
        """Quantize a weight whose inputs are not quantized."""
        limit, backoff = self._limit, self.config.weight_backoff
        _largest(name, weight)
        if self.config.is_dynamic:
            return round_weight(weight, self.method, limit, backoff)
        scales = self._weight_scales(name, weight)
        self._used.setdefault(name, Node()).weight = scales.tolist()
        return round_weight(weight, self.method, limit, backoff, scales)

    def _check_model(self, name: str, largest: float) -> None:
        """Check that the measurements belong to this model, by its largest weight."""
        node = None if self._measured is None else self._measured.find(name)
        if node is None or not node.weight:
            return
        measured = max(node.weight)
        assert self._measured is not None
        difference = largest - measured if self._measured.is_part else abs(largest - measured)
        if difference > _SAME * max(measured, largest):
            raise ConfigError(
                f"{self._measured.path}: Nodes.{name}.params.weight is {measured:.6g}, but the "
                f"largest weight of this module in the checkpoint is {largest:.6g}: the file is "
                "for a different model. Measure this one with `vllm calibrate`"
            )

    def _weight_scales(self, name: str, weight: Tensor) -> Tensor:
        node = None if self._scales is None else self._scales.find(name)
        if node is None:
            return weight_scales(weight, self.method, self._limit, self.config.weight_backoff)
        assert self._scales is not None
        numbers = node.weight or []
        wanted = len(weight) if self.method.is_per_output else 1
        if len(numbers) != wanted:
            raise ConfigError(
                f"{self._scales.path}: Nodes.{name}.params.weight has {len(numbers)} values, but "
                f"the layer needs {wanted}: the file is for a different model. Delete it, or set "
                f"recalc_scales to true in {self.config.path}"
            )
        scales = torch.tensor(numbers)
        per_output = self.method.is_per_output
        largest = weight.float().abs().amax(1) if per_output else weight.float().abs().max()[None]
        quotients = largest / scales
        is_lost = (quotients > _CUT * self._limit) | ((quotients < _ZERO) & (largest > 0))
        if bool(is_lost.any()):
            at = int(is_lost.int().argmax())
            raise ConfigError(
                f"{self._scales.path}: Nodes.{name}.params.weight is {numbers[at]:.6g}, but the "
                f"largest weight of this module in the checkpoint is {float(largest[at]):.6g}, "
                "which fp8 cannot represent with this scale: the file is for a different model. "
                f"Delete it, or set recalc_scales to true in {self.config.path}"
            )
        return scales

    def _input_scale(self, name: str) -> float:
        source = self._scales or self._measured
        assert source is not None
        node = source.find(name)
        if node is None or not node.inputs:
            raise ConfigError(
                f"{source.path}: Nodes.{name}.inputs is empty. Measure the model with "
                f"`vllm calibrate`"
            )
        scale = max(node.inputs[0])
        if source is self._measured:
            if scale == 0:
                raise ConfigError(
                    f"{source.path}: Nodes.{name}.inputs is 0: the module had no input while it "
                    f"was measured. Measure with more data, or add the name to blocklist.names "
                    f"of {self.config.path}"
                )
            scale = input_scale(scale, self.method, self._limit, self.config.input_backoff)
        self._used[name] = Node([[scale]])
        return scale

    def _prompt_scales(
        self, name: str, cache_scales: tuple[float, float]
    ) -> tuple[float, float] | None:
        """Return the scales of queries and of the softmax; None if the files lack them."""
        for source in (self._scales, self._measured):
            node = None if source is None else source.find(name)
            if node is None or not node.inputs or len(node.outputs) < 2:
                continue
            found = max(node.inputs[0]), max(node.outputs[1])
            if min(found) <= 0:
                continue
            query, weights = found
            if source is self._measured:
                query, weights = (
                    input_scale(x, self.method, self._limit, self.config.input_backoff)
                    for x in found
                )
            inputs = [[query], *([scale] for scale in cache_scales)]
            self._used[name] = Node(inputs, [[1.0], [weights]])
            return query, weights
        return None

    def _save(self) -> None:
        """Save the scales of this run to a file for their method, as the library does."""
        try:
            write_file(self._scale_path, self._used, "Scale")
        except ConfigError as error:
            logger.warning(
                "computing scales at each start, because they cannot be saved: %s", error
            )


def _largest(name: str, weight: Tensor) -> float:
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        raise ConfigError(f"the weight of {name} in the checkpoint contains NaN or infinity")
    return largest
