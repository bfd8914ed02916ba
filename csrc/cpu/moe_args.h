// What the kernel of a mixture of experts is told; what it does is said in moe.h.
#pragma once

#include <cstdint>

#include "linear_format.h"

namespace vllm_cpu {

// The middle of an expert. kSilu: silu(gate) * up. kGeluTanh: gelu(gate) * up, with tanh (Gemma 4).
// kClampedSwiglu: gate * sigmoid(alpha * gate) * (up + 1), of gates up to `limit` and ups between
// -limit and limit (GPT-OSS). kSquaredRelu: max(up, 0)^2; nothing is multiplied with a gate, which is
// the same weight as the up.
VLLM_ENUM(ExpertActivation, kSilu, kGeluTanh, kClampedSwiglu, kSquaredRelu);

// The weights of a chosen expert: its part of a softmax over all, or over the chosen ones; its
// sigmoid, or that divided by the sum of the chosen ones. kSparseMixer: its part of a softmax over
// itself and the experts near below it, without those chosen before.
VLLM_ENUM(Routing, kSoftmax, kSoftmaxOfChosen, kSigmoid, kSigmoidOfChosen, kSparseMixer);

constexpr int64_t kMaxTopK = 64;
constexpr int64_t kMaxExpertGroups = 64;

// All gates and ups are [I, H] in one format, with the same order of inputs in an expert's two; all
// downs are [H, I] in one format. Biases are of the type of the activations.
VLLM_STRUCT(Experts,
  const LinearWeight* const* gate;  // [num_experts]
  const LinearWeight* const* up;
  const LinearWeight* const* down;
  const void* gate_up_bias;  // [num_experts, 2 I], gate then up; or null, as of kSquaredRelu
  const void* down_bias;     // [num_experts, H]; or null
  int64_t num_experts;
  int64_t first_id;       // of these experts
  int64_t has_others;     // 1: other ids are those of experts of other ranks, which are left out
  int64_t has_orders;     // 1 when a gate has an order of inputs
  int64_t scales_inputs;  // 1: the weight of a choice multiplies x, and not the result
  ExpertActivation activation;
  float alpha, limit;  // of kClampedSwiglu
);

template <typename T>
VLLM_STRUCT(MoeArgs,
  const Experts* experts;
  const T* x;            // [num_tokens, H], tokens x_stride apart
  const int64_t* ids;    // [num_tokens, top_k], tokens ids_stride apart
  const float* weights;  // the same, weights_stride apart
  T* out;                // [num_tokens, H], dense
  int64_t num_tokens, top_k, x_stride, ids_stride, weights_stride;
);

// The choices of a token as `route` writes them: top_k ids (int64_t), then as many weights (float).
// Rows are whole multiples of 8 bytes.
constexpr int64_t choice_bytes(int64_t top_k) { return 8 * (top_k + (top_k + 1) / 2); }

}  // namespace vllm_cpu
