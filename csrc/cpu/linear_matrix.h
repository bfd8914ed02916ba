// Multiplies all rows with one stretch (range of inputs) of a panel of weights, on matrix tiles.
// The classes replace the tiles of linear_tile.h.
//
// The words of a panel have the layout of a tile of b (matrix_tiles.h). Up to 16 rows are
// multiplied with all 64 outputs of a panel at once, in one pass over memory. More rows are
// multiplied in groups of 32 rows and 32 outputs, so that each loaded tile is used in two products.
#pragma once

#include "linear_bytes.h"
#include "linear_int4.h"
#include "matrix_product.h"

#ifdef VLLM_MATRIX_TILES

namespace VLLM_ISA {

constexpr int64_t kRowUnit = 2 * kTileRows;  // rows that share each loaded tile of weights

// Returns the distance in bytes between rows of x that have `bytes` bytes: an odd number of whole
// cache lines. With an even number, the rows of a tile would compete for the same few sets of the
// cache.
inline int64_t tile_row_bytes(int64_t bytes) {
  return (vllm_cpu::ceil_div(bytes, int64_t{kTileBytes}) | 1) * kTileBytes;
}

// Layout of the words of a stretch. The words of 32 outputs are adjacent. row_words: distance from
// one word of an output to its next word. half_words: distance from the first 32 outputs to the
// other 32.
//
// In a panel, the words of all 64 outputs are adjacent. If rows are multiplied with 32 outputs at a
// time, the words of these outputs can use only half of the sets of the first-level cache: too few
// for more than 256 inputs. So weights that are converted are stored as two halves.
struct StretchWords {
  const uint32_t* words;
  int64_t row_words, half_words;
  bool is_copy;  // of the words of the weight, which are in memory

  static StretchWords in_weight(const uint32_t* words) {
    return {words, kPanel, kPanel / 2, false};
  }
  static StretchWords in_rows(const uint32_t* words) { return {words, kPanel, kPanel / 2, true}; }
  static StretchWords in_halves(const uint32_t* words, int64_t num_words) {
    return {words, kPanel / 2, num_words * (kPanel / 2), true};
  }
  bool is_in_halves() const { return row_words < kPanel; }

  // Returns the index of a word of an output.
  VLLM_INLINE int64_t place(int64_t word, int64_t output) const {
    constexpr int64_t kHalf = kPanel / 2;
    return output / kHalf * half_words + word * row_words + output % kHalf;
  }
};

// Multiplies with bf16 or int8 weights, whose words are not unpacked.
template <class Numbers, class Dot>
struct DenseMatrix {
  using Input = typename Dot::Input;
  using Acc = typename Dot::Acc;
  static constexpr int64_t kRowUnit = VLLM_ISA::kRowUnit;

  static int64_t x_offset(const LinearWeight&, int64_t input) { return input; }

  // Number of cache lines that a step multiplies, and that it prefetches for the next stretch.
  static constexpr int64_t kStepLines = kTileRows * kPanel * 4 / kTileBytes;

  // Number of inputs that all rows are multiplied with before the next inputs are read. Up to 16
  // rows need no more memory than the tiles of sums, so they are multiplied with all inputs at once.
  // With more rows, the weights of 32 outputs remain in the first-level cache: 256 inputs are 1.1 to
  // 1.3 times as fast as 512 with 128 to 600 rows (two threads of a Xeon with AMX, 2026-11-28).
  static int64_t stretch_inputs(int64_t rows) {
    constexpr int64_t kAll = int64_t{1} << 40, kManyRowsWords = 128;
    return rows <= kTileRows ? kAll : kManyRowsWords * Dot::kInputs;
  }

  static void run(const LinearWeight&, const Input* x, int64_t x_stride, int64_t rows,
                  const uint32_t* w, int64_t inputs, Acc (*total)[kPanel / kLanes], bool is_first,
                  const uint32_t* next) {
    multiply(x, x_stride, rows, StretchWords::in_weight(w), inputs / Dot::kInputs, total, is_first,
             next, kStepLines);
  }

