// Low-rank matmuls of LoRA adapters, gathered: each row has its own adapter, or none.
//
// y[row, part] += (x[row] @ a.T) @ b      with a and b of the adapter of the row
//
// Rows are grouped by adapter, so that the weights of an adapter are read once for all of its rows.
// A row without an adapter is not changed. Sums are made in float and in a fixed order, which does
// not depend on groups or threads. So the result of a row does not depend on the other rows of the
// batch.
#pragma once

#include "linear.h"
#include "low_rank_args.h"

namespace VLLM_ISA {

using vllm_cpu::AdaptedRows;
using vllm_cpu::LowRank;
using vllm_cpu::LowRankArgs;
using vllm_cpu::TileArgs;

using vllm_cpu::kRankBlock;
using vllm_cpu::kRankInputs;

constexpr int64_t kPieceRows = 32;
constexpr int64_t kAheadBytes = 4096;  // prefetch distance

// Returns the number of inputs in a row of a, with padding.
inline int64_t aligned_inputs(int64_t in_features) {
  return ceil_div(in_features, kRankInputs) * kRankInputs;
}

// Selects the Dot that multiplies rows of floats with b, which is a packed weight of W.
template <typename W>
struct UpDot {
  using Dot = DotFloat;
};
template <>
struct UpDot<bf16> {
  using Dot = DotWide;
};

// out[k] = the sum of all lanes of sums[k].
VLLM_INLINE void store_sums(Vec (&sums)[kRankBlock], float* out) {
  if constexpr (kLanes <= kRankBlock) {
    for (int64_t first = 0; first < kRankBlock; first += kLanes) {
      Vec part[kLanes];
      for (int k = 0; k < kLanes; ++k) part[k] = sums[first + k];
      store(out + first, sum_each(part));
    }
  } else {
#pragma GCC unroll 8
    for (int64_t n = kRankBlock / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
      for (int64_t k = 0; k < n; ++k) sums[k] = pair_sums(sums[2 * k], sums[2 * k + 1]);
    }
#pragma GCC unroll 4
    for (int64_t n = kLanes / kRankBlock; n > 1; n /= 2) sums[0] = pair_sums(sums[0], sums[0]);
    store(out, sums[0], kRankBlock);
  }
}

// Products of kRankInputs inputs in the layouts of T and W, added lane by lane.
template <typename T, typename W>
struct RankDot {
  static constexpr int kVectors = kRankInputs / kLanes;
  using Part = Vec;
  static VLLM_INLINE Vec part(const T* x, int v) { return load(x + v * kLanes); }
  static VLLM_INLINE Vec dot(Vec acc, const W* a, int v, Vec x) {
    return fma(x, load(a + v * kLanes), acc);
  }
};
#ifdef VLLM_DOT_BF16
template <>
struct RankDot<bf16, bf16> {
  static constexpr int kVectors = kRankInputs / (2 * kLanes);
  using Part = Bits;
  static VLLM_INLINE Bits part(const bf16* x, int v) { return load_bits(x + v * 2 * kLanes); }
  static VLLM_INLINE Vec dot(Vec acc, const bf16* a, int v, Bits x) {
    return DotBf16::dot(acc, load_bits(a + v * 2 * kLanes), x);
  }
};
#endif

// Computes h[r][0 .. kRankBlock) = x[r] @ a.T for one block of a. kIsNew: prefetch a, because it
// may not have been read before.
template <int kRows, bool kIsNew, typename T, typename W>
VLLM_INLINE void project_down(const T* const* x, const W* a, int64_t in_features, float* const* h) {
  using Dot = RankDot<T, W>;
  Vec sums[kRows][kRankBlock] = {};
  const auto add = [&](const T* const* inputs, int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int v = 0; v < Dot::kVectors; ++v) {
      typename Dot::Part parts[kRows];
      for (int r = 0; r < kRows; ++r) parts[r] = Dot::part(inputs[r] + at, v);
#pragma GCC unroll 8
      for (int64_t k = 0; k < kRankBlock; ++k) {
        const W* const row = a + k * kRankInputs;
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) sums[r][k] = Dot::dot(sums[r][k], row, v, parts[r]);
      }
    }
    if constexpr (kIsNew) {
      const char* const ahead = reinterpret_cast<const char*>(a) + kAheadBytes;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRankBlock * kRankInputs * int64_t{sizeof(W)}; i += 64) {
        __builtin_prefetch(ahead + i);
      }
    }
    a += kRankBlock * kRankInputs;
  };
  const int64_t num_whole = in_features / kRankInputs * kRankInputs;
  for (int64_t i = 0; i < num_whole; i += kRankInputs) add(x, i);
  if (num_whole < in_features) {
    T last[kRows][kRankInputs] = {};
    const T* from[kRows];
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(last[r], x[r] + num_whole, (in_features - num_whole) * sizeof(T));
      from[r] = last[r];
    }
    add(from, 0);
  }
  for (int r = 0; r < kRows; ++r) store_sums(sums[r], h[r]);
}

