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

}  // namespace vllm_cpu
