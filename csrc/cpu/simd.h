// A vector of floats, as wide as the instruction set for which this file is compiled, written with
// the vector extensions that GCC and clang share. Loads convert every element type to float, and
// stores round back, so a kernel is written once for all types.
//
// Everything is in namespace VLLM_ISA and nothing comes from the C++ library: this header is
// compiled once per instruction set. If an inline function had one name and two bodies, the linker
// might give an old processor the body for a new one.
#pragma once

#include <cstdint>

#include "dtypes.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace VLLM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2 and NEON; for other processors the compiler splits the operations
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));

#define VLLM_INLINE inline __attribute__((always_inline))

VLLM_INLINE Vec splat(float x) { return x - Vec{}; }

// Returns a * b + c, rounded once if the processor can. The compiler may not contract operations by
// itself (-ffp-contract=off), so that rotary embedding rounds as torch does.
VLLM_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                         reinterpret_cast<float32x4_t>(a),
                                         reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// Returns b if a or b is NaN: pass the constant first to keep NaN. Compilers turn the comparison
// and selection into one instruction with the same result.
#if defined(__AVX512F__)
VLLM_INLINE Vec max(Vec a, Vec b) {
  return reinterpret_cast<Vec>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
VLLM_INLINE Vec min(Vec a, Vec b) {
  return reinterpret_cast<Vec>(
      _mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
#elif defined(__AVX2__)
VLLM_INLINE Vec max(Vec a, Vec b) {
  return reinterpret_cast<Vec>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
}
VLLM_INLINE Vec min(Vec a, Vec b) {
  return reinterpret_cast<Vec>(
      _mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
}
#else
VLLM_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
VLLM_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#endif

// ---- element types ------------------------------------------------------------------------

VLLM_INLINE float to_float(float x) { return x; }
VLLM_INLINE float to_float(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}

VLLM_INLINE Vec load(const float* from) {
  Vec out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
// Loads integers of 16 bits, one into each lane. Of the general form GCC 12 makes five instructions.
VLLM_INLINE Bits load_halves(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bits>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Bits>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return __builtin_convertvector(half, Bits);
#endif
}
VLLM_INLINE Vec load(const bf16* from) {
  return reinterpret_cast<Vec>(load_halves(from) << 16);
}

// Returns the bits of the nearest bf16 (ties to even) in the upper half of each lane; the lower
// half is undefined. NaN stays NaN: without the special case, the addition could carry its payload
// into infinity.
VLLM_INLINE Bits nearest_bf16(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x == x ? rounded : Bits{} + 0x7fc00000u;
}

VLLM_INLINE void store(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof x); }
VLLM_INLINE void store(bf16* to, Vec x) {
  const HalfBits half = __builtin_convertvector(nearest_bf16(x) >> 16, HalfBits);
  __builtin_memcpy(to, &half, sizeof half);
}

// Returns x rounded to T and converted back to float.
template <typename T>
VLLM_INLINE Vec round_to(Vec x);
template <>
VLLM_INLINE Vec round_to<float>(Vec x) {
  return x;
}
template <>
VLLM_INLINE Vec round_to<bf16>(Vec x) {
  return reinterpret_cast<Vec>(nearest_bf16(x) & 0xffff0000u);
}

// Loads the first `count` lanes; the others are zero, and their memory is not read.
template <typename T>
VLLM_INLINE Vec load(const T* from, int64_t count) {
  if (count == kLanes) return load(from);
  T lanes[kLanes] = {};
  __builtin_memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}
template <typename T>
VLLM_INLINE void store(T* to, Vec x, int64_t count) {
  if (count == kLanes) return store(to, x);
  T lanes[kLanes];
  store(lanes, x);
  __builtin_memcpy(to, lanes, count * sizeof(T));
}

// Calls body(offset, count) for each vector of n elements. `count` is the constant kLanes in all
// calls except the last, so that the branches above cost nothing.
template <typename Body>
VLLM_INLINE void for_each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, int64_t{kLanes});
  if (i < n) body(i, n - i);
}

// ---- across lanes -------------------------------------------------------------------------

// Returns sums of neighbouring lanes: first of a, then of b.
VLLM_INLINE Vec pair_sums(Vec a, Vec b) {
#if defined(__clang__)
#define VLLM_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
  typedef int32_t Index __attribute__((vector_size(kLanes * 4)));
#define VLLM_SHUFFLE(...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
  return VLLM_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         VLLM_SHUFFLE(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  return VLLM_SHUFFLE(0, 2, 4, 6, 8, 10, 12, 14) + VLLM_SHUFFLE(1, 3, 5, 7, 9, 11, 13, 15);
#else
  return VLLM_SHUFFLE(0, 2, 4, 6) + VLLM_SHUFFLE(1, 3, 5, 7);
#endif
#undef VLLM_SHUFFLE
}

// Lane i of the result is the sum of all lanes of rows[i]. Overwrites rows.
VLLM_INLINE Vec sum_each(Vec (&rows)[kLanes]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The instruction adds neighbours within each half of its operands.
  const auto in_halves = [](Vec a, Vec b) {
    return reinterpret_cast<Vec>(
        _mm256_hadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
  };
#pragma GCC unroll 2
  for (int n = 4; n > 1; n /= 2) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) rows[i] = in_halves(rows[2 * i], rows[2 * i + 1]);
  }
  const __m256 first = reinterpret_cast<__m256>(rows[0]), last = reinterpret_cast<__m256>(rows[1]);
  return reinterpret_cast<Vec>(_mm256_permute2f128_ps(first, last, 0x20)) +
         reinterpret_cast<Vec>(_mm256_permute2f128_ps(first, last, 0x31));
#else
#pragma GCC unroll 16
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = pair_sums(rows[2 * i], rows[2 * i + 1]);
  }
  return rows[0];
#endif
}

// Adds all lanes, half by half, because adding one lane after another would wait for each addition.
VLLM_INLINE float sum_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
#pragma GCC unroll 16
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  }
  return lanes[0];
}
VLLM_INLINE float max_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
#pragma GCC unroll 16
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
  }
  return lanes[0];
}

