// Paged decode attention: one query token per request over the keys and values in its blocks.
//
// A request is divided into partitions of kPartitionKeys keys, so that a single long request keeps
// all cores busy. Each partition is a flash-style online softmax over tiles of keys, which are read
// from the cache without a copy. The partial results of several partitions are merged in order. The
// division depends only on the request: its result has the same bits in any batch and with any
// number of threads.
#pragma once

#include "attention_args.h"
#include "attention_decode_matrix.h"
#include "parallel.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr int kPartitionKeys = 256;
constexpr int kMostAhead = 2;  // largest number of tiles between the prefetch of a tile and its use

// The order of prefetches: the keys and values of `heads` adjacent kv heads of a tile are one piece,
// which is prefetched `pieces` pieces before its use.
struct Ahead {
  int64_t heads, pieces;

  // On an AMD EPYC with AVX2, memory is faster if whole tokens of the cache are prefetched in their
  // order. With matrix tiles, on a Xeon with AMX, one head after the other is faster.
  static Ahead of(bool is_on_tiles, int64_t num_kv_heads, int64_t head_bytes) {
    if (is_on_tiles) return {1, 2};
    constexpr int64_t kPieceBytes = 1024;  // so that two tiles of pieces fit the second-level cache
    const int64_t most = kPieceBytes / head_bytes, heads = most < num_kv_heads ? most : num_kv_heads;
    return {heads > 0 ? heads : 1, 1};
  }
};

// The arguments of one call, and values derived from them.
template <typename T>
struct DecodeCall : vllm_cpu::AttentionArgs<T> {
  int64_t group() const { return this->num_heads / this->num_kv_heads; }
  const float* sink(int64_t head) const {
    return this->sinks == nullptr ? nullptr : this->sinks + head;
  }
  const int32_t* table_of(int64_t b) const {
    return this->own_tables != nullptr ? this->own_tables[b]
                                       : this->block_tables + b * this->table_stride;
  }
  template <class Dot>
  bool is_on_tiles() const {
    return decodes_on_tiles<Dot>(group(), this->head_size, this->value_size);
  }
  bool has_one_cache() const { return this->value_cache == this->key_cache; }
  // Request b attends to keys [first_key, end_key).
  int64_t end_key(int64_t b) const { return this->seq_lens[b]; }
  int64_t first_key(int64_t b) const {
    return Sight{this->sliding_window, this->chunk_size}.first_key(end_key(b) - 1);
  }
  // An empty request has one partition without keys, which writes zeros.
  int64_t num_partitions(int64_t b) const {
    const int64_t num = (end_key(b) - first_key(b) + kPartitionKeys - 1) / kPartitionKeys;
    return num > 0 ? num : 1;
  }
};

// Scratch memory of one thread, for the query heads of one item (a unit of work, see `Item`).
template <class Dot, typename T>
class DecodeScratch {
 public:
  static int64_t bytes(const DecodeCall<T>& call, int64_t heads) {
    const int64_t padded_size = decode_padded<T>(call.head_size);
    const int64_t padded_values = decode_padded<T>(call.value_size);
    const bool is_widened = call.cache_type != vllm_cpu::CacheType::kSame;
    return 4 * (heads * (padded_size / Dot::kInputs + kHeader + padded_values) + 8 * kTileKeys) +
           (is_widened ? kTileKeys * (2 * padded_size * int64_t{sizeof(T)} + 8) : 0) +
           4 * column_words(call, heads) + copy_bytes(call);
  }

  DecodeScratch(char* memory, const DecodeCall<T>& call, int64_t heads) {
    const int64_t padded_size = decode_padded<T>(call.head_size);
    work.head_size = call.head_size;
    work.value_size = call.value_size;
    work.padded_values = decode_padded<T>(call.value_size);
    work.query_stride = padded_size / Dot::kInputs;
    query = reinterpret_cast<uint32_t*>(memory);
    work.query = query;
    states = reinterpret_cast<float*>(query + heads * work.query_stride);
    work.scores = states + heads * (kHeader + work.padded_values);
    work.weights = reinterpret_cast<uint32_t*>(work.scores + 4 * kTileKeys);
    query_columns = work.weights + 4 * kTileKeys;
    key_copies = reinterpret_cast<T*>(query_columns + column_words(call, heads));
    keys_ = key_copies + copy_bytes(call) / int64_t{sizeof(T)};
    if (call.cache_type == vllm_cpu::CacheType::kSame) return;
    T* const after_keys = keys_ + kTileKeys * padded_size;
    values_ = call.has_one_cache() ? keys_ : after_keys;
    rows_ = reinterpret_cast<int64_t*>(after_keys + kTileKeys * padded_size);
    for (int64_t k = 0; k < kTileKeys; ++k) rows_[k] = k * padded_size;
  }

