// Describes the library to its callers: the kernels with the types of their arguments, and the
// structs, enums and constants that they use. Callers read this description, so nothing is declared
// twice.
#pragma once

#include <cstddef>
#include <cstdint>

#define VLLM_TEXT(...) #__VA_ARGS__

// Defines a struct that callers fill in, and keeps its text for `vllm_cpu_abi`. Each field is an
// integer, a float, an enum, or a pointer.
#define VLLM_STRUCT(name, ...)                                    \
  struct name {                                                   \
    __VA_ARGS__                                                   \
    static constexpr const char* kName = #name;                   \
    static constexpr const char* kText = VLLM_TEXT(__VA_ARGS__);  \
  }

// Defines an enum whose values callers use by name. Its text is in the struct `name`Text.
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
  const char* types;         // types of the result and of the arguments, one letter for each type
  Function (*function)();    // returns the kernel
  Function (*entry)();       // returns a function that calls the kernel selected by `choose`
  void (*choose)(Function);  // selects the kernel of one instruction set
};

// The description of a struct, an enum or a constant.
struct Type {
  const char* kind;
  const char* name;
  size_t size;       // size in bytes; for a constant: its value
  const char* text;  // the text between the braces of the definition; empty for a constant
};

}  // namespace vllm_cpu
