// Linear layers: out = x @ weight.T + bias over a packed weight (linear_format.h).
//
// The sum of one output is added in the same order whatever the number of rows and threads, so the
// result of a row does not depend on the other rows of the batch. A stretch is a range of
// consecutive inputs. Float products are summed per stretch, then these sums are added, which also
// keeps rounding errors small.
#pragma once

#include "activation.h"
#include "linear_input.h"
#include "parallel.h"
#include "workspace.h"

namespace VLLM_ISA {

constexpr int64_t kSlabRows = 1024;   // rows that are converted and multiplied at a time
// Rows for which weights are read once, and whose sums remain in the second-level cache. With
// matrix tiles, the rows remain there too, while the panels of weights pass.
constexpr int64_t kBlockRows = kHasTiles ? 384 : 512;
constexpr int64_t kNoMemory = -2;

// Multiplies all rows with one stretch (range of inputs) of a panel. next: the address at which the
// next stretch begins.
template <class Tile>
VLLM_INLINE void run_stretch(const LinearWeight& weight, const typename Tile::Input* x,
                             int64_t x_stride, int64_t rows, const uint32_t* w, int64_t inputs,
                             typename Tile::Acc (*total)[kPanel / kLanes], bool is_first,
                             const uint32_t* next) {
  if constexpr (Tile::kRowUnit > 1) {
    Tile::run(weight, x, x_stride, rows, w, inputs, total, is_first, next);
  } else {
    run_tiles<Tile>(weight, x, x_stride, rows, w, inputs, total, is_first, next);
  }
}

// Computes total[rows][64] for one panel of a ByteTile. For each range of inputs with one scale,
// converts the weights to bf16, multiplies all rows with them, and adds the scaled products to
// total.
template <class Dot, class Code>
void panel_sums(ByteTile<Dot, Code>, const LinearWeight& weight, int64_t panel,
                const typename Dot::Input* x, int64_t x_stride, int64_t rows,
                Vec (*total)[kPanel / kLanes]) {
  constexpr int64_t kRows = 8 * kMaxTileRows;
  alignas(64) uint32_t words[kWidenedInputs / 2 * kPanel];
  alignas(64) Vec sums[kRows][kPanel / kLanes];
  const Code code(weight);
  const uint32_t* const w = weight.panels + panel * vllm_cpu::panel_words(weight);
  const int64_t num_first = rows / ceil_div(rows, kMaxTileRows);
  const int64_t stretch =
      weight.block_inputs < kWidenedInputs ? weight.block_inputs : kWidenedInputs;
  for (int64_t k = 0; k < weight.in_features; k += stretch) {
    const int64_t left = weight.in_features - k, inputs = left < stretch ? left : stretch;
    const int64_t block = k / weight.block_inputs * vllm_cpu::num_panels(weight) + panel;
    const float* const zeros = weight.zeros != nullptr ? weight.zeros + block * kPanel : nullptr;
    const float* const scales = weight.scales + block * kPanel;
    const uint32_t* const from = w + vllm_cpu::panel_words(weight, k);
    const uint32_t* const next = w + vllm_cpu::panel_words(weight, k + inputs);
    for (int64_t i = 0; i < kPanel; i += 64 / sizeof(float)) {  // scales of the next block
      __builtin_prefetch(scales + vllm_cpu::num_panels(weight) * kPanel + i);
    }
    const auto add = [&](auto kernel) {
      kernel(code, x + k, x_stride, from, zeros, scales, inputs, total, k == 0, words);
    };
    with_rows(num_first, [&](auto number) {
      constexpr int kFirst = decltype(number)::value;
      if (rows > kFirst) {
        add(add_widened<Dot, Code, kFirst, true>);
      } else {
        add(add_widened<Dot, Code, kFirst, false>);
      }
    });
    for (int64_t first = num_first; first < rows; first += kRows) {
      const int64_t count = rows - first < kRows ? rows - first : kRows;
      run_tiles<WidenedTile<Dot>>(weight, x + first * x_stride + k, x_stride, count, words, inputs,
                                  sums, true, first == num_first ? next : nullptr);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t v = 0; v < kPanel / kLanes; ++v) {
          Vec& sum = total[first + r][v];
          sum = fma(sums[r][v], load(scales + v * kLanes), k == 0 ? Vec{} : sum);
        }
      }
    }
  }
}

