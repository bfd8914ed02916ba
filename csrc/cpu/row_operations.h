// The operations of which a row needs no other row.
//
// A new one is a row of VLLM_ROW_OPERATIONS and a function of its name, both in this file. A program
// (program.h) runs it on its buffers, and the operator table on tensors (row_operation, at the end).
// The result may be where x or y is, if it is as wide, so a function reads an element before it
// writes there.
#pragma once

#include "activation.h"
#include "fp8.h"
#include "linear_pack.h"
#include "norm.h"
#include "parallel.h"
#include "program_args.h"
#include "rotary.h"

// The name, and about how many passes over its num_heads * head_size elements take as long.
#define VLLM_ROW_OPERATIONS(X) \
  X(lookup, 10)                \
  X(lookup_position, 10)       \
  X(replace, 1)                \
  X(rms_norm, 2)               \
  X(add_rms_norm, 2)           \
  X(layer_norm, 3)             \
  X(add, 1)                    \
  X(scale, 1)                  \
  X(scale_rows, 1)             \
  X(clip, 1)                   \
  X(route, 10)                 \
  X(relu, 1)                   \
  X(gelu, 5)                   \
  X(silu_and_mul, 4)           \
  X(gelu_and_mul, 5)           \
  X(rotate, 1)                 \
  X(rotate_neighbours, 2)      \
  X(write_cache, 1)            \
  X(round_to_fp8, 2)

namespace vllm_cpu {

#define VLLM_KIND(name, cost) name,
VLLM_ENUM(OperationKind, VLLM_ROW_OPERATIONS(VLLM_KIND) linear, low_rank, attend, experts, all_reduce,
          all_gather);
#undef VLLM_KIND

// Tensors that an operation is called with. x, y, out: [num_rows, num_heads, head_size]; x of a gated
// activation [num_rows, num_heads, 2 * head_size]; y of scale_rows [num_rows]; out of route as said
// there. Rows are x_stride, y_stride and out_stride elements apart, and all else is dense. What an
// operation does not use is 0.
VLLM_STRUCT(RowTensors,
  int64_t kind;  // OperationKind
  void* x;
  void* y;
  void* out;
  const void* weight;  // [head_size]
  const void* bias;    // [head_size]
  int64_t num_rows, num_heads, head_size, x_stride, y_stride, out_stride;
  int64_t option;  // as in Operation
  int64_t top_k;   // the same
  float scalar;    // the same
);

}  // namespace vllm_cpu

namespace VLLM_ISA {

using vllm_cpu::Operation;
using vllm_cpu::OperationKind;
using vllm_cpu::ProgramLaunch;

// Rows of an operand, `stride` elements apart.
template <typename T>
struct View {
  T* first;
  int64_t stride;
  T* operator[](int64_t row) const { return first + row * stride; }
};

// An operation on rows [begin, begin + count) of a launch.
template <typename T>
struct RowCall {
  const Operation& op;
  const ProgramLaunch& launch;
  int64_t begin, count;
  View<T> x, y, out;

  const T* weight() const { return static_cast<const T*>(op.weight); }
  const T* bias() const { return static_cast<const T*>(op.bias); }

  // Calls body(x, out) for each head of each row. A head of x has x_size elements, one of out
  // head_size.
  template <typename Body>
  void for_heads(int64_t x_size, Body body) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t h = 0; h < op.num_heads; ++h) {
        body(x[i] + h * x_size, out[i] + h * op.head_size);
      }
    }
  }

  // The same of two operands with heads like those of out: body(x, y, out).
  template <typename Body>
  void for_pairs(Body body) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t at = 0; at < op.num_heads * op.head_size; at += op.head_size) {
        body(x[i] + at, y[i] + at, out[i] + at);
      }
    }
  }

  // Writes row ids[begin + i] + option of a table to row i of out, or zeros for a row of another rank.
  void copy_rows(const int64_t* ids) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = ids[begin + i] + op.option;
      if (op.num_rows != 0 && (id < 0 || id >= op.num_rows)) {
        __builtin_memset(out[i], 0, op.head_size * sizeof(T));
      } else if (op.weight != nullptr) {
        __builtin_memcpy(out[i], weight() + id * op.head_size, op.head_size * sizeof(T));
      } else {
        unpack_row(*op.packed, id, out[i]);
      }
    }
  }
};

template <typename T>
void lookup(const RowCall<T>& rows) {
  rows.copy_rows(rows.launch.input_ids);
}

template <typename T>
void lookup_position(const RowCall<T>& rows) {
  rows.copy_rows(rows.launch.positions);
}

// In place.
template <typename T>
void replace(const RowCall<T>& rows) {
  if (rows.launch.replaced == nullptr) return;
  const int64_t size = rows.op.head_size;
  for (int64_t i = 0; i < rows.count; ++i) {
    const int64_t source = rows.launch.replaced[rows.begin + i];
    const T* const embedding = static_cast<const T*>(rows.launch.embeddings) + source * size;
    if (source >= 0) __builtin_memcpy(rows.x[i], embedding, size * sizeof(T));
  }
}

