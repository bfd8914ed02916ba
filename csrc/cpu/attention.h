// Paged decode attention: one query token per request over the keys and values in its blocks.
//
// A request is cut into partitions of kPartitionKeys keys, so that one long request keeps every
// core busy. Each is a flash-style online softmax over tiles of keys, read where they lie. A
// request of several partitions leaves partial results that are merged in order. The cuts depend
// on the request alone: its result has the same bits in any batch and with any number of threads.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "simd.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr int kPartitionKeys = 256;
constexpr int kTilesAhead = 2;
constexpr int kTileKeys = 32;  // scores, keys and values of a tile stay in the first-level cache

// The arguments of one call, and what follows from them.
template <typename T>
struct DecodeCall : vllm_cpu::DecodeArgs<T> {
  int64_t group() const { return this->num_heads / this->num_kv_heads; }
  // Keys [first_key, end_key) are visible to request b.
  int64_t end_key(int64_t b) const { return this->seq_lens[b]; }
  int64_t first_key(int64_t b) const {
    const int64_t first = end_key(b) - this->sliding_window;
    return this->sliding_window > 0 && first > 0 ? first : 0;
  }
  // An empty request has one partition of no keys, which writes its zeros.
  int64_t num_partitions(int64_t b) const {
    const int64_t num = (end_key(b) - first_key(b) + kPartitionKeys - 1) / kPartitionKeys;
    return num > 0 ? num : 1;
  }
};

// Head sizes are padded to whole vectors in scratch memory.
VLLM_INLINE int64_t padded(int64_t head_size) { return (head_size + kLanes - 1) / kLanes * kLanes; }

// Online softmax of some query heads that share keys. out is sum(e^(s - largest) * value), not
// yet divided by total = sum(e^(s - largest)). One head is `padded(head_size) + kHeader` floats:
// largest, total, then out.
constexpr int64_t kHeader = kLanes;

// Some keys of one kv head, and where the next tile lies, so that it can be fetched meanwhile.
// A row is only 256 bytes or so and the next one is far away: the processor does not see that
// coming. Without it a core reaches a fifth of the bandwidth of its memory.
template <typename T>
struct Tile {
  const T* keys[kTileKeys];
  const T* values[kTileKeys];
  int64_t num_keys;
};

