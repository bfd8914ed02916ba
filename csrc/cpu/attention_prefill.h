// Paged prefill attention: several new query tokens per request over the keys and values in its
// blocks, flash-style (online softmax over tiles of keys; Dao et al. 2022).
//
// The work is divided into items of (request, kv head, some query rows). A row is one token of one
// query head. Heads that share keys are rows of the same item, so a tile is fetched once for all of
// them. Tiles begin at multiples of kPrefillKeys in the request, and each row is computed
// independently of the others: its result has the same bits in any chunk, in any batch and with any
// number of threads.
#pragma once

#include "attention_args.h"
#include "attention_block.h"
#include "parallel.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr int64_t kRowNumbers = 7;  // number of arrays of a block that have one element per row

// Number of rows of an item, if there are enough items for all threads, and at least. Matrix tiles
// need less time than copies of keys and values for a few rows, so their items are larger.
template <class Dot>
constexpr int64_t kItemRows = kAttendsOnTiles<Dot> ? 768 : 384;
constexpr int64_t kMinItemRows = 3 * kLanes;  // a multiple of kQueryRows
// Most bytes of queries and results of an item; they should remain in the second-level cache.
constexpr int64_t kMaxItemBytes = 5 << 18;

template <typename T>
struct PrefillCall : vllm_cpu::AttentionArgs<T> {
  int64_t group() const { return this->num_heads / this->num_kv_heads; }
  int64_t query_len(int64_t b) const {
    return int64_t{this->query_start_loc[b + 1]} - this->query_start_loc[b];
  }
  Sight sight() const { return {this->sliding_window, this->chunk_size}; }
  int64_t context_len(int64_t b) const { return this->seq_lens[b] - query_len(b); }
  // Returns the index of the last key that a token of request b attends to.
  int64_t last_key(int64_t b, int64_t token) const {
    if (this->last_keys == nullptr) return context_len(b) + token;
    return this->last_keys[this->query_start_loc[b] + token];
  }
  // Returns the index of the last key that any of the tokens [begin, end) of request b attends to.
  int64_t last_key_of(int64_t b, int64_t begin, int64_t end) const {
    int64_t last = last_key(b, end - 1);
    for (int64_t token = begin; this->last_keys != nullptr && token < end; ++token) {
      if (last_key(b, token) > last) last = last_key(b, token);
    }
    return last;
  }
  // Returns true if the lengths of request b fit its block table and the query.
  bool is_valid(int64_t b) const {
    return this->query_start_loc[b] >= 0 && query_len(b) >= 0 && context_len(b) >= 0 &&
           this->query_start_loc[b + 1] <= this->num_tokens &&
           this->seq_lens[b] <= this->max_blocks * this->block_size && are_last_keys_valid(b);
  }
  bool are_last_keys_valid(int64_t b) const {
    for (int64_t token = 0; this->last_keys != nullptr && token < query_len(b); ++token) {
      const int64_t last = last_key(b, token);
      if (last < context_len(b) + token || last >= this->seq_lens[b]) return false;
    }
    return true;
  }
};

// An item: rows [begin, end) of request b for kv head g; row = token * group + index of the head in
// its group.
struct PrefillItem {
  int64_t b, g, begin, end;
};

// Numbers the rows of all requests and groups them into items.
template <class Dot, typename T>
class PrefillWork {
 public:
  // first_tile: [num_requests + 1], filled by the constructor: number of groups of at most rows_
  // rows before each request.
  PrefillWork(const PrefillCall<T>& call, int64_t* first_tile, int num_threads)
      : call_(call), first_tile_(first_tile) {
    const int64_t row_bytes = call.head_size * int64_t{sizeof(T)} + call.value_size * 4;
    // Use smaller items while they are too large, or too few for all threads.
    for (rows_ = kItemRows<Dot>;; rows_ = round_up(rows_ / 2, kMinItemRows)) {
      first_tile[0] = 0;
      for (int64_t b = 0; b < call.num_requests; ++b) {
        first_tile[b + 1] =
            first_tile[b] + (call.query_len(b) * call.group() + rows_ - 1) / rows_;
      }
      if (rows_ == kMinItemRows) return;
      if (rows_ * row_bytes <= kMaxItemBytes && num_items() >= 4 * num_threads) return;
    }
  }

