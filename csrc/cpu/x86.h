// Checks for features of x86 processors that older compilers do not know.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace vllm_cpu {

// Whether the processor multiplies unsigned with signed bytes in AVX2 vectors (AVX-VNNI).
inline bool has_avx_vnni() {
#if defined(__x86_64__)
  constexpr unsigned kAvxVnni = 1u << 4;  // of leaf 7, subleaf 1, EAX
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return false;  // a: the last subleaf
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni) != 0;
#else
  return false;
#endif
}

// Whether the processor has AMX-TILE, AMX-BF16 and AMX-INT8, and the system saves the tiles of a
// thread. A process must also ask for permission to use them (amx.h).
inline bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kHasXgetbv = 1u << 27;
  constexpr unsigned kFeatures = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
  constexpr unsigned kTileStates = 1u << 17 | 1u << 18;           // bits of XCR0: TILECFG, TILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kHasXgetbv) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kFeatures) != kFeatures) return false;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileStates) == kTileStates;
#else
  return false;
#endif
}

}  // namespace vllm_cpu
