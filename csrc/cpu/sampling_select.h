// Finds the k-th largest of many floats, and the largest ones in order, without sorting all of
// them.
#pragma once

#include "sampling_math.h"

namespace VLLM_ISA {

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

enum class Keep { kAtLeast, kAbove, kBelow };

template <Keep kKeep>
VLLM_INLINE bool is_kept(float x, float bound) {
  if constexpr (kKeep == Keep::kAtLeast) return x >= bound;
  if constexpr (kKeep == Keep::kAbove) return x > bound;
  return x < bound;
}

// Copies the kept values in their order, and returns their number. `to` may be `from`, and needs
// memory for one vector more than all values.
template <Keep kKeep>
inline int64_t keep(const float* from, int64_t n, float bound, float* to) {
  int64_t kept = 0, i = 0;
#if defined(__AVX512F__)
  constexpr int kCompare = kKeep == Keep::kAtLeast ? _CMP_GE_OQ
                           : kKeep == Keep::kAbove ? _CMP_GT_OQ
                                                   : _CMP_LT_OQ;
  const __m512 bounds = _mm512_set1_ps(bound);
  for (; i + kLanes <= n; i += kLanes) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __mmask16 mask = _mm512_cmp_ps_mask(x, bounds, kCompare);
    // Compress in a register: on some processors the compressing store takes a hundred cycles.
    _mm512_storeu_ps(to + kept, _mm512_maskz_compress_ps(mask, x));
    kept += __builtin_popcount(mask);
  }
#endif
  for (; i < n; ++i) {
    const float x = from[i];
    to[kept] = x;
    kept += is_kept<kKeep>(x, bound);
  }
  return kept;
}

struct Counts {
  int64_t above, at_least;
};

inline Counts count_from(const float* values, int64_t n, float bound) {
  Ints above = {}, at_least = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(values + i);
    above -= x > splat(bound);
    at_least -= x >= splat(bound);
  }
  Counts counts = {0, 0};
  for (int lane = 0; lane < kLanes; ++lane) {
    counts.above += above[lane];
    counts.at_least += at_least[lane];
  }
  for (; i < n; ++i) {
    counts.above += values[i] > bound;
    counts.at_least += values[i] >= bound;
  }
  return counts;
}

// Returns an unsigned integer; these integers have the same order as the floats.
VLLM_INLINE uint32_t key_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
VLLM_INLINE float value_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

VLLM_INLINE float median(float a, float b, float c) {
  const float low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// Returns the k-th largest of n values without NaN, 1 <= k <= n. Overwrites the values, and needs
// memory for one vector more. Quickselect (Hoare, "Algorithm 65: Find", 1961), in which every
// second pivot halves the range of the bits that a float can have. So it takes at most 64 rounds
// for any values.
inline float kth_largest(float* values, int64_t n, int64_t k) {
  uint32_t low = key_of(-kInfinity), high = key_of(kInfinity);
  for (int round = 0;; ++round) {
    const float pivot = round % 2 == 0
                            ? median(values[0], values[n / 2], values[n - 1])
                            : value_of(low + (high - low) / 2);
    const Counts counts = count_from(values, n, pivot);
    if (counts.above >= k) {
      n = keep<Keep::kAbove>(values, n, pivot, values);
      low = key_of(pivot);
    } else if (counts.at_least >= k) {
      return pivot;
    } else {
      n = keep<Keep::kBelow>(values, n, pivot, values);
      k -= counts.at_least;
      high = key_of(pivot);
    }
  }
}

// ---- the largest first --------------------------------------------------------------------

// Ranks in a heap with the largest at its root: ordered by value; among equal values the lower
// index is first.
VLLM_INLINE uint64_t rank_of(float value, uint32_t index) {
  return uint64_t{key_of(value + 0.0f)} << 32 | ~index;  // -0 and 0 are equal
}
VLLM_INLINE float rank_value(uint64_t rank) { return value_of(rank >> 32); }
VLLM_INLINE uint32_t rank_index(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

inline void sift_down(uint64_t* heap, int64_t n, int64_t at) {
  const uint64_t rank = heap[at];
  for (int64_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
    if (child + 1 < n && heap[child + 1] > heap[child]) ++child;
    if (heap[child] <= rank) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = rank;
}

inline void make_heap(uint64_t* heap, int64_t n) {
  for (int64_t i = n / 2 - 1; i >= 0; --i) sift_down(heap, n, i);
}

// Removes and returns the largest of n > 0 ranks.
inline uint64_t pop_heap(uint64_t* heap, int64_t n) {
  const uint64_t rank = heap[0];
  heap[0] = heap[n - 1];
  sift_down(heap, n - 1, 0);
  return rank;
}

}  // namespace VLLM_ISA
