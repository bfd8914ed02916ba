"""The contract of every device-dependent operator, written once for all implementations.

Knows tensors, but no model, request, scheduler or device: `native` (torch), `cpu` (csrc) and `hpu`
(bridge) each implement this class, and the platform chooses one at start.

In shapes, T is the number of tokens of one forward pass. Float tensors of one call have one dtype
unless a line says otherwise. Tokens may be strided (a slice of a packed QKV tensor): only the
dimensions after the first have to be dense.

An index out of range raises IndexError if the host can see it (on the CPU); on a device its effect
is undefined.
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

    Stateless: the same object is used by every layer and forward pass. Operators run under
    `torch.inference_mode()`; none of them supports autograd.
    """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: int = 0) -> Tensor:
        """Divide every vector by its root mean square, then multiply by the weight.

        All of it is done in float32 and rounded once, as Gemma, OLMo 2 and GPT-OSS were trained.
        Llama rounds before it multiplies as well, which only adds to the error.

        Args:
            x: [..., hidden]. A head norm passes [T, H, D]. Not changed.
            weight: [hidden].
            eps: added to the mean of squares.
            offset: added to the weight: 1 if the checkpoint stores weights minus 1.

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

        May write both results over x and residual: the caller must only use the returned tensors
        afterwards.

        Args:
            x: [T, hidden], the output of the previous layer.
            residual: [T, hidden].
            weight: [hidden].
            eps: added to the mean of squares.
            offset: offset; see `rms_norm`.

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
        """Shift and scale every vector to mean 0 and variance 1, then apply weight and bias.

        All of it is done in float32 and rounded once.

        Args:
            x: [..., hidden]. Not changed.
            weight: [hidden]; for x [T, H, hidden] also [H, hidden], one per head; None: 1.
            bias: [hidden]; None: 0.
            eps: added to the variance.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: weight or bias do not have the sizes of the last dimensions of x.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute `silu(x[..., :I]) * x[..., I:]`, the activation of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """

    @abstractmethod
    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Compute GELU: x times the probability that a standard normal value is below x.

        arXiv 1606.08415.

        Args:
            x: [..., N]. Not changed.
            is_tanh: use the tanh approximation.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def squared_relu(self, x: Tensor) -> Tensor:
        """Compute the squares of positive elements, and 0 for all others (arXiv 2109.08668).

        Args:
            x: [..., N]. Not changed.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        """Compute xIELU (Huang and Schlag 2024, arXiv 2411.13010).

        p x^2 + x / 2 for positive elements, and n (e^x - 1 - x) + x / 2 for the others.

        Args:
            x: [..., N]. Not changed.
            alpha_p: [1]: p is its softplus.
            alpha_n: [1]: n is its softplus plus 1 / 2.

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, is_tanh: bool) -> Tensor:
        """Compute `gelu(x[..., :I]) * x[..., I:]`, the activation of a gated MLP.

        Args:
            x: [..., 2 * I]: gate, then up. Not changed.
            is_tanh: use the tanh approximation of gelu.

        Returns:
            [..., I], new and dense.

        Raises:
            ValueError: the last dimension is odd.
        """

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Compute cap * tanh(x / cap), which is between -cap and cap (Gemma 2; arXiv 2408.00118).

        Args:
            x: any shape. Not changed.
            cap: above 0.

        Returns:
            A new dense tensor, shape and dtype of x; rounded after each of the three operations.
        """

    @abstractmethod
    def scale_rows(self, x: Tensor, factor: Tensor, is_gate: bool = False) -> Tensor:
        """Multiply x by one value per token.

        Args:
            x: [T, ...]. Not changed.
            factor: [T, 1].
            is_gate: multiply by the sigmoid of the factor, rounded to the dtype of x.

        Returns:
            A new dense tensor, shape and dtype of x.

        Raises:
            ValueError: factor does not have one value per token.
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
        """Run the Mamba-2 scan over one token of each of B sequences; see `state_space.scan_heads`.

        All tensors except indices are float32.

        Args:
            states: [rows, H, P, N]; the recurrent states of the sequences are updated in place.
            rows: [B] int64, index of the state of each sequence, none twice.
            is_new: [B] bool, sequences that begin with the state 0, whatever `states` contains.
            x: [B, H, P].
            steps: [B, H] time steps.
            decay: [H] negative.
            b: [B, G, N].
            c: [B, G, N].

        Returns:
            [B, H, P]

        Raises:
            IndexError: an index of a state is out of range.
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
        """Apply the gated delta rule to one token of each of B sequences; see `delta_rule`.

        All tensors except indices are float32.

        Args:
            states: [rows, H, V, K]; the recurrent states of the sequences are updated in place.
            rows: [B] int64, index of the state of each sequence, none twice.
            is_new: [B] bool, sequences that begin with the state 0, whatever `states` contains.
            q: [B, G, K].
            k: [B, G, K].
            v: [B, H, V].
            logs: [B, H] logarithm of the decay of the state, at most 0; or [B, H, K], one for each
                element of keys.
            beta: [B, H].

        Returns:
            [B, H, V]

        Raises:
            IndexError: an index of a state is out of range.
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
            options: how many experts, from which groups, and how their weights are computed.
            bias: [E] float32: experts are chosen by their score plus this bias, where the score is
                their value of the softmax or their sigmoid. Weights do not include the bias.
            scales: [E] float32: the weight of a chosen expert is multiplied by its scale.

        Returns:
            (ids [T, k] int64, weights [T, k] float32) for `moe`; the largest first.

        Raises:
            ValueError: top_k is out of range, or the shape or dtype of `bias` or `scales` is wrong.
        """

    @property
    def fp8_max(self) -> float:
        """The largest e4m3 value on this device."""
        return torch.finfo(torch.float8_e4m3fn).max

    @abstractmethod
    def to_fp8(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * factor, rounded to nearest and limited to the range of the device; NaN is
        kept.

        Args:
            x: any shape.
            factor: [1] float32.
            dtype: one of `attention_interface.FP8_DTYPES`.
        """

    @abstractmethod
    def from_fp8(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute x * scale in `dtype`.

        Args:
            x: tensor of one of `attention_interface.FP8_DTYPES`, any shape.
            scale: [1] float32.
            dtype: data type of the result.
        """

    @abstractmethod
    def round_to_fp8(self, x: Tensor, factor: float, largest: int) -> Tensor:
        """Round x * factor to the nearest values of e4m3, in the dtype of x; NaN is kept.

        Args:
            x: [..., N], bfloat16 or float32. Not changed.
            factor: multiplies x; rounded to float32.
            largest: the results are limited to [-largest, largest].

        Returns:
            A new dense tensor, shape and dtype of x.
        """

    @abstractmethod
    def prepare_weight(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedWeight:
        """Convert a quantized weight to the layout of the device.

        Args:
            weight: weight on the host. Must not be used afterwards.
            dtype: data type of the inputs.

        Returns:
            The weight, on the host; if it is a module, it can be moved to the device.

        Raises:
            ValueError: the device cannot multiply with it; the message says why.
        """

    @abstractmethod
    def prepare_heads(self, matrices: Tensor) -> PreparedHeads:
        """Convert matrices, one for each head, to the layout of the device.

        Args:
            matrices: [H, I, O], on the device. Not changed.
        """

    @abstractmethod
    def prepare_table(self, weight: StoredWeight, dtype: torch.dtype) -> PreparedTable | None:
        """Convert the quantized weight of embeddings or of an output head to the layout of the
        device.

        For the arguments see `prepare_weight`.

        Returns:
            None: the device has no kernel for it; it has to be dequantized.
        """

    def expect_experts(self, options: ExpertOptions) -> None:
        """Prepare for `moe` with these options; models call this while they are loaded.

        Compiled code could not ask which operators the device has.
        """

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

    @abstractmethod
    def prepare_adapter(
        self,
        layers: Sequence[AdaptedLayer],
        parts: Sequence[LoRAWeights | None],
        dtype: torch.dtype,
        rest: Rest = no_rest,
    ) -> PreparedAdapter:
        """Convert a LoRA adapter to the layout of the device.

        Args:
            layers: layers of the model.
            parts: weights of the adapter by projection index, on the host; None: not changed.
            dtype: data type of the inputs.
            rest: called between two projections, to pause.
        """

    @abstractmethod
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

    @abstractmethod
    def rows_of_part(
        self, embed: Callable[[Tensor], Tensor], ids: Tensor, first_id: int, num_rows: int
    ) -> Tensor:
        """Look up rows of a table that is split over ranks; ids of other ranks give zeros.

        Args:
            embed: looks up rows of this rank's part by their indices in it, [T] -> [T, W].
            ids: [T] int64, in the whole table.
            first_id: first id of this part.
            num_rows: number of rows of this part.

        Returns:
            [T, W], zeros for ids of other parts.
        """
