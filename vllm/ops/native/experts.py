"""Routing and matmuls of experts in torch."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.expert_options import (
    NO_BIASES,
    SILU_EXPERTS,
    ExpertBiases,
    ExpertGroups,
    ExpertOptions,
    RoutingOptions,
)
from vllm.ops.native.activations import NativeActivations
from vllm.ops.prepared import PreparedExperts
from vllm.ops.stored_weight import StoredWeight


class NativeExperts(NativeActivations):
    """The expert operators of `NativeOps`."""

    def route(
        self,
        logits: Tensor,
        options: RoutingOptions,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: the ones with the largest logits.

        Args:
            logits: [T, E]. Not changed.
            options: how many experts, from which groups, and how their weights are computed.
            bias: [E] float32: experts are chosen by their score plus this bias, where the score is
                their value of the softmax or their sigmoid. Weights do not include the bias.
            scales: [E] float32: the weight of a chosen expert is multiplied by its scale.

        Returns:
            (ids [T, k] int64, weights [T, k] float32) for `moe`; the largest first.

        Raises:
            ValueError: top_k is out of range, or the shape or dtype of `bias` or `scales` is wrong.
        """
        check_choice(logits, options, bias, scales)
        routing, groups = options.weights, options.groups
        key = logits = logits.float()
        if bias is not None:
            is_softmax = routing in ("softmax", "softmax_of_chosen")
            key = (logits.softmax(-1) if is_softmax else logits.sigmoid()) + bias
        if groups.top_groups < groups.num_groups:
            key = _within_groups(key, groups, num_best=1 if bias is None else 2)
        ids = key.topk(options.top_k, dim=-1).indices
        chosen = logits.gather(-1, ids)
        if routing == "softmax":
            weights = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
        elif routing == "softmax_of_chosen":
            weights = chosen.softmax(-1)
        elif routing == "sparse_mixer":
            weights = _mixed_sparsely(logits, ids, options.tolerance)
        else:
            weights = chosen.sigmoid()
            if routing == "sigmoid_of_chosen":
                weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * options.scale
        return ids, weights if scales is None else weights * scales[ids]

    def expect_experts(self, options: ExpertOptions) -> None:
        """Prepare for `moe` with these options; models call this while they are loaded.

        Compiled code could not ask which operators the device has.
        """

    def prepare_experts(
        self,
        gate: Sequence[StoredWeight],
        up: Sequence[StoredWeight],
        down: Sequence[StoredWeight],
        dtype: torch.dtype,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> PreparedExperts | None:
        """Convert the quantized weights of experts to the layout of the device.

        Args:
            gate: [I, hidden] for each expert, on the host; empty for experts without gates.
            up: [I, hidden] for each expert, on the host.
            down: [hidden, I] for each expert.
            dtype: data type of the inputs.
            biases: biases; see `moe`.
            options: options; see `moe`.

        Returns:
            None: the device has no kernel for them; they have to be dequantized.

        Raises:
            ValueError: experts are stored in different formats.
        """
        return None

    def moe(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> Tensor:
        """Compute a mixture of experts: a weighted sum of the experts that each token uses.

        The sum over a token's k experts e is `weight * (act(x @ gate_up[e].T) @ down[e].T)`. E
        experts of intermediate size I. The output of an expert is rounded to the dtype of x, the
        weighted sum is computed in float32.

        Args:
            x: [T, hidden]. Not changed.
            topk_ids: [T, k], int64, each below E. An id may occur twice for a token.
            topk_weights: [T, k], float32.
            gate_up: [E, 2 * I, hidden], gate then up; without gates [E, I, hidden].
            down: [E, hidden, I].
            biases: biases of the experts.
            options: act, what the weights multiply, and the ids of these experts.

        Returns:
            [T, hidden], new and dense.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """
        num_experts, hidden, size = down.shape
        width = options.first_width(size)
        if gate_up.shape != (num_experts, width, hidden) or x.shape[1:] != (hidden,):
            raise ValueError(
                f"x {list(x.shape)}, gate_up {list(gate_up.shape)} and down {list(down.shape)} do "
                "not fit together"
            )
        if topk_ids.shape != topk_weights.shape or len(topk_ids) != len(x):
            raise ValueError(
                f"topk_ids and topk_weights must have one entry for each of {len(x)} tokens, got "
                f"{list(topk_ids.shape)} and {list(topk_weights.shape)}"
            )
        return sum_of_experts(
            *(self, x, topk_ids, topk_weights, num_experts),
            lambda expert, given: F.linear(given, gate_up[expert], _of(biases.gate_up, expert)),
            lambda expert, middle: F.linear(middle, down[expert], _of(biases.down, expert)),
            options,
        )


def sum_of_experts(
    ops: NativeActivations,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    gate_up: Callable[[int, Tensor], Tensor],
    down: Callable[[int, Tensor], Tensor],
    options: ExpertOptions,
) -> Tensor:
    """Compute `NativeOps.moe` by running all tokens through all experts; no shape depends on
    choices.

    Args:
        ops: operators of the device.
        x: inputs; see `NativeOps.moe`.
        topk_ids: ids of the chosen experts; see `NativeOps.moe`.
        topk_weights: weights of the chosen experts; see `NativeOps.moe`.
        num_experts: E.
        gate_up: the first matmul of the expert with an index, [T, hidden] -> [T, 2 * I], or [T, I]
            without gates.
        down: the second one, [T, I] -> [T, hidden].
        options: options; see `NativeOps.moe`.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    choices = choices_of(num_experts, topk_ids, topk_weights, options.first_expert)
    for expert, (is_other, weight) in enumerate(choices):
        given = (x * weight).to(x.dtype) if options.scales_inputs else x
        result = down(expert, activated(ops, gate_up(expert, given), options))
        if options.scales_inputs:  # clears the bias where the expert was not chosen
            weight = (~is_other).any(-1, keepdim=True).float()
        out += weight * result
    return out.to(x.dtype)


def activated(ops: NativeActivations, gate_up: Tensor, options: ExpertOptions) -> Tensor:
    """Apply the activation of an expert: [..., 2 * I], or [..., I] without gates -> [..., I]."""
    if not options.has_gate:
        return ops.squared_relu(gate_up)
    if options.is_gelu:
        return ops.gelu_and_mul(gate_up, True)
    if options.limit is None:
        return ops.silu_and_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
    return (gate * (options.alpha * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def choices_of(
    num_experts: int, topk_ids: Tensor, topk_weights: Tensor, first_expert: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each expert its weight for every token, and which choices are other experts.

    The choices are bool [T, k], the weights [T, 1], 0 if a token did not choose the expert. No
    shape depends on the choices.
    """
    for expert in range(num_experts):
        is_other = topk_ids != expert + (first_expert or 0)
        yield is_other, topk_weights.masked_fill(is_other, 0.0).sum(-1, keepdim=True)


def _mixed_sparsely(logits: Tensor, ids: Tensor, tolerance: float) -> Tensor:
    """Compute the weights [T, k] of the routing `sparse_mixer` (Liu et al.
    2024, arXiv 2409.12136).
    """
    weights, left = [], logits
    for index in ids.split(1, dim=-1):
        largest = logits.gather(-1, index)
        distance = (largest - logits) / logits.abs().maximum(largest)
        near = left.masked_fill(distance > tolerance, float("-inf"))
        weights.append((largest - near.logsumexp(-1, keepdim=True)).exp())
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1)


def check_choice(
    logits: Tensor, options: RoutingOptions, bias: Tensor | None, scales: Tensor | None
) -> None:
    """Check the arguments of `route`; raise ValueError if they are wrong."""
    num_experts, top_k, groups = logits.shape[-1], options.top_k, options.groups
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {num_experts} experts")
    if num_experts % groups.num_groups or not 1 <= groups.top_groups <= groups.num_groups:
        raise ValueError(f"{num_experts} experts cannot be chosen from {groups}")
    for name, x in (("bias", bias), ("scales", scales)):
        if x is not None and (x.shape != (num_experts,) or x.dtype != torch.float32):
            raise ValueError(
                f"the {name} for choosing experts must be float32 [{num_experts}], got {x.dtype} "
                f"{list(x.shape)}"
            )


def _within_groups(key: Tensor, groups: ExpertGroups, num_best: int) -> Tensor:
    """Set the experts outside the best groups to minus infinity, so that they are not chosen."""
    grouped = key.unflatten(-1, (groups.num_groups, -1))
    best = grouped.topk(min(num_best, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = best.topk(groups.top_groups, dim=-1).indices  # [T, top_groups]
    index = torch.arange(groups.num_groups, device=key.device)
    is_chosen = (chosen.unsqueeze(-1) == index).any(1)  # [T, num_groups]
    return grouped.masked_fill(~is_chosen.unsqueeze(-1), float("-inf")).flatten(-2)
