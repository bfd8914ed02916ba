// A whole decoder as the kernels read it: weights, caches and one launch.
//
// T tokens of B requests, decodes (one token each) first, as in attention; H query heads, G
// key/value heads, D head size, I size inside the MLP.
#pragma once

#include <cstdint>

#include "linear_format.h"

namespace vllm_cpu {

// Null: the model has no such bias or norm.
template <typename T>
VLLM_STRUCT(DecoderLayer,
  const LinearWeight* qkv;      // [(H + 2 G) * D, hidden]: queries, keys, values
  const LinearWeight* output;   // [hidden, H * D]
  const LinearWeight* gate_up;  // [2 * I, hidden]: gate, up
  const LinearWeight* down;     // [hidden, I]
  const T* qkv_bias;
  const T* output_bias;
  const T* gate_up_bias;
  const T* down_bias;
  const T* input_norm;      // [hidden]
  const T* attention_norm;  // [hidden], after attention
  const T* query_norm;      // [D]
  const T* key_norm;        // [D]
  T* key_cache;             // [num_blocks, block_size, G, D], dense
  T* value_cache;           // the same
  float scale;              // of query @ key
  int64_t sliding_window;   // 0: none
);

template <typename T>
VLLM_STRUCT(DecoderModel,
  const DecoderLayer<T>* layers;
  const T* embedding;                    // [vocab_size, hidden], or null:
  const LinearWeight* packed_embedding;  // rows of the output head
  const T* final_norm;                   // [hidden]
  const float* cos_sin;                  // [max_positions, rot_dim], cosines then sines
  int64_t num_layers, vocab_size, hidden_size, intermediate_size;
  int64_t num_heads, num_kv_heads, head_size, rot_dim, max_positions, num_blocks, block_size;
  float norm_eps;
);

VLLM_STRUCT(DecoderLaunch,
  const int64_t* input_ids;        // [T]
  const int64_t* positions;        // [T]
  const int64_t* slot_mapping;     // [T]; negative: nothing is written
  const int32_t* block_tables;     // [B, max_blocks], requests table_stride apart
  const int32_t* seq_lens;         // [B]
  const int32_t* query_start_loc;  // [B + 1]; unused when all requests are decodes
  void* out;                       // [T, hidden]
  char* scratch;                   // of decoder_scratch_bytes, aligned to 64
  int64_t num_tokens, num_requests, num_decodes, max_blocks, table_stride;
  int64_t bad_index;  // set with the status: the token or request that it is about
);

enum class DecoderStatus : int64_t {
  kDone = 0,
  kBadToken = 1,
  kBadPosition = 2,
  kBadSlot = 3,
  kBadRequest = 4,  // its lengths or its block table
  kNoMemory = 5,
  kBadStart = 6,  // the first prefill does not begin behind the decodes
};

}  // namespace vllm_cpu
