// Samples tokens from logits: the same as vllm/sample/sampler.py, row by row and without temporary
// tensors. A row is the logits of one token to be sampled.
//
// Greedy: one pass computes the maxima of blocks of 128 tokens; then the first block with the
// largest maximum is searched. Random sampling begins with the same pass. The draw compares blocks,
// then the tokens of the winning block; a block whose maximum shows that it cannot win is not read.
// The threshold of top_k is found among the tokens that are above the k-th largest of the maxima.
// Only top_p needs the likelihood of every token, to add them up; then it bisects as
// vllm/sample/filters.py does, and every step leaves fewer undecided tokens.
//
// The token of a row depends only on its logits, parameters and random numbers. It does not depend
// on other rows, on threads, or (see sampling_math.h) on the instruction set.
#pragma once

#include "parallel.h"
#include "sampling_args.h"
#include "sampling_filters.h"

namespace VLLM_ISA {

using vllm_cpu::Param;
using vllm_cpu::SampleArgs;

constexpr float kLog2e = 1.44269504f;

// ---- the draw -----------------------------------------------------------------------------

// The random numbers of a row: given, or computed when needed.
struct RowNumbers {
  const float* given;  // [draws], or null
  int64_t num_draws;
  uint64_t bits;

  const float* blocks(int64_t count, float* out) const {
    if (given != nullptr) return given;
    exponentials(bits, 0, count, out);
    return out;
  }
  const float* inside(float* out) const {
    if (given != nullptr) return given + num_draws - kVocabBlock;
    exponentials(bits, num_draws - kVocabBlock, kVocabBlock, out);
    return out;
  }
};

// Returns the index of the block that wins the draw: it has the largest sum of weights /
// exponential.
template <typename T>
int64_t race_of_blocks(const Row<T>& row, const float* numbers, const Weighing& weigh,
                       const SamplingScratch& scratch) {
  float* const bounds = scratch.bounds;  // upper bounds of each block's sum of weights / exponential
  for_each_vector(row.num_blocks, [&](int64_t i, int64_t count) {
    const Vec most = weigh(load(scratch.maxima + i, count)) * (kVocabBlock * 1.0001f);
    const Vec e = load(numbers + i, count);
    store(bounds + i, most / (e > Vec{} ? e : splat(1.0f)), count);
  });
  float weights[kVocabBlock];
  float best = -1;
  int64_t winner = 0;
  const auto look = [&](int64_t b) {
    const float speed = weigh_block(row.block(b), weigh, weights) / numbers[b];
    if (speed > best || (speed == best && b < winner)) best = speed, winner = b;
  };
  const int64_t likely = first_of_largest(bounds, row.num_blocks);
  look(likely);
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    if (bounds[b] >= best && b != likely) look(b);
  }
  return winner;
}

template <typename T>
int64_t draw(const Row<T>& row, const RowNumbers& random, const Weighing& weigh,
             const SamplingScratch& scratch) {
  const float* const numbers = random.blocks(row.num_blocks, scratch.exponentials);
  const int64_t block = race_of_blocks(row, numbers, weigh, scratch);
  float weights[kVocabBlock], inside[kVocabBlock], speeds[kVocabBlock];
  weigh_block(row.block(block), weigh, weights);
  const float* const e = random.inside(inside);
  for (int64_t i = 0; i < kVocabBlock; i += kLanes) {
    store(speeds + i, load(weights + i) / load(e + i));
  }
  int64_t first = first_of_largest(speeds, kVocabBlock);
  // All quotients may underflow to 0. Then take the most likely token of the block.
  if (!(weights[first] > 0)) first = first_of_largest(weights, kVocabBlock);
  // If given random values are not above 0, even padding after the vocabulary can win.
  const int64_t token = block * kVocabBlock + first;
  return token < row.vocab_size ? token : row.vocab_size - 1;
}

// ---- rows and batches ---------------------------------------------------------------------

// Returns a parameter of row `index`.
template <typename T>
float param_of(const SampleArgs<T>& args, Param which, int64_t index) {
  return args.params[static_cast<int64_t>(which) * args.n + index];
}

template <typename T>
void penalise(const SampleArgs<T>& args, int64_t index, float* row) {
  const auto param = [&](Param which) { return param_of(args, which, index); };
  const float repetition = param(Param::kRepetitionPenalty);
  const float frequency = param(Param::kFrequencyPenalty);
  const float presence[2] = {0, param(Param::kPresencePenalty)};
  const int32_t* const ids = args.penalty_ids + index * args.num_penalties;
  const float* const counts = args.penalty_counts + index * args.num_penalties;
  for (int64_t p = 0; p < args.num_penalties; ++p) {
    const auto token = static_cast<uint32_t>(ids[p]);
    if (token >= args.vocab_size) continue;
    const float x = row[token];
    // Compute both instead of branching, because the sign of a logit cannot be predicted.
    const float either[2] = {x * repetition, x / repetition};
    row[token] = either[x > 0] - counts[p] * frequency - presence[counts[p] > 0];
  }
}