// Computes total[num_panels][rows][64] for consecutive panels. Each stretch of x is multiplied with
// all panels before the next one is read.
template <class Tile>
void panel_sums(Tile, const LinearWeight& weight, int64_t panel, int64_t num_panels,
                const typename Tile::Input* x, int64_t x_stride, int64_t rows,
                typename Tile::Acc (*total)[kPanel / kLanes]) {
  const int64_t words = vllm_cpu::panel_words(weight);
  const uint32_t* const first = weight.panels + panel * words;
  int64_t inputs;
  for (int64_t k = 0; k < weight.in_features; k += inputs) {
    const int64_t left = weight.in_features - k;
    inputs = left < Tile::stretch_inputs(rows) ? left : Tile::stretch_inputs(rows);
    const uint32_t* w = first + vllm_cpu::panel_words(weight, k);
    for (int64_t p = 0; p < num_panels; ++p, w += words) {
      const uint32_t* next = w + words;  // the same stretch of the next panel
      if (p + 1 == num_panels) {
        next = inputs < left ? first + vllm_cpu::panel_words(weight, k + inputs)
                             : first + num_panels * words;
      }
      run_stretch<Tile>(weight, x + Tile::x_offset(weight, k), x_stride, rows, w, inputs,
                        total + p * rows, k == 0, next);
    }
  }
}

template <class Dot, class Code>
void panel_sums(ByteTile<Dot, Code> tile, const LinearWeight& weight, int64_t panel,
                int64_t num_panels, const typename Dot::Input* x, int64_t x_stride, int64_t rows,
                Vec (*total)[kPanel / kLanes]) {
  for (int64_t p = 0; p < num_panels; ++p) {
    panel_sums(tile, weight, panel + p, x, x_stride, rows, total + p * rows);
  }
}

// Computes total[rows][64] for one panel.
template <class Tile>
void panel_sums(const LinearWeight& weight, int64_t panel, const typename Tile::Input* x,
                int64_t x_stride, int64_t rows, typename Tile::Acc (*total)[kPanel / kLanes]) {
  panel_sums(Tile{}, weight, panel, 1, x, x_stride, rows, total);
}

// How a matmul is divided among threads: a unit is `unit_panels` consecutive panels of the weight
// times `block_rows` rows of the input.
struct Shares {
  int64_t num_blocks, block_rows, unit_panels, units_per_turn;
  vllm_cpu::Threads threads;

  // Returns the bytes of memory for the sums of all threads.
  int64_t sum_bytes() const { return threads.useful * unit_panels * block_rows * kPanel * 4; }
};

// Returns the number of threads for which a matmul has enough work. num_words: words of weights of
// one output, summed over all panels; num_products: the same sum, times the number of rows that use
// each word.
inline vllm_cpu::Threads threads_for(int64_t num_words, int64_t num_products, int num_threads) {
  // Estimated cycles: four cache lines of weights per word, each multiplied with every row.
  const int64_t cycles = 8 * num_words + 4 * num_products;
  return {num_threads, 1 + cycles / 10000};  // 3 us for each
}

// Divides a matmul among threads. row_unit: number of rows that are best multiplied together;
// max_panels: the largest number of panels in a unit.
inline Shares share_out(const LinearWeight& weight, int64_t rows, int64_t row_unit, int64_t max_panels,
                        int of_threads) {
  const int64_t panels = vllm_cpu::num_panels(weight);
  const int64_t words = panels * vllm_cpu::panel_words(weight) / kPanel;
  const vllm_cpu::Threads threads = threads_for(words, words * rows, of_threads);
  const int num_threads = threads.useful;
  int64_t num_blocks = ceil_div(rows, kBlockRows);
  while (panels * num_blocks < 4 * num_threads && rows > num_blocks * 8 * kMaxTileRows) {
    ++num_blocks;
  }
  int64_t unit_panels = max_panels;
  while (unit_panels > 1 && panels * num_blocks < 8 * unit_panels * num_threads) unit_panels /= 2;
  const int64_t turns = 8 * int64_t{num_threads};
  const int64_t num_units = ceil_div(panels, unit_panels) * num_blocks;
  const int64_t block_rows = ceil_div(ceil_div(rows, num_blocks), row_unit) * row_unit;
  return {num_blocks, block_rows, unit_panels, ceil_div(num_units, turns), threads};
}

