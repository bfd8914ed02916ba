// The inner loops of prefill attention: a block of query rows against one tile of keys and values.
// A query row is one token of one query head. This code does not depend on requests or on blocks of
// the cache.
//
// Each lane of a vector is one query row: scores are [keys][rows] and results [head size][rows]. So
// the softmax of a row uses only its lane, and the result of a row does not depend on other rows.
#pragma once

#include "attention_matrix.h"
#include "attention_score.h"

namespace VLLM_ISA {

// Vectors of rows in a block. On matrix tiles it is one: the tiles of scores, weights and results
// are then adjacent memory, and all of a block remains in the first-level cache.
template <class Dot>
constexpr int kRowVectors = kAttendsOnTiles<Dot> ? 1 : 3;
constexpr int kColumns = kLanes >= 16 ? 8 : 4;   // columns: 24 (or 12) sums in 32 (or 16) registers
template <class Dot>
constexpr int64_t kQueryRows = kRowVectors<Dot> * kLanes;

// The softmax subtracts a reference from each score: the largest score so far, or an older one while
// no score is larger by more than this power of two. So sums are rarely rescaled, and weights are
// at most 2^kMaxExponent.
constexpr float kMaxExponent = 8;

// Scratch memory of one block of rows; each array is [...][kQueryRows].
struct RowBlock {
  uint32_t* query;  // 32-bit words of the query head
  float* out;       // [padded value size]: sum(2^(score - reference) * value)
  float* reference; // [1] what is subtracted from scores, times log2(e)
  float* total;     // [1]: sum(2^(score - reference))
  float* slopes;    // [1]
  float* sinks;     // [1]
  int32_t* positions;   // [1] positions in the request
  int32_t* first_keys;  // [1] index of the first key that the row attends to
  int32_t* last_keys;   // [1] index of the last key that the row attends to
  int64_t num_rows;
  int64_t first_position, last_position;  // smallest and largest position of its rows
  int64_t all_see, any_sees;  // smallest and largest entry of last_keys
};

// Adds products: sums[c][v] += (word j of the rows in vector v) * (word j of column c), for all j.
// number_at(c, j): the address of word j of column c.
template <class Dot, int kVectors, typename NumberAt>
VLLM_INLINE void multiply(const uint32_t* rows, int64_t num_words, NumberAt number_at,
                          Vec (&sums)[kColumns][kVectors]) {
  for (int64_t j = 0; j < num_words; ++j) {
    Bits words[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) words[v] = load_bits(rows + j * kQueryRows<Dot> + v * kLanes);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const auto number =
          Dot::splat_of(reinterpret_cast<const typename Dot::Input*>(number_at(c, j)));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[c][v] = Dot::dot(sums[c][v], words[v], number);
    }
  }
}

// The number of keys for which scores are computed is a multiple of this; the additional keys are
// zero.
template <class Dot>
constexpr int kKeyUnit = kAttendsOnTiles<Dot> ? 16 : kColumns;

// Computes scores[k] for keys [0, num_keys), and some further scores up to a multiple of kKeyUnit.
template <class Dot, int kVectors>
inline void score_block(const RowBlock& block, const uint32_t* keys, int64_t key_stride,
                        int64_t num_words, int64_t num_keys, float* scores) {
#ifdef VLLM_MATRIX_TILES
  if constexpr (kAttendsOnTiles<Dot>) {
    return score_on_tiles<kVectors>(block.query, kQueryRows<Dot>, keys, key_stride, num_words, num_keys,
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
        store(scores + (k + c) * kQueryRows<Dot> + v * kLanes, sums[c][v]);
      }
    }
  }
}

// out *= shrink, for all rows of the block.
template <class Dot, int kVectors>
inline void shrink_block(const RowBlock& block, int64_t padded_head, const Vec (&shrink)[kVectors]) {
  Ints is_other = {};
  for (int v = 0; v < kVectors; ++v) is_other |= shrink[v] != splat(1.0f);
  if (!any_lane(reinterpret_cast<Bits>(is_other))) return;  // the usual case: all factors are 1
  for (int64_t i = 0; i < padded_head; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const at = block.out + i * kQueryRows<Dot> + v * kLanes;
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
    shrink_block<Dot>(block, padded(value_size), shrink);
    return add_on_tiles<kVectors>(values, weights, kQueryRows<Dot>, value_size, block.out);
  }
#endif
  for (int64_t i = 0; i < value_size; i += kColumns) {
    float* const out = block.out + i * kQueryRows<Dot>;
    Vec sums[kColumns][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[c][v] = load(out + c * kQueryRows<Dot> + v * kLanes) * shrink[v];
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
      for (int v = 0; v < kVectors; ++v) store(out + c * kQueryRows<Dot> + v * kLanes, sums[c][v]);
    }
  }
}