// At most kPieceRows rows with the same adapter, for one projection.
struct LowRankPiece {
  const LowRank* part;
  const int32_t* rows;
  int64_t num_rows;
  float* h;  // [num_rows, rank]
  int64_t first_block, first_panel;  // number of units in the pieces before it
  int64_t number;                    // index of the projection in the call
};

template <typename T, typename W>
class LowRankCall {
 public:
  LowRankCall(const LowRankArgs& args, int num_threads) : args_(args), threads_(num_threads) {}

  // Computes all projections. Returns -1, a row whose adapter is out of range, or kNoMemory.
  int64_t run() {
    int64_t h_size = 0, work = 0, num_adapted = 0;
    for (int64_t i = 0; i < args_.num_rows; ++i) {
      const int64_t adapter = adapter_of(i);
      if (adapter < 0) continue;
      const bool is_known = adapter < args_.adapted->num_adapters;
      if (!is_known || args_.adapted->adapters[adapter] == nullptr) return args_.first_row + i;
      ++num_adapted;
      for (int64_t p = 0; p < args_.num_parts; ++p) {
        const LowRank& part = part_of(adapter, p);
        h_size += part.rank;
        work += part.rank * (part.in_features + part.size);
      }
    }
    if (h_size == 0) return -1;
    threads_ = {threads_.all, 1 + work / 80000};  // as in threads_for
    const int64_t num_adapters = args_.adapted->num_adapters;
    const int64_t most = (num_adapted / kPieceRows + num_adapters) * args_.num_parts;
    const int64_t start_bytes = aligned((num_adapters + 1) * 4), row_bytes = aligned(num_adapted * 4);
    const int64_t piece_bytes = aligned(most * int64_t{sizeof(LowRankPiece)});
    char* const scratch = vllm_cpu::workspace(start_bytes + row_bytes + piece_bytes + h_size * 4);
    if (scratch == nullptr) return kNoMemory;
    int32_t* const starts = reinterpret_cast<int32_t*>(scratch);
    int32_t* const rows = reinterpret_cast<int32_t*>(scratch + start_bytes);
    pieces_ = reinterpret_cast<LowRankPiece*>(scratch + start_bytes + row_bytes);
    group_rows(starts, rows);
    cut(starts, rows, reinterpret_cast<float*>(scratch + start_bytes + row_bytes + piece_bytes));
    share(num_blocks_, [&](const LowRankPiece& piece, int64_t unit) {
      down(piece, unit - piece.first_block);
    }, [](const LowRankPiece& piece) { return piece.first_block; });
    share(num_panels_, [&](const LowRankPiece& piece, int64_t unit) {
      up(piece, unit - piece.first_panel);
    }, [](const LowRankPiece& piece) { return piece.first_panel; });
    return -1;
  }

 private:
  using UpTile = DenseTile<typename UpDot<W>::Dot>;

  int64_t adapter_of(int64_t row) const { return args_.adapted->of_rows[args_.first_row + row]; }

  const LowRank& part_of(int64_t adapter, int64_t part) const {
    return args_.adapted->adapters[adapter][args_.first_part + part];
  }

  // Groups the rows by adapter: writes the rows of each adapter, in their order, to `rows` from
  // starts[adapter] on.
  void group_rows(int32_t* starts, int32_t* rows) const {
    const int64_t num_adapters = args_.adapted->num_adapters;
    for (int64_t a = 0; a <= num_adapters; ++a) starts[a] = 0;
    for (int64_t i = 0; i < args_.num_rows; ++i) {
      if (adapter_of(i) >= 0) ++starts[adapter_of(i) + 1];
    }
    for (int64_t a = 0; a < num_adapters; ++a) starts[a + 1] += starts[a];
    for (int64_t i = 0; i < args_.num_rows; ++i) {
      if (adapter_of(i) >= 0) rows[starts[adapter_of(i)]++] = static_cast<int32_t>(i);
    }
    for (int64_t a = num_adapters; a > 0; --a) starts[a] = starts[a - 1];
    starts[0] = 0;
  }

  void cut(const int32_t* starts, const int32_t* rows, float* h) {
    for (int64_t a = 0; a < args_.adapted->num_adapters; ++a) {
      for (int64_t first = starts[a]; first < starts[a + 1]; first += kPieceRows) {
        const int64_t left = starts[a + 1] - first, count = left < kPieceRows ? left : kPieceRows;
        for (int64_t p = 0; p < args_.num_parts; ++p) {
          const LowRank& part = part_of(a, p);
          if (part.rank == 0) continue;
          pieces_[num_pieces_++] = {&part, rows + first, count, h, num_blocks_, num_panels_, p};
          h += count * part.rank;
          num_blocks_ += part.rank / kRankBlock;
          num_panels_ += ceil_div(part.size, int64_t{kPanel});
        }
      }
    }
  }

