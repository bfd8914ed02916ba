// The inner loops of decode attention: one tile of keys and values against the query heads that
// share them. This code does not depend on requests or blocks.
//
// Keys and values are read from the cache without a copy, as words: one float, or two bf16. If one
// instruction multiplies and adds both (attention_pack.h), the words are its operands. Otherwise the
// lower halves of the words become one vector of floats and the upper halves another, which takes
// fewer instructions than eight bf16 that become adjacent floats. Queries and results have the same order.
#pragma once

#include "attention_pack.h"
#include "attention_score.h"

namespace VLLM_ISA {

constexpr int kTileKeys = 64;  // keys, values and scores of a tile fit into the first-level cache

// State of the online softmax of some query heads that share keys. Each head has kHeader floats:
// the largest score at index 0, and kLanes partial sums of e^(score - largest) from index kTotal
// on. Then follows sum(e^(score - largest) * value), with decode_padded(value size) floats in the
// order of `pair_up`.
constexpr int64_t kTotal = kLanes, kHeader = 2 * kLanes;

// Number of elements in a vector of the cache.
template <typename T>
constexpr int64_t kStored = kLanes * kPerWord<T>;

// Rounds a head size up to whole vectors of the cache, for scratch memory.
template <typename T>
VLLM_INLINE int64_t decode_padded(int64_t head_size) {
  return round_up(head_size, kStored<T>);
}

// Number of operands that a vector of the cache becomes for one key.
template <class Dot, typename T>
constexpr int kOperands = kPerWord<T> / Dot::kInputs;

// Splits a vector of the cache into operands.
template <int kOperands>
VLLM_INLINE void split(Bits words, Bits (&operands)[kOperands]) {
  if constexpr (kOperands == 2) {
    operands[0] = words << 16;
    operands[1] = words & 0xffff0000u;
  } else {
    operands[0] = words;
  }
}

// Copies a query in the order of the operands, with zeros up to a whole vector of the cache.
template <class Dot, typename T>
inline void pack_query(const T* query, int64_t head_size, uint32_t* to) {
  for (int64_t i = 0; i < head_size; i += kStored<T>) {
    Bits operands[kOperands<Dot, T>];
    split(load_stored(query + i, head_size - i), operands);
    for (const Bits& operand : operands) {
      __builtin_memcpy(to, &operand, sizeof operand);
      to += kLanes;
    }
  }
}

// Keys and values of one kv head: key k begins rows[k] elements after `keys`, and value k rows[k]
// elements after `values`. All kTileKeys entries of `rows` are valid, even after num_keys.
template <typename T>
struct Tile {
  const T* keys;
  const T* values;
  const int64_t* rows;
  int64_t num_keys;
  int64_t distance;  // number of positions from the first key to the query
};

// The keys and values of a kv head, or of adjacent ones, in the cache. Key k has key_bytes bytes and
// begins element_bytes * rows[k] bytes after `keys`; likewise for values. If values are part of the
// keys, value_bytes is 0.
struct TileBytes {
  const char* keys;
  const char* values;
  const int64_t* rows;
  int32_t num_keys;
  int64_t element_bytes, key_bytes, value_bytes;
};

constexpr int kKeysPerFetch = 4;  // values are prefetched after each of so many keys

// Prefetches the keys and values of a later tile, a few lines at a time during the whole computation
// of a tile: after about sixteen lines, a core waits until memory has answered. The target is the
// second-level cache: a prefetch into the first level occupies one of about twenty buffers until
// memory answers, which halves the bandwidth of a core.
class Fetch {
 public:
  Fetch() = default;
  // num_loops: number of loops over tiles that are computed; each prefetches its part.
  Fetch(const TileBytes& tile, int32_t num_loops) : tile_(tile), num_loops_(num_loops) {
    num_lines_ = tile.num_keys * (lines_of(tile.key_bytes) + lines_of(tile.value_bytes));
    left_ = num_lines_;
  }

  // Returns the number of lines to prefetch in each of `num_calls` calls of `advance`. It is the
  // same in each call: otherwise the processor could not predict the branches.
  VLLM_INLINE int32_t step(int64_t num_calls) const {
    const int32_t calls = static_cast<int32_t>(num_calls) * num_loops_;
    return (num_lines_ + calls - 1) / calls;
  }
  // Prefetches the next `count` lines.
  VLLM_INLINE void advance(int32_t count) {
    if (count > left_) count = left_;
    left_ -= count;
    for (; count > 0; --count, at_ += kLineBytes) {
      if (at_ >= end_) next_row();
      __builtin_prefetch(at_, 0, 2);
    }
  }
  // Prefetches what is left.
  void finish() { advance(left_); }