// Returns whether a lane differs from zero.
VLLM_INLINE bool any_lane(Bits lanes) {
#if defined(__AVX512F__)
  const __m512i bits = reinterpret_cast<__m512i>(lanes);
  return _mm512_test_epi32_mask(bits, bits) != 0;
#else
  uint32_t all = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) all |= lanes[i];
  return all != 0;
#endif
}

// ---- functions ----------------------------------------------------------------------------

// Returns e^x within 1.5 ulp. Below -87.3 the result stays at 1e-38 instead of reaching zero, and
// above 88.3 at 2e38. x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial was fitted on that range.
VLLM_INLINE Vec exp(Vec x) {
  x = min(splat(88.3f), max(splat(-87.3f), x));
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the low mantissa bits
  const Vec shifted = fma(x, splat(1.44269504f), splat(kRound));
  const Vec n = shifted - kRound;
  Vec r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.428606765330187e-06f), r);
  Vec p = splat(0.0013926250394433737f);
  p = fma(p, r, splat(0.00836323294788599f));
  p = fma(p, r, splat(0.04166655242443085f));
  p = fma(p, r, splat(0.16666576266288757f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n: the shift removes all but the low bits of `shifted`. A multiplication keeps NaN; adding to
  // the exponent of p could turn NaN into a finite value.
  return p * reinterpret_cast<Vec>((reinterpret_cast<Bits>(shifted) << 23) + 0x3f800000u);
}

// Returns 2^x for x <= 8, within 2e-7, or 3e-6 if kIsRough; at least 2^-125. x = n + r with |r| <=
// 1 / 2, or 0 <= r < 1 where an instruction splits x so; the polynomials were fitted on these ranges.
template <bool kIsRough>
VLLM_INLINE Vec exp2(Vec x) {
  x = max(splat(-125.0f), x);
#if defined(__AVX512DQ__)
  if constexpr (kIsRough) {
    const __m512 v = reinterpret_cast<__m512>(x);
    const Vec r = reinterpret_cast<Vec>(_mm512_reduce_ps(v, 1));  // x - floor(x)
    Vec p = fma(r, splat(0.0135341799f), splat(0.0520114750f));
    p = fma(r, p, splat(0.2414427102f));
    p = fma(r, p, splat(0.6930038333f));
    p = fma(r, p, splat(1.0000026226f));
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), v));
  }
#endif
#if defined(__AVX512F__)
  const Vec n = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x), 8));
#else
  const float kRound = 12582912.0f;  // as for exp
  const Vec shifted = x + kRound, n = shifted - kRound;
#endif
  const Vec r = x - n, square = r * r;
  Vec p, first;
  if constexpr (kIsRough) {
    first = fma(r, splat(0.6931240751f), splat(1.0f));
    p = fma(r, splat(0.0559064262f), splat(0.2402409911f));
    p = fma(square, splat(0.0095828529f), p);
  } else {
    first = fma(r, splat(0.6931470037f), splat(1.0f));
    p = fma(r, splat(0.0013264727f), splat(0.0096715130f));
    p = fma(square, p, fma(r, splat(0.0555073359f), splat(0.2402224243f)));
  }
  p = fma(square, p, first);
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  return p * reinterpret_cast<Vec>((reinterpret_cast<Bits>(shifted) << 23) + 0x3f800000u);
#endif
}

// Returns tanh within 3e-7. Near zero it uses the series, because the difference from one would
// lose precision.
VLLM_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = fma(square, splat(62.0f / 2835), splat(-17.0f / 315));
  p = fma(p, square, splat(2.0f / 15));
  p = fma(p, square, splat(-1.0f / 3));
  const Vec near = fma(p * square, x, x);
  const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return square < 0.09f ? near : far;
}

}  // namespace VLLM_ISA