  int64_t num_items() const { return first_tile_[call_.num_requests] * call_.num_kv_heads; }

  // Returns an item by its index. The last rows of a request attend to most keys and take longest,
  // so they have the lowest indices.
  PrefillItem item(int64_t index) const {
    int64_t b = 0, after = call_.num_requests;  // the request of the item: a binary search
    while (after - b > 1) {
      const int64_t middle = (b + after) / 2;
      (first_tile_[middle] * call_.num_kv_heads <= index ? b : after) = middle;
    }
    const int64_t num_tiles = first_tile_[b + 1] - first_tile_[b];
    index -= first_tile_[b] * call_.num_kv_heads;
    const int64_t begin = (num_tiles - 1 - index % num_tiles) * rows_;
    const int64_t num_rows = call_.query_len(b) * call_.group();
    return {b, index / num_tiles, begin, begin + rows_ < num_rows ? begin + rows_ : num_rows};
  }

 private:
  const PrefillCall<T>& call_;
  int64_t* first_tile_;
  int64_t rows_;
};

// The scratch memory of one thread for an item, and its layout in words.
template <class Dot>
class PrefillScratch {
 public:
  static int64_t words(int64_t head_size, int64_t value_size, int64_t item_rows) {
    const int64_t padded_head = padded(head_size), head_words = padded_words(head_size);
    return kPrefillKeys * head_words + kPrefillKeys / Dot::kInputs * padded(value_size) +
           (kPrefillKeys + kPrefillKeys / Dot::kInputs) * kQueryRows<Dot> +
           2 * kPrefillKeys * padded_head +
           item_rows / kQueryRows<Dot> * block_words(head_size, value_size);
  }

  PrefillScratch(uint32_t* memory, int64_t head_size, int64_t value_size)
      : block_words_(block_words(head_size, value_size)), head_words_(padded_words(head_size)) {
    tile.key_stride = head_words_;
    tile.value_stride = padded(value_size);
    const auto take = [&](int64_t count) {
      uint32_t* const at = memory;
      memory += count;
      return at;
    };
    tile.scores = reinterpret_cast<float*>(take(kPrefillKeys * kQueryRows<Dot>));
    tile.weights = take(kPrefillKeys / Dot::kInputs * kQueryRows<Dot>);
    tile.keys = take(kPrefillKeys * tile.key_stride);
    tile.values = take(kPrefillKeys / Dot::kInputs * tile.value_stride);
    widened = take(2 * kPrefillKeys * padded(head_size));
    blocks_ = memory;
  }

  // Returns block i of the rows of the item; its per-row arrays are not filled in.
  RowBlock block(int64_t i) const {
    uint32_t* const query = blocks_ + i * block_words_;
    uint32_t* const rows = query + head_words_ * kQueryRows<Dot>;
    float* const floats = reinterpret_cast<float*>(rows);
    return {query,
            floats + kRowNumbers * kQueryRows<Dot>,
            floats,
            floats + kQueryRows<Dot>,
            floats + 2 * kQueryRows<Dot>,
            floats + 3 * kQueryRows<Dot>,
            reinterpret_cast<int32_t*>(rows + 4 * kQueryRows<Dot>),
            reinterpret_cast<int32_t*>(rows + 5 * kQueryRows<Dot>),
            reinterpret_cast<int32_t*>(rows + 6 * kQueryRows<Dot>),
            0,
            0,
            0,
            0,
            0};
  }

  TileScratch tile;
  uint32_t* widened;  // keys and values of a tile, converted from 8-bit floats

 private:
  static int64_t padded_words(int64_t head_size) {
    return padded((head_size + Dot::kInputs - 1) / Dot::kInputs);
  }
  static int64_t block_words(int64_t head_size, int64_t value_size) {
    return (padded_words(head_size) + kRowNumbers + padded(value_size)) * kQueryRows<Dot>;
  }
  uint32_t* blocks_;
  int64_t block_words_, head_words_;
};

