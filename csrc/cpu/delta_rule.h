// Applies the gated delta rule to one token per sequence. Each state is read from memory once and
// written once, in place.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

// Processes one token of one head. state: [value_size, key_size]; is_new: the state counts as 0,
// whatever it contains. q, k: [key_size]. v, y: [value_size]. fading: [key_size] if is_by_key,
// otherwise [1].
inline void delta_token(float* state, bool is_new, const float* q, const float* k, const float* v,
                        const float* fading, bool is_by_key, float beta, float* y,
                        int64_t value_size, int64_t key_size) {
  constexpr int kRows = kLanes / 2;  // two sums of each row fill one vector
  Vec product{};
  for_each_vector(key_size, [&](int64_t n, int64_t count) {
    product = fma(load(k + n, count), load(q + n, count), product);
  });
  const float match = sum_lanes(product);
  const Vec of_all = splat(fading[0]);
  for (int64_t first = 0; first < value_size; first += kRows) {
    const int num_rows = static_cast<int>(value_size - first < kRows ? value_size - first : kRows);
    float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = state + (first + (r < num_rows ? r : 0)) * key_size;
    // Multiply the faded state by the key (even sums) and by the query (odd sums). y is the product
    // with the query plus the contribution of the new token.
    Vec sums[kLanes] = {};
    if (!is_new) {  // an earlier request may have left NaN
      for_each_vector(key_size, [&](int64_t n, int64_t count) {
        const Vec faded = is_by_key ? load(fading + n, count) : of_all;
        const Vec key = load(k + n, count) * faded, query = load(q + n, count) * faded;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec before = load(row[r] + n, count);
          sums[2 * r] = fma(before, key, sums[2 * r]);
          sums[2 * r + 1] = fma(before, query, sums[2 * r + 1]);
        }
      });
    }
    float given[kLanes], added[kRows];
    store(given, sum_each(sums));
    for (int r = 0; r < num_rows; ++r) {
      added[r] = (v[first + r] - given[2 * r]) * beta;
      y[first + r] = given[2 * r + 1] + added[r] * match;
    }
    for_each_vector(key_size, [&](int64_t n, int64_t count) {
      const Vec faded = is_by_key ? load(fading + n, count) : of_all;
      const Vec key = load(k + n, count);
      for (int r = 0; r < num_rows; ++r) {
        const Vec before = is_new ? Vec{} : load(row[r] + n, count) * faded;
        store(row[r] + n, fma(splat(added[r]), key, before), count);
      }
    });
  }
}

// Processes one token of each of B sequences. state: [num_rows, H, V, K]. rows: [B], the row of
// `state` of each sequence, all different; is_new: [B], whether a sequence begins. q, k: [B, G, K];
// each of the G groups serves H / G neighbouring heads. v, y: [B, H, V]. beta: [B, H]. fading: [B,
// H, num_fadings], with num_fadings 1 or K. Returns -1, or a sequence whose row is out of range;
// nothing is written then.
inline int64_t delta_tokens(float* state, const int64_t* rows, const uint8_t* is_new,
                            const float* q, const float* k, const float* v, const float* fading,
                            const float* beta, float* y, int64_t num_sequences, int64_t num_rows,
                            int64_t num_heads, int64_t value_size, int64_t num_groups,
                            int64_t key_size, int64_t num_fadings, int num_threads) {
  for (int64_t s = 0; s < num_sequences; ++s) {
    if (rows[s] < 0 || rows[s] >= num_rows) return s;
  }
  const int64_t per_group = num_heads / num_groups, head_state = value_size * key_size;
  parallel_rows(num_sequences * num_heads, head_state, num_threads, [&](int64_t i) {
    const int64_t s = i / num_heads, h = i % num_heads;
    const int64_t group = (s * num_groups + h / per_group) * key_size;
    delta_token(state + (rows[s] * num_heads + h) * head_state, is_new[s] != 0, q + group,
                k + group, v + i * value_size, fading + i * num_fadings, num_fadings == key_size,
                beta[i], y + i * value_size, value_size, key_size);
  });
  return -1;
}

}  // namespace VLLM_ISA
