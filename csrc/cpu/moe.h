// A mixture of experts: out = sum over a token's choices of weight * down(act(gate x) * up x).
//
// Pairs of a token and a choice are sorted by expert, so that each expert multiplies all of its
// rows at once. Only x is copied, never a weight. A unit of work is one panel of an expert with a
// block of its rows, so even a few tokens on many experts make enough units for all threads. The
// result of a row does not depend on the rest of the batch, because the choices of a token are
// added up in the token's own order. Choices of experts that are on other ranks are left out.
#pragma once

#include "activation.h"
#include "linear.h"
#include "moe_args.h"

namespace VLLM_ISA {

using vllm_cpu::ExpertActivation;
using vllm_cpu::Experts;
using vllm_cpu::MoeArgs;

constexpr int64_t kSlabPairs = 4096;  // number of pairs that are sorted and multiplied at a time

// Rows of one expert, at most kBlockRows.
struct ExpertRows {
  int32_t expert, first, count;
};

template <typename T>
struct MoeSlab {
  const MoeArgs<T>& args;
  const Experts& experts;
  int64_t first_token, num_tokens;
  int num_threads;

  // Arrays in the scratch memory; `place` sets the pointers.
  int64_t* num_blocks = nullptr;
  int32_t* starts = nullptr;  // [num_experts + 1]: index of the first row of each expert
  int32_t* row_of = nullptr;  // [num_tokens * top_k]: index of the row of a pair; -1: on another
                              // rank
  ExpertRows* blocks = nullptr;
  T* hidden = nullptr;   // [pairs, I]
  T* results = nullptr;  // [pairs, H]
  char* rows = nullptr;  // [pairs]: x, and later hidden, in the form that the tiles read
  char* sums = nullptr;  // two times sum_rows() rows for each thread

  int64_t num_pairs() const { return num_tokens * args.top_k; }
  const LinearWeight& gate(int64_t e) const { return *experts.gate[e]; }
  const LinearWeight& up(int64_t e) const { return *experts.up[e]; }
  const LinearWeight& down(int64_t e) const { return *experts.down[e]; }
  // Returns the top_k expert ids of a token of this part of the batch.
  const int64_t* ids(int64_t token) const {
    return args.ids + (first_token + token) * args.ids_stride;
  }
  const float* weights(int64_t token) const {
    return args.weights + (first_token + token) * args.weights_stride;
  }

  // Returns the index of the expert that a token has chosen; -1: it is on another rank.
  int64_t expert(int64_t token, int64_t choice) const {
    const int64_t e = ids(token)[choice] - experts.first_id;
    return e >= 0 && e < experts.num_experts ? e : -1;
  }

  int64_t sum_rows() const { return num_pairs() < kBlockRows ? num_pairs() : kBlockRows; }

  // Lays out the arrays from the address `memory` on, and returns their size in bytes; with 0, only
  // the size is valid. row_bytes: size of a row in the form that the tiles read.
  int64_t place(uintptr_t memory, int64_t row_bytes) {
    int64_t used = 0;
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<decltype(&array[0])>(memory + used);
      used += aligned(count * int64_t{sizeof(array[0])});
    };
    const int64_t pairs = num_pairs();
    take(num_blocks, 1);
    take(starts, experts.num_experts + 1);
    take(row_of, pairs);
    take(blocks, experts.num_experts + pairs / kBlockRows + 1);
    take(hidden, pairs * down(0).in_features);
    take(results, pairs * down(0).out_features);
    take(rows, pairs * row_bytes);
    take(sums, num_threads * 2 * sum_rows() * kPanel * 4);
    return used;
  }