  // Returns the keys and values of a tile, converted to type T if the cache has another type.
  Tile<T> tile_of(vllm_cpu::CacheType type, const TileBytes& from, Fetch& fetch, int64_t distance) const {
    if (type == vllm_cpu::CacheType::kSame) {
      return {reinterpret_cast<const T*>(from.keys), reinterpret_cast<const T*>(from.values),
              from.rows, from.num_keys, distance};
    }
    // A multiple of the vector size: results after the last key are computed but not used.
    const int64_t num_rows = round_up(from.num_keys, kLanes);
    const int32_t step = fetch.step(num_rows);
    widen_rows(type, num_rows, work.head_size, kStored<T>,
               [&](int64_t k) { fetch.advance(step); return from.keys + from.rows[k]; }, keys_);
    if (values_ != keys_) {
      widen_rows(type, num_rows, work.head_size, kStored<T>,
                 [&](int64_t k) { return from.values + from.rows[k]; }, values_);
    }
    return {keys_, values_, rows_, from.num_keys, distance};
  }

  TileWork work;
  uint32_t* query;
  float* states;
  uint32_t* query_columns;  // query heads of each kv head, packed as columns of a matrix
                            // (attention_decode_matrix.h)
  T* key_copies;            // [kTileKeys][head_size] (attention_decode_matrix.h)

 private:
  static int64_t column_words(const DecodeCall<T>& call, int64_t heads) {
    if (!call.template is_on_tiles<Dot>()) return 0;
    return heads / call.group() * query_column_words(call.group(), call.head_size);
  }
  static int64_t copy_bytes(const DecodeCall<T>& call) {
    return call.template is_on_tiles<Dot>() ? kTileKeys * call.head_size * int64_t{sizeof(T)} : 0;
  }

  T* keys_;
  T* values_;
  int64_t* rows_;
};

// Offsets of the keys and values of a tile in the cache, in elements, for kv head 0.
struct DecodeRows {
  int64_t at[kTileKeys];
  int64_t num_keys, distance;
};

// Fills in `rows` for keys [first, end) of request b, at most kTileKeys keys. Returns false if a
// block id is out of range.
template <typename T>
inline bool find_rows(const DecodeCall<T>& call, int64_t b, int64_t first, int64_t end,
                      DecodeRows& rows) {
  const int32_t* table = call.table_of(b) + first / call.block_size;
  const int64_t token_stride = call.num_kv_heads * call.head_size;
  rows.num_keys = end - first < kTileKeys ? end - first : kTileKeys;
  rows.distance = call.end_key(b) - 1 - first;
  int64_t offset = first % call.block_size;
  for (int64_t k = 0; k < rows.num_keys; offset = 0, ++table) {
    const int64_t block = *table;
    if (block < 0 || block >= call.num_blocks) return false;
    int64_t at = (block * call.block_size + offset) * token_stride;
    for (; offset < call.block_size && k < rows.num_keys; ++offset, ++k, at += token_stride) {
      rows.at[k] = at;
    }
  }
  // Scores are computed for whole vectors of keys. The additional entries repeat a key and are not
  // used.
  for (int64_t k = rows.num_keys; k < kTileKeys; ++k) rows.at[k] = rows.at[0];
  return true;
}

// A unit of work: keys [begin, end) of request b for kv heads [first_g, end_g).
struct Item {
  int64_t b, begin, end, first_g, end_g;
};

