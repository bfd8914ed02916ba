// Runs a whole decode step in one call: prepares the inputs, runs the decoder and the output head,
// samples, verifies draft tokens, and appends the new tokens to their requests. A row is the entry
// of a running request in the arrays of DecodeStepRows. Without drafts, one call can run several
// decodes, until a row finishes.
//
// It serves the steady state: each row runs its newest token, with or without draft tokens after
// it, and samples after each of these tokens. Tokens may be forbidden by masks. Requests that need
// more (prompts, penalties, grammars) are refused before anything is changed. The logits can be
// given to the caller, who computes log-probabilities. One call replaces about fifty calls
// from Python. Each of these would wait for memory, because between two forward passes of a small
// model the caches of a core contain nothing of the interpreter.
//
// A step runs the same kernels as single calls, so the tokens are the same.
#pragma once

#include <type_traits>

#include "decode_step_args.h"
#include "program.h"
#include "sampling.h"
#include "sampling_masks.h"

namespace VLLM_ISA {

using vllm_cpu::DecodeStepLaunch;
using vllm_cpu::DecodeStepRows;

using vllm_cpu::kNumParams;

// Returns the number of elements from one row of a program's result to the next.
inline int64_t stride_of_result(const Program& program) {
  return program.buffers[program.out].width;
}

// Layout of the scratch memory of a step of n rows with T tokens; n <= T.
template <typename T>
struct DecodeStepBuffers {
  char* program;       // program_scratch_bytes, used by one program after another
  int64_t* input_ids;  // [T]
  int64_t* positions;  // [T]
  int64_t* slots;      // [groups, T]
  int32_t* seq_lens;   // [n]
  int32_t* query_starts;  // [n + 1] number of tokens before each row
  int32_t* tables;     // [groups, n, blocks of the longest request]
  T* hidden;           // [T, hidden]
  T* logits;           // [T, outputs of the head], with the padding of each row
  float* params;       // [kNumParams, T]
  uint64_t* keys;      // [T]
  int64_t* draws;      // [T]
  const int32_t** item_slots;  // [T] slots from which the decoder reads images and sounds
  int32_t* num_item_slots;     // [T]
  int32_t* valid_ids;  // [T] tokens of the newest decode; 0 for missing tokens
  int32_t* sampled;    // [decodes, T] tokens of all decodes; -1 for missing tokens
  int64_t bytes;