// Copies the logits of row `index` to `row`, then applies edits, mask and penalties, in this order.
template <typename T>
void change_row(const SampleArgs<T>& args, const T* logits, int64_t index, float* row) {
  const int64_t vocab_size = args.vocab_size;
  for_each_vector(vocab_size, [&](int64_t i, int64_t count) {
    store(row + i, load(logits + i, count), count);
  });
  for (int64_t e = index * args.num_edits; e < (index + 1) * args.num_edits; ++e) {
    const auto token = static_cast<uint32_t>(args.edit_ids[e]);
    if (token < vocab_size) row[token] += args.edit_values[e];
  }
  const int32_t mask = args.mask_of != nullptr ? args.mask_of[index] : -1;
  if (mask >= 0) {
    const int32_t* const words = args.mask_words + mask * args.num_words;
    for (int64_t start = 0; start < vocab_size; start += 32) {
      const auto word = static_cast<uint32_t>(words[start / 32]);
      const int64_t size = vocab_size - start < 32 ? vocab_size - start : 32;
      float* const own = row + start;
      for (int64_t i = 0; i < size; ++i) own[i] = word >> i & 1 ? own[i] : -kInfinity;
    }
  }
  if (args.num_penalties > 0) penalise(args, index, row);
}

// Samples the token of row `index`. Returns -1 if its logits allow none.
template <typename T, typename Logit>
int64_t sample_row(const SampleArgs<T>& args, const Logit* logits, int64_t index,
                   const SamplingScratch& scratch) {
  const Row<Logit> row(logits, args.vocab_size);
  const float top = block_maxima(row, scratch.maxima);
  if (top - top != 0) return -1;  // top is NaN or infinite
  const auto param = [&](Param which) { return param_of(args, which, index); };
  if (args.params == nullptr || param(Param::kIsGreedy) > 0) {
    return first_largest(row, scratch.maxima, top);
  }
  const float temperature = param(Param::kTemperature), top_p = param(Param::kTopP);
  Weighing weigh = {top, kLog2e / temperature, -kInfinity, 0};
  if (!(weigh.scale < kInfinity)) return first_largest(row, scratch.maxima, top);
  if (param(Param::kMinP) > 0) {
    weigh.floor = top + temperature * __builtin_logf(param(Param::kMinP));
  }
  const auto top_k = static_cast<int64_t>(param(Param::kTopK));
  if (top_k > 0) {
    const float floor = top_k_floor(row, top_k, top_p, weigh, scratch);
    weigh.floor = floor > weigh.floor ? floor : weigh.floor;
  } else if (top_p < 1) {
    weigh.least = nucleus_least(row, top_p, weigh, scratch);
  }
  RowNumbers random = {nullptr, args.num_draws, 0};
  if (args.exponentials != nullptr) {
    random.given = args.exponentials + index * args.num_draws;
  } else {
    random.bits = bits_at(args.keys[index], args.positions[index]);
  }
  return draw(row, random, weigh, scratch);
}

// Computes the first `count` random values of each key and position. out: [num_rows, count].
inline void draw_exponentials(const uint64_t* keys, const int64_t* positions, int64_t num_rows,
                              int64_t count, float* out, int num_threads) {
  parallel_rows(num_rows, count, num_threads, [&](int64_t row) {
    exponentials(bits_at(keys[row], positions[row]), 0, count, out + row * count);
  });
}

// Samples a token for each row. Returns 0; 1 if there is no scratch memory; 2 if a row with random
// sampling has no random values.
template <typename T>
int64_t sample(const SampleArgs<T>& args, int num_threads) {
  constexpr int64_t kMinElements = 32768;
  const int64_t chunk = kMinElements / args.vocab_size + 1;
  int64_t failed = 0;
  const bool has_numbers = args.exponentials != nullptr || args.keys != nullptr;
  for (int64_t i = 0; args.params != nullptr && !has_numbers && i < args.n; ++i) {
    if (!(param_of(args, Param::kIsGreedy, i) > 0)) return 2;
  }
  parallel_for(args.num_rows, chunk, num_threads, [&](int64_t begin, int64_t end, int) {
    SamplingScratch scratch;
    if (!scratch.take(args.vocab_size)) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = args.rows != nullptr ? args.rows[i] : i;
      const T* const logits = args.logits + index * args.row_stride;
      int64_t token;
      if (args.changed != nullptr && args.changed[index]) {
        change_row(args, logits, index, scratch.row);
        token = sample_row(args, scratch.row, index, scratch);
      } else {
        token = sample_row(args, logits, index, scratch);
      }
      args.token_ids[index] = static_cast<int32_t>(token < 0 ? 0 : token);
      args.host_ids[index] = static_cast<int32_t>(token);
    }
  });
  return failed;
}

}  // namespace VLLM_ISA
