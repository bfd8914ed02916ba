// What the library says of itself, so that nothing of it is written down a second time: the
// kernels with their types, the structs that they take, enums and constants.
#pragma once

#include <cstddef>
#include <cstdint>

#define VLLM_TEXT(...) #__VA_ARGS__

// A struct that callers fill in: a plain definition, and its text for `vllm_cpu_abi`. A field is a
// number, an enum, or a pointer.
#define VLLM_STRUCT(name, ...)                                    \
  struct name {                                                   \
    __VA_ARGS__                                                   \
    static constexpr const char* kName = #name;                   \
    static constexpr const char* kText = VLLM_TEXT(__VA_ARGS__);  \
  }

// An enum whose numbers callers know by name. Its text is in `name`Text.
#define VLLM_ENUM(name, ...)                                      \
  enum class name : int64_t { __VA_ARGS__ };                      \
  struct name##Text {                                             \
    static constexpr const char* kName = #name;                   \
    static constexpr const char* kText = VLLM_TEXT(__VA_ARGS__);  \
  }

namespace vllm_cpu {

using Function = void (*)();

// A kernel for one dtype, compiled for one instruction set. Functions give the addresses, as the
// table has to be a constant: code that fills it when the library is loaded would be compiled for
// the instruction set, too, and end processes whose processor does not have it.
struct Kernel {
  const char* name;
  const char* dtype;         // f32, bf16; - for a kernel without one
  const char* types;         // of the result and the arguments, a letter each
  Function (*function)();    // the kernel
  Function (*entry)();       // calls the one that was chosen last
  void (*choose)(Function);  // another instruction set's
};

// A struct, an enum or a constant.
struct Type {
  const char* kind;
  const char* name;
  size_t size;       // of a constant: its value
  const char* text;  // the inside of its definition
};

}  // namespace vllm_cpu
