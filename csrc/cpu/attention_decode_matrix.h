// Decode attention on matrix tiles: a full tile of keys against the query heads that share them.
//
// In the product a @ b (matrix_tiles.h), keys are the rows of a and are read from the cache without
// a copy. The query heads are the columns of b, so each lane of the scores is one head. Values are
// interleaved by pairs of keys as in attention_tile.h, so both files use the same softmax state of
// a head.
#pragma once

#include "attention_matrix.h"
#include "attention_tile.h"

namespace VLLM_ISA {

// Whether full tiles of keys are multiplied on matrix tiles. Up to four heads are faster with vectors: on a Xeon
// with AMX (2026-11-28) tiles were 0.8 to 0.95 times as fast with 4 heads, 1.2 to 1.5 times with 7 and 8, 2.2
// times with 16, and 3.3 times with 16 heads of latent attention.
template <class Dot>
inline bool decodes_on_tiles(int64_t num_heads, int64_t head_size, int64_t value_size) {
  constexpr int64_t kElements = kLanes * Dot::kInputs;
  return kAttendsOnTiles<Dot> && num_heads > 4 && head_size % kElements == 0 &&
         value_size % kElements == 0;
}

// Returns the number of words that the query heads of one kv head need as columns of b: [num_heads
// / 16, rounded up][head_size / 2][16].
inline int64_t query_column_words(int64_t num_heads, int64_t head_size) {
  return round_up(num_heads, kLanes) * head_size / 2;
}

#ifdef VLLM_MATRIX_TILES

static_assert(kTileKeys == 4 * kTileRows);

// Packs query heads as columns of b. queries: [num_heads][head_size].
template <class Dot, typename T>
inline void pack_query_columns(const T* queries, int64_t num_heads, int64_t head_size, uint32_t* to) {
  for (int64_t first = 0; first < num_heads; first += kLanes, to += head_size / 2 * kLanes) {
    const T* heads[kLanes];
    for (int64_t h = 0; h < kLanes; ++h) {  // unused columns repeat a head
      heads[h] = queries + (first + h < num_heads ? first + h : first) * head_size;
    }
    pack_lanes<Dot>(heads, head_size, to, kLanes);
  }
}

// Computes the dot products scores[key][head] for a full tile. copy: [16][head_size], for keys that
// are not equally far apart in the cache.
template <typename T>
inline void score_keys(const uint32_t* query_columns, const Tile<T>& tile, int64_t head_size, T* copy,
                       float (*scores)[kLanes]) {
  const int64_t num_steps = head_size * int64_t{sizeof(T)} / kTileBytes;
  const auto multiply_keys = [&](const T* keys, int64_t stride, int64_t first, int64_t count) {
    multiply_column<TilesOfBf16>({keys, stride * int64_t{sizeof(T)}, query_columns, kTileBytes,
                                  scores + first, kTileBytes, num_steps, true},
                                 count / kTileRows);
  };
  const auto is_even = [&](int64_t first, int64_t count) {
    const int64_t* const rows = tile.rows + first;
    const int64_t stride = rows[1] - rows[0];
    int64_t difference = 0;
    for (int64_t k = 2; k < count; ++k) difference |= rows[k] - rows[k - 1] - stride;
    return difference == 0;
  };
  if (is_even(0, kTileKeys)) {
    return multiply_keys(tile.keys + tile.rows[0], tile.rows[1] - tile.rows[0], 0, kTileKeys);
  }
  for (int64_t first = 0; first < kTileKeys; first += kTileRows) {
    if (is_even(first, kTileRows)) {
      const int64_t* const rows = tile.rows + first;
      multiply_keys(tile.keys + rows[0], rows[1] - rows[0], first, kTileRows);
      continue;
    }
    for (int64_t k = 0; k < kTileRows; ++k) {
      __builtin_memcpy(copy + k * head_size, tile.keys + tile.rows[first + k], head_size * sizeof(T));
    }
    multiply_keys(copy, head_size, first, kTileRows);
  }
}

// Computes weights[head][word] = e^(score - largest), two keys per word. Scales the states of the
// heads to the new largest scores, and adds the weights to their totals. Prefetches the keys of
// `next` meanwhile.
template <class Dot>
inline void weigh_heads(float (*scores)[kLanes], int64_t num_heads, const ScoreOptions& options,
                        int64_t first_head, int64_t distance, const Fetch* next, float* states,
                        int64_t padded_values, uint32_t (*weights)[kTileKeys / 2]) {
  const int64_t state_stride = kHeader + padded_values;
  const bool is_plain = options.soft_cap == 0 && options.slopes == nullptr;
  const Vec slopes = options.slopes != nullptr ? load(options.slopes + first_head, num_heads) : Vec{};
  alignas(64) float old[kLanes] = {}, sums[kLanes], shrinks[kLanes];
  for (int64_t h = 0; h < num_heads; ++h) old[h] = states[h * state_stride];
  Vec largest = load(old);
  for (int64_t k = 0; k < kTileKeys; ++k) {
    Vec score = load(scores[k]) * options.scale;
    if (!is_plain) {
      if (options.soft_cap != 0) score = options.soft_cap * tanh(score / options.soft_cap);
      score -= slopes * static_cast<float>(distance - k);
      store(scores[k], score);
    }
    largest = max(largest, score);
  }
  const Vec shrink = exp(load(old) - largest);
  const float factor = is_plain ? kLog2E * options.scale : kLog2E;
  const Vec offset = largest * kLog2E;
  Vec total = {};
  for (int64_t word = 0; word < kTileKeys / 2; word += kLanes) {
    Vec words[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t k = 2 * (word + j);
      for (int64_t i = k; next != nullptr && i < k + 2; ++i) {
        prefetch_row(next->keys + next->rows[i] * next->element_bytes, next->key_bytes);
      }
      const Vec first = exp2<true>(fma(load(scores[k]), splat(factor), -offset));
      const Vec second = exp2<true>(fma(load(scores[k + 1]), splat(factor), -offset));
      total += first + second;
      words[j] = reinterpret_cast<Vec>(pair_of(first, second));
    }
    transpose(words);
#pragma GCC unroll 16
    for (int64_t h = 0; h < kLanes; ++h) store(reinterpret_cast<float*>(weights[h]) + word, words[h]);
  }
  store(sums, total);
  store(shrinks, shrink);
  const Vec now = largest;
  for (int64_t h = 0; h < num_heads; ++h) {
    float* const state = states + h * state_stride;
    if (now[h] > old[h]) {
      state[0] = now[h];
      for (int64_t i = kTotal; i < state_stride; i += kLanes) {
        store(state + i, load(state + i) * shrinks[h]);
      }
    }
    state[kTotal] += sums[h];
  }
}

// Adds weights * values of a tile to the states of the heads. Prefetches the values of `next` meanwhile.
template <class Dot, typename T>
inline void add_weighed(const uint32_t (*weights)[kTileKeys / 2], int64_t num_heads, const Tile<T>& tile,
                        const Fetch* next, int64_t value_size, float* states, int64_t state_stride) {
  constexpr int64_t kColumns = 4 * kLanes, kElements = kLanes * Dot::kInputs;
  alignas(64) uint32_t pairs[kTileKeys / 2][kColumns];
  Prefetch nothing = {nullptr, 0};
  configure_tiles(num_heads, num_heads, kTileRows);
  for (int64_t i = 0; i < value_size; i += kColumns, next = nullptr) {
    const int64_t columns = value_size - i < kColumns ? value_size - i : kColumns;
    for (int64_t word = 0; word < kTileKeys / 2; ++word) {
      for (int64_t k = 2 * word; next != nullptr && k < 2 * word + 2; ++k) {
        prefetch_row(next->values + next->rows[k] * next->element_bytes, next->value_bytes);
      }
      for (int64_t column = 0; column < columns; column += kElements) {
        Bits words[Dot::kInputs];
        pair_up<Dot>(tile, 2 * word, i + column, kElements, words);
        __builtin_memcpy(pairs[word] + column, words, sizeof words);
      }
    }
    const TileProduct product = {weights, kTileKeys / 2 * 4, pairs, kColumns * 4,
                                 states + kHeader + i, state_stride * 4, kTileKeys / 2 / kTileRows,
                                 false};
    if (columns == kColumns) {
      multiply_tiles<TilesOfBf16, 1, 4>(product, nothing);
    } else {
      multiply_tiles<TilesOfBf16, 1, 2>(product, nothing);
    }
  }
}

// Attends to a tile of kTileKeys keys with `num_heads` query heads of a kv head, 16 heads at a
// time.
template <class Dot, typename T>
inline void attend_full_tile(const TileWork& work, int64_t head, int64_t num_heads,
                             const uint32_t* query_columns, const Tile<T>& tile, const Fetch* next,
                             const ScoreOptions& options, T* copy) {
  const int64_t state_stride = kHeader + work.padded_values;
  alignas(64) float scores[kTileKeys][kLanes];
  alignas(64) uint32_t weights[kLanes][kTileKeys / 2];
  for (const int64_t end = head + num_heads; head < end; head += kLanes, next = nullptr) {
    const int64_t count = end - head < kLanes ? end - head : int64_t{kLanes};
    float* const states = work.states + head * state_stride;
    score_keys(query_columns, tile, work.head_size, copy, scores);
    weigh_heads<Dot>(scores, count, options, work.first_head + head, tile.distance, next, states,
                     work.padded_values, weights);
    add_weighed<Dot>(weights, count, tile, next, work.value_size, states, state_stride);
    query_columns += work.head_size / 2 * kLanes;
  }
}

#endif  // VLLM_MATRIX_TILES

}  // namespace VLLM_ISA
