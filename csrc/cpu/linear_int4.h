// Weights of 4 or 5 bits in blocks of inputs (linear_format.h): unpacking, and the innermost loop.
//
// A Code has: kZero, the constant that is subtracted from every value; kHasZeros, if each block has
// its own zero point instead; kHasMinimums, if a block has a minimum that is subtracted from every
// weight; kHasHighBits, for a fifth bit of each value; and numbers, which unpacks the lower halves
// of bytes to bytes from 0 to kLargest.
#pragma once

#include "linear_tile.h"

namespace VLLM_ISA {

// Converts finite float16 to floats.
VLLM_INLINE Vec load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, half));
#elif defined(__aarch64__)
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return reinterpret_cast<Vec>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(half)));
#else
  const Bits bits = load_halves(from);
  // Multiply by 2^112, because the exponent bias is 15 in float16 and 127 in float.
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f;
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(size) | ((bits & 0x8000u) << 16));
#endif
}

struct Int4Code {
  static constexpr int32_t kZero = 8, kLargest = 15;
  static constexpr bool kHasZeros = false, kHasMinimums = false, kHasHighBits = false;
  static VLLM_INLINE Bits numbers(Bits q) { return q; }
};

struct Int4ZerosCode : Int4Code {
  static constexpr bool kHasZeros = true;
};

struct Int4MinimumsCode : Int4Code {
  static constexpr int32_t kZero = 0;
  static constexpr bool kHasMinimums = true;
};

struct Int5MinimumsCode : Int4MinimumsCode {
  static constexpr int32_t kLargest = 31;
  static constexpr bool kHasHighBits = true;
};

// Twice the E2M1 value, plus 12. The doubled magnitudes are 0, 1, 2, 3, 4, 6, 8 and 12; bit 3 is
// the sign.
struct E2m1Code : Int4Code {
  static constexpr int32_t kZero = 12, kLargest = 24;

  static VLLM_INLINE Bits numbers(Bits q) {
#if defined(__AVX2__) || defined(__aarch64__)
    return look_up(ByteTable{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}, q);
#else
    typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
    const Bytes number = reinterpret_cast<Bytes>(q), size = number & 7;
    Bytes twice = size - (size > 4) - (size > 5);
    twice -= (size > 6) * 3;
    return reinterpret_cast<Bits>(number > 7 ? 12 - twice : 12 + twice);
#endif
  }
};

// The header of each block in a converted row of x.
struct Int4Header {
  float scale;  // value of one step
  union {
    int32_t start;  // minus the sum of the bytes: times kZero or, with zero points, modulo 2^16
    float sum;      // with minimums: the sum of the inputs
  };
};

// One block of a panel, with the float16 factors that neighbouring blocks share.
template <class Code>
struct Int4Block {
  const uint32_t* factors;  // null without minimums
  const uint32_t* header;

  const uint32_t* words() const {
    return header + (Code::kHasMinimums ? 2 * vllm_cpu::kByteWords : vllm_cpu::kScaleWords) +
           (Code::kHasZeros ? vllm_cpu::kByteWords : 0) + (Code::kHasHighBits ? kPanel : 0);
  }
  // Returns the scales of the outputs from `output` on.
  VLLM_INLINE Vec scales(int64_t output) const {
    if (!Code::kHasMinimums) return load_float16(halves(header) + output);
    return load_float16(halves(factors) + output) * multipliers(header, output);
  }
  VLLM_INLINE Vec minimums(int64_t output) const {
    return load_float16(halves(factors) + kPanel + output) *
           multipliers(header + vllm_cpu::kByteWords, output);
  }
  VLLM_INLINE Bits zeros(int64_t output) const {
    return bytes(header + vllm_cpu::kScaleWords, output);
  }
  // Returns four values of each output as bytes: the values of inputs 4 * quad to 4 * quad + 3.
  VLLM_INLINE Bits quads(int64_t quad, int64_t output) const {
    const Bits word = load_bits(words() + quad / 2 * kPanel + output);
    Bits q = Code::numbers((word >> (quad % 2 * 4)) & 0x0f0f0f0fu);
    if constexpr (Code::kHasHighBits) {
      const Bits high = load_bits(header + 2 * vllm_cpu::kByteWords + output);
      q |= ((high >> static_cast<int>(quad)) & 0x01010101u) << 4;
    }
    return q;
  }

 private:
  static const uint16_t* halves(const uint32_t* at) {
    return reinterpret_cast<const uint16_t*>(at);
  }
  static VLLM_INLINE Bits bytes(const uint32_t* at, int64_t output) {
    return load_bytes(reinterpret_cast<const uint8_t*>(at) + output);
  }
  // Returns multipliers, which are stored in two's complement, as floats.
  static VLLM_INLINE Vec multipliers(const uint32_t* at, int64_t output) {
    const Ints upper = reinterpret_cast<Ints>(bytes(at, output) << 24);
    return __builtin_convertvector(upper >> 24, Vec);
  }
};

// Calls body(block, first input, inputs) for each block in a range of inputs of a panel, in order.
template <class Code, class Body>
VLLM_INLINE void for_each_block(const LinearWeight& weight, const uint32_t* w, int64_t inputs,
                                Body body) {
  const int64_t size = weight.block_inputs;
  int64_t left_of_factors = 0;
  Int4Block<Code> block = {nullptr, w};
  for (int64_t k = 0; k < inputs; k += size) {
    const int64_t left = inputs - k, count = left < size ? left : size;
    if constexpr (Code::kHasMinimums) {
      if (left_of_factors == 0) {
        block.factors = block.header;
        block.header += vllm_cpu::kFactorWords;
        left_of_factors = weight.factor_inputs;
      }
      left_of_factors -= size;
    }
    body(block, k, count);
    block.header = block.words() + count / 8 * kPanel;
  }
}

