// Paged decode attention: one query token per request over the keys and values in its blocks.
//
// A request is cut into partitions of kPartitionKeys keys, so that one long request keeps every
// core busy. Each is a flash-style online softmax over tiles of keys, read where they lie. A
// request of several partitions leaves partial results that are merged in order. The cuts depend
// on the request alone: its result has the same bits in any batch and with any number of threads.
#pragma once

#include "attention_tile.h"
#include "kernels.h"
#include "parallel.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr int kPartitionKeys = 256;
constexpr int kTilesAhead = 2;  // how early memory is asked for a tile; 1 to 4 are alike

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

// Fills a tile with keys [first, end) of kv head g of request b, at most kTileKeys of them.
// False when a block id is out of range.
template <typename T>
inline bool fill_tile(const DecodeCall<T>& call, int64_t b, int64_t g, int64_t first, int64_t end,
                      Tile<T>& tile) {
  const int32_t* const table = call.block_tables + b * call.table_stride;
  const int64_t token_stride = call.num_kv_heads * call.head_size;
  tile.num_keys = end - first < kTileKeys ? end - first : kTileKeys;
  tile.distance = call.end_key(b) - 1 - first;
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

  const ScoreOptions options{call.scale, call.soft_cap, call.alibi_slopes, 0};
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
                head_size, options, first_head + h);
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
  int64_t num_partitions(int64_t b) const { return first_partition_[b + 1] - first_partition_[b]; }

  Item item(int64_t index) const {
    const int64_t partition = partition_of(index), slice = index % slices_;
    int64_t b = 0, after = call_.num_requests;  // first_partition[b] <= partition < [after]
    while (after - b > 1) {
      const int64_t middle = (b + after) / 2;
      (first_partition_[middle] <= partition ? b : after) = middle;
    }
    const int64_t begin = call_.first_key(b) + (partition - first_partition_[b]) * kPartitionKeys;
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
  const WorkList<T> work(call, reinterpret_cast<int64_t*>(partials + partial_floats), num_threads);

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

  parallel_for(call.num_requests * num_heads, 4, num_threads, [&](int64_t begin, int64_t end, int) {
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