 private:
  static constexpr int64_t kLineBytes = 64;
  static int32_t lines_of(int64_t bytes) {
    return static_cast<int32_t>((bytes + kLineBytes - 1) / kLineBytes);
  }
  VLLM_INLINE void next_row() {
    const bool is_key = next_ < tile_.num_keys;
    const int64_t row = tile_.rows[is_key ? next_ : next_ - tile_.num_keys];
    at_ = (is_key ? tile_.keys : tile_.values) + row * tile_.element_bytes;
    end_ = at_ + (is_key ? tile_.key_bytes : tile_.value_bytes);
    ++next_;
  }

  TileBytes tile_ = {};
  int32_t num_loops_ = 1, num_lines_ = 0, left_ = 0;
  int32_t next_ = 0;  // index of the next key, or number of keys + index of the next value
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

// Returns the dot products of kLanes / kHeads keys, from key `first` on, with kHeads query heads:
// lane h * (kLanes / kHeads) + k is key first + k with head h.
template <class Dot, int kHeads, typename T>
VLLM_INLINE Vec dot_products(const uint32_t* query, int64_t query_stride, const Tile<T>& tile,
                             int64_t first, int64_t head_size) {
  constexpr int kKeys = kLanes / kHeads, kParts = kOperands<Dot, T>;
  Vec sums[kLanes] = {};
  const auto add = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    typename Dot::Splat q[kParts][kHeads];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) {
        q[part][h] = reinterpret_cast<typename Dot::Splat>(
            load_bits(query + h * query_stride + i / Dot::kInputs + part * kLanes));
      }
    }
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      Bits key[kParts];
      split(load_stored(tile.keys + tile.rows[first + k] + i, left), key);
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          sums[h * kKeys + k] = Dot::dot(sums[h * kKeys + k], key[part], q[part][h]);
        }
      }
    }
  };
  int64_t i = 0;
  for (; i + kStored<T> <= head_size; i += kStored<T>) add(i, kStored<T>);
  if (i < head_size) add(i, head_size - i);
  return sum_each(sums);
}

// Computes the dot products scores[h][k] of kHeads heads with all keys of a tile.
template <class Dot, int kHeads, typename T>
inline void score_tile(const uint32_t* query, int64_t query_stride, const Tile<T>& tile,
                       Fetch& fetch, int64_t head_size, float* scores) {
  constexpr int kKeys = kLanes / kHeads;
  const int32_t step = fetch.step(2 * ((tile.num_keys + kKeys - 1) / kKeys));
  for (int64_t k = 0; k < tile.num_keys; k += kKeys) {
    fetch.advance(step);
    const Vec products = dot_products<Dot, kHeads>(query, query_stride, tile, k, head_size);
    float block[kLanes];
    store(block, products);
    for (int h = 0; h < kHeads; ++h) {
      __builtin_memcpy(scores + h * kTileKeys + k, block + h * kKeys, kKeys * sizeof(float));
    }
  }
}

// Loads a vector of the values of each of kInputs keys, from element `i` on, of which `left` elements
// exist. In the result, each word has the same element of all these keys. Pairs are in the order in
// which the processor interleaves: within each eight elements, the first four are in the first
// vector. Without pairs, `split` makes the order. `natural` restores the order of the cache.
template <class Dot, typename T>
VLLM_INLINE void pair_up(const Tile<T>& tile, int64_t k, int64_t i, int64_t left,
                         Bits (&words)[kPerWord<T>]) {
  const Bits first = load_stored(tile.values + tile.rows[k] + i, left);
  if constexpr (Dot::kInputs == 1) split(first, words);
#ifdef __AVX512BF16__
  if constexpr (Dot::kInputs == 2) {
    const Bits second = load_stored(tile.values + tile.rows[k + 1] + i, left);
    const __m512i a = reinterpret_cast<__m512i>(first), b = reinterpret_cast<__m512i>(second);
    words[0] = reinterpret_cast<Bits>(_mm512_unpacklo_epi16(a, b));
    words[1] = reinterpret_cast<Bits>(_mm512_unpackhi_epi16(a, b));
  }
#endif
}