// Scales the integer sums of a block and adds them to the totals of a row. x: the beginning of the
// block in the converted row.
template <class Code>
VLLM_INLINE void add_scaled(Ints sums, Vec scale, Vec minimum, const int8_t* x, Vec& total) {
  const Vec x_scale = reinterpret_cast<Vec>(splat_bits(x));
  total = fma(__builtin_convertvector(sums, Vec), scale * x_scale, total);
  if (Code::kHasMinimums) {
    total = fma(-minimum, reinterpret_cast<Vec>(splat_bits(x + sizeof(float))), total);
  }
}

// Integer sums are made per block, then scaled and added. Every tile unpacks the values again,
// which runs in parallel with the multiplications.
template <class Code>
struct Int4Tile {
  using Input = int8_t;
  using Acc = Vec;
  static constexpr int64_t kStretchInputs = 512;  // number of inputs: at most 28 KiB of weights
  static constexpr bool kIsFollowed = false;
  static constexpr int64_t kRowUnit = 1;

  static int64_t stretch_inputs(int64_t) { return kStretchInputs; }

  // Cache lines: one for each word of a row, one for the header of a block, and one for fifth bits.
  static constexpr int64_t kStepLines = kPanel * 4 / 64;
  static constexpr int64_t kHeaderSteps = Code::kHasHighBits ? 2 : 1;
  static int64_t num_steps(const LinearWeight& weight, int64_t inputs) {
    return inputs / 8 + inputs / weight.block_inputs * kHeaderSteps;
  }
  static int64_t x_offset(const LinearWeight& weight, int64_t input) {
    return input + input / weight.block_inputs * int64_t{sizeof(Int4Header)};
  }

  template <int kRows>
  static void run(const LinearWeight& weight, const Input* x, int64_t x_stride, const uint32_t* w,
                  int64_t inputs, Vec (*total)[kPanel / kLanes], bool is_first,
                  Prefetch prefetch) {
    if (is_first) __builtin_memset(total, 0, kRows * kPanel * sizeof(float));
    for_each_block<Code>(weight, w, inputs, [&](Int4Block<Code> block, int64_t, int64_t count) {
      add_block<kRows>(x, x_stride, block, count / 8, total, prefetch);
      __asm__ volatile("" : : : "memory");  // otherwise the compiler keeps a second copy of the
                                            // totals
      x += sizeof(Int4Header) + weight.block_inputs;
    });
  }

 private:
  using Dot = DotInt4<Code::kLargest>;

  template <int kRows>
  static VLLM_INLINE void add_block(const Input* x, int64_t x_stride, Int4Block<Code> block,
                                    int64_t num_words, Vec (*total)[kPanel / kLanes],
                                    Prefetch& prefetch) {
    constexpr int kVectors = tile_vectors(kRows);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      Ints acc[kRows][kVectors];
      start_sums<kRows, kVectors>(x, x_stride, block, column, acc);
      if (column == 0) {
        for (int64_t i = 0; i < kHeaderSteps; ++i) prefetch.step();
      }
      Words<kRows> words = {x + sizeof(Int4Header), x_stride, block, column, prefetch};
      if constexpr (Dot::kRunWords == 0) {
        words.add(0, num_words, acc);
      } else {
        for (int64_t k = 0; k < num_words; k += Dot::kRunWords) {
          const int64_t left = num_words - k;
          typename Dot::Sums sums[kRows][kVectors] = {};
          words.add(k, left < Dot::kRunWords ? left : Dot::kRunWords, sums);
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[r][v] += Dot::widen(sums[r][v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = block.scales(column + v * kLanes);
        const Vec minimum = Code::kHasMinimums ? block.minimums(column + v * kLanes) : Vec{};
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          add_scaled<Code>(acc[r][v], scale, minimum, x + r * x_stride,
                           total[r][column / kLanes + v]);
        }
      }
    }
  }

  // The words of a block that are multiplied with some rows, for tile_vectors(kRows) vectors of
  // outputs.
  template <int kRows>
  struct Words {
    static constexpr int kVectors = tile_vectors(kRows);

    const Input* x;  // inputs of the first word
    int64_t x_stride;
    Int4Block<Code> block;
    int column;
    Prefetch& prefetch;

    // sums += products of `count` words from index `first` on.
    VLLM_INLINE void add(int64_t first, int64_t count, typename Dot::Sums (&sums)[kRows][kVectors]) {
      for (int64_t k = first; k < first + count; ++k) {
        if (column == 0) prefetch.step();
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Bits q[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            q[v] = block.quads(2 * k + half, column + v * kLanes);
          }
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const auto four = Dot::splat_of(x + r * x_stride + k * 8 + half * 4);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot::dot(sums[r][v], q[v], four);
          }
        }
      }
    }
  };

  // Starts the sums with minus the zero point times the sum of the inputs.
  template <int kRows, int kVectors>
  static VLLM_INLINE void start_sums(const Input* x, int64_t x_stride, Int4Block<Code> block,
                                     int column, Ints (&acc)[kRows][kVectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Bits zero = Code::kHasZeros ? block.zeros(column + v * kLanes) : Bits{};
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Bits start = splat_bits(x + r * x_stride + sizeof(float));
        acc[r][v] = Code::kHasZeros ? pair_dot(reinterpret_cast<Shorts>(zero),
                                               reinterpret_cast<Shorts>(start))
                    : Code::kHasMinimums ? Ints{}
                                         : reinterpret_cast<Ints>(start);
      }
    }
  }
};

}  // namespace VLLM_ISA
