// Multiplies each head of some tokens with a matrix of its own: the absorbed projections of latent
// attention. All heads form one matmul whose panels read x at different offsets. So all threads
// together read the weights once, in memory order.
#pragma once

#include "head_linear_args.h"
#include "linear.h"

namespace VLLM_ISA {

using vllm_cpu::HeadLinearArgs;

template <class Kind, typename T>
int64_t head_linear_slab(const HeadLinearArgs<T>& args, int num_threads) {
  using Input = typename Kind::Input;
  const LinearWeight& weight = *args.weight;
  const int64_t rows = args.num_tokens, heads = args.num_heads, size = Kind::row_size(weight);
  const Shares shares = share_out(weight, rows, Kind::Tile::kRowUnit, 1, num_threads);
  const int64_t x_bytes =
      Kind::kConverts ? aligned(rows * heads * size * int64_t{sizeof(Input)}) : 0;
  char* const scratch = vllm_cpu::workspace(x_bytes + shares.sum_bytes());
  if (scratch == nullptr) return kNoMemory;
  const Input* x;
  int64_t x_stride = args.x_stride, x_head_stride = args.x_head_stride;
  if constexpr (Kind::kConverts) {
    Input* const converted = reinterpret_cast<Input*>(scratch);
    parallel_rows(rows, 2 * heads * weight.in_features, num_threads, [&](int64_t row) {
      for (int64_t h = 0; h < heads; ++h) {
        Kind::convert(weight, args.x + row * x_stride + h * x_head_stride,
                      converted + (row * heads + h) * size);
      }
    });
    x = converted;
    x_stride = heads * size;
    x_head_stride = size;
  } else {
    x = args.x;
  }
  const int64_t panels_of_head = ceil_div(args.out_features, int64_t{kPanel});
  const auto inputs_of = [&](int64_t panel) { return x + panel / panels_of_head * x_head_stride; };
  multiply<typename Kind::Tile>(
      weight, inputs_of, x_stride, rows, shares, scratch + x_bytes,
      [&](int64_t panel, int64_t first, int64_t count, const auto* sums) {
        const int64_t head = panel / panels_of_head, begin = panel % panels_of_head * kPanel;
        const int64_t left = args.out_features - begin;
        for (int64_t r = 0; r < count; ++r) {
          const Input* const row = inputs_of(panel) + (first + r) * x_stride;
          T* const to = args.out + (first + r) * args.out_stride + head * args.out_head_stride + begin;
          for_each_vector(left < kPanel ? left : int64_t{kPanel}, [&](int64_t i, int64_t lanes) {
            store(to + i, Kind::value(weight, row, sums[r][i / kLanes], panel * kPanel + i), lanes);
          });
        }
      });
  return 0;
}

// Multiplies up to kSlabRows tokens at a time. Returns 0, or kNoMemory if there is no scratch
// memory.
template <typename T>
int64_t head_linear(const HeadLinearArgs<T>& args, int num_threads) {
  HeadLinearArgs<T> slab = args;
  for (int64_t first = 0; first < args.num_tokens; first += kSlabRows) {
    const int64_t left = args.num_tokens - first;
    slab.num_tokens = left < kSlabRows ? left : kSlabRows;
    slab.x = args.x + first * args.x_stride;
    slab.out = args.out + first * args.out_stride;
    const int64_t status = with_kind<T>(*args.weight, [&](auto kind) {
      return head_linear_slab<decltype(kind)>(slab, num_threads);
    });
    if (status != 0) return status;
  }
  return 0;
}

}  // namespace VLLM_ISA
