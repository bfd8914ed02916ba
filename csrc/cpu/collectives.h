// Exchanges tensors between the ranks of one machine through shared memory.
//
// Each rank has two buffers and a counter of its exchanges. In an exchange it fills one buffer,
// increases the counter, and waits until all other counters are as high; then it reads all buffers.
// It writes to the same buffer again two exchanges later. By then all ranks have read it, because a
// rank starts the exchange in between only after it has finished this one. So an exchange needs a
// single wait. Each rank computes sums itself, in the order of the ranks, so all ranks get the same
// bits.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "collectives_args.h"
#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

using vllm_cpu::Arena;

// One exchange of data between the ranks of a group; a rank makes all of them in the same order.
class Exchange {
 public:
  explicit Exchange(const Arena& arena) : arena_(arena), count_(slot(arena.rank)->count + 1) {}

  // Returns the buffer of a rank in this exchange.
  void* buffer(int64_t rank) const {
    return static_cast<char*>(arena_.memory) + arena_.header_bytes +
           (2 * rank + (count_ & 1)) * arena_.buffer_bytes;
  }

  // Announces that the buffer of this rank is filled, and waits for the buffers of the others.
  int64_t meet() {
    Slot* const own = slot(arena_.rank);
    __atomic_store_n(&own->count, count_, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->num_waiting, __ATOMIC_SEQ_CST) != 0) {
      syscall(SYS_futex, &own->count, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
    }
    for (int64_t rank = 0; rank < arena_.num_ranks; ++rank) {
      const int64_t status = wait_for(rank);
      if (status != vllm_cpu::kExchanged) return status;
    }
    ++count_;
    return vllm_cpu::kExchanged;
  }

 private:
  struct alignas(64) Slot {
    uint32_t count;
    uint32_t num_waiting;  // number of processes that sleep until the counter changes
  };

  Slot* slot(int64_t rank) const { return static_cast<Slot*>(arena_.memory) + 1 + rank; }
  bool has_come(const Slot* other) const {  // counters wrap around
    return static_cast<int32_t>(__atomic_load_n(&other->count, __ATOMIC_ACQUIRE) - count_) >= 0;
  }
  bool is_aborted() const {
    return __atomic_load_n(static_cast<char*>(arena_.memory), __ATOMIC_ACQUIRE) != 0;
  }

  int64_t wait_for(int64_t rank) const {
    Slot* const other = slot(rank);
    for (int turn = 0; turn < kSpins; ++turn) {
      if (has_come(other)) return vllm_cpu::kExchanged;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
    // On a busy machine, the other rank may be waiting for this core.
    const int64_t deadline = now_us() + arena_.timeout_us;
    int64_t status = vllm_cpu::kExchanged;
    __atomic_fetch_add(&other->num_waiting, 1, __ATOMIC_SEQ_CST);
    while (!has_come(other)) {
      if (is_aborted()) {
        status = vllm_cpu::kAborted;
        break;
      }
      if (now_us() > deadline) {
        status = vllm_cpu::kMissing + rank;
        break;
      }
      const uint32_t seen = __atomic_load_n(&other->count, __ATOMIC_SEQ_CST);
      if (static_cast<int32_t>(seen - count_) >= 0) break;
      // Wait in short slices, to notice an abort.
      const timespec slice = {0, 20 * 1000 * 1000};
      syscall(SYS_futex, &other->count, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
    __atomic_fetch_sub(&other->num_waiting, 1, __ATOMIC_SEQ_CST);
    return status;
  }

  static int64_t now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000) + now.tv_nsec / 1000;
  }

  static constexpr int kSpins = 1000;  // about 15 us
  const Arena& arena_;
  uint32_t count_;
};

// Replaces x [n] by its sum over the ranks, added in float and rounded once.
template <typename T>
int64_t all_reduce(const Arena& arena, T* x, int64_t n, int num_threads) {
  Exchange exchange(arena);
  const int64_t most = arena.buffer_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < n; begin += most) {
    const int64_t size = n - begin < most ? n - begin : most;
    T* const part = x + begin;
    __builtin_memcpy(exchange.buffer(arena.rank), part, size * sizeof(T));
    const T* buffers[vllm_cpu::kMaxRanks];
    for (int64_t rank = 0; rank < arena.num_ranks; ++rank) {
      buffers[rank] = static_cast<const T*>(exchange.buffer(rank));
    }
    const int64_t status = exchange.meet();
    if (status != vllm_cpu::kExchanged) return status;
    const int64_t num_vectors = (size + kLanes - 1) / kLanes;
    parallel_row_ranges(num_vectors, kLanes, num_threads, [&](int64_t first, int64_t end) {
      const int64_t from = first * kLanes, to = end * kLanes < size ? end * kLanes : size;
      for_each_vector(to - from, [&](int64_t i, int64_t count) {
        Vec sum = load(buffers[0] + from + i, count);
        for (int64_t rank = 1; rank < arena.num_ranks; ++rank) {
          sum = sum + load(buffers[rank] + from + i, count);
        }
        store(part + from + i, sum, count);
      });
    });
  }
  return vllm_cpu::kExchanged;
}

// Gathers x [rows, row_bytes] of all ranks into out [rows, num_ranks * row_bytes], in the order of
// the ranks. Both are dense.
inline int64_t all_gather(const Arena& arena, const char* x, char* out, int64_t rows,
                          int64_t row_bytes) {
  Exchange exchange(arena);
  const int64_t n = rows * row_bytes;
  for (int64_t begin = 0; begin < n; begin += arena.buffer_bytes) {
    const int64_t end = n - begin < arena.buffer_bytes ? n : begin + arena.buffer_bytes;
    __builtin_memcpy(exchange.buffer(arena.rank), x + begin, end - begin);
    const char* buffers[vllm_cpu::kMaxRanks];
    for (int64_t rank = 0; rank < arena.num_ranks; ++rank) {
      buffers[rank] = static_cast<const char*>(exchange.buffer(rank));
    }
    const int64_t status = exchange.meet();
    if (status != vllm_cpu::kExchanged) return status;
    for (int64_t rank = 0; rank < arena.num_ranks; ++rank) {
      for (int64_t at = begin; at < end;) {  // copy at most to the end of a row
        const int64_t row = at / row_bytes, column = at % row_bytes;
        const int64_t left = row_bytes - column, size = end - at < left ? end - at : left;
        char* const place = out + (row * arena.num_ranks + rank) * row_bytes + column;
        __builtin_memcpy(place, buffers[rank] + (at - begin), size);
        at += size;
      }
    }
  }
  return vllm_cpu::kExchanged;
}

}  // namespace VLLM_ISA
