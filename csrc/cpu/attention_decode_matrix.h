// Decode attention on matrix tiles: a full tile of keys against the query heads that share them.
//
// In the matmul a @ b (matrix_tiles.h), keys are the rows of a and are read from the cache without
// a copy. The query heads are the columns of b: 4, 8 or 16, so that a vector of scores has all
// heads of 4, 2 or 1 keys. Values are interleaved by pairs of keys as in attention_tile.h, so both
// files use the same softmax state of a head.
#pragma once

#include "attention_matrix.h"
#include "attention_tile.h"

namespace VLLM_ISA {

// Whether full tiles of keys are multiplied on matrix tiles. One and two heads are as fast with
// vectors.
template <class Dot>
inline bool decodes_on_tiles(int64_t num_heads, int64_t head_size, int64_t value_size) {
  constexpr int64_t kElements = kLanes * Dot::kInputs;
  return kAttendsOnTiles<Dot> && num_heads > 2 && head_size % kElements == 0 &&
         value_size % kElements == 0;
}

// Returns the number of columns of b for up to 16 query heads.
inline int64_t head_columns(int64_t num_heads) {
  return num_heads <= 4 ? 4 : num_heads <= 8 ? 8 : int64_t{kLanes};
}

// Returns the number of words that the query heads of one kv head need as columns of b:
// [head_size / 2][columns] for each 16 heads, and a vector that is written after them.
inline int64_t query_column_words(int64_t num_heads, int64_t head_size) {
  const int64_t rest = num_heads % kLanes;
  return (num_heads - rest + (rest > 0 ? head_columns(rest) : 0)) * head_size / 2 + kLanes;
}

#ifdef VLLM_MATRIX_TILES

static_assert(kTileKeys == 4 * kTileRows);

// The shapes of the tiles, which are the same for scores and for values, because changing the
// shapes takes as long as scoring a tile of keys.
enum DecodeTiles {
  kScores,                  // and the next one: [16 keys][columns]
  kQueries = kScores + 2,   // [16 words][columns]
  kResults,                 // and the next one: [heads][16 words]
  kWeights = kResults + 2,  // [heads][16 pairs of keys]
  kWide                     // and the next one: [16][16 words] of keys or of values
};

inline void configure_decode_tiles(int64_t num_heads, int64_t columns) {
  const uint32_t shape = static_cast<uint32_t>(num_heads | columns << 8) | kIsDecodeShape;
  configure_tiles_as(shape, [&](int tile) {
    if (tile >= kWide) return TileSize{kTileRows, kTileBytes};
    if (tile >= kResults) return TileSize{num_heads, kTileBytes};
    return TileSize{kTileRows, 4 * columns};
  });
}

// Packs query heads as columns of b. queries: [num_heads][head_size].
template <class Dot, typename T>
inline void pack_query_columns(const T* queries, int64_t num_heads, int64_t head_size, uint32_t* to) {
  for (int64_t first = 0; first < num_heads; first += kLanes) {
    const int64_t left = num_heads - first, columns = left < kLanes ? head_columns(left) : kLanes;
    const T* heads[kLanes];
    for (int64_t h = 0; h < kLanes; ++h) {  // unused columns repeat a head
      heads[h] = queries + (first + h < num_heads ? first + h : first) * head_size;
    }
    // Each vector has 16 words, of which the next one replaces those after `columns`.
    pack_lanes<Dot>(heads, head_size, to, columns);
    to += head_size / 2 * columns;
  }
}

// Computes the dot products scores[key][column] for a full tile. copies: [64][head_size], for keys
// that are not equally far apart in the cache.
template <int kColumns, typename T>
inline void score_keys(const uint32_t* query_columns, const Tile<T>& tile, Fetch& fetch, int64_t head_size,
                       T* copies, float* scores) {
  const int64_t num_steps = head_size * int64_t{sizeof(T)} / kTileBytes;
  const int32_t fetch_step = fetch.step(4 * num_steps * kTileKeys / kTileRows);
  const char* keys[kTileKeys / kTileRows];
  int64_t strides[kTileKeys / kTileRows];
  for (int64_t part = 0; part < kTileKeys / kTileRows; ++part) {
    const int64_t* const rows = tile.rows + part * kTileRows;
    int64_t stride = rows[1] - rows[0], difference = 0;
    for (int64_t k = 2; k < kTileRows; ++k) difference |= rows[k] - rows[k - 1] - stride;
    const T* from = tile.keys + rows[0];
    if (difference != 0) {
      T* const copy = copies + part * kTileRows * head_size;
      for (int64_t k = 0; k < kTileRows; ++k) {
        __builtin_memcpy(copy + k * head_size, tile.keys + rows[k], head_size * sizeof(T));
      }
      from = copy;
      stride = head_size;
    }
    keys[part] = reinterpret_cast<const char*>(from);
    strides[part] = stride * int64_t{sizeof(T)};
  }
  for (int64_t part = 0; part < kTileKeys / kTileRows; part += 2) {
    Tiles::zero<kScores>();
    Tiles::zero<kScores + 1>();
    for (int64_t step = 0; step < num_steps; ++step) {
      fetch.advance(fetch_step);
      Tiles::load<kQueries>(query_columns + step * kTileRows * kColumns, 4 * kColumns);
      Tiles::load<kWide>(keys[part] + step * kTileBytes, strides[part]);
      Tiles::dot<kScores, kWide, kQueries>(TilesOfBf16{});
      fetch.advance(fetch_step);
      Tiles::load<kWide + 1>(keys[part + 1] + step * kTileBytes, strides[part + 1]);
      Tiles::dot<kScores + 1, kWide + 1, kQueries>(TilesOfBf16{});
    }
    float* const to = scores + part * kTileRows * kColumns;
    Tiles::store<kScores>(to, 4 * kColumns);
    Tiles::store<kScores + 1>(to + kTileRows * kColumns, 4 * kColumns);
  }
}

// Returns the largest value of each head, in all lanes of the head. Lane k * kColumns + h of `x`
// is a value of head h.
template <int kColumns>
VLLM_INLINE Vec largest_of_heads(Vec x) {
  __m512 all = reinterpret_cast<__m512>(x);
  if (kColumns <= 8) all = _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  if (kColumns <= 4) all = _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
  return reinterpret_cast<Vec>(all);
}

// Rounds two consecutive vectors of weights to bf16. Word p * kColumns + h of the result has the
// weights of head h for the p-th pair of keys.
template <int kColumns>
VLLM_INLINE Vec pairs_of_keys(Vec first, Vec second) {
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint16_t at[2 * kLanes]; } order = {};
    for (int i = 0; i < 2 * kLanes; ++i) {
      const int word = i / 2, key = word / kColumns * 2 + i % 2;
      order.at[i] = static_cast<uint16_t>(key * kColumns + word % kColumns);
    }
    return order;
  }();
  const __m512bh halves =
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
  return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(_mm512_load_si512(&kOrder),
                                                        reinterpret_cast<__m512i>(halves)));
}

