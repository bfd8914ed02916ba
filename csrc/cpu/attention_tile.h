// The inner loops of paged attention: one tile of keys and values against the query heads that
// share them. Knows no requests and no blocks.
#pragma once

#include "simd.h"

namespace VLLM_ISA {

constexpr int kTileKeys = 32;  // scores, keys and values of a tile stay in the first-level cache

// Head sizes are padded to whole vectors in scratch memory.
VLLM_INLINE int64_t padded(int64_t head_size) { return (head_size + kLanes - 1) / kLanes * kLanes; }

// Online softmax of some query heads that share keys. out is sum(e^(s - largest) * value), not
// yet divided by total = sum(e^(s - largest)). One head is `padded(head_size) + kHeader` floats:
// largest, total, then out.
constexpr int64_t kHeader = kLanes;

// What is done to a product of query and key, in this order.
struct ScoreOptions {
  float scale;
  float soft_cap;       // cap * tanh(score / cap); 0: none
  const float* slopes;  // ALiBi: minus the slope of the head times the distance of the key, or null
  int64_t window;       // most recent keys a query sees; 0: all. For decode the caller leaves the
                        // others out.
};

// tanh within 3e-7. By its series near zero, where the difference from one would cancel.
VLLM_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = fma(square, splat(62.0f / 2835), splat(-17.0f / 315));
  p = fma(p, square, splat(2.0f / 15));
  p = fma(p, square, splat(-1.0f / 3));
  const Vec near = fma(p * square, x, x);
  const Vec far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return square < 0.09f ? near : far;
}

// Rows of some keys of one kv head, and of their values. All kTileKeys pointers are readable.
template <typename T>
struct Tile {
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  int64_t num_keys;
  int64_t distance;  // positions from the first key to the query
};

// A row is 256 bytes or so and the next one is far away, which the processor does not foresee. Into
// the second-level cache: a fetch into the first holds one of about twenty buffers until memory has
// answered, and a core then gets half as many bytes per second.
template <typename T>
VLLM_INLINE void prefetch_row(const T* row, int64_t head_size) {
  for (int64_t i = 0; i < head_size; i += 64 / int64_t{sizeof(T)})
    __builtin_prefetch(row + i, 0, 2);
}

// Scores of kLanes / kHeads keys against kHeads query heads: lane h * keys + k.
template <int kHeads, typename T>
VLLM_INLINE Vec dot_products(const float* query, int64_t query_stride, const T* const* keys,
                             int64_t head_size) {
  constexpr int kKeys = kLanes / kHeads;
  Vec sums[kLanes] = {};
  for_each_vector(head_size, [&](int64_t i, int64_t count) {
    Vec q[kHeads];
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; ++h) q[h] = load(query + h * query_stride + i);
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const Vec key = load(keys[k] + i, count);
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) sums[h * kKeys + k] = fma(q[h], key, sums[h * kKeys + k]);
    }
  });
  return sum_each(sums);
}

// scores[h][k] for kHeads heads and all keys of a tile. Fetches the keys of `next` meanwhile,
// unless that is null; add_values does it for the values.
template <int kHeads, typename T>
inline void score_tile(const float* query, int64_t query_stride, const Tile<T>& tile,
                       const Tile<T>* next, int64_t head_size, float* scores) {
  constexpr int kKeys = kLanes / kHeads;
  for (int64_t k = 0; k < tile.num_keys; k += kKeys) {
    for (int j = 0; next != nullptr && j < kKeys; ++j) {
      prefetch_row(next->keys[k + j], head_size);
    }
    float block[kLanes];
    store(block, dot_products<kHeads>(query, query_stride, tile.keys + k, head_size));
    for (int h = 0; h < kHeads; ++h) {
      __builtin_memcpy(scores + h * kTileKeys + k, block + h * kKeys, kKeys * sizeof(float));
    }
  }
}

// out[h] += sum over keys of weights[h][k] * values[k], for kVecs vectors of the head from
// `offset` on. The last vector has `count` elements.
template <int kHeads, int kVecs, typename T>
VLLM_INLINE void add_values(const float* weights, const Tile<T>& tile, const Tile<T>* next,
                            int64_t head_size, int64_t offset, int64_t count, float* out,
                            int64_t out_stride) {
  Vec sums[kHeads][kVecs];
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) sums[h][v] = load(out + h * out_stride + offset + v * kLanes);
  }
  for (int64_t k = 0; k < tile.num_keys; ++k) {
    if (next != nullptr) prefetch_row(next->values[k], head_size);
    Vec weight[kHeads];
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; ++h) weight[h] = splat(weights[h * kTileKeys + k]);
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const Vec value = load(tile.values[k] + offset + v * kLanes, v + 1 < kVecs ? kLanes : count);
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) sums[h][v] = fma(weight[h], value, sums[h][v]);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) store(out + h * out_stride + offset + v * kLanes, sums[h][v]);
  }
}