template <typename T>
void rms_norm(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    rms_norm_row(x, rows.weight(), out, rows.op.head_size, rows.op.scalar);
  });
}

template <typename T>
void add_rms_norm(const RowCall<T>& rows) {
  rows.for_pairs([&](const T* x, T* residual, T* out) {
    add_rms_norm_row(x, residual, rows.weight(), out, rows.op.head_size, rows.op.scalar);
  });
}

template <typename T>
void layer_norm(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    layer_norm_row(x, rows.weight(), rows.bias(), out, rows.op.head_size, rows.op.scalar);
  });
}

template <typename T>
void add(const RowCall<T>& rows) {
  rows.for_pairs([&](const T* x, const T* y, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, load(x + i, count) + load(y + i, count), count);
    });
  });
}

template <typename T>
void scale(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, load(x + i, count) * splat(rows.op.scalar), count);
    });
  });
}

// x times the number in y, or times its sigmoid.
template <typename T>
void scale_rows(const RowCall<T>& rows) {
  for (int64_t i = 0; i < rows.count; ++i) {
    Vec factor = splat(to_float(rows.y[i][0]));
    if (rows.op.option != 0) factor = round_to<T>(1.0f / (1.0f + exp(-factor)));
    for_each_vector(rows.op.num_heads * rows.op.head_size, [&](int64_t at, int64_t count) {
      store(rows.out[i] + at, load(rows.x[i] + at, count) * factor, count);
    });
  }
}

// Elements up to `scalar` and down to its negative. NaN stays NaN.
template <typename T>
void clip(const RowCall<T>& rows) {
  const Vec limit = splat(rows.op.scalar);
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, max(-limit, min(limit, load(x + i, count))), count);
    });
  });
}

// The choices of a token, as `choice_bytes` says; from one row to the next by the strides.
struct Choices {
  int64_t* ids;
  float* weights;
  int64_t ids_stride, weights_stride;
};

inline Choices choices_at(void* row, int64_t top_k) {
  int64_t* const ids = static_cast<int64_t*>(row);
  const int64_t bytes = vllm_cpu::choice_bytes(top_k);
  return {ids, reinterpret_cast<float*>(ids + top_k), bytes / 8, bytes / 4};
}

// The largest of head_size logits x, at most kMaxTopK, and how much each of them counts. The first of
// equal ones is chosen; NaN is chosen last.
template <typename T>
void route(const RowCall<T>& rows) {
  using vllm_cpu::Routing;
  const int64_t num_experts = rows.op.head_size, k = rows.op.top_k;
  const Routing routing = Routing(rows.op.option);
  const bool is_softmax = routing == Routing::kSoftmax || routing == Routing::kSoftmaxOfChosen;
  for (int64_t i = 0; i < rows.count; ++i) {
    const T* const logits = rows.x[i];
    float keys[vllm_cpu::kMaxTopK + 1], weights[vllm_cpu::kMaxTopK];
    int64_t ids[vllm_cpu::kMaxTopK + 1];
    for (int64_t e = 0, num = 0; e < num_experts; ++e) {
      const float logit = to_float(logits[e]), key = logit == logit ? logit : -__builtin_inff();
      int64_t at = num;
      for (; at > 0 && key > keys[at - 1]; --at) keys[at] = keys[at - 1], ids[at] = ids[at - 1];
      keys[at] = key, ids[at] = e;
      if (num < k) ++num;
    }
    float total = 0;
    for (int64_t j = 0; j < k; ++j) {
      const Vec logit = splat(to_float(logits[ids[j]]));
      weights[j] = is_softmax ? exp(logit - keys[0])[0] : (1.0f / (1.0f + exp(-logit)))[0];
      total += weights[j];
    }
    if (routing == Routing::kSigmoid) total = 1;
    if (routing == Routing::kSoftmax) {
      Vec sum = {};
      for_each_vector(num_experts, [&](int64_t e, int64_t count) {
        const Vec part = exp(load(logits + e, count) - keys[0]);
        for (int64_t lane = 0; lane < count; ++lane) sum[lane] += part[lane];
      });
      total = sum_lanes(sum);
    }
    const Choices to = choices_at(rows.out[i], k);
    for (int64_t j = 0; j < k; ++j) {
      to.ids[j] = ids[j];
      to.weights[j] = rows.op.scalar * weights[j] / total;
    }
  }
}

// NaN stays NaN.
template <typename T>
void relu(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, max(Vec{}, load(x + i, count)), count);
    });
  });
}

template <typename T>
void gelu(const RowCall<T>& rows) {
  const bool is_tanh = rows.op.option != 0;
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      const Vec v = load(x + i, count);
      store(out + i, is_tanh ? gelu_tanh(v) : gelu(v), count);
    });
  });
}

