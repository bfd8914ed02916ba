// Products of one word of a packed weight with the inputs that belong to it, for each pair of
// weight and input type. A product is accumulated lane by lane, inputs in ascending order.
//
// A Dot has: Input, the type of x; kInputs of them per word; Splat, these inputs in all lanes;
// Acc, a vector of sums.
#pragma once

#include "simd.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace VLLM_ISA {

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

VLLM_INLINE Bits load_bits(const void* from) {
  Bits out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
// Bytes, one in each lane.
VLLM_INLINE Bits load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Bits);
#endif
}
VLLM_INLINE Bits splat_bits(const void* word) {
  uint32_t bits;
  __builtin_memcpy(&bits, word, sizeof bits);
  return bits - Bits{};
}

struct DotFloat {
  using Input = float;
  using Acc = Vec;
  using Splat = Vec;
  static constexpr int kInputs = 1;
  static VLLM_INLINE Splat splat_of(const float* x) { return splat(*x); }
  static VLLM_INLINE Vec dot(Vec acc, Bits w, Vec x) {
    return fma(reinterpret_cast<Vec>(w), x, acc);
  }
};

// bf16 weights with float inputs; exact products, as both widen without loss.
struct DotWide {
  using Input = float;
  using Acc = Vec;
  struct Splat {
    Vec even, odd;
  };
  static constexpr int kInputs = 2;
  static VLLM_INLINE Splat splat_of(const float* x) { return {splat(x[0]), splat(x[1])}; }
  static VLLM_INLINE Vec dot(Vec acc, Bits w, Splat x) {
    acc = fma(reinterpret_cast<Vec>(w << 16), x.even, acc);
    return fma(reinterpret_cast<Vec>(w & 0xffff0000u), x.odd, acc);
  }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define VLLM_DOT_BF16
// Sums of pairs in one instruction; denormal numbers count as zero.
struct DotBf16 {
  using Input = bf16;
  using Acc = Vec;
  using Splat = Bits;
  static constexpr int kInputs = 2;
  static VLLM_INLINE Splat splat_of(const bf16* x) { return splat_bits(x); }
  static VLLM_INLINE Vec dot(Vec acc, Bits w, Bits x) {
#ifdef __AVX512BF16__
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                  reinterpret_cast<__m512bh>(w),
                                                  reinterpret_cast<__m512bh>(x)));
#else
    return reinterpret_cast<Vec>(vbfdotq_f32(reinterpret_cast<float32x4_t>(acc),
                                             reinterpret_cast<bfloat16x8_t>(w),
                                             reinterpret_cast<bfloat16x8_t>(x)));
#endif
  }
};
#endif

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

// Sums of the products of neighbours.
VLLM_INLINE Ints pair_dot(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Ints>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Ints>(
      _mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  const Ints a2 = reinterpret_cast<Ints>(a), b2 = reinterpret_cast<Ints>(b);
  return (a2 >> 16) * (b2 >> 16) + ((a2 << 16) >> 16) * ((b2 << 16) >> 16);
#endif
}

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define VLLM_DOT_BYTES
// acc plus the sums of four products of unsigned with signed bytes.
VLLM_INLINE Ints byte_dot(Ints acc, Bits unsigned_bytes, Bits signed_bytes) {
#ifdef __AVX512VNNI__
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc),
                                                    reinterpret_cast<__m512i>(unsigned_bytes),
                                                    reinterpret_cast<__m512i>(signed_bytes)));
#else
  return reinterpret_cast<Ints>(vusdotq_s32(reinterpret_cast<int32x4_t>(acc),
                                            reinterpret_cast<uint8x16_t>(unsigned_bytes),
                                            reinterpret_cast<int8x16_t>(signed_bytes)));
#endif
}
#endif

// int8 weights with inputs x + 128 as bytes: the instruction multiplies unsigned by signed. The
// caller subtracts 128 times the sum of the weights. Exact: the sums stay below 2^31 for up to
// 66,000 inputs.
struct DotInt8 {
  using Input = uint8_t;
  using Acc = Ints;
  static constexpr int kInputs = 4;
#ifdef VLLM_DOT_BYTES
  using Splat = Bits;
  static VLLM_INLINE Splat splat_of(const uint8_t* x) { return splat_bits(x); }
  static VLLM_INLINE Ints dot(Ints acc, Bits w, Bits x) { return byte_dot(acc, x, w); }
#else
  // Bytes 0 and 2, and 1 and 3, as pairs of 16-bit numbers.
  struct Splat {
    Shorts even, odd;
  };
  static VLLM_INLINE Splat splat_of(const uint8_t* x) {
    const Bits word = splat_bits(x);
    return {reinterpret_cast<Shorts>(word & 0x00ff00ffu),
            reinterpret_cast<Shorts>((word >> 8) & 0x00ff00ffu)};
  }
  static VLLM_INLINE Ints dot(Ints acc, Bits w, Splat x) {
    const Shorts odd = reinterpret_cast<Shorts>(w) >> 8;
    const Shorts even = reinterpret_cast<Shorts>(w << 8) >> 8;
    return acc + pair_dot(even, x.even) + pair_dot(odd, x.odd);
  }
#endif
};

// Bytes 0..15, four of an int4 word, with signed bytes.
struct DotInt4 {
#ifdef VLLM_DOT_BYTES
  using Splat = Bits;
  static VLLM_INLINE Splat splat_of(const int8_t* x) { return splat_bits(x); }
  static VLLM_INLINE Ints dot(Ints acc, Bits q, Bits x) { return byte_dot(acc, q, x); }
#elif defined(__AVX2__)
  // The instruction saturates at 2^15: 2 * 15 * 127 stays below.
  using Splat = Bits;
  static VLLM_INLINE Splat splat_of(const int8_t* x) { return splat_bits(x); }
  static VLLM_INLINE Ints dot(Ints acc, Bits q, Bits x) {
#if defined(__AVX512BW__)
    const Shorts pairs = reinterpret_cast<Shorts>(
        _mm512_maddubs_epi16(reinterpret_cast<__m512i>(q), reinterpret_cast<__m512i>(x)));
#else
    const Shorts pairs = reinterpret_cast<Shorts>(
        _mm256_maddubs_epi16(reinterpret_cast<__m256i>(q), reinterpret_cast<__m256i>(x)));
#endif
    return acc + pair_dot(pairs, Shorts{} + int16_t{1});
  }
#else
  struct Splat {
    Shorts even, odd;
  };
  static VLLM_INLINE Splat splat_of(const int8_t* x) {
    const Bits word = splat_bits(x);
    return {reinterpret_cast<Shorts>(word << 8) >> 8, reinterpret_cast<Shorts>(word) >> 8};
  }
  static VLLM_INLINE Ints dot(Ints acc, Bits q, Splat x) {
    acc = acc + pair_dot(reinterpret_cast<Shorts>(q & 0x00ff00ffu), x.even);
    return acc + pair_dot(reinterpret_cast<Shorts>((q >> 8) & 0x00ff00ffu), x.odd);
  }
#endif
};

}  // namespace VLLM_ISA
