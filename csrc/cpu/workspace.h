// Scratch memory of one kernel call.
#pragma once

#include <cstdint>

namespace vllm_cpu {

// Returns memory of at least `bytes` bytes, aligned to 64 bytes, with undefined content. It is
// valid until the next call from the same thread, which may return the same memory. It grows, and
// is kept until the thread ends, because fresh pages for every call would cost more than the
// kernel. Null if there is no memory.
char* workspace(int64_t bytes);

}  // namespace vllm_cpu
