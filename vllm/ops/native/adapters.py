"""The low-rank matmuls of LoRA adapters in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.ops.lora_weights import (
    AdaptedLayer,
    AdaptedRows,
    LoRAHeads,
    LoRAWeights,
    PlainAdapter,
    PreparedAdapter,
)
from vllm.utils.background_work import Pause, no_pause


class NativeAdapters:
    """The adapter operators of `NativeOps`."""

    def prepare_adapter(
        self,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LoRAWeights | None],
        dtype: torch.dtype,
        pause: Pause = no_pause,
    ) -> PreparedAdapter:
        """Convert a LoRA adapter to the layout of the device.

        Args:
            layers: layers of the model.
            parts: weights of the adapter by projection index, on the host; None: not changed.
            dtype: data type of the inputs.
            pause: called between two projections.
        """
        return PlainAdapter(parts)

    def add_low_rank(
        self, y: Tensor, x: Tensor, layer: AdaptedLayer | LoRAHeads, rows: AdaptedRows
    ) -> Tensor:
        """Add `(x @ a.T) @ b.T` of the adapter of each token to y, for all projections of a layer.

        Sums are computed in float32, and the result is rounded once more. Tokens without an adapter
        keep their bits.

        Args:
            y: [T, out_features or more], the output of the layer; for H heads [T, H, out_features
                or more]. Changed in place.
            x: [T, in_features], the input of the layer; for H heads [T, H, in_features].
            layer: the layer.
            rows: the adapters of the T tokens.

        Returns:
            y

        Raises:
            IndexError: the adapter of a token is not loaded.
            ValueError: shapes do not fit.
        """
        if isinstance(layer, LoRAHeads):
            for number, head in enumerate(layer.heads):
                self.add_low_rank(y[:, number], x[:, number], head, rows)
            return y
        if x.shape != (len(rows.of_rows), layer.in_features) or len(y) != len(x):
            raise ValueError(
                f"add_low_rank: x {list(x.shape)} and y {list(y.shape)} do not fit the layer "
                f"{layer}"
            )
        for number in rows.of_rows.unique().tolist():
            if number < 0:
                continue
            adapter = rows.adapters[number] if number < len(rows.adapters) else None
            if adapter is None:
                raise IndexError(f"a token refers to the LoRA slot {number}, which is not loaded")
            assert isinstance(adapter, PlainAdapter)
            chosen = (rows.of_rows == number).nonzero().flatten().to(x.device)
            inputs = x[chosen].float()
            for index, (offset, size) in enumerate(layer.parts, layer.first_part):
                part = adapter.parts[index]
                if part is not None:
                    a, b = part.a.to(inputs), part.b.to(inputs)
                    sums = y[chosen, offset : offset + size].float() + inputs @ a.T @ b.T
                    y[chosen, offset : offset + size] = sums.to(y.dtype)
        return y
