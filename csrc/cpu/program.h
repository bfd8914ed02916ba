// Runs a program: the forward pass of a model in one call.
//
// Operations of which a row needs no other row follow each other up to the next attention: a run.
// Attention is shared between the threads by its own kernels. When the weights of a run stay in
// the caches, a thread takes some rows through all of the run, and the threads meet twice per
// attention. Otherwise all threads share every product, so that memory is read once.
//
// Every row is computed by the kernels that serve single operators, in their order: the result
// has the same bits as one call per operator.
#pragma once

#include "activation.h"
#include "attention.h"
#include "attention_prefill.h"
#include "linear_pack.h"
#include "norm.h"
#include "program_args.h"
#include "rotary.h"

namespace VLLM_ISA {

using vllm_cpu::Operation;
using vllm_cpu::OperationKind;
using vllm_cpu::Program;
using vllm_cpu::ProgramLaunch;
using vllm_cpu::ProgramStatus;

constexpr int64_t kCachedRunBytes = 4 << 20;
constexpr int64_t kOwnRows = 64;       // most rows that one thread takes through a run at a time
constexpr int64_t kSharedRows = 1024;  // and that all threads together do
constexpr int64_t kRowBlock = 8;       // rows that an operation takes before the next one does

// A single operation has nothing to take rows through.
inline bool is_cached(const Program& program) {
  return program.largest_run_bytes <= kCachedRunBytes && program.num_operations > 1;
}

// Whether one thread is done before another would pay for being woken: at most some 100 us.
inline bool is_small(const Program& program, const ProgramLaunch& launch) {
  int64_t num_keys = 0;
  for (int64_t b = 0; b < launch.num_requests; ++b) num_keys += launch.seq_lens[b];
  // Cycles, about: as share_out counts them; attention reads a vector of a key and a value.
  return program.weight_bytes / (4 * kPanel) * (8 + 4 * launch.num_tokens) +
             num_keys * program.attended_elements / 16 <
         400000;
}

// Where the buffers of a launch are.
template <typename T>
struct ProgramBuffers {
  T* at[vllm_cpu::kMaxBuffers];
  int64_t bytes;  // of the scratch memory

