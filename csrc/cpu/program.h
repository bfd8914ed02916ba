// Runs a program: the forward pass of a model in one call.
//
// Consecutive operations that work on each row independently form a run. A run ends at the next
// attention, and where the ranks of a group exchange rows; these operations share their work
// between the threads themselves. If the weights of a run fit into the caches, each thread takes
// some rows through the whole run, and the threads synchronise twice per run. Otherwise all threads
// share each matmul, so that memory is read once.
//
// Every row is computed by the kernels that also serve single operators, in the same order: the
// result has the same bits as one call per operator.
#pragma once

#include "attention.h"
#include "attention_prefill.h"
#include "collectives.h"
#include "head_linear.h"
#include "low_rank.h"
#include "moe.h"
#include "program_rows.h"

namespace VLLM_ISA {

constexpr int64_t kCachedRunBytes = 4 << 20;
constexpr int64_t kOwnRows = 64;       // largest number of rows that one thread takes through a run
                                       // at a time
constexpr int64_t kSharedRows = 1024;  // largest number of rows that all threads together take
                                       // through a run at a time
constexpr int64_t kRowBlock = 8;       // number of rows that an operation computes before the next
                                       // operation does

// Whether the weights of each run fit into the caches. A program with a single operation has no
// run.
inline bool is_cached(const Program& program) {
  return program.largest_run_bytes <= kCachedRunBytes && program.num_operations > 1;
}

// Whether one thread would finish before another thread is awake: at most about 100 us.
inline bool is_small(const Program& program, const ProgramLaunch& launch) {
  int64_t num_keys = 0;
  int64_t num_items = 0;
  for (int64_t b = 0; b < launch.num_requests; ++b) num_keys += launch.seq_lens[b];
  for (int64_t t = 0; launch.num_item_slots != nullptr && t < launch.num_tokens; ++t) {
    num_items += launch.num_item_slots[t];
  }
  // Estimated cycles, counted as in share_out; attention reads a vector of a key and of a value.
  return program.weight_bytes / (4 * kPanel) * (8 + 4 * launch.num_tokens) +
             (num_keys * program.attended_elements + num_items * program.item_elements) / 16 <
         400000;
}

inline int64_t local_rows(const Program& program, int64_t num_tokens, int num_threads) {
  if (is_cached(program)) return kOwnRows * num_threads;
  return num_tokens < kSharedRows ? num_tokens : kSharedRows;
}

// Returns the bytes of scratch memory that are enough for any launch of at most num_tokens tokens.
template <typename T>
int64_t program_scratch_bytes(const Program& program, int64_t num_tokens, int num_threads) {
  const int64_t num_local = local_rows(program, num_tokens, num_threads);
  return ProgramBuffers<T>(program, num_tokens, num_local, 0).bytes;
}

template <typename T>
class ProgramPass {
 public:
  ProgramPass(const Program& program, ProgramLaunch& launch, int num_threads)
      : program_(program),
        launch_(launch),
        num_threads_(num_threads),
        rows_(program, launch, local_rows(program, launch.num_tokens, num_threads)) {}

  ProgramStatus run() {
    check();
    const Operation* const end = program_.operations + program_.num_operations;
    const Operation* op = program_.operations;
    while (op < end && status_ == ProgramStatus::kDone) {
      if (takes_all_rows(*op)) {
        share_all_rows(*op++);
        continue;
      }
      const Operation* const first = op;
      while (op < end && !takes_all_rows(*op)) ++op;
      share_rows(first, op);
    }
    return status_;
  }

 private:
  // Whether the operation works on all rows and so does not belong to a run.
  static bool takes_all_rows(const Operation& op) {
    const OperationKind kind = OperationKind(op.kind);
    return kind == OperationKind::attend || kind == OperationKind::attend_items ||
           kind == OperationKind::all_reduce || kind == OperationKind::all_gather;
  }

  void share_all_rows(const Operation& op) {
    const OperationKind kind = OperationKind(op.kind);
    if (kind == OperationKind::attend) return attend(op);
    if (kind == OperationKind::attend_items) return attend_items(op);
    exchange(op);
  }