  // Multiplies with words in either layout. Each step prefetches its part of step_lines cache
  // lines from `next` on.
  static void multiply(const Input* x, int64_t x_stride, int64_t rows, const StretchWords& w,
                       int64_t num_words, Acc (*total)[kPanel / kLanes], bool is_first,
                       const uint32_t* next, int64_t step_lines) {
    const int64_t num_steps = num_words / kTileRows, num_last = num_words % kTileRows;
    if (num_steps > 0) {
      multiply_steps(x, x_stride, rows, w, num_steps, kTileRows, total, is_first, next, step_lines);
    }
    if (num_last > 0) {
      const StretchWords last = {w.words + num_steps * kTileRows * w.row_words, w.row_words,
                                 w.half_words, w.is_copy};
      multiply_steps(x + num_steps * kTileRows * Dot::kInputs, x_stride, rows, last, 1, num_last,
                     total, is_first && num_steps == 0, nullptr, 0);
    }
  }

 private:
  static void multiply_steps(const Input* x, int64_t x_stride, int64_t rows, const StretchWords& w,
                             int64_t num_steps, int64_t step_words, Acc (*total)[kPanel / kLanes],
                             bool is_first, const uint32_t* next, int64_t step_lines) {
    const bool is_one_pass = rows <= kTileRows && !w.is_in_halves();
    const int64_t columns = is_one_pass ? kPanel : kPanel / 2;
    const int64_t num_calls = kPanel / columns * vllm_cpu::ceil_div(rows, kRowUnit);
    // One pass reads memory in order. The hardware prefetcher follows it, and reads 1.08 to 1.12
    // times as fast as with prefetch instructions (one and 16 rows, two threads of a Xeon with AMX,
    // 2026-11-28).
    const bool is_followed = next == nullptr || is_one_pass;
    const int64_t lines = is_followed ? 0 : vllm_cpu::ceil_div(step_lines, num_calls);
    Prefetch prefetch = {reinterpret_cast<const char*>(next), lines};
    TileProduct product = {nullptr, x_stride * int64_t{sizeof(Input)}, nullptr,   4 * w.row_words,
                           nullptr, 4 * kPanel,                        num_steps, is_first};
    for (int64_t column = 0; column < kPanel; column += columns) {
      for (int64_t first = 0; first < rows; first += kRowUnit) {
        const int64_t left = rows - first < kRowUnit ? rows - first : kRowUnit;
        product.a = x + first * x_stride;
        product.b = w.words + w.place(0, column);
        product.c = reinterpret_cast<float*>(total + first) + column;
        if (left <= kTileRows) {
          configure_tiles(left, left, step_words);
          if (is_one_pass && w.is_copy) {
            multiply_tiles<Numbers, 1, 4>(product, prefetch);
          } else if (is_one_pass) {
            multiply_tiles<Numbers, 1, 4, StreamedOperand::kOperandB>(product, prefetch);
          } else {
            multiply_tiles<Numbers, 1, 2>(product, prefetch);
          }
        } else {
          configure_tiles(kTileRows, left - kTileRows, step_words);
          multiply_tiles<Numbers, 2, 2, StreamedOperand::kOperandA>(product, prefetch);
        }
      }
    }
  }
};

// Multiplies with int8 weights. Sums of integers are exact in any order, so a few rows are
// multiplied with vectors, which read the weights faster.
struct Int8Matrix : DenseMatrix<TilesOfU8S8, DotInt8> {
  static void run(const LinearWeight& weight, const Input* x, int64_t x_stride, int64_t rows,
                  const uint32_t* w, int64_t inputs, Acc (*total)[kPanel / kLanes], bool is_first,
                  const uint32_t* next) {
    if (rows <= kMaxTileRows) {
      return run_tiles<DenseTile<DotInt8>>(weight, x, x_stride, rows, w, inputs, total, is_first,
                                           next);
    }
    DenseMatrix::run(weight, x, x_stride, rows, w, inputs, total, is_first, next);
  }
};

// Multiplies with weights of one byte, or codes of four bits. One row uses matrix tiles as well,
// because its sums must be the same as with any other number of rows.
template <class CodeOf>
struct ByteMatrix {
  using Code = CodeOf;
  using Dense = DenseMatrix<TilesOfBf16, DotBf16>;
  using Input = Dense::Input;
  using Acc = Dense::Acc;
  static constexpr int64_t kRowUnit = Dense::kRowUnit;
  static constexpr int64_t kStretchInputs = 512;  // 64 KiB of bf16