  DecodeStepBuffers(const Program& decoder, const Program& head, const DecodeStepRows& rows,
                    int64_t num_tokens, int64_t num_decodes, int num_threads, uintptr_t scratch)
      : bytes(0) {
    const auto take = [&](auto*& at, int64_t count) {
      at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(scratch + bytes);
      bytes += aligned(count * int64_t{sizeof(*at)});
    };
    const int64_t decoder_bytes = program_scratch_bytes<T>(decoder, num_tokens, num_threads);
    const int64_t head_bytes = program_scratch_bytes<T>(head, num_tokens, num_threads);
    take(program, decoder_bytes > head_bytes ? decoder_bytes : head_bytes);
    take(input_ids, num_tokens);
    take(positions, num_tokens);
    take(slots, decoder.num_groups * num_tokens);
    take(seq_lens, num_tokens);
    take(query_starts, num_tokens + 1);
    take(tables, decoder.num_groups * num_tokens * rows.max_blocks);
    take(hidden, num_tokens * stride_of_result(decoder));
    take(logits, num_tokens * stride_of_result(head));
    take(params, kNumParams * num_tokens);
    take(keys, num_tokens);
    take(draws, num_tokens);
    take(item_slots, decoder.item_elements > 0 ? num_tokens : 0);
    take(num_item_slots, decoder.item_elements > 0 ? num_tokens : 0);
    take(valid_ids, num_tokens);
    take(sampled, num_decodes * num_tokens);
  }
};

// Returns the bytes of scratch memory that are enough for any step of at most num_tokens tokens and
// num_decodes decodes.
template <typename T>
int64_t decode_step_scratch_bytes(const Program& decoder, const Program& head,
                                  const DecodeStepRows& rows, int64_t num_tokens,
                                  int64_t num_decodes, int num_threads) {
  return DecodeStepBuffers<T>(decoder, head, rows, num_tokens, num_decodes, num_threads, 0).bytes;
}

template <typename T>
class DecodeStep {
 public:
  DecodeStep(const Program& decoder, const Program& head, const DecodeStepRows& rows,
             DecodeStepLaunch& launch, int num_threads)
      : decoder_(decoder),
        head_(head),
        rows_(rows),
        launch_(launch),
        num_threads_(num_threads),
        buffers_(decoder, head, rows, launch.num_tokens, launch.num_decodes, num_threads,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {}

  int64_t run() {
    if (!is_plain()) return vllm_cpu::kNotPlain;
    launch_.num_done = launch_.num_invalid = 0;
    for (int64_t i = 0; i < launch_.n; ++i) launch_.counts[i] = 0;
    bool goes_on = true;
    while (goes_on && launch_.num_done < launch_.num_decodes) {
      gather();
      int64_t status = 0;
      const int team_size = is_small(decoder_, forward_) ? 1 : num_threads_;
      team(team_size, [&] { status = compute(); });
      if (status != 0) return status;
      goes_on = note();
      ++launch_.num_done;
    }
    give();
    return 0;
  }

 private:
  bool is_plain() {
    int64_t num_tokens = 0;
    const bool is_single = launch_.given != nullptr || launch_.logits != nullptr;
    if (is_single && launch_.num_decodes > 1) return false;
    for (int64_t i = 0; i < launch_.n; ++i) {
      const int64_t row = launch_.rows[i], index = launch_.num_computed[i];
      const int64_t count = launch_.num_scheduled[i];
      if (row < 0 || row >= rows_.num_rows || count < 1) return false;
      // The row must run exactly its newest token, and that token must be a part of the output.
      if (index + 1 != rows_.num_tokens[row] || index < rows_.num_prompt_tokens[row]) return false;
      const int64_t last = index + count + launch_.num_decodes - 2;
      if (last + 1 >= rows_.max_tokens) return false;
      if (last / decoder_.block_size >= rows_.max_blocks) return false;
      if ((rows_.features[row] & ~rows_.known_features) != 0) return false;
      is_random_ |= (rows_.features[row] & rows_.random_feature) != 0;
      if (has_mask(row)) {
        is_masked_ = true;
        if (has_times(row) && (count > 1 || launch_.num_decodes > 1)) return false;
      }
      num_tokens += count;
    }
    return num_tokens == launch_.num_tokens && (num_tokens == launch_.n || launch_.num_decodes == 1);
  }

  bool has_mask(int64_t row) const { return (rows_.features[row] & rows_.mask_features) != 0; }

  // Whether a row with a mask has rules for time tokens.
  bool has_times(int64_t row) const { return rows_.first_times[row] < head_.out_width; }

  // Returns the index of the newest token of row i.
  int64_t index_of(int64_t i) const { return launch_.num_computed[i] + launch_.num_done; }

  int32_t* sampled() const { return buffers_.sampled + launch_.num_done * launch_.num_tokens; }

  // Fills in forward_ and the arguments of the sampler.
  void gather() {
    const int64_t n = launch_.n, num_tokens = launch_.num_tokens, size = decoder_.block_size;
    int64_t longest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t last = index_of(i) + launch_.num_scheduled[i] - 1;
      longest = last > longest ? last : longest;
    }
    const int64_t max_blocks = longest / size + 1;
    int64_t t = 0, num_single = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = launch_.rows[i], count = launch_.num_scheduled[i];
      const int64_t end = index_of(i) + count;
      buffers_.query_starts[i] = static_cast<int32_t>(t);
      buffers_.seq_lens[i] = static_cast<int32_t>(end);
      if (count == 1 && num_single == i) ++num_single;
      for (int64_t g = 0; g < decoder_.num_groups; ++g) {
        __builtin_memcpy(buffers_.tables + (g * n + i) * max_blocks, table_of(g, row),
                         max_blocks * sizeof(int32_t));
      }
      for (int64_t index = end - count; index < end; ++index, ++t) gather_token(t, row, index);
    }
    buffers_.query_starts[n] = static_cast<int32_t>(t);
    forward_.input_ids = buffers_.input_ids;
    forward_.given = launch_.given;
    forward_.positions = buffers_.positions;
    forward_.slot_mapping = buffers_.slots;
    forward_.block_tables = buffers_.tables;
    forward_.seq_lens = buffers_.seq_lens;
    forward_.query_start_loc = buffers_.query_starts;
    forward_.out = hidden();
    forward_.taps = launch_.taps;
    forward_.adapted = launch_.adapted;
    if (decoder_.item_elements > 0) {
      forward_.item_slots = buffers_.item_slots;
      forward_.num_item_slots = buffers_.num_item_slots;
    }
    forward_.scratch = buffers_.program;
    forward_.num_positions = 1;
    forward_.num_tokens = num_tokens;
    forward_.num_requests = n;
    forward_.num_decodes = num_single;
    forward_.max_blocks = forward_.table_stride = max_blocks;
    forward_.group_stride = n * max_blocks;
  }

