// What the exchanges between ranks are told and what they answer; what they do is said in collectives.h.
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

constexpr int64_t kMaxRanks = 63;  // of a group: a header of 4096 bytes has a line for each

// What an exchange returns: it is done, a rank has failed elsewhere, or kMissing + the rank that has
// not come in time.
constexpr int64_t kExchanged = 0;
constexpr int64_t kAborted = 1;
constexpr int64_t kMissing = 2;

}  // namespace vllm_cpu
