// Sharing a loop between the threads of the OpenMP runtime that torch has already loaded.
//
// Two runtimes in one process fight over the cores. So this library is linked against none: at
// load time the Python side hands over the address of GOMP_parallel, the documented entry that
// compilers call for `#pragma omp parallel`, and of omp_get_thread_num. libgomp has them, and so do the
// LLVM and Intel runtimes on Linux. Without them every loop runs on the calling thread.
//
// A forked child does not have the threads that the runtime waits for. It has to ask torch for one
// thread before it computes, with torch or with these kernels.
#pragma once

#include <cstdint>

#include "matrix_tiles.h"

namespace vllm_cpu {

// begin, end: the share of the loop. worker: below num_threads, different for each thread that
// is inside the loop at the same time.
using LoopBody = void (*)(void* context, int64_t begin, int64_t end, int worker);

// The threads of a loop.
struct Threads {
  int all;     // that there are
  int useful;  // the most of them for which there is enough work

  Threads(int num_threads) : all(num_threads), useful(num_threads) {}
  Threads(int num_threads, int64_t most)
      : all(num_threads), useful(most < num_threads ? static_cast<int>(most) : num_threads) {}
};

// Calls `body` for disjoint ranges that cover [0, n), each `chunk` long but the last. Threads
// take the next range when they are done with one, so uneven work is shared evenly. Returns when
// all is done. Uses the calling thread alone when there is only one range. leave: what each thread
// calls when it is done with its last range, for what `body` has set up in it; or null.
void run_parallel(int64_t n, int64_t chunk, Threads threads, LoopBody body, void (*leave)(),
                  void* context);

// Calls `body` once, on the calling thread. Meanwhile the other threads stand by, so that a loop
// of at most num_threads threads that `body` runs starts and ends in a fraction of a microsecond.
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

// parallel_for for rows of equal cost: one range per thread, and no second thread before each has
// enough work to pay for waking it.
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
