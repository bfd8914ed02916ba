// Arguments of the kernels of the KV cache (cache.h and attention.h).
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// Type of the elements in a KV cache: the type of the queries, or 8-bit floats (fp8.h).
VLLM_ENUM(CacheType, kSame, kE4m3, kE5m2);

// Arguments for writing new keys and values into a cache of 8-bit floats.
template <typename T>
VLLM_STRUCT(CacheFp8Args,
  const T* key;                 // [num_tokens, num_heads, head_size], tokens key_stride apart
  const T* value;               // same shape as key, tokens value_stride apart; null: write only keys
  uint8_t* key_cache;           // [num_slots, num_heads, head_size], dense
  uint8_t* value_cache;         // as key_cache
  const int64_t* slot_mapping;  // [num_tokens]; a token with a negative slot is skipped
  const float* key_scales;      // [num_heads]: the cache contains value / scale
  const float* value_scales;    // [num_heads]: likewise for values
  int64_t num_tokens, num_heads, head_size, key_stride, value_stride, num_slots;
  CacheType cache_type;          // kE4m3 or kE5m2
);

// Arguments of paged attention. In decode, each request has one token. Values may have fewer
// elements than keys: the values of latent attention are the first elements of the keys, in the
// same cache.
template <typename T>
VLLM_STRUCT(AttentionArgs,
  const T* query;               // [tokens, num_heads, head_size], tokens query_stride apart
  const void* key_cache;        // [num_blocks, block_size, num_kv_heads, head_size], dense
  const void* value_cache;      // values of value_size elements, with the strides of the keys
  const int32_t* block_tables;  // [num_requests, max_blocks], requests table_stride apart
  const int32_t* const* own_tables;  // [num_requests] the block table of each request; null:
                                     // use block_tables. For decode only
  const int32_t* seq_lens;      // [num_requests]
  const float* alibi_slopes;    // [num_heads], or null
  const float* sinks;           // [num_heads]: score of a key without a value, or null
  const float* key_scales;      // [num_kv_heads] factors of the elements in the cache;
  const float* value_scales;    // null: 1
  T* out;                       // [tokens, num_heads, value_size], dense
  int64_t num_requests, num_heads, num_kv_heads, head_size, value_size;
  int64_t num_blocks, block_size, max_blocks;
  int64_t query_stride, table_stride;
  float scale;
  float soft_cap;          // 0: no soft cap
  int64_t sliding_window;  // 0: no window; below 2^31
  int64_t chunk_size;      // a query attends only to keys of its own chunk; 0: no chunks
  CacheType cache_type = CacheType::kSame;
  const int32_t* query_start_loc;  // [num_requests + 1], for prefill only
  int64_t num_tokens;              // for prefill only
  const int32_t* last_keys;        // [num_tokens], for prefill only: index of the last key that a
                                   // token attends to, its own or a later one; null: its own
);

}  // namespace vllm_cpu
