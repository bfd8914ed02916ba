// Rotates queries and keys by their positions (rotary position embedding), in place.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

// Returns a * cos + b * sin. Each product is rounded to T before the sum, and the callers round cos
// and sin to T, in the same order as Hugging Face models, so that bf16 gives the same bits.
template <typename T>
VLLM_INLINE Vec rotated(Vec a, Vec cos, Vec b, Vec sin) {
  return round_to<T>(a * cos) + round_to<T>(b * sin);
}

// Rotates a head: element i is paired with i + half.
template <typename T>
inline void rotate_neox(T* head, const float* cos, const float* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, int64_t count) {
    const Vec c = round_to<T>(load(cos + i, count)), s = round_to<T>(load(sin + i, count));
    const Vec first = load(head + i, count), second = load(head + half + i, count);
    store(head + i, rotated<T>(first, c, -second, s), count);
    store(head + half + i, rotated<T>(second, c, first, s), count);
  });
}

// Rotates a head: element 2 i is paired with 2 i + 1. Copies through small arrays, because the
// compiler then vectorizes the shuffles.
template <typename T>
inline void rotate_interleaved(T* head, const float* cos, const float* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, int64_t count) {
    float even[kLanes] = {}, odd[kLanes] = {};
    T* const pairs = head + 2 * i;
    for (int64_t k = 0; k < count; ++k) {
      even[k] = to_float(pairs[2 * k]);
      odd[k] = to_float(pairs[2 * k + 1]);
    }
    const Vec c = round_to<T>(load(cos + i, count)), s = round_to<T>(load(sin + i, count));
    const Vec first = load(even), second = load(odd);
    T new_even[kLanes], new_odd[kLanes];
    store(new_even, rotated<T>(first, c, -second, s));
    store(new_odd, rotated<T>(second, c, first, s));
    for (int64_t k = 0; k < count; ++k) {
      pairs[2 * k] = new_even[k];
      pairs[2 * k + 1] = new_odd[k];
    }
  });
}

// Rotates the queries and keys of T tokens. query: [T, num_heads, head_size], key: [T,
// num_kv_heads, head_size], tokens `*_stride` elements apart, each token dense. cos_sin:
// [max_positions, rot_dim], cosines then sines. Returns -1, or a token whose position is out of
// range; nothing is written then.
template <typename T>
int64_t rotary_embedding(const int64_t* positions, T* query, T* key, const float* cos_sin,
                         int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_size, int64_t query_stride, int64_t key_stride,
                         int64_t rot_dim, int64_t max_positions, int is_neox, int num_threads) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= max_positions) return t;
  }
  const auto rotate = is_neox ? rotate_neox<T> : rotate_interleaved<T>;
  const int64_t half = rot_dim / 2;
  parallel_rows(num_tokens, (num_heads + num_kv_heads) * rot_dim, num_threads, [&](int64_t t) {
    const float* const cos = cos_sin + positions[t] * rot_dim;
    for (int64_t h = 0; h < num_heads; ++h) {
      rotate(query + t * query_stride + h * head_size, cos, cos + half, half);
    }
    for (int64_t g = 0; g < num_kv_heads; ++g) {
      rotate(key + t * key_stride + g * head_size, cos, cos + half, half);
    }
  });
  return -1;
}

}  // namespace VLLM_ISA
