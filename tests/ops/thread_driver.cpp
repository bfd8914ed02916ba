// Loops of csrc/cpu/runtime.cpp on threads that the sanitizer sees, in place of an OpenMP runtime.
//
// Usage: driver NUM_THREADS NUM_LOOPS. Writes "ok", or what is wrong and ends with status 1.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

extern "C" void vllm_cpu_set_openmp(void* parallel, void* number);

namespace {

thread_local int number = 0;

int thread_number() { return number; }

void parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < num_threads; ++i) {
    threads.emplace_back([=] {
      number = static_cast<int>(i);
      body(data);
    });
  }
  body(data);
  for (std::thread& thread : threads) thread.join();
}

void fail(const char* what, int64_t n, int64_t chunk, int num_threads) {
  std::printf("%s: n %ld, chunk %ld, %d threads\n", what, static_cast<long>(n),
              static_cast<long>(chunk), num_threads);
  std::exit(1);
}

// What the ranges of one loop have written; none of it is atomic, as in a kernel.
struct Seen {
  std::vector<int> visits, is_inside;
  int64_t chunk;
  bool is_wrong;
};

void run_once(int64_t n, int64_t chunk, vllm_cpu::Threads threads) {
  Seen seen{std::vector<int>(n), std::vector<int>(threads.all), chunk, false};
  vllm_cpu::run_parallel(
      n, chunk, threads,
      [](void* context, int64_t begin, int64_t end, int worker) {
        Seen& seen = *static_cast<Seen*>(context);
        const int64_t n = static_cast<int64_t>(seen.visits.size());
        const bool is_whole = end - begin == seen.chunk || end == n;
        if (begin % seen.chunk != 0 || !is_whole || end > n || seen.is_inside[worker]++ != 0) {
          __atomic_store_n(&seen.is_wrong, true, __ATOMIC_RELAXED);
        }
        for (int64_t i = begin; i < end; ++i) ++seen.visits[i];
        --seen.is_inside[worker];
      },
      nullptr, &seen);
  if (seen.is_wrong) fail("a range is not whole, or two threads are one worker", n, chunk, threads.all);
  for (int visits : seen.visits) {
    if (visits != 1) fail("an index was not visited once", n, chunk, threads.all);
  }
}

void run_some(int num_threads, int num_loops) {
  for (int i = 0; i < num_loops; ++i) {
    run_once(1 + i * 37 % 700, 1 + i % 5, {num_threads, 1 + i % (num_threads + 2)});
  }
}

}  // namespace

int main(int, char** argv) {
  vllm_cpu_set_openmp(reinterpret_cast<void*>(parallel), reinterpret_cast<void*>(thread_number));
  struct Run {
    int num_threads, num_loops;
  } run = {std::atoi(argv[1]), std::atoi(argv[2])};
  run_some(run.num_threads, 4);  // outside of a team
  vllm_cpu::run_team(
      run.num_threads,
      [](void* context) {
        const Run& run = *static_cast<Run*>(context);
        run_some(run.num_threads, run.num_loops);
      },
      &run);
  std::puts("ok");
}
