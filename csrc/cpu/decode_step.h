// A whole step of decodes in one call: inputs, decoder, output head, sampling, and the new tokens
// noted in their rows; and that several times, until a row ends.
//
// It serves the steady state, in which every row runs its newest token and samples the next. What
// it cannot serve (prompts, penalties, masks, log-probabilities) it refuses before it has touched
// anything. Between two forward passes of a small model the caches of a core hold nothing of the
// interpreter, and each of its calls waits for memory: one call instead of some fifty.
//
// The parts are the kernels that also serve single calls, so the tokens are the same.
#pragma once

#include <type_traits>

#include "decode_step_args.h"
#include "program.h"
#include "sampling.h"

namespace VLLM_ISA {

using vllm_cpu::DecodeStepLaunch;
using vllm_cpu::DecodeStepRows;

using vllm_cpu::kNumParams;

// Elements from one row of the result to the next.
inline int64_t stride_of_result(const Program& program) {
  return program.buffers[program.out].width;
}

// Where the parts of a step of n rows are in its scratch memory.
template <typename T>
struct DecodeStepBuffers {
  char* program;       // of program_scratch_bytes, for one program after the other
  int64_t* input_ids;  // [n]
  int64_t* positions;  // [n]
  int64_t* slots;      // [groups, n]
  int32_t* seq_lens;   // [n]
  int32_t* tables;     // [groups, n, blocks of the longest request]
  T* hidden;           // [n, hidden]
  T* logits;           // [n, outputs of the head], with what pads a row
  float* params;       // [8, n]
  uint64_t* keys;      // [n]
  int64_t* draws;      // [n]
  int32_t* token_ids;  // [n]
  int64_t bytes;

