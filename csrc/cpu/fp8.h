// Conversion of 8-bit floats, which a KV cache may contain. A cache contains value / scale; the
// caller handles the scale.
#pragma once

#include "attention_args.h"
#include "linear_dot.h"

namespace VLLM_ISA {

// 1 sign bit, 4 exponent bits and 3 mantissa bits; no infinity and one NaN ("fn").
struct E4m3 {
  static constexpr int kMantissa = 3;
  static constexpr int kRebias = 127 - 7;
  static constexpr uint32_t kFirstSpecial = 0x7f;  // the smallest magnitude that is not a finite
                                                   // value
  static constexpr float kLargest = 448.0f;
  static constexpr float kSmallestNormal = 1.0f / 64, kSmallest = 1.0f / 512;
};

// The upper half of an IEEE float16: 5 exponent bits and 2 mantissa bits, with infinity and NaN.
struct E5m2 {
  static constexpr int kMantissa = 2;
  static constexpr int kRebias = 127 - 15;
  static constexpr uint32_t kFirstSpecial = 0x7c;
  static constexpr float kLargest = 57344.0f;
  static constexpr float kSmallestNormal = 1.0f / 16384, kSmallest = 1.0f / 65536;
};

// Converts bytes, one in each lane, to floats, exactly.
template <class Format>
VLLM_INLINE Vec widen_fp8(Bits bytes) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr uint32_t kRebias = uint32_t{Format::kRebias} << 23;
  const Bits magnitude = bytes & 0x7fu;
  Bits bits = (magnitude << kShift) + kRebias;
  const Vec tiny = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Vec);
  bits = magnitude < (1u << Format::kMantissa)
             ? reinterpret_cast<Bits>(tiny * Format::kSmallest)
             : bits;
  if (Format::kMantissa == 3) {
    bits = magnitude == Format::kFirstSpecial ? Bits{} + 0x7fc00000u : bits;
  } else {  // infinity and NaN keep the largest exponent
    bits = magnitude >= Format::kFirstSpecial ? bits + kRebias : bits;
  }
  return reinterpret_cast<Vec>(bits | ((bytes & 0x80u) << 24));
}

// Converts floats to bytes. Rounds to nearest, ties to even. Values that are too large become the
// largest finite value; NaN stays NaN.
template <class Format>
VLLM_INLINE Bits narrow_fp8(Vec x) {
  constexpr int kShift = 23 - Format::kMantissa;
  const Bits sign = (reinterpret_cast<Bits>(x) >> 24) & 0x80u;
  const Vec magnitude = min(splat(Format::kLargest),
                            reinterpret_cast<Vec>(reinterpret_cast<Bits>(x) & 0x7fffffffu));
  const Bits bits = reinterpret_cast<Bits>(magnitude);
  const Bits rounded = bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1u);
  const Bits normal = (rounded >> kShift) - (uint32_t{Format::kRebias} << Format::kMantissa);
  // Count the steps of the smallest value: after adding 2^23 steps, the low bits contain the count.
  const Vec shifted = magnitude + Format::kSmallest * 8388608.0f;
  const Bits tiny = reinterpret_cast<Bits>(shifted) & 0xffu;
  const Bits out = magnitude < Format::kSmallestNormal ? tiny : normal;
  return sign | (x == x ? out : Bits{} + 0x7fu);
}

VLLM_INLINE Bits load_bytes(const uint8_t* from, int64_t count) {
  if (count == kLanes) return load_bytes(from);
  uint8_t bytes[kLanes] = {};
  __builtin_memcpy(bytes, from, count);
  return load_bytes(bytes);
}

// Returns the subnormal value of a byte, as bf16.
template <class Format>
VLLM_INLINE uint32_t tiny_half(uint32_t byte) {
  const float number = static_cast<float>(byte) * Format::kSmallest;
  uint32_t bits;
  __builtin_memcpy(&bits, &number, sizeof bits);
  return bits >> 16;
}

#ifdef __AVX512BW__
// Returns a table of all subnormal values as bf16, with their bytes as indices.
template <class Format>
VLLM_INLINE __m512i tiny_halves() {
  alignas(64) uint16_t tiny[32] = {};
  for (uint32_t m = 0; m < 1u << Format::kMantissa; ++m) {
    tiny[m] = static_cast<uint16_t>(tiny_half<Format>(m));
  }
  return _mm512_load_si512(tiny);
}

// Converts bytes, sign-extended to 16 bits, to bf16. All bytes must be finite values.
template <class Format>
VLLM_INLINE __m512i widen_finite(__m512i bytes, __m512i tiny) {
  const auto set = [](uint32_t x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
  constexpr int kShift = 7 - Format::kMantissa;
  const __m512i normal = _mm512_add_epi16(
      _mm512_and_si512(_mm512_slli_epi16(bytes, kShift), set(0x7f << kShift)),
      set(uint32_t{Format::kRebias} << 7));
  const auto is_tiny = _mm512_testn_epi16_mask(bytes, set(0x7f >> Format::kMantissa << Format::kMantissa));
  const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, is_tiny, bytes, tiny);
  return _mm512_ternarylogic_epi32(magnitude, bytes, set(0x8000), 0xf8);  // magnitude | (bytes & sign)
}

// Returns in each byte the largest magnitude so far, with the sign bit set.
VLLM_INLINE __m512i largest_byte(__m512i before, __m512i bytes) {
  return _mm512_max_epu8(before, _mm512_or_si512(bytes, _mm512_set1_epi8(static_cast<int8_t>(0x80))));
}

