// Arguments of the sampling kernels (sampling.h and sampling_logprobs.h).
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// A batch of n rows. A pointer that no row needs is null.
template <typename T>
VLLM_STRUCT(SampleArgs,
  const T* logits;            // [n, vocab_size], rows row_stride apart
  const int64_t* rows;        // [num_rows] the rows to sample, or null: all n
  const float* params;        // [kNumParams, n] in the order of Param; null: all rows are greedy
  const uint64_t* keys;       // [n] keys of the random numbers
  const int64_t* positions;   // [n] positions in the random stream of the key
  const float* exponentials;  // [n, num_draws] random values to use instead of keys and positions
  const uint8_t* changed;     // [n] not 0: edits, masks or penalties change the row
  const int32_t* edit_ids;    // [n, num_edits]
  const float* edit_values;   // [n, num_edits]
  const int32_t* mask_of;     // [n] index of the row's mask; -1: no mask
  const int32_t* mask_words;  // [masks, num_words], one bit per token
  const int32_t* penalty_ids;     // [n, num_penalties]; entries of at least vocab_size are padding
  const float* penalty_counts;    // [n, num_penalties]
  int32_t* token_ids;             // [n] output
  int32_t* host_ids;              // [n] output: as token_ids, but -1 for rows that cannot be
                                  // sampled
  int64_t n, num_rows, vocab_size, row_stride;
  int64_t num_draws, num_edits, num_words, num_penalties;
);

// Indices into the first dimension of params: `Param` of vllm/sample/features.py.
VLLM_ENUM(Param, kTemperature, kMinP, kTopK, kTopP, kPresencePenalty, kFrequencyPenalty,
          kRepetitionPenalty, kIsGreedy);
constexpr int64_t kNumParams = static_cast<int64_t>(Param::kIsGreedy) + 1;

// A row of logits is processed in blocks of this many tokens.
constexpr int64_t kVocabBlock = 128;

template <typename T>
VLLM_STRUCT(LogprobArgs,
  const T* logits;           // [*, vocab_size], rows row_stride apart
  const int64_t* rows;       // [num_rows] rows of logits and token_ids; null: the first ones
  const int32_t* token_ids;  // given tokens
  int32_t* out_ids;          // [num_rows, 1 + num_likeliest]: the given token, then the most likely
                             // ones
  float* out_logprobs;       // [num_rows, 1 + num_likeliest]
  int32_t* out_ranks;        // [num_rows]
  int64_t num_rows, vocab_size, row_stride, num_likeliest;
);

}  // namespace vllm_cpu