// Loads the query heads of an item, and initialises their softmax states: no key has been added
// yet.
template <class Dot, typename T>
inline void start_item(const DecodeCall<T>& call, const Item& item, int64_t num_heads,
                       const DecodeScratch<Dot, T>& scratch, float* states) {
  const int64_t head_size = call.head_size, first_head = item.first_g * call.group();
  const int64_t state_stride = kHeader + scratch.work.padded_values;
  for (int64_t h = 0; h < num_heads; ++h) {
    const T* const query = call.query + item.b * call.query_stride + (first_head + h) * head_size;
    pack_query<Dot>(query, head_size, scratch.query + h * scratch.work.query_stride);
    float* const state = states + h * state_stride;
    for (int64_t i = 0; i < state_stride; i += kLanes) store(state + i, Vec{});
    state[0] = -__builtin_inff();
  }
#ifdef VLLM_MATRIX_TILES
  if constexpr (kAttendsOnTiles<Dot>) {
    if (!call.template is_on_tiles<Dot>()) return;
    const int64_t group = call.group(), num_words = query_column_words(group, head_size);
    for (int64_t g = 0; g < num_heads / group; ++g) {
      pack_query_columns<Dot>(
          call.query + item.b * call.query_stride + (first_head + g * group) * head_size, group,
          head_size, scratch.query_columns + g * num_words);
    }
  }
#endif
}

// Computes attention of the query heads of an item over its keys; states: [heads of the item, ...].
// All kv heads of a tile are computed before the next tile, because their keys are adjacent in
// memory. after: the next item of this thread, or null if it is not known; its first keys are
// prefetched during the last steps. Returns false, without a result, if a block id is out of range.
template <class Dot, typename T>
inline bool attend(const DecodeCall<T>& call, const Item& item, const Item* after,
                   const DecodeScratch<Dot, T>& scratch, float* states) {
  const int64_t group = call.group(), num_kv_heads = item.end_g - item.first_g;
  start_item(call, item, num_kv_heads * group, scratch, states);
  TileWork work = scratch.work;
  work.states = states;
  work.first_head = item.first_g * group;
  ScoreOptions options{call.scale, call.soft_cap, call.alibi_slopes, {}};
  [[maybe_unused]] const bool is_on_tiles = call.template is_on_tiles<Dot>();
  [[maybe_unused]] const int64_t column_words = query_column_words(group, call.head_size);

  const int64_t num_tiles = (item.end - item.begin + kTileKeys - 1) / kTileKeys;
  const int64_t bytes = cache_bytes<T>(call.cache_type);
  const auto bytes_of = [&](const DecodeRows& of_tile, int64_t g, int64_t heads) {
    const int64_t of_head = g * call.head_size * bytes, piece = heads * call.head_size * bytes;
    return TileBytes{static_cast<const char*>(call.key_cache) + of_head,
                     static_cast<const char*>(call.value_cache) + of_head,
                     of_tile.at,
                     static_cast<int32_t>(of_tile.num_keys),
                     bytes,
                     piece,
                     call.has_one_cache() ? 0 : piece};
  };
  const Ahead ahead = Ahead::of(is_on_tiles, num_kv_heads, call.head_size * bytes);
  // Loops over a tile: one for each few query heads, and one more if it is converted.
  const auto num_loops = static_cast<int32_t>(
      (is_on_tiles ? (group + kLanes - 1) / kLanes : (group + 3) / 4) +
      (call.cache_type == vllm_cpu::CacheType::kSame ? 0 : 1));
  // A ring buffer: the tile in use, and the tiles after it up to the one that is being fetched.
  DecodeRows rows[kMostAhead + 1];
  int64_t num_found = 0;
  DecodeRows rows_after;
  const bool has_after = after != nullptr && after->begin < after->end &&
                         find_rows(call, after->b, after->begin, after->end, rows_after);
  const int64_t num_steps = num_tiles * num_kv_heads;
  int64_t tile = 0, g = 0;
  int64_t ahead_tile = ahead.pieces * ahead.heads / num_kv_heads;
  int64_t ahead_g = ahead.pieces * ahead.heads % num_kv_heads;
  Fetch fetch;
  for (int64_t step = 0; step < num_steps; ++step) {
    for (; num_found <= ahead_tile && num_found < num_tiles; ++num_found) {
      if (!find_rows(call, item.b, item.begin + num_found * kTileKeys, item.end,
                     rows[num_found % (kMostAhead + 1)])) {
        return false;
      }
    }
    const DecodeRows& of_tile = rows[tile % (kMostAhead + 1)];
    if (g % ahead.heads == 0) {
      const int64_t left = num_kv_heads - ahead_g, heads = left < ahead.heads ? left : ahead.heads;
      const auto loops = static_cast<int32_t>(num_loops * heads);
      if (ahead_tile < num_tiles) {
        fetch = Fetch(bytes_of(rows[ahead_tile % (kMostAhead + 1)], item.first_g + ahead_g, heads), loops);
      } else if (has_after) {
        fetch = Fetch(bytes_of(rows_after, after->first_g + ahead_g, heads), loops);
      }
      ahead_g += heads;
      if (ahead_g == num_kv_heads) ahead_g = 0, ++ahead_tile;
    }
    const Tile<T> now = scratch.tile_of(call.cache_type, bytes_of(of_tile, item.first_g + g, 1), fetch,
                                        of_tile.distance);
    options.scale = call.scale * cache_scale(call.key_scales, item.first_g + g);
#ifdef VLLM_MATRIX_TILES
    if constexpr (kAttendsOnTiles<Dot>) {
      if (is_on_tiles && now.num_keys == kTileKeys) {
        attend_full_tile<Dot>(work, g * group, group, scratch.query_columns + g * column_words, now,
                              fetch, options, scratch.key_copies);
      } else {
        attend_tile<Dot>(work, g * group, group, now, fetch, options);
      }
    } else
#endif
    {
      attend_tile<Dot>(work, g * group, group, now, fetch, options);
    }
    if (++g == num_kv_heads) g = 0, ++tile;
    if (g % ahead.heads == 0) fetch.finish();
  }
  return true;
}

