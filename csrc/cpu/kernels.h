// The table of kernels that each instruction set fills in; what a kernel does is said in its own
// header.
#pragma once

#include <cstdint>

#include "decode_step_args.h"
#include "linear_format.h"
#include "program_args.h"
#include "sampling_args.h"

namespace vllm_cpu {

// What a KV cache holds: the type of the queries, or eight-bit floats (fp8.h).
enum class CacheType : int64_t { kSame = 0, kE4m3 = 1, kE5m2 = 2 };

// Arguments of writing new keys and values into a cache of eight-bit floats.
template <typename T>
struct CacheFp8Args {
  const T* key;                 // [num_tokens, row_size], tokens key_stride apart
  const T* value;               // the same, value_stride apart
  uint8_t* key_cache;           // [num_slots, row_size], dense
  uint8_t* value_cache;         // the same
  const int64_t* slot_mapping;  // [num_tokens]; a token with a negative slot is skipped
  int64_t num_tokens, row_size, key_stride, value_stride, num_slots;
  float key_scale, value_scale;  // the cache holds number / scale
  CacheType cache_type;          // not kSame
};

// Arguments of paged attention. A token of decode is a request.
template <typename T>
struct AttentionArgs {
  const T* query;               // [tokens, num_heads, head_size], tokens query_stride apart
  const void* key_cache;        // [num_blocks, block_size, num_kv_heads, head_size], dense
  const void* value_cache;      // the same
  const int32_t* block_tables;  // [num_requests, max_blocks], requests table_stride apart
  const int32_t* seq_lens;      // [num_requests]
  const float* alibi_slopes;    // [num_heads], or null
  T* out;                       // [tokens, num_heads, head_size], dense
  int64_t num_requests, num_heads, num_kv_heads, head_size, num_blocks, block_size, max_blocks;
  int64_t query_stride, table_stride;
  float scale;
  float soft_cap;          // 0: none
  float value_scale = 1;   // multiplies the result; that of the keys is part of `scale`
  int64_t sliding_window;  // 0: none; below 2^31
  CacheType cache_type = CacheType::kSame;
};

template <typename T>
using DecodeArgs = AttentionArgs<T>;

template <typename T>
struct PrefillArgs : AttentionArgs<T> {
  const int32_t* query_start_loc;  // [num_requests + 1]
  int64_t num_tokens;
};

// Arguments of a mixture of experts. All gates and ups are [I, H] in one format, with the same
// order of inputs in an expert's two; all downs are [H, I] in one format.
template <typename T>
struct MoeArgs {
  const LinearWeight* const* gate;  // [num_experts]
  const LinearWeight* const* up;
  const LinearWeight* const* down;
  const T* x;            // [num_tokens, H], tokens x_stride apart
  const int64_t* ids;    // [num_tokens, top_k]
  const float* weights;  // the same
  T* out;                // [num_tokens, H], dense
  int64_t num_tokens, num_experts, top_k, x_stride;
  int64_t has_orders;  // 1 when a gate has an order of inputs
};

template <typename T>
struct Kernels {
  void (*rms_norm)(const T* x, const T* weight, T* out, int64_t rows, int64_t heads, int64_t hidden,
                   int64_t x_stride, float eps, int num_threads);
  void (*fused_add_rms_norm)(T* x, T* residual, const T* weight, int64_t rows, int64_t hidden,
                             float eps, int num_threads);
  void (*layer_norm)(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size,
                     float eps, int num_threads);
  void (*silu_and_mul)(const T* x, T* out, int64_t rows, int64_t size, int64_t x_stride,
                       int num_threads);
  void (*gelu_and_mul)(const T* x, T* out, int64_t rows, int64_t size, int64_t x_stride,
                       int is_tanh, int num_threads);
  int64_t (*rotary_embedding)(const int64_t* positions, T* query, T* key, const float* cos_sin,
                              int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                              int64_t head_size, int64_t query_stride, int64_t key_stride,
                              int64_t rot_dim, int64_t max_positions, int is_neox, int num_threads);
  int64_t (*reshape_and_cache)(const T* key, const T* value, T* key_cache, T* value_cache,
                               const int64_t* slot_mapping, int64_t num_tokens, int64_t row_size,
                               int64_t key_stride, int64_t value_stride, int64_t num_slots,
                               int num_threads);
  int64_t (*reshape_and_cache_fp8)(const CacheFp8Args<T>& args, int num_threads);
  int64_t (*paged_attention_decode)(const DecodeArgs<T>& args, int num_threads);
  int64_t (*paged_attention_prefill)(const PrefillArgs<T>& args, int num_threads);
  int64_t (*linear)(const LinearWeight& weight, const T* x, const T* bias, T* out, int64_t rows,
                    int64_t x_stride, int num_threads);
  int64_t (*quantize_weight)(const LinearWeight& weight, const T* from, int num_threads);
  int64_t (*linear_rows)(const LinearWeight& weight, const int64_t* ids, int64_t count, T* out,
                         int num_threads);
  int64_t (*pack_panels)(uint32_t* panels, int64_t num_panels, int64_t words, int num_threads);
  int64_t (*program_scratch_bytes)(const Program& program, int64_t num_tokens, int num_threads);
  int64_t (*program_forward)(const Program& program, ProgramLaunch& launch, int num_threads);
  int64_t (*decode_step_scratch_bytes)(const Program& decoder, const Program& head,
                                       const DecodeStepRows& rows, int64_t n, int num_threads);
  int64_t (*decode_step)(const Program& decoder, const Program& head, const DecodeStepRows& rows,
                         DecodeStepLaunch& launch, int num_threads);
  int64_t (*sample)(const SampleArgs<T>& args, int num_threads);
  int64_t (*gather_logprobs)(const LogprobArgs<T>& args, int num_threads);
  void (*draw_exponentials)(const uint64_t* keys, const int64_t* positions, int64_t num_rows,
                            int64_t count, float* out, int num_threads);
  int64_t (*moe)(const MoeArgs<T>& args, int num_threads);
  void (*convert_int4)(const LinearWeight& weight, const Int4Source& source, int num_threads);
};

}  // namespace vllm_cpu