  DecodeStepBuffers(const Program& decoder, const Program& head, const DecodeStepRows& rows,
                    int64_t n, int num_threads, uintptr_t scratch)
      : bytes(0) {
    const auto take = [&](auto*& at, int64_t count) {
      at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(scratch + bytes);
      bytes += aligned(count * int64_t{sizeof(*at)});
    };
    const int64_t decoder_bytes = program_scratch_bytes<T>(decoder, n, num_threads);
    const int64_t head_bytes = program_scratch_bytes<T>(head, n, num_threads);
    take(program, decoder_bytes > head_bytes ? decoder_bytes : head_bytes);
    take(input_ids, n);
    take(positions, n);
    take(slots, decoder.num_groups * n);
    take(seq_lens, n);
    take(tables, decoder.num_groups * n * rows.max_blocks);
    take(hidden, n * stride_of_result(decoder));
    take(logits, n * stride_of_result(head));
    take(params, kNumParams * n);
    take(keys, n);
    take(draws, n);
    take(token_ids, n);
  }
};

// Bytes for any step of at most n rows.
template <typename T>
int64_t decode_step_scratch_bytes(const Program& decoder, const Program& head,
                                  const DecodeStepRows& rows, int64_t n, int num_threads) {
  return DecodeStepBuffers<T>(decoder, head, rows, n, num_threads, 0).bytes;
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
        buffers_(decoder, head, rows, launch.n, num_threads,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {}

  int64_t run() {
    if (!is_plain()) return vllm_cpu::kNotPlain;
    launch_.num_done = 0;
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
    return 0;
  }

 private:
  bool is_plain() {
    for (int64_t i = 0; i < launch_.n; ++i) {
      const int64_t row = launch_.rows[i], position = launch_.num_computed[i];
      if (row < 0 || row >= rows_.num_rows || launch_.num_scheduled[i] != 1) return false;
      // The newest token, and one of the output.
      if (position + 1 != rows_.num_tokens[row] || position < rows_.num_prompt_tokens[row]) return false;
      const int64_t last = position + launch_.num_decodes - 1;
      if (last + 1 >= rows_.max_tokens) return false;
      if (last / decoder_.block_size >= rows_.max_blocks) return false;
      if ((rows_.features[row] & ~rows_.known_features) != 0) return false;
      is_random_ |= (rows_.features[row] & rows_.random_feature) != 0;
    }
    return true;
  }

  // Where the newest token of the i-th row is.
  int64_t position_of(int64_t i) const { return launch_.num_computed[i] + launch_.num_done; }

  int32_t* new_tokens() const { return launch_.token_ids + launch_.num_done * launch_.n; }

  // Fills in forward_ and what the sampler needs.
  void gather() {
    const int64_t n = launch_.n, size = decoder_.block_size;
    int64_t longest = 0;
    for (int64_t i = 0; i < n; ++i) {
      longest = position_of(i) > longest ? position_of(i) : longest;
    }
    const int64_t max_blocks = longest / size + 1;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = launch_.rows[i], position = position_of(i);
      buffers_.input_ids[i] = rows_.token_ids[row * rows_.max_tokens + position];
      buffers_.positions[i] = position;
      buffers_.seq_lens[i] = static_cast<int32_t>(position + 1);
      for (int64_t g = 0; g < decoder_.num_groups; ++g) {
        const int32_t* const blocks =
            rows_.block_tables + (g * rows_.num_rows + row) * rows_.max_blocks;
        buffers_.slots[g * n + i] = blocks[position / size] * size + position % size;
        __builtin_memcpy(buffers_.tables + (g * n + i) * max_blocks, blocks,
                         max_blocks * sizeof(int32_t));
      }
      if (!is_random_) continue;
      for (int64_t p = 0; p < kNumParams; ++p) {
        buffers_.params[p * n + i] = rows_.params[p * rows_.num_params + row];
      }
      buffers_.keys[i] = rows_.keys[row];
      buffers_.draws[i] = position + 1 - rows_.num_prompt_tokens[row];
    }
    forward_.input_ids = buffers_.input_ids;
    forward_.positions = buffers_.positions;
    forward_.slot_mapping = buffers_.slots;
    forward_.block_tables = buffers_.tables;
    forward_.seq_lens = buffers_.seq_lens;
    forward_.out = hidden();
    forward_.taps = launch_.taps;
    forward_.adapted = launch_.adapted;
    forward_.scratch = buffers_.program;
    forward_.num_tokens = forward_.num_requests = forward_.num_decodes = n;
    forward_.max_blocks = forward_.table_stride = max_blocks;
    forward_.group_stride = n * max_blocks;
  }

  // What the decoder returns: in the memory of the caller, if it asks for it.
  void* hidden() const { return launch_.hidden != nullptr ? launch_.hidden : buffers_.hidden; }

  int64_t compute() {
    const int64_t n = launch_.n;
    const int team_size = is_small(decoder_, forward_) ? 1 : num_threads_;
    int64_t status = run_program<T>(decoder_, forward_, team_size);
    launch_.bad_index = forward_.bad_index;
    if (status != 0) return status;
    ProgramLaunch head_launch = {};
    head_launch.given = hidden();
    head_launch.out = buffers_.logits;
    head_launch.adapted = launch_.adapted;
    head_launch.scratch = buffers_.program;
    head_launch.num_tokens = n;
    status = run_program<T>(head_, head_launch, num_threads_);
    launch_.bad_index = head_launch.bad_index;
    if (status != 0) return status;
    SampleArgs<T> args = {};
    args.logits = buffers_.logits;
    if (is_random_) {
      args.params = buffers_.params;
      args.keys = buffers_.keys;
      args.positions = buffers_.draws;
    }
    args.token_ids = buffers_.token_ids;
    args.host_ids = new_tokens();
    args.n = args.num_rows = n;
    args.vocab_size = head_.out_width;
    args.row_stride = stride_of_result(head_);
    args.num_draws = args.vocab_size / kVocabBlock + 1 + kVocabBlock;
    const auto no_memory = static_cast<int64_t>(ProgramStatus::kNoMemory);
    return sample(args, num_threads_) != 0 ? no_memory : 0;
  }

  // Whether all rows go on.
  bool note() {
    const int32_t* const tokens = new_tokens();
    launch_.num_invalid = 0;
    bool goes_on = true;
    for (int64_t i = 0; i < launch_.n; ++i) {
      const int64_t row = launch_.rows[i];
      launch_.num_invalid += tokens[i] < 0;
      // Behind its first token a row that fails ends before it, and fails when it is run again.
      if (tokens[i] < 0 && launch_.num_done > 0) continue;
      rows_.token_ids[row * rows_.max_tokens + position_of(i) + 1] = buffers_.token_ids[i];
      ++rows_.num_tokens[row];
      const int32_t* const ends = rows_.end_tokens + row * rows_.num_ends;
      for (int64_t e = 0; e < rows_.num_ends; ++e) goes_on &= ends[e] < 0 || ends[e] != tokens[i];
    }
    return goes_on && launch_.num_invalid == 0;
  }

  const Program& decoder_;
  const Program& head_;
  const DecodeStepRows& rows_;
  DecodeStepLaunch& launch_;
  const int num_threads_;
  const DecodeStepBuffers<T> buffers_;
  ProgramLaunch forward_ = {};
  bool is_random_ = false;
};

// 0, a ProgramStatus, or kNotPlain. With a ProgramStatus the caches are undefined in the slots of
// the step, and no token is noted.
template <typename T>
int64_t decode_step(const Program& decoder, const Program& head, const DecodeStepRows& rows,
                    DecodeStepLaunch& launch, int num_threads) {
  return DecodeStep<T>(decoder, head, rows, launch, num_threads).run();
}

}  // namespace VLLM_ISA