template <int kHeads, typename T>
inline void add_tile(const float* weights, const Tile<T>& tile, const Tile<T>* next,
                     int64_t head_size, float* out, int64_t out_stride) {
  constexpr int kVecs = 4;
  int64_t i = 0;
  for (; i + kVecs * kLanes <= head_size; i += kVecs * kLanes) {
    add_values<kHeads, kVecs>(weights, tile, i == 0 ? next : nullptr, head_size, i, int64_t{kLanes},
                              out, out_stride);
  }
  for (; i + kLanes <= head_size; i += kLanes) {
    add_values<kHeads, 1>(weights, tile, i == 0 ? next : nullptr, head_size, i, int64_t{kLanes},
                          out, out_stride);
  }
  if (i < head_size) {
    add_values<kHeads, 1>(weights, tile, i == 0 ? next : nullptr, head_size, i, head_size - i, out,
                          out_stride);
  }
}

// Turns the scores of one head into weights e^(s * scale - largest), and brings the head's state
// up to the new largest score.
inline void softmax_tile(float* scores, int64_t num_keys, float scale, float* state,
                         int64_t head_size) {
  float tile_largest = -__builtin_inff();
  Vec largest_each = splat(tile_largest);
  for_each_vector(num_keys, [&](int64_t k, int64_t count) {
    const Vec scaled = load(scores + k, count) * scale;
    store(scores + k, scaled, count);
    if (count == kLanes) {
      largest_each = max(largest_each, scaled);
    } else {
      for (int64_t j = 0; j < count; ++j) {
        if (scaled[j] > tile_largest) tile_largest = scaled[j];
      }
    }
  });
  const float vec_largest = max_lanes(largest_each);
  if (vec_largest > tile_largest) tile_largest = vec_largest;

  float total = state[1];
  float* const out = state + kHeader;
  if (tile_largest > state[0]) {
    const Vec shrink = exp(splat(state[0] - tile_largest));
    state[0] = tile_largest;
    total *= shrink[0];
    for_each_vector(padded(head_size),
                    [&](int64_t i, int64_t) { store(out + i, load(out + i) * shrink); });
  }
  Vec total_each = {};
  for_each_vector(num_keys, [&](int64_t k, int64_t count) {
    Vec weight = exp(load(scores + k, count) - state[0]);
    store(scores + k, weight, count);
    for (int64_t j = count; j < kLanes; ++j) weight[j] = 0;
    total_each += weight;
  });
  state[1] = total + sum_lanes(total_each);
}

// All of ScoreOptions, for the products of one head.
inline void finish_scores(float* scores, const ScoreOptions& options, int64_t head,
                          int64_t num_keys, int64_t distance) {
  const float slope = options.slopes != nullptr ? options.slopes[head] : 0;
  for (int64_t k = 0; k < num_keys; k += kLanes) {
    Vec score = load(scores + k) * options.scale, distances;
    if (options.soft_cap != 0) score = options.soft_cap * tanh(score / options.soft_cap);
    for (int j = 0; j < kLanes; ++j) distances[j] = static_cast<float>(distance - k - j);
    store(scores + k, score - slope * distances);
  }
}

// One tile for kHeads query heads that share the loaded keys and values. first_head: the first of
// them, as `options.slopes` counts.
template <int kHeads, typename T>
inline void attend_heads(const float* query, float* scores, float* states, const Tile<T>& tile,
                         const Tile<T>* next, int64_t head_size, const ScoreOptions& options,
                         int64_t first_head) {
  const int64_t query_stride = padded(head_size), state_stride = kHeader + padded(head_size);
  score_tile<kHeads>(query, query_stride, tile, next, head_size, scores);
  const bool is_plain = options.soft_cap == 0 && options.slopes == nullptr;
  for (int h = 0; h < kHeads; ++h) {
    float* const of_head = scores + h * kTileKeys;
    if (!is_plain) finish_scores(of_head, options, first_head + h, tile.num_keys, tile.distance);
    softmax_tile(of_head, tile.num_keys, is_plain ? options.scale : 1.0f,
                 states + h * state_stride, head_size);
  }
  add_tile<kHeads>(scores, tile, next, head_size, states + kHeader, state_stride);
}

// One tile for all query heads of its kv head, in steps of as many as the registers hold.
template <typename T>
inline void attend_tile(const float* query, float* scores, float* states, int64_t group,
                        const Tile<T>& tile, const Tile<T>& next, int64_t head_size,
                        const ScoreOptions& options, int64_t first_head) {
  const int64_t query_stride = padded(head_size), state_stride = kHeader + padded(head_size);
  for (int64_t h = 0; h < group;) {
    const float* const q = query + h * query_stride;
    float* const state = states + h * state_stride;
    const Tile<T>* const fetch = h == 0 ? &next : nullptr;
    if (kLanes >= 16 && group - h >= 4) {
      attend_heads<(kLanes >= 16 ? 4 : 1)>(q, scores, state, tile, fetch, head_size, options,
                                           first_head + h);
      h += 4;
    } else if (kLanes >= 8 && group - h >= 2) {
      attend_heads<(kLanes >= 8 ? 2 : 1)>(q, scores, state, tile, fetch, head_size, options,
                                          first_head + h);
      h += 2;
    } else {
      attend_heads<1>(q, scores, state, tile, fetch, head_size, options,
                      first_head + h);
      h += 1;
    }
  }
}

}  // namespace VLLM_ISA