// Calls body(lane, token, head) for each lane of a block that begins at row `first` of an item.
// Lanes without a row repeat the last one.
template <class Dot, typename T, typename Body>
VLLM_INLINE void for_each_lane(const PrefillCall<T>& call, const PrefillItem& item, int64_t first,
                               int64_t num_rows, Body body) {
  const int64_t group = call.group();
  int64_t token = first / group, head = first % group;
  for (int64_t lane = 0; lane < kQueryRows<Dot>; ++lane) {
    body(lane, token, item.g * group + head);
    if (lane + 1 < num_rows && ++head == group) {
      head = 0;
      ++token;
    }
  }
}

// Loads the rows of an item from `first` on into a block, and initialises its softmax state: no key
// has been added yet.
template <class Dot, typename T>
inline void start_block(const PrefillCall<T>& call, const PrefillItem& item, int64_t first,
                        RowBlock& block) {
  const int64_t head_size = call.head_size, left = item.end - first;
  const int64_t context_len = call.context_len(item.b);
  const int64_t first_token = call.query_start_loc[item.b];
  block.num_rows = left < kQueryRows<Dot> ? left : kQueryRows<Dot>;
  const T* queries[kQueryRows<Dot>];
  for_each_lane<Dot>(call, item, first, block.num_rows, [&](int64_t r, int64_t token, int64_t head) {
    block.reference[r] = -__builtin_inff();
    block.total[r] = 0;
    block.slopes[r] = call.alibi_slopes != nullptr ? call.alibi_slopes[head] : 0;
    block.sinks[r] = call.sinks != nullptr ? call.sinks[head] : 0;
    block.positions[r] = static_cast<int32_t>(context_len + token);
    block.first_keys[r] = static_cast<int32_t>(call.sight().first_key(context_len + token));
    const int64_t last_key = call.last_key(item.b, token);
    block.last_keys[r] = static_cast<int32_t>(last_key);
    block.all_see = r == 0 || last_key < block.all_see ? last_key : block.all_see;
    block.any_sees = r == 0 || last_key > block.any_sees ? last_key : block.any_sees;
    queries[r] = call.query + (first_token + token) * call.query_stride + head * head_size;
    prefetch_row(reinterpret_cast<const char*>(queries[r]), head_size * int64_t{sizeof(T)});
  });
  block.first_position = block.positions[0];
  block.last_position = block.positions[kQueryRows<Dot> - 1];
  __builtin_memset(block.out, 0, padded(call.value_size) * kQueryRows<Dot> * sizeof(float));
  for (int64_t r = 0; r < block.num_rows; r += kLanes) {
    pack_lanes<Dot>(queries + r, head_size, block.query + r, kQueryRows<Dot>);
  }
}

// Addresses of the keys and values of a tile in the cache.
struct TileRows {
  const char* keys[kPrefillKeys];
  const char* values[kPrefillKeys];
  int64_t num_keys;
};

// Finds and prefetches keys [begin, end) of kv head g of request b, at most kPrefillKeys keys.
// Returns false if a block id is out of range.
template <typename T>
inline bool find_tile(const PrefillCall<T>& call, const PrefillItem& item, int64_t begin,
                      int64_t end, TileRows& rows) {
  const int32_t* const table = call.block_tables + item.b * call.table_stride;
  const int64_t bytes = cache_bytes<T>(call.cache_type), row_bytes = call.head_size * bytes;
  const int64_t token_bytes = call.num_kv_heads * row_bytes;
  rows.num_keys = end - begin < kPrefillKeys ? end - begin : kPrefillKeys;
  for (int64_t k = 0; k < rows.num_keys;) {
    const int64_t block = table[(begin + k) / call.block_size];
    if (block < 0 || block >= call.num_blocks) return false;
    int64_t offset = (begin + k) % call.block_size;
    int64_t at = (block * call.block_size + offset) * token_bytes + item.g * row_bytes;
    for (; offset < call.block_size && k < rows.num_keys; ++offset, ++k, at += token_bytes) {
      rows.keys[k] = static_cast<const char*>(call.key_cache) + at;
      rows.values[k] = static_cast<const char*>(call.value_cache) + at;
      prefetch_row(rows.keys[k], row_bytes);
      if (rows.values[k] != rows.keys[k]) prefetch_row(rows.values[k], row_bytes);
    }
  }
  return true;
}

