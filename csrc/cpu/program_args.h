// A program: the operations of a forward pass in order, and the arguments of one launch of it. It
// is run by program.h.
//
// A buffer contains one row per token. A launch has T tokens of B requests, with decodes (one token
// each) first, as in attention. G groups of layers have block tables of their own.
#pragma once

#include <cstdint>

#include "attention_args.h"
#include "collectives_args.h"
#include "low_rank_args.h"
#include "moe_args.h"

namespace vllm_cpu {

// One operation. Fields that a kind of operation does not use are 0. T is the type of the buffers.
VLLM_STRUCT(Operation,
  int64_t kind;         // OperationKind (row_operations.h)
  int64_t x, x_offset;  // buffer of the first operand; index of its first element in a row
  int64_t y, y_offset;  // likewise for the second operand
  int64_t out, out_offset;  // buffer of the result; index of its first element in a row
  // Number of elements from one head to the next, for copy, head_linear and low_rank; 0: no heads.
  int64_t x_head_stride, y_head_stride, out_head_stride;
  const void* weight;          // T: weight of a norm, table of a lookup; [num_heads,
                               // head_size] for add_weights, and for layer_norm with option 1
  const void* bias;            // T: bias of a linear layer or a norm; or null
  const LinearWeight* packed;  // for linear and head_linear; for a lookup without weight. A float
                               // weight has rows of floats, whatever T is
  const float* table;          // [positions, rot_dim] for rotate, cosines then sines
                               // [num_heads] for attend: ALiBi slopes, or null;
                               // [head_size] for route: ChoiceOptions::bias, or null
  const float* scales;         // [head_size] for route: ChoiceOptions::scales, or null
  const int32_t* sections;     // [rot_dim / 2] for rotate: index of the position that rotates
                               // each pair; null: the first one
  const float* sinks;          // [num_heads] for attend, or null
  const float* key_scales;     // for write_cache and attend: [heads of the cache], which contains
  const float* value_scales;   // value / scale; null if cache_type is kSame
  const Experts* experts;      // for experts
  const Arena* arena;          // for all_reduce and all_gather
  void* key_cache;             // [num_blocks, block_size, num_kv_heads, head_size], dense; for
                               // attend_items: [slots, num_kv_heads, head_size]
  void* value_cache;           // as key_cache. If values are the first elements of keys, it
                               // is key_cache for attend, and null for write_cache
  int64_t num_heads, head_size, num_kv_heads;
  int64_t value_size;      // for attend: number of elements of a value; a key has head_size
  int64_t is_float;        // for route: 1 if rows x are floats, whatever T is
  int64_t num_rows;        // of a lookup: rows of the table, where ids outside are those of other
                           // ranks and give zeros; 0: there are none
                           // of attend_items: slots of the caches
  int64_t option;          // lookup, lookup_position: added to an id; rotate: rot_dim;
                           // gelu_and_mul: 1 for tanh; gelu, linear: an Activation;
                           // scale_rows: 1 for the sigmoid;
                           // layer_norm: 1 where each head has a weight of its own;
                           // rms_norm, add_rms_norm: what is added to the weight;
                           // route: a Routing; round_to_fp8: the largest number
  int64_t top_k;           // for route and experts
  int64_t num_groups, top_groups;  // for route, as in ChoiceOptions
  int64_t first_part, num_parts;  // for low_rank, as in LowRankArgs; it adds to x and reads its
                                  // inputs from y
  int64_t group;           // for write_cache and attend: index of the group of layers
  int64_t sliding_window;  // 0: no window
  int64_t chunk_size;      // for attend; 0: no chunks
  float scalar;            // eps of a norm; the factor of scale and of round_to_fp8; the limit of
                           // clip and soft_cap; of query @ key in attend; of the weights in route;
                           // p of xielu
  float second_scalar;     // n of xielu; for route: ChoiceOptions::tolerance
  float soft_cap;          // for the scores in attend; 0: no soft cap
  CacheType cache_type;
);

VLLM_STRUCT(ProgramBuffer,
  int64_t width;     // elements of a row
  int64_t is_local;  // 1: used in a single run only, so it is not kept for all rows at once
  int64_t tap;       // 1 + index in the taps of a launch, which provide its memory; 0: no tap
);

VLLM_STRUCT(Program,
  const Operation* operations;
  const ProgramBuffer* buffers;
  int64_t num_operations, num_buffers;  // at most kMaxBuffers
  int64_t given, out;  // buffers that the caller of a launch provides; given: -1 if there is none
  int64_t out_width;   // number of elements at the beginning of a row of out that are the result
  // Upper limits (exclusive) of the values in a launch; 0: not read.
  int64_t vocab_size, max_positions, num_types, num_blocks;
  int64_t block_size, num_groups;  // groups of layers that share block tables
  int64_t largest_run_bytes;  // largest size of the weights of a run's linear layers (program.h)
  int64_t weight_bytes;       // size of the weights of all linear layers
  int64_t attended_elements;  // num_heads * head_size, added up over all attentions
  int64_t item_elements;      // num_heads * head_size, added up over all attend_items
);

constexpr int64_t kMaxBuffers = 64;
constexpr int64_t kMaxSectionedElements = 512;  // rot_dim of a rotation with sections

VLLM_STRUCT(ProgramLaunch,
  const int64_t* input_ids;        // [T]
  const int64_t* token_types;      // [T]; null: all are 0
  const int64_t* positions;        // [P, T]; P is 1 if all positions of a token are equal
  const int64_t* slot_mapping;     // [G, T]; negative: nothing is written
  const int32_t* block_tables;     // [G, B, max_blocks], groups group_stride and requests
                                   // table_stride apart
  const int32_t* seq_lens;         // [B]
  const int32_t* query_start_loc;  // [B + 1]; unused when all requests are decodes
  const int32_t* last_keys;        // [T] as in AttentionArgs; null: the own key of each token
  const int64_t* replaced;         // [T]: row of `embeddings` that replaces the embedding of a
                                   // token, or -1; null: no token is replaced
  const void* embeddings;          // [rows, width of a row that replace changes]
  const AdaptedRows* adapted;      // adapters of the tokens; null: no token has one
  const int32_t* const* item_slots;  // [T]: slots of images and sounds that each token attends to
  const int32_t* num_item_slots;     // [T]: number of these slots; null: no token has any
  const void* given;  // [T, width of the buffer]; null if the program has no such buffer
  void* out;          // [T, width of the buffer]
  void* const* taps;  // [T, width of the buffer] each: further results, see ProgramBuffer::tap
  char* scratch;      // program_scratch_bytes bytes, aligned to 64 bytes
  int64_t num_positions;  // P
  int64_t num_tokens, num_requests, num_decodes, max_blocks, table_stride, group_stride;
  int64_t bad_index;  // output with the status: index of the token or request; for
                      // kNotReduced and kNotGathered: the result of the exchange (collectives.h)
);

VLLM_ENUM(ProgramStatus,
  kDone,
  kBadToken,
  kBadPosition,
  kBadType,
  kBadSlot,
  kBadRequest,  // wrong lengths or block table of a request
  kNoMemory,
  kBadStart,     // the first prefill must begin right after the decodes
  kBadAdapter,
  kBadItem,      // wrong slots of images or sounds
  kNotReduced,   // an all_reduce or all_gather between the ranks has failed
  kNotGathered
);

}  // namespace vllm_cpu