  // Converts the words of `inputs` inputs of a panel to words of a bf16 weight, and stores them in
  // the layout `order`.
  static void widen(Code code, const uint32_t* w, const float* zeros, int64_t inputs,
                    const StretchWords& order, uint32_t* to) {
    Vec zero[kPanel / kLanes] = {};
    for (int v = 0; Code::kHasZeros && v < kPanel / kLanes; ++v) zero[v] = load(zeros + v * kLanes);
    for (int64_t word = 0; word < inputs / 4; ++word) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanel / kLanes; ++v) {
        const Pairs pairs = code.widen(load_four<Code>(w + v * kLanes, word), zero[v]);
        __builtin_memcpy(to + order.place(2 * word, v * kLanes), &pairs.first, sizeof(Vec));
        __builtin_memcpy(to + order.place(2 * word + 1, v * kLanes), &pairs.second, sizeof(Vec));
      }
    }
  }

  // Multiplies at most 16 rows with `inputs` inputs of a panel: sums[rows][64]. Converts the weights
  // of one tile at a time, so they are read again from the first-level cache. With one row this
  // reads weights 1.4 times as fast as converting them all first (two threads of a Xeon with AMX,
  // 2026-11-28).
  static void multiply_few(Code code, const uint32_t* w, const float* zeros, const Input* x,
                           int64_t x_stride, int64_t rows, int64_t inputs,
                           Vec (*sums)[kPanel / kLanes]) {
    constexpr int64_t kPart = 2 * kTileRows;  // inputs
    alignas(64) uint32_t words[kPart / 2 * kPanel];
    const StretchWords order = StretchWords::in_rows(words);
    for (int64_t k = 0; k < inputs; k += kPart) {
      const int64_t count = inputs - k < kPart ? inputs - k : kPart;
      widen(code, w + k * Code::kBits / 32 * kPanel, zeros, count, order, words);
      Dense::multiply(x + k, x_stride, rows, order, count / 2, sums, k == 0, nullptr, 0);
    }
  }
};

// total[rows][64] = (or +=) sums * scales.
inline void add_scaled_sums(const Vec (*sums)[kPanel / kLanes], int64_t rows, const float* scales,
                            bool is_first, Vec (*total)[kPanel / kLanes]) {
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanel / kLanes; ++v) {
      total[r][v] = fma(sums[r][v], load(scales + v * kLanes), is_first ? Vec{} : total[r][v]);
    }
  }
}

