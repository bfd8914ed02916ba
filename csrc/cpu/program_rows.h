// The operations of a program of which a row needs no other row, and where rows are.
//
// A new one is a row of VLLM_ROW_OPERATIONS (program_args.h) and a function of its name here.
#pragma once

#include "activation.h"
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

// Where the buffers of a launch are.
template <typename T>
struct ProgramBuffers {
  T* at[vllm_cpu::kMaxBuffers];
  int64_t bytes;  // of the scratch memory

  // local_rows: of local buffers. scratch: an address; 0 only measures.
  ProgramBuffers(const Program& program, int64_t num_tokens, int64_t local_rows, uintptr_t scratch)
      : bytes(0) {
    for (int64_t i = 0; i < program.num_buffers; ++i) {
      const vllm_cpu::ProgramBuffer& buffer = program.buffers[i];
      if (i == program.given || i == program.out) continue;
      at[i] = reinterpret_cast<T*>(scratch + bytes);
      const int64_t rows = buffer.is_local ? local_rows : num_tokens;
      bytes += aligned(rows * buffer.width * int64_t{sizeof(T)});
    }
  }
};

// Rows [begin, begin + count) of a launch. Local buffers have them from row begin - shift on.
struct Rows {
  int64_t begin, count, shift;
};

template <typename T>
class RowOperations {
 public:
  RowOperations(const Program& program, const ProgramLaunch& launch, int64_t local_rows)
      : program_(program),
        launch_(launch),
        buffers_(program, launch.num_tokens, local_rows,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {
    if (program.given >= 0) {
      buffers_.at[program.given] = static_cast<T*>(const_cast<void*>(launch.given));
    }
    buffers_.at[program.out] = static_cast<T*>(launch.out);
  }

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

  void run(const Operation& op, const Rows& rows) const {
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

 private:
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
    const int64_t* const slots = launch_.slot_mapping + op.group * launch_.num_tokens + rows.begin;
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0) continue;
      __builtin_memcpy(static_cast<T*>(op.key_cache) + slot * size, key[i], size * sizeof(T));
      __builtin_memcpy(static_cast<T*>(op.value_cache) + slot * size, value[i], size * sizeof(T));
    }
  }

  const Program& program_;
  const ProgramLaunch& launch_;
  ProgramBuffers<T> buffers_;
};

}  // namespace VLLM_ISA