  // Calls body(piece, unit) for all units; first_of(piece) is the index of a piece's first unit.
  template <class Body, class First>
  void share(int64_t num_units, Body body, First first_of) const {
    const int64_t chunk = ceil_div(num_units, 8 * int64_t{threads_.useful});
    parallel_for(num_units, chunk, threads_, [&](int64_t begin, int64_t end, int) {
      int64_t p = 0;
      for (int64_t above = num_pieces_; above - p > 1;) {
        const int64_t middle = (p + above) / 2;
        (first_of(pieces_[middle]) <= begin ? p : above) = middle;
      }
      for (int64_t unit = begin; unit < end; ++unit) {
        while (p + 1 < num_pieces_ && first_of(pieces_[p + 1]) <= unit) ++p;
        body(pieces_[p], unit);
      }
    });
  }

  void down(const LowRankPiece& piece, int64_t block) const {
    const LowRank& part = *piece.part;
    const int64_t block_size = kRankBlock * aligned_inputs(part.in_features);
    const W* const a = static_cast<const W*>(part.a) + block * block_size;
    float* const h = piece.h + block * kRankBlock;
    int64_t i = 0;
    for (; i + 2 <= piece.num_rows; i += 2) {
      const T* const x[] = {x_at(piece, i), x_at(piece, i + 1)};
      float* const to[] = {h + i * part.rank, h + (i + 1) * part.rank};
      project_down<2, false>(x, a, part.in_features, to);
    }
    if (i == piece.num_rows) return;
    const T* const x = x_at(piece, i);
    float* const to = h + i * part.rank;
    project_down<1, true>(&x, a, part.in_features, &to);
  }

  void up(const LowRankPiece& piece, int64_t panel) const {
    const LowRank& part = *piece.part;
    const int64_t panel_words = part.rank * kPanel * int64_t{sizeof(W)} / 4;
    const uint32_t* const b = part.b + panel * panel_words;
    alignas(64) Vec sums[kPieceRows][kPanel / kLanes];
    run_tiles<UpTile>({}, piece.h, part.rank, piece.num_rows, b, part.rank, sums, true,
                      b + panel_words);
    const int64_t begin = panel * kPanel, left = part.size - begin;
    const int64_t width = left < kPanel ? left : int64_t{kPanel};
    for (int64_t r = 0; r < piece.num_rows; ++r) {
      T* const y = y_at(piece, r) + begin;
      for_each_vector(width, [&](int64_t i, int64_t count) {
        store(y + i, load(y + i, count) + sums[r][i / kLanes], count);
      });
    }
  }

  // Returns the address of the input of row i of a piece.
  const T* x_at(const LowRankPiece& piece, int64_t i) const {
    return static_cast<const T*>(args_.x) + piece.rows[i] * args_.x_stride +
           piece.number * args_.x_head_stride;
  }
  T* y_at(const LowRankPiece& piece, int64_t i) const {
    return static_cast<T*>(args_.y) + piece.rows[i] * args_.y_stride +
           piece.number * args_.y_head_stride + piece.part->offset;
  }

  const LowRankArgs& args_;
  vllm_cpu::Threads threads_;
  LowRankPiece* pieces_ = nullptr;
  int64_t num_pieces_ = 0, num_blocks_ = 0, num_panels_ = 0;
};

template <int64_t kBytes>
void copy_tiles(const TileArgs& args) {
  const int64_t row_bytes = args.columns * kBytes;
  const char* const from = static_cast<const char*>(args.matrix);
  char* to = static_cast<char*>(args.to);
  for (int64_t first = 0; first < args.rows; first += args.tile_rows) {
    const int64_t left = args.rows - first, count = left < args.tile_rows ? left : args.tile_rows;
    for (int64_t column = 0; column < args.columns; ++column) {
      const char* next = from + first * row_bytes + column * kBytes;
      for (int64_t r = 0; r < count; ++r, next += row_bytes, to += kBytes) {
        __builtin_memcpy(to, next, kBytes);
      }
      __builtin_memset(to, 0, (args.tile_rows - count) * kBytes);
      to += (args.tile_rows - count) * kBytes;
    }
  }
}

// Copies a matrix A or B tile by tile. Returns 0, or 1 if the tiles have another width.
inline int64_t tile_matrix(const TileArgs& args) {
  switch (args.column_bytes) {
    case 4:
      copy_tiles<4>(args);
      return 0;
    case kRankInputs * int64_t{sizeof(bf16)}:
      copy_tiles<kRankInputs * int64_t{sizeof(bf16)}>(args);
      return 0;
    case kRankInputs * int64_t{sizeof(float)}:
      copy_tiles<kRankInputs * int64_t{sizeof(float)}>(args);
      return 0;
    default:
      return 1;
  }
}

// Adds the results of the adapters to y. Returns -1; a row whose adapter is out of range (nothing
// is computed then); or kNoMemory.
template <typename T>
int64_t add_low_rank(const LowRankArgs& args, int num_threads) {
  if (args.adapted->is_float != 0) return LowRankCall<T, float>(args, num_threads).run();
  return LowRankCall<T, bf16>(args, num_threads).run();
}

}  // namespace VLLM_ISA
