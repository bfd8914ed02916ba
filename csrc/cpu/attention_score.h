// What is done to the product of a query and a key before the softmax, in both phases.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

// Which keys before it a query sees.
struct Sight {
  int64_t window;      // most recent keys, its own included; 0: all
  int64_t chunk_size;  // only keys of its own chunk; 0: of all

  // The first key that a query at `position` sees; 0 for the -1 of an empty request.
  int64_t first_key(int64_t position) const {
    const int64_t of_window = window > 0 ? position + 1 - window : 0;
    const int64_t of_chunk = chunk_size > 0 ? position - position % chunk_size : 0;
    const int64_t first = of_window > of_chunk ? of_window : of_chunk;
    return first > 0 ? first : 0;
  }
};

// What numbers of a kv head in a cache of eight-bit floats are multiplied by.
VLLM_INLINE float cache_scale(const float* scales, int64_t g) {
  return scales != nullptr ? scales[g] : 1.0f;
}

constexpr float kLog2E = 1.44269504f;

// In this order.
struct ScoreOptions {
  float scale;          // those of the keys in the cache included
  float soft_cap;       // cap * tanh(score / cap); 0: none
  const float* slopes;  // ALiBi: minus the slope of the head times the distance of the key, or null
  Sight sight;          // for prefill; for decode the caller leaves the other keys out

  // Whether scores are multiplied by the scale only as the softmax takes their exponent.
  bool scales_late() const { return soft_cap == 0 && slopes == nullptr && scale > 0; }
  // Factor that makes exponents of two of finished scores.
  float to_exponent() const { return kLog2E * (scales_late() ? scale : 1.0f); }
};

// 1 / (sum of the weights and of the sink's), relative to `largest`, which is the score that the
// weights of `total` are relative to (attention sinks; Xiao et al. 2023, arXiv 2309.17453).
VLLM_INLINE Vec inverse_with_sink(Vec largest, Vec total, Vec sink) {
  const Vec top = max(largest, sink), shrink = exp(largest - top);
  return shrink / fma(total, shrink, exp(sink - top));
}

}  // namespace VLLM_ISA
