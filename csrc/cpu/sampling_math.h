// Arithmetic of sampling, with the same order and rounding on every instruction set.
#pragma once

#include "sampling_args.h"
#include "simd.h"

namespace VLLM_ISA {

using vllm_cpu::kVocabBlock;

constexpr float kInfinity = __builtin_inff();

// Returns a * b + c, rounded once. Without such an instruction it is computed in double, which
// rounds differently in one of 2^28 cases.
VLLM_INLINE Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX2__) || defined(__AVX512F__) || defined(__aarch64__)
  return fma(a, b, c);
#else
  typedef double Wide __attribute__((vector_size(kLanes * 8)));
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  return __builtin_convertvector(product + __builtin_convertvector(c, Wide), Vec);
#endif
}

constexpr float kLeastPower = -126.0f;  // below it 2^x is subnormal

// Returns 2^x within 1 ulp for x in [kLeastPower, 0], undefined for other x. The polynomial was
// fitted on [-1/2, 1/2].
VLLM_INLINE Vec power_of_two(Vec x) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the low mantissa bits
  const Vec shifted = x + kRound;
  const Vec r = x - (shifted - kRound);
  Vec p = splat(0.00015370705f);
  p = fused(p, r, splat(0.0013399848f));
  p = fused(p, r, splat(0.009618374f));
  p = fused(p, r, splat(0.05550329f));
  p = fused(p, r, splat(0.24022648f));
  p = fused(p, r, splat(0.6931472f));
  p = fused(p, r, splat(1.0f));
  // Adds n to the exponent: the shift removes all but the low bits of `shifted`.
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23));
}

// Returns -log(x) within 3 ulp for normal x in (0, 1), also near 1: with x = 2^n m and s = (m - 1)
// / (m + 1), log(m) = 2 atanh(s). The polynomial was fitted on m in [sqrt(1/2), sqrt(2)].
VLLM_INLINE Vec negative_log(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits from_low = bits - 0x3f3504f3u;  // sqrt(1/2)
  typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
  const Vec n = __builtin_convertvector(reinterpret_cast<Ints>(from_low) >> 23, Vec);
  const Vec m = reinterpret_cast<Vec>((from_low & 0x007fffffu) + 0x3f3504f3u);
  const Vec s = (m - 1.0f) / (m + 1.0f);
  const Vec z = s * s;
  Vec p = splat(0.29788864f);
  p = fused(p, z, splat(0.39980465f));
  p = fused(p, z, splat(0.6666675f));
  const Vec log_m = fused(p * z, s, s + s);
  return -fused(n, splat(0.693359375f), fused(n, splat(-2.12194440e-4f), log_m));
}

// Adds a block of 128 values in an order that does not depend on the vector width: first values
// that are 16 apart, then the 16 sums.
class BlockSum {
 public:
  VLLM_INLINE explicit BlockSum(const float* block) {
#pragma GCC unroll 4
    for (int g = 0; g < kParts; ++g) {
      Vec even = load(block + g * kLanes), odd = load(block + g * kLanes + 16);
#pragma GCC unroll 3
      for (int i = 32; i < kVocabBlock; i += 32) {
        even += load(block + g * kLanes + i);
        odd += load(block + g * kLanes + i + 16);
      }
      parts_[g] = even + odd;
    }
  }
  VLLM_INLINE float total() const {
    float lanes[16];
#pragma GCC unroll 4
    for (int g = 0; g < kParts; ++g) store(lanes + g * kLanes, parts_[g]);
#pragma GCC unroll 16
    for (int n = 8; n > 0; n /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    }
    return lanes[0];
  }

 private:
  friend class Mass;
  static constexpr int kParts = 16 / kLanes;
  Vec parts_[kParts];
};

// The sum of many blocks, in double precision.
class Mass {
 public:
  VLLM_INLINE void add(const BlockSum& block) {
#pragma GCC unroll 4
    for (int g = 0; g < BlockSum::kParts; ++g) {
      parts_[g] += __builtin_convertvector(block.parts_[g], Wide);
    }
  }
  double total() const {
    double sum = 0;
    for (int lane = 0; lane < 16; ++lane) sum += parts_[lane / kLanes][lane % kLanes];
    return sum;
  }

 private:
  typedef double Wide __attribute__((vector_size(kLanes * 8)));
  Wide parts_[BlockSum::kParts] = {};
};

// ---- random numbers -----------------------------------------------------------------------

// Bit for bit the same as vllm/sample/random.py, except for the logarithm.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

VLLM_INLINE uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

VLLM_INLINE uint64_t bits_at(uint64_t key, int64_t position) {
  return mix_bits(key + (static_cast<uint64_t>(position) + 1) * kGolden);
}

// Computes random values first, first + 1, ... of a key and position (`bits`), exponentially
// distributed. out: [count].
inline void exponentials(uint64_t bits, int64_t first, int64_t count, float* out) {
  uint64_t step = bits + static_cast<uint64_t>(first) * kGolden;
  for (int64_t i = 0; i < count; ++i) {
    const auto top_bits = static_cast<int32_t>(mix_bits(step + (i + 1) * kGolden) >> 41);
    out[i] = (static_cast<float>(top_bits) + 0.5f) * 0x1p-23f;
  }
  for_each_vector(count, [&](int64_t i, int64_t n) {
    store(out + i, negative_log(load(out + i, n)), n);
  });
}

}  // namespace VLLM_ISA
