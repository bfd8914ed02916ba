// Weights that are converted to bf16 just before they are multiplied: fp8 (e4m3); integers from 0
// to 255 with zero points; and 4-bit codes that index a table. The conversion is exact, and inputs
// are not rounded.
//
// A Code is constructed from a weight. It has: kBits, the size of an element in memory; kHasZeros,
// for weights with zero points, which may have an order of inputs; and widen, which converts four
// bytes, or four codes in bytes, of each lane to bf16.
#pragma once

#include "fp8.h"
#include "linear_tile.h"

namespace VLLM_ISA {

// first: the bf16 of the first and third byte of each lane. second: of the second and fourth byte.
struct Pairs {
  Bits first, second;
};

#ifdef __AVX2__
// Tables that convert finite e4m3 to bf16. A byte has a sign, four exponent bits and three mantissa
// bits. The exponent bias grows by 127 - 7, which is even, so the last exponent bit does not
// change, and the upper byte of the bf16 follows from the sign and the upper three exponent bits.
// Subnormal values are looked up by their lower half; most vectors have none.
VLLM_INLINE __m128i e4m3_table(uint64_t low, uint64_t high) {
  return _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
}
VLLM_INLINE __m128i e4m3_upper() {
  return e4m3_table(0x434241403f3e3d3cu, 0xc3c2c1c0bfbebdbcu);
}
VLLM_INLINE __m128i e4m3_tiny_upper() { return e4m3_table(0x3c3c3c3c3b3b3b00u, 0); }
VLLM_INLINE __m128i e4m3_tiny_lower() { return e4m3_table(0x60402000c0800000u, 0); }
#endif

#if defined(__AVX512BW__)
VLLM_INLINE Pairs widen_e4m3(Bits of) {
  const auto table = [](__m128i numbers) { return _mm512_broadcast_i32x4(numbers); };
  const auto set = [](uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); };
  const __m512i bytes = reinterpret_cast<__m512i>(of);
  const __m512i odd = set(0xff00ff00u), shifted = _mm512_srli_epi16(bytes, 4);
  __m512i upper =
      _mm512_shuffle_epi8(table(e4m3_upper()), _mm512_and_si512(shifted, set(0x0f0f0f0fu)));
  // Selects by each bit of `odd`: the first operand if it is set, otherwise the second.
  const auto join = [odd](__m512i first, __m512i second) {
    return reinterpret_cast<Bits>(_mm512_ternarylogic_epi32(odd, first, second, 0xca));
  };
  const auto is_tiny = _mm512_testn_epi8_mask(bytes, set(0x78787878u));
  if (__builtin_expect(is_tiny == 0, 1)) {
    const __m512i lower = set(0x00f000f0u);
    return {join(_mm512_slli_epi16(upper, 8), _mm512_and_si512(_mm512_slli_epi16(bytes, 4), lower)),
            join(upper, _mm512_and_si512(shifted, lower))};
  }
  const __m512i last = _mm512_and_si512(bytes, set(0x0f0f0f0fu));
  upper = _mm512_mask_shuffle_epi8(upper, is_tiny, table(e4m3_tiny_upper()), last);
  upper = _mm512_ternarylogic_epi32(upper, bytes, set(0x80808080u), 0xf8);  // a | b & c
  __m512i lower = _mm512_slli_epi16(last, 4);
  lower = _mm512_mask_shuffle_epi8(lower, is_tiny, table(e4m3_tiny_lower()), last);
  return {join(_mm512_slli_epi16(upper, 8), lower), join(upper, _mm512_srli_epi16(lower, 8))};
}
#elif defined(__AVX2__)
VLLM_INLINE Pairs widen_e4m3(Bits bytes) {
  const auto look_up = [](__m128i table, Bits index) {
    return reinterpret_cast<Bits>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table),
                                                      reinterpret_cast<__m256i>(index)));
  };
  const Bits shifted = bytes >> 4;
  Bits upper = look_up(e4m3_upper(), shifted & 0x0f0f0f0fu);
  const __m256i is_tiny = _mm256_cmpeq_epi8(reinterpret_cast<__m256i>(bytes & 0x78787878u),
                                            _mm256_setzero_si256());
  if (__builtin_expect(_mm256_testz_si256(is_tiny, is_tiny), 1)) {
    return {(upper & 0x00ff00ffu) << 8 | ((bytes << 4) & 0x00f000f0u),
            (upper & 0xff00ff00u) | (shifted & 0x00f000f0u)};
  }
  const auto choose = [is_tiny](Bits tiny, Bits other) {
    return reinterpret_cast<Bits>(_mm256_blendv_epi8(reinterpret_cast<__m256i>(other),
                                                     reinterpret_cast<__m256i>(tiny), is_tiny));
  };
  const Bits last = bytes & 0x0f0f0f0fu;
  upper = choose(look_up(e4m3_tiny_upper(), last), upper) | (bytes & 0x80808080u);
  const Bits lower = choose(look_up(e4m3_tiny_lower(), last), last << 4);
  return {(upper & 0x00ff00ffu) << 8 | (lower & 0x00ff00ffu),
          (upper & 0xff00ff00u) | ((lower >> 8) & 0x00ff00ffu)};
}
#endif

