// The inner loops of prefill attention: a block of query rows against one tile of keys and
// values. Knows no requests and no blocks of the cache.
//
// One query row per lane: scores are [keys][rows] and results [head size][rows], so that the
// softmax of a row never leaves its lane, and what is done for a row does not depend on the rows
// beside it.
#pragma once

#include "attention_matrix.h"
#include "attention_score.h"

namespace VLLM_ISA {

constexpr int kRowVectors = 3;                   // vectors of rows of a block, and
constexpr int kColumns = kLanes >= 16 ? 8 : 4;   // columns: 24 (12) sums in 32 (16) registers
constexpr int64_t kQueryRows = kRowVectors * kLanes;

// Scratch of one block of rows, each [...][kQueryRows].
struct RowBlock {
  uint32_t* query;  // words of the head
  float* out;       // [padded value size]: sum(e^(score - largest) * value)
  float* largest;   // [1], times log2(e)
  float* total;     // [1]: sum(e^(score - largest))
  float* slopes;    // [1]
  float* sinks;     // [1]
  int32_t* positions;   // [1], in the request
  int32_t* first_keys;  // [1]: the first key that the row sees
  int32_t* last_keys;   // [1]: the last one
  int64_t num_rows;
  int64_t first_position, last_position;  // of its rows
  int64_t all_see, any_sees;  // the smallest and the largest of last_keys
};

// sums[c][v] += words of kVectors vectors of rows * the numbers of kColumns columns.
// number_at(c, j): the word of column c that belongs to word j of the rows.
template <class Dot, int kVectors, typename NumberAt>
VLLM_INLINE void multiply(const uint32_t* rows, int64_t num_words, NumberAt number_at,
                          Vec (&sums)[kColumns][kVectors]) {
  for (int64_t j = 0; j < num_words; ++j) {
    Bits words[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) words[v] = load_bits(rows + j * kQueryRows + v * kLanes);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const auto number =
          Dot::splat_of(reinterpret_cast<const typename Dot::Input*>(number_at(c, j)));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[c][v] = Dot::dot(sums[c][v], words[v], number);
    }
  }
}

// Keys of a tile are computed in multiples of so many; those after the last one are zero.
template <class Dot>
constexpr int kKeyUnit = kAttendsOnTiles<Dot> ? 16 : kColumns;

// scores[k] of keys [0, num_keys); a little more is written, up to a multiple of kKeyUnit.
template <class Dot, int kVectors>
inline void score_block(const RowBlock& block, const uint32_t* keys, int64_t key_stride,
                        int64_t num_words, int64_t num_keys, float* scores) {
#ifdef VLLM_MATRIX_TILES
  if constexpr (kAttendsOnTiles<Dot>) {
    return score_on_tiles<kVectors>(block.query, kQueryRows, keys, key_stride, num_words, num_keys,
                                    scores);
  }
#endif
  for (int64_t k = 0; k < num_keys; k += kColumns) {
    const uint32_t* key[kColumns];
    for (int c = 0; c < kColumns; ++c) key[c] = keys + (k + c) * key_stride;
    Vec sums[kColumns][kVectors] = {};
    multiply<Dot, kVectors>(
        block.query, num_words,
        [&](int c, int64_t j) __attribute__((always_inline)) { return key[c] + j; }, sums);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(scores + (k + c) * kQueryRows + v * kLanes, sums[c][v]);
      }
    }
  }
}

// out = out * shrink.
template <int kVectors>
inline void shrink_block(const RowBlock& block, int64_t padded_head, const Vec (&shrink)[kVectors]) {
  Ints is_other = {};
  for (int v = 0; v < kVectors; ++v) is_other |= shrink[v] != splat(1.0f);
  if (max_lanes(__builtin_convertvector(-is_other, Vec)) == 0) return;  // the usual case
  for (int64_t i = 0; i < padded_head; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const at = block.out + i * kQueryRows + v * kLanes;
      store(at, load(at) * shrink[v]);
    }
  }
}