// Writes the attention result of a head, multiplied by `scale`, when its softmax is complete; zeros
// if the request has no keys. sink: the attention sink of the head, or null.
template <class Dot, typename T>
inline void write_out(const float* state, int64_t value_size, float scale, const float* sink,
                      T* out) {
  const float total = sum_lanes(load(state + kTotal));
  float factor = total > 0 ? scale / total : total == 0 ? 0.0f : total;
  if (sink != nullptr && total > 0) {
    factor = scale * inverse_with_sink(splat(state[0]), splat(total), splat(*sink))[0];
  }
  for (int64_t i = 0; i < value_size; i += kStored<T>) {
    Vec parts[kPerWord<T>];
    for (int j = 0; j < kPerWord<T>; ++j) parts[j] = load(state + kHeader + i + j * kLanes);
    natural<Dot>(parts);
    for (int64_t j = 0, at = i; j < kPerWord<T> && at < value_size; ++j, at += kLanes) {
      const int64_t left = value_size - at;
      store(out + at, parts[j] * factor, left < kLanes ? left : int64_t{kLanes});
    }
  }
}

// Merges the partial results of one head, `stride` floats apart, in order into the first of them.
// The first one then has the largest score of all.
inline void merge(float* states, int64_t num_states, int64_t stride, int64_t padded_values) {
  float largest = states[0];
  for (int64_t p = 1; p < num_states; ++p) {
    if (states[p * stride] > largest) largest = states[p * stride];
  }
  for (int64_t p = 0; p < num_states; ++p) {
    const float* const state = states + p * stride;
    const Vec weight = exp(splat(state[0] - largest));
    for (int64_t i = kTotal; i < kHeader + padded_values; i += kLanes) {
      const Vec before = p == 0 ? Vec{} : load(states + i);
      store(states + i, fma(weight, load(state + i), before));
    }
  }
  states[0] = largest;
}

// Numbers the partitions of all requests and groups them into items.
template <typename T>
class WorkList {
 public:
  // first_partition: [num_requests + 1], filled by the constructor: number of partitions before
  // each request.
  WorkList(const DecodeCall<T>& call, int64_t* first_partition, int num_threads)
      : call_(call), first_partition_(first_partition) {
    first_partition[0] = 0;
    for (int64_t b = 0; b < call.num_requests; ++b) {
      first_partition[b + 1] = first_partition[b] + call.num_partitions(b);
    }
    // Use all kv heads of a tile in one item while there are enough partitions for all threads.
    const int64_t wanted = 4 * num_threads, num_partitions = first_partition[call.num_requests];
    const int64_t slices = num_partitions > 0 ? (wanted + num_partitions - 1) / num_partitions : 1;
    kv_heads_per_item_ = slices < call.num_kv_heads ? call.num_kv_heads / slices : 1;
    slices_ = (call.num_kv_heads + kv_heads_per_item_ - 1) / kv_heads_per_item_;
  }