struct Fp8Code {
  static constexpr int kBits = 8;
  static constexpr bool kHasZeros = false;

  explicit Fp8Code(const LinearWeight&) {}

  VLLM_INLINE Pairs widen(Bits bytes, Vec) const {
#ifdef __AVX2__
    return widen_e4m3(bytes);
#else
    const auto pair = [](Bits two) {
      const Bits low = reinterpret_cast<Bits>(widen_fp8<E4m3>(two & 0xffu));
      const Bits high = reinterpret_cast<Bits>(widen_fp8<E4m3>(two >> 16));
      return low >> 16 | high;
    };
    return {pair(bytes & 0x00ff00ffu), pair((bytes >> 8) & 0x00ff00ffu)};
#endif
  }
};

// q - zero is an integer from -256 to 255 and has at most 8 significant bits, so bf16 is exact.
struct Uint8Code {
  static constexpr int kBits = 8;
  static constexpr bool kHasZeros = true;

  explicit Uint8Code(const LinearWeight&) {}

  VLLM_INLINE Pairs widen(Bits bytes, Vec zero) const {
    const auto number = [zero](Bits q) {
      return reinterpret_cast<Bits>(
          __builtin_convertvector(reinterpret_cast<Ints>(q), Vec) - zero);
    };
    return {number(bytes & 0xffu) >> 16 | number((bytes >> 16) & 0xffu),
            number((bytes >> 8) & 0xffu) >> 16 | number(bytes >> 24)};
  }
};

// 4-bit codes. The upper and the lower bytes of the bf16 are looked up separately.
struct Table4Code {
  static constexpr int kBits = 4;
  static constexpr bool kHasZeros = false;

  explicit Table4Code(const LinearWeight& weight) {
    for (int i = 0; i < 16; ++i) {
      upper[i] = static_cast<uint8_t>(weight.table[i] >> 8);
      lower[i] = static_cast<uint8_t>(weight.table[i]);
    }
  }

  VLLM_INLINE Pairs widen(Bits codes, Vec) const {
    const Bits high = look_up(upper, codes), low = look_up(lower, codes);
    return {(high & 0x00ff00ffu) << 8 | (low & 0x00ff00ffu),
            (high & 0xff00ff00u) | ((low >> 8) & 0x00ff00ffu)};
  }

 private:
  ByteTable upper, lower;
};

// Loads the bytes of four inputs for each output; `word` is the index of these four inputs divided
// by 4. 4-bit codes are unpacked to bytes.
template <class Code>
VLLM_INLINE Bits load_four(const uint32_t* w, int64_t word) {
  if constexpr (Code::kBits == 8) return load_bits(w + word * kPanel);
  return (load_bits(w + word / 2 * kPanel) >> (word % 2 * 4)) & 0x0f0f0f0fu;
}

// The tile for the first rows of x. It converts weights in registers while it multiplies, and
// stores the converted weights for the other rows (WidenedTile). Both tiles add in the same order.
template <class DotOf, class CodeOf>
struct ByteTile {
  using Dot = DotOf;
  using Code = CodeOf;
  using Input = typename Dot::Input;
  using Acc = Vec;
  static constexpr int64_t kRowUnit = 1;
};