// Changes rows[pair / pairs of a row][pair % pairs of a row * kColumns + head] to
// rows[head][pair]: each round moves the lowest bit of the lane to the top of the row.
template <int kColumns>
VLLM_INLINE void gather_heads(Vec (&rows)[kColumns]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 4
  for (int round = 1; round < kColumns; round *= 2) {
    Vec next[kColumns];
#pragma GCC unroll 8
    for (int i = 0; i < kColumns / 2; ++i) {
      const __m512 a = reinterpret_cast<__m512>(rows[2 * i]);
      const __m512 b = reinterpret_cast<__m512>(rows[2 * i + 1]);
      next[i] = reinterpret_cast<Vec>(_mm512_permutex2var_ps(a, even, b));
      next[kColumns / 2 + i] = reinterpret_cast<Vec>(_mm512_permutex2var_ps(a, odd, b));
    }
#pragma GCC unroll 16
    for (int i = 0; i < kColumns; ++i) rows[i] = next[i];
  }
}

// Computes weights[head][pair of keys] = e^(score - largest). Scales the states of the heads to
// the new largest scores, and adds the weights to their totals. scores: [64][kColumns].
template <int kColumns>
inline void weigh_heads(float* scores, int64_t num_heads, const ScoreOptions& options,
                        int64_t first_head, int64_t distance, Fetch& fetch, float* states,
                        int64_t padded_values, uint32_t (*weights)[kTileKeys / 2]) {
  constexpr int kKeys = kLanes / kColumns;  // keys of a vector
  const int64_t state_stride = kHeader + padded_values;
  const bool is_plain = options.soft_cap == 0 && options.slopes == nullptr;
  alignas(64) float old[kLanes] = {}, slopes[kLanes] = {}, distances[kLanes];
  alignas(64) float sums[kLanes], shrinks[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t h = lane % kColumns;
    if (h < num_heads) old[lane] = states[h * state_stride];
    if (h < num_heads && options.slopes != nullptr) slopes[lane] = options.slopes[first_head + h];
    distances[lane] = static_cast<float>(distance - lane / kColumns);
  }
  Vec largest = load(old);
  for (int64_t k = 0; k < kTileKeys; k += kKeys) {
    Vec score = load(scores + k * kColumns) * options.scale;
    if (!is_plain) {
      if (options.soft_cap != 0) score = options.soft_cap * tanh(score / options.soft_cap);
      score -= load(slopes) * (load(distances) - static_cast<float>(k));
      store(scores + k * kColumns, score);
    }
    largest = max(largest, score);
  }
  largest = largest_of_heads<kColumns>(largest);
  store(shrinks, exp(load(old) - largest));
  const float factor = is_plain ? kLog2E * options.scale : kLog2E;
  const Vec offset = largest * kLog2E;
  const int32_t fetch_step = fetch.step(4 * kTileKeys / (2 * kKeys));
  Vec total = {};
  for (int64_t k = 0, word = 0; k < kTileKeys; word += kLanes) {
    Vec words[kColumns];
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j, k += 2 * kKeys) {
      fetch.advance(fetch_step);
      const float* const from = scores + k * kColumns;
      const Vec first = exp2<true>(fma(load(from), splat(factor), -offset));
      const Vec second = exp2<true>(fma(load(from + kLanes), splat(factor), -offset));
      total += first + second;
      words[j] = pairs_of_keys<kColumns>(first, second);
    }
    gather_heads<kColumns>(words);
#pragma GCC unroll 16
    for (int h = 0; h < kColumns; ++h) store(reinterpret_cast<float*>(weights[h]) + word, words[h]);
  }
  store(sums, total);
  for (int64_t h = 0; h < num_heads; ++h) {
    float* const state = states + h * state_stride;
    if (largest[h] > old[h]) {
      state[0] = largest[h];
      for (int64_t i = kTotal; i < state_stride; i += kLanes) {
        store(state + i, load(state + i) * shrinks[h]);
      }
    }
    for (int64_t k = 0; k < kKeys; ++k) state[kTotal + k] += sums[k * kColumns + h];
  }
}