// Returns the number of positions from `key` to the token of each row; negative if the key is
// later.
VLLM_INLINE Ints distance(const RowBlock& block, int v, int64_t key) {
  Ints positions;
  __builtin_memcpy(&positions, block.positions + v * kLanes, sizeof positions);
  return positions - static_cast<int32_t>(key);
}

// Returns a mask: all bits of a lane are set if its row attends to the key.
VLLM_INLINE Ints sees(const RowBlock& block, int v, int64_t key) {
  Ints first_keys, last_keys;
  __builtin_memcpy(&first_keys, block.first_keys + v * kLanes, sizeof first_keys);
  __builtin_memcpy(&last_keys, block.last_keys + v * kLanes, sizeof last_keys);
  const int32_t at = static_cast<int32_t>(key);
  return (first_keys <= at) & (last_keys >= at);
}

// Turns dot products into scores (not scaled yet if options.scales_late()), and returns the largest
// score of each row (-inf if it attends to no key).
template <class Dot, int kVectors>
inline void finish_scores(const RowBlock& block, const ScoreOptions& options, int64_t begin,
                          int64_t num_keys, bool is_masked, float* scores,
                          Vec (&largest)[kVectors]) {
  Vec most[kVectors];  // a copy, because the compiler keeps variables with references in memory
  for (int v = 0; v < kVectors; ++v) most[v] = splat(-__builtin_inff());
  const bool scales_late = options.scales_late();
  if (scales_late && !is_masked) {
    // A maximum waits for the one before it, so there are several per vector of rows.
    constexpr int kChains = 4 / kVectors;
    Vec chains[kChains][kVectors];
    for (auto& chain : chains) __builtin_memcpy(chain, most, sizeof most);
    int64_t k = 0;
    for (; k + kChains <= num_keys; k += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c, scores += kQueryRows<Dot>) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          chains[c][v] = max(chains[c][v], load(scores + v * kLanes));
        }
      }
    }
    for (; k < num_keys; ++k, scores += kQueryRows<Dot>) {
      for (int v = 0; v < kVectors; ++v) most[v] = max(most[v], load(scores + v * kLanes));
    }
    for (auto& chain : chains) {
      for (int v = 0; v < kVectors; ++v) most[v] = max(most[v], chain[v]);
    }
  } else {
    for (int64_t k = 0; k < num_keys; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* const at = scores + k * kQueryRows<Dot> + v * kLanes;
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

// Stores the softmax weights of one or two keys as words. first, second: weights of keys k and k +
// 1.
template <class Dot>
VLLM_INLINE void store_weights(uint32_t* to, Vec first, Vec second) {
#ifdef __AVX512BF16__
  if constexpr (Dot::kInputs == 2) {
    const Bits pairs = pair_of(first, second);
    __builtin_memcpy(to, &pairs, sizeof pairs);
    return;
  }
#endif
  __builtin_memcpy(to, &first, sizeof first);
  if constexpr (Dot::kInputs == 2) __builtin_memcpy(to + kQueryRows<Dot>, &second, sizeof second);
}

// weights = 2^(score * to_exponent - reference), and zero for keys that a row does not attend to.
// Adds them to total. The exponential is less precise if weights are rounded to bf16.
template <class Dot, int kVectors, bool kIsMasked>
inline void weigh_scores(const RowBlock& block, float to_exponent, int64_t begin, int64_t num_keys,
                         const float* scores, const Vec (&reference)[kVectors],
                         Vec (&total)[kVectors], uint32_t* weights) {
  Vec sums[kVectors], offsets[kVectors];  // copies, as in finish_scores
  for (int v = 0; v < kVectors; ++v) {
    sums[v] = total[v];
    offsets[v] = -reference[v];
  }
  const auto weight_at = [&](int64_t k, int v) __attribute__((always_inline)) {
    const Vec score = load(scores + k * kQueryRows<Dot> + v * kLanes);
    const Vec weight = exp2<Dot::kInputs == 2>(fma(score, splat(to_exponent), offsets[v]));
    if (!kIsMasked) return weight;
    return sees(block, v, begin + k) ? weight : Vec{};
  };
  int64_t k = 0;
  for (; k + Dot::kInputs <= num_keys; k += Dot::kInputs, weights += kQueryRows<Dot>) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec first = weight_at(k, v);
      const Vec second = Dot::kInputs == 2 ? weight_at(k + 1, v) : Vec{};
      sums[v] += first;
      if (Dot::kInputs == 2) sums[v] += second;
      store_weights<Dot>(weights + v * kLanes, first, second);
    }
  }
  if (k < num_keys) {  // a last key without a pair
    for (int v = 0; v < kVectors; ++v) {
      const Vec first = weight_at(k, v);
      sums[v] += first;
      store_weights<Dot>(weights + v * kLanes, first, Vec{});
    }
  }
  for (int v = 0; v < kVectors; ++v) total[v] = sums[v];
  if constexpr (kAttendsOnTiles<Dot>) {  // tiles multiply all keys, so clear the rest
    const int64_t used = vllm_cpu::ceil_div(num_keys, int64_t{Dot::kInputs});
    uint32_t* const end = weights + (k < num_keys ? kQueryRows<Dot> : 0);
    const int64_t unused = kPrefillKeys / Dot::kInputs - used;
    if (unused > 0) __builtin_memset(end, 0, unused * kQueryRows<Dot> * 4);
  }
}

