// Low-rank products of adapters (LoRA): what they are told; what they compute is said in low_rank.h.
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// Of one adapter for one projection: y[offset : offset + size] += (x @ a.T) @ b. W is float or bf16.
VLLM_STRUCT(LowRank,
  // W [rank / kRankBlock, in_features / kRankInputs, kRankBlock, kRankInputs]; the last inputs are
  // followed by zeros.
  const void* a;
  const uint32_t* b;  // the panels of a weight [size, rank] of W (linear_format.h)
  int64_t rank;   // a multiple of kRankBlock; 0: the adapter leaves this projection as it is
  int64_t in_features, offset, size;
);

constexpr int64_t kRankBlock = 8, kRankInputs = 32;

// A matrix that becomes tiles: those of its first rows come first. The last rows of tiles are zeros
// where there are not as many.
VLLM_STRUCT(TileArgs,
  const void* matrix;  // [rows, columns] of column_bytes each, dense
  void* to;
  int64_t rows, columns;
  int64_t tile_rows;     // of a tile, which is one column wide
  int64_t column_bytes;  // 4, or kRankInputs elements of W
);

// The adapters of a launch of T tokens.
VLLM_STRUCT(AdaptedRows,
  const LowRank* const* adapters;  // [num_adapters] each with all adapted projections of the model,
                                   // in one order; null: no row has it
  const int32_t* of_rows;          // [T] the adapter of each token; -1: none
  int64_t num_adapters;
  int64_t is_float;  // 1: W is float
);

// A call for one layer: some of the tokens, and the projections that the layer packs.
VLLM_STRUCT(LowRankArgs,
  const AdaptedRows* adapted;
  const void* x;  // [num_rows, in_features], rows x_stride elements apart
  void* y;        // [num_rows, out_features], rows y_stride elements apart
  int64_t first_row, num_rows, x_stride, y_stride;
  int64_t first_part, num_parts;  // of the projections of an adapter
  // Elements from what one projection reads of a row, and writes, to what the next one does; 0: all
  // have the same inputs, and their outputs follow each other by `offset`.
  int64_t x_head_stride, y_head_stride;
);

}  // namespace vllm_cpu
