// Arguments of the low-rank matmuls of LoRA adapters (low_rank.h).
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// One adapter for one projection: y[offset : offset + size] += (x @ a.T) @ b. W is float or bf16.
VLLM_STRUCT(LowRank,
  // W [rank / kRankBlock, in_features / kRankInputs, kRankBlock, kRankInputs]; inputs are padded
  // with zeros at the end.
  const void* a;
  const uint32_t* b;  // the panels of a weight [size, rank] of W (linear_format.h)
  int64_t rank;   // a multiple of kRankBlock; 0: the adapter does not change this projection
  int64_t in_features, offset, size;
);

constexpr int64_t kRankBlock = 8, kRankInputs = 32;

// A matrix that is split into tiles, beginning with the tiles of its first rows. Missing rows of
// the last tiles are zeros.
VLLM_STRUCT(TileArgs,
  const void* matrix;  // [rows, columns] of column_bytes each, dense
  void* to;
  int64_t rows, columns;
  int64_t tile_rows;     // rows of a tile; a tile is one column wide
  int64_t column_bytes;  // 4, or kRankInputs elements of W
);

// The adapters of a batch of T tokens.
VLLM_STRUCT(AdaptedRows,
  const LowRank* const* adapters;  // [num_adapters]: each is an array of all adapted projections of
                                   // the model,
                                   // in the same order; null: no row uses it
  const int32_t* of_rows;          // [T] the adapter of each token; -1: none
  int64_t num_adapters;
  int64_t is_float;  // 1: W is float
);

// A call for one layer: some of the tokens, and the projections that the layer combines.
VLLM_STRUCT(LowRankArgs,
  const AdaptedRows* adapted;
  const void* x;  // [num_rows, in_features], rows x_stride elements apart
  void* y;        // [num_rows, out_features], rows y_stride elements apart
  int64_t first_row, num_rows, x_stride, y_stride;
  int64_t first_part, num_parts;  // range in the projections of an adapter
  // Number of elements from the input (output) of one projection in a row to that of the next; 0:
  // all projections have the same input, and `offset` is the position of their outputs.
  int64_t x_head_stride, y_head_stride;
);

}  // namespace vllm_cpu