  void gather_token(int64_t t, int64_t row, int64_t index) {
    const int64_t size = decoder_.block_size, num_tokens = launch_.num_tokens;
    buffers_.input_ids[t] = rows_.token_ids[row * rows_.max_tokens + index];
    buffers_.positions[t] = index + rows_.position_offsets[row];
    for (int64_t g = 0; g < decoder_.num_groups; ++g) {
      buffers_.slots[g * num_tokens + t] = table_of(g, row)[index / size] * size + index % size;
    }
    if (decoder_.item_elements > 0) {
      buffers_.item_slots[t] = rows_.item_slots[row];
      buffers_.num_item_slots[t] = rows_.num_item_slots[row];
    }
    if (!is_random_) return;
    for (int64_t p = 0; p < kNumParams; ++p) {
      buffers_.params[p * num_tokens + t] = rows_.params[p * rows_.num_params + row];
    }
    buffers_.keys[t] = rows_.keys[row];
    buffers_.draws[t] = index + 1 - rows_.num_prompt_tokens[row];
  }

  const int32_t* table_of(int64_t group, int64_t row) const {
    return rows_.block_tables + (group * rows_.num_rows + row) * rows_.max_blocks;
  }

  // Returns the memory for the result of the decoder: the caller's memory if the caller asks for
  // the result.
  void* hidden() const { return launch_.hidden != nullptr ? launch_.hidden : buffers_.hidden; }

  // Returns the memory for the result of the head, as `hidden` for the decoder.
  T* logits() const {
    return launch_.logits != nullptr ? static_cast<T*>(launch_.logits) : buffers_.logits;
  }

  int64_t compute() {
    const int team_size = is_small(decoder_, forward_) ? 1 : num_threads_;
    int64_t status = run_program<T>(decoder_, forward_, team_size);
    if (status != 0) return blame(status, forward_.bad_index);
    ProgramLaunch head_launch = {};
    head_launch.given = hidden();
    head_launch.out = logits();
    head_launch.adapted = launch_.adapted;
    head_launch.scratch = buffers_.program;
    head_launch.num_tokens = launch_.num_tokens;
    status = run_program<T>(head_, head_launch, num_threads_);
    if (status != 0) return blame(status, head_launch.bad_index);
    if (is_masked_) mask_logits();
    SampleArgs<T> args = {};
    args.logits = logits();
    if (is_random_) {
      args.params = buffers_.params;
      args.keys = buffers_.keys;
      args.positions = buffers_.draws;
    }
    args.token_ids = buffers_.valid_ids;
    args.host_ids = sampled();
    args.n = args.num_rows = launch_.num_tokens;
    args.vocab_size = head_.out_width;
    args.row_stride = stride_of_result(head_);
    args.num_draws = args.vocab_size / kVocabBlock + 1 + kVocabBlock;
    const auto no_memory = static_cast<int64_t>(ProgramStatus::kNoMemory);
    return sample(args, num_threads_) != 0 ? no_memory : 0;
  }

