// Forbids tokens before they are sampled, by setting their logits to -inf in place.
#pragma once

#include "sampling_row.h"

namespace VLLM_ISA {

// Forbids the tokens whose bit in `mask` is not set. Token t has bit t % 32 of word t / 32.
template <typename T>
void apply_mask(const int32_t* mask, int64_t vocab_size, T* logits) {
  for (int64_t first = 0; first < vocab_size; first += 32) {
    const uint32_t forbidden = ~static_cast<uint32_t>(mask[first / 32]);
    if (forbidden == 0) continue;
    const int64_t size = vocab_size - first < 32 ? vocab_size - first : 32;
    for (int64_t i = 0; i < size; ++i) {
      if (forbidden >> i & 1) set_lowest(logits + first + i);
    }
  }
}

// Returns the largest of n logits; NaN if one is NaN.
template <typename T>
float largest_logit(const T* logits, int64_t n) {
  NanCheck nan;
  Vec most = splat(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(logits + i);
    nan.see(x, x);
    most = max(most, x);
  }
  float largest = nan.found() ? __builtin_nanf("") : max_lanes(most);
  for (; i < n; ++i) {
    const float x = to_float(logits[i]);
    if (x > largest || x != x) largest = x;
  }
  return largest;
}

// Forbids the tokens below `first_time` if the time tokens, which are all others, are together more
// likely than each of them.
template <typename T>
void prefer_times(int64_t first_time, int64_t vocab_size, T* logits) {
  const T* const times = logits + first_time;
  const int64_t num_times = vocab_size - first_time;
  const float text = largest_logit(logits, first_time);
  const float time = largest_logit(times, num_times);
  const float most = text > time ? text : time;
  if (text != text || most - most != 0) return;  // no token can be sampled, or NaN is reported
  Vec total = {};
  for_each_vector(num_times, [&](int64_t i, int64_t count) {
    Vec weights = exp(load(times + i, count) - most);
    for (int64_t lane = count; lane < kLanes; ++lane) weights[lane] = 0;
    total += weights;
  });
  if (!(sum_lanes(total) > exp(splat(text - most))[0])) return;
  for (int64_t i = 0; i < first_time; ++i) set_lowest(logits + i);
}

}  // namespace VLLM_ISA