  int64_t num_items() const { return first_partition_[call_.num_requests] * slices_; }
  // Returns the number of items that a thread takes at once: several if there are many, so that a
  // thread knows its next item.
  int64_t range(int num_threads) const {
    const int64_t share = num_items() / (8 * num_threads);
    return share > 1 ? share : 1;
  }
  int64_t heads_per_item() const { return kv_heads_per_item_ * call_.group(); }
  int64_t partition_of(int64_t item) const { return item / slices_; }
  int64_t first_partition(int64_t b) const { return first_partition_[b]; }
  int64_t num_partitions(int64_t b) const { return first_partition_[b + 1] - first_partition_[b]; }

  Item item(int64_t index) const {
    const int64_t partition = partition_of(index), slice = index % slices_;
    int64_t b = 0, after = call_.num_requests;  // first_partition_[b] <= partition < first_partition_[after]
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

// Computes attention for one query token per request. Returns -1, or a request whose length or
// block table is out of range (the content of out is undefined then), or -2 if there is no memory.
template <typename T>
int64_t paged_attention_decode(const vllm_cpu::AttentionArgs<T>& args, int num_threads) {
  using Dot = typename PrefillDot<T>::type;
  using Scratch = DecodeScratch<Dot, T>;
  const DecodeCall<T> call{args};
  const int64_t num_heads = call.num_heads, value_size = call.value_size;
  const int64_t padded_values = decode_padded<T>(value_size);
  const int64_t state_floats = kHeader + padded_values;

  int64_t num_partitions = 0;
  for (int64_t b = 0; b < call.num_requests; ++b) {
    if (call.seq_lens[b] < 0 || call.seq_lens[b] > call.max_blocks * call.block_size) return b;
    num_partitions += call.num_partitions(b);
  }
  const bool is_split = num_partitions > call.num_requests;
  const int64_t scratch_bytes = round_up(Scratch::bytes(call, num_heads), 64);
  const int64_t partial_floats = is_split ? num_partitions * num_heads * state_floats : 0;
  char* const memory = vllm_cpu::workspace(num_threads * scratch_bytes + partial_floats * 4 +
                                           (call.num_requests + 1) * 8);
  if (memory == nullptr) return -2;
  // softmax states: [partition, head]
  float* const partials = reinterpret_cast<float*>(memory + num_threads * scratch_bytes);
  const WorkList<T> work(call, reinterpret_cast<int64_t*>(partials + partial_floats), num_threads);

  int64_t bad_request = -1;
  const auto run_item = [&](int64_t index, const Item& item, const Item* after, int worker) {
    const Scratch scratch(memory + worker * scratch_bytes, call, work.heads_per_item());
    const int64_t first_head = item.first_g * call.group();
    const bool is_whole = work.num_partitions(item.b) == 1;
    float* const states =
        is_whole ? scratch.states
                 : partials + (work.partition_of(index) * num_heads + first_head) * state_floats;
    if (!attend(call, item, after, scratch, states)) {
      __atomic_store_n(&bad_request, item.b, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t h = first_head; is_whole && h < item.end_g * call.group(); ++h) {
      write_out<Dot>(states + (h - first_head) * state_floats, value_size,
                     cache_scale(call.value_scales, h / call.group()), call.sink(h), call.out + (item.b * num_heads + h) * value_size);
    }
  };
  parallel_for(work.num_items(), work.range(num_threads), num_threads, [&](int64_t begin, int64_t end, int worker) {
    for (Item item = work.item(begin), after = item; begin < end; ++begin, item = after) {
      const bool is_last = begin + 1 == end;
      if (!is_last) after = work.item(begin + 1);
      run_item(begin, item, is_last ? nullptr : &after, worker);
    }
  });
  if (!is_split) return bad_request;

  parallel_for(call.num_requests * num_heads, 4, num_threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / num_heads, h = row % num_heads;
      if (work.num_partitions(b) == 1) continue;  // already written
      float* const states = partials + (work.first_partition(b) * num_heads + h) * state_floats;
      merge(states, work.num_partitions(b), num_heads * state_floats, padded_values);
      write_out<Dot>(states, value_size, cache_scale(call.value_scales, h / call.group()),
                     call.sink(h), call.out + row * value_size);
    }
  });
  return bad_request;
}

}  // namespace VLLM_ISA
