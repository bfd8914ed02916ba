// Operations that work on each row (the elements of one token) independently.
//
// To add one, add an entry to VLLM_ROW_OPERATIONS and a function with the same name, both in this
// file. A program (program.h) runs it on its buffers, and the operator table on tensors
// (row_operation, at the end). The result may overwrite x or y if it has the same width, so a
// function reads an element before it writes to the same position.
#pragma once

#include "activation.h"
#include "expert_choice.h"
#include "fp8.h"
#include "linear_pack.h"
#include "norm.h"
#include "parallel.h"
#include "program_args.h"
#include "rotary.h"

// The name, and the approximate cost in passes over num_heads * head_size elements.
#define VLLM_ROW_OPERATIONS(X) \
  X(lookup, 10)                \
  X(lookup_position, 10)       \
  X(lookup_type, 10)           \
  X(replace, 1)                \
  X(clear_unseeing, 1)         \
  X(rms_norm, 2)               \
  X(add_rms_norm, 2)           \
  X(layer_norm, 3)             \
  X(add, 1)                    \
  X(scale, 1)                  \
  X(scale_rows, 1)             \
  X(clip, 1)                   \
  X(soft_cap, 6)               \
  X(add_weights, 1)            \
  X(route, 10)                 \
  X(widen, 1)                  \
  X(copy, 1)                   \
  X(relu, 1)                   \
  X(gelu, 5)                   \
  X(xielu, 5)                  \
  X(silu_and_mul, 4)           \
  X(gelu_and_mul, 5)           \
  X(rotate, 1)                 \
  X(rotate_neighbours, 2)      \
  X(write_cache, 1)            \
  X(round_to_fp8, 2)

namespace vllm_cpu {

#define VLLM_KIND(name, cost) name,
VLLM_ENUM(OperationKind, VLLM_ROW_OPERATIONS(VLLM_KIND) linear, head_linear, low_rank, attend, attend_items, experts,
          all_reduce, all_gather);
#undef VLLM_KIND

// The tensors of an operation. x, y, out: [num_rows, num_heads, head_size]; x of a gated activation
// [num_rows, num_heads, 2 * head_size]; y of scale_rows [num_rows]; out of route: see choice_bytes
// (moe_args.h). Rows are x_stride, y_stride and out_stride elements apart; everything else is
// dense. Fields that an operation does not use are 0.
VLLM_STRUCT(RowTensors,
  int64_t kind;  // OperationKind
  void* x;
  void* y;
  void* out;
  const void* weight;  // [head_size]
  const void* bias;    // [head_size]
  const float* table;   // as in Operation
  const float* scales;  // as in Operation
  int64_t num_rows, num_heads, head_size, x_stride, y_stride, out_stride;
  int64_t option;  // as in Operation
  int64_t top_k;   // as in Operation
  int64_t num_groups, top_groups;  // as in Operation
  float scalar, second_scalar;  // as in Operation
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

  // Calls body(x, out) for each head of each row. A head of x has x_size elements, a head of out
  // has head_size.
  template <typename Body>
  void for_heads(int64_t x_size, Body body) const {
    const int64_t x_stride = op.x_head_stride != 0 ? op.x_head_stride : x_size;
    const int64_t out_stride = op.out_head_stride != 0 ? op.out_head_stride : op.head_size;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t h = 0; h < op.num_heads; ++h) body(x[i] + h * x_stride, out[i] + h * out_stride);
    }
  }

  // Calls body(x, y, out) for each head of each row; the heads of x, y and out have the same size.
  template <typename Body>
  void for_pairs(Body body) const {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t at = 0; at < op.num_heads * op.head_size; at += op.head_size) {
        body(x[i] + at, y[i] + at, out[i] + at);
      }
    }
  }

  // Writes entry ids[begin + i] + option of a table to row i of out, or zeros if the entry is on
  // another rank. ids: null if all ids are 0.
  void copy_rows(const int64_t* ids) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = (ids == nullptr ? 0 : ids[begin + i]) + op.option;
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

template <typename T>
void lookup_type(const RowCall<T>& rows) {
  rows.copy_rows(rows.launch.token_types);
}

// Writes zeros for tokens that attend to no image and no sound, in place.
template <typename T>
void clear_unseeing(const RowCall<T>& rows) {
  const int32_t* const counts = rows.launch.num_item_slots;
  const int64_t bytes = rows.op.num_heads * rows.op.head_size * int64_t{sizeof(T)};
  for (int64_t i = 0; i < rows.count; ++i) {
    if (counts == nullptr || counts[rows.begin + i] == 0) __builtin_memset(rows.out[i], 0, bytes);
  }
}

// Replaces the embeddings of some tokens by given embeddings, in place.
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
    rms_norm_row(x, rows.weight(), out, rows.op.head_size, rows.op.scalar,
                 static_cast<float>(rows.op.option));
  });
}

template <typename T>
void add_rms_norm(const RowCall<T>& rows) {
  rows.for_pairs([&](const T* x, T* residual, T* out) {
    add_rms_norm_row(x, residual, rows.weight(), out, rows.op.head_size, rows.op.scalar,
                     static_cast<float>(rows.op.option));
  });
}

