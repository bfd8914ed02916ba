"""Manage the folder of a calibration: its files, the finished steps, and the steps that only change
files.
"""

import json
import re
from pathlib import Path
from typing import Any

from vllm.config.quantization.inc import read_json_object
from vllm.entrypoints.calibration.ranks import expand, unify
from vllm.errors import ConfigError
from vllm.model_executor.quantization.inc.files import (
    Measurements,
    Node,
    file_path,
    find_file,
    missing_file,
    read_file,
    write_file,
)

DEVICES = {"g2": "GAUDI2", "g3": "GAUDI3"}
"""Part of the names of files -> the card in QUANT_CONFIG."""


class CalibrationFolder:
    """The calibration files of one model and one kind of Gaudi card.

    Args:
        out: folder for all models.
        model: name or path of the model.
        device: a key of DEVICES.
    """

    def __init__(self, out: str, model: str, device: str) -> None:
        name = re.split(r"[/\\]", model.rstrip("/\\"))[-1].lower()
        self.path = Path(out).expanduser().absolute() / name
        self.device = device
        self.prefix = str(self.path / device / "inc_output")
        """Beginning of the paths of measurement files."""

    @property
    def measure_config(self) -> Path:
        """QUANT_CONFIG file for measuring."""
        return self.path / f"maxabs_measure_{self.device}.json"

    @property
    def quant_config(self) -> Path:
        """QUANT_CONFIG file for serving."""
        return self.path / f"maxabs_quant_{self.device}.json"

    @property
    def samples(self) -> Path:
        """File with the samples of tokens to measure."""
        return self.path / "calibration_samples.jsonl"

    @property
    def held_out(self) -> Path:
        """File with the samples of tokens for the perplexity."""
        return self.path / "evaluation_samples.jsonl"

    def write_configs(
        self, scale_method: str, blocked: list[str], scale_format: str | None = None
    ) -> None:
        """Write both QUANT_CONFIG files."""
        common = {
            "method": "HOOKS",
            "observer": "maxabs",
            "dump_stats_path": self.prefix,
            "blocklist": {"types": [], "names": blocked},
        }
        measure = {**common, "mode": "MEASURE", "allowlist": {"types": [], "names": []}}
        quant = {
            **common,
            "mode": "QUANTIZE",
            "scale_method": scale_method,
            "allowlist": {"types": [], "names": []},
            "device_for_scales": DEVICES[self.device],
        }
        if scale_format is not None:
            quant["scale_format"] = scale_format
        self._write(self.measure_config, measure)
        self._write(self.quant_config, quant)

    def delete_measurements(self) -> None:
        """Delete the files of earlier measurements, and the scales computed from them."""
        for file in Path(self.prefix).parent.glob("inc_output_hooks_maxabs*"):
            file.unlink()

    def delete_scales(self) -> None:
        """Delete the scales, so that they are computed again."""
        for file in Path(self.prefix).parent.glob("inc_output_hooks_maxabs_[A-Z]*"):
            file.unlink()

    # ---- what is done ---------------------------------------------------------------------

    @property
    def _state_file(self) -> Path:
        return self.path / f"calibration_{self.device}.json"

    def read_state(self) -> dict[str, Any]:
        """Read the state that earlier runs wrote; empty if there is none.

        Raises:
            ConfigError: the file is damaged.
        """
        if not self._state_file.is_file():
            return {}
        what, advice = "the state of the calibration", "Delete the file to begin again"
        return read_json_object(self._state_file, what, advice)

    def write_state(self, state: dict[str, Any]) -> None:
        """Write the state that later runs read."""
        self._write(self._state_file, state)

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
            new.replace(path)
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None

    # ---- steps without a model ------------------------------------------------------------

    def read_measurements(self, rank: int, world_size: int) -> Measurements:
        """Read the measurements of a rank.

        Raises:
            ConfigError: they are missing or damaged.
        """
        path = find_file(self.prefix, rank, world_size)
        if path is None:
            raise missing_file(str(self.measure_config), self.prefix, rank, world_size)
        return read_file(path, "DynamicRange")

    def postprocess(self, world_size: int) -> None:
        """Copy the measured KV-cache ranges to the attention matmuls that read the cache.

        Raises:
            ConfigError: measurements are missing or damaged.
        """
        for rank in range(world_size):
            measured = self.read_measurements(rank, world_size)
            if link_attention(measured.nodes):
                self._write_ranks(measured.path, measured.nodes, rank, world_size)

    def unify(self, world_size: int, target: int, *, shares_experts: bool = False) -> None:
        """Create measurements for `target` ranks from the measurements of `world_size` ranks.

        Args:
            world_size: number of ranks that were measured.
            target: smaller number of ranks, each of which combines the values of neighbouring
                ranks.
            shares_experts: whether each rank has measured different experts.

        Raises:
            ConfigError: that is not possible, or measurements are missing or damaged.
        """
        if not 0 < target < world_size or world_size % target:
            raise ConfigError(
                f"--unify-ranks {target} must divide {world_size}, the number of measured ranks "
                "(--tensor-parallel-size), and be less than it"
            )
        size = world_size // target
        for rank in range(target):
            parts = [self.read_measurements(rank * size + i, world_size) for i in range(size)]
            nodes = unify(parts, shares_experts=shares_experts)
            self._write_ranks(file_path(self.prefix, rank, target), nodes, rank, target)

    def expand(self, world_size: int, target: int) -> None:
        """Create measurements for `target` ranks from the measurements of fewer ranks,
        `world_size`.

        Raises:
            ConfigError: that is not possible, or measurements are missing or damaged.
        """
        if target <= world_size or target % world_size:
            raise ConfigError(
                f"--expand-ranks {target} must be a multiple of {world_size}, the number of "
                "measured ranks (--tensor-parallel-size), and more than it"
            )
        size = target // world_size
        for rank in range(world_size):
            for place, nodes in enumerate(expand(self.read_measurements(rank, world_size), size)):
                new = rank * size + place
                path = file_path(self.prefix, new, target)
                self._write_ranks(path, nodes, new, target, is_part=True)

    def _write_ranks(
        self,
        path: Path,
        nodes: dict[str, Node],
        rank: int,
        world_size: int,
        *,
        is_part: bool = False,
    ) -> None:
        local_rank = rank if world_size > 1 else -1
        write_file(path, nodes, "DynamicRange", local_rank=local_rank, is_part=is_part)


def link_attention(nodes: dict[str, Node]) -> bool:
    """Copy measured ranges to the attention matmuls that use the same values.

    The second input of matmul_qk and matmul_av is the content of the KV cache, and the output of
    fused attention is the input of o_proj.

    Returns:
        Whether anything has changed. Nothing changes if the model has no such matmuls.
    """
    has_changed = False
    for name, node in list(nodes.items()):
        parent, _, part = name.rpartition(".")
        block = parent.removesuffix(".attn.impl")
        if part in ("matmul_qk", "matmul_av"):
            cache = "k_cache" if part == "matmul_qk" else "v_cache"
            source = nodes.get(f"{parent}.{cache}") or nodes.get(f"{parent}.latent_cache_k")
            if source is not None and len(node.inputs) > 1:
                node.inputs[1] = list(source.inputs[0])
                has_changed = True
        elif part == "fused_scaled_dot_product_attention":
            source = nodes.get(f"{block}.o_proj")
            if source is not None:
                node.outputs = [list(source.inputs[0]), *node.outputs[1:]]
                has_changed = True
    return has_changed