// Adds weights * values of a tile to the states of the heads.
template <class Dot, typename T>
inline void add_weighed(const uint32_t (*weights)[kTileKeys / 2], const Tile<T>& tile,
                        Fetch& fetch, int64_t value_size, float* states, int64_t state_stride) {
  constexpr int64_t kElements = kLanes * Dot::kInputs, kPairs = kTileKeys / 2;
  const int32_t fetch_step = fetch.step(2 * kPairs * value_size / kElements);
  alignas(64) uint32_t pairs[kPairs][kElements];
  for (int64_t i = 0; i < value_size; i += kElements) {
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      fetch.advance(fetch_step);
      Bits words[Dot::kInputs];
      pair_up<Dot>(tile, 2 * pair, i, kElements, words);
      __builtin_memcpy(pairs[pair], words, sizeof words);
    }
    float* const results = states + kHeader + i;
    Tiles::load<kResults>(results, 4 * state_stride);
    Tiles::load<kResults + 1>(results + kLanes, 4 * state_stride);
    for (int64_t pair = 0; pair < kPairs; pair += kTileRows) {
      Tiles::load<kWeights>(&weights[0][pair], 4 * kPairs);
      Tiles::load<kWide>(pairs[pair], sizeof pairs[0]);
      Tiles::dot<kResults, kWeights, kWide>(TilesOfBf16{});
      Tiles::load<kWide + 1>(pairs[pair] + kLanes, sizeof pairs[0]);
      Tiles::dot<kResults + 1, kWeights, kWide + 1>(TilesOfBf16{});
    }
    Tiles::store<kResults>(results, 4 * state_stride);
    Tiles::store<kResults + 1>(results + kLanes, 4 * state_stride);
  }
}

// Attends to a tile of kTileKeys keys with up to kColumns query heads.
template <class Dot, int kColumns, typename T>
inline void attend_columns(const TileWork& work, int64_t head, int64_t num_heads,
                           const uint32_t* query_columns, const Tile<T>& tile, Fetch& fetch,
                           const ScoreOptions& options, T* copies) {
  alignas(64) float scores[kTileKeys * kColumns];
  alignas(64) uint32_t weights[kColumns][kTileKeys / 2];
  const int64_t state_stride = kHeader + work.padded_values;
  float* const states = work.states + head * state_stride;
  configure_decode_tiles(num_heads, kColumns);
  score_keys<kColumns>(query_columns, tile, fetch, work.head_size, copies, scores);
  weigh_heads<kColumns>(scores, num_heads, options, work.first_head + head, tile.distance, fetch, states,
                        work.padded_values, weights);
  add_weighed<Dot>(weights, tile, fetch, work.value_size, states, state_stride);
}

// Attends to a tile of kTileKeys keys with `num_heads` query heads of a kv head, 16 heads at a
// time.
template <class Dot, typename T>
inline void attend_full_tile(const TileWork& work, int64_t head, int64_t num_heads,
                             const uint32_t* query_columns, const Tile<T>& tile, Fetch& fetch,
                             const ScoreOptions& options, T* copies) {
  for (const int64_t end = head + num_heads; head < end; head += kLanes) {
    const int64_t count = end - head < kLanes ? end - head : int64_t{kLanes};
    const int64_t columns = head_columns(count);
    const auto attend =
        columns == 4 ? attend_columns<Dot, 4, T> : columns == 8 ? attend_columns<Dot, 8, T>
                                                                : attend_columns<Dot, 16, T>;
    attend(work, head, count, query_columns, tile, fetch, options, copies);
    query_columns += work.head_size / 2 * columns;
  }
}

#endif  // VLLM_MATRIX_TILES

}  // namespace VLLM_ISA
