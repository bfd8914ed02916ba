// Multiplies one word of a packed weight with its inputs, for each pair of weight and input type.
// Products are accumulated in lanes, with inputs in ascending order.
//
// A Dot has: Acc, a vector of sums; kInputs, the number of weights in a word; Input, the type of x.
// A word is multiplied in kParts steps: part<i> gives the weights of a step in the form in which
// they are multiplied; splat_of<i> broadcasts the inputs of that step to all lanes; and dot adds
// their products to sums. All rows of a tile take one step before any takes the next, so that few
// registers hold weights.
#pragma once

#include "simd.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace VLLM_ISA {

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));

VLLM_INLINE Bits load_bits(const void* from) {
  Bits out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
// Loads bytes, one into each lane.
VLLM_INLINE Bits load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  ByteLanes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Bits);
#endif
}
// Returns the lowest byte of each lane; the other bytes must be zero.
VLLM_INLINE ByteLanes narrow_to_bytes(Bits lanes) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // In two steps, because GCC 12 moves the lanes one by one if it is one.
  return __builtin_convertvector(__builtin_convertvector(lanes, HalfBits), ByteLanes);
#else
  return __builtin_convertvector(lanes, ByteLanes);
#endif
}
// Replaces each byte below 16 by an entry of a table.
typedef uint8_t ByteTable __attribute__((vector_size(16)));
VLLM_INLINE Bits look_up(ByteTable table, Bits index) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Bits>(_mm512_shuffle_epi8(
      _mm512_broadcast_i32x4(reinterpret_cast<__m128i>(table)), reinterpret_cast<__m512i>(index)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(reinterpret_cast<__m128i>(table)),
                          reinterpret_cast<__m256i>(index)));
#elif defined(__aarch64__)
  return reinterpret_cast<Bits>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table),
                                           reinterpret_cast<uint8x16_t>(index)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
  Bytes bytes = reinterpret_cast<Bytes>(index);
  for (int i = 0; i < kLanes * 4; ++i) bytes[i] = table[bytes[i]];
  return reinterpret_cast<Bits>(bytes);
#endif
}
VLLM_INLINE Bits splat_bits(const void* word) {
  uint32_t bits;
  __builtin_memcpy(&bits, word, sizeof bits);
  return bits - Bits{};
}

// Base of each Dot that multiplies a word without unpacking it.
struct WholeWord {
  static constexpr int kParts = 1;
  template <int>
  static VLLM_INLINE Bits part(Bits w) {
    return w;
  }
};

struct DotFloat : WholeWord {
  using Input = float;
  using Acc = Vec;
  using Splat = Vec;
  static constexpr int kInputs = 1;
  template <int = 0>
  static VLLM_INLINE Splat splat_of(const float* x) {
    return splat(*x);
  }
  static VLLM_INLINE Vec dot(Vec acc, Bits w, Vec x) {
    return fma(reinterpret_cast<Vec>(w), x, acc);
  }
};

// bf16 weights with float inputs. Products are exact, because both are converted without loss.
struct DotWide {
  using Input = float;
  using Acc = Vec;
  static constexpr int kInputs = 2, kParts = 2;
  template <int kPart>
  static VLLM_INLINE Vec part(Bits w) {
    return reinterpret_cast<Vec>(kPart == 0 ? w << 16 : w & 0xffff0000u);
  }
  template <int kPart>
  static VLLM_INLINE Vec splat_of(const float* x) {
    return splat(x[kPart]);
  }
  static VLLM_INLINE Vec dot(Vec acc, Vec w, Vec x) { return fma(w, x, acc); }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define VLLM_DOT_BF16
// Adds pairs of products in one instruction; subnormal values count as zero.
struct DotBf16 : WholeWord {
  using Input = bf16;
  using Acc = Vec;
  using Splat = Bits;
  static constexpr int kInputs = 2;
  template <int = 0>
  static VLLM_INLINE Splat splat_of(const bf16* x) {
    return splat_bits(x);
  }
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

// Returns the sums of the products of neighbouring 16-bit integers.
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

// Returns acc + x, computed at this point of the code: otherwise the compiler groups the additions
// of several steps and runs out of registers.
template <class Sums>
VLLM_INLINE Sums add_here(Sums acc, Sums x) {
  acc += x;
#if defined(__AVX512F__)
  __asm__("" : "+v"(acc));
#elif defined(__SSE2__)
  __asm__("" : "+x"(acc));
#endif
  return acc;
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define VLLM_DOT_BYTES
// Returns acc plus the sums of four products of unsigned and signed bytes.
VLLM_INLINE Ints byte_dot(Ints acc, Bits unsigned_bytes, Bits signed_bytes) {
#ifdef __AVX512VNNI__
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc),
                                                    reinterpret_cast<__m512i>(unsigned_bytes),
                                                    reinterpret_cast<__m512i>(signed_bytes)));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(acc),
                                                        reinterpret_cast<__m256i>(unsigned_bytes),
                                                        reinterpret_cast<__m256i>(signed_bytes)));