template <class Dot, int kParts>
VLLM_INLINE void natural(Vec (&parts)[kParts]) {
  if constexpr (kParts == 2 && Dot::kInputs == 1) {
    const Vec lower = interleave_lower(parts[0], parts[1]);
    parts[1] = interleave_upper(parts[0], parts[1]);
    parts[0] = lower;
  }
#ifdef __AVX512BF16__
  if constexpr (kParts == 2 && Dot::kInputs == 2) {
    const __m512 a = reinterpret_cast<__m512>(parts[0]), b = reinterpret_cast<__m512>(parts[1]);
    const __m512i lower =
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
    parts[0] = reinterpret_cast<Vec>(_mm512_permutex2var_ps(a, lower, b));
    parts[1] = reinterpret_cast<Vec>(_mm512_permutex2var_ps(a, upper, b));
  }
#endif
  (void)parts;
}

// out[h] += sum over keys of weights[h][k] * values[k], for kParts vectors of the cache from element
// `offset` on. The last vector has `left` elements.
template <class Dot, int kHeads, int kParts, typename T>
VLLM_INLINE void add_values(const uint32_t* weights, const Tile<T>& tile, Fetch& fetch, int32_t step,
                            int64_t offset, int64_t left, float* out, int64_t out_stride) {
  constexpr int kInputs = Dot::kInputs, kEach = kPerWord<T>, kVectors = kParts * kEach;
  Vec sums[kHeads][kVectors];
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sums[h][v] = load(out + h * out_stride + offset + v * kLanes);
    }
  }
  const auto add = [&](int64_t k) __attribute__((always_inline)) {
    typename Dot::Splat weight[kHeads];
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; ++h) {
      weight[h] = Dot::splat_of(reinterpret_cast<const typename Dot::Input*>(
          weights + h * kTileKeys + k / kInputs));
    }
#pragma GCC unroll 16
    for (int part = 0; part < kParts; ++part) {
      Bits words[kEach];
      pair_up<Dot>(tile, k, offset + part * kStored<T>, left, words);
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 2
        for (int v = 0; v < kEach; ++v) {
          Vec& sum = sums[h][part * kEach + v];
          sum = Dot::dot(sum, words[v], weight[h]);
        }
      }
    }
  };
  int64_t k = 0;
  for (; k + kKeysPerFetch <= tile.num_keys; k += kKeysPerFetch) {
    fetch.advance(step);
#pragma GCC unroll 4
    for (int j = 0; j < kKeysPerFetch; j += kInputs) add(k + j);
  }
  for (; k < tile.num_keys; k += kInputs) add(k);
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      store(out + h * out_stride + offset + v * kLanes, sums[h][v]);
    }
  }
}

template <class Dot, int kHeads, typename T>
inline void add_tile(const uint32_t* weights, const Tile<T>& tile, Fetch& fetch,
                     int64_t value_size, float* out, int64_t out_stride) {
  // Number of vectors of sums for each head, in registers.
  constexpr int kVectors = kLanes < 16 ? 8 / kHeads : 4;
  constexpr int kParts = kVectors / kPerWord<T>;
  const int64_t num_loops = (value_size + kParts * kStored<T> - 1) / (kParts * kStored<T>);
  const int32_t step = fetch.step(2 * num_loops * ((tile.num_keys + kKeysPerFetch - 1) / kKeysPerFetch));
  int64_t i = 0;
  for (; i + kParts * kStored<T> <= value_size; i += kParts * kStored<T>) {
    add_values<Dot, kHeads, kParts>(weights, tile, fetch, step, i, kStored<T>, out, out_stride);
  }
  for (; i + kStored<T> <= value_size; i += kStored<T>) {
    add_values<Dot, kHeads, 1>(weights, tile, fetch, step, i, kStored<T>, out, out_stride);
  }
  if (i < value_size) {
    add_values<Dot, kHeads, 1>(weights, tile, fetch, step, i, value_size - i, out, out_stride);
  }
}

// Returns a mask of the lanes before `count`.
VLLM_INLINE Ints lanes_before(int64_t count) {
  Ints lanes;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes < static_cast<int32_t>(count);
}

// Turns the dot products of one head into scores; returns the largest score.
inline float finish_scores(float* scores, int64_t num_keys, const ScoreOptions& options,
                           int64_t head, int64_t distance) {
  const bool is_plain = options.soft_cap == 0 && options.slopes == nullptr;
  const float slope = options.slopes != nullptr ? options.slopes[head] : 0;
  Vec largest = splat(-__builtin_inff());
  for (int64_t k = 0; k < num_keys; k += kLanes) {
    Vec score = load(scores + k) * options.scale;
    if (!is_plain) {
      if (options.soft_cap != 0) score = options.soft_cap * tanh(score / options.soft_cap);
      Vec distances;
      for (int j = 0; j < kLanes; ++j) distances[j] = static_cast<float>(distance - k - j);
      score -= slope * distances;
    }
    if (num_keys - k < kLanes) {
      score = lanes_before(num_keys - k) ? score : splat(-__builtin_inff());
    }
    store(scores + k, score);
    largest = max(largest, score);
  }
  return max_lanes(largest);
}

