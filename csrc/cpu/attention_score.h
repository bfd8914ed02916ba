// What is done to the product of a query and a key before the softmax, in both phases.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

// In this order.
struct ScoreOptions {
  float scale;
  float soft_cap;       // cap * tanh(score / cap); 0: none
  const float* slopes;  // ALiBi: minus the slope of the head times the distance of the key, or null
  int64_t window;       // most recent keys a query sees; 0: all. For decode the caller leaves the
                        // others out.
};

// tanh within 3e-7. By its series near zero, where the difference from one would cancel.
VLLM_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = fma(square, splat(62.0f / 2835), splat(-17.0f / 315));
  p = fma(p, square, splat(2.0f / 15));
  p = fma(p, square, splat(-1.0f / 3));
  const Vec near = fma(p * square, x, x);
  const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return square < 0.09f ? near : far;
}

}  // namespace VLLM_ISA