  // Sorts the pairs by expert.
  void sort_pairs() {
    const int64_t num_experts = experts.num_experts, k = args.top_k;
    __builtin_memset(starts, 0, (num_experts + 1) * sizeof *starts);
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t e = expert(token, i);
        if (e >= 0) ++starts[e + 1];
      }
    }
    int64_t used = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      starts[e + 1] += starts[e];
      for (int32_t first = starts[e]; first < starts[e + 1]; first += kBlockRows) {
        const int32_t left = starts[e + 1] - first;
        blocks[used++] = {static_cast<int32_t>(e), first,
                          left < kBlockRows ? left : static_cast<int32_t>(kBlockRows)};
      }
    }
    *num_blocks = used;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t e = expert(token, i);
        row_of[token * k + i] = e < 0 ? -1 : starts[e]++;
      }
    }
  }

  // Calls body(rows of an expert, panel, sums of this thread) for all panels of the experts that
  // have rows. `weight` is the weight of any expert, and `num_weights` the number of weights that a
  // unit multiplies.
  template <class Body>
  void for_each_unit(const LinearWeight& weight, int64_t num_weights, Body body) const {
    const int64_t panels = vllm_cpu::num_panels(weight), units = *num_blocks * panels;
    const int64_t words = num_weights * vllm_cpu::panel_words(weight) / kPanel * panels;
    const vllm_cpu::Threads threads =
        threads_for(words * *num_blocks, words * num_pairs(), num_threads);
    parallel_for(units, ceil_div(units, 8 * int64_t{threads.useful}), threads,
                 [&](int64_t begin, int64_t end, int worker) {
                   char* const mine = sums + worker * 2 * sum_rows() * kPanel * 4;
                   for (int64_t unit = begin; unit < end; ++unit) {
                     body(blocks[unit / panels], unit % panels, mine);
                   }
                 });
  }
};

// Copies x of each token to the rows of its chosen experts, in the form that the tiles read. If the
// weights of the choices scale the inputs, the scaled row is computed in the memory that the result
// uses later.
template <class Kind, typename T>
void gather_rows(const MoeSlab<T>& slab) {
  using Input = typename Kind::Input;
  const MoeArgs<T>& args = slab.args;
  const int64_t size = Kind::row_size(slab.gate(0)), k = args.top_k;
  Input* const rows = reinterpret_cast<Input*>(slab.rows);
  parallel_rows(slab.num_tokens, (1 + k) * size, slab.num_threads, [&](int64_t token) {
    const T* const x = args.x + (slab.first_token + token) * args.x_stride;
    const int32_t* const row_of = slab.row_of + token * k;
    const Input* known = nullptr;  // the same row, if experts can share it
    for (int64_t i = 0; i < k; ++i) {
      if (row_of[i] < 0) continue;
      const LinearWeight& weight = slab.gate(slab.expert(token, i));
      Input* const row = rows + row_of[i] * size;
      if (slab.experts.scales_inputs) {
        T* const scaled = slab.results + row_of[i] * weight.in_features;
        const Vec factor = splat(slab.weights(token)[i]);
        for_each_vector(weight.in_features, [&](int64_t at, int64_t count) {
          store(scaled + at, load(x + at, count) * factor, count);
        });
        Kind::convert(weight, scaled, row);
      } else if (known == nullptr || slab.experts.has_orders) {  // each expert needs its own row
        Kind::convert(weight, x, row);
        known = row;
      } else {
        __builtin_memcpy(row, known, size * sizeof(Input));
      }
    }
  });
}

// Applies the activation to `size` gates, if there are gates, and as many ups after them.
template <typename T>
void activate(const Experts& experts, const T* both, T* out, int64_t size) {
  switch (experts.activation) {
    case ExpertActivation::kSilu:
      return silu_and_mul_row(both, out, size);
    case ExpertActivation::kGeluTanh:
      return gelu_and_mul_row(both, out, size, true);
    case ExpertActivation::kClampedSwiglu:
      return clamped_swiglu_row(both, out, size, experts.alpha, experts.limit);
    case ExpertActivation::kSquaredRelu:
      return squared_relu_row(both, out, size);
  }
}

// Returns the biases of expert `e` from feature `begin` on, or null if there are none. Each expert
// has `width` biases.
template <typename T>
const T* bias_at(const void* biases, int64_t e, int64_t width, int64_t begin) {
  return biases == nullptr ? nullptr : static_cast<const T*>(biases) + e * width + begin;
}

