// Checks for the features of processors by which setup.py chooses instruction sets.
#pragma once

#include "arm.h"
#include "x86.h"

#define HAS(feature) __builtin_cpu_supports(feature)
#define HAS_ARM_BF16 vllm_cpu::has_arm_bf16()
#define HAS_AVX_VNNI vllm_cpu::has_avx_vnni()
#define HAS_AMX vllm_cpu::has_amx()
