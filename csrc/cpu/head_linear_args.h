// Arguments of the kernel in head_linear.h.
#pragma once

#include <cstdint>

#include "linear_format.h"

namespace vllm_cpu {

// out[t, h] = weight[h] @ x[t, h]. The matrices of all heads are one packed weight [num_heads *
// out_features, in_features]. The rows of each head are padded to whole panels.
template <typename T>
VLLM_STRUCT(HeadLinearArgs,
  const LinearWeight* weight;
  const T* x;  // [num_tokens, num_heads, in_features], heads dense
  T* out;      // [num_tokens, num_heads, out_features], heads dense
  int64_t num_tokens, num_heads, out_features;
  int64_t x_stride, x_head_stride;      // elements from one token or head to the next
  int64_t out_stride, out_head_stride;  // likewise for out
);

}  // namespace vllm_cpu
