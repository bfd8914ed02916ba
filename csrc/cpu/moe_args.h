// Arguments of the kernel of a mixture of experts (moe.h).
#pragma once

#include <cstdint>

#include "linear_format.h"

namespace vllm_cpu {

// The activation of an expert. kSilu: silu(gate) * up. kGeluTanh: gelu(gate) * up, with tanh (Gemma
// 4). kClampedSwiglu: gate * sigmoid(alpha * gate) * (up + 1), with gates limited to `limit` and
// ups to -limit and limit (GPT-OSS). kSquaredRelu: max(up, 0)^2; there is no gate, and `gate` is
// the same weight as up.
VLLM_ENUM(ExpertActivation, kSilu, kGeluTanh, kClampedSwiglu, kSquaredRelu);

// Computation of the weights of the chosen experts: a softmax over all experts or over the chosen
// ones; a sigmoid, or a sigmoid divided by the sum over the chosen ones. kSparseMixer: a softmax
// over the expert itself and the experts near below it, without the experts chosen before.
VLLM_ENUM(Routing, kSoftmax, kSoftmaxOfChosen, kSigmoid, kSigmoidOfChosen, kSparseMixer);

constexpr int64_t kMaxTopK = 64;
constexpr int64_t kMaxExpertGroups = 64;

// The weights of the experts of this rank. All gates and ups are [I, H] in one format; gate and up
// of an expert have the same order of inputs. All downs are [H, I] in one format. Biases have the
// type of the activations.
VLLM_STRUCT(Experts,
  const LinearWeight* const* gate;  // [num_experts]
  const LinearWeight* const* up;
  const LinearWeight* const* down;
  const void* gate_up_bias;  // [num_experts, 2 I], gate then up; or null, as with kSquaredRelu
  const void* down_bias;     // [num_experts, H]; or null
  int64_t num_experts;
  int64_t first_id;       // id of the first of these experts
  int64_t has_others;     // 1: other ids are experts on other ranks, which are left out
  int64_t has_orders;     // 1 if a gate has an order of inputs
  int64_t scales_inputs;  // 1: the weight of a choice multiplies x instead of the result
  ExpertActivation activation;
  float alpha, limit;  // of kClampedSwiglu
);

template <typename T>
VLLM_STRUCT(MoeArgs,
  const Experts* experts;
  const T* x;            // [num_tokens, H], tokens x_stride apart
  const int64_t* ids;    // [num_tokens, top_k], tokens ids_stride elements apart
  const float* weights;  // [num_tokens, top_k], tokens weights_stride elements apart
  T* out;                // [num_tokens, H], dense
  int64_t num_tokens, top_k, x_stride, ids_stride, weights_stride;
);

// Returns the size in bytes of the choices of a token, as `route` writes them: top_k ids (int64_t),
// then top_k weights (float). It is a multiple of 8 bytes.
constexpr int64_t choice_bytes(int64_t top_k) { return 8 * (top_k + (top_k + 1) / 2); }

}  // namespace vllm_cpu
