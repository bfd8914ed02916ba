// Scratch memory of one kernel call.
#pragma once

#include <cstdint>

namespace vllm_cpu {

// At least `bytes`, aligned to 64, content undefined; valid until the next call from the same
// thread, which may return the same memory. Grows and is kept until the thread ends, because
// fresh pages on every call cost more than the kernel. Null when there is no memory.
char* workspace(int64_t bytes);

}  // namespace vllm_cpu
