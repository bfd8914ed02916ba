// The innermost loops: multiply a few rows of x with one stretch (range of inputs) of a panel of
// weights.
#pragma once

#include "linear_dot.h"
#include "linear_format.h"

namespace VLLM_ISA {

using vllm_cpu::kPanel;
using vllm_cpu::LinearWeight;

constexpr int kMaxTileRows = 6;

// Returns the number of vectors of outputs for which a tile of `rows` rows keeps its sums in
// registers: up to 24 of the 32 registers of AVX-512, 12 of 16 elsewhere.
constexpr int tile_vectors(int rows) { return kLanes == 16 || rows == 2 ? 4 : rows == 1 ? 8 : 2; }

// Memory to prefetch during a loop: `lines` cache lines per step, from `next` on. The hardware
// prefetcher would begin with the next stretch only after all tiles have read this one.
struct Prefetch {
  const char* next;
  int64_t lines;

  VLLM_INLINE void step() {
    for (int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Whether a tile prefetches words of its panel some steps ahead. With one row, AVX2 multiplies
// faster than the hardware prefetcher loads words. Prefetching 16 words ahead into the second-level
// cache was 1.10 to 1.34 times (bf16) and 1.19 to 1.40 times (int8) as fast as 4 words ahead into
// the first-level cache (AMD EPYC, medians of three runs). With more rows it gains nothing.
template <int kRows>
constexpr bool kAsksAhead = kLanes == 8 && kRows == 1;
constexpr int64_t kWordsAhead = 16;

template <int kNumber>
struct Number {
  static constexpr int value = kNumber;
};

// Calls body(Number<0>{}), body(Number<1>{}) and so on.
template <int kEnd, int kAt = 0, class Body>
VLLM_INLINE void unroll(Body body) {
  if constexpr (kAt < kEnd) {
    body(Number<kAt>{});
    unroll<kEnd, kAt + 1>(body);
  }
}

// total[kRows][64] = (or +=) the products of `inputs` inputs with float, bf16 or int8 weights. The
// arguments of type LinearWeight describe the storage; only the tiles of int4 need them.
template <class Dot>
struct DenseTile {
  using Input = typename Dot::Input;
  using Acc = typename Dot::Acc;
  static constexpr int64_t kStretchInputs = 128 * Dot::kInputs;  // 32 KiB of weights
  static constexpr bool kIsFollowed = true;  // the hardware prefetches while only one tile reads
  static constexpr int64_t kRowUnit = 1;

  static int64_t stretch_inputs(int64_t) { return kStretchInputs; }

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
        unroll<Dot::kParts>([&](auto number) __attribute__((always_inline)) {
          constexpr int kPart = decltype(number)::value;
          // Otherwise the compiler loads weights for both parts at once, and runs out of registers.
          if constexpr (Dot::kParts > 1) __asm__ volatile("" : : : "memory");
          decltype(Dot::template part<kPart>(Bits{})) weights[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            weights[v] = Dot::template part<kPart>(load_bits(w + k * kPanel + column + v * kLanes));
          }
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const auto splat = Dot::template splat_of<kPart>(x + r * x_stride + k * Dot::kInputs);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              acc[r][v] = Dot::dot(acc[r][v], weights[v], splat);
            }
          }
        });
      };
      int64_t k = 0;
      for (; k + 4 <= num_words; k += 4) {
        prefetch.step();
        if constexpr (kAsksAhead<kRows>) {
          const auto* ahead = reinterpret_cast<const char*>(w + (k + kWordsAhead) * kPanel);
          for (int64_t i = 0; i < kStepLines; ++i) __builtin_prefetch(ahead + i * 64, 0, 2);
        }
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

// Calls body(Number<rows>{}), for 1 to kMaxTileRows rows.
template <int kRows = 1, class Body>
VLLM_INLINE void with_rows(int64_t rows, Body body) {
  if constexpr (kRows < kMaxTileRows) {
    if (rows > kRows) return with_rows<kRows + 1>(rows, body);
  }
  body(Number<kRows>{});
}

// Multiplies all rows with one stretch of a panel, in tiles with about equal numbers of rows. next:
// the address to prefetch from meanwhile; null: no prefetch.
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
