// How the kernels divide their work among threads, as JSON lines: what they count is not computed.
//
// Usage: shares NUM_THREADS [NUM_RANKS]. The ranks divide the weights, and each has so many threads. A
// line has the name, the rows, the bytes of the weight of a rank, and the largest work of a thread
// over the mean of all threads.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention.h"
#include "attention_prefill.h"
#include "moe.h"

using namespace VLLM_ISA;

namespace {

// units: of equal work. range: units that a thread takes at a time.
void print(const char* name, int64_t rows, int64_t units, int64_t range, vllm_cpu::Threads threads,
           int64_t bytes = 0) {
  const int64_t ranges = vllm_cpu::ceil_div(units, range);
  const int64_t most = std::min(units, vllm_cpu::ceil_div(ranges, int64_t{threads.useful}) * range);
  std::printf("{\"name\": \"%s\", \"rows\": %ld, \"bytes\": %ld, \"largest_over_mean\": %.6f}\n", name,
              static_cast<long>(rows), static_cast<long>(bytes),
              static_cast<double>(most) * threads.all / units);
}

void linear_shares(const char* name, int64_t outputs, int64_t inputs, int num_threads,
                   std::initializer_list<int64_t> all_rows = {1, 16, 1024}) {
  vllm_cpu::LinearWeight weight = {};
  weight.format = WeightFormat::kBf16;
  weight.in_features = inputs;
  weight.out_features = outputs;
  const auto print_shares = [&](const std::string& of, int64_t rows, int64_t row_unit,
                                int64_t max_panels) {
    const Shares shares = share_out(weight, rows, row_unit, max_panels, num_threads);
    const int64_t units =
        vllm_cpu::ceil_div(vllm_cpu::num_panels(weight), shares.unit_panels) * shares.num_blocks;
    print(of.c_str(), rows, units, shares.units_per_turn, {num_threads, shares.threads.useful},
          2 * outputs * inputs);
  };
  for (int64_t rows : all_rows) print_shares(name, rows, 1, 1);
  print_shares(std::string(name) + " on tiles", 1024, 32, 8);  // linear_matrix.h, max_panels_of
}

void decode_shares(const char* name, int64_t requests, int length, int64_t kv_heads,
                   int num_threads) {
  const std::vector<int32_t> lengths(requests, length);
  vllm_cpu::AttentionArgs<bf16> args = {};
  args.num_requests = requests;
  args.num_heads = 32;
  args.num_kv_heads = kv_heads;
  args.seq_lens = lengths.data();
  std::vector<int64_t> first(requests + 1);
  const DecodeCall<bf16> call{args};
  const WorkList<bf16> work(call, first.data(), num_threads);
  print(name, requests, work.num_items(), work.range(num_threads), num_threads);
}

}  // namespace

// The linear layers of BERT, for a text of 32 tokens and for 32 texts of 128 tokens.
void encoder_shares(const std::string& name, int64_t hidden, int num_threads, int num_ranks) {
  const auto shares = [&](const char* of, int64_t outputs, int64_t inputs) {
    linear_shares((name + of).c_str(), outputs, inputs, num_threads, {32, 4096});
  };
  shares(" qkv", 3 * hidden / num_ranks, hidden);
  shares(" o", hidden, hidden / num_ranks);
  shares(" up", 4 * hidden / num_ranks, hidden);
  shares(" down", hidden, 4 * hidden / num_ranks);
}

int main(int argc, char** argv) {
  const int num_threads = std::atoi(argv[1]);
  const int num_ranks = argc > 2 ? std::atoi(argv[2]) : 1;
  linear_shares("1b qkv", 3072 / num_ranks, 2048, num_threads);
  linear_shares("1b o", 2048, 2048 / num_ranks, num_threads);
  linear_shares("1b gate_up", 16384 / num_ranks, 2048, num_threads);
  linear_shares("1b down", 2048, 8192 / num_ranks, num_threads);
  linear_shares("1b head", 128256 / num_ranks, 2048, num_threads);
  linear_shares("8b qkv", 6144 / num_ranks, 4096, num_threads);
  linear_shares("8b o", 4096, 4096 / num_ranks, num_threads);
  linear_shares("8b gate_up", 28672 / num_ranks, 4096, num_threads);
  linear_shares("8b down", 4096, 14336 / num_ranks, num_threads);
  linear_shares("8b head", 128256 / num_ranks, 4096, num_threads);
  encoder_shares("minilm", 384, num_threads, num_ranks);
  encoder_shares("bert-base", 768, num_threads, num_ranks);
  encoder_shares("bert-large", 1024, num_threads, num_ranks);
  linear_shares("tiny gate_up", 1024, 256, num_threads);
  decode_shares("1 x 8192 keys", 1, 8192, 8, num_threads);
  decode_shares("1 x 2048 keys", 1, 2048, 8, num_threads);
  decode_shares("16 x 1024 keys", 16, 1024, 8, num_threads);
  decode_shares("latent 1 x 8192 keys", 1, 8192, 1, num_threads);
}
