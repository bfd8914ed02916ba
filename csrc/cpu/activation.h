// The activations of MLPs.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

// out = round(silu(gate)) * up. x: [2 * size], gate then up.
template <typename T>
inline void silu_and_mul_row(const T* x, T* out, int64_t size) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    // Below -88 e^-g stops growing, and the quotient is nothing already.
    const Vec g = max(splat(-88.0f), load(x + i, count));
    const Vec silu = round_to<T>(g / (1.0f + exp(-g)));
    store(out + i, silu * load(x + size + i, count), count);
  });
}

// out = g * sigmoid(alpha * g) * (u + 1), of gates g up to `limit` and ups u between -limit and limit
// (GPT-OSS; OpenAI 2025, arXiv 2508.10925). x: [2 * size], gate then up. Rounded once.
template <typename T>
inline void clamped_swiglu_row(const T* x, T* out, int64_t size, float alpha, float limit) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Vec g = min(splat(limit), load(x + i, count));
    const Vec u = max(splat(-limit), min(splat(limit), load(x + size + i, count)));
    store(out + i, g / (1.0f + exp(-alpha * g)) * (u + 1.0f), count);
  });
}

// out = max(x, 0)^2 (So et al. 2021, arXiv 2109.08668). NaN stays NaN.
template <typename T>
inline void squared_relu_row(const T* x, T* out, int64_t size) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Vec v = max(Vec{}, load(x + i, count));
    store(out + i, v * v, count);
  });
}

// x * P(X <= x) of a normal X, with erf by formula 7.1.26 of Abramowitz and Stegun (1964), whose
// error is at most 1.5e-7.
VLLM_INLINE Vec gelu(Vec x) {
  const Vec z = max(x, -x) * 0.70710678f;
  const Vec t = 1.0f / fma(z, splat(0.3275911f), splat(1.0f));
  Vec p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const Vec tail = 0.5f * p * t * exp(-z * z);  // P(X > |x|)
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// The same with tanh for erf (Hendrycks and Gimpel 2016, arXiv 1606.08415).
VLLM_INLINE Vec gelu_tanh(Vec x) {
  const Vec g = max(splat(-10.0f), x);  // nothing is left below, and e^88 is as far as exp goes
  return g / (1.0f + exp(-1.5957691f * fma(0.044715f * g * g, g, g)));
}

// p x^2 + x / 2 above zero, n (e^x - 1 - x) + x / 2 below it (Huang and Schlag 2024, arXiv
// 2411.13010).
template <typename T>
inline void xielu_row(const T* x, T* out, int64_t size, float p, float n) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Vec v = load(x + i, count);
    const Vec below = n * (exp(min(splat(-1e-6f), v)) - 1.0f - v);
    store(out + i, (v > 0.0f ? p * v * v : below) + 0.5f * v, count);
  });
}

// out = round(gelu(gate)) * up; see silu_and_mul_row.
template <typename T>
inline void gelu_and_mul_row(const T* x, T* out, int64_t size, bool is_tanh) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Vec g = load(x + i, count);
    const Vec activated = round_to<T>(is_tanh ? gelu_tanh(g) : gelu(g));
    store(out + i, activated * load(x + size + i, count), count);
  });
}

}  // namespace VLLM_ISA
