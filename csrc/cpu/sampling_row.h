// One row of logits: its blocks, their maxima, and the likelihoods of their tokens.
#pragma once

#include "sampling_math.h"

namespace VLLM_ISA {

VLLM_INLINE void set_lowest(float* to) { *to = -kInfinity; }
VLLM_INLINE void set_lowest(bf16* to) { to->bits = 0xff80; }

// Blocks of kVocabBlock logits; the last block is padded with -inf.
template <typename T>
struct Row {
  const T* logits;
  int64_t vocab_size, num_whole, num_blocks;
  T tail[kVocabBlock];

  Row(const T* logits, int64_t vocab_size)
      : logits(logits),
        vocab_size(vocab_size),
        num_whole(vocab_size / kVocabBlock),
        num_blocks((vocab_size + kVocabBlock - 1) / kVocabBlock) {
    const int64_t start = num_whole * kVocabBlock;
    for (int64_t i = start; i < vocab_size; ++i) tail[i - start] = logits[i];
    for (int64_t i = vocab_size; i < start + kVocabBlock; ++i) set_lowest(tail + (i - start));
  }

  const T* block(int64_t index) const {
    return index < num_whole ? logits + index * kVocabBlock : tail;
  }
  float at(int64_t token) const { return to_float(logits[token]); }
};

// Whether any vector contained NaN, which a maximum does not show.
class NanCheck {
 public:
#if defined(__AVX512F__)
  VLLM_INLINE void see(Vec a, Vec b) {
    found_ |= _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                 _CMP_UNORD_Q);
  }
  bool found() const { return found_ != 0; }

 private:
  __mmask16 found_ = 0;
#else
  VLLM_INLINE void see(Vec a, Vec b) {
    found_ |= reinterpret_cast<Bits>(a != a) | reinterpret_cast<Bits>(b != b);
  }
  bool found() const {
    uint32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= found_[i];
    return any != 0;
  }

 private:
  Bits found_ = {};
#endif
};

// Returns the larger one of each two neighbouring lanes: first of a, then of b.
VLLM_INLINE Vec pair_maxima(Vec a, Vec b) {
#if defined(__clang__)
#define VLLM_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
  typedef int32_t Index __attribute__((vector_size(kLanes * 4)));
#define VLLM_SHUFFLE(...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
  return max(VLLM_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
             VLLM_SHUFFLE(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#elif defined(__AVX2__)
  return max(VLLM_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14), VLLM_SHUFFLE(1, 3, 5, 7, 9, 11, 13, 15));
#else
  return max(VLLM_SHUFFLE(0, 2, 4, 6), VLLM_SHUFFLE(1, 3, 5, 7));
#endif
#undef VLLM_SHUFFLE
}

template <typename T>
VLLM_INLINE Vec lane_maxima(const T* block, NanCheck& nan) {
  constexpr int64_t kAhead = 2048 / sizeof(T);
  Vec largest = splat(-kInfinity);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kVocabBlock; i += 2 * kLanes) {
    // Prefetch, because the logits of a large vocabulary come from memory: it takes a third less
    // time on AMD Zen 4.
    __builtin_prefetch(block + i + kAhead);
    __builtin_prefetch(block + i + kLanes + kAhead);
    const Vec a = load(block + i), b = load(block + i + kLanes);
    nan.see(a, b);
    largest = max(largest, max(a, b));
  }
  return largest;
}

// Returns the largest logit, or NaN if there is a NaN. maxima[b] receives the maximum of block b;
// it needs room for a multiple of a vector.
template <typename T>
float block_maxima(const Row<T>& row, float* maxima) {
  NanCheck nan;
  Vec top = splat(-kInfinity);
  for (int64_t b = 0; b < row.num_blocks; b += kLanes) {
    Vec largest[kLanes];
    const int64_t last = row.num_blocks - 1;
    for (int64_t i = 0; i < kLanes; ++i) {  // repeats the maximum of the last block after the end
      largest[i] = lane_maxima(row.block(b + i < last ? b + i : last), nan);
    }
#pragma GCC unroll 16
    for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) largest[i] = pair_maxima(largest[2 * i], largest[2 * i + 1]);
    }
    store(maxima + b, largest[0]);
    top = max(top, largest[0]);
  }
  return nan.found() ? __builtin_nanf("") : max_lanes(top);
}

// Returns the index of the first value that equals x; the last index if none does.
inline int64_t find_first(const float* values, int64_t n, float x) {
  constexpr int64_t kStep = 64;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    int any = 0;
    for (int64_t j = 0; j < kStep; ++j) any |= values[i + j] == x;
    if (any) break;
  }
  if (i == n) return n - 1;
  while (i + 1 < n && values[i] != x) ++i;
  return i;
}

// Returns the index of the first one of the largest values. All values are at least 0.
inline int64_t first_of_largest(const float* values, int64_t n) {
  Vec largest = {};
  for_each_vector(n, [&](int64_t i, int64_t count) {
    largest = max(largest, load(values + i, count));
  });
  return find_first(values, n, max_lanes(largest));
}

// Returns the first token with the largest logit.
template <typename T>
int64_t first_largest(const Row<T>& row, const float* maxima, float top) {
  const int64_t block = find_first(maxima, row.num_blocks, top);
  int64_t token = block * kVocabBlock;
  while (token + 1 < row.vocab_size && row.at(token) != top) ++token;
  return token;
}

// The weight of a token in the draw: its likelihood relative to the most likely token; 0 if it is
// filtered out.
struct Weighing {
  float top;    // largest logit
  float scale;  // log2(e) / temperature
  float floor;  // smallest logit that is kept
  float least;  // smallest likelihood that is kept

  // Returns likelihoods without the filter `least`.
  VLLM_INLINE Vec likelihoods(Vec logits) const {
    const Vec power = (logits - top) * scale;
    return (logits >= splat(floor)) & (power >= splat(kLeastPower)) ? power_of_two(power) : Vec{};
  }
  VLLM_INLINE Vec operator()(Vec logits) const {
    const Vec weights = likelihoods(logits);
    return weights >= splat(least) ? weights : Vec{};
  }
};

// Writes the weights of a block and returns their sum.
template <typename T>
VLLM_INLINE float weigh_block(const T* block, const Weighing& weigh, float* weights) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < kVocabBlock; i += kLanes) store(weights + i, weigh(load(block + i)));
  return BlockSum(weights).total();
}

// Writes the likelihoods of a block and adds them to the mass.
template <typename T>
VLLM_INLINE void add_block(const T* block, const Weighing& weigh, float* weights, Mass& mass) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < kVocabBlock; i += kLanes) {
    store(weights + i, weigh.likelihoods(load(block + i)));
  }
  mass.add(BlockSum(weights));
}

}  // namespace VLLM_ISA