// Returns the largest number of panels in a unit. It is above 1 only with matrix tiles, if x is too
// large for the second-level cache: the tiles would then wait for x again at each panel.
template <class Tile>
int64_t max_panels_of(int64_t rows, int64_t row_bytes) {
  constexpr int64_t kKeptBytes = 384 << 10;
  if (Tile::kRowUnit == 1) return 1;
  return (rows < kBlockRows ? rows : kBlockRows) * row_bytes > kKeptBytes ? 8 : 1;
}

// Multiplies x with a weight, and calls store(panel, first_row, rows, sums) for each part of the
// result. inputs_of(panel): the address of the first row of x for a panel; it is the same for all
// panels of a unit.
template <class Tile, class Inputs, class Store>
void multiply(const LinearWeight& weight, Inputs inputs_of, int64_t x_stride, int64_t rows,
              const Shares& shares, char* scratch, Store store) {
  typedef typename Tile::Acc Totals[kPanel / kLanes];
  constexpr int64_t kStoredRows = 32;  // few enough that the processor keeps the addresses of their pages
  const int64_t panels = vllm_cpu::num_panels(weight), unit_panels = shares.unit_panels;
  const int64_t num_columns = ceil_div(panels, unit_panels);
  const int64_t num_units = num_columns * shares.num_blocks;
  parallel_for(num_units, shares.units_per_turn, shares.threads,
               [&](int64_t begin, int64_t end, int worker) {
                 Totals* const totals = reinterpret_cast<Totals*>(scratch) +
                                        worker * unit_panels * shares.block_rows;
                 for (int64_t unit = begin; unit < end; ++unit) {
                   // Consecutive units share rows of x with matrix tiles, else panels of weights.
                   const int64_t column = kHasTiles ? unit % num_columns : unit / shares.num_blocks;
                   const int64_t block = kHasTiles ? unit / num_columns : unit % shares.num_blocks;
                   const int64_t panel = column * unit_panels, first = block * shares.block_rows;
                   const int64_t left = rows - first;
                   const int64_t count = left < shares.block_rows ? left : shares.block_rows;
                   if (count <= 0) continue;
                   const int64_t num_panels =
                       panels - panel < unit_panels ? panels - panel : unit_panels;
                   panel_sums(Tile{}, weight, panel, num_panels,
                              inputs_of(panel) + first * x_stride, x_stride, count, totals);
                   // Results of the panels are next to each other in a row.
                   for (int64_t r = 0; r < count; r += kStoredRows) {
                     const int64_t some = count - r < kStoredRows ? count - r : kStoredRows;
                     for (int64_t p = 0; p < num_panels; ++p) {
                       store(panel + p, first + r, some, totals + p * count + r);
                     }
                   }
                 }
               });
}

// The operands of one call, and the distances between their rows.
template <typename T>
struct LinearCall {
  const LinearWeight& weight;
  const T* x;
  const T* bias;  // null: none
  T* out;         // [rows, out_features], rows out_stride elements apart
  int64_t rows, x_stride, out_stride;
  Activation activation;
  int num_threads;

  // Writes `count` rows of a panel, from row `first` on. value_of(row, vector, output): a vector of
  // results from output feature `output` on; `row` counts from `first`.
  template <class Value>
  VLLM_INLINE void store_panel(int64_t panel, int64_t first, int64_t count, Value value_of) const {
    constexpr int64_t kRowsAhead = 8;
    const int64_t begin = panel * kPanel;
    const int64_t width =
        weight.out_features - begin < kPanel ? weight.out_features - begin : int64_t{kPanel};
    for (int64_t r = 0; r < count; ++r) {
      T* const to = out + (first + r) * out_stride + begin;
      if constexpr (kHasTiles) {  // they multiply so fast that memory for results is awaited
        for (int64_t i = 0; i < width; i += 64 / int64_t{sizeof(T)}) {
          __builtin_prefetch(to + kRowsAhead * out_stride + i, 1);
        }
      }
      for_each_vector(width, [&](int64_t i, int64_t lanes) {
        Vec value = value_of(r, i / kLanes, begin + i);
        if (bias != nullptr) value = value + load(bias + begin + i, lanes);
        if (activation != Activation::kNone) value = activate(activation, round_to<T>(value));
        store(to + i, value, lanes);
      });
    }
  }
};