// out = out * shrink + weights * values.
template <class Dot, int kVectors>
inline void add_values(const RowBlock& block, const uint32_t* values, int64_t value_stride,
                       int64_t value_size, const uint32_t* weights, int64_t num_words,
                       const Vec (&shrink)[kVectors]) {
#ifdef VLLM_MATRIX_TILES
  if constexpr (kAttendsOnTiles<Dot>) {
    shrink_block(block, padded(value_size), shrink);
    return add_on_tiles<kVectors>(values, weights, kQueryRows, value_size, block.out);
  }
#endif
  for (int64_t i = 0; i < value_size; i += kColumns) {
    float* const out = block.out + i * kQueryRows;
    Vec sums[kColumns][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[c][v] = load(out + c * kQueryRows + v * kLanes) * shrink[v];
      }
    }
    multiply<Dot, kVectors>(
        weights, num_words,
        [&](int c, int64_t j)
            __attribute__((always_inline)) { return values + j * value_stride + i + c; },
        sums);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(out + c * kQueryRows + v * kLanes, sums[c][v]);
    }
  }
}

// How many positions each row is after `key`; negative when the key is later.
VLLM_INLINE Ints distance(const RowBlock& block, int v, int64_t key) {
  Ints positions;
  __builtin_memcpy(&positions, block.positions + v * kLanes, sizeof positions);
  return positions - static_cast<int32_t>(key);
}

// All ones where a row sees a key.
VLLM_INLINE Ints sees(const RowBlock& block, int v, int64_t key) {
  Ints first_keys, last_keys;
  __builtin_memcpy(&first_keys, block.first_keys + v * kLanes, sizeof first_keys);
  __builtin_memcpy(&last_keys, block.last_keys + v * kLanes, sizeof last_keys);
  const int32_t at = static_cast<int32_t>(key);
  return (first_keys <= at) & (last_keys >= at);
}

// Turns products into scores, not scaled yet if options.scales_late(), and returns the largest of each row
// (-inf when it sees no key).
template <int kVectors>
inline void finish_scores(const RowBlock& block, const ScoreOptions& options, int64_t begin,
                          int64_t num_keys, bool is_masked, float* scores,
                          Vec (&largest)[kVectors]) {
  Vec most[kVectors];  // of its own: the compiler leaves what a reference names in memory
  for (int v = 0; v < kVectors; ++v) most[v] = splat(-__builtin_inff());
  const bool scales_late = options.scales_late();
  if (scales_late && !is_masked) {
    for (int64_t k = 0; k < num_keys; ++k, scores += kQueryRows) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) most[v] = max(most[v], load(scores + v * kLanes));
    }
  } else {
    for (int64_t k = 0; k < num_keys; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* const at = scores + k * kQueryRows + v * kLanes;
        Vec score = load(at);
        if (!scales_late) score = score * options.scale;
        if (options.soft_cap != 0) score = options.soft_cap * tanh(score / options.soft_cap);
        if (options.slopes != nullptr) {
          score -= load(block.slopes + v * kLanes) *
                   __builtin_convertvector(distance(block, v, begin + k), Vec);
        }
        if (is_masked) {
          score = sees(block, v, begin + k) ? score : splat(-__builtin_inff());
        }
        store(at, score);
        most[v] = max(most[v], score);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) largest[v] = most[v];
}

// Weights of one or two keys as words. first, second: those of key k and k + 1.
template <class Dot>
VLLM_INLINE void store_weights(uint32_t* to, Vec first, Vec second) {
#ifdef __AVX512BF16__
  if constexpr (Dot::kInputs == 2) {
    const __m512bh halves =
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    _mm512_storeu_si512(to,
                        _mm512_permutexvar_epi16(pairs, reinterpret_cast<__m512i>(halves)));
    return;
  }
#endif
  __builtin_memcpy(to, &first, sizeof first);
  if constexpr (Dot::kInputs == 2) __builtin_memcpy(to + kQueryRows, &second, sizeof second);
}