template <typename T>
void layer_norm(const RowCall<T>& rows) {
  const int64_t size = rows.op.head_size, step = rows.op.option != 0 ? size : 0;
  for (int64_t i = 0; i < rows.count; ++i) {
    for (int64_t h = 0; h < rows.op.num_heads; ++h) {
      const T* const weight = rows.weight() == nullptr ? nullptr : rows.weight() + h * step;
      layer_norm_row(rows.x[i] + h * size, weight, rows.bias(), rows.out[i] + h * size, size,
                     rows.op.scalar);
    }
  }
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

// Multiplies each row of x by its value in y, or by the sigmoid of this value.
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

// Limits elements to the range from -scalar to scalar. NaN stays NaN.
template <typename T>
void clip(const RowCall<T>& rows) {
  const Vec limit = splat(rows.op.scalar);
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, max(-limit, min(limit, load(x + i, count))), count);
    });
  });
}

// out = scalar * tanh(x / scalar), rounded after each of the three operations.
template <typename T>
void soft_cap(const RowCall<T>& rows) {
  const Vec cap = splat(rows.op.scalar);
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, cap * round_to<T>(tanh(round_to<T>(load(x + i, count) / cap))), count);
    });
  });
}

// Adds to each element of a row its own weight.
template <typename T>
void add_weights(const RowCall<T>& rows) {
  for (int64_t i = 0; i < rows.count; ++i) {
    for_each_vector(rows.op.num_heads * rows.op.head_size, [&](int64_t at, int64_t count) {
      store(rows.out[i] + at, load(rows.x[i] + at, count) + load(rows.weight() + at, count), count);
    });
  }
}

// Chooses top_k experts (at most kMaxTopK) from head_size logits x, and computes their weights.
template <typename T>
void route(const RowCall<T>& rows) {
  const Operation& op = rows.op;
  const ChoiceOptions options = {vllm_cpu::Routing(op.option), op.head_size,     op.top_k,
                                 op.num_groups,                op.top_groups,    op.table,
                                 op.scalar,                    op.second_scalar, op.scales};
  for (int64_t i = 0; i < rows.count; ++i) {
    const Choices to = choices_at(rows.out[i], op.top_k);
    if (op.is_float != 0) {
      ExpertChoice<float>(reinterpret_cast<const float*>(rows.x[i]), options).choose(to);
    } else {
      ExpertChoice<T>(rows.x[i], options).choose(to);
    }
  }
}

// Converts x to float.
template <typename T>
void widen(const RowCall<T>& rows) {
  for (int64_t i = 0; i < rows.count; ++i) {
    float* const out = reinterpret_cast<float*>(rows.out[i]);
    for_each_vector(rows.op.head_size, [&](int64_t at, int64_t count) {
      store(out + at, load(rows.x[i] + at, count), count);
    });
  }
}

template <typename T>
void copy(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    __builtin_memcpy(out, x, rows.op.head_size * sizeof(T));
  });
}

// out = max(x, 0), or its square if `option` is not 0. NaN stays NaN.
template <typename T>
void relu(const RowCall<T>& rows) {
  const bool is_squared = rows.op.option != 0;
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    if (is_squared) return squared_relu_row(x, out, rows.op.head_size);
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, max(Vec{}, load(x + i, count)), count);
    });
  });
}

template <typename T>
void gelu(const RowCall<T>& rows) {
  const Activation activation = static_cast<Activation>(rows.op.option);
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    for_each_vector(rows.op.head_size, [&](int64_t i, int64_t count) {
      store(out + i, activate(activation, load(x + i, count)), count);
    });
  });
}

template <typename T>
void xielu(const RowCall<T>& rows) {
  rows.for_heads(rows.op.head_size, [&](const T* x, T* out) {
    xielu_row(x, out, rows.op.head_size, rows.op.scalar, rows.op.second_scalar);
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

// Fills `angles` with the cosines, then the sines, of a token whose pairs are rotated by different
// positions.
template <typename T>
void choose_angles(const RowCall<T>& rows, int64_t token, float* angles) {
  const int64_t rot_dim = rows.op.option, half = rot_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t place = rows.op.sections[i] * rows.launch.num_tokens + token;
    const float* const cos = rows.op.table + rows.launch.positions[place] * rot_dim;
    angles[i] = cos[i];
    angles[half + i] = cos[half + i];
  }
}

// Calls turn(head, cosines, sines, half) for each head of x, in place.
template <typename T, typename Turn>
void rotate_heads(const RowCall<T>& rows, Turn turn) {
  const int64_t rot_dim = rows.op.option, half = rot_dim / 2;
  const bool has_sections = rows.op.sections != nullptr && rows.launch.num_positions > 1;
  float angles[vllm_cpu::kMaxSectionedElements];
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* cos = rows.op.table + rows.launch.positions[rows.begin + i] * rot_dim;
    if (has_sections) {
      choose_angles(rows, rows.begin + i, angles);
      cos = angles;
    }
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

// Writes keys x and values y into the cache; only keys if values have no cache of their own.
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
      if (values != nullptr) store_row(rows.y[i], op.value_scales, values + slots[i] * size);
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

// Rounds x * scalar to the nearest e4m3 value with a magnitude of at most `option`. NaN stays NaN.
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

// Runs one operation on tensors. Only for operations that need nothing from a launch.
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
  op.table = of.table;
  op.num_groups = of.num_groups;
  op.top_groups = of.top_groups;
  op.scalar = of.scalar;
  op.second_scalar = of.second_scalar;
  op.scales = of.scales;
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
