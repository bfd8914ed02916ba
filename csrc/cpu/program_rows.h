// Addresses of the rows of a program's operands.
#pragma once

#include "row_operations.h"

namespace VLLM_ISA {

using vllm_cpu::Program;
using vllm_cpu::ProgramStatus;

// Addresses of the buffers of a launch.
template <typename T>
struct ProgramBuffers {
  T* at[vllm_cpu::kMaxBuffers];
  int64_t bytes;  // bytes of the scratch memory

  // local_rows: number of rows of local buffers. scratch: address of the scratch memory; with 0,
  // only `bytes` is valid: the size that is needed.
  ProgramBuffers(const Program& program, int64_t num_tokens, int64_t local_rows, uintptr_t scratch)
      : bytes(0) {
    for (int64_t i = 0; i < program.num_buffers; ++i) {
      const vllm_cpu::ProgramBuffer& buffer = program.buffers[i];
      if (i == program.given || i == program.out || buffer.tap != 0) continue;
      at[i] = reinterpret_cast<T*>(scratch + bytes);
      const int64_t rows = buffer.is_local ? local_rows : num_tokens;
      bytes += aligned(rows * buffer.width * int64_t{sizeof(T)});
    }
  }
};

// Rows [begin, begin + count) of a launch. Row r of the launch is row r - shift of a local buffer.
struct Rows {
  int64_t begin, count, shift;
};

template <typename T>
class ProgramRows {
 public:
  ProgramRows(const Program& program, const ProgramLaunch& launch, int64_t local_rows)
      : program_(program),
        launch_(launch),
        buffers_(program, launch.num_tokens, local_rows,
                 reinterpret_cast<uintptr_t>(launch.scratch)) {
    if (program.given >= 0) {
      buffers_.at[program.given] = static_cast<T*>(const_cast<void*>(launch.given));
    }
    buffers_.at[program.out] = static_cast<T*>(launch.out);
    for (int64_t i = 0; i < program.num_buffers; ++i) {
      const int64_t tap = program.buffers[i].tap;
      if (tap != 0) buffers_.at[i] = static_cast<T*>(launch.taps[tap - 1]);
    }
  }

  // Returns the elements of an operand in these rows.
  View<T> view(int64_t buffer, int64_t offset, const Rows& rows) const {
    const int64_t width = program_.buffers[buffer].width;
    const int64_t row = rows.begin - (program_.buffers[buffer].is_local ? rows.shift : 0);
    return {buffers_.at[buffer] + row * width + offset, width};
  }

  void run(const Operation& op, const Rows& rows) const {
    run_operation<T>({op, launch_, rows.begin, rows.count, view(op.x, op.x_offset, rows),
                      view(op.y, op.y_offset, rows), view(op.out, op.out_offset, rows)});
  }

 private:
  const Program& program_;
  const ProgramLaunch& launch_;
  ProgramBuffers<T> buffers_;
};

}  // namespace VLLM_ISA