// weights = 2^(score * to_exponent - largest), zero where a row does not see the key. Adds them to total.
// Rough where they are rounded to bf16.
template <class Dot, int kVectors, bool kIsMasked>
inline void weigh_scores(const RowBlock& block, float to_exponent, int64_t begin, int64_t num_keys,
                         const float* scores, const Vec (&largest)[kVectors],
                         Vec (&total)[kVectors], uint32_t* weights) {
  const auto weight_at = [&](int64_t k, int v) __attribute__((always_inline)) {
    const Vec score = load(scores + k * kQueryRows + v * kLanes);
    const Vec weight = exp2<Dot::kInputs == 2>(fma(score, splat(to_exponent), -largest[v]));
    if (!kIsMasked) return weight;
    return sees(block, v, begin + k) ? weight : Vec{};
  };
  Vec sums[kVectors];  // of its own, as in finish_scores
  for (int v = 0; v < kVectors; ++v) sums[v] = total[v];
  for (int64_t k = 0; k < num_keys; k += Dot::kInputs, weights += kQueryRows) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec first = weight_at(k, v);
      sums[v] += first;
      Vec second = {};
      if (Dot::kInputs == 2 && k + 1 < num_keys) {
        second = weight_at(k + 1, v);
        sums[v] += second;
      }
      store_weights<Dot>(weights + v * kLanes, first, second);
    }
  }
  for (int v = 0; v < kVectors; ++v) total[v] = sums[v];
  if constexpr (kAttendsOnTiles<Dot>) {  // all keys of a tile are multiplied
    const int64_t used = vllm_cpu::ceil_div(num_keys, int64_t{Dot::kInputs});
    __builtin_memset(weights, 0, (kPrefillKeys / Dot::kInputs - used) * kQueryRows * 4);
  }
}

// Scratch of one thread for a tile and the block that attends to it.
struct TileScratch {
  uint32_t* keys;     // [kPrefillKeys][key_stride]
  uint32_t* values;   // [kPrefillKeys / kInputs][value_stride]; on tiles as attention_matrix.h says
  float* scores;      // [kPrefillKeys][kQueryRows]
  uint32_t* weights;  // [kPrefillKeys / kInputs][kQueryRows]
  int64_t key_stride, value_stride;
};

// One step of the online softmax: brings the block up to date with keys [0, num_keys) of a tile
// that begins at position `begin`.
template <class Dot, int kVectors>
inline void attend_block(const RowBlock& block, const TileScratch& tile,
                         const ScoreOptions& options, int64_t begin, int64_t num_keys,
                         int64_t head_size, int64_t value_size) {
  const bool is_masked =
      begin + num_keys - 1 > block.all_see ||
      options.sight.first_key(block.last_position) > begin;
  score_block<Dot, kVectors>(block, tile.keys, tile.key_stride,
                             (head_size + Dot::kInputs - 1) / Dot::kInputs, num_keys, tile.scores);
  Vec largest[kVectors], total[kVectors], shrink[kVectors];
  finish_scores<kVectors>(block, options, begin, num_keys, is_masked, tile.scores, largest);
  const float to_exponent = options.to_exponent();
  for (int v = 0; v < kVectors; ++v) {
    const Vec before = load(block.largest + v * kLanes);
    largest[v] = max(before, largest[v] * to_exponent);
    // Nothing new is larger: exactly one, also when nothing was seen yet (-inf - -inf is NaN).
    shrink[v] = largest[v] == before ? splat(1.0f) : exp2<false>(before - largest[v]);
    total[v] = load(block.total + v * kLanes) * shrink[v];
  }
  const auto weigh = is_masked ? weigh_scores<Dot, kVectors, true> : weigh_scores<Dot, kVectors, false>;
  weigh(block, to_exponent, begin, num_keys, tile.scores, largest, total, tile.weights);
  for (int v = 0; v < kVectors; ++v) {
    store(block.largest + v * kLanes, largest[v]);
    store(block.total + v * kLanes, total[v]);
  }
  add_values<Dot, kVectors>(block, tile.values, tile.value_stride, value_size, tile.weights,
                            (num_keys + Dot::kInputs - 1) / Dot::kInputs, shrink);
}

// The same for as many keys as the block sees, and vectors as it has rows.
template <class Dot>
inline void attend_tile(const RowBlock& block, const TileScratch& tile,
                        const ScoreOptions& options, int64_t begin, int64_t num_keys,
                        int64_t head_size, int64_t value_size) {
  const int64_t visible = block.any_sees + 1 - begin;
  const int64_t last_key = begin + num_keys - 1;
  const bool is_forgotten = options.sight.first_key(block.first_position) > last_key;
  if (visible <= 0 || is_forgotten) return;
  if (visible < num_keys) num_keys = visible;
  if (block.num_rows > 2 * kLanes) {
    attend_block<Dot, 3>(block, tile, options, begin, num_keys, head_size, value_size);
  } else if (block.num_rows > kLanes) {
    attend_block<Dot, 2>(block, tile, options, begin, num_keys, head_size, value_size);
  } else {
    attend_block<Dot, 1>(block, tile, options, begin, num_keys, head_size, value_size);
  }
}

}  // namespace VLLM_ISA