// Adds the bias, if there is one, to a vector of results.
template <typename T>
VLLM_INLINE Vec with_bias(Vec value, const T* bias, int64_t i, int64_t count) {
  return bias == nullptr ? value : value + load(bias + i, count);
}

// hidden = act(gate x) * up x, or act(up x), with the same rounding as the separate operators.
template <class Kind, typename T>
void expand(const MoeSlab<T>& slab) {
  using Tile = typename Kind::Tile;
  typedef typename Tile::Acc Totals[kPanel / kLanes];
  const int64_t size = Kind::row_size(slab.gate(0)), width = slab.gate(0).out_features;
  const typename Kind::Input* const rows = reinterpret_cast<typename Kind::Input*>(slab.rows);
  const bool has_gate = slab.experts.activation != ExpertActivation::kSquaredRelu;
  slab.for_each_unit(slab.up(0), 1 + has_gate, [&](ExpertRows of, int64_t panel, char* sums) {
    const LinearWeight &gate = slab.gate(of.expert), &up = slab.up(of.expert);
    Totals* const gates = reinterpret_cast<Totals*>(sums);
    Totals* const ups = gates + of.count;
    const auto* const x = rows + of.first * size;
    if (has_gate) panel_sums<Tile>(gate, panel, x, size, of.count, gates);
    panel_sums<Tile>(up, panel, x, size, of.count, ups);
    const int64_t begin = panel * kPanel;
    const int64_t columns = width - begin < kPanel ? width - begin : int64_t{kPanel};
    const void* const biases = slab.experts.gate_up_bias;
    const T* const gate_bias = bias_at<T>(biases, of.expert, 2 * width, begin);
    const T* const up_bias = bias_at<T>(biases, of.expert, 2 * width, width + begin);
    for (int64_t r = 0; r < of.count; ++r) {
      T both[2 * kPanel];  // gates, if there are any, then ups; `columns` each
      T* const behind = both + has_gate * columns;
      for_each_vector(columns, [&](int64_t i, int64_t count) {
        const auto* const row = x + r * size;
        if (has_gate) {
          const Vec g = Kind::value(gate, row, gates[r][i / kLanes], begin + i);
          store(both + i, with_bias(g, gate_bias, i, count), count);
        }
        const Vec u = Kind::value(up, row, ups[r][i / kLanes], begin + i);
        store(behind + i, with_bias(u, up_bias, i, count), count);
      });
      activate(slab.experts, both, slab.hidden + (of.first + r) * width + begin, columns);
    }
  });
}

// Returns the rows of `hidden` in the form that the tiles of `down` read: converted, in slab.rows;
// or, if the tiles read T, `hidden` itself.
template <class Kind, typename T>
const typename Kind::Input* convert_hidden(const MoeSlab<T>& slab) {
  using Input = typename Kind::Input;
  if constexpr (Kind::kConverts) {
    Input* const rows = reinterpret_cast<Input*>(slab.rows);
    const int64_t size = Kind::row_size(slab.down(0)), width = slab.down(0).in_features;
    const int64_t blocks = *slab.num_blocks;
    const int64_t elements = 2 * width * ceil_div(slab.num_pairs(), blocks);
    parallel_rows(blocks, elements, slab.num_threads, [&](int64_t block) {
      const ExpertRows of = slab.blocks[block];
      for (int64_t r = of.first; r < of.first + of.count; ++r) {
        Kind::convert(slab.down(of.expert), slab.hidden + r * width, rows + r * size);
      }
    });
    return rows;
  } else {
    return slab.hidden;
  }
}