template <typename T>
VLLM_INLINE void prefetch_row(const T* row, int64_t head_size) {
  for (int64_t i = 0; i < head_size; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(row + i, 0, 2);
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

// scores[h][k] for kHeads heads and all keys of a tile, which has kTileKeys readable rows.
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
    add_values<kHeads, kVecs>(weights, tile, i == 0 ? next : nullptr, head_size, i,
                              int64_t{kLanes}, out, out_stride);
  }
  for (; i + kLanes <= head_size; i += kLanes) {
    add_values<kHeads, 1>(weights, tile, i == 0 ? next : nullptr, head_size, i, int64_t{kLanes},
                          out, out_stride);
  }
  if (i < head_size) {
    add_values<kHeads, 1>(weights, tile, i == 0 ? next : nullptr, head_size, i, head_size - i,
                          out, out_stride);
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
    for_each_vector(padded(head_size), [&](int64_t i, int64_t) {
      store(out + i, load(out + i) * shrink);
    });
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

// Scratch of one thread, for the heads of one item.
struct DecodeScratch {
  float* query;   // [heads, padded head size]
  float* states;  // [heads, kHeader + padded head size]
  float* scores;  // [4, kTileKeys]

  static int64_t floats(int64_t heads, int64_t head_size) {
    return heads * (kHeader + 2 * padded(head_size)) + 4 * kTileKeys;
  }
  DecodeScratch(float* memory, int64_t heads, int64_t head_size)
      : query(memory),
        states(query + heads * padded(head_size)),
        scores(states + heads * (kHeader + padded(head_size))) {}
};

// One tile for kHeads query heads that share the loaded keys and values.
template <int kHeads, typename T>
inline void attend_heads(const float* query, float* scores, float* states, const Tile<T>& tile,
                         const Tile<T>* next, int64_t head_size, float scale) {
  const int64_t query_stride = padded(head_size), state_stride = kHeader + padded(head_size);
  score_tile<kHeads>(query, query_stride, tile, next, head_size, scores);
  for (int h = 0; h < kHeads; ++h) {
    softmax_tile(scores + h * kTileKeys, tile.num_keys, scale, states + h * state_stride,
                 head_size);
  }
  add_tile<kHeads>(scores, tile, next, head_size, states + kHeader, state_stride);
}

// One tile for all query heads of its kv head, in steps of as many as the registers hold.
template <typename T>
inline void attend_tile(const float* query, float* scores, float* states, int64_t group,
                        const Tile<T>& tile, const Tile<T>& next, int64_t head_size,
                        float scale) {
  const int64_t query_stride = padded(head_size), state_stride = kHeader + padded(head_size);
  for (int64_t h = 0; h < group;) {
    const float* const q = query + h * query_stride;
    float* const state = states + h * state_stride;
    const Tile<T>* const fetch = h == 0 ? &next : nullptr;
    if (kLanes >= 16 && group - h >= 4) {
      attend_heads<(kLanes >= 16 ? 4 : 1)>(q, scores, state, tile, fetch, head_size, scale);
      h += 4;
    } else if (kLanes >= 8 && group - h >= 2) {
      attend_heads<(kLanes >= 8 ? 2 : 1)>(q, scores, state, tile, fetch, head_size, scale);
      h += 2;
    } else {
      attend_heads<1>(q, scores, state, tile, fetch, head_size, scale);
      h += 1;
    }
  }
}

// Fills a tile with keys [first, end) of kv head g of request b, at most kTileKeys of them.
// False when a block id is out of range.
template <typename T>
inline bool fill_tile(const DecodeCall<T>& call, int64_t b, int64_t g, int64_t first, int64_t end,
                      Tile<T>& tile) {
  const int32_t* const table = call.block_tables + b * call.table_stride;
  const int64_t token_stride = call.num_kv_heads * call.head_size;
  tile.num_keys = end - first < kTileKeys ? end - first : kTileKeys;
  for (int64_t k = 0; k < tile.num_keys;) {
    const int64_t block = table[(first + k) / call.block_size];
    if (block < 0 || block >= call.num_blocks) return false;
    int64_t offset = (first + k) % call.block_size;
    int64_t at = (block * call.block_size + offset) * token_stride + g * call.head_size;
    for (; offset < call.block_size && k < tile.num_keys; ++offset, ++k, at += token_stride) {
      tile.keys[k] = call.key_cache + at;
      tile.values[k] = call.value_cache + at;
    }
  }
  // Scores are computed for whole vectors of keys: the rest repeat a key and are not used.
  for (int64_t k = tile.num_keys; k < kTileKeys; ++k) {
    tile.keys[k] = tile.keys[0];
    tile.values[k] = tile.values[0];
  }
  return true;
}

// A share of the work: keys [begin, end) of request b for kv heads [first_g, end_g).
struct Item {
  int64_t b, begin, end, first_g, end_g;
};

// Attends the query heads of an item to its keys; states: [heads of the item, ...].
// All kv heads of a tile before the next tile: their rows are neighbours in memory.
// False, and no result, when a block id is out of range.
template <typename T>
inline bool attend(const DecodeCall<T>& call, const Item& item, const DecodeScratch& scratch,
                   float* states) {
  const int64_t group = call.group(), head_size = call.head_size;
  const int64_t query_stride = padded(head_size), state_stride = kHeader + padded(head_size);
  const int64_t first_head = item.first_g * group, num_heads = item.end_g * group - first_head;
  for (int64_t h = 0; h < num_heads; ++h) {
    const T* const query = call.query + item.b * call.query_stride + (first_head + h) * head_size;
    for_each_vector(head_size, [&](int64_t i, int64_t count) {
      // zeros after the end: they add nothing
      store(scratch.query + h * query_stride + i, load(query + i, count));
    });
    float* const state = states + h * state_stride;
    __builtin_memset(state, 0, state_stride * sizeof(float));
    state[0] = -__builtin_inff();
  }
  if (item.begin >= item.end) return true;

  // A ring: the tile at `used`, and those after it up to the one that is being fetched.
  Tile<T> tiles[kTilesAhead + 1];
  int64_t num_filled = 0;
  const int64_t num_kv_heads = item.end_g - item.first_g;
  const int64_t num_tiles = (item.end - item.begin + kTileKeys - 1) / kTileKeys * num_kv_heads;
  for (int64_t used = 0; used < num_tiles; ++used) {
    for (; num_filled < num_tiles && num_filled <= used + kTilesAhead; ++num_filled) {
      if (!fill_tile(call, item.b, item.first_g + num_filled % num_kv_heads,
                     item.begin + num_filled / num_kv_heads * kTileKeys, item.end,
                     tiles[num_filled % (kTilesAhead + 1)])) {
        return false;
      }
    }
    const int64_t h = used % num_kv_heads * group;
    attend_tile(scratch.query + h * query_stride, scratch.scores, states + h * state_stride, group,
                tiles[used % (kTilesAhead + 1)], tiles[(num_filled - 1) % (kTilesAhead + 1)],
                head_size, call.scale);
  }
  return true;
}

// Writes the head whose softmax is finished. No keys: zeros.
template <typename T>
inline void write_out(const float* state, int64_t head_size, T* out) {
  const float factor = state[1] > 0 ? 1.0f / state[1] : state[1] == 0 ? 0.0f : state[1];
  for_each_vector(head_size, [&](int64_t i, int64_t count) {
    store(out + i, load(state + kHeader + i) * factor, count);
  });
}

// Adds the partial results of one head, `stride` floats apart, in order into the first of them.
inline void merge(float* states, int64_t num_states, int64_t stride, int64_t head_size) {
  float largest = states[0];
  for (int64_t p = 1; p < num_states; ++p) {
    if (states[p * stride] > largest) largest = states[p * stride];
  }
  float total = 0;
  for (int64_t p = 0; p < num_states; ++p) {
    float* const state = states + p * stride;
    const Vec weight = exp(splat(state[0] - largest));
    total += state[1] * weight[0];
    for_each_vector(padded(head_size), [&](int64_t i, int64_t) {
      const Vec before = p == 0 ? Vec{} : load(states + kHeader + i);
      store(states + kHeader + i, fma(weight, load(state + kHeader + i), before));
    });
  }
  states[1] = total;
}

// How the partitions of all requests are numbered and cut into items.
template <typename T>
class WorkList {
 public:
  // first_partition: [num_requests + 1], filled here.
  WorkList(const DecodeCall<T>& call, int64_t* first_partition, int num_threads)
      : call_(call), first_partition_(first_partition) {
    first_partition[0] = 0;
    for (int64_t b = 0; b < call.num_requests; ++b) {
      first_partition[b + 1] = first_partition[b] + call.num_partitions(b);
    }
    // Whole rows of kv heads while there are enough partitions to share evenly.
    const int64_t wanted = 4 * num_threads, num_partitions = first_partition[call.num_requests];
    const int64_t slices = num_partitions > 0 ? (wanted + num_partitions - 1) / num_partitions : 1;
    kv_heads_per_item_ = slices < call.num_kv_heads ? call.num_kv_heads / slices : 1;
    slices_ = (call.num_kv_heads + kv_heads_per_item_ - 1) / kv_heads_per_item_;
  }

  int64_t num_items() const { return first_partition_[call_.num_requests] * slices_; }
  int64_t heads_per_item() const { return kv_heads_per_item_ * call_.group(); }
  int64_t partition_of(int64_t item) const { return item / slices_; }
  int64_t first_partition(int64_t b) const { return first_partition_[b]; }
  int64_t num_partitions(int64_t b) const {
    return first_partition_[b + 1] - first_partition_[b];
  }

  Item item(int64_t index) const {
    const int64_t partition = partition_of(index), slice = index % slices_;
    int64_t b = 0, after = call_.num_requests;  // first_partition[b] <= partition < [after]
    while (after - b > 1) {
      const int64_t middle = (b + after) / 2;
      (first_partition_[middle] <= partition ? b : after) = middle;
    }
    const int64_t begin =
        call_.first_key(b) + (partition - first_partition_[b]) * kPartitionKeys;
    const int64_t end = begin + kPartitionKeys, first_g = slice * kv_heads_per_item_;
    const int64_t end_g = first_g + kv_heads_per_item_;
    return {b, begin, end < call_.end_key(b) ? end : call_.end_key(b), first_g,
            end_g < call_.num_kv_heads ? end_g : call_.num_kv_heads};
  }

 private:
  const DecodeCall<T>& call_;
  const int64_t* first_partition_;
  int64_t kv_heads_per_item_, slices_;
};

// Returns -1, or a request whose length or block table is out of range; the content of out is
// undefined then. -2: no memory.
template <typename T>
int64_t paged_attention_decode(const vllm_cpu::DecodeArgs<T>& args, int num_threads) {
  const DecodeCall<T> call{args};
  const int64_t num_heads = call.num_heads, head_size = call.head_size;
  const int64_t state_floats = kHeader + padded(head_size);

  int64_t num_partitions = 0;
  for (int64_t b = 0; b < call.num_requests; ++b) {
    if (call.seq_lens[b] < 0 || call.seq_lens[b] > call.max_blocks * call.block_size) return b;
    num_partitions += call.num_partitions(b);
  }
  const bool is_split = num_partitions > call.num_requests;
  const int64_t scratch_floats = DecodeScratch::floats(num_heads, head_size);
  const int64_t partial_floats = is_split ? num_partitions * num_heads * state_floats : 0;
  char* const memory = vllm_cpu::workspace((num_threads * scratch_floats + partial_floats) * 4 +
                                           (call.num_requests + 1) * 8);
  if (memory == nullptr) return -2;
  float* const scratch_memory = reinterpret_cast<float*>(memory);
  float* const partials = scratch_memory + num_threads * scratch_floats;  // [partition, head]
  const WorkList<T> work(call, reinterpret_cast<int64_t*>(partials + partial_floats),
                         num_threads);

  int64_t bad_request = -1;
  const auto run_item = [&](int64_t index, int worker) {
    const Item item = work.item(index);
    const DecodeScratch scratch(scratch_memory + worker * scratch_floats, work.heads_per_item(),
                                head_size);
    const int64_t first_head = item.first_g * call.group();
    const bool is_whole = work.num_partitions(item.b) == 1;
    float* const states =
        is_whole ? scratch.states
                 : partials + (work.partition_of(index) * num_heads + first_head) * state_floats;
    if (!attend(call, item, scratch, states)) {
      __atomic_store_n(&bad_request, item.b, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t h = first_head; is_whole && h < item.end_g * call.group(); ++h) {
      write_out(states + (h - first_head) * state_floats, head_size,
                call.out + (item.b * num_heads + h) * head_size);
    }
  };
  parallel_for(work.num_items(), 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t index = begin; index < end; ++index) run_item(index, worker);
  });
  if (!is_split || bad_request >= 0) return bad_request;

  parallel_for(call.num_requests * num_heads, 4, num_threads,
               [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / num_heads, h = row % num_heads;
      if (work.num_partitions(b) == 1) continue;  // already written
      float* const states = partials + (work.first_partition(b) * num_heads + h) * state_floats;
      merge(states, work.num_partitions(b), num_heads * state_floats, head_size);
      write_out(states, head_size, call.out + row * head_size);
    }
  });
  return -1;
}

}  // namespace VLLM_ISA