  // scratch: an address; 0 only measures.
  ProgramBuffers(const Program& program, int64_t num_tokens, int num_threads, uintptr_t scratch)
      : bytes(0) {
    const int64_t shared_rows = num_tokens < kSharedRows ? num_tokens : kSharedRows;
    const int64_t local_rows = is_cached(program) ? kOwnRows * num_threads : shared_rows;
    for (int64_t i = 0; i < program.num_buffers; ++i) {
      const vllm_cpu::ProgramBuffer& buffer = program.buffers[i];
      if (i == program.given || i == program.out) continue;
      at[i] = reinterpret_cast<T*>(scratch + bytes);
      const int64_t rows = buffer.is_local ? local_rows : num_tokens;
      bytes += aligned(rows * buffer.width * int64_t{sizeof(T)});
    }
  }
};

// Bytes for any launch of at most num_tokens.
template <typename T>
int64_t program_scratch_bytes(const Program& program, int64_t num_tokens, int num_threads) {
  return ProgramBuffers<T>(program, num_tokens, num_threads, 0).bytes;
}

template <typename T>
class ProgramPass {
 public:
  ProgramPass(const Program& program, ProgramLaunch& launch, int num_threads)
      : program_(program),
        launch_(launch),
        num_threads_(num_threads),
        buffers_(program, launch.num_tokens, num_threads,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {
    if (program.given >= 0) {
      buffers_.at[program.given] = static_cast<T*>(const_cast<void*>(launch.given));
    }
    buffers_.at[program.out] = static_cast<T*>(launch.out);
  }

  ProgramStatus run() {
    check();
    const Operation* const end = program_.operations + program_.num_operations;
    const Operation* op = program_.operations;
    while (op < end && status_ == ProgramStatus::kDone) {
      if (op->kind == OperationKind::attend) {
        attend(*op++);
        continue;
      }
      const Operation* const first = op;
      while (op < end && op->kind != OperationKind::attend) ++op;
      share_rows(first, op);
    }
    return status_;
  }

 private:
  // Rows [begin, begin + count) of the launch. Local buffers have them from row begin - shift on.
  struct Rows {
    int64_t begin, count, shift;
  };

  // An operand in those rows.
  struct View {
    T* first;
    int64_t stride;
    T* operator[](int64_t row) const { return first + row * stride; }
  };

  View view(int64_t buffer, int64_t offset, const Rows& rows) const {
    const int64_t width = program_.buffers[buffer].width;
    const int64_t row = rows.begin - (program_.buffers[buffer].is_local ? rows.shift : 0);
    return {buffers_.at[buffer] + row * width + offset, width};
  }

  // From any thread; the last one stays.
  void fail(ProgramStatus status, int64_t index) {
    __atomic_store_n(&launch_.bad_index, index, __ATOMIC_RELAXED);
    __atomic_store_n(&status_, status, __ATOMIC_RELAXED);
  }

  void check() {
    const int64_t num_decodes = launch_.num_decodes;
    const int64_t num_slots = program_.num_blocks * program_.block_size;
    if (num_decodes < launch_.num_requests && launch_.query_start_loc[num_decodes] != num_decodes) {
      fail(ProgramStatus::kBadStart, num_decodes);  // rows between would be of no request
    }
    for (int64_t t = launch_.num_tokens - 1; t >= 0; --t) {
      if (num_slots > 0 && launch_.slot_mapping[t] >= num_slots) fail(ProgramStatus::kBadSlot, t);
      if (program_.max_positions > 0 && !is_below(launch_.positions[t], program_.max_positions)) {
        fail(ProgramStatus::kBadPosition, t);
      }
      if (program_.vocab_size > 0 && !is_below(launch_.input_ids[t], program_.vocab_size)) {
        fail(ProgramStatus::kBadToken, t);
      }
    }
  }

  static bool is_below(int64_t index, int64_t end) { return index >= 0 && index < end; }

  // Takes all rows of the launch through a run.
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

  // Takes some rows through a run. Operations between two products share a loop.
  void run_rows(const Operation* op, const Operation* end, const Rows& rows, int num_threads) {
    while (op < end) {
      if (op->kind == OperationKind::linear) {
        multiply_by(*op++, rows, num_threads);
        continue;
      }
      const Operation* const first = op;
      int64_t cost = 0;
      for (; op < end && op->kind != OperationKind::linear; ++op) cost += cost_of(*op);
      // No second thread before each has work for about a microsecond: a team wakes fast.
      parallel_row_ranges(rows.count, 2 * cost, num_threads, [&](int64_t begin, int64_t stop) {
        for (int64_t row = begin; row < stop; row += kRowBlock) {
          const int64_t count = row + kRowBlock < stop ? kRowBlock : stop - row;
          for (const Operation* o = first; o < op; ++o) {
            run_operation(*o, {rows.begin + row, count, rows.shift});
          }
        }
      });
    }
  }

  static int64_t cost_of(const Operation& op) {
    switch (op.kind) {
#define VLLM_COST(name, cost) \
  case OperationKind::name:   \
    return cost * op.num_heads * op.head_size;
      VLLM_ROW_OPERATIONS(VLLM_COST)
#undef VLLM_COST
      default:
        return 0;
    }
  }

  void run_operation(const Operation& op, const Rows& rows) {
    switch (op.kind) {
#define VLLM_RUN(name, cost) \
  case OperationKind::name:  \
    return name(op, rows);
      VLLM_ROW_OPERATIONS(VLLM_RUN)
#undef VLLM_RUN
      default:
        return;
    }
  }

  void multiply_by(const Operation& op, const Rows& rows, int num_threads) {
    const View x = view(op.x, op.x_offset, rows);
    if (linear<T>(*op.packed, x.first, static_cast<const T*>(op.bias),
                  view(op.out, 0, rows).first, rows.count, x.stride, num_threads) != 0) {
      fail(ProgramStatus::kNoMemory, 0);
    }
  }

  static const T* weight_of(const Operation& op) { return static_cast<const T*>(op.weight); }

  // Calls row(x, out) for each of the rows.
  template <typename Body>
  void for_rows(const Operation& op, const Rows& rows, Body body) const {
    const View x = view(op.x, op.x_offset, rows), out = view(op.out, 0, rows);
    for (int64_t i = 0; i < rows.count; ++i) body(x[i], out[i]);
  }

  // The same for rows of two operands: row(x, y, out).
  template <typename Body>
  void for_pairs(const Operation& op, const Rows& rows, Body body) const {
    const View x = view(op.x, op.x_offset, rows), y = view(op.y, op.y_offset, rows);
    const View out = view(op.out, 0, rows);
    for (int64_t i = 0; i < rows.count; ++i) body(x[i], y[i], out[i]);
  }

  void copy_rows(const Operation& op, const Rows& rows, const int64_t* ids, int64_t offset) const {
    const View out = view(op.out, 0, rows);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t id = ids[rows.begin + i] + offset;
      if (op.weight != nullptr) {
        __builtin_memcpy(out[i], weight_of(op) + id * op.head_size, op.head_size * sizeof(T));
      } else {
        unpack_row(*op.packed, id, out[i]);
      }
    }
  }

