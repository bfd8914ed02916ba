// Runs one step of the Mamba-2 scan for one token per sequence. Each state is read once and written
// once, in place.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

// Processes one token of each of B sequences. state: [num_rows, H, P, N]. rows: [B], the row of
// `state` of each sequence, all different; is_new: [B], whether a sequence begins (then the content
// of its row is ignored). x, y: [B, H, P]. steps, fading: [B, H]. b, c: [B, G, N]; each of the G
// groups serves H / G consecutive heads. Returns -1, or a sequence whose row is out of range;
// nothing is written then.
inline int64_t scan_tokens(float* state, const int64_t* rows, const uint8_t* is_new,
                           const float* x, const float* steps, const float* fading,
                           const float* b, const float* c, float* y, int64_t num_sequences,
                           int64_t num_rows, int64_t num_heads, int64_t head_size,
                           int64_t num_groups, int64_t state_size, int num_threads) {
  for (int64_t s = 0; s < num_sequences; ++s) {
    if (rows[s] < 0 || rows[s] >= num_rows) return s;
  }
  const int64_t per_group = num_heads / num_groups, head_state = head_size * state_size;
  parallel_rows(num_sequences * num_heads, head_state, num_threads, [&](int64_t i) {
    const int64_t s = i / num_heads, h = i % num_heads;
    const int64_t group = (s * num_groups + h / per_group) * state_size;
    float* const of_head = state + (rows[s] * num_heads + h) * head_state;
    const Vec kept = splat(fading[i]);
    for (int64_t p = 0; p < head_size; ++p) {
      float* const numbers = of_head + p * state_size;
      const Vec entering = splat(x[i * head_size + p] * steps[i]);
      Vec sum{};
      for_each_vector(state_size, [&](int64_t n, int64_t count) {
        // Not multiplied by 0, because an earlier request may have left NaN.
        const Vec before = is_new[s] ? Vec{} : load(numbers + n, count) * kept;
        const Vec after = fma(entering, load(b + group + n, count), before);
        store(numbers + n, after, count);
        sum = fma(after, load(c + group + n, count), sum);
      });
      y[i * head_size + p] = sum_lanes(sum);
    }
  });
  return -1;
}

}  // namespace VLLM_ISA