// results = the down projection of the rows that `convert_hidden` returns.
template <class Kind, typename T>
void reduce(const MoeSlab<T>& slab) {
  using Tile = typename Kind::Tile;
  typedef typename Tile::Acc Totals[kPanel / kLanes];
  const auto* const rows = convert_hidden<Kind>(slab);
  const int64_t size = Kind::kConverts ? Kind::row_size(slab.down(0)) : slab.down(0).in_features;
  const int64_t width = slab.down(0).out_features;
  slab.for_each_unit(slab.down(0), 1, [&](ExpertRows of, int64_t panel, char* sums) {
    const LinearWeight& down = slab.down(of.expert);
    Totals* const totals = reinterpret_cast<Totals*>(sums);
    const auto* const x = rows + of.first * size;
    panel_sums<Tile>(down, panel, x, size, of.count, totals);
    const int64_t begin = panel * kPanel;
    const int64_t columns = width - begin < kPanel ? width - begin : int64_t{kPanel};
    const T* const bias = bias_at<T>(slab.experts.down_bias, of.expert, width, begin);
    for (int64_t r = 0; r < of.count; ++r) {
      T* const to = slab.results + (of.first + r) * width + begin;
      for_each_vector(columns, [&](int64_t i, int64_t count) {
        const Vec value = Kind::value(down, x + r * size, totals[r][i / kLanes], begin + i);
        store(to + i, with_bias(value, bias, i, count), count);
      });
    }
  });
}

// out = the results of a token's choices, weighted and added up.
template <typename T>
void combine(const MoeSlab<T>& slab) {
  const MoeArgs<T>& args = slab.args;
  const int64_t width = slab.down(0).out_features, k = args.top_k;
  parallel_rows(slab.num_tokens, k * width, slab.num_threads, [&](int64_t token) {
    const float* const weights = slab.weights(token);
    T* const out = args.out + (slab.first_token + token) * width;
    for_each_vector(width, [&](int64_t i, int64_t count) {
      Vec sum = {};
      for (int64_t j = 0; j < k; ++j) {
        if (slab.row_of[token * k + j] < 0) continue;
        const T* const result = slab.results + slab.row_of[token * k + j] * width;
        const Vec weight = splat(slab.experts.scales_inputs ? 1.0f : weights[j]);
        sum = fma(weight, load(result + i, count), sum);
      }
      store(out + i, sum, count);
    });
  });
}

template <typename T>
int64_t moe_slab(MoeSlab<T> slab) {
  const auto row_bytes_of = [](const LinearWeight& weight) {
    return with_kind<T>(weight, [&](auto kind) {
      using Kind = decltype(kind);
      return Kind::row_size(weight) * int64_t{sizeof(typename Kind::Input)};
    });
  };
  const int64_t bytes = row_bytes_of(slab.gate(0)), down_bytes = row_bytes_of(slab.down(0));
  const int64_t row_bytes = bytes > down_bytes ? bytes : down_bytes;
  char* const scratch = vllm_cpu::workspace(slab.place(0, row_bytes));
  if (scratch == nullptr) return kNoMemory;
  slab.place(reinterpret_cast<uintptr_t>(scratch), row_bytes);
  slab.sort_pairs();
  if (*slab.num_blocks == 0) {  // no expert of this rank was chosen
    combine(slab);
    return -1;
  }
  with_kind<T>(slab.gate(0), [&](auto kind) -> int64_t {
    gather_rows<decltype(kind)>(slab);
    expand<decltype(kind)>(slab);
    return 0;
  });
  with_kind<T>(slab.down(0), [&](auto kind) -> int64_t {
    reduce<decltype(kind)>(slab);
    return 0;
  });
  combine(slab);
  return -1;
}

// Computes a mixture of experts. Returns -1; the first i whose id is out of range (nothing is
// written then); or kNoMemory.
template <typename T>
int64_t moe(const MoeArgs<T>& args, int num_threads) {
  const int64_t num_ids = args.experts->has_others ? 0 : args.num_tokens * args.top_k;
  for (int64_t i = 0; i < num_ids; ++i) {  // first_id is 0
    const int64_t id = args.ids[i / args.top_k * args.ids_stride + i % args.top_k];
    if (id < 0 || id >= args.experts->num_experts) return i;
  }
  const int64_t step = kSlabPairs > args.top_k ? kSlabPairs / args.top_k : 1;
  for (int64_t first = 0; first < args.num_tokens; first += step) {
    const int64_t left = args.num_tokens - first;
    const MoeSlab<T> slab = {args, *args.experts, first, left < step ? left : step, num_threads};
    const int64_t status = moe_slab(slab);
    if (status != -1) return status;
  }
  return -1;
}

}  // namespace VLLM_ISA
