// The matmuls of prefill attention on matrix tiles: scores = keys @ queries, and results += values
// @ weights. Queries and weights have one query row per lane, which is the layout of the tiles of b
// (matrix_tiles.h). Copied keys already have the layout of a; values are transposed into it when
// they are copied.
#pragma once

#include "attention_pack.h"
#include "matrix_product.h"

namespace VLLM_ISA {

constexpr int kPrefillKeys = 64;  // number of keys in a tile of prefill attention

// Whether prefill attention with this Dot runs on matrix tiles.
template <class Dot>
constexpr bool kAttendsOnTiles = kHasTiles && Dot::kInputs == 2;

#ifdef VLLM_MATRIX_TILES

// scores[num_keys][rows] = keys @ query for kVectors * 16 query rows, where num_keys is rounded up
// to a whole tile. row_stride: distance in words from one word of a query row to its next word.
template <int kVectors>
inline void score_on_tiles(const uint32_t* query, int64_t row_stride, const uint32_t* keys,
                           int64_t key_stride, int64_t num_words, int64_t num_keys,
                           float* scores) {
  for (int v = 0; v < kVectors; ++v) {
    multiply_column<TilesOfBf16>({keys, 4 * key_stride, query + v * kTileRows, 4 * row_stride,
                                  scores + v * kTileRows, 4 * row_stride,
                                  vllm_cpu::ceil_div(num_words, int64_t{kTileRows}), true},
                                 vllm_cpu::ceil_div(num_keys, int64_t{kTileRows}));
  }
}

// out[head_size][rows] += values @ weights over all keys of a tile. All keys are added for each
// row, so its sums do not depend on how many keys the other rows attend to.
template <int kVectors>
inline void add_on_tiles(const uint32_t* values, const uint32_t* weights, int64_t row_stride,
                         int64_t head_size, float* out) {
  constexpr int64_t kValueWords = kPrefillKeys / 2;
  for (int v = 0; v < kVectors; ++v) {
    multiply_column<TilesOfBf16>({values, 4 * kValueWords, weights + v * kTileRows, 4 * row_stride,
                                  out + v * kTileRows, 4 * row_stride, kValueWords / kTileRows,
                                  false},
                                 vllm_cpu::ceil_div(head_size, int64_t{kTileRows}));
  }
}

// Copies values as [padded head size][kPrefillKeys / 2] words: each word has the same element of
// two keys; zeros after the last key. value_at(k): the address of the value of key k.
template <class Dot, typename T, typename ValueAt>
inline void pack_values_transposed(int64_t num_keys, int64_t head_size, ValueAt value_at,
                                   uint32_t* to) {
  constexpr int64_t kValueWords = kPrefillKeys / 2;
  for (int64_t word = 0; word < kValueWords; word += kLanes) {
    for (int64_t i = 0; i < head_size; i += 2 * kLanes) {
      const int64_t left = head_size - i < 2 * kLanes ? head_size - i : int64_t{2 * kLanes};
      Vec pairs[2][kLanes];  // two groups of kLanes elements of the values
      for (int64_t j = 0; j < kLanes; ++j) {
        const int64_t k = (word + j) * Dot::kInputs;
        uint32_t words[2 * kLanes] = {};
        if (k < num_keys) {
          const T* values[] = {value_at(k) + i, k + 1 < num_keys ? value_at(k + 1) + i : nullptr};
          pack_values<Dot, T>(values, left, words);
        }
        __builtin_memcpy(&pairs[0][j], words, sizeof(Vec));
        __builtin_memcpy(&pairs[1][j], words + kLanes, sizeof(Vec));
      }
      for (int64_t part = 0; part * kLanes < left; ++part) {
        transpose(pairs[part]);
        for (int64_t j = 0; j < kLanes; ++j) {
          __builtin_memcpy(to + (i + part * kLanes + j) * kValueWords + word, &pairs[part][j],
                           sizeof(Vec));
        }
      }
    }
  }
}

#endif  // VLLM_MATRIX_TILES

}  // namespace VLLM_ISA