// Rounds a size up to 64 bytes, so that the next array in the scratch memory is aligned.
inline int64_t aligned(int64_t bytes) { return ceil_div(bytes, int64_t{64}) * 64; }

template <class Kind, typename T>
int64_t linear_slab(const LinearCall<T>& call) {
  using Input = typename Kind::Input;
  const LinearWeight& weight = call.weight;
  using Tile = typename Kind::Tile;
  const int64_t row_size = Kind::row_size(weight);
  const int64_t max_panels = max_panels_of<Tile>(call.rows, row_size * int64_t{sizeof(Input)});
  const Shares shares = share_out(weight, call.rows, Tile::kRowUnit, max_panels, call.num_threads);
  const int64_t x_bytes =
      Kind::kConverts ? aligned(call.rows * row_size * int64_t{sizeof(Input)}) : 0;
  char* const scratch = vllm_cpu::workspace(x_bytes + shares.sum_bytes());
  if (scratch == nullptr) return kNoMemory;
  const Input* x;
  int64_t x_stride = call.x_stride;
  if constexpr (Kind::kConverts) {
    Input* const converted = reinterpret_cast<Input*>(scratch);
    parallel_rows(call.rows, 2 * weight.in_features, call.num_threads, [&](int64_t row) {
      Kind::convert(weight, call.x + row * call.x_stride, converted + row * row_size);
    });
    x = converted;
    x_stride = row_size;
  } else {
    x = call.x;
  }
  multiply<Tile>(
      weight, [&](int64_t) { return x; }, x_stride, call.rows, shares, scratch + x_bytes,
      [&](int64_t panel, int64_t first, int64_t count, const auto* sums) {
        call.store_panel(panel, first, count, [&](int64_t r, int64_t v, int64_t output) {
          return Kind::value(weight, x + (first + r) * x_stride, sums[r][v], output);
        });
      });
  return 0;
}

// Computes a linear layer and its activation. x: [rows, in_features], rows x_stride elements apart;
// bias: [out_features] or null; out: [rows, out_features], dense. out_features is the sum over
// `weight` and the weights that its `next` leads to. Returns 0, or kNoMemory if there is no scratch
// memory. The result has the same bits as a matmul whose result is stored and then activated.
template <typename T>
int64_t activated_linear(const LinearWeight& weight, const T* x, const T* bias, T* out, int64_t rows,
                         int64_t x_stride, Activation activation, int num_threads) {
  int64_t out_stride = 0, begin = 0;
  for (const LinearWeight* w = &weight; w != nullptr; w = w->next) out_stride += w->out_features;
  for (const LinearWeight* w = &weight; w != nullptr; begin += w->out_features, w = w->next) {
    const T* const part_bias = bias == nullptr ? nullptr : bias + begin;
    for (int64_t first = 0; first < rows; first += kSlabRows) {
      const int64_t count = rows - first < kSlabRows ? rows - first : kSlabRows;
      const LinearCall<T> call = {*w,    x + first * x_stride, part_bias, out + first * out_stride + begin,
                                  count, x_stride,             out_stride, activation, num_threads};
      const int64_t status =
          with_kind<T>(*w, [&](auto kind) { return linear_slab<decltype(kind)>(call); });
      if (status != 0) return status;
    }
  }
  return 0;
}

template <typename T>
int64_t linear(const LinearWeight& weight, const T* x, const T* bias, T* out, int64_t rows,
               int64_t x_stride, int num_threads) {
  return activated_linear(weight, x, bias, out, rows, x_stride, Activation::kNone, num_threads);
}

}  // namespace VLLM_ISA
