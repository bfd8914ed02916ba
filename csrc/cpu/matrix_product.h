// Multiplies two matrices on matrix tiles, with up to four tiles of sums: the innermost loop of
// everything that matrix tiles compute.
#pragma once

#include "linear_tile.h"
#include "matrix_tiles.h"

#ifdef VLLM_MATRIX_TILES

namespace VLLM_ISA {

// The operands of c = (or +=) a @ b. All strides are in bytes.
struct TileProduct {
  const void* a;  // [rows][inputs of a step, num_steps of them]
  int64_t a_stride;
  const void* b;  // [words of a step, num_steps of them][16 words for each tile of columns]
  int64_t b_stride;
  void* c;  // [rows][16 floats or int32 for each tile of columns]
  int64_t c_stride;
  int64_t num_steps;  // steps of kTileBytes bytes of a; a single step may have fewer bytes
  bool is_first;      // true: c = a @ b; false: c += a @ b
};

// The operand that is loaded without keeping it in the first-level cache: kOperandA, so that b
// remains there; kOperandB, because b is read once, in order, from memory. The hardware prefetcher of the first-level cache
// takes the tiles of an ordinary load for other strides. Without it, one request reads weights in
// pages of 2 MiB 1.25 times as fast (two threads of a Xeon with AMX, 2026-11-28).
enum class StreamedOperand { kNone, kOperandA, kOperandB };

// Multiplies with kRows x kColumns tiles of sums: 1 x 4, 2 x 2 or 4 x 1, or fewer. The tiles must
// be configured (configure_tiles): with two rows of tiles, first_rows and last_rows are the rows of
// each; otherwise they are equal. A sum is added in the order of inputs, one step after the other,
// so it does not depend on the number of tiles.
template <class Numbers, int kRows, int kColumns, StreamedOperand kStreamed = StreamedOperand::kNone>
inline void multiply_tiles(const TileProduct& product, Prefetch& prefetch) {
  static_assert(kRows * kColumns <= 4);
  constexpr int kA = 4, kB = 6;  // indices of the first of two tiles of a, and of b
  const auto sum_at = [&](int row, int column) {
    return static_cast<char*>(product.c) + row * kTileRows * product.c_stride + column * kTileBytes;
  };
  unroll<kRows * kColumns>([&](auto at) {
    constexpr int kSum = decltype(at)::value;
    if (product.is_first) {
      Tiles::zero<kSum>();
    } else {
      Tiles::load<kSum>(sum_at(kSum / kColumns, kSum % kColumns), product.c_stride);
    }
  });
  const char* a = static_cast<const char*>(product.a);
  const char* b = static_cast<const char*>(product.b);
  for (int64_t step = 0; step < product.num_steps; ++step) {
    prefetch.step();
    const auto load_a = [&](auto row) {
      constexpr int kRow = decltype(row)::value;
      const char* const from = a + kRow * kTileRows * product.a_stride;
      if constexpr (kStreamed == StreamedOperand::kOperandA) {
        Tiles::load_once<kA + kRow % 2>(from, product.a_stride);
      } else {
        Tiles::load<kA + kRow % 2>(from, product.a_stride);
      }
    };
    const auto load_b = [&](auto column) {
      constexpr int kColumn = decltype(column)::value;
      if constexpr (kStreamed == StreamedOperand::kOperandB) {
        Tiles::load_once<kB + kColumn % 2>(b + kColumn * kTileBytes, product.b_stride);
      } else {
        Tiles::load<kB + kColumn % 2>(b + kColumn * kTileBytes, product.b_stride);
      }
    };
    // The operand with at most two tiles is loaded once per step.
    if constexpr (kColumns <= 2) {
      unroll<kColumns>(load_b);
    } else {
      unroll<kRows>(load_a);
    }
    unroll<kRows>([&](auto row) {
      if constexpr (kColumns <= 2) load_a(row);
      unroll<kColumns>([&](auto column) {
        constexpr int kRow = decltype(row)::value, kColumn = decltype(column)::value;
        if constexpr (kColumns > 2) load_b(column);
        Tiles::dot<kRow * kColumns + kColumn, kA + kRow % 2, kB + kColumn % 2>(Numbers{});
      });
    });
    a += kTileBytes;
    b += kTileRows * product.b_stride;
  }
  unroll<kRows * kColumns>([&](auto at) {
    constexpr int kSum = decltype(at)::value;
    Tiles::store<kSum>(sum_at(kSum / kColumns, kSum % kColumns), product.c_stride);
  });
}

// Multiplies with one tile of columns, and with any number of full tiles of rows.
template <class Numbers>
inline void multiply_column(TileProduct product, int64_t num_row_tiles) {
  configure_tiles(kTileRows, kTileRows, kTileRows);
  Prefetch nothing = {nullptr, 0};
  for (; num_row_tiles > 0; num_row_tiles -= 4) {
    switch (num_row_tiles) {
      case 1:
        multiply_tiles<Numbers, 1, 1>(product, nothing);
        break;
      case 2:
        multiply_tiles<Numbers, 2, 1>(product, nothing);
        break;
      case 3:
        multiply_tiles<Numbers, 3, 1>(product, nothing);
        break;
      default:
        multiply_tiles<Numbers, 4, 1>(product, nothing);
    }
    product.a = static_cast<const char*>(product.a) + 4 * kTileRows * product.a_stride;
    product.c = static_cast<char*>(product.c) + 4 * kTileRows * product.c_stride;
  }
}

}  // namespace VLLM_ISA

#endif  // VLLM_MATRIX_TILES