// Turns finished scores of one head into weights e^(score - largest), kInputs keys per word, and
// rescales the state of the head to the new largest score. Weights of missing keys are 0.
template <class Dot>
inline void weigh_tile(const float* scores, int64_t num_keys, float tile_largest, float* state,
                       int64_t padded_values, uint32_t* weights) {
  constexpr int kInputs = Dot::kInputs;
  Vec total = load(state + kTotal);
  if (tile_largest > state[0]) {
    const Vec shrink = exp(splat(state[0] - tile_largest));
    state[0] = tile_largest;
    total = total * shrink;
    for (int64_t i = 0; i < padded_values; i += kLanes) {
      store(state + kHeader + i, load(state + kHeader + i) * shrink);
    }
  }
  const Vec largest = splat(state[0]);
  for (int64_t k = 0; k < num_keys; k += kLanes * kInputs) {
    Vec weight[kInputs] = {};
    for (int j = 0; j < kInputs; ++j) {
      const int64_t left = num_keys - k - j * kLanes;
      if (left <= 0) break;
      weight[j] = exp(load(scores + k + j * kLanes) - largest);
      if (left < kLanes) weight[j] = lanes_before(left) ? weight[j] : Vec{};
      total += weight[j];
    }
#ifdef __AVX512BF16__
    if constexpr (kInputs == 2) {
      const auto words = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(weight[1]),
                                             reinterpret_cast<__m512>(weight[0]));
      __builtin_memcpy(weights + k / 2, &words, sizeof words);
      continue;
    }
#endif
    __builtin_memcpy(weights + k, &weight[0], sizeof weight[0]);
  }
  store(state + kTotal, total);
}

// The arguments of attention over a tile, except the tile itself.
struct TileWork {
  const uint32_t* query;  // [heads][query_stride] words
  float* states;          // [heads][kHeader + padded_values]
  float* scores;          // [4][kTileKeys]
  uint32_t* weights;      // [4][kTileKeys]
  int64_t query_stride, padded_values, head_size, value_size;
  int64_t first_head;  // index of the first head, as in `options.slopes`
};

// Attends to one tile with kHeads query heads, from `head` on, that share the loaded keys and
// values.
template <class Dot, int kHeads, typename T>
inline void attend_heads(const TileWork& work, int64_t head, const Tile<T>& tile,
                         Fetch& fetch, const ScoreOptions& options) {
  const int64_t state_stride = kHeader + work.padded_values;
  float* const states = work.states + head * state_stride;
  score_tile<Dot, kHeads>(work.query + head * work.query_stride, work.query_stride, tile, fetch,
                          work.head_size, work.scores);
  for (int h = 0; h < kHeads; ++h) {
    float* const scores = work.scores + h * kTileKeys;
    const float largest = finish_scores(scores, tile.num_keys, options,
                                        work.first_head + head + h, tile.distance);
    weigh_tile<Dot>(scores, tile.num_keys, largest, states + h * state_stride, work.padded_values,
                    work.weights + h * kTileKeys);
  }
  add_tile<Dot, kHeads>(work.weights, tile, fetch, work.value_size, states + kHeader, state_stride);
}

// Attends to one tile with `num_heads` query heads of its kv head. Each step takes as many heads as
// the registers hold.
template <class Dot, typename T>
inline void attend_tile(const TileWork& work, int64_t head, int64_t num_heads,
                        const Tile<T>& tile, Fetch& fetch, const ScoreOptions& options) {
  for (const int64_t end = head + num_heads; head < end;) {
    if (kLanes >= 8 && end - head >= 4) {
      attend_heads<Dot, (kLanes >= 8 ? 4 : 1)>(work, head, tile, fetch, options);
      head += 4;
    } else if (kLanes >= 8 && end - head >= 2) {
      attend_heads<Dot, (kLanes >= 8 ? 2 : 1)>(work, head, tile, fetch, options);
      head += 2;
    } else {
      attend_heads<Dot, 1>(work, head, tile, fetch, options);
      head += 1;
    }
  }
}

}  // namespace VLLM_ISA
