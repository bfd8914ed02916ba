// One stretch of a panel of weights with all rows, on matrix tiles. The classes take the place of the
// tiles of linear_tile.h.
//
// Panels are read as they are: their words are what a tile of b holds. Up to 16 rows take all 64
// outputs of a panel at once, in one pass over memory; more rows take 32 outputs at a time with 32
// rows, so that each tile that is loaded serves two products.
#pragma once

#include "linear_bytes.h"
#include "linear_int4.h"
#include "matrix_product.h"

#ifdef VLLM_MATRIX_TILES

namespace VLLM_ISA {

constexpr int64_t kRowUnit = 2 * kTileRows;  // rows that share what is loaded of the weights

// Bytes from one row of x to the next, of which `bytes` are used: whole lines of the cache, and an
// odd number of them, or the rows of a tile would compete for the same few places of the cache.
inline int64_t tile_row_bytes(int64_t bytes) {
  return (vllm_cpu::ceil_div(bytes, int64_t{kTileBytes}) | 1) * kTileBytes;
}

// bf16 and int8 weights.
template <class Numbers, class Dot>
struct DenseMatrix {
  using Input = typename Dot::Input;
  using Acc = typename Dot::Acc;
  static constexpr int64_t kStretchInputs = 256 * Dot::kInputs;  // 64 KiB of weights
  static constexpr int64_t kRowUnit = VLLM_ISA::kRowUnit;

  static int64_t x_offset(const LinearWeight&, int64_t input) { return input; }

  // Lines of the cache of a stretch that a step multiplies, and of the next one that it asks for.
  static constexpr int64_t kStepLines = kTileRows * kPanel * 4 / kTileBytes;

  static void run(const LinearWeight&, const Input* x, int64_t x_stride, int64_t rows,
                  const uint32_t* w, int64_t inputs, Acc (*total)[kPanel / kLanes], bool is_first,
                  const uint32_t* next) {
    run(x, x_stride, rows, w, inputs, total, is_first, next, kStepLines);
  }

  static void run(const Input* x, int64_t x_stride, int64_t rows, const uint32_t* w, int64_t inputs,
                  Acc (*total)[kPanel / kLanes], bool is_first, const uint32_t* next,
                  int64_t step_lines) {
    const int64_t num_words = inputs / Dot::kInputs, num_steps = num_words / kTileRows;
    const int64_t columns = rows <= kTileRows ? kPanel : kPanel / 2;
    const int64_t num_calls = kPanel / columns * vllm_cpu::ceil_div(rows, kRowUnit);
    // The next stretch is asked for in equal parts.
    const int64_t lines = next == nullptr ? 0 : vllm_cpu::ceil_div(step_lines, num_calls);
    const char* ahead = reinterpret_cast<const char*>(next);
    TileProduct product = {nullptr, x_stride * int64_t{sizeof(Input)}, nullptr, 4 * kPanel,
                           nullptr, 4 * kPanel,                        num_steps, is_first};
    for (int64_t column = 0; column < kPanel; column += columns) {
      for (int64_t first = 0; first < rows; first += kRowUnit) {
        const int64_t left = rows - first < kRowUnit ? rows - first : kRowUnit;
        product.a = x + first * x_stride;
        product.b = w + column;
        product.c = reinterpret_cast<float*>(total + first) + column;
        Prefetch prefetch = {ahead, lines};
        if (num_steps > 0) multiply(product, left, columns, kTileRows, prefetch);
        ahead = prefetch.next;
      }
    }
    const int64_t num_last = num_words - num_steps * kTileRows;
    if (num_last == 0) return;
    product.num_steps = 1;
    product.is_first = is_first && num_steps == 0;
    Prefetch nothing = {nullptr, 0};
    for (int64_t first = 0; first < rows; first += kRowUnit) {
      const int64_t left = rows - first < kRowUnit ? rows - first : kRowUnit;
      for (int64_t column = 0; column < kPanel; column += columns) {
        product.a = x + first * x_stride + num_steps * kTileRows * Dot::kInputs;
        product.b = w + num_steps * kTileRows * kPanel + column;
        product.c = reinterpret_cast<float*>(total + first) + column;
        multiply(product, left, columns, num_last, nothing);
      }
    }
  }

