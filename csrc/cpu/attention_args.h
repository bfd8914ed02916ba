// What the kernels of the KV cache are told; what they do is said in cache.h and attention.h.
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// What a KV cache holds: the type of the queries, or eight-bit floats (fp8.h).
VLLM_ENUM(CacheType, kSame, kE4m3, kE5m2);

// Writing new keys and values into a cache of eight-bit floats.
template <typename T>
VLLM_STRUCT(CacheFp8Args,
  const T* key;                 // [num_tokens, num_heads, head_size], tokens key_stride apart
  const T* value;               // the same, value_stride apart; null: there are keys only
  uint8_t* key_cache;           // [num_slots, num_heads, head_size], dense
  uint8_t* value_cache;         // the same
  const int64_t* slot_mapping;  // [num_tokens]; a token with a negative slot is skipped
  const float* key_scales;      // [num_heads]: the cache holds number / scale
  const float* value_scales;    // the same
  int64_t num_tokens, num_heads, head_size, key_stride, value_stride, num_slots;
  CacheType cache_type;          // not kSame
);

// Paged attention. A token of decode is a request. Values may be narrower than keys: those of
// latent attention are the first numbers of the keys, in one cache.
template <typename T>
VLLM_STRUCT(AttentionArgs,
  const T* query;               // [tokens, num_heads, head_size], tokens query_stride apart
  const void* key_cache;        // [num_blocks, block_size, num_kv_heads, head_size], dense
  const void* value_cache;      // value_size numbers each, as far apart as the keys
  const int32_t* block_tables;  // [num_requests, max_blocks], requests table_stride apart
  const int32_t* const* own_tables;  // [num_requests] the block table of each; null:
                                     // block_tables has them. For decode only
  const int32_t* seq_lens;      // [num_requests]
  const float* alibi_slopes;    // [num_heads], or null
  const float* sinks;           // [num_heads]: score of a key without a value, or null
  const float* key_scales;      // [num_kv_heads], what numbers of the cache are multiplied by;
  const float* value_scales;    // null: they are as they are
  T* out;                       // [tokens, num_heads, value_size], dense
  int64_t num_requests, num_heads, num_kv_heads, head_size, value_size;
  int64_t num_blocks, block_size, max_blocks;
  int64_t query_stride, table_stride;
  float scale;
  float soft_cap;          // 0: none
  int64_t sliding_window;  // 0: none; below 2^31
  int64_t chunk_size;      // a query sees keys of its own chunk only; 0: of all
  CacheType cache_type = CacheType::kSame;
  const int32_t* query_start_loc;  // [num_requests + 1], for prefill only
  int64_t num_tokens;              // for prefill only
  const int32_t* last_keys;        // [num_tokens], for prefill only: index of the last key that a
                                   // query sees, its own or a later one; null: its own
);

}  // namespace vllm_cpu
