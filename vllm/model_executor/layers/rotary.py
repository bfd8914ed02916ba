"""Rotary position embedding: tables of cosines and sines for every position a model allows.

Su et al. 2021 (arXiv 2104.09864). The types differ only in the frequencies of the pairs of
elements, and in how they are scaled to contexts longer than in training. All arithmetic is float32
in the order of operations of Hugging Face models: at position 100,000 an error in the last bit of a
frequency gives an angle that visibly changes the output.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.context import ContextHolder, ReadsContext, text_positions
from vllm.config import RopeConfig
from vllm.errors import ConfigError
from vllm.ops import get_ops


class RotaryEmbedding(nn.Module, ReadsContext):
    """Rotates queries and keys by their positions; all layers of a model share one instance.

    Args:
        rope: type and parameters.
        max_positions: N, rows of the table.
        is_neox: pairs element i of a head with i + rotary_dim / 2 (Llama, GPT-NeoX); False: 2 i
            with 2 i + 1 (GPT-J).

    Shape: positions [P, T] or [T], query [T, H, D], key [T, G, D] -> (query, key), which may share
    memory with the inputs. P is 1, or with sections (M-RoPE) the number of sections; then P = 1
    means that all positions of a token are the same.

    Raises:
        ConfigError: the type is unknown, or a parameter of it is missing.
    """

    cos_sin_cache: Tensor
    """[N, rotary_dim] float32: the cosines, then the sines."""
    sections: Tensor | None
    """[rotary_dim / 2] int32: which of its positions rotates each pair of a token; None: it has
    one."""
    index: int = 0
    """Among the tables of the model, see `number_rotary_tables`."""

    def __init__(self, rope: RopeConfig, max_positions: int, is_neox: bool = True) -> None:
        super().__init__()
        self.launch = ContextHolder()
        self.is_neox = is_neox
        # On the CPU even while a model is built on the meta device, because no checkpoint has these
        # values.
        with torch.device("cpu"):
            inv_freq, attention_factor = rotary_frequencies(rope, max_positions)
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
            sections = rotary_sections(rope) if rope.sections else None
        self.register_buffer("sections", sections, persistent=False)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the angles of tokens at positions [P, T] or [T], for queries of this dtype.

        They are computed once per batch and stored in `LaunchContext`.
        """
        return get_ops().rotary_angles(
            self._fit(positions), self.cos_sin_cache, dtype, self.is_neox, self.sections
        )

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(positions, query, key)

    def rotate_query(self, positions: Tensor, query: Tensor) -> Tensor:
        """Return the rotated query, for a layer that reuses the keys of another layer."""
        return self._rotate(positions, query, None)[0]

    def _rotate(self, positions: Tensor, query: Tensor, key: Tensor | None) -> tuple[Tensor, Any]:
        context = self.launch.context
        if context is not None and context.rotary_angles is not None:
            angles = context.rotary_angles[self.index]
            return get_ops().rotate(query, key, angles, self.is_neox)
        return get_ops().rotary_embedding(
            self._fit(positions), query, key, self.cos_sin_cache, self.is_neox, self.sections
        )

    def _fit(self, positions: Tensor) -> Tensor:
        """Return the positions in the shape that the operators need."""
        return text_positions(positions) if self.sections is None else positions


def number_rotary_tables(model: nn.Module) -> list[RotaryEmbedding]:
    """Return the rotary tables of a model, and set the index of each one to its index in
    the list.
    """
    tables = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    for index, table in enumerate(tables):
        table.index = index
    return tables