// Returns whether all values are finite, given their `largest_byte`.
template <class Format>
VLLM_INLINE bool is_finite(__m512i largest) {
  const auto special = static_cast<int8_t>(0x80 | Format::kFirstSpecial);
  return _mm512_cmpge_epu8_mask(largest, _mm512_set1_epi8(special)) == 0;
}

// Converts rows of a multiple of 32 finite values to bf16. Returns false, with undefined results, if a
// value is not finite. row_at(k): the beginning of row k.
template <class Format, typename RowAt>
inline bool widen_finite_rows(int64_t num_rows, int64_t head_size, RowAt row_at, void* to) {
  const __m512i tiny = tiny_halves<Format>();
  __m512i largest = _mm512_setzero_si512();
  char* out = static_cast<char*>(to);
  const auto widen = [&](__m256i bytes) __attribute__((always_inline)) {
    _mm512_storeu_si512(out, widen_finite<Format>(_mm512_cvtepi8_epi16(bytes), tiny));
    out += 64;
  };
  const auto load_half = [](const uint8_t* from) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  };
  for (int64_t k = 0; k < num_rows; ++k) {
    const uint8_t* const row = row_at(k);
    int64_t i = 0;
    for (; i + 64 <= head_size; i += 64) {
      largest = largest_byte(largest, _mm512_loadu_si512(row + i));
      widen(load_half(row + i));
      widen(load_half(row + i + 32));
    }
    if (i < head_size) {
      const __m256i bytes = load_half(row + i);
      largest = largest_byte(largest, _mm512_zextsi256_si512(bytes));
      widen(bytes);
    }
  }
  return is_finite<Format>(largest);
}
#endif

#if defined(__AVX2__) && !defined(__AVX512BW__)
// Converts 16 bytes to bf16. Subnormal values, at most eight, are looked up in a table: its first
// half has their lower bytes, its second half their upper bytes.
template <class Format>
VLLM_INLINE __m256i widen_halves(__m128i packed) {
  const auto set = [](uint32_t x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); };
  constexpr int kShift = 7 - Format::kMantissa;
  alignas(16) uint8_t tiny[16] = {};
  for (uint32_t m = 0; m < 1u << Format::kMantissa; ++m) {
    tiny[m] = static_cast<uint8_t>(tiny_half<Format>(m));
    tiny[8 + m] = static_cast<uint8_t>(tiny_half<Format>(m) >> 8);
  }
  const __m256i table =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(tiny)));
  const __m256i bytes = _mm256_cvtepu8_epi16(packed);
  const __m256i magnitude = _mm256_and_si256(bytes, set(0x7f));
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, kShift),
                                          set(uint32_t{Format::kRebias} << 7));
  const __m256i index = _mm256_or_si256(_mm256_or_si256(magnitude, _mm256_slli_epi16(magnitude, 8)),
                                        set(0x0800));
  __m256i bits = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(table, index),
                                    _mm256_cmpgt_epi16(set(1u << Format::kMantissa), magnitude));
  const __m256i is_special = _mm256_cmpgt_epi16(magnitude, set(Format::kFirstSpecial - 1));
  if (__builtin_expect(!_mm256_testz_si256(is_special, is_special), 0)) {
    const __m256i special = Format::kMantissa == 3
                                ? set(0x7fc0)
                                : _mm256_add_epi16(bits, set(uint32_t{Format::kRebias} << 7));
    bits = _mm256_blendv_epi8(bits, special, is_special);
  }
  return _mm256_or_si256(bits, _mm256_slli_epi16(_mm256_and_si256(bytes, set(0x80)), 8));
}
#endif

// to[0, head_size) = from, then zeros up to a multiple of `unit` elements.
template <class Format, typename T>
inline void widen_row(const uint8_t* from, int64_t head_size, int64_t unit, T* to) {
  int64_t done = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const __m512i tiny = tiny_halves<Format>();
    for (; done + 32 <= head_size; done += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done));
      if (!is_finite<Format>(largest_byte(__m512i{}, _mm512_zextsi256_si512(bytes)))) break;
      _mm512_storeu_si512(to + done, widen_finite<Format>(_mm512_cvtepi8_epi16(bytes), tiny));
    }
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 2) {
    for (; done + 16 <= head_size; done += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + done), widen_halves<Format>(bytes));
    }
  }
#endif
  for (; done < head_size; done += kLanes) {
    const int64_t left = head_size - done, count = left < kLanes ? left : kLanes;
    store(to + done, widen_fp8<Format>(load_bytes(from + done, count)), count);
  }
  const int64_t padded_size = (head_size + unit - 1) / unit * unit;
  if (padded_size > head_size) {
    __builtin_memset(to + head_size, 0, (padded_size - head_size) * sizeof(T));
  }
}

// Converts rows of a cache to rows of T, whose distance is a multiple of `unit` elements. row_at(k):
// the beginning of row k.
template <class Format, typename T, typename RowAt>
inline void widen_rows(int64_t num_rows, int64_t head_size, int64_t unit, RowAt row_at, T* to) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    if (head_size % 32 == 0 && widen_finite_rows<Format>(num_rows, head_size, row_at, to)) return;
  }
#endif
  const int64_t stride = (head_size + unit - 1) / unit * unit;
  for (int64_t k = 0; k < num_rows; ++k) {
    widen_row<Format>(row_at(k), head_size, unit, to + k * stride);
  }
}

// to[0, size) = from / scale, rounded.
template <class Format, typename T>
inline void narrow_row(const T* from, int64_t size, float scale, uint8_t* to) {
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const ByteLanes bytes = narrow_to_bytes(narrow_fp8<Format>(load(from + i, count) / scale));
    __builtin_memcpy(to + i, &bytes, count);
  });
}

}  // namespace VLLM_ISA