  // Stores a failure. Any thread may call this; the last failure is kept.
  void fail(ProgramStatus status, int64_t index) {
    __atomic_store_n(&launch_.bad_index, index, __ATOMIC_RELAXED);
    __atomic_store_n(&status_, status, __ATOMIC_RELAXED);
  }

  void check() {
    const int64_t num_decodes = launch_.num_decodes;
    const int64_t num_slots = program_.num_blocks * program_.block_size;
    if (num_decodes < launch_.num_requests && launch_.query_start_loc[num_decodes] != num_decodes) {
      fail(ProgramStatus::kBadStart, num_decodes);  // rows between the decodes and the first
                                                    // prefill would belong to no request
    }
    for (int64_t t = launch_.num_tokens - 1; t >= 0; --t) {
      for (int64_t g = 0; g < program_.num_groups; ++g) {
        const int64_t slot = launch_.slot_mapping[g * launch_.num_tokens + t];
        if (slot >= num_slots) fail(ProgramStatus::kBadSlot, t);
      }
      for (int64_t p = 0; p < launch_.num_positions && program_.max_positions > 0; ++p) {
        const int64_t position = launch_.positions[p * launch_.num_tokens + t];
        if (!is_below(position, program_.max_positions)) fail(ProgramStatus::kBadPosition, t);
      }
      if (program_.num_types > 0 && launch_.token_types != nullptr &&
          !is_below(launch_.token_types[t], program_.num_types)) {
        fail(ProgramStatus::kBadType, t);
      }
      if (program_.vocab_size > 0 && !is_below(launch_.input_ids[t], program_.vocab_size)) {
        fail(ProgramStatus::kBadToken, t);
      }
    }
  }

  static bool is_below(int64_t index, int64_t end) { return index >= 0 && index < end; }

  // Runs the operations [first, end) on all rows of the launch. The threads share the work.
  void share_rows(const Operation* first, const Operation* end) {
    const int64_t rows = launch_.num_tokens;
    if (num_threads_ > 1 && is_cached(program_) && rows >= 2 * kMaxTileRows * num_threads_) {
      const int64_t per_thread = ceil_div(rows, kOwnRows * num_threads_);
      const int64_t num_groups = per_thread * num_threads_;
      parallel_for(num_groups, 1, num_threads_, [&](int64_t group, int64_t, int worker) {
        const int64_t begin = rows * group / num_groups;
        const int64_t count = rows * (group + 1) / num_groups - begin;
        run_rows(first, end, {begin, count, begin - worker * kOwnRows}, 1);
      });
      return;
    }
    const int64_t step = is_cached(program_) ? kOwnRows : kSharedRows;
    for (int64_t begin = 0; begin < rows; begin += step) {
      run_rows(first, end, {begin, begin + step < rows ? step : rows - begin, begin}, num_threads_);
    }
  }

  // Runs the operations [op, end) on some rows. Operations between two matmuls share a loop.
  void run_rows(const Operation* op, const Operation* end, const Rows& rows, int num_threads) {
    while (op < end) {
      if (is_product(*op)) {
        multiply_by(*op++, rows, num_threads);
        continue;
      }
      const Operation* const first = op;
      int64_t cost = 0;
      for (; op < end && !is_product(*op); ++op) cost += row_cost(*op);
      // Another thread is used only if each thread has work for about a microsecond, because a team
      // wakes fast.
      parallel_row_ranges(rows.count, 2 * cost, num_threads, [&](int64_t begin, int64_t stop) {
        for (int64_t row = begin; row < stop; row += kRowBlock) {
          const int64_t count = row + kRowBlock < stop ? kRowBlock : stop - row;
          for (const Operation* o = first; o < op; ++o) {
            rows_.run(*o, {rows.begin + row, count, rows.shift});
          }
        }
      });
    }
  }

  // Whether the operation shares its rows or weights between the threads itself.
  static bool is_product(const Operation& op) {
    const OperationKind kind = OperationKind(op.kind);
    return kind == OperationKind::linear || kind == OperationKind::head_linear ||
           kind == OperationKind::low_rank || kind == OperationKind::experts;
  }

