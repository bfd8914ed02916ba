// The innermost loops: a few rows of x with one stretch of one panel of weights.
#pragma once

#include "linear_dot.h"
#include "linear_format.h"

namespace VLLM_ISA {

using vllm_cpu::kPanel;
using vllm_cpu::LinearWeight;

constexpr int kMaxTileRows = 6;

// Vectors of outputs that a tile of so many rows keeps in registers, one sum each: up to 24 of the
// 32 registers of AVX-512, 12 of 16 elsewhere.
constexpr int tile_vectors(int rows) { return kLanes == 16 ? 4 : rows == 1 ? 8 : 2; }

// What to bring into the cache meanwhile: `lines` cache lines per step of the loop. The hardware
// would start on the next stretch only when all tiles are done with this one.
struct Prefetch {
  const char* next;
  int64_t lines;

  VLLM_INLINE void step() {
    for (int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// total[kRows][64] = (or +=) the products of `inputs` inputs with float, bf16 or int8 weights. The
// arguments named Weight say how the weight is stored; only int4 has a choice.
template <class Dot>
struct DenseTile {
  using Input = typename Dot::Input;
  using Acc = typename Dot::Acc;
  static constexpr int64_t kStretchInputs = 128 * Dot::kInputs;  // 32 KiB of weights
  static constexpr bool kIsFollowed = true;  // by the hardware, as long as one tile reads
  static constexpr int64_t kRowUnit = 1;

  static constexpr int64_t kStepLines = 4 * kPanel * 4 / 64;
  static int64_t num_steps(const LinearWeight&, int64_t inputs) {
    return inputs / (4 * Dot::kInputs);
  }
  static int64_t x_offset(const LinearWeight&, int64_t input) { return input; }

  template <int kRows>
  static void run(const LinearWeight&, const Input* x, int64_t x_stride, const uint32_t* w,
                  int64_t inputs, typename Dot::Acc (*total)[kPanel / kLanes], bool is_first,
                  Prefetch prefetch) {
    constexpr int kVectors = tile_vectors(kRows);
    const int64_t num_words = inputs / Dot::kInputs;
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      Acc acc[kRows][kVectors] = {};
      const auto step = [&](int64_t k) __attribute__((always_inline)) {
        Bits weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          weights[v] = load_bits(w + k * kPanel + column + v * kLanes);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          const auto inputs_of_word = Dot::splat_of(x + r * x_stride + k * Dot::kInputs);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            acc[r][v] = Dot::dot(acc[r][v], weights[v], inputs_of_word);
          }
        }
      };
      int64_t k = 0;
      for (; k + 4 <= num_words; k += 4) {
        prefetch.step();
        step(k);
        step(k + 1);
        step(k + 2);
        step(k + 3);
      }
      for (; k < num_words; ++k) step(k);
      prefetch.lines = 0;  // done with the first columns
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          Acc& sum = total[r][column / kLanes + v];
          sum = is_first ? acc[r][v] : sum + acc[r][v];
        }
      }
    }
  }
};

// Numbers of 16 bits (float16) as floats; finite ones.
VLLM_INLINE Vec load_halves(const uint16_t* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(half)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(half)));
#else
  const Bits bits = __builtin_convertvector(half, Bits);
  const Vec size = reinterpret_cast<Vec>((bits & 0x7fffu) << 13) * 0x1p112f;  // other exponents
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(size) | ((bits & 0x8000u) << 16));
#endif
}

// What comes before the bytes of each block of a row of x for int4.
struct Int4Header {
  float scale;    // what a step is worth
  int32_t start;  // minus the sum of the bytes: times 8, or modulo 2^16 when there are zero points
};

// The same for int4: whole numbers are summed up per block, then scaled and added up. Every tile
// unpacks the numbers anew, which runs beside the products.
template <bool kHasZeros>
struct Int4Tile {
  using Input = int8_t;
  using Acc = Vec;
  static constexpr int64_t kStretchInputs = 512;  // at most 19 KiB of weights
  static constexpr bool kIsFollowed = false;
  static constexpr int64_t kRowUnit = 1;

  // One for each word of a row, and one for the header of a block.
  static constexpr int64_t kStepLines = kPanel * 4 / 64;
  static int64_t num_steps(const LinearWeight& weight, int64_t inputs) {
    return inputs / 8 + inputs / weight.block_inputs;
  }
  static int64_t x_offset(const LinearWeight& weight, int64_t input) {
    return input + input / weight.block_inputs * int64_t{sizeof(Int4Header)};
  }

