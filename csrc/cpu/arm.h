// Checks for features of ARM processors beyond NEON.
#pragma once

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace vllm_cpu {

// Whether the processor multiplies pairs of bf16, and unsigned with signed bytes (FEAT_BF16,
// FEAT_I8MM).
inline bool has_arm_bf16() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // bits of AT_HWCAP2
  return (getauxval(AT_HWCAP2) & (kI8mm | kBf16)) == (kI8mm | kBf16);
#elif defined(__aarch64__) && defined(__APPLE__)
  const auto has = [](const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_I8MM");
#else
  return false;
#endif
}

}  // namespace vllm_cpu
