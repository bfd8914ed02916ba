// Shares a loop between the threads of the OpenMP runtime that torch has already loaded.
//
// Two runtimes in one process compete for the cores, so this library is linked against none.
// Instead, Python passes the addresses of GOMP_parallel (the documented entry that compilers call
// for `#pragma omp parallel`) and of omp_get_thread_num when it loads the library. libgomp has
// both, and so do the LLVM and Intel runtimes on Linux. Without them, every loop runs on the
// calling thread.
//
// A forked child does not have the threads that the runtime waits for. It must set torch to one
// thread before it computes with torch or with these kernels.
#pragma once

#include <cstdint>

#include "matrix_tiles.h"

namespace vllm_cpu {

// The body of a loop. begin, end: the range to run. worker: an index below num_threads, different
// for all threads that are inside the loop at the same time.
using LoopBody = void (*)(void* context, int64_t begin, int64_t end, int worker);

// The threads of a loop.
struct Threads {
  int all;     // all threads that may be used
  int useful;  // the largest number of them that has enough work

  Threads(int num_threads) : all(num_threads), useful(num_threads) {}
  Threads(int num_threads, int64_t most)
      : all(num_threads), useful(most < num_threads ? static_cast<int>(most) : num_threads) {}
};

// Calls `body` for disjoint ranges that cover [0, n), each `chunk` long except the last. A thread
// takes the next range when it has finished one, so uneven work is shared evenly. Returns when all
// ranges are done. Uses only the calling thread if there is only one range. leave: called by each
// thread after its last range, to undo what `body` has set up in it; or null.
void run_parallel(int64_t n, int64_t chunk, Threads threads, LoopBody body, void (*leave)(),
                  void* context);

// Calls `body` once, on the calling thread. The other threads wait meanwhile, so that a loop of at
// most num_threads threads in `body` starts and ends within a fraction of a microsecond.
void run_team(int num_threads, void (*body)(void* context), void* context);

}  // namespace vllm_cpu

namespace VLLM_ISA {

template <typename Body>
inline void parallel_for(int64_t n, int64_t chunk, vllm_cpu::Threads threads, Body body) {
  vllm_cpu::run_parallel(
      n, chunk, threads,
      [](void* context, int64_t begin, int64_t end, int worker) {
        (*static_cast<Body*>(context))(begin, end, worker);
      },
      kLeaveThread, &body);
}

template <typename Body>
inline void team(int num_threads, Body body) {
  vllm_cpu::run_team(
      num_threads, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}

// Calls parallel_for for rows of equal cost, with one range per thread. Another thread is only used
// if each thread has enough work to make up for waking it.
template <typename Body>
inline void parallel_row_ranges(int64_t rows, int64_t elements_per_row, int num_threads,
                                Body body) {
  constexpr int64_t kMinElements = 32768;  // about 2 us
  const int64_t share = (rows + num_threads - 1) / num_threads;
  const int64_t enough = kMinElements / (elements_per_row + 1) + 1;
  parallel_for(rows, share > enough ? share : enough, num_threads,
               [&](int64_t begin, int64_t end, int) { body(begin, end); });
}

template <typename Body>
inline void parallel_rows(int64_t rows, int64_t elements_per_row, int num_threads, Body body) {
  parallel_row_ranges(rows, elements_per_row, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace VLLM_ISA
