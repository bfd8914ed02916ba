// What all instruction sets share: threads and scratch memory.
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
  void* context;
  int64_t next_begin;
  int next_worker;
};

void take_ranges(void* data) {
  Loop* const loop = static_cast<Loop*>(data);
  const int worker = __atomic_fetch_add(&loop->next_worker, 1, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t begin = __atomic_fetch_add(&loop->next_begin, loop->chunk, __ATOMIC_RELAXED);
    if (begin >= loop->n) return;
    const int64_t end = begin + loop->chunk;
    loop->body(loop->context, begin, end < loop->n ? end : loop->n, worker);
  }
}

struct Workspace {
  char* memory = nullptr;
  int64_t bytes = 0;
  ~Workspace() { std::free(memory); }
};
thread_local Workspace kept;

}  // namespace

void run_parallel(int64_t n, int64_t chunk, int num_threads, LoopBody body, void* context) {
  Loop loop = {n, chunk, body, context, 0, 0};
  if (num_threads > 1 && chunk < n && gomp_parallel != nullptr) {
    // Always all threads: libgomp ends the ones a smaller team leaves out, and starting them
    // again takes longer than a kernel.
    gomp_parallel(take_ranges, &loop, static_cast<unsigned>(num_threads), 0);
  } else {
    take_ranges(&loop);
  }
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
