// Computes log-probabilities of given tokens and of the most likely tokens: the same as
// vllm/sample/logprobs.py, row by row, in two passes over the logits and without temporary tensors.
#pragma once

#include "sampling.h"

namespace VLLM_ISA {

using vllm_cpu::LogprobArgs;

struct RowSums {
  double likelihoods;  // sum of exp(logit - top)
  int64_t num_above;   // number of logits above the given one
};

template <typename T>
RowSums sum_row(const Row<T>& row, float top, float given) {
  const Weighing weigh = {top, kLog2e, -kInfinity, 0};
  Mass mass;
  Ints above = {};
  float weights[kVocabBlock];
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    const T* const logits = row.block(b);
    add_block(logits, weigh, weights, mass);
    for (int64_t i = 0; i < kVocabBlock; i += kLanes) above -= load(logits + i) > splat(given);
  }
  RowSums sums = {mass.total(), 0};
  for (int lane = 0; lane < kLanes; ++lane) sums.num_above += above[lane];
  return sums;
}

// Writes the ranks of at least the k most likely tokens to scratch.heap, 1 <= k <= vocabulary;
// returns their number.
template <typename T>
int64_t rank_largest(const Row<T>& row, int64_t k, const SamplingScratch& scratch) {
  const float bound = bound_of_largest(row, k, scratch);
  int64_t n = 0;
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    if (scratch.maxima[b] < bound) continue;
    const int64_t end = (b + 1) * kVocabBlock;
    for (int64_t t = b * kVocabBlock; t < (end < row.vocab_size ? end : row.vocab_size); ++t) {
      const float logit = row.at(t);
      scratch.heap[n] = rank_of(logit, static_cast<uint32_t>(t));
      n += logit >= bound;
    }
  }
  return n;
}

template <typename T>
void logprobs_of_row(const LogprobArgs<T>& args, const T* logits, int32_t token, int64_t i,
                     const SamplingScratch& scratch) {
  const Row<T> row(logits, args.vocab_size);
  const int64_t k = args.num_likeliest;
  int32_t* const ids = args.out_ids + i * (1 + k);
  float* const logprobs = args.out_logprobs + i * (1 + k);
  const float top = block_maxima(row, scratch.maxima);
  const float given = row.at(token);
  const RowSums sums = sum_row(row, top, given);
  const bool is_finite = top - top == 0;
  const float log_total =
      is_finite ? top + __builtin_logf(static_cast<float>(sums.likelihoods)) : __builtin_nanf("");
  ids[0] = token;
  logprobs[0] = given - log_total;
  args.out_ranks[i] = static_cast<int32_t>(1 + sums.num_above);
  int64_t n = is_finite && k > 0 ? rank_largest(row, k, scratch) : 0;
  make_heap(scratch.heap, n);
  for (int64_t j = 1; j <= k; ++j) {
    if (!is_finite) {  // any tokens: the row is reported as an error
      ids[j] = static_cast<int32_t>(j - 1);
      logprobs[j] = log_total;
      continue;
    }
    const uint64_t rank = pop_heap(scratch.heap, n--);
    ids[j] = static_cast<int32_t>(rank_index(rank));
    logprobs[j] = rank_value(rank) - log_total;
  }
}

// Computes the log-probabilities of all rows. Returns -1; a row whose given token is not in the
// vocabulary; or -2 if there is no scratch memory.
template <typename T>
int64_t gather_logprobs(const LogprobArgs<T>& args, int num_threads) {
  const auto row_of = [&](int64_t i) { return args.rows != nullptr ? args.rows[i] : i; };
  for (int64_t i = 0; i < args.num_rows; ++i) {
    if (static_cast<uint32_t>(args.token_ids[row_of(i)]) >= args.vocab_size) return row_of(i);
  }
  constexpr int64_t kMinElements = 32768;
  int64_t status = -1;
  parallel_for(args.num_rows, kMinElements / args.vocab_size + 1, num_threads,
               [&](int64_t begin, int64_t end, int) {
                 SamplingScratch scratch;
                 if (!scratch.take(args.vocab_size)) {
                   __atomic_store_n(&status, -2, __ATOMIC_RELAXED);
                   return;
                 }
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = row_of(i);
                   logprobs_of_row(args, args.logits + row * args.row_stride, args.token_ids[row],
                                   i, scratch);
                 }
               });
  return status;
}

}  // namespace VLLM_ISA
