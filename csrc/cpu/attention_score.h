// Operations on the dot product of query and key before the softmax, for prefill and decode.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

// The earlier keys that a query attends to.
struct Sight {
  int64_t window;      // number of most recent keys, including the key of the query; 0: all
  int64_t chunk_size;  // only keys of the chunk of the query; 0: no chunks

  // Returns the first key that a query at `position` attends to; 0 for an empty request, whose
  // position is -1.
  int64_t first_key(int64_t position) const {
    const int64_t of_window = window > 0 ? position + 1 - window : 0;
    const int64_t of_chunk = chunk_size > 0 ? position - position % chunk_size : 0;
    const int64_t first = of_window > of_chunk ? of_window : of_chunk;
    return first > 0 ? first : 0;
  }
};

// Returns the scale of a kv head in a cache of 8-bit floats; 1 for other caches.
VLLM_INLINE float cache_scale(const float* scales, int64_t g) {
  return scales != nullptr ? scales[g] : 1.0f;
}

constexpr float kLog2E = 1.44269504f;

// Operations on a score, applied in the order of the fields.
struct ScoreOptions {
  float scale;          // includes the scale of the keys in the cache
  float soft_cap;       // cap * tanh(score / cap); 0: no soft cap
  const float* slopes;  // ALiBi: subtracts the slope of the head times the distance of the key; or
                        // null
  Sight sight;          // for prefill only; in decode the caller passes only keys that the query attends to

  // Whether the scale is only applied together with the exponential of the softmax.
  bool scales_late() const { return soft_cap == 0 && slopes == nullptr && scale > 0; }
  // Returns the factor that turns finished scores into exponents of two.
  float to_exponent() const { return kLog2E * (scales_late() ? scale : 1.0f); }
};

// Returns 1 / (sum of the weights, plus the weight of the sink). Weights in `total` are relative to
// the score `largest` (attention sinks; Xiao et al. 2023, arXiv 2309.17453).
VLLM_INLINE Vec inverse_with_sink(Vec largest, Vec total, Vec sink) {
  const Vec top = max(largest, sink), shrink = exp(largest - top);
  return shrink / fma(total, shrink, exp(sink - top));
}

}  // namespace VLLM_ISA