// Scratch memory of one thread: a tile, and the block that attends to it.
struct TileScratch {
  uint32_t* keys;     // [kPrefillKeys][key_stride]
  uint32_t* values;   // [kPrefillKeys / kInputs][value_stride]; with tiles as in attention_matrix.h
  float* scores;      // [kPrefillKeys][kQueryRows]
  uint32_t* weights;  // [kPrefillKeys / kInputs][kQueryRows]
  int64_t key_stride, value_stride;
};

// One step of the online softmax: adds keys [0, num_keys) of a tile, which begins at position
// `begin`, to the block.
template <class Dot, int kVectors>
inline void attend_block(const RowBlock& block, const TileScratch& tile,
                         const ScoreOptions& options, int64_t begin, int64_t num_keys,
                         int64_t head_size, int64_t value_size) {
  const bool is_masked =
      begin + num_keys - 1 > block.all_see ||
      options.sight.first_key(block.last_position) > begin;
  score_block<Dot, kVectors>(block, tile.keys, tile.key_stride,
                             (head_size + Dot::kInputs - 1) / Dot::kInputs, num_keys, tile.scores);
  Vec largest[kVectors], reference[kVectors], total[kVectors], shrink[kVectors];
  finish_scores<Dot, kVectors>(block, options, begin, num_keys, is_masked, tile.scores, largest);
  const float to_exponent = options.to_exponent();
  for (int v = 0; v < kVectors; ++v) {
    const Vec before = load(block.reference + v * kLanes), now = largest[v] * to_exponent;
    reference[v] = now > before + kMaxExponent ? now : before;
    // If the reference stays, the factor is exactly one, also if there was no key yet (-inf - -inf
    // is NaN).
    shrink[v] = reference[v] == before ? splat(1.0f) : exp2<false>(before - reference[v]);
    total[v] = load(block.total + v * kLanes) * shrink[v];
  }
  const auto weigh = is_masked ? weigh_scores<Dot, kVectors, true> : weigh_scores<Dot, kVectors, false>;
  weigh(block, to_exponent, begin, num_keys, tile.scores, reference, total, tile.weights);
  for (int v = 0; v < kVectors; ++v) {
    store(block.reference + v * kLanes, reference[v]);
    store(block.total + v * kLanes, total[v]);
  }
  add_values<Dot, kVectors>(block, tile.values, tile.value_stride, value_size, tile.weights,
                            (num_keys + Dot::kInputs - 1) / Dot::kInputs, shrink);
}

// Does the step of attend_block, but only for the keys that the block attends to, and only with as
// many vectors as its rows need.
template <class Dot>
inline void attend_tile(const RowBlock& block, const TileScratch& tile,
                        const ScoreOptions& options, int64_t begin, int64_t num_keys,
                        int64_t head_size, int64_t value_size) {
  const int64_t visible = block.any_sees + 1 - begin;
  const int64_t last_key = begin + num_keys - 1;
  const bool is_forgotten = options.sight.first_key(block.first_position) > last_key;
  if (visible <= 0 || is_forgotten) return;
  if (visible < num_keys) num_keys = visible;
  constexpr int kMost = kRowVectors<Dot>;
  if (kMost > 2 && block.num_rows > 2 * kLanes) {
    attend_block<Dot, kMost>(block, tile, options, begin, num_keys, head_size, value_size);
  } else if (kMost > 1 && block.num_rows > kLanes) {
    attend_block<Dot, (kMost > 1 ? 2 : 1)>(block, tile, options, begin, num_keys, head_size, value_size);
  } else {
    attend_block<Dot, 1>(block, tile, options, begin, num_keys, head_size, value_size);
  }
}

}  // namespace VLLM_ISA