  // Forbids the tokens that rows with masks may not sample.
  void mask_logits() {
    const int64_t vocab_size = head_.out_width, stride = stride_of_result(head_);
    parallel_rows(launch_.n, vocab_size / 4, num_threads_, [&](int64_t i) {
      const int64_t row = launch_.rows[i];
      if (!has_mask(row)) return;
      for (int64_t t = buffers_.query_starts[i]; t < buffers_.query_starts[i + 1]; ++t) {
        T* const at = logits() + t * stride;
        apply_mask(rows_.masks + row * rows_.num_words, vocab_size, at);
        if (has_times(row)) prefer_times(rows_.first_times[row], vocab_size, at);
      }
    });
  }

  // Stores the row and token that a status refers to, and returns the status.
  int64_t blame(int64_t status, int64_t index) {
    launch_.bad_index = index;
    int64_t i = index < 0 || index >= launch_.n ? 0 : index;
    launch_.bad_token = index_of(i);
    if (status != static_cast<int64_t>(ProgramStatus::kBadRequest) && index >= 0 &&
        index < launch_.num_tokens) {  // the status may refer to a token
      i = 0;
      while (buffers_.query_starts[i + 1] <= index) ++i;
      launch_.bad_token = index_of(i) + index - buffers_.query_starts[i];
    }
    launch_.bad_row = i;
    return status;
  }

  // Appends the tokens of the newest decode to their rows. Returns whether all rows continue.
  bool note() {
    bool goes_on = true;
    for (int64_t i = 0; i < launch_.n; ++i) {
      const int64_t row = launch_.rows[i];
      int32_t* const drafts = rows_.token_ids + row * rows_.max_tokens + index_of(i) + 1;
      const int32_t* const tokens = sampled() + buffers_.query_starts[i];
      int64_t right = 0;
      while (right < launch_.num_scheduled[i] - 1 && tokens[right] == drafts[right]) ++right;
      int64_t count = right + 1;
      if (tokens[right] < 0) {
        goes_on = false;
        // A later token has failed: the row stops before it, and fails when that token is run
        // again.
        if (launch_.counts[i] + right > 0) {
          --count;
        } else {
          ++launch_.num_invalid;
        }
      }
      if (count > right) drafts[right] = buffers_.valid_ids[buffers_.query_starts[i] + right];
      rows_.num_tokens[row] += static_cast<int32_t>(count);
      launch_.counts[i] += static_cast<int32_t>(count);
      const int32_t* const ends = rows_.end_tokens + row * rows_.num_ends;
      for (int64_t e = 0; e < rows_.num_ends; ++e) goes_on &= ends[e] < 0 || ends[e] != tokens[right];
    }
    return goes_on;
  }

  // Copies the new tokens of each row to launch_.token_ids.
  void give() {
    int32_t* out = launch_.token_ids;
    const int64_t stride = launch_.num_decodes > 1 ? launch_.num_tokens : 1;
    for (int64_t i = 0; i < launch_.n; ++i) {
      const int32_t* const tokens = buffers_.sampled + buffers_.query_starts[i];
      for (int64_t k = 0; k < launch_.counts[i]; ++k) *out++ = tokens[k * stride];
    }
    launch_.num_new = out - launch_.token_ids;
  }

  const Program& decoder_;
  const Program& head_;
  const DecodeStepRows& rows_;
  DecodeStepLaunch& launch_;
  const int num_threads_;
  const DecodeStepBuffers<T> buffers_;
  ProgramLaunch forward_ = {};
  bool is_random_ = false, is_masked_ = false;
};

// Runs a decode step. Returns 0, a ProgramStatus, or kNotPlain. After a ProgramStatus other than
// kDone, the slots of the step in the caches are undefined, and no token was stored.
template <typename T>
int64_t decode_step(const Program& decoder, const Program& head, const DecodeStepRows& rows,
                    DecodeStepLaunch& launch, int num_threads) {
  return DecodeStep<T>(decoder, head, rows, launch, num_threads).run();
}

}  // namespace VLLM_ISA