 private:
  static void multiply(const TileProduct& product, int64_t rows, int64_t columns,
                       int64_t num_words, Prefetch& prefetch) {
    if (rows > kTileRows) {
      configure_tiles(kTileRows, rows - kTileRows, num_words);
      return multiply_tiles<Numbers, 2, 2>(product, prefetch);
    }
    configure_tiles(rows, rows, num_words);
    if (columns == kPanel) return multiply_tiles<Numbers, 1, 4>(product, prefetch);
    multiply_tiles<Numbers, 1, 2>(product, prefetch);
  }
};

// Weights of one byte. One row takes the tiles as well, as its sums must be those of any other number.
template <class CodeOf>
struct ByteMatrix {
  using Code = CodeOf;
  using Dense = DenseMatrix<TilesOfBf16, DotBf16>;
  using Input = Dense::Input;
  using Acc = Dense::Acc;
  static constexpr int64_t kRowUnit = Dense::kRowUnit;
  static constexpr int64_t kStretchInputs = Dense::kStretchInputs;

  // The words of `inputs` inputs of a panel as those of a bf16 weight.
  static void widen(const uint32_t* w, const float* zeros, int64_t inputs, uint32_t* to) {
    Vec zero[kPanel / kLanes] = {};
    for (int v = 0; Code::kHasZeros && v < kPanel / kLanes; ++v) zero[v] = load(zeros + v * kLanes);
    for (int64_t word = 0; word < inputs / 4; ++word, w += kPanel, to += 2 * kPanel) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanel / kLanes; ++v) {
        const Pairs pairs = Code::widen(load_bits(w + v * kLanes), zero[v]);
        __builtin_memcpy(to + v * kLanes, &pairs.first, sizeof pairs.first);
        __builtin_memcpy(to + kPanel + v * kLanes, &pairs.second, sizeof pairs.second);
      }
    }
  }
};

// total[rows][64] of one panel of bytes: a stretch with one scale at a time is widened, multiplied
// with all rows, and added up.
template <class Code>
void panel_sums(ByteMatrix<Code>, const LinearWeight& weight, int64_t panel, const bf16* x,
                int64_t x_stride, int64_t rows, Vec (*total)[kPanel / kLanes]) {
  using Matrix = ByteMatrix<Code>;
  constexpr int64_t kRows = 2 * kRowUnit;  // whose sums stay in the first cache
  alignas(64) uint32_t words[Matrix::kStretchInputs / 2 * kPanel];
  alignas(64) Vec sums[kRows][kPanel / kLanes];
  const uint32_t* const w = weight.panels + panel * vllm_cpu::panel_words(weight);
  int64_t inputs;
  for (int64_t k = 0; k < weight.in_features; k += inputs) {
    const int64_t block = k / weight.block_inputs, end = (block + 1) * weight.block_inputs;
    const int64_t left = (end < weight.in_features ? end : weight.in_features) - k;
    inputs = left < Matrix::kStretchInputs ? left : Matrix::kStretchInputs;
    const int64_t place = (block * vllm_cpu::num_panels(weight) + panel) * kPanel;
    Matrix::widen(w + k / 4 * kPanel, weight.zeros + (Code::kHasZeros ? place : 0), inputs, words);
    const uint32_t* const next = w + (k + inputs) / 4 * kPanel;
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t count = rows - first < kRows ? rows - first : kRows;
      Matrix::Dense::run(x + first * x_stride + k, x_stride, count, words, inputs, sums, true,
                         first == 0 ? next : nullptr, Matrix::Dense::kStepLines / 2);
      for (int64_t r = 0; r < count; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanel / kLanes; ++v) {
          Vec& sum = total[first + r][v];
          const Vec scale = load(weight.scales + place + v * kLanes);
          sum = fma(sums[r][v], scale, k == 0 ? Vec{} : sum);
        }
      }
    }
  }
}

// Weights of 4 or 5 bits: a stretch is unpacked to int8, minus the zero points, once for all rows. Sums of
// whole numbers are exact, and they are scaled and added up in the order of Int4Tile: the results
// are the same bits, and a few rows are left to it.
template <class Code>
struct Int4Matrix : Int4Tile<Code> {
  using Vectors = Int4Tile<Code>;
  using Input = typename Vectors::Input;
  static constexpr int64_t kRowUnit = kTileRows;

