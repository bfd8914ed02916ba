// Copies queries, keys and values into the layouts of prefill attention.
//
// Each lane is one query row, so queries are transposed once. Keys and values are only copied into
// adjacent memory, because each of their elements is broadcast to all lanes. A word has 32 bits:
// one float, or the two bf16 that one instruction multiplies and adds.
#pragma once

#include "fp8.h"
#include "linear_dot.h"

namespace VLLM_ISA {

// Content of one word: two T if the processor multiplies pairs of T, otherwise a float.
template <typename T>
struct PrefillDot {
  using type = DotFloat;
};
#ifdef __AVX512BF16__
template <>
struct PrefillDot<bf16> {
  using type = DotBf16;
};
#endif

VLLM_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rounds a head size up to whole vectors, for scratch memory.
VLLM_INLINE int64_t padded(int64_t head_size) { return round_up(head_size, kLanes); }

// Prefetches a row, because the hardware prefetcher does not predict the next row. The target is
// the second-level cache: a prefetch into the first level occupies one of about twenty buffers
// until memory answers, which halves the bandwidth of a core.
VLLM_INLINE void prefetch_row(const char* row, int64_t row_bytes) {
  for (int64_t i = 0; i < row_bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// Returns the size in bytes of one element of a cache.
template <typename T>
VLLM_INLINE int64_t cache_bytes(vllm_cpu::CacheType type) {
  return type == vllm_cpu::CacheType::kSame ? int64_t{sizeof(T)} : 1;
}

// Converts rows of a cache of 8-bit floats to rows of T, whose distance is a multiple of `unit`
// elements. row_at(k): the beginning of row k.
template <typename T, typename RowAt>
inline void widen_rows(vllm_cpu::CacheType type, int64_t num_rows, int64_t head_size, int64_t unit,
                       RowAt row_at, T* to) {
  const auto bytes_at = [&](int64_t k) __attribute__((always_inline)) {
    return reinterpret_cast<const uint8_t*>(row_at(k));
  };
  if (type == vllm_cpu::CacheType::kE4m3) {
    widen_rows<E4m3>(num_rows, head_size, unit, bytes_at, to);
  } else {
    widen_rows<E5m2>(num_rows, head_size, unit, bytes_at, to);
  }
}

#ifdef __AVX512BF16__
// Rounds floats to bf16: word i has first[i] in its lower half and second[i] in its upper half.
VLLM_INLINE Bits pair_of(Vec first, Vec second) {
  const __m512bh halves =
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return reinterpret_cast<Bits>(
      _mm512_permutexvar_epi16(pairs, reinterpret_cast<__m512i>(halves)));
}
#endif

// Interleaves the lower (upper) halves of a and b: a0 b0 a1 b1 ...
#if defined(__clang__)
#define VLLM_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VLLM_SHUFFLE(...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
VLLM_INLINE Vec interleave_lower(Vec a, Vec b) {
#if defined(__AVX512F__)
  return VLLM_SHUFFLE(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return VLLM_SHUFFLE(0, 8, 1, 9, 2, 10, 3, 11);
#else
  return VLLM_SHUFFLE(0, 4, 1, 5);
#endif
}
VLLM_INLINE Vec interleave_upper(Vec a, Vec b) {
#if defined(__AVX512F__)
  return VLLM_SHUFFLE(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  return VLLM_SHUFFLE(4, 12, 5, 13, 6, 14, 7, 15);
#else
  return VLLM_SHUFFLE(2, 6, 3, 7);
#endif
}
#undef VLLM_SHUFFLE

// Transposes: lane j of row i becomes lane i of row j.
VLLM_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_lower(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave_upper(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Number of elements in 32 bits of memory.
template <typename T>
constexpr int kPerWord = 4 / int{sizeof(T)};

// Loads the next vector of a row that has `left` elements left, as it is in memory; zeros after the
// end of the row.
template <typename T>
VLLM_INLINE Bits load_stored(const T* row, int64_t left) {
  if (left >= kLanes * kPerWord<T>) return load_bits(row);
#ifdef __AVX512BW__
  if constexpr (sizeof(T) == 2) {
    const __mmask32 mask = (1u << left) - 1;
    return reinterpret_cast<Bits>(_mm512_maskz_loadu_epi16(mask, row));
  }
#endif
  Bits words = {};
  __builtin_memcpy(&words, row, left * sizeof(T));
  return words;
}

// Loads the next kLanes words of a row that has `left` elements left; zeros after its end.
template <class Dot, typename T>
VLLM_INLINE Bits load_words(const T* row, int64_t left) {
  if constexpr (Dot::kInputs == 1) {
    return reinterpret_cast<Bits>(load(row, left < kLanes ? left : int64_t{kLanes}));
  } else {
    return load_stored(row, left);
  }
}

// Sets to[j * to_stride + lane] to word j of rows[lane].
template <class Dot, typename T>
inline void pack_lanes(const T* const* rows, int64_t head_size, uint32_t* to, int64_t to_stride) {
  const int64_t num_words = (head_size + Dot::kInputs - 1) / Dot::kInputs;
  for (int64_t j = 0; j < num_words; j += kLanes) {
    const int64_t i = j * Dot::kInputs;
    Vec words[kLanes];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      words[r] = reinterpret_cast<Vec>(load_words<Dot>(rows[r] + i, head_size - i));
    }
    transpose(words);
    // Store a multiple of kLanes words; the additional words are never read.
#pragma GCC unroll 16
    for (int w = 0; w < kLanes; ++w) {
      __builtin_memcpy(to + (j + w) * to_stride, &words[w], sizeof(Vec));
    }
  }
}

// Copies a key as consecutive words, with zeros up to a multiple of kLanes words.
template <class Dot, typename T>
VLLM_INLINE void pack_key(const T* key, int64_t head_size, uint32_t* to) {
  constexpr int64_t kElements = kLanes * Dot::kInputs;
  for (int64_t i = 0; i < head_size; i += kElements, to += kLanes) {
    const Bits words = load_words<Dot>(key + i, head_size - i);
    __builtin_memcpy(to, &words, sizeof words);
  }
}

// Interleaves the values of kInputs keys: each word has the same element of all of them. Writes a
// multiple of kLanes words. The second value may be null and then counts as zeros. Changes the
// pointers in `values`.
template <class Dot, typename T>
VLLM_INLINE void pack_values(const T* (&values)[2], int64_t head_size, uint32_t* to) {
#ifdef __AVX512BF16__
  if constexpr (Dot::kInputs == 2) {
    const __m512i lower = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                           8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
    for (; head_size >= 2 * kLanes; head_size -= 2 * kLanes, to += 2 * kLanes) {
      const __m512i first = _mm512_loadu_si512(values[0]);
      const __m512i second =
          values[1] != nullptr ? _mm512_loadu_si512(values[1]) : _mm512_setzero_si512();
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, lower, second));
      _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(first, upper, second));
      values[0] += 2 * kLanes;
      if (values[1] != nullptr) values[1] += 2 * kLanes;
    }
  }
#endif
  for_each_vector(head_size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    Bits words = reinterpret_cast<Bits>(load(values[0] + i, count));
    if constexpr (Dot::kInputs == 2) {  // a bf16 is the upper half of its float
      words >>= 16;
      if (values[1] != nullptr) words |= reinterpret_cast<Bits>(load(values[1] + i, count));
    }
    __builtin_memcpy(to + i, &words, sizeof words);
  });
}

}  // namespace VLLM_ISA
