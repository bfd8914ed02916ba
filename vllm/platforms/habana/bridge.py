"""Define the interface of a Gaudi card, real or simulated.

The facts in the docstrings are about the published bridge (builds 1.19 and later). Independent of
models, buckets and the scheduler.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

COMPILE_BACKEND = "hpu_backend"
"""Backend of `torch.compile`; only in eager mode."""

OUT_OF_MEMORY_TEXT = "Allocation failed for size::"
"""Text in the RuntimeError of a failed allocation; there is no type of its own."""


@dataclass(frozen=True)
class MemoryInfo:
    """State of this process's memory pool. The memory that other processes use on the card is not
    visible.
    """

    free_bytes: int
    total_bytes: int
    """Less than the HBM of the card: driver and firmware come first."""


@dataclass(frozen=True)
class DeviceCounters:
    """Counters since the process opened the device. None: a real card does not report the value."""

    compilations: int
    """Synapse compilations; a recipe out of a cache is none, nor is a single eager operator."""
    compile_s: float
    cpu_fallbacks: Mapping[str, int]
    """Operator -> number of times that it ran on the host: flush, copy out, compute, copy back."""
    launches: int | None = None
    """Number of launches of recipes and graphs; none in compile-only mode."""
    graph_captures: int | None = None
    graph_replays: int | None = None
    host_syncs: int | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    blocking_h2d: int | None = None
    """Copies to the device that the host waits for."""
    copied_bytes: int | None = None
    """Bytes of tensors that were copied whole because they were written through a view."""
    cache_copies: int | None = None
    """Number of copies of whole tensors that were of a tensor of `HabanaBridge.zeros`."""
    recipes: tuple[tuple[str, int], ...] = ()
    """Name and microseconds of each compilation; a card reports them with
    PT_HPU_METRICS_GC_DETAILS=1 only."""


class FusedKernels(Protocol):
    """Fused kernels of the bridge that the engine calls. Letters: B batch, H heads, S tokens, D
    head size.

    The kernels in `habana.parts` may be missing: call `has` before using one of them.
    """

    def has(self, name: str) -> bool:
        """Return whether an optional kernel can be used. Call this outside of compiled code.

        Args:
            name: a key of `habana.parts.PARTS`.
        """

    def why_unused(self, name: str) -> str | None:
        """Return why an optional kernel is not used; None if it can be used.

        Either the bridge does not have it, or the card computes a wrong result, which the first
        call of this method tests.

        Args:
            name: a key of `habana.parts.PARTS`.
        """

    @property
    def window_multiple(self) -> int:
        """The number of tokens must be a multiple of this if `sdpa` gets a window."""

    def sdpa(
        self,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        attn_mask: "Tensor | None" = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        valid_seq_len: "Tensor | None" = None,
        window: int | None = None,
        sinks: "Tensor | None" = None,
    ) -> "Tensor":
        """Run FusedSDPA over [B, H, S, D]; key and value may have fewer heads, which are shared.

        Args:
            query: [B, H, S, D].
            key, value: [B, G, S_kv, D].
            attn_mask: added to the scores, or bool with True for "attend"; [B, 1 or H, S, S_kv].
            is_causal: lower triangle, aligned top left. Not together with a mask.
            scale: factor of the scores; None: 1 / sqrt(D).
            softmax_mode: "None", or "fast" with an approximate exponential.
            valid_seq_len: int32 [B], tokens of each right-padded sequence; only with `is_causal`.
                Results after these tokens are undefined.
            window: number of tokens that a query sees, itself included; only with `is_causal` and
                as many keys as queries, without `valid_seq_len`. Needs "FusedSDPA window_size".
            sinks: [H], score of one additional key per head, whose value is zero. Needs "FusedSDPA
                sink".
        """

    def fp8_sdpa(
        self,
        scales: "tuple[Tensor, Tensor, Tensor]",
        weight_scales: "tuple[Tensor, Tensor]",
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        attn_mask: "Tensor | None" = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        valid_seq_len: "Tensor | None" = None,
    ) -> "Tensor":
        """Run FusedSDPA over float8_e4m3fn, with the softmax rounded to FP8. Needs
        "fp8_fused_sdpa".

        Args:
            scales: [1] float32 each, factors of queries, keys and values.
            weight_scales: [1] float32 each: factors of the softmax before it is rounded, and after.

        Returns:
            bfloat16
        """

    def rms_norm(self, x: "Tensor", weight: "Tensor", eps: float) -> "Tensor":
        """Compute x * rsqrt(mean(x^2) + eps) * weight over the last dimension, reduced in fp32."""

    def cast_to_fp8(self, x: "Tensor", scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Compute x * scale, rounded to `dtype` and limited to the range of the card.

        Args:
            x: float32 or bfloat16.
            scale: [1] float32, or for x of two dimensions [T, 1].
            dtype: float8_e4m3fn or float8_e5m2.
        """

    def cast_from_fp8(self, x: "Tensor", scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Compute x * scale, of `dtype`.

        Args:
            x: float8_e4m3fn or float8_e5m2.
            scale: [1] float32.
            dtype: float32 or bfloat16.
        """

    def fp8_gemm(
        self,
        x: "Tensor",
        weight: "Tensor",
        x_scale: "Tensor",
        weight_scale: "Tensor",
        dtype: "torch.dtype",
    ) -> "Tensor":
        """Compute (x @ weight.T) * x_scale * weight_scale, [T, N] of `dtype`.

        Args:
            x: [T, K] float8_e4m3fn.
            weight: [N, K] float8_e4m3fn.
            x_scale: [T, 1] or [1] float32.
            weight_scale: [N] float32.
        """

    def from_uint4(
        self, words: "Tensor", scales: "Tensor", zeros: "Tensor", dtype: "torch.dtype"
    ) -> "Tensor":
        """Compute (code - zero) * scale, [K, N] of `dtype`.

        Args:
            words: [K, N / 8] int32, eight 4-bit codes in a word, from the lowest bits on.
            scales: [G, N], each for K / G inputs.
            zeros: [G, N / 8] int32, packed in the same way.
        """

    def rotary(self, x: "Tensor", cos: "Tensor", sin: "Tensor", *, interleaved: bool) -> "Tensor":
        """Compute x * cos + rotate(x) * sin.

        Args:
            x: [tokens, heads, rotated].
            cos, sin: [tokens, 1, rotated], already as wide as x.
            interleaved: True pairs neighbours (GPT-J), False the two halves (NeoX).
        """

    def block_softmax(
        self, scores: "Tensor", bias: "Tensor", groups: "Tensor"
    ) -> "tuple[Tensor, Tensor, Tensor]":
        """Compute the exponentials of the scores in each block, minus the highest score per head in
        the block.

        Letters: N blocks, G key/value heads, R query heads of each, S tokens of a block.

        Args:
            scores: [N, G, R, 1, S].
            bias: [N, 1, 1, 1, S], added to the scores.
            groups: [N] int32, request of each block; a block of request -1 becomes zero.

        Returns:
            ([N, G, R, 1, S] exponentials; highest scores and sums, [N, G * R or more] each, for
            `block_softmax_adjustment`)
        """

    def block_softmax_adjustment(
        self,
        maxima: "Tensor",
        sums: "Tensor",
        groups: "Tensor",
        num_groups: int,
        shape: "list[int] | None" = None,
    ) -> "Tensor":
        """Compute the factor of each block: exp(maximum of the block - maximum of its request) /
        sum of the request.

        Sums are relative to the maximum of the request.

        Args:
            maxima, sums: [N, G, R, 1, 1], or as `block_softmax` returns them.
            groups: [N] int32, request of each block.
            num_groups: number of requests.
            shape: shape of the result, [N, G, R, 1], for results of `block_softmax`; None: the
                shape of `maxima`.
        """

    def moe(
        self,
        x: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        gate_up: "Sequence[Tensor]",
        down: "Sequence[Tensor]",
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> "Tensor":
        """Compute the sum of weight * (silu(gate x) * up x) down over the experts of each token.
        Runs only in lazy mode and in compiled code.

        Args:
            x: [tokens, hidden].
            ids: [tokens, k] int32 or int64.
            weights: [tokens, k], with the dtype of x.
            gate_up: per expert [2 * I, hidden], gate then up.
            down: per expert [hidden, I].
            first_expert: id of the first of these experts; other experts are ignored.
            has_inputs_first: gate_up is [hidden, 2 * I] and down [I, hidden].
        """

    def bias_moe(
        self,
        x: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        gate_up: "Sequence[Tensor]",
        down: "Sequence[Tensor]",
        gate_up_bias: "Sequence[Tensor]",
        down_bias: "Sequence[Tensor]",
        alpha: float,
        limit: float,
        first_expert: int = 0,
        has_inputs_first: bool = False,
    ) -> "Tensor":
        """Compute a mixture of experts with biases and limited activations (GPT-OSS). Runs where
        `moe` can run.

        With g = min(gate x + bias, limit) and u = up x + bias between -limit and limit, the result
        is the sum of weight * ((g * sigmoid(alpha * g) * (u + 1)) down + bias).

        Args:
            x, ids, weights, down, first_expert, has_inputs_first: as in `moe`.
            gate_up: per expert [2 * I, hidden], gate and up of each feature alternating.
            gate_up_bias: per expert [2 * I], alternating like gate_up, with the dtype of x.
            down_bias: per expert [hidden].
            alpha, limit: the same for all experts; constants of a recipe.
        """

    def mxfp4_moe(
        self,
        x: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        gate_up: "Sequence[Tensor]",
        gate_up_scales: "Sequence[Tensor]",
        down: "Sequence[Tensor]",
        down_scales: "Sequence[Tensor]",
        first_expert: int = 0,
    ) -> "Tensor":
        """Compute the result of `moe` with MXFP4 weights. Runs where `moe` can run.

        Args:
            x: [tokens, hidden] bfloat16.
            ids, weights, first_expert: as in `moe`.
            gate_up: per expert [2 * I, hidden / 2] uint8, gate then up: two E2M1 elements in a
                byte, the first in the lower four bits.
            gate_up_scales: per expert [2 * I, hidden / 32] uint8, E8M0.
            down: per expert [hidden, I / 2] uint8.
            down_scales: per expert [hidden, I / 32] uint8.

        Returns:
            [tokens, hidden] bfloat16
        """

    def bias_mxfp4_moe(
        self,
        x: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        gate_up: "Sequence[Tensor]",
        gate_up_scales: "Sequence[Tensor]",
        down: "Sequence[Tensor]",
        down_scales: "Sequence[Tensor]",
        gate_up_bias: "Sequence[Tensor]",
        down_bias: "Sequence[Tensor]",
        alpha: float,
        limit: float,
        first_expert: int = 0,
    ) -> "Tensor":
        """Compute the result of `bias_moe` with MXFP4 weights in the form of `mxfp4_moe`; gate and
        up of each feature alternate.
        """

    def fp8_moe(
        self,
        numbers: "Tensor",
        scale: "Tensor",
        ids: "Tensor",
        weights: "Tensor",
        gate_up: "Sequence[Tensor]",
        gate_up_scales: "Sequence[Tensor]",
        down: "Sequence[Tensor]",
        down_scales: "Sequence[Tensor]",
        first_expert: int = 0,
    ) -> "Tensor":
        """Run a mixture of experts with FP8 inputs and weights, each with a scale. Runs where `moe`
        can run.

        The inputs of the second matmul are rounded to FP8 with their own scales.

        Args:
            numbers: [tokens, hidden] float8_e4m3fn, the quantized inputs.
            scale: [tokens, 1] float32, scale of each token.
            ids: [tokens, k] int32 or int64.
            weights: [tokens, k] bfloat16.
            gate_up: per expert [2 * I, hidden] float8_e4m3fn, gate then up.
            gate_up_scales: per expert [2 * I] float32.
            down: per expert [hidden, I] float8_e4m3fn.
            down_scales: per expert [hidden] float32.
            first_expert: index of the first expert of this rank, as in `moe`.

        Returns:
            [tokens, hidden] bfloat16
        """


class DeviceEvent(Protocol):
    """An event (mark) in the queue of the card."""

    def query(self) -> bool:
        """Return whether the card has reached the event. Does not wait."""


class HabanaBridge(Protocol):
    """The interface of one card. A process has exactly one, and its index is always 0."""

    @property
    def device(self) -> "torch.device":
        """The device `hpu:0`."""

    @property
    def device_name(self) -> str:
        """Name of the device: GAUDI2 or GAUDI3."""

    @property
    def fp8_max(self) -> float:
        """The largest e4m3 value on this card."""

    @property
    def is_lazy(self) -> bool:
        """Whether operators are recorded until `mark_step` (lazy mode, HPU graphs). Otherwise they
        run eagerly or with torch.compile.
        """

    @property
    def is_recording(self) -> bool:
        """Whether operators become part of a recipe here: always in lazy mode, and in eager mode
        inside of a compiled function. Compilers can trace it."""

    @property
    def collectives_backend(self) -> str:
        """Backend name for `torch.distributed.init_process_group`. It is registered with torch when
        this returns.
        """

    @property
    def kernels(self) -> FusedKernels: ...

    def memory_info(self) -> MemoryInfo:
        """Return the state of the memory pool after all recorded operators have run.

        Memory in use consists of live tensors, graphs, and the workspace. The workspace holds
        temporary tensors of recipes. It is as large as the largest recipe needed, and is never
        released.
        """

    def peak_bytes(self) -> int:
        """Return the largest use of the pool since `reset_peak`, after all recorded operators have
        run.
        """

    def reset_peak(self) -> None:
        """Reset the peak to the present use, after all recorded operators have run."""

    def zeros(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """Allocate a zeroed tensor on the device.

        Raises:
            MemoryError: the pool has too little free memory.
        """

    def pinned(self, num_elements: int) -> "Tensor":
        """Allocate int32 on the host, in pinned memory if possible, which the card can read
        directly.
        """

    def record_event(self) -> DeviceEvent:
        """Record an event after all copies and launches so far."""

    def synchronize(self) -> None:
        """Launch all recorded operators and wait for the device."""

    def now_s(self) -> float:
        """Return the seconds of the device's clock, to time work on the device.

        This is the host's clock, or the predicted time of a simulated card.
        """

    def mark_step(self) -> None:
        """End the recorded graph and launch it. Does nothing in eager mode."""

    def wrap_in_hpu_graph(self, module: "nn.Module") -> "nn.Module":
        """Make `module` capture one graph per input signature and replay it. Only in lazy mode.

        Changes `module.forward` in place and adds `module.clear_cache()`. A call accepts
        `warmup_mode=True` (a known graph is not replayed: the outputs are stale) and
        `bypass_hpu_graphs=True`. Outputs are static: the next replay overwrites them. Tensors are
        part of the signature by shape, everything else by value, so changing numbers must be in
        tensors. Only tensors that are reachable from the returned object stay allocated.
        """

    def compile(self, function: "Callable[..., Any]", **options: object) -> "Callable[..., Any]":
        """Return a function whose calls run as compiled recipes; eager mode only.

        Args:
            function: a function or a module; it does not change.
            options: options of `torch.compile`, without the backend.
        """

    def compile_module(self, module: "nn.Module", **options: object) -> None:
        """Let calls of a module run as compiled recipes from now on; see `compile`."""

    def counters(self) -> DeviceCounters: ...

    def warmed_section(self) -> AbstractContextManager[None]:
        """Declare that everything inside was warmed up. A strict simulation fails where a card
        would stall to compile.
        """

    @property
    def can_compile_only(self) -> bool:
        """Whether this build of the bridge can compile without launching. If not, this is
        logged.
        """

    def compile_only(self) -> AbstractContextManager[None]:
        """Compile recipes inside the context without launching them: the results of operators are
        garbage.

        It is not documented whether a card allocates memory for recipes that are not launched; the
        workspace of a simulated card does not grow.
        """

    def dry_run(self) -> AbstractContextManager[None]:
        """Declare that the results of operators inside the context are not used.

        A real card computes as usual; a simulated one takes the same memory and counts the same
        time, but computes nothing.
        """

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random generator. Its numbers differ from the CPU's for the same
        seed.
        """