  void multiply_by(const Operation& op, const Rows& rows, int num_threads) {
    if (OperationKind(op.kind) == OperationKind::low_rank) return adapt(op, rows, num_threads);
    const auto x = rows_.view(op.x, op.x_offset, rows);
    const auto out = rows_.view(op.out, op.out_offset, rows);
    const auto status_of = [&]() -> int64_t {
      if (OperationKind(op.kind) == OperationKind::experts) {
        const auto choices = choices_at(rows_.view(op.y, op.y_offset, rows).first, op.top_k);
        const vllm_cpu::MoeArgs<T> args = {op.experts,         x.first,    choices.ids,
                                           choices.weights,    out.first,  rows.count,
                                           op.top_k,           x.stride,   choices.ids_stride,
                                           choices.weights_stride};
        return moe(args, num_threads) == -1 ? 0 : kNoMemory;
      }
      if (OperationKind(op.kind) == OperationKind::head_linear) {
        return head_linear<T>({op.packed, x.first, out.first, rows.count, op.num_heads, op.head_size,
                               x.stride, op.x_head_stride, out.stride, op.out_head_stride},
                              num_threads);
      }
      if (op.packed->format == WeightFormat::kFloat) return multiply_floats(op, x, out, rows, num_threads);
      return activated_linear<T>(*op.packed, x.first, static_cast<const T*>(op.bias), out.first,
                                 rows.count, x.stride, Activation(op.option), num_threads);
    };
    if (status_of() != 0) fail(ProgramStatus::kNoMemory, 0);
  }

  // Multiplies rows of floats, whatever T is.
  static int64_t multiply_floats(const Operation& op, const View<T>& x, const View<T>& out,
                                 const Rows& rows, int num_threads) {
    return activated_linear<float>(
        *op.packed, reinterpret_cast<const float*>(x.first), static_cast<const float*>(op.bias),
        reinterpret_cast<float*>(out.first), rows.count, x.stride * int64_t{sizeof(T)} / 4,
        Activation(op.option), num_threads);
  }

  // Adds to x the results of the adapters of its rows, which read their inputs from y.
  void adapt(const Operation& op, const Rows& rows, int num_threads) {
    if (launch_.adapted == nullptr) return;
    const auto x = rows_.view(op.y, op.y_offset, rows), y = rows_.view(op.x, op.x_offset, rows);
    const int64_t bad = add_low_rank<T>({launch_.adapted, x.first, y.first, rows.begin, rows.count,
                                         x.stride, y.stride, op.first_part, op.num_parts,
                                         op.y_head_stride, op.x_head_stride},
                                        num_threads);
    if (bad == kNoMemory) fail(ProgramStatus::kNoMemory, 0);
    if (bad >= 0) fail(ProgramStatus::kBadAdapter, bad);
  }

  // Returns the arguments that both attention kernels have in common.
  vllm_cpu::AttentionArgs<T> attention_args(const Operation& op, int64_t first,
                                            int64_t count) const {
    const auto query = rows_.view(op.x, op.x_offset, {0, 0, 0});
    vllm_cpu::AttentionArgs<T> args = {};
    args.query = query.first;
    args.key_cache = op.key_cache;
    args.value_cache = op.value_cache;
    args.block_tables = launch_.block_tables + op.group * launch_.group_stride +
                        first * launch_.table_stride;
    args.seq_lens = launch_.seq_lens + first;
    args.alibi_slopes = op.table;
    args.sinks = op.sinks;
    args.out = rows_.view(op.out, 0, {0, 0, 0}).first;
    args.num_requests = count;
    args.num_heads = op.num_heads;
    args.num_kv_heads = op.num_kv_heads;
    args.head_size = op.head_size;
    args.value_size = op.value_size;
    args.num_blocks = program_.num_blocks;
    args.block_size = program_.block_size;
    args.max_blocks = launch_.max_blocks;
    args.query_stride = query.stride;
    args.table_stride = launch_.table_stride;
    args.scale = op.scalar;
    args.soft_cap = op.soft_cap;
    args.key_scales = op.key_scales;
    args.value_scales = op.value_scales;
    args.cache_type = op.cache_type;
    args.sliding_window = op.sliding_window;
    args.chunk_size = op.chunk_size;
    return args;
  }