// Copies the keys and values of a tile, which have type T. Keys after the last one, up to a
// multiple of kKeyUnit, are zero. key_at(k), value_at(k): the address of key or value k.
template <class Dot, typename T, typename KeyAt, typename ValueAt>
inline void pack_rows(int64_t num_keys, int64_t head_size, int64_t value_size, KeyAt key_at,
                      ValueAt value_at, const TileScratch& tile) {
  for (int64_t k = 0; k < num_keys; ++k) {
    pack_key<Dot, T>(key_at(k), head_size, tile.keys + k * tile.key_stride);
  }
  __builtin_memset(tile.keys + num_keys * tile.key_stride, 0,
                   (round_up(num_keys, kKeyUnit<Dot>) - num_keys) * tile.key_stride * 4);
#ifdef VLLM_MATRIX_TILES
  if constexpr (kAttendsOnTiles<Dot>) {
    return pack_values_transposed<Dot, T>(num_keys, value_size, value_at, tile.values);
  }
#endif
  for (int64_t k = 0; k < num_keys; k += Dot::kInputs) {
    const T* values[] = {value_at(k), k + 1 < num_keys ? value_at(k + 1) : nullptr};
    pack_values<Dot>(values, value_size, tile.values + k / Dot::kInputs * tile.value_stride);
  }
}

template <class Dot, typename T>
inline void pack_tile(const PrefillCall<T>& call, const TileRows& rows,
                      const PrefillScratch<Dot>& scratch) {
  const int64_t num_keys = rows.num_keys, head_size = call.head_size;
  if (call.cache_type == vllm_cpu::CacheType::kSame) {
    pack_rows<Dot, T>(
        num_keys, head_size, call.value_size,
        [&](int64_t k) { return reinterpret_cast<const T*>(rows.keys[k]); },
        [&](int64_t k) { return reinterpret_cast<const T*>(rows.values[k]); }, scratch.tile);
    return;
  }
  const int64_t stride = padded(head_size);
  T* const keys = reinterpret_cast<T*>(scratch.widened);
  T* const values = keys + kPrefillKeys * stride;
  widen_rows(call.cache_type, num_keys, head_size, kLanes, [&](int64_t k) { return rows.keys[k]; },
             keys);
  widen_rows(call.cache_type, num_keys, head_size, kLanes,
             [&](int64_t k) { return rows.values[k]; }, values);
  pack_rows<Dot, T>(
      num_keys, head_size, call.value_size, [&](int64_t k) { return keys + k * stride; },
      [&](int64_t k) { return values + k * stride; }, scratch.tile);
}

// Writes the rows of a block whose softmax is complete.
template <class Dot, typename T>
inline void write_block(const PrefillCall<T>& call, const PrefillItem& item, int64_t first,
                        const RowBlock& block) {
  const int64_t value_size = call.value_size, first_token = call.query_start_loc[item.b];
  const float scale = cache_scale(call.value_scales, item.g);
  T* out[kQueryRows<Dot>];
  for_each_lane<Dot>(call, item, first, block.num_rows, [&](int64_t r, int64_t token, int64_t head) {
    out[r] = call.out + ((first_token + token) * call.num_heads + head) * value_size;
  });
  for (int64_t r = 0; r < block.num_rows; r += kLanes) {
    Vec factor = scale / load(block.total + r);
    if (call.sinks != nullptr) {
      factor = scale * inverse_with_sink(load(block.reference + r) / kLog2E, load(block.total + r),
                                         load(block.sinks + r));
    }
    const int64_t num_lanes = block.num_rows - r < kLanes ? block.num_rows - r : kLanes;
    for_each_vector(value_size, [&](int64_t i, int64_t count) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        rows[j] = load(block.out + (i + j) * kQueryRows<Dot> + r) * factor;
      }
      transpose(rows);
      for (int64_t lane = 0; lane < num_lanes; ++lane) store(out[r + lane] + i, rows[lane], count);
    });
  }
}

