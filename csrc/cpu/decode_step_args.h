// Arguments of a decode step in one call (decode_step.h).
#pragma once

#include <cstdint>

#include "linear_format.h"
#include "low_rank_args.h"

namespace vllm_cpu {

// The running requests, as arrays over rows. Python owns the arrays, and their addresses do not
// change.
VLLM_STRUCT(DecodeStepRows,
  int32_t* token_ids;         // [num_rows, max_tokens]
  int32_t* num_tokens;        // [num_rows] number of known tokens
  const int32_t* num_prompt_tokens;  // [num_rows] number of prompt tokens
  const int32_t* position_offsets;   // [num_rows] position minus index of tokens after the prompt
  const int32_t* end_tokens;  // [num_rows, num_ends] tokens that finish a row; -1: none
  const int32_t* block_tables;  // [groups of the decoder, num_rows, max_blocks]
  const int32_t* const* item_slots;  // [num_rows] slots of images and sounds that the output
                                     // attends to
  const int32_t* num_item_slots;     // [num_rows] their number; only read by decoders with
                                     // attend_items
  const int32_t* features;     // [num_rows] bits: sampling features of a row
  const float* params;         // [8, num_params] in the order of Param; num_params >= num_rows
  const uint64_t* keys;        // [num_rows] keys of the random numbers
  const int32_t* masks;        // [num_rows, num_words] tokens that each row may sample after its
                               // first token, one bit per token
  const int32_t* first_times;  // [num_rows] first of the time tokens of rows that have a mask, which
                               // the mask then allows for only one decode; from the size of the
                               // vocabulary on: none
  int64_t num_rows, max_tokens, max_blocks, num_params, num_ends, num_words;
  int64_t known_features;  // features that this step supports
  int64_t random_feature;  // the bit of a row with random sampling
  int64_t mask_features;   // the bits of a row that has a mask
);

// A step of n rows. Each row runs its newest token followed by its draft tokens (in this order in
// `token_ids`). Its output is the sampled tokens up to and including the first that differs from
// its draft. Without drafts there may be several decodes; the last one is the first that finishes a
// row, or has no valid token for a row.
VLLM_STRUCT(DecodeStepLaunch,
  const int32_t* rows;           // [n]
  const int32_t* num_computed;   // [n] number of tokens whose keys and values are in the cache
  const int32_t* num_scheduled;  // [n] number of tokens to run
  int32_t* token_ids;  // [num_tokens * num_decodes] output: new tokens, row after row;
                       // -1 if the logits allow no token as the first one of a row
  int32_t* counts;     // [n] output: number of new tokens of each row, at least 1
  const void* given;             // [num_tokens, width] inputs of the decoder instead of token ids;
                                 // may be overwritten. Null: token ids are the inputs
  const AdaptedRows* adapted;    // adapters of the tokens; null: no token has one
  void* hidden;                  // [num_tokens, width of the decoder's result] output; null: not
                                 // needed
  void* logits;                  // [num_tokens, width of the head's result] output: logits, with -inf
                                 // for tokens that masks forbid; null: not needed. Only with one
                                 // decode
  void* const* taps;             // taps of the decoder, as in ProgramLaunch
  char* scratch;                 // decode_step_scratch_bytes bytes, aligned to 64 bytes
  int64_t n, num_tokens;  // number of rows, and of their tokens; equal if there are no drafts
  int64_t num_decodes;    // 1 with drafts, with `given` and with `logits`
  int64_t num_done;       // output: number of decodes that have run
  int64_t num_new;        // output: number of entries of token_ids
  int64_t num_invalid;    // output: number of rows whose first token is -1
  int64_t bad_row, bad_token;  // output with a ProgramStatus: index in `rows`, and index of its
                               // token
  int64_t bad_index;      // output of a status that refers to no row: as in ProgramLaunch
);

// Further results, in addition to ProgramStatus.
constexpr int64_t kNotPlain = 100;  // nothing was done: the step needs a feature that this call
                                    // does not support

}  // namespace vllm_cpu
