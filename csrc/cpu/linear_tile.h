// The innermost loops: a few rows of x with one stretch of one panel of weights.
#pragma once

#include "linear_dot.h"
#include "linear_format.h"

namespace VLLM_ISA {

using vllm_cpu::kPanel;

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

// total[kRows][64] = (or +=) the products of `inputs` inputs with float, bf16 or int8 weights.
template <class Dot>
struct DenseTile {
  using Input = typename Dot::Input;
  using Acc = typename Dot::Acc;
  static constexpr int64_t kStretchInputs = 128 * Dot::kInputs;  // 32 KiB of weights
  static constexpr int64_t kStepInputs = 4 * Dot::kInputs;
  static constexpr int64_t kStepLines = 4 * kPanel * 4 / 64;
  static constexpr bool kIsFollowed = true;  // by the hardware, as long as one tile reads

  static int64_t words(int64_t inputs) { return inputs / Dot::kInputs * kPanel; }

  template <int kRows>
  static void run(const Input* x, int64_t x_stride, const uint32_t* w, int64_t inputs,
                  typename Dot::Acc (*total)[kPanel / kLanes], bool is_first, Prefetch prefetch) {
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

// Pair j of the eight int4 in each word, less 8, as two bf16.
VLLM_INLINE Bits int4_pair(Bits w, int j) {
#ifdef __AVX512BW__
  // The numbers -8..7, twice: a look-up goes by the low 5 bits of 16.
  alignas(64) static constexpr uint16_t kNumbers[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i index = _mm512_srli_epi16(reinterpret_cast<__m512i>(w), 4 * j);
  return reinterpret_cast<Bits>(_mm512_permutexvar_epi16(index, _mm512_load_si512(kNumbers)));
#else
  const Bits even = (w >> (4 * j)) & 15u, odd = (w >> (16 + 4 * j)) & 15u;
  const Vec even_number = __builtin_convertvector(reinterpret_cast<Ints>(even), Vec) - 8.0f;
  const Vec odd_number = __builtin_convertvector(reinterpret_cast<Ints>(odd), Vec) - 8.0f;
  return (reinterpret_cast<Bits>(even_number) >> 16) | reinterpret_cast<Bits>(odd_number);
#endif
}

// The same for int4: sums of whole numbers times inputs per group, then scaled and added up. Every
// tile unpacks the numbers anew: that runs beside the products, and writing them out once for all
// tiles was measured to be slower.
template <class Dot>
struct Int4Tile {
  using Input = typename Dot::Input;
  using Acc = Vec;
  static constexpr int64_t kGroupInputs = vllm_cpu::kGroupInputs;
  static constexpr int64_t kStretchInputs = 16 * kGroupInputs;  // 18 KiB of weights
  static constexpr int64_t kStepInputs = kGroupInputs;
  static constexpr int64_t kStepLines =
      (vllm_cpu::kScaleWords + vllm_cpu::kGroupWords * kPanel) * 4 / 64;
  static constexpr bool kIsFollowed = false;

  static int64_t words(int64_t inputs) {
    return vllm_cpu::panel_words(vllm_cpu::WeightFormat::kInt4, inputs);
  }

  template <int kRows>
  static void run(const Input* x, int64_t x_stride, const uint32_t* w, int64_t inputs,
                  Vec (*total)[kPanel / kLanes], bool is_first, Prefetch prefetch) {
    if (is_first) __builtin_memset(total, 0, kRows * kPanel * sizeof(float));
    for (int64_t left = inputs; left > 0; left -= kGroupInputs) {
      const int64_t num_words = (left < kGroupInputs ? left : kGroupInputs) / 8;
      prefetch.step();
      add_group<kRows>(x, x_stride, w, num_words, total);
      w += vllm_cpu::kScaleWords + num_words * kPanel;
      x += kGroupInputs;
    }
  }

 private:
  template <int kRows>
  static VLLM_INLINE void add_group(const Input* x, int64_t x_stride, const uint32_t* group,
                                    int64_t num_words, Vec (*total)[kPanel / kLanes]) {
    constexpr int kVectors = tile_vectors(kRows);
    const bf16* const scales = reinterpret_cast<const bf16*>(group);
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
      const uint32_t* const first = group + vllm_cpu::kScaleWords + column;
      Vec acc[kRows][kVectors] = {};
      for (int64_t k = 0; k < num_words; ++k) {
        const uint32_t* const w = first + k * kPanel;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          Bits pairs[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) pairs[v] = int4_pair(load_bits(w + v * kLanes), j);
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const auto inputs_of_pair = Dot::splat_of(x + r * x_stride + k * 8 + j * 2);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              acc[r][v] = Dot::dot(acc[r][v], pairs[v], inputs_of_pair);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vec scale = load(scales + column + v * kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          Vec& sum = total[r][column / kLanes + v];
          sum = fma(scale, acc[r][v], sum);
        }
      }
    }
  }
};

}  // namespace VLLM_ISA
