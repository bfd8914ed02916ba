// A program: the operations of a forward pass in their order, and one launch of it. What runs it is
// program.h.
//
// A buffer holds a row per token. T tokens of B requests, decodes (one token each) first, as in
// attention. G groups of layers.
#pragma once

#include <cstdint>

#include "attention_args.h"
#include "collectives_args.h"
#include "low_rank_args.h"
#include "moe_args.h"

namespace vllm_cpu {

// One operation. What a kind does not use is 0. T is the type of the buffers.
VLLM_STRUCT(Operation,
  int64_t kind;         // OperationKind (row_operations.h)
  int64_t x, x_offset;  // buffer of the first operand; the element of a row where it begins
  int64_t y, y_offset;  // the same for the second operand
  int64_t out, out_offset;  // buffer of the result; the element of a row where that begins
  // Elements from one head to the next, of copy, head_linear and low_rank; 0: there are no heads.
  int64_t x_head_stride, y_head_stride, out_head_stride;
  const void* weight;          // T: the weight of a norm, the table of a lookup; [num_heads,
                               // head_size] of add_weights, and of layer_norm with option 1
  const void* bias;            // T: of a linear layer or a norm; or null
  const LinearWeight* packed;  // of linear and head_linear; of a lookup that has no weight. A float
                               // weight has rows of floats, whatever T is
  const float* table;          // [positions, rot_dim] of rotate, cosines then sines
                               // [num_heads] of attend: ALiBi slopes, or null
                               // [head_size] of route: ChoiceOptions::bias, or null
  const float* scales;         // [head_size] of route: ChoiceOptions::scales, or null
  const int32_t* sections;     // [rot_dim / 2] of rotate: which position of a token turns each pair;
                               // null: the first
  const float* sinks;          // [num_heads] of attend, or null
  const float* key_scales;     // of write_cache and attend: [heads of the cache], which holds
  const float* value_scales;   // number / scale; null where cache_type is kSame
  const Experts* experts;      // of experts
  const Arena* arena;          // of all_reduce and all_gather
  void* key_cache;             // [num_blocks, block_size, num_kv_heads, head_size], dense; of
                               // attend_items: [slots, num_kv_heads, head_size]
  void* value_cache;           // the same. Of attend: key_cache where values are the first numbers
                               // of keys; of write_cache: null there
  int64_t num_heads, head_size, num_kv_heads;
  int64_t value_size;      // of attend: numbers of a value; of a key: head_size
  int64_t is_float;        // of route: 1 where rows x are floats, whatever T is
  int64_t num_rows;        // of a lookup: rows of the table, where ids outside are those of other
                           // ranks and give zeros; 0: there are none
                           // of attend_items: slots of the caches
  int64_t option;          // lookup, lookup_position: what is added to an id; rotate: rot_dim;
                           // gelu_and_mul: 1 for tanh; linear: an Activation;
                           // scale_rows: 1 for the sigmoid;
                           // layer_norm: 1 where each head has a weight of its own;
                           // rms_norm, add_rms_norm: what is added to the weight;
                           // route: a Routing; round_to_fp8: the largest number
  int64_t top_k;           // of route and experts
  int64_t num_groups, top_groups;  // of route, as in ChoiceOptions
  int64_t first_part, num_parts;  // of low_rank, as in LowRankArgs; it adds to x by inputs y
  int64_t group;           // of write_cache and attend: whose slots and block tables are used
  int64_t sliding_window;  // 0: none
  int64_t chunk_size;      // of attend; 0: none
  float scalar;            // eps of a norm; the factor of scale and of round_to_fp8; the limit of
                           // clip and soft_cap; of query @ key in attend; of the weights in route;
                           // p of xielu
  float second_scalar;     // n of xielu; of route: ChoiceOptions::tolerance
  float soft_cap;          // of the scores in attend; 0: none
  CacheType cache_type;
);

VLLM_STRUCT(ProgramBuffer,
  int64_t width;     // elements of a row
  int64_t is_local;  // 1: used only in one run, so not kept for all rows at once
  int64_t tap;       // 1 + index in the taps of a launch, whose memory it has; 0: none
);

VLLM_STRUCT(Program,
  const Operation* operations;
  const ProgramBuffer* buffers;
  int64_t num_operations, num_buffers;  // at most kMaxBuffers
  int64_t given, out;  // buffers that the caller of a launch provides; given: -1 if there is none
  int64_t out_width;   // elements at the beginning of a row of out that are the result
  // Exclusive limits of what a launch holds; 0: not read.
  int64_t vocab_size, max_positions, num_types, num_blocks;
  int64_t block_size, num_groups;  // groups of layers that share block tables
  int64_t largest_run_bytes;  // weights of the linear layers of a run (program.h)
  int64_t weight_bytes;       // of all linear layers
  int64_t attended_elements;  // num_heads * head_size of all attentions
  int64_t item_elements;      // the same of all attend_items
);

constexpr int64_t kMaxBuffers = 64;
constexpr int64_t kMaxSectionedElements = 512;  // rot_dim of a rotation with sections

VLLM_STRUCT(ProgramLaunch,
  const int64_t* input_ids;        // [T]
  const int64_t* token_types;      // [T]; null: all are 0
  const int64_t* positions;        // [P, T]; P is 1 where all positions of a token are the same
  const int64_t* slot_mapping;     // [G, T]; negative: nothing is written
  const int32_t* block_tables;     // [G, B, max_blocks], groups group_stride and requests
                                   // table_stride apart
  const int32_t* seq_lens;         // [B]
  const int32_t* query_start_loc;  // [B + 1]; unused when all requests are decodes
  const int32_t* last_keys;        // [T] as in AttentionArgs; null: the own key of each token
  const int64_t* replaced;         // [T]: row of `embeddings` that takes the place of a token's own,
                                   // or -1; null: none does
  const void* embeddings;          // [rows, width of a row that replace changes]
  const AdaptedRows* adapted;      // adapters of the tokens; null: none has one
  const int32_t* const* item_slots;  // [T]: slots of images and sounds that each token sees
  const int32_t* num_item_slots;     // [T]: how many; null: no token sees any
  const void* given;  // [T, width of the buffer]; null where the program has no such buffer
  void* out;          // [T, width of the buffer]
  void* const* taps;  // [T, width of the buffer] each: further results, by ProgramBuffer::tap
  char* scratch;      // of program_scratch_bytes, aligned to 64
  int64_t num_positions;  // P
  int64_t num_tokens, num_requests, num_decodes, max_blocks, table_stride, group_stride;
  int64_t bad_index;  // set with the status: the token or request that it is about; of
                      // kNotReduced and kNotGathered, what the exchange returned (collectives.h)
);

VLLM_ENUM(ProgramStatus,
  kDone,
  kBadToken,
  kBadPosition,
  kBadType,
  kBadSlot,
  kBadRequest,  // its lengths or its block table
  kNoMemory,
  kBadStart,     // the first prefill does not begin behind the decodes
  kBadAdapter,
  kBadItem,      // slots that a token sees
  kNotReduced,   // an all_reduce or an all_gather between the ranks has failed
  kNotGathered
);

}  // namespace vllm_cpu