// Computes the attention of an item. Returns false, without a result, if a block id is out of
// range.
template <class Dot, typename T>
inline bool attend_item(const PrefillCall<T>& call, const PrefillItem& item,
                        const PrefillScratch<Dot>& scratch) {
  const float scale = call.scale * cache_scale(call.key_scales, item.g);
  const ScoreOptions options{scale, call.soft_cap, call.alibi_slopes, call.sight()};
  // Keys that no row of the item attends to are not read.
  const int64_t context_len = call.context_len(item.b), group = call.group();
  const int64_t first_seen = options.sight.first_key(context_len + item.begin / group);
  const int64_t begin = first_seen / kPrefillKeys * kPrefillKeys;
  const int64_t end =
      call.last_key_of(item.b, item.begin / group, (item.end - 1) / group + 1) + 1;
  TileRows rows[2];  // one for even tiles, one for odd tiles
  if (!find_tile(call, item, begin, end, rows[begin / kPrefillKeys % 2])) return false;

  RowBlock blocks[kItemRows<Dot> / kQueryRows<Dot>];
  int num_blocks = 0;
  for (int64_t first = item.begin; first < item.end; first += kQueryRows<Dot>, ++num_blocks) {
    blocks[num_blocks] = scratch.block(num_blocks);
    start_block<Dot>(call, item, first, blocks[num_blocks]);
  }
  for (int64_t key = begin; key < end; key += kPrefillKeys) {
    const TileRows& now = rows[key / kPrefillKeys % 2];
    pack_tile(call, now, scratch);
    // Prefetch the next tile while this one is computed.
    const int64_t next = key + kPrefillKeys;
    if (next < end && !find_tile(call, item, next, end, rows[next / kPrefillKeys % 2])) {
      return false;
    }
    for (int i = 0; i < num_blocks; ++i) {
      attend_tile<Dot>(blocks[i], scratch.tile, options, key, now.num_keys, call.head_size,
                       call.value_size);
    }
  }
  for (int i = 0; i < num_blocks; ++i) {
    write_block<Dot>(call, item, item.begin + i * kQueryRows<Dot>, blocks[i]);
  }
  return true;
}

// Computes attention for several query tokens per request. Tokens of out after the last request
// become zero; tokens before the first request are not written. Returns -1, or a request whose
// lengths or block table are out of range (the content of out is undefined then), or -2 if there is
// no memory.
template <typename T>
int64_t paged_attention_prefill(const vllm_cpu::AttentionArgs<T>& args, int num_threads) {
  using Dot = typename PrefillDot<T>::type;
  const PrefillCall<T> call{args};
  for (int64_t b = 0; b < call.num_requests; ++b) {
    if (!call.is_valid(b)) return b;
  }
  const int64_t most_words =
      PrefillScratch<Dot>::words(call.head_size, call.value_size, kItemRows<Dot>);
  char* const memory =
      vllm_cpu::workspace(num_threads * most_words * 4 + (call.num_requests + 1) * 8);
  if (memory == nullptr) return -2;
  uint32_t* const words = reinterpret_cast<uint32_t*>(memory);
  const PrefillWork<Dot, T> work(call, reinterpret_cast<int64_t*>(words + num_threads * most_words),
                            num_threads);

  int64_t bad_request = -1;
  parallel_for(work.num_items(), 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
    const PrefillScratch<Dot> scratch(words + worker * most_words, call.head_size, call.value_size);
    for (int64_t index = begin; index < end; ++index) {
      const PrefillItem item = work.item(index);
      if (!attend_item(call, item, scratch)) {
        __atomic_store_n(&bad_request, item.b, __ATOMIC_RELAXED);
      }
    }
  });
  const int64_t row = call.num_heads * call.value_size;
  const int64_t used = call.num_requests > 0 ? call.query_start_loc[call.num_requests] : 0;
  if (used < call.num_tokens) {
    __builtin_memset(call.out + used * row, 0, (call.num_tokens - used) * row * sizeof(T));
  }
  return bad_request;
}

}  // namespace VLLM_ISA
