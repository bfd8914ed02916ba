// The description of the library for its callers, so that nothing has to be written down twice: the
// kernels with their types, the structs that they take, enums and constants.
#pragma once

#include <cstddef>
#include <cstdint>

#define VLLM_TEXT(...) #__VA_ARGS__

// A struct that callers fill in: defines it, and its text for `vllm_cpu_abi`. Each field is an
// integer, a float, an enum, or a pointer.
#define VLLM_STRUCT(name, ...)                                    \
  struct name {                                                   \
    __VA_ARGS__                                                   \
    static constexpr const char* kName = #name;                   \
    static constexpr const char* kText = VLLM_TEXT(__VA_ARGS__);  \
  }

// An enum whose values callers know by name. Its text is in `name`Text.
#define VLLM_ENUM(name, ...)                                      \
  enum class name : int64_t { __VA_ARGS__ };                      \
  struct name##Text {                                             \
    static constexpr const char* kName = #name;                   \
    static constexpr const char* kText = VLLM_TEXT(__VA_ARGS__);  \
  }

namespace vllm_cpu {

using Function = void (*)();

// A kernel for one dtype, compiled for one instruction set. The fields are functions, because the
// table must be a constant: code that fills it when the library is loaded would also use the
// instruction set, and would crash on processors without it.
struct Kernel {
  const char* name;
  const char* dtype;         // f32 or bf16; - for a kernel without a dtype
  const char* types;         // types of the result and of each argument, one letter each
  Function (*function)();    // the kernel
  Function (*entry)();       // calls the kernel that `choose` has selected
  void (*choose)(Function);  // selects a kernel of one instruction set
};

// A struct, an enum or a constant.
struct Type {
  const char* kind;
  const char* name;
  size_t size;       // of a constant: its value
  const char* text;  // the text inside its definition
};

}  // namespace vllm_cpu
