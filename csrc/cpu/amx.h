// Checks whether the kernels for Intel AMX can run in this process.
#pragma once

#include "abi.h"

namespace vllm_cpu {

// Returns true if the processor has matrix tiles, and the system saves them.
bool processor_has_amx();

// Returns true if the processor has matrix tiles, the system lets this process use them, and they
// compute the same results as `reference`. This is checked once per process: the first call asks
// the system for permission. amx, reference: tables of kernels (kernels.cpp); `reference` is the
// table of the next best instruction set.
bool can_use_amx(const Kernel* amx, const Kernel* reference);

// Returns the reason why a processor with AMX runs other kernels, or null if there is none.
const char* amx_notice();

}  // namespace vllm_cpu