// The tile for the other rows of x. While it multiplies, it prefetches half of the bytes of the
// next block of inputs.
template <class Dot>
struct WidenedTile : DenseTile<Dot> {
  static constexpr bool kIsFollowed = false;
  static constexpr int64_t kStepLines = DenseTile<Dot>::kStepLines / 2;
};

constexpr int64_t kWidenedInputs = 128;       // number of inputs of a panel that are converted at a
                                              // time: 16 KiB
constexpr int64_t kAheadWords = 64 * kPanel;  // prefetch distance: 16 KiB

// total[kRows][64] = (or +=) scales times the dot products over `inputs` inputs of a panel, which
// share a scale. widened: with kKeeps, receives the converted weights as words of a bf16 weight.
template <class Dot, class Code, int kRows, bool kKeeps>
void add_widened(Code code, const typename Dot::Input* x, int64_t x_stride, const uint32_t* w,
                 const float* zeros, const float* scales, int64_t inputs,
                 Vec (*total)[kPanel / kLanes], bool is_first, uint32_t* widened) {
  constexpr int kVectors = tile_vectors(kRows);
  for (int column = 0; column < kPanel; column += kVectors * kLanes) {
    Vec acc[kRows][kVectors] = {};
    for (int64_t word = 0; word < inputs / 4; ++word) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t* const from = w + column + v * kLanes;
        if (!kKeeps) __builtin_prefetch(from + word * Code::kBits / 8 * kPanel + kAheadWords);
        const Vec zero = Code::kHasZeros ? load(zeros + column + v * kLanes) : Vec{};
        const Pairs pairs = code.widen(load_four<Code>(from, word), zero);
        if (kKeeps) {
          uint32_t* const to = widened + 2 * word * kPanel + column + v * kLanes;
          __builtin_memcpy(to, &pairs.first, sizeof pairs.first);
          __builtin_memcpy(to + kPanel, &pairs.second, sizeof pairs.second);
        }
        const auto add = [&](Bits pair, const typename Dot::Input* two) __attribute__((always_inline)) {
          unroll<Dot::kParts>([&](auto number) __attribute__((always_inline)) {
            constexpr int kPart = decltype(number)::value;
            const auto part = Dot::template part<kPart>(pair);
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r) {
              const auto splat = Dot::template splat_of<kPart>(two + r * x_stride);
              acc[r][v] = Dot::dot(acc[r][v], part, splat);
            }
          });
        };
        add(pairs.first, x + word * 4);
        add(pairs.second, x + word * 4 + 2);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        Vec& sum = total[r][column / kLanes + v];
        sum = fma(acc[r][v], load(scales + column + v * kLanes), is_first ? Vec{} : sum);
      }
    }
  }
}

// Returns the bit position of input i of four in its word.
constexpr int byte_shift(int i) { return i == 1 ? 16 : i == 2 ? 8 : 8 * i; }

// Returns the weight of output n and an input, for weights of bytes or codes.
inline float byte_weight(const LinearWeight& weight, int64_t n, int64_t input) {
  const bool is_table = weight.format == vllm_cpu::WeightFormat::kTable4;
  const int64_t words = vllm_cpu::panel_words(weight), per_word = is_table ? 8 : 4;
  const uint32_t word =
      weight.panels[n / kPanel * words + input / per_word * kPanel + n % kPanel];
  const int64_t place = input / weight.block_inputs * vllm_cpu::num_panels(weight) * kPanel + n;
  if (is_table) {
    const uint32_t code = word >> (byte_shift(input % 4) + input % 8 / 4 * 4) & 0xfu;
    return to_float(bf16{weight.table[code]}) * weight.scales[place];
  }
  const Bits byte = (word >> byte_shift(input % 4) & 0xffu) - Bits{};
  const float number = weight.format == vllm_cpu::WeightFormat::kFp8
                           ? widen_fp8<E4m3>(byte)[0]
                           : static_cast<float>(byte[0]) - weight.zeros[place];
  return number * weight.scales[place];
}

}  // namespace VLLM_ISA
