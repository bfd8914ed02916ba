// The activations of MLPs.
#pragma once

#include "linear_format.h"
#include "simd.h"

namespace VLLM_ISA {

// out = round(silu(gate)) * up. x: [2 * size], gate then up.
template <typename T>
inline void silu_and_mul_row(const T* x, T* out, int64_t size) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    // Below -88, e^-g would overflow, and the result is 0 already.
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

// Returns GELU: x * P(X <= x) for a normally distributed X. The logarithm of P(X > |x|) is nearly a
// parabola: a polynomial, fitted on [0, 13], gives P within 3e-8 and needs no division. Below -13
// the result is 0.
VLLM_INLINE Vec gelu(Vec x) {
  x = max(splat(-13.0f), x);
  const Vec z = min(splat(13.0f), max(x, -x));
  Vec p = splat(-2.7591866569309786e-9f);
  p = fma(p, z, splat(1.3145863420049864e-7f));
  p = fma(p, z, splat(-2.484817969161668e-6f));
  p = fma(p, z, splat(2.3115087969927117e-5f));
  p = fma(p, z, splat(-9.319321543443948e-5f));
  p = fma(p, z, splat(-2.006952272495255e-4f));
  p = fma(p, z, splat(5.048828199505806e-3f));
  p = fma(p, z, splat(-3.6499593406915665e-2f));
  p = fma(p, z, splat(-3.182606101036072e-1f));
  p = fma(p, z, splat(-7.978900671005249e-1f));
  p = fma(p, z, splat(-6.931470632553101e-1f));
  const Vec tail = exp(p);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// Returns the tanh approximation of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415).
VLLM_INLINE Vec gelu_tanh(Vec x) {
  const Vec g = max(splat(-10.0f), x);  // below -10 the result is 0, and exp only accepts up to 88
  return g / (1.0f + exp(-1.5957691f * fma(0.044715f * g * g, g, g)));
}

// Returns the sigmoid approximation of GELU (Hendrycks and Gimpel 2016), x * sigmoid(1.702 x).
VLLM_INLINE Vec quick_gelu(Vec x) {
  const Vec g = max(splat(-50.0f), x);  // below -50 the result is 0, and exp only accepts up to 88
  return g / (1.0f + exp(-1.702f * g));
}

using vllm_cpu::Activation;

VLLM_INLINE Vec activate(Activation activation, Vec x) {
  if (activation == Activation::kQuickGelu) return quick_gelu(x);
  return activation == Activation::kGelu ? gelu(x) : gelu_tanh(x);
}

// xIELU (Huang and Schlag 2024, arXiv 2411.13010): out = p x^2 + x / 2 for x above zero, and n (e^x
// - 1 - x) + x / 2 for other x.
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