  void lookup(const Operation& op, const Rows& rows) const {
    copy_rows(op, rows, launch_.input_ids, 0);
  }

  void lookup_position(const Operation& op, const Rows& rows) const {
    copy_rows(op, rows, launch_.positions, op.option);
  }

  // In place.
  void replace(const Operation& op, const Rows& rows) const {
    if (launch_.replaced == nullptr) return;
    const View x = view(op.x, 0, rows);
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t source = launch_.replaced[rows.begin + i];
      const T* const embedding =
          static_cast<const T*>(launch_.embeddings) + source * op.head_size;
      if (source >= 0) __builtin_memcpy(x[i], embedding, op.head_size * sizeof(T));
    }
  }

  void rms_norm(const Operation& op, const Rows& rows) const {
    for_rows(op, rows, [&](const T* x, T* out) {
      for (int64_t at = 0; at < op.num_heads * op.head_size; at += op.head_size) {
        rms_norm_row(x + at, weight_of(op), out + at, op.head_size, op.scalar);
      }
    });
  }

  void add_rms_norm(const Operation& op, const Rows& rows) const {
    for_pairs(op, rows, [&](const T* x, T* residual, T* out) {
      add_rms_norm_row(x, residual, weight_of(op), out, op.head_size, op.scalar);
    });
  }

  void layer_norm(const Operation& op, const Rows& rows) const {
    for_rows(op, rows, [&](const T* x, T* out) {
      layer_norm_row(x, weight_of(op), static_cast<const T*>(op.bias), out, op.head_size,
                     op.scalar);
    });
  }

  void add(const Operation& op, const Rows& rows) const {
    for_pairs(op, rows, [&](const T* x, const T* y, T* out) {
      for_each_vector(op.head_size, [&](int64_t i, int64_t count) {
        store(out + i, load(x + i, count) + load(y + i, count), count);
      });
    });
  }

  void scale(const Operation& op, const Rows& rows) const {
    for_rows(op, rows, [&](const T* x, T* out) {
      for_each_vector(op.head_size, [&](int64_t i, int64_t count) {
        store(out + i, load(x + i, count) * splat(op.scalar), count);
      });
    });
  }

  void relu(const Operation& op, const Rows& rows) const {
    for_rows(op, rows, [&](const T* x, T* out) { relu_row(x, out, op.head_size); });
  }

  void silu_and_mul(const Operation& op, const Rows& rows) const {
    for_rows(op, rows, [&](const T* x, T* out) { silu_and_mul_row(x, out, op.head_size); });
  }

