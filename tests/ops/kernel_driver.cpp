// Products and attention of one instruction set against sums in double, for processors on which no
// Python of these tests runs: cross-compiled, and run by an emulator.
//
// Writes a line for each comparison; ends with status 1 if one is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "attention_prefill.h"
#include "linear_pack.h"

using namespace VLLM_ISA;

namespace {

int num_wrong = 0;

void report(const char* what, int64_t n, double error, double most) {
  const bool is_right = error <= most;  // not with NaN
  std::printf("%s %s, %ld: error %.2e of at most %.0e\n", is_right ? "right" : "WRONG", what,
              static_cast<long>(n), error, most);
  num_wrong += !is_right;
}

double random_number() { return std::rand() / (RAND_MAX + 1.0) * 2 - 1; }

template <typename T>
std::vector<T> random_numbers(int64_t count) {
  std::vector<T> made(count);
  for (T& value : made) value = to_type<T>(static_cast<float>(random_number()));
  return made;
}

// The largest difference, relative to the largest number that is wanted.
double error_of(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!(std::fabs(got[i] - want[i]) <= difference)) difference = std::fabs(got[i] - want[i]);
    largest = std::fmax(largest, std::fabs(want[i]));
  }
  return difference / largest;
}

template <typename T>
void check_linear(const char* name, WeightFormat format, int64_t block_inputs, double most) {
  constexpr int64_t kOutputs = 130, kInputs = 544, kRows = 40, kPadded = 192;
  std::vector<T> plain = random_numbers<T>(kPadded * kInputs), x = random_numbers<T>(kRows * kInputs);
  std::vector<float> scales(kPadded);
  std::vector<int32_t> sums(kPadded);
  LinearWeight weight = {};
  weight.in_features = kInputs;
  weight.out_features = kOutputs;
  weight.format = format;
  weight.block_inputs = block_inputs;
  weight.scales = scales.data();
  weight.sums = sums.data();
  const int64_t bytes = packed_bytes(weight);
  void* const panels = std::aligned_alloc(64, bytes);
  weight.panels = static_cast<uint32_t*>(panels);
  if (format == WeightFormat::kFloat || format == WeightFormat::kBf16) {
    std::memcpy(panels, plain.data(), bytes);
    pack_panels(static_cast<uint32_t*>(panels), kPadded / kPanel, bytes / 4 / kPadded, 1);
  } else {
    std::memset(panels, 0, bytes);
    quantize_weight<T>(weight, plain.data(), 1);
  }
  std::vector<T> row(kInputs), together(kRows * kOutputs), out(kRows * kOutputs);
  std::vector<double> want(kRows * kOutputs), got(kRows * kOutputs);
  for (int64_t o = 0; o < kOutputs; ++o) {
    unpack_row(weight, o, row.data());
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < kInputs; ++i) sum += double(to_float(x[r * kInputs + i])) * to_float(row[i]);
      want[r * kOutputs + o] = sum;
    }
  }
  linear<T>(weight, x.data(), nullptr, together.data(), kRows, kInputs, 1);
  for (int64_t i = 0; i < kRows * kOutputs; ++i) got[i] = to_float(together[i]);
  report(name, kRows, error_of(got, want), most);
  for (int64_t rows : {1, 2, 5, 7, 17}) {  // the bits of a row do not depend on the others
    linear<T>(weight, x.data(), nullptr, out.data(), rows, kInputs, 1);
    const bool is_same = std::memcmp(out.data(), together.data(), rows * kOutputs * sizeof(T)) == 0;
    if (!is_same) report("the bits of rows alone", rows, 1, 0);
  }
  std::free(panels);
}

// Four tokens of one request behind `context` others, and the last of them as a decode.
template <typename T>
void check_attention(const char* name, int32_t context, double most) {
  constexpr int64_t kHeads = 4, kKvHeads = 2, kSize = 72, kBlock = 16, kQueries = 4;
  const int32_t length = context + kQueries;
  const int64_t num_blocks = (length + kBlock - 1) / kBlock + 1, token = kKvHeads * kSize;
  std::vector<T> query = random_numbers<T>(kQueries * kHeads * kSize);
  std::vector<T> keys = random_numbers<T>(num_blocks * kBlock * token), values = random_numbers<T>(keys.size());
  std::vector<int32_t> table(num_blocks);
  for (int64_t b = 0; b < num_blocks; ++b) table[b] = static_cast<int32_t>(num_blocks - 1 - b);
  std::vector<T> out(query.size());
  std::vector<double> want(query.size()), got(query.size());
  for (int64_t q = 0; q < kQueries; ++q) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t num_keys = context + q + 1, at = (q * kHeads + h) * kSize, g = h / (kHeads / kKvHeads);
      const auto place = [&](int64_t k) {
        return (table[k / kBlock] * kBlock + k % kBlock) * token + g * kSize;
      };
      std::vector<double> weights(num_keys);
      double total = 0;
      for (int64_t k = 0; k < num_keys; ++k) {
        double score = 0;
        for (int64_t i = 0; i < kSize; ++i) score += double(to_float(query[at + i])) * to_float(keys[place(k) + i]);
        total += weights[k] = std::exp(score * 0.1);
      }
      for (int64_t k = 0; k < num_keys; ++k) {
        for (int64_t i = 0; i < kSize; ++i) {
          want[at + i] += weights[k] / total * to_float(values[place(k) + i]);
        }
      }
    }
  }
  const int32_t starts[] = {0, kQueries};
  vllm_cpu::AttentionArgs<T> args = {};
  args.query = query.data();
  args.key_cache = keys.data();
  args.value_cache = values.data();
  args.block_tables = table.data();
  args.seq_lens = &length;
  args.query_start_loc = starts;
  args.out = out.data();
  args.num_requests = 1;
  args.num_tokens = kQueries;
  args.num_heads = kHeads;
  args.num_kv_heads = kKvHeads;
  args.head_size = args.value_size = kSize;
  args.num_blocks = args.max_blocks = args.table_stride = num_blocks;
  args.block_size = kBlock;
  args.query_stride = kHeads * kSize;
  args.scale = 0.1f;
  const auto compare = [&](const char* kind, int64_t first) {
    const std::vector<double> part(want.begin() + first, want.end());
    got.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) got[i] = to_float(out[first + i]);
    std::printf("%s: ", kind);
    report(name, context, error_of(got, part), most);
  };
  if (paged_attention_prefill(args, 1) != -1) report("prefill refused", context, 1, 0);
  compare("prefill", 0);
  const int64_t last = (kQueries - 1) * kHeads * kSize;
  args.query += last;
  args.out += last;
  if (paged_attention_decode(args, 1) != -1) report("decode refused", context, 1, 0);
  compare("decode", last);
}

}  // namespace

int main() {
  check_linear<float>("float weights", WeightFormat::kFloat, 0, 1e-5);
  check_linear<bf16>("bf16 weights", WeightFormat::kBf16, 0, 1e-2);
  check_linear<float>("int8 weights, float inputs", WeightFormat::kInt8, 0, 2e-2);
  check_linear<bf16>("int8 weights, bf16 inputs", WeightFormat::kInt8, 0, 2e-2);
  check_linear<bf16>("int4 weights", WeightFormat::kInt4, 32, 2e-2);
  for (int32_t context : {0, 13, 600}) {
    check_attention<float>("attention of float", context, 1e-5);
    check_attention<bf16>("attention of bf16", context, 2e-2);
  }
  return num_wrong == 0 ? 0 : 1;
}
