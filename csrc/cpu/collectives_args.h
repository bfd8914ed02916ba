// Arguments and results of the exchanges between ranks (collectives.h).
#pragma once

#include <cstdint>

#include "abi.h"

namespace vllm_cpu {

// The shared memory of a group: a header, then two buffers for each rank.
VLLM_STRUCT(Arena,
  void* memory;
  int64_t rank, num_ranks;
  int64_t header_bytes, buffer_bytes;
  int64_t timeout_us;
);

constexpr int64_t kMaxRanks = 63;  // largest number of ranks in a group: its header of 4096 bytes
                                   // has a cache line for each rank

// Result of an exchange. kExchanged: it is complete. kAborted: a rank has failed elsewhere.
// kMissing + r: rank r did not arrive in time.
constexpr int64_t kExchanged = 0;
constexpr int64_t kAborted = 1;
constexpr int64_t kMissing = 2;

}  // namespace vllm_cpu
