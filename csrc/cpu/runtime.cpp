// What all instruction sets share: threads and scratch memory.
#include <sched.h>

#include <cstdlib>

#include "parallel.h"
#include "workspace.h"

namespace vllm_cpu {
namespace {

using Parallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
Parallel gomp_parallel = nullptr;

struct Loop {
  int64_t n, chunk;
  LoopBody body;
  void (*leave)();
  void* context;
  int64_t next_begin;
  int next_worker;
};

void take_ranges(void* data) {
  Loop* const loop = static_cast<Loop*>(data);
  const int worker = __atomic_fetch_add(&loop->next_worker, 1, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t begin = __atomic_fetch_add(&loop->next_begin, loop->chunk, __ATOMIC_RELAXED);
    if (begin >= loop->n) break;
    const int64_t end = begin + loop->chunk;
    loop->body(loop->context, begin, end < loop->n ? end : loop->n, worker);
  }
  if (loop->leave != nullptr) loop->leave();
}

// Waits a moment for another thread; `turn` counts the calls. Gives the core away when that takes
// long: on a busy machine the other thread may be waiting for this very core.
void wait(int64_t turn) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (turn >= 2000) sched_yield();  // after some 30 us
}

// The threads between run_team and its end. One leads; the others help it with one loop after the
// other. Nobody waits for a helper that has not entered a loop: one that has no core right now
// costs nothing but its help.
class Team {
 public:
  Team(int size, void (*body)(void*), void* context) : size_(size), body_(body), context_(context) {}

  int size() const { return size_; }
  void lead() {
    body_(context_);
    __atomic_store_n(&gate_, kEnd, __ATOMIC_RELEASE);
  }
  void help();
  void run(const Loop& loop, int num_threads);

 private:
  static constexpr uint64_t kPlaces = 0xffff;
  static constexpr uint64_t kEnd = ~uint64_t{0};

  // Number of the loop, and in the low 16 bits how many helpers may still enter.
  alignas(64) uint64_t gate_ = 0;
  Loop loop_ = {};  // changed only while nobody is inside and the gate is shut
  alignas(64) int num_done_ = 0;  // helpers that have left the loop
  const int size_;
  void (*const body_)(void*);
  void* const context_;
};

void Team::help() {
  uint64_t last = 0;
  for (int64_t turn = 0;; ++turn) {
    uint64_t gate = __atomic_load_n(&gate_, __ATOMIC_ACQUIRE);
    if (gate == kEnd) return;
    const bool is_open = (gate & kPlaces) != 0 && gate >> 16 != last;
    if (is_open && __atomic_compare_exchange_n(&gate_, &gate, gate - 1, false, __ATOMIC_ACQUIRE,
                                               __ATOMIC_RELAXED)) {
      last = gate >> 16;
      take_ranges(&loop_);
      __atomic_fetch_add(&num_done_, 1, __ATOMIC_RELEASE);
      turn = 0;
    } else {
      wait(turn);
    }
  }
}

void Team::run(const Loop& loop, int num_threads) {
  const uint64_t places = static_cast<uint64_t>(num_threads - 1);
  const uint64_t before = __atomic_load_n(&gate_, __ATOMIC_RELAXED);
  const uint64_t shut = ((before >> 16) + 1) << 16;
  loop_ = loop;
  __atomic_store_n(&num_done_, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&gate_, shut | places, __ATOMIC_RELEASE);
  take_ranges(&loop_);
  const uint64_t left = __atomic_exchange_n(&gate_, shut, __ATOMIC_RELAXED) & kPlaces;
  const int num_helpers = static_cast<int>(places - left);
  for (int64_t turn = 0; __atomic_load_n(&num_done_, __ATOMIC_ACQUIRE) < num_helpers; ++turn) {
    wait(turn);
  }
}

thread_local Team* led = nullptr;  // by this thread

struct Workspace {
  char* memory = nullptr;
  int64_t bytes = 0;
  ~Workspace() { std::free(memory); }
};
thread_local Workspace kept;

}  // namespace

void run_parallel(int64_t n, int64_t chunk, int num_threads, LoopBody body, void (*leave)(),
                  void* context) {
  Loop loop = {n, chunk, body, leave, context, 0, 0};
  if (num_threads <= 1 || chunk >= n || gomp_parallel == nullptr) {
    take_ranges(&loop);
  } else if (led != nullptr && num_threads <= led->size()) {
    led->run(loop, num_threads);
  } else {
    // Always all threads: libgomp ends the ones a smaller team leaves out, and starting them
    // again takes longer than a kernel.
    gomp_parallel(take_ranges, &loop, static_cast<unsigned>(num_threads), 0);
  }
}

void run_team(int num_threads, void (*body)(void* context), void* context) {
  if (num_threads <= 1 || gomp_parallel == nullptr || led != nullptr) return body(context);
  Team team(num_threads, body, context);
  led = &team;
  gomp_parallel(
      [](void* data) {
        Team* const team = static_cast<Team*>(data);
        led == team ? team->lead() : team->help();
      },
      &team, static_cast<unsigned>(num_threads), 0);
  led = nullptr;
}

char* workspace(int64_t bytes) {
  if (bytes > kept.bytes) {
    std::free(kept.memory);
    kept.bytes = 0;
    bytes = (bytes + 4095) / 4096 * 4096;
    kept.memory = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
    if (kept.memory == nullptr) return nullptr;
    kept.bytes = bytes;
  }
  return kept.memory;
}

}  // namespace vllm_cpu

// parallel: address of GOMP_parallel in the runtime that torch uses; null: one thread.
extern "C" __attribute__((visibility("default"))) void vllm_cpu_set_openmp(void* parallel) {
  vllm_cpu::gomp_parallel = reinterpret_cast<vllm_cpu::Parallel>(parallel);
}