template <typename T>
void silu_and_mul(const RowCall<T>& rows) {
  rows.for_heads(2 * rows.op.head_size,
                 [&](const T* x, T* out) { silu_and_mul_row(x, out, rows.op.head_size); });
}

template <typename T>
void gelu_and_mul(const RowCall<T>& rows) {
  const bool is_tanh = rows.op.option != 0;
  rows.for_heads(2 * rows.op.head_size, [&](const T* x, T* out) {
    gelu_and_mul_row(x, out, rows.op.head_size, is_tanh);
  });
}

// Calls turn(head, cosines, sines, half) for each head of x, in place.
template <typename T, typename Turn>
void rotate_heads(const RowCall<T>& rows, Turn turn) {
  const int64_t rot_dim = rows.op.option, half = rot_dim / 2;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* const cos = rows.op.table + rows.launch.positions[rows.begin + i] * rot_dim;
    for (int64_t h = 0; h < rows.op.num_heads; ++h) {
      turn(rows.x[i] + h * rows.op.head_size, cos, cos + half, half);
    }
  }
}

template <typename T>
void rotate(const RowCall<T>& rows) {
  rotate_heads(rows, rotate_neox<T>);
}

template <typename T>
void rotate_neighbours(const RowCall<T>& rows) {
  rotate_heads(rows, rotate_interleaved<T>);
}

// Keys x and values y.
template <typename T>
void write_cache(const RowCall<T>& rows) {
  const Operation& op = rows.op;
  const int64_t size = op.num_heads * op.head_size;
  const int64_t* const slots =
      rows.launch.slot_mapping + op.group * rows.launch.num_tokens + rows.begin;
  const auto write = [&](auto* keys, auto* values, auto store_row) {
    for (int64_t i = 0; i < rows.count; ++i) {
      if (slots[i] < 0) continue;
      store_row(rows.x[i], op.key_scales, keys + slots[i] * size);
      store_row(rows.y[i], op.value_scales, values + slots[i] * size);
    }
  };
  const auto narrow = [&](auto format) {
    write(static_cast<uint8_t*>(op.key_cache), static_cast<uint8_t*>(op.value_cache),
          [&](const T* from, const float* scales, uint8_t* to) {
            for (int64_t h = 0; h < op.num_heads; ++h) {
              const int64_t at = h * op.head_size;
              narrow_row<decltype(format)>(from + at, op.head_size, scales[h], to + at);
            }
          });
  };
  if (op.cache_type == vllm_cpu::CacheType::kE4m3) return narrow(E4m3{});
  if (op.cache_type == vllm_cpu::CacheType::kE5m2) return narrow(E5m2{});
  write(static_cast<T*>(op.key_cache), static_cast<T*>(op.value_cache),
        [&](const T* from, const float*, T* to) { __builtin_memcpy(to, from, size * sizeof(T)); });
}

// x * scalar as the nearest number of e4m3 that is at most `option`. NaN stays NaN.
template <typename T>
void round_to_fp8(const RowCall<T>& rows) {
  const Vec factor = splat(rows.op.scalar), limit = splat(static_cast<float>(rows.op.option));
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      const Vec v = max(-limit, min(limit, load(x + i, count) * factor));
      store(out + i, widen_fp8<E4m3>(narrow_fp8<E4m3>(v)), count);
    });
  });
}

inline int64_t row_cost(const Operation& op) {
  switch (OperationKind(op.kind)) {
#define VLLM_COST(name, cost) \
  case OperationKind::name:   \
    return cost * op.num_heads * op.head_size;
    VLLM_ROW_OPERATIONS(VLLM_COST)
#undef VLLM_COST
    default:
      return 0;
  }
}

template <typename T>
void run_operation(const RowCall<T>& rows) {
  switch (OperationKind(rows.op.kind)) {
#define VLLM_RUN(name, cost) \
  case OperationKind::name:  \
    return name(rows);
    VLLM_ROW_OPERATIONS(VLLM_RUN)
#undef VLLM_RUN
    default:
      return;
  }
}

// One operation on tensors, of those that need nothing of a launch.
template <typename T>
void row_operation(const vllm_cpu::RowTensors& of, int num_threads) {
  Operation op = {};
  op.kind = of.kind;
  op.weight = of.weight;
  op.bias = of.bias;
  op.num_heads = of.num_heads;
  op.head_size = of.head_size;
  op.option = of.option;
  op.top_k = of.top_k;
  op.scalar = of.scalar;
  const ProgramLaunch launch = {};
  T *const x = static_cast<T*>(of.x), *const y = static_cast<T*>(of.y);
  T* const out = static_cast<T*>(of.out);
  parallel_row_ranges(of.num_rows, row_cost(op), num_threads, [&](int64_t begin, int64_t end) {
    run_operation<T>({op, launch, begin, end - begin, {x + begin * of.x_stride, of.x_stride},
                      {y + begin * of.y_stride, of.y_stride},
                      {out + begin * of.out_stride, of.out_stride}});
  });
}

}  // namespace VLLM_ISA
