// Threads and scratch memory, which all instruction sets share.
#include <sched.h>

#include <cstdlib>

#include "parallel.h"
#include "workspace.h"

namespace vllm_cpu {
namespace {

using Parallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
using ThreadNumber = int (*)();
Parallel gomp_parallel = nullptr;
ThreadNumber thread_number = nullptr;

constexpr int kGroupThreads = 8, kMaxGroups = 64;

// The ranges of a loop. Each group of threads has a part of the loop and its own counter in its own
// cache line. A thread that has finished the part of its group helps the next group. So few threads
// change the same counter, and a group gets the same part, with the same weights, each time. Up to
// kGroupThreads threads are one group.
struct Loop {
  int64_t n, chunk;
  LoopBody body;
  void (*leave)();
  void* context;
  int num_threads, num_groups;
  struct alignas(64) Share {
    int64_t next, end;
  } shares[kMaxGroups];

  void init(int64_t size, int64_t of_range, int of_threads, LoopBody to_call, void (*at_end)(),
            void* with) {
    n = size, chunk = of_range, body = to_call, leave = at_end, context = with;
    const int64_t num_ranges = (n + chunk - 1) / chunk;
    num_threads = num_ranges < of_threads ? static_cast<int>(num_ranges) : of_threads;
    num_groups = (num_threads + kGroupThreads - 1) / kGroupThreads;
    num_groups = num_groups < 1 ? 1 : num_groups > kMaxGroups ? kMaxGroups : num_groups;
    for (int g = 0; g < num_groups; ++g) {
      const int64_t end = num_ranges * (g + 1) / num_groups * chunk;
      shares[g] = {num_ranges * g / num_groups * chunk, end < n ? end : n};
    }
  }

  void take_ranges(int worker) {
    const int home = static_cast<int>(int64_t{worker} * num_groups / num_threads);
    for (int g = 0; g < num_groups; ++g) {
      Share& share = shares[home + g < num_groups ? home + g : home + g - num_groups];
      while (__atomic_load_n(&share.next, __ATOMIC_RELAXED) < share.end) {
        const int64_t begin = __atomic_fetch_add(&share.next, chunk, __ATOMIC_RELAXED);
        if (begin >= share.end) break;
        const int64_t end = begin + chunk;
        body(context, begin, end < share.end ? end : share.end, worker);
      }
    }
    if (leave != nullptr) leave();
  }
};

// Waits a moment for another thread; `turn` counts the calls. After a while it yields the core,
// because on a busy machine the other thread may be waiting for this core.
void wait(int64_t turn) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
  if (turn >= 2000) sched_yield();  // after about 30 us
}

// The threads of a call of run_team. One leads, and the others help it with one loop after another.
// The leader never waits for a helper that has not entered a loop, so a helper without a core
// delays nothing. Each helper announces that it is inside in its own memory, so that entering and
// leaving take the same time with any number of helpers.
class Team {
 public:
  Team(int size, void (*body)(void*), void* context)
      : size_(size < kMaxThreads ? size : kMaxThreads), body_(body), context_(context) {
    for (int i = 0; i < size_; ++i) places_[i].inside = 0;
  }

  // Returns the number of threads; at most as many as were asked for.
  int size() const { return size_; }
  void lead() {
    body_(context_);
    __atomic_store_n(&gate_, kEnd, __ATOMIC_RELEASE);
  }
  void help(int index);
  // Returns the loop, which the caller fills in before `run`: no helper is inside it then.
  Loop& loop() { return loop_; }
  void run();

 private:
  static constexpr int kMaxThreads = 512;
  static constexpr uint64_t kOpenTo = 0xffff;
  static constexpr uint64_t kEnd = ~uint64_t{0};

