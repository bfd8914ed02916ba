// top_k and top_p as thresholds, and the scratch memory of a thread.
#pragma once

#include "sampling_row.h"
#include "sampling_select.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr float kTiny = 1.17549435e-38f;  // the smallest normal float

// Scratch memory of one thread for one row of logits.
struct SamplingScratch {
  float *maxima, *bounds, *exponentials;  // [blocks]
  float *row, *first, *second;            // [vocabulary]
  uint64_t* heap;                         // [vocabulary]

  // Allocates the memory. Returns false if there is none.
  bool take(int64_t vocab_size) {
    const int64_t tokens = (vocab_size / kVocabBlock + 2) * kVocabBlock;
    const int64_t blocks = (vocab_size / kVocabBlock / 64 + 2) * 64;
    char* memory = vllm_cpu::workspace((3 * tokens + 3 * blocks) * 4 + tokens * 8);
    if (memory == nullptr) return false;
    heap = reinterpret_cast<uint64_t*>(memory);
    row = reinterpret_cast<float*>(heap + tokens);
    first = row + tokens;
    second = first + tokens;
    maxima = second + tokens;
    bounds = maxima + blocks;
    exponentials = bounds + blocks;
    return true;
  }
};

// ---- thresholds ---------------------------------------------------------------------------

// Returns a value that at least k logits reach, 1 <= k: the k-th largest of the maxima of blocks,
// or of the lanes of blocks.
template <typename T>
float bound_of_largest(const Row<T>& row, int64_t k, const SamplingScratch& scratch) {
  float* const maxima = scratch.second;
  int64_t n = row.num_blocks;
  if (k <= n) {
    __builtin_memcpy(maxima, scratch.maxima, n * sizeof(float));
    return kth_largest(maxima, n, k);
  }
  n *= kLanes;
  if (k > n) return -kInfinity;
  NanCheck nan;  // not needed here
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    store(maxima + b * kLanes, lane_maxima(row.block(b), nan));
  }
  return kth_largest(maxima, n, k);
}

// Copies at least the k largest logits, 1 <= k <= vocabulary, into scratch.first; returns their
// number.
template <typename T>
int64_t gather_largest(const Row<T>& row, int64_t k, const SamplingScratch& scratch) {
  const float bound = bound_of_largest(row, k, scratch);
  int64_t n = 0;
  float block[kVocabBlock];
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    if (scratch.maxima[b] < bound) continue;
    const T* const logits = row.block(b);
    for (int64_t i = 0; i < kVocabBlock; i += kLanes) store(block + i, load(logits + i));
    n += keep<Keep::kAtLeast>(block, kVocabBlock, bound, scratch.first + n);
  }
  return n;
}

// Returns the threshold of top_p among the k largest logits, some of which may be below
// `weigh.floor`. These logits are the values among the `n` in scratch.first that are above `last`,
// and as many values equal to `last` as are needed.
inline float nucleus_of_largest(int64_t n, int64_t k, float last, float top_p,
                                const Weighing& weigh, const SamplingScratch& scratch) {
  float* const values = scratch.first;
  n = keep<Keep::kAbove>(values, n, last, values);
  for (; n < k; ++n) values[n] = last;
  double total = 0;
  for_each_vector(n, [&](int64_t i, int64_t count) {
    float weights[kLanes];
    store(weights, weigh(load(values + i, count)));
    for (int64_t j = 0; j < count; ++j) total += weights[j];
  });
  for (int64_t i = 0; i < n; ++i) scratch.heap[i] = rank_of(values[i], 0);
  make_heap(scratch.heap, n);
  const float target = top_p * static_cast<float>(total);
  double sum = 0;
  for (; n > 0; --n) {
    const float value = rank_value(pop_heap(scratch.heap, n));
    sum += weigh(splat(value))[0];
    if (static_cast<float>(sum) >= target) return value;
  }
  return last;
}

// Returns the smallest logit that top_k keeps and, with top_p below 1, that top_p keeps among these
// k.
template <typename T>
float top_k_floor(const Row<T>& row, int64_t k, float top_p, const Weighing& weigh,
                  const SamplingScratch& scratch) {
  k = k < row.vocab_size ? k : row.vocab_size;
  const int64_t n = gather_largest(row, k, scratch);
  if (!(top_p < 1.0f)) return kth_largest(scratch.first, n, k);
  __builtin_memcpy(scratch.second, scratch.first, n * sizeof(float));
  const float last = kth_largest(scratch.second, n, k);
  return nucleus_of_largest(n, k, last, top_p, weigh, scratch);
}

// Returns the sum of the values that are at least `bound`, added in blocks.
inline double mass_from(const float* values, int64_t n, float bound) {
  Mass mass;
  float block[kVocabBlock] = {};
  for (int64_t start = 0; start < n; start += kVocabBlock) {
    const int64_t size = n - start < kVocabBlock ? n - start : kVocabBlock;
    if (size < kVocabBlock) __builtin_memset(block, 0, sizeof block);
    for_each_vector(size, [&](int64_t i, int64_t count) {
      const Vec x = load(values + start + i, count);
      store(block + i, x >= splat(bound) ? x : Vec{}, count);
    });
    mass.add(BlockSum(block));
  }
  return mass.total();
}

// Returns the smallest weight in the smallest set of tokens that has the fraction top_p < 1 of the
// mass: `nucleus_floor` of vllm/sample/filters.py, but each step reads only tokens that are still
// undecided.
template <typename T>
float nucleus_least(const Row<T>& row, float top_p, const Weighing& weigh,
                    const SamplingScratch& scratch) {
  constexpr int kBisections = 18;
  const float tokens = 2.0f * static_cast<float>(row.vocab_size);
  // Below every possible threshold: the mass is at least 1, the weight of the most likely token.
  const float surely_out = (1.0f - top_p) / tokens * 0.99f;
  Mass mass;
  int64_t n = 0;
  float weights[kVocabBlock];
  float* const open = scratch.first;  // weights that may still be above or below the threshold
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    add_block(row.block(b), weigh, weights, mass);
    n += keep<Keep::kAtLeast>(weights, kVocabBlock, surely_out, open + n);
  }
  const float total = static_cast<float>(mass.total()), target = top_p * total;
  const float spare = (1.0f - top_p) * total / tokens;
  float low = __builtin_log2f(spare > kTiny ? spare : kTiny);
  float step = -low;
  double above = 0;  // mass of the tokens that are certainly kept
  for (int i = 0; i < kBisections; ++i) {
    step /= 2;
    const float middle = power_of_two(splat(low + step))[0];
    const double with_middle = above + mass_from(open, n, middle);
    if (static_cast<float>(with_middle) >= target) {
      low += step;
      n = keep<Keep::kAtLeast>(open, n, middle, open);
    } else {
      above = with_middle;
      n = keep<Keep::kBelow>(open, n, middle, open);
    }
  }
  return power_of_two(splat(low))[0];
}

}  // namespace VLLM_ISA
