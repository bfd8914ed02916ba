// What the library says of itself, so that nothing of it is written down a second time: the
// kernels with their types, and the structs that they take with their fields.
#pragma once

#include <cstddef>

// A struct that callers fill in: a plain definition, and its text for `vllm_cpu_abi`. A field is a
// number, an enum of int64_t, or a pointer; a declaration ends with a semicolon.
#define VLLM_STRUCT(name, ...)                             \
  struct name {                                            \
    __VA_ARGS__ static constexpr const char* kName = #name; \
    static constexpr const char* kFields = #__VA_ARGS__;   \
  }

namespace vllm_cpu {

using Function = void (*)();

// A kernel for one dtype, compiled for one instruction set.
struct Kernel {
  const char* name;
  const char* dtype;           // f32, bf16; - for a kernel without one
  const char* types;           // of the result and the arguments, a letter each
  Function function;           // the kernel
  Function entry;              // calls the one that was chosen last
  void (*choose)(Function);    // another instruction set's
};

struct Struct {
  const char* name;
  size_t size;
  const char* fields;
};

}  // namespace vllm_cpu