  // Index of the loop, with its number of threads in the low 16 bits; 0: closed.
  alignas(64) uint64_t gate_ = 0;
  Loop loop_;  // changed only while no thread is inside and the gate is closed
  struct alignas(64) Place {
    uint64_t inside;  // the gate with which the helper has entered; 0: it is outside
  } places_[kMaxThreads];
  const int size_;
  void (*const body_)(void*);
  void* const context_;
};

// A helper announces that it is inside, then checks that the gate is still open. The leader closes
// the gate, then checks which helpers are inside. All threads see these four operations in one
// order (SEQ_CST), so at least one of the two sees the other.
void Team::help(int index) {
  if (index >= size_) return;
  uint64_t& inside = places_[index].inside;
  uint64_t last = 0;
  for (int64_t turn = 0;; ++turn) {
    const uint64_t gate = __atomic_load_n(&gate_, __ATOMIC_ACQUIRE);
    if (gate == kEnd) return;
    if (static_cast<uint64_t>(index) >= (gate & kOpenTo) || gate == last) {
      wait(turn);
      continue;
    }
    __atomic_store_n(&inside, gate, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&gate_, __ATOMIC_SEQ_CST) == gate) {
      last = gate;
      loop_.take_ranges(index);
      turn = 0;
    }
    __atomic_store_n(&inside, uint64_t{0}, __ATOMIC_RELEASE);
  }
}

void Team::run() {
  const uint64_t before = __atomic_load_n(&gate_, __ATOMIC_RELAXED);
  const uint64_t shut = ((before >> 16) + 1) << 16;
  const int num_threads = loop_.num_threads;
  __atomic_store_n(&gate_, shut | static_cast<uint64_t>(num_threads), __ATOMIC_RELEASE);
  loop_.take_ranges(0);
  __atomic_store_n(&gate_, shut, __ATOMIC_SEQ_CST);
  for (int i = 1; i < num_threads; ++i) {
    for (int64_t turn = 0; __atomic_load_n(&places_[i].inside, __ATOMIC_SEQ_CST) != 0; ++turn) {
      wait(turn);
    }
  }
}

thread_local Team* led = nullptr;  // the team that this thread leads

struct Workspace {
  char* memory = nullptr;
  int64_t bytes = 0;
  ~Workspace() { std::free(memory); }
};
thread_local Workspace kept;

}  // namespace

void run_parallel(int64_t n, int64_t chunk, Threads threads, LoopBody body, void (*leave)(),
                  void* context) {
  if (n <= 0) return;
  if (threads.useful <= 1 || chunk >= n || gomp_parallel == nullptr) {
    for (int64_t begin = 0; begin < n; begin += chunk) {
      body(context, begin, begin + chunk < n ? begin + chunk : n, 0);
    }
    if (leave != nullptr) leave();
    return;
  }
  if (led != nullptr) {
    const int num_threads = threads.useful < led->size() ? threads.useful : led->size();
    led->loop().init(n, chunk, num_threads, body, leave, context);
    return led->run();
  }
  Loop loop;
  loop.init(n, chunk, threads.useful, body, leave, context);
  // Always use all threads: libgomp ends threads that a smaller team leaves out, and restarting
  // them takes longer than a kernel.
  gomp_parallel(
      [](void* data) {
        Loop* const loop = static_cast<Loop*>(data);
        const int number = thread_number();
        if (number < loop->num_threads) loop->take_ranges(number);
      },
      &loop, static_cast<unsigned>(threads.all), 0);
}

void run_team(int num_threads, void (*body)(void* context), void* context) {
  if (num_threads <= 1 || gomp_parallel == nullptr || led != nullptr) return body(context);
  Team team(num_threads, body, context);
  led = &team;
  gomp_parallel(
      [](void* data) {
        Team* const team = static_cast<Team*>(data);
        led == team ? team->lead() : team->help(thread_number());
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

// Sets the addresses of GOMP_parallel and omp_get_thread_num in torch's runtime; null: use one
// thread.
extern "C" __attribute__((visibility("default"))) void vllm_cpu_set_openmp(void* parallel,
                                                                           void* number) {
  vllm_cpu::gomp_parallel =
      number == nullptr ? nullptr : reinterpret_cast<vllm_cpu::Parallel>(parallel);
  vllm_cpu::thread_number = reinterpret_cast<vllm_cpu::ThreadNumber>(number);
}