  template <int kRows>
  static void run(const LinearWeight& weight, const Input* x, int64_t x_stride, const uint32_t* w,
                  int64_t inputs, Vec (*total)[kPanel / kLanes], bool is_first,
                  Prefetch prefetch) {
    if (is_first) __builtin_memset(total, 0, kRows * kPanel * sizeof(float));
    const int64_t block = weight.block_inputs;
    for (int64_t left = inputs; left > 0; left -= block) {
      const int64_t num_words = (left < block ? left : block) / 8;
      add_block<kRows>(x, x_stride, w, num_words, total, prefetch);
      __asm__ volatile("" : : : "memory");  // or the compiler keeps a second copy of the totals
      w += vllm_cpu::header_words(weight) + num_words * kPanel;
      x += sizeof(Int4Header) + block;
    }
  }

 private:
  template <int kRows>
  static VLLM_INLINE void add_block(const Input* x, int64_t x_stride, const uint32_t* block,
                                    int64_t num_words, Vec (*total)[kPanel / kLanes],
                                    Prefetch& prefetch) {
    constexpr int kVectors = tile_vectors(kRows);
    const uint16_t* const scales = reinterpret_cast<const uint16_t*>(block);
    const uint8_t* const zeros =
        reinterpret_cast<const uint8_t*>(block + vllm_cpu::kScaleWords);
    const uint32_t* const words =
        block + vllm_cpu::kScaleWords + (kHasZeros ? vllm_cpu::kZeroWords : 0);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      Ints acc[kRows][kVectors];
      start_sums<kRows, kVectors>(x, x_stride, zeros + column, acc);
      if (column == 0) prefetch.step();
      for (int64_t k = 0; k < num_words; ++k) {
        if (column == 0) prefetch.step();
        const uint32_t* const w = words + k * kPanel + column;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Bits q[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            q[v] = (load_bits(w + v * kLanes) >> (4 * half)) & 0x0f0f0f0fu;
          }
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const auto four = DotInt4::splat_of(x + r * x_stride + sizeof(Int4Header) + k * 8 +
                                                half * 4);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[r][v] = DotInt4::dot(acc[r][v], q[v], four);
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load_halves(scales + column + v * kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          const Vec x_scale = reinterpret_cast<Vec>(splat_bits(x + r * x_stride));
          Vec& sum = total[r][column / kLanes + v];
          sum = fma(__builtin_convertvector(acc[r][v], Vec), scale * x_scale, sum);
        }
      }
    }
  }

  // Minus the zero point times the sum of the inputs.
  template <int kRows, int kVectors>
  static VLLM_INLINE void start_sums(const Input* x, int64_t x_stride, const uint8_t* zeros,
                                     Ints (&acc)[kRows][kVectors]) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Bytes bytes = {};
      if (kHasZeros) __builtin_memcpy(&bytes, zeros + v * kLanes, sizeof bytes);
      const Shorts zero = reinterpret_cast<Shorts>(__builtin_convertvector(bytes, Bits));
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Bits start = splat_bits(x + r * x_stride + sizeof(float));
        acc[r][v] = kHasZeros ? pair_dot(zero, reinterpret_cast<Shorts>(start))
                              : reinterpret_cast<Ints>(start);
      }
    }
  }
};

template <int kNumber>
struct Number {
  static constexpr int value = kNumber;
};

// Calls body(Number<rows>{}), for 1 to kMaxTileRows rows.
template <int kRows = 1, class Body>
VLLM_INLINE void with_rows(int64_t rows, Body body) {
  if constexpr (kRows < kMaxTileRows) {
    if (rows > kRows) return with_rows<kRows + 1>(rows, body);
  }
  body(Number<kRows>{});
}

// All rows with one stretch of a panel, in tiles of about equal height. next: what to bring into the
// cache meanwhile; null: nothing.
template <class Tile>
void run_tiles(const LinearWeight& weight, const typename Tile::Input* x, int64_t x_stride,
               int64_t rows, const uint32_t* w, int64_t inputs,
               typename Tile::Acc (*total)[kPanel / kLanes], bool is_first, const uint32_t* next) {
  const int64_t num_tiles = vllm_cpu::ceil_div(rows, int64_t{kMaxTileRows});
  const int64_t num_steps = Tile::num_steps(weight, inputs);
  int64_t lines = vllm_cpu::ceil_div(Tile::kStepLines, num_tiles);
  if ((num_tiles == 1 && Tile::kIsFollowed) || next == nullptr) lines = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = rows * tile / num_tiles;
    const bool is_needed = tile * lines < Tile::kStepLines;
    const Prefetch prefetch = {reinterpret_cast<const char*>(next) + tile * lines * num_steps * 64,
                               is_needed ? lines : 0};
    with_rows(rows * (tile + 1) / num_tiles - first, [&](auto number) {
      Tile::template run<decltype(number)::value>(weight, x + first * x_stride, x_stride, w, inputs,
                                                  total + first, is_first, prefetch);
    });
  }
}

}  // namespace VLLM_ISA
