// Memory layout of the weight of a linear layer. It is the same for every instruction set.
//
// 64 output features form a panel; N / 64 panels, rounded up, follow each other. A 32-bit word
// contains neighbouring input features of one output: one float, two bf16, four int8, or eight
// int4. A panel is [words of a row][64 outputs] words. So a kernel reads memory sequentially, has
// outputs in the lanes of its vectors, and never adds across lanes:
//
//     word 0:  output 0 | output 1 | ... | output 63      inputs 0 and 1 (bf16)
//     word 1:  output 0 | output 1 | ... | output 63      inputs 2 and 3
//
// A panel has as many bytes as 64 rows of the plain matrix, so packing is in place.
//
// int4 has blocks of 8, 16, 32, 64 or 128 inputs (the last block of a row may be shorter, in steps
// of 8):
//     scales: 64 float16 | zero points: 64 bytes, if there are any | up to 16 words x 64 outputs
// A weight is scales[output] * scale * (q - zero) with q in 0..15. The zero point is 8 if none is
// stored: 4.5 bits per weight in blocks of 32. Byte j of a word contains two of its eight q: input j
// in its lower half and input 4 + j in its upper half. So a mask extracts four q in int8 order.
//
// mxfp4 has the same layout without zero points: q is an E2M1 value, and scales are half of the
// scales of the format. With minimums (int4_minimums, int5_minimums; blocks of 16 or 32 inputs), a
// weight is
//     factor[output] * multiplier * q - factor_of_minimums[output] * multiplier_of_minimums,
// where each product and the difference are rounded to float32. Every factor_inputs inputs begin with
//     factors: 64 float16 | of minimums: 64 float16
// and every block with
//     multipliers: 64 int8 | of minimums: 64 int8 | fifth bits, if there are any: 64 words
// where bit 8 j + i of a word belongs to input 4 i + j.
//
// table4: a code is an index of a table of 16 bf16. A word contains the codes of eight inputs as with
// int4, but byte 1 has inputs 2 and 6, and byte 2 inputs 1 and 5. Scales are outside of the panels, as
// with fp8.
#pragma once

#include <cstdint>

#include "abi.h"
#include "dtypes.h"

namespace vllm_cpu {

constexpr int kPanel = 64;
constexpr int kMinBlockInputs = 8, kMaxBlockInputs = 128;  // for weights of 4 or 5 bits
constexpr int kScaleWords = kPanel / 2;  // 64 float16
constexpr int kByteWords = kPanel / 4;   // 64 bytes
constexpr int kFactorWords = kPanel;     // 128 float16

VLLM_ENUM(WeightFormat, kFloat, kBf16, kInt8, kInt4, kFp8, kUint8, kTable4, kMxfp4, kInt4Minimums,
          kInt5Minimums);

// Operation that is applied to the results of a linear layer.
VLLM_ENUM(Activation, kNone, kGelu, kGeluTanh, kQuickGelu);

// A packed weight [out_features, in_features].
VLLM_STRUCT(LinearWeight,
  const uint32_t* panels;  // aligned to 64 bytes
  // int8, int4, mxfp4: [padded outputs]; fp8, uint8, table4: [blocks of inputs, padded outputs];
  // else null. Padded outputs: out_features rounded up to 64.
  const float* scales;
  const float* zeros;      // uint8: same shape as scales, integers from 0 to 256; else null
  const int32_t* sums;     // int8: sum of the weights of each output, same shape as scales; else
                           // null
  const uint16_t* table;   // table4: [16] bf16, the value of each code; else null
  // int4, uint8: [in_features], the index in x of each input; null: ascending
  const int32_t* order;
  int64_t in_features, out_features;
  WeightFormat format;
  // Number of inputs that share a scale. int4, mxfp4: 8, 16, 32, 64 or 128; with minimums: 32, int4
  // also 16; fp8, uint8, table4: a divisor or a multiple of 128 and a multiple of 4 (table4: of 8),
  // or in_features; else 0.
  int64_t block_inputs;
  int64_t factor_inputs;  // with minimums: a multiple of the block size that divides 512; else 0
  int64_t has_zeros;         // int4: 1 if zero points are stored; else 0
  const LinearWeight* next;  // another weight with the same inputs, whose outputs follow; null:
                             // none
);

// int4 weights in the layouts of checkpoints, all dense.
VLLM_STRUCT(Int4Source,
  // GPTQ: [in_features / 8, out_features], eight inputs of an output in a word, the first in the
  // lowest bits. AWQ: [in_features, out_features / 8], eight outputs of an input.
  const uint32_t* words;
  const float* scales;   // [num_groups, out_features]
  const uint8_t* zeros;  // same shape as scales; null if the weight has no zero points
  int64_t num_groups;
  int64_t group_inputs;  // a multiple of the weight's block size, or all inputs
  int64_t is_awq;
);

// These functions are static: each is compiled for several instruction sets, and the linker must
// not merge the copies.

static inline int64_t num_panels(const LinearWeight& w) {
  return (w.out_features + kPanel - 1) / kPanel;
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline bool has_minimums(const LinearWeight& w) {
  return w.format == WeightFormat::kInt4Minimums || w.format == WeightFormat::kInt5Minimums;
}

// Whether the weight has values of 4 or 5 bits, in blocks.
static inline bool has_int4_blocks(const LinearWeight& w) {
  return w.format == WeightFormat::kInt4 || w.format == WeightFormat::kMxfp4 || has_minimums(w);
}

// Whether elements are converted to bf16, and scales are outside of the panels.
static inline bool has_byte_blocks(const LinearWeight& w) {
  return w.format == WeightFormat::kFp8 || w.format == WeightFormat::kUint8 ||
         w.format == WeightFormat::kTable4;
}

// Number of 32-bit words at the beginning of an int4 block, before its values.
static inline int64_t header_words(const LinearWeight& w) {
  if (!has_minimums(w)) return kScaleWords + (w.has_zeros ? kByteWords : 0);
  return 2 * kByteWords + (w.format == WeightFormat::kInt5Minimums ? kPanel : 0);
}

// Number of 32-bit words of the first `inputs` inputs of a panel: whole blocks, or all inputs.
static inline int64_t panel_words(const LinearWeight& w, int64_t inputs) {
  switch (w.format) {
    case WeightFormat::kFloat:
      return inputs * kPanel;
    case WeightFormat::kBf16:
      return inputs / 2 * kPanel;
    case WeightFormat::kInt8:
    case WeightFormat::kFp8:
    case WeightFormat::kUint8:
      return inputs / 4 * kPanel;
    case WeightFormat::kTable4:
      return inputs / 8 * kPanel;
    default:
      return inputs / 8 * kPanel + ceil_div(inputs, w.block_inputs) * header_words(w) +
             (has_minimums(w) ? ceil_div(inputs, w.factor_inputs) * kFactorWords : 0);
  }
}
static inline int64_t panel_words(const LinearWeight& w) { return panel_words(w, w.in_features); }

}  // namespace vllm_cpu