// Computes total[num_panels][rows][64] for panels of a ByteMatrix. For each range of inputs with
// one scale, converts the weights to bf16, multiplies all rows with them, and adds the scaled
// products to total.
template <class Code>
void panel_sums(ByteMatrix<Code>, const LinearWeight& weight, int64_t panel, int64_t num_panels,
                const bf16* x, int64_t x_stride, int64_t rows, Vec (*total)[kPanel / kLanes]) {
  using Matrix = ByteMatrix<Code>;
  constexpr int64_t kRows = 256;  // rows whose sums stay in the second-level cache
  alignas(64) uint32_t words[Matrix::kStretchInputs / 2 * kPanel];
  alignas(64) Vec sums[kRows][kPanel / kLanes];
  const Code code(weight);
  const int64_t panel_words = vllm_cpu::panel_words(weight);
  int64_t inputs;
  for (int64_t k = 0; k < weight.in_features; k += inputs) {
    const int64_t block = k / weight.block_inputs, end = (block + 1) * weight.block_inputs;
    const int64_t left = (end < weight.in_features ? end : weight.in_features) - k;
    inputs = left < Matrix::kStretchInputs ? left : Matrix::kStretchInputs;
    const StretchWords order = StretchWords::in_halves(words, inputs / 2);
    for (int64_t p = panel; p < panel + num_panels; ++p, total += rows) {
      const uint32_t* const w = weight.panels + p * panel_words + vllm_cpu::panel_words(weight, k);
      const int64_t place = (block * vllm_cpu::num_panels(weight) + p) * kPanel;
      const float* const zeros = weight.zeros + (Code::kHasZeros ? place : 0);
      const float* const scales = weight.scales + place;
      if (rows <= kTileRows) {
        Matrix::multiply_few(code, w, zeros, x + k, x_stride, rows, inputs, sums);
        add_scaled_sums(sums, rows, scales, k == 0, total);
        continue;
      }
      Matrix::widen(code, w, zeros, inputs, order, words);
      const uint32_t* const next =
          p + 1 < panel + num_panels
              ? w + panel_words
              : w + vllm_cpu::panel_words(weight, inputs) - (num_panels - 1) * panel_words;
      for (int64_t first = 0; first < rows; first += kRows) {
        const int64_t count = rows - first < kRows ? rows - first : kRows;
        Matrix::Dense::multiply(x + first * x_stride + k, x_stride, count, order, inputs / 2, sums,
                                true, first == 0 ? next : nullptr,
                                Matrix::Dense::kStepLines * Code::kBits / 16);
        add_scaled_sums(sums, count, scales, k == 0, total + first);
      }
    }
    total -= num_panels * rows;
  }
}

// Multiplies with weights of 4 or 5 bits: unpacks them to int8, minus the zero points, once for all
// rows. Sums of integers are exact, and they are scaled and added in the order of Int4Tile. So the
// results have the same bits, and Int4Tile can multiply a few rows.
template <class Code>
struct Int4Matrix : Int4Tile<Code> {
  using Vectors = Int4Tile<Code>;
  using Input = typename Vectors::Input;
  static constexpr int64_t kRowUnit = kTileRows;

  static void run(const LinearWeight& weight, const Input* x, int64_t x_stride, int64_t rows,
                  const uint32_t* w, int64_t inputs, Vec (*total)[kPanel / kLanes], bool is_first,
                  const uint32_t* next) {
    constexpr int64_t kFewRows = 3 * kMaxTileRows;
    if (rows <= kFewRows) {
      return run_tiles<Vectors>(weight, x, x_stride, rows, w, inputs, total, is_first, next);
    }
    if (is_first) __builtin_memset(total, 0, rows * kPanel * sizeof(float));
    const int64_t block = weight.block_inputs;
    Unpacked unpacked;
    for_each_block<Code>(weight, w, inputs, [&](Int4Block<Code> packed, int64_t k, int64_t count) {
      unpack(packed, k / block, block, count, unpacked);
    });
    const int64_t lines = vllm_cpu::panel_words(weight, inputs) * 4 / kTileBytes;
    const int64_t num_groups = vllm_cpu::ceil_div(rows, int64_t{kTileRows});
    Prefetch prefetch = {reinterpret_cast<const char*>(next), vllm_cpu::ceil_div(lines, num_groups)};
    for (int64_t first = 0; first < rows; first += kTileRows) {
      prefetch.step();
      const int64_t left = rows - first < kTileRows ? rows - first : int64_t{kTileRows};
      configure_tiles(left, left, (block < kTileBytes ? block : int64_t{kTileBytes}) / 4);
      add_rows(x + first * x_stride, x_stride, left, block, vllm_cpu::ceil_div(inputs, block),
               unpacked, total + first);
    }
  }

 private:
  static constexpr int64_t kMaxBlocks = Vectors::kStretchInputs / vllm_cpu::kMinBlockInputs;
  // Number of inputs that are summed before the sums are scaled. With blocks of 32 inputs, the sums
  // take 16 KiB.
  static constexpr int64_t kBatchInputs = vllm_cpu::kMaxBlockInputs;
  static constexpr int64_t kMaxBatch = 4;  // blocks