  void gelu_and_mul(const Operation& op, const Rows& rows) const {
    const bool is_tanh = op.option != 0;
    for_rows(op, rows,
             [&](const T* x, T* out) { gelu_and_mul_row(x, out, op.head_size, is_tanh); });
  }

  // In place: out is the buffer of x.
  void rotate(const Operation& op, const Rows& rows) const {
    const View x = view(op.x, op.x_offset, rows);
    const int64_t half = op.option / 2;
    for (int64_t i = 0; i < rows.count; ++i) {
      const float* const cos = op.table + launch_.positions[rows.begin + i] * op.option;
      for (int64_t at = 0; at < op.num_heads * op.head_size; at += op.head_size) {
        rotate_neox(x[i] + at, cos, cos + half, half);
      }
    }
  }

  // Keys x and values y.
  void write_cache(const Operation& op, const Rows& rows) const {
    const View key = view(op.x, op.x_offset, rows), value = view(op.y, op.y_offset, rows);
    const int64_t size = op.num_heads * op.head_size;
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t slot = launch_.slot_mapping[rows.begin + i];
      if (slot < 0) continue;
      __builtin_memcpy(static_cast<T*>(op.key_cache) + slot * size, key[i], size * sizeof(T));
      __builtin_memcpy(static_cast<T*>(op.value_cache) + slot * size, value[i], size * sizeof(T));
    }
  }

  // What the arguments of both attention kernels have in common.
  vllm_cpu::AttentionArgs<T> attention_args(const Operation& op, int64_t first,
                                            int64_t count) const {
    const View query = view(op.x, op.x_offset, {0, 0, 0});
    vllm_cpu::AttentionArgs<T> args = {};
    args.query = query.first;
    args.key_cache = op.key_cache;
    args.value_cache = op.value_cache;
    args.block_tables = launch_.block_tables + first * launch_.table_stride;
    args.seq_lens = launch_.seq_lens + first;
    args.alibi_slopes = op.table;
    args.out = buffers_.at[op.out];
    args.num_requests = count;
    args.num_heads = op.num_heads;
    args.num_kv_heads = op.num_kv_heads;
    args.head_size = op.head_size;
    args.num_blocks = program_.num_blocks;
    args.block_size = program_.block_size;
    args.max_blocks = launch_.max_blocks;
    args.query_stride = query.stride;
    args.table_stride = launch_.table_stride;
    args.scale = op.scalar;
    args.soft_cap = op.soft_cap;
    args.sliding_window = op.sliding_window;
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
      // Its rows are counted from the first token of the launch, those of the decodes included.
      auto args = attention_args(op, num_decodes, num_prefills);
      args.query_start_loc = launch_.query_start_loc + num_decodes;
      args.num_tokens = launch_.num_tokens;
      report(paged_attention_prefill(args, num_threads_), num_decodes);
    }
    if (num_decodes > 0) {
      report(paged_attention_decode(attention_args(op, 0, num_decodes), num_threads_), 0);
    }
  }

  const Program& program_;
  ProgramLaunch& launch_;
  const int num_threads_;
  ProgramBuffers<T> buffers_;
  ProgramStatus status_ = ProgramStatus::kDone;
};

// Writes launch.out. Any other status than kDone: its content is undefined, and so is that of the
// caches in the slots of the launch.
template <typename T>
int64_t run_program(const Program& program, ProgramLaunch& launch, int num_threads) {
  return static_cast<int64_t>(ProgramPass<T>(program, launch, num_threads).run());
}

// The same with a team of threads of its own.
template <typename T>
int64_t program_forward(const Program& program, ProgramLaunch& launch, int num_threads) {
  if (is_small(program, launch)) num_threads = 1;
  int64_t status = 0;
  team(num_threads, [&] { status = run_program<T>(program, launch, num_threads); });
  return status;
}

}  // namespace VLLM_ISA
