// What a decode step in one call is told; what it does is said in decode_step.h.
#pragma once

#include <cstdint>

#include "linear_format.h"
#include "low_rank_args.h"

namespace vllm_cpu {

// The running requests, as arrays over rows that belong to the Python side and stay where they are.
VLLM_STRUCT(DecodeStepRows,
  int32_t* token_ids;         // [num_rows, max_tokens]
  int32_t* num_tokens;        // [num_rows] how many of them are known
  const int32_t* num_prompt_tokens;  // [num_rows] how many of them are the prompt
  const int32_t* position_offsets;   // [num_rows] position minus index of tokens after the prompt
  const int32_t* end_tokens;  // [num_rows, num_ends] tokens that end a row; -1: none
  const int32_t* block_tables;  // [groups of the decoder, num_rows, max_blocks]
  const int32_t* const* item_slots;  // [num_rows] slots of images and sounds that the output sees
  const int32_t* num_item_slots;     // [num_rows] how many; read by decoders with attend_items
  const int32_t* features;     // [num_rows] bits: what a row wants of the sampler
  const float* params;         // [8, num_params] in the order of Param; num_params >= num_rows
  const uint64_t* keys;        // [num_rows] of the random numbers
  int64_t num_rows, max_tokens, max_blocks, num_params, num_ends;
  int64_t known_features;  // bits that this step can serve
  int64_t random_feature;  // the bit of a row that is not greedy
);

// A step of n rows. Each runs its newest token and its drafts, which are behind it in `token_ids`, and
// gets the tokens that are sampled behind them, up to the first that is not the draft in its place.
// Without drafts there may be several decodes; the last is the first that ends a row or has no token
// for one.
VLLM_STRUCT(DecodeStepLaunch,
  const int32_t* rows;           // [n]
  const int32_t* num_computed;   // [n] tokens whose keys and values are in the cache
  const int32_t* num_scheduled;  // [n] tokens to run
  int32_t* token_ids;  // [num_tokens * num_decodes] out: new tokens of the rows one after the other;
                       // -1 where the logits allow none for the first token of a row
  int32_t* counts;     // [n] out: new tokens of each row, at least 1
  const void* given;             // [num_tokens, width] what the decoder takes in place of token ids, which
                                 // may be overwritten; null: it takes them
  const AdaptedRows* adapted;    // adapters of the tokens; null: none has one
  void* hidden;                  // [num_tokens, width of the decoder's result] out; null: not asked for
  void* const* taps;             // of the decoder, as in ProgramLaunch
  char* scratch;                 // of decode_step_scratch_bytes, aligned to 64
  int64_t n, num_tokens;  // rows, and what they run in all; num_tokens == n: there are no drafts
  int64_t num_decodes;    // 1 where there are drafts, and with `given`
  int64_t num_done;       // set: decodes that have run
  int64_t num_new;        // set: entries of token_ids
  int64_t num_invalid;    // set: rows whose first token is -1
  int64_t bad_row, bad_token;  // set with the status of a program: index in `rows`, and in its tokens
  int64_t bad_index;      // of a status that is about no row: as in ProgramLaunch
);

// Besides those of ProgramStatus.
constexpr int64_t kNotPlain = 100;  // nothing was done: the step wants more than this call knows

}  // namespace vllm_cpu