  void attend(const Operation& op) {
    const int64_t num_decodes = launch_.num_decodes;
    const int64_t num_prefills = launch_.num_requests - num_decodes;
    const auto report = [&](int64_t bad, int64_t first) {
      if (bad == -2) fail(ProgramStatus::kNoMemory, 0);
      if (bad >= 0) fail(ProgramStatus::kBadRequest, first + bad);
    };
    if (num_prefills > 0) {
      // Rows of prefill are counted from the first token of the launch, including the decodes.
      auto args = attention_args(op, num_decodes, num_prefills);
      args.query_start_loc = launch_.query_start_loc + num_decodes;
      args.num_tokens = launch_.num_tokens;
      args.last_keys = launch_.last_keys;
      report(paged_attention_prefill(args, num_threads_), num_decodes);
    }
    if (num_decodes > 0) {
      report(paged_attention_decode(attention_args(op, 0, num_decodes), num_threads_), 0);
    }
  }

  // Computes attention to images and sounds. Each token is treated as a decode: it attends to all
  // of its slots, which are blocks of one key.
  void attend_items(const Operation& op) {
    auto args = attention_args(op, 0, launch_.num_tokens);
    if (launch_.num_item_slots == nullptr) {
      const int64_t size = launch_.num_tokens * op.num_heads * op.value_size;
      __builtin_memset(args.out, 0, size * int64_t{sizeof(T)});
      return;
    }
    args.block_tables = nullptr;
    args.own_tables = launch_.item_slots;
    args.seq_lens = launch_.num_item_slots;
    args.num_blocks = op.num_rows;
    args.block_size = 1;
    args.max_blocks = INT32_MAX;
    const int64_t bad = paged_attention_decode(args, num_threads_);
    if (bad == -2) fail(ProgramStatus::kNoMemory, 0);
    if (bad >= 0) fail(ProgramStatus::kBadItem, bad);
  }

  // Exchanges rows with the other ranks. Rows are dense, because a result has its own buffer.
  void exchange(const Operation& op) {
    const auto x = rows_.view(op.x, 0, {0, 0, 0}), out = rows_.view(op.out, 0, {0, 0, 0});
    const int64_t rows = launch_.num_tokens;
    if (OperationKind(op.kind) == OperationKind::all_reduce) {
      const int64_t status = all_reduce<T>(*op.arena, x.first, rows * x.stride, num_threads_);
      if (status != vllm_cpu::kExchanged) fail(ProgramStatus::kNotReduced, status);
      return;
    }
    const int64_t status = all_gather(*op.arena, reinterpret_cast<const char*>(x.first),
                                      reinterpret_cast<char*>(out.first), rows,
                                      x.stride * int64_t{sizeof(T)});
    if (status != vllm_cpu::kExchanged) fail(ProgramStatus::kNotGathered, status);
  }

  const Program& program_;
  ProgramLaunch& launch_;
  const int num_threads_;
  const ProgramRows<T> rows_;
  ProgramStatus status_ = ProgramStatus::kDone;
};

// Runs the forward pass of a launch, and writes launch.out. With any status except kDone, the
// content of launch.out and of the launch's slots in the caches is undefined.
template <typename T>
int64_t run_program(const Program& program, ProgramLaunch& launch, int num_threads) {
  return static_cast<int64_t>(ProgramPass<T>(program, launch, num_threads).run());
}

// Runs a program with a team of threads of its own.
template <typename T>
int64_t program_forward(const Program& program, ProgramLaunch& launch, int num_threads) {
  if (is_small(program, launch)) num_threads = 1;
  int64_t status = 0;
  team(num_threads, [&] { status = run_program<T>(program, launch, num_threads); });
  return status;
}

}  // namespace VLLM_ISA
