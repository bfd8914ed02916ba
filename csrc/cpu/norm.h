// RMSNorm, with and without adding the residual first, and LayerNorm.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), in float for every T and rounded once. out may
// be x.
template <typename T>
inline void rms_norm_row(const T* x, const T* weight, T* out, int64_t hidden, float eps,
                         float offset) {
  Vec squares[4] = {};  // four sums, because each addition to a single sum would wait for the one
                        // before
  int64_t i = 0;
  for (; i + 4 * kLanes <= hidden; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec v = load(x + i + k * kLanes);
      squares[k] = fma(v, v, squares[k]);
    }
  }
  for_each_vector(hidden - i, [&](int64_t j, int64_t count) {
    const Vec v = load(x + i + j, count);
    squares[0] = fma(v, v, squares[0]);
  });
  const float sum = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const Vec scale = splat(1.0f / __builtin_sqrtf(sum / static_cast<float>(hidden) + eps));
  const Vec added = splat(offset);
  for_each_vector(hidden, [&](int64_t j, int64_t count) {
    store(out + j, load(x + j, count) * scale * (load(weight + j, count) + added), count);
  });
}

// residual = x + residual; out = rms_norm(residual). out may be x.
template <typename T>
inline void add_rms_norm_row(const T* x, T* residual, const T* weight, T* out, int64_t hidden,
                             float eps, float offset) {
  for_each_vector(hidden, [&](int64_t i, int64_t count) {
    store(residual + i, load(x + i, count) + load(residual + i, count), count);
  });
  rms_norm_row(residual, weight, out, hidden, eps, offset);
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias, rounded once. weight and bias may be null,
// out may be x.
template <typename T>
inline void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t size,
                           float eps) {
  const float count = static_cast<float>(size);
  Vec sums = {}, squares = {};
  for_each_vector(size, [&](int64_t i, int64_t n) { sums = sums + load(x + i, n); });
  const float mean = sum_lanes(sums) / count;
  const auto centered = [&](int64_t i, int64_t n) { return load(x + i, n) - splat(mean); };
  for_each_vector(size, [&](int64_t i, int64_t n) {
    const Vec v = centered(i, n);
    squares = fma(v, v, squares);
  });
  // Lanes after the end of the row were loaded as zeros, so each has added mean^2.
  const float padding = static_cast<float>((kLanes - size % kLanes) % kLanes);
  const float variance = (sum_lanes(squares) - padding * mean * mean) / count;
  const Vec scale = splat(1.0f / __builtin_sqrtf(variance + eps));
  for_each_vector(size, [&](int64_t i, int64_t n) {
    Vec normed = centered(i, n) * scale;
    if (weight != nullptr) normed = normed * load(weight + i, n);
    if (bias != nullptr) normed = normed + load(bias + i, n);
    store(out + i, normed, n);
  });
}

}  // namespace VLLM_ISA