  static void run(const LinearWeight& weight, const Input* x, int64_t x_stride, int64_t rows,
                  const uint32_t* w, int64_t inputs, Vec (*total)[kPanel / kLanes], bool is_first,
                  const uint32_t* next) {
    if (rows <= kMaxTileRows) {
      return run_tiles<Vectors>(weight, x, x_stride, rows, w, inputs, total, is_first, next);
    }
    if (is_first) __builtin_memset(total, 0, rows * kPanel * sizeof(float));
    Unpacked unpacked;
    unpack(weight, w, inputs, unpacked);
    const int64_t lines = (next - w) * 4 / kTileBytes;  // of a stretch like this one
    const int64_t share = vllm_cpu::ceil_div(lines, vllm_cpu::ceil_div(rows, int64_t{kTileRows}));
    Prefetch prefetch = {reinterpret_cast<const char*>(next), share};
    for (int64_t first = 0; first < rows; first += kTileRows) {
      prefetch.step();
      const int64_t left = rows - first < kTileRows ? rows - first : int64_t{kTileRows};
      add_rows(x + first * x_stride, x_stride, left, weight.block_inputs, inputs, unpacked,
               total + first);
    }
  }

 private:
  static constexpr int64_t kMaxBlocks = Vectors::kStretchInputs / vllm_cpu::kMinBlockInputs;

  struct Unpacked {
    alignas(64) Bits quads[Vectors::kStretchInputs / 4][kPanel / kLanes];
    Vec scales[kMaxBlocks][kPanel / kLanes];
    Vec minimums[Code::kHasMinimums ? kMaxBlocks : 1][kPanel / kLanes];
  };

  static void unpack(const LinearWeight& weight, const uint32_t* w, int64_t inputs, Unpacked& to) {
    const int64_t size = weight.block_inputs;
    for_each_block<Code>(weight, w, inputs, [&](Int4Block<Code> block, int64_t k, int64_t count) {
      for (int v = 0; v < kPanel / kLanes; ++v) {
        to.scales[k / size][v] = block.scales(v * kLanes);
        if (Code::kHasMinimums) to.minimums[k / size][v] = block.minimums(v * kLanes);
        Bits zero = Bits{} + uint32_t{Code::kZero};
        if (Code::kHasZeros) zero = block.zeros(v * kLanes);
        zero *= 0x01010101u;
        for (int64_t i = 0; i < size; i += 4) {  // 0 after the end
          to.quads[(k + i) / 4][v] =
              i < count ? minus_bytes(block.quads(i / 4, v * kLanes), zero) : Bits{};
        }
      }
    });
  }

  // Byte by byte.
  static VLLM_INLINE Bits minus_bytes(Bits a, Bits b) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
    return reinterpret_cast<Bits>(reinterpret_cast<Bytes>(a) - reinterpret_cast<Bytes>(b));
  }

  // At most 16 rows.
  static void add_rows(const Input* x, int64_t x_stride, int64_t rows, int64_t block,
                       int64_t inputs, const Unpacked& unpacked, Vec (*total)[kPanel / kLanes]) {
    constexpr int64_t kStepInputs = kTileBytes;
    alignas(64) Ints sums[kTileRows][kPanel / kLanes];
    configure_tiles(rows, rows, (block < kStepInputs ? block : kStepInputs) / 4);
    TileProduct product = {nullptr, x_stride, nullptr,
                           4 * kPanel, sums,  4 * kPanel,
                           vllm_cpu::ceil_div(block, kStepInputs), true};
    Prefetch nothing = {nullptr, 0};
    for (int64_t k = 0; k < inputs; k += block, x += sizeof(Int4Header) + block) {
      product.a = x + sizeof(Int4Header);
      product.b = unpacked.quads[k / 4];
      multiply_tiles<TilesOfS8S8, 1, 4>(product, nothing);
      for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kPanel / kLanes; ++v) {
          const int64_t number = k / block;
          add_scaled<Code>(sums[r][v], unpacked.scales[number][v],
                           unpacked.minimums[Code::kHasMinimums ? number : 0][v],
                           x + r * x_stride, total[r][v]);
        }
      }
    }
  }
};

}  // namespace VLLM_ISA

#endif  // VLLM_MATRIX_TILES