#else
  return reinterpret_cast<Ints>(vusdotq_s32(reinterpret_cast<int32x4_t>(acc),
                                            reinterpret_cast<uint8x16_t>(unsigned_bytes),
                                            reinterpret_cast<int8x16_t>(signed_bytes)));
#endif
}
#endif

// int8 weights with inputs x + 128, because the instruction multiplies unsigned by signed bytes.
// The caller subtracts 128 times the sum of the weights. Exact: the sums stay below 2^31 for up to
// 66,000 inputs.
#ifdef VLLM_DOT_BYTES
struct DotInt8 : WholeWord {
  using Acc = Ints;
  using Input = uint8_t;
  static constexpr int kInputs = 4;
  template <int>
  static VLLM_INLINE Bits splat_of(const uint8_t* x) {
    return splat_bits(x);
  }
  static VLLM_INLINE Ints dot(Ints acc, Bits w, Bits x) { return byte_dot(acc, x, w); }
};
#else
// Multiplies bytes 0 and 2, and bytes 1 and 3, as pairs of 16-bit integers. Inputs are in the same
// order (`spread`).
struct DotInt8 {
  using Acc = Ints;
  using Input = int16_t;
  static constexpr int kInputs = 4, kParts = 2;
  template <int kPart>
  static VLLM_INLINE Shorts part(Bits w) {
    return reinterpret_cast<Shorts>(kPart == 0 ? w << 8 : w) >> 8;
  }
  template <int kPart>
  static VLLM_INLINE Shorts splat_of(const int16_t* x) {
    return reinterpret_cast<Shorts>(splat_bits(x + 2 * kPart));
  }
  static VLLM_INLINE Ints dot(Ints acc, Shorts w, Shorts x) {
    return add_here(acc, pair_dot(w, x));
  }
};
#endif

// Multiplies unpacked values (bytes from 0 to kLargest, four in a word) with signed bytes of at
// least -127. Sums over a whole block are exact. If kRunWords is not 0, sums are exact only over
// kRunWords words of eight values; then `widen` converts them to Ints.
template <int kLargest>
struct DotInt4 {
#ifdef VLLM_DOT_BYTES
  using Sums = Ints;
  static constexpr int64_t kRunWords = 0;
  static VLLM_INLINE Bits splat_of(const int8_t* x) { return splat_bits(x); }
  static VLLM_INLINE Sums dot(Sums sums, Bits q, Bits x) { return byte_dot(sums, q, x); }
#elif defined(__AVX2__)
  // Sums of pairs, in 16 bits.
  using Sums = Shorts;
  static constexpr int64_t kRunWords = 32767 / (2 * kLargest * 127) / 2;
  static VLLM_INLINE Bits splat_of(const int8_t* x) { return splat_bits(x); }
  static VLLM_INLINE Sums dot(Sums sums, Bits q, Bits x) {
#if defined(__AVX512BW__)
    const Shorts pairs = reinterpret_cast<Shorts>(
        _mm512_maddubs_epi16(reinterpret_cast<__m512i>(q), reinterpret_cast<__m512i>(x)));
#else
    const Shorts pairs = reinterpret_cast<Shorts>(
        _mm256_maddubs_epi16(reinterpret_cast<__m256i>(q), reinterpret_cast<__m256i>(x)));
#endif
    return add_here(sums, pairs);
  }
  static VLLM_INLINE Ints widen(Sums sums) { return pair_dot(sums, Shorts{} + int16_t{1}); }
#else
  using Sums = Ints;
  static constexpr int64_t kRunWords = 0;
  struct Splat {
    Shorts even, odd;
  };
  static VLLM_INLINE Splat splat_of(const int8_t* x) {
    const Bits word = splat_bits(x);
    return {reinterpret_cast<Shorts>(word << 8) >> 8, reinterpret_cast<Shorts>(word) >> 8};
  }
  static VLLM_INLINE Sums dot(Sums sums, Bits q, Splat x) {
    sums = add_here(sums, pair_dot(reinterpret_cast<Shorts>(q & 0x00ff00ffu), x.even));
    return add_here(sums, pair_dot(reinterpret_cast<Shorts>((q >> 8) & 0x00ff00ffu), x.odd));
  }
#endif
};

}  // namespace VLLM_ISA