  struct Unpacked {
    alignas(64) Bits quads[Vectors::kStretchInputs / 4][kPanel / kLanes];
    Vec scales[kMaxBlocks][kPanel / kLanes];
    Vec minimums[Code::kHasMinimums ? kMaxBlocks : 1][kPanel / kLanes];
  };

  // Unpacks block n of a segment of inputs: `size` inputs, zeros after the first `count`.
  static void unpack(Int4Block<Code> block, int64_t n, int64_t size, int64_t count, Unpacked& to) {
    Bits (*const quads)[kPanel / kLanes] = to.quads + n * size / 4;
    for (int v = 0; v < kPanel / kLanes; ++v) {
      to.scales[n][v] = block.scales(v * kLanes);
      if (Code::kHasMinimums) to.minimums[n][v] = block.minimums(v * kLanes);
      Bits zero = Bits{} + uint32_t{Code::kZero};
      if (Code::kHasZeros) zero = block.zeros(v * kLanes);
      zero *= 0x01010101u;
#pragma GCC unroll 4
      for (int64_t i = 0; i < count / 4; i += 2) {
        quads[i][v] = minus_bytes(block.quads(i, v * kLanes), zero);
        quads[i + 1][v] = minus_bytes(block.quads(i + 1, v * kLanes), zero);
      }
      for (int64_t i = count / 4; i < size / 4; ++i) quads[i][v] = Bits{};
    }
  }

  // Subtracts the bytes of b from the bytes of a.
  static VLLM_INLINE Bits minus_bytes(Bits a, Bits b) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
    return reinterpret_cast<Bits>(reinterpret_cast<Bytes>(a) - reinterpret_cast<Bytes>(b));
  }

  // Multiplies at most 16 rows of x with the unpacked blocks of a segment of inputs.
  static void add_rows(const Input* x, int64_t x_stride, int64_t rows, int64_t block,
                       int64_t num_blocks, const Unpacked& weights, Vec (*total)[kPanel / kLanes]) {
    const int64_t block_bytes = int64_t{sizeof(Int4Header)} + block;
    const int64_t batch = kBatchInputs / block < kMaxBatch ? kBatchInputs / block : kMaxBatch;
    alignas(64) Ints sums[kMaxBatch][kTileRows][kPanel / kLanes];
    TileProduct product = {nullptr, x_stride, nullptr, 4 * kPanel, nullptr, 4 * kPanel,
                           vllm_cpu::ceil_div(block, int64_t{kTileBytes}), true};
    Prefetch nothing = {nullptr, 0};
    for (int64_t first = 0; first < num_blocks; first += batch, x += batch * block_bytes) {
      const int64_t left = num_blocks - first, count = left < batch ? left : batch;
      for (int64_t n = 0; n < count; ++n) {
        product.a = x + n * block_bytes + sizeof(Int4Header);
        product.b = weights.quads[(first + n) * block / 4];
        product.c = sums[n];
        multiply_tiles<TilesOfS8S8, 1, 4>(product, nothing);
      }
      for (int v = 0; v < kPanel / kLanes; ++v) {
        const auto scale = [&](int64_t n, int64_t r, Vec& sum) __attribute__((always_inline)) {
          const Vec minimum = weights.minimums[Code::kHasMinimums ? first + n : 0][v];
          add_scaled<Code>(sums[n][r][v], weights.scales[first + n][v], minimum,
                           x + n * block_bytes + r * x_stride, sum);
        };
        if (rows == kTileRows) {
          Vec totals[kTileRows];  // in registers
#pragma GCC unroll 16
          for (int r = 0; r < kTileRows; ++r) totals[r] = total[r][v];
          for (int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 16
            for (int r = 0; r < kTileRows; ++r) scale(n, r, totals[r]);
          }
#pragma GCC unroll 16
          for (int r = 0; r < kTileRows; ++r) total[r][v] = totals[r];
        } else {
          for (int64_t n = 0; n < count; ++n) {
            for (int64_t r = 0; r < rows; ++r) scale(n, r, total[r][v]);
          }
        }
      }
    }
  }
};

}  // namespace VLLM_ISA

#endif  // VLLM_MATRIX_TILES