def rotary_sections(rope: RopeConfig) -> Tensor:
    """Return which of its P positions rotates each pair of a token (M-RoPE), [rotary_dim / 2]
    int32.

    In Qwen2-VL the pairs that one position rotates are neighbours. In Qwen3-VL the positions
    alternate, and the first position also rotates the remaining pairs.
    """
    sections = torch.tensor(rope.sections)
    axes = torch.arange(len(sections), dtype=torch.int32)
    if not rope.interleaves_sections:
        return axes.repeat_interleave(sections)
    pairs = torch.arange(rope.rotary_dim // 2)
    axis = axes[pairs % len(sections)]
    return axis.where(pairs < len(sections) * sections[axis], 0)


def rotary_frequencies(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Return the rotation frequencies, and the factor on cosines and sines.

    The frequencies, [rotary_dim / 2] float32, are the angle per position of each pair of elements.

    Raises:
        ConfigError: the type is unknown, or a parameter of it is missing.
    """
    if rope.rope_type not in _FREQUENCIES:
        raise ConfigError(
            f"rope type {rope.rope_type!r} is not supported; supported: {', '.join(_FREQUENCIES)}"
        )
    return _FREQUENCIES[rope.rope_type](rope, max_positions)


def _parameter(rope: RopeConfig, name: str) -> float:
    value = rope.scaling.get(name)
    if value is None:
        raise ConfigError(
            f"config.json: rope type {rope.rope_type!r} needs the parameter "
            f"{name!r}. Add it to rope_parameters (or rope_scaling)"
        )
    return float(value)


def _powers(theta: float | Tensor, rotary_dim: int) -> Tensor:
    """Compute theta^(2 i / rotary_dim) for every pair i: [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return theta**exponents


def _default(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Divide all frequencies, and so the positions, by the factor (arXiv 2306.15595)."""
    return 1.0 / _powers(rope.theta, rope.rotary_dim) / _parameter(rope, "factor"), 1.0


def _dynamic(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Increase the base for long contexts ("NTK-aware", in appendix A of arXiv 2309.00071).

    The base depends on `max_positions`, not on the sequences of the batch. So a token's angles
    never depend on the batch, and cached keys stay valid while their request grows.
    """
    factor, dim = _parameter(rope, "factor"), rope.rotary_dim
    original = _parameter(rope, "original_max_position_embeddings")
    longest = torch.tensor(float(max(max_positions, original)))  # float32, like the base
    stretch = factor * longest / original - (factor - 1)
    return 1.0 / _powers(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _proportional(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Return frequencies of the whole head, all zero except the first ones (Gemma 4)."""
    num_pairs = rope.rotary_dim // 2
    num_turned = int(float(rope.scaling.get("rotated_part") or 1.0) * rope.rotary_dim // 2)
    inv_freq = 1.0 / _powers(rope.theta, rope.rotary_dim)
    inv_freq[num_turned:num_pairs] = 0.0
    return inv_freq / float(rope.scaling.get("factor") or 1.0), 1.0


def _llama3(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, and interpolate between (Llama 3.1).

    Grattafiori et al. 2024, arXiv 2407.21783. A frequency is low when its period fits less than
    `low_freq_factor` times into the original context.
    """
    factor = _parameter(rope, "factor")
    low, high = _parameter(rope, "low_freq_factor"), _parameter(rope, "high_freq_factor")
    original = _parameter(rope, "original_max_position_embeddings")
    inv_freq = 1.0 / _powers(rope.theta, rope.rotary_dim)
    period = 2 * math.pi / inv_freq
    keep = (original / period - low) / (high - low)
    between = (1 - keep) * inv_freq / factor + keep * inv_freq
    scaled = torch.where(period > original / low, inv_freq / factor, between)
    return torch.where(period < original / high, inv_freq, scaled), 1.0


def _yarn(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Keep fast pairs, divide slow ones by the factor, and interpolate between (YaRN).

    Peng et al. 2023, arXiv 2309.00071. Pairs that rotate at least `beta_fast` times within the
    original context are kept; pairs that rotate at most `beta_slow` times are divided.
    """
    scaling, dim = rope.scaling, rope.rotary_dim
    original = _parameter(rope, "original_max_position_embeddings")
    factor = float(scaling.get("factor") or max_positions / original)

    def pair_with(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = pair_with(float(scaling.get("beta_fast") or 32.0))
    last = pair_with(float(scaling.get("beta_slow") or 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # avoids a division by zero: the ramp becomes a step
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    inv_freq = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv_freq, _yarn_attention_factor(rope, factor)


def _longrope(rope: RopeConfig, max_positions: int) -> tuple[Tensor, float]:
    """Divide the frequency of each pair by its own factor (LongRoPE; arXiv 2402.13753).

    The checkpoint has one list of factors for contexts up to the original length, and one for
    longer contexts. `uses_long_factor` decides by the longest request that is served, so that
    cached keys stay valid while their request grows.
    """
    original = _parameter(rope, "original_max_position_embeddings")
    length = "long" if rope.scaling.get("uses_long_factor", True) else "short"
    name = f"{length}_factor"
    given = rope.scaling.get(name)
    if given is None or len(given) != rope.rotary_dim // 2:
        raise ConfigError(
            f"rope type 'longrope' needs {name} with {rope.rotary_dim // 2} numbers, one for each "
            f"pair of rotated elements, got {given}. Correct config.json"
        )
    factors = torch.tensor([float(factor) for factor in given], dtype=torch.float32)
    sharpness = rope.scaling.get(f"{length}_mscale", rope.scaling.get("attention_factor"))
    if sharpness is None:
        factor = float(rope.scaling.get("factor") or max_positions / original)
        sharpness = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (factors * _powers(rope.theta, rope.rotary_dim)), float(sharpness)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    """Return the factor on query and key that keeps attention scores as sharp as without
    scaling.
    """
    given = rope.scaling.get("attention_factor")
    if given is not None:
        return float(given)

    mscale, mscale_all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_sharpness(factor, float(mscale)) / yarn_sharpness(factor, float(mscale_all_dim))
    return yarn_sharpness(factor, 1.0)


def yarn_sharpness(factor: float, mscale: float) -> float:
    """Return the factor that keeps attention sharp when contexts grow `factor` times.

    `mscale` weights its growth (arXiv 2309.00071, section 3.4).
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_FREQUENCIES: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""Type -> inverse frequencies [rotary_dim / 2] and the factor on both tables."""
