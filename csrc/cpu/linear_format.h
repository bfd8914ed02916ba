// How the weight of a linear layer is laid out for the kernels. The same for every instruction
// set.
//
// 64 output features make a panel; N / 64 panels, rounded up, follow each other. A 32-bit word
// holds neighbouring input features of one output: one float, two bf16, four int8, or eight int4.
// A panel is [words of a row][64 outputs] words, so a kernel reads memory in one straight line,
// with outputs in the lanes of its vectors and no sum across lanes:
//
//     word 0:  output 0 | output 1 | ... | output 63      inputs 0 and 1 (bf16)
//     word 1:  output 0 | output 1 | ... | output 63      inputs 2 and 3
//
// A panel has as many bytes as 64 rows of the plain matrix: packing is in place.
//
// int4 comes in groups of 32 inputs (the last of a row may be shorter, in steps of 8):
//     scale: 64 bf16 | up to 4 words x 64 outputs
// and a weight is scale * (q - 8) with q in 0..15: 4.5 bits per weight. Of the eight q in a word,
// bits 4 j hold input 2 j and bits 16 + 4 j input 2 j + 1: a shift brings each pair to where two
// bf16 would be.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace vllm_cpu {

constexpr int kPanel = 64;
constexpr int kGroupInputs = 32;
constexpr int kGroupWords = kGroupInputs / 8;
constexpr int kScaleWords = kPanel / 2;  // 64 bf16

enum class WeightFormat : int64_t { kFloat = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };

// A packed weight [out_features, in_features]. Mirrored in vllm/ops/cpu_linear.py.
struct LinearWeight {
  const uint32_t* panels;  // aligned to 64 bytes
  const float* scales;     // int8: [out_features rounded up to 64]; else null
  const int32_t* sums;     // int8: sum of the weights of an output, as many; else null
  int64_t in_features, out_features;
  WeightFormat format;
};

inline int64_t num_panels(const LinearWeight& w) { return (w.out_features + kPanel - 1) / kPanel; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 32-bit words of a panel.
inline int64_t panel_words(WeightFormat format, int64_t in_features) {
  switch (format) {
    case WeightFormat::kFloat:
      return in_features * kPanel;
    case WeightFormat::kBf16:
      return in_features / 2 * kPanel;
    case WeightFormat::kInt8:
      return in_features / 4 * kPanel;
    default:
      return in_features / 8 * kPanel + ceil_div(in_features, kGroupInputs) * kScaleWords;
  }
}

}  // namespace vllm_cpu
