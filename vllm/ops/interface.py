"""The contract of every device-dependent operator, written once for all implementations.

Knows tensors. Knows no model, no request, no scheduler, and no device: `native` (torch), `cpu`
(csrc) and `hpu` (bridge) each implement this class, and the platform picks one at start.

In shapes, T is tokens of one launch. Float tensors of one call have one dtype unless a line says
otherwise. Rows may be strided (a slice of a packed QKV tensor): only the dimensions after the first
have to be dense.

An index out of range raises IndexError where the host can see it (on the CPU); on a device its
effect is undefined.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm.ops.attention_interface import AttentionOps
from vllm.ops.expert_options import (
    NO_BIASES,
    SILU_EXPERTS,
    ExpertBiases,
    ExpertOptions,
    RoutingOptions,
)
from vllm.ops.lora_weights import AdaptedLayer, AdaptedRows, LoRAHeads, LoRAWeights, PreparedAdapter
from vllm.ops.prepared import PreparedExperts, PreparedHeads, PreparedTable, PreparedWeight
from vllm.ops.stored_weight import StoredWeight
from vllm.utils.background_work import Rest, no_rest


class Ops(AttentionOps):
    """One implementation of every operator; the attention operators are in `AttentionOps`.

    Stateless: the same object serves every layer and every launch. Operators run under
    `torch.inference_mode()`; none of them supports autograd.
    """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        """Scale every row to unit root mean square, then multiply by the weight.

        All of it is done in float32 and rounded once, as Gemma, OLMo 2 and GPT-OSS were trained.
        Llama rounds before it multiplies as well, which only adds to the error.

        Args:
            x: [..., hidden]. A head norm passes [T, H, D]. Not changed.
            weight: [hidden].
            eps: added to the mean of squares.
            offset: added to the weight: 1 where a checkpoint has weights less one.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: weight does not have the size of the last dimension of x.
        """

    @abstractmethod
    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compute `new_residual = x + residual`, and `rms_norm` of it, in one pass.

        May write both results over x and residual: the caller owns both, and uses only what is
        returned from then on.

        Args:
            x: [T, hidden], the output of the previous layer.
            residual: [T, hidden].
            weight: [hidden].
            eps: added to the mean of squares.
            offset: as in `rms_norm`.

        Returns:
            (normed, new_residual), both [T, hidden]. The sum is rounded to the dtype of x
            before it is normalized, as an unfused model does.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """

    @abstractmethod
    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Shift and scale every row to mean 0 and variance 1, then apply weight and bias.

        All of it is done in float32 and rounded once.

        Args:
            x: [..., hidden]. Not changed.
            weight: [hidden]; of x [T, H, hidden] also [H, hidden], for each head its own; None: 1.
            bias: [hidden]; None: 0.
            eps: added to the variance.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: weight or bias do not have the sizes of the last dimensions of x.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute `silu(x[..., :I]) * x[..., I:]`, the middle of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """

    @abstractmethod
    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Multiply x by the probability that a normally distributed value is below x (arXiv
        1606.08415).

        Args:
            x: [..., N]. Not changed.
            is_tanh: the approximation by tanh.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def squared_relu(self, x: Tensor) -> Tensor:
        """Return the squares of positive elements, and zero for the others (arXiv 2109.08668).

        Args:
            x: [..., N]. Not changed.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        """Return p x^2 + x / 2 of positive elements, and n (e^x - 1 - x) + x / 2 of the others
        (xIELU, Huang and Schlag 2024, arXiv 2411.13010).

        Args:
            x: [..., N]. Not changed.
            alpha_p: [1]: its softplus is p.
            alpha_n: [1]: its softplus and 1 / 2 are n.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Compute `gelu(x[..., :I]) * x[..., I:]`, the middle of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.
            is_tanh: the approximation of gelu by tanh.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), which stays between -cap and cap (Gemma 2; arXiv 2408.00118).

        Args:
            x: any shape. Not changed.
            cap: above 0.

        Returns:
            A new dense tensor, shape and dtype of x; rounded after each of the three steps.
        """

    @abstractmethod
    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        """Multiply x by one value per token.

        Args:
            x: [T, ...]. Not changed.
            factor: [T, 1].
            is_gate: the value is the sigmoid of the factor, rounded to the dtype of x.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: factor does not have one number per token.
        """

    @abstractmethod
    def scan_tokens(
        self,
        states: Tensor,
        rows: Tensor,
        is_new: Tensor,
        x: Tensor,
        steps: Tensor,
        decay: Tensor,
        b: Tensor,
        c: Tensor,
    ) -> Tensor:
        """Run the scan of Mamba-2 over one token of each of B sequences; see
        `state_space.scan_heads`.

        All but indices are float32.

        Args:
            states: [rows, H, P, N]; the states of the sequences are replaced.
            rows: [B] int64, no row twice.
            is_new: [B] bool, sequences that begin with the state 0, whatever their rows hold.
            x: [B, H, P].
            steps: [B, H] time steps.
            decay: [H] negative.
            b, c: [B, G, N].

        Returns:
            [B, H, P]

        Raises:
            IndexError: a row is out of range.
        """

    @abstractmethod
    def delta_tokens(
        self,
        states: Tensor,
        rows: Tensor,
        is_new: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logs: Tensor,
        beta: Tensor,
    ) -> Tensor:
        """Apply the gated delta rule to one token of each of B sequences, as
        `delta_rule.run_delta_rule` does.

        All but indices are float32.

        Args:
            states: [rows, H, V, K]; the B rows are replaced.
            rows: [B] int64, no row twice.
            is_new: [B] bool, sequences that begin with the state 0, whatever their rows hold.
            q, k: [B, G, K].
            v: [B, H, V].
            logs: [B, H] logarithm of what is left of a state, at most 0; or [B, H, K], of each
                element of keys.
            beta: [B, H].

        Returns:
            [B, H, V]

        Raises:
            IndexError: a row is out of range.
        """

    @abstractmethod
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
            options: how many, from which, and how much they count.
            bias: [E] float32: choices are by the score of each expert, which is its part of the
                softmax or its sigmoid, plus this. Weights are without it.
            scales: [E] float32: the weight of a chosen expert is multiplied by its own.

        Returns:
            (ids [T, k] int64, weights [T, k] float32), as `moe` takes them; the largest first.

        Raises:
            ValueError: top_k is out of range, or `bias` or `scales` are not as said.
        """

    @property
    def fp8_max(self) -> float:
        """The largest number of e4m3 on this device."""
        return torch.finfo(torch.float8_e4m3fn).max

    @abstractmethod
    def to_fp8(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * factor, rounded to nearest and limited to the range of the device; NaN stays
        NaN.

        Args:
            x: any shape.
            factor: [1] float32.
            dtype: one of `attention_interface.FP8_DTYPES`.
        """

    @abstractmethod
    def from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * scale, of `dtype`.

        Args:
            x: of one of `attention_interface.FP8_DTYPES`, any shape.
            scale: [1] float32.
            dtype: of the result.
        """

    @abstractmethod
    def round_to_fp8(self, x: Tensor, factor: float, largest: int) -> Tensor:
        """Round x * factor to the nearest values of e4m3, in the dtype of x; NaN stays NaN.

        Args:
            x: [..., N], bfloat16 or float32. Not changed.
            factor: rounded to float32.
            largest: the results are at most this, and at least its negative.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        """Bring a quantized weight into the layout that runs.

        Args:
            weight: on the host. Must not be used afterwards.
            dtype: of the inputs.

        Returns:
            On the host; one with parameters can be moved to the device.

        Raises:
            ValueError: the device cannot multiply with it; the message says why.
        """

    @abstractmethod
    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        """Bring matrices, one for each head, into the layout of the device.

        Args:
            matrices: [H, I, O], on the device. Not changed.
        """

    @abstractmethod
    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        """Bring the quantized weight of embeddings, or of a head that shares it, into the layout
        that runs.

        Args: as of `prepare_weight`.

        Returns:
            None: the device has no kernel for it; it has to be dequantized.
        """

    def expect_experts(self, options: ExpertOptions) -> None:
        """Get ready for `moe` with these options; models call this while they are loaded. Compiled
        code could not ask what the device has."""

    @abstractmethod
    def prepare_experts(
        self,
        gate: Sequence[StoredWeight],
        up: Sequence[StoredWeight],
        down: Sequence[StoredWeight],
        dtype: torch.dtype,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> PreparedExperts | None:
        """Bring the quantized weights of experts into the layout that runs.

        Args:
            gate, up: [I, hidden] for each expert, on the host; without gates none in `gate`.
            down: [hidden, I] for each expert.
            dtype: of the inputs.
            biases, options: as in `moe`.

        Returns:
            None: the device has no kernel for them; they have to be dequantized.

        Raises:
            ValueError: experts are stored in different ways.
        """

    @abstractmethod
    def prepare_adapter(
        self,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LoRAWeights | None],
        dtype: torch.dtype,
        rest: Rest = no_rest,
    ) -> PreparedAdapter:
        """Bring an adapter into the layout that runs.

        Args:
            layers: of the model.
            parts: of the adapter by their numbers, on the host; None: not changed.
            dtype: of the inputs.
            rest: between two projections.
        """

    @abstractmethod
    def add_low_rank(
        self, y: Tensor, x: Tensor, layer: AdaptedLayer | LoRAHeads, rows: AdaptedRows
    ) -> Tensor:
        """Add `(x @ a.T) @ b.T` of the adapter of each row to y, for all projections of a layer.

        Sums are made in float32, and the result is rounded once more. Rows without an adapter keep
        their bits.

        Args:
            y: [T, out_features or more], what the layer computes; of H heads [T, H, out_features
                or more]. Changed in place.
            x: [T, in_features], its inputs; of H heads [T, H, in_features].
            layer: which one.
            rows: the adapters of the T rows.

        Returns:
            y

        Raises:
            IndexError: a row has an adapter that is not there.
            ValueError: shapes do not fit.
        """

    @abstractmethod
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
        """Compute the sum over a token's k experts e of `weight * (act(x @ gate_up[e].T) @
        down[e].T)`. E experts of intermediate size I.

        The output of an expert is rounded to the dtype of x, the weighted sum is made in float32.

        Args:
            x: [T, hidden]. Not changed.
            topk_ids: [T, k], int64, each below E. An id may occur twice in a row.
            topk_weights: [T, k], float32.
            gate_up: [E, 2 * I, hidden], gate then up; without gates [E, I, hidden].
            down: [E, hidden, I].
            biases: of the experts.
            options: act, what the weights multiply, and which experts these are.

        Returns:
            [T, hidden], new and dense.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """

    @abstractmethod
    def rows_of_part(
        self, embed: Callable[[Tensor], Tensor], ids: Tensor, first_id: int, num_rows: int
    ) -> Tensor:
        """Look up rows of a table of which other ranks have the other parts.

        Args:
            embed: gives the rows of this part for their indices there, [T] -> [T, W].
            ids: [T] int64, in the whole table.
            first_id: of this part.
            num_rows: of this part.

        Returns:
            [T, W], zeros for ids of other parts.
        """
