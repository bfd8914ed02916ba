// Whether the kernels for Intel AMX can run in this process.
#pragma once

#include "abi.h"

namespace vllm_cpu {

// True where the processor has the tiles, the system lets this process use them, and they compute
// what `reference` does. Found out once per process: the first call asks the system for permission.
// amx, reference: tables of kernels (kernels.cpp); the second is that of the next best set.
bool can_use_amx(const Kernel* amx, const Kernel* reference);

// Why a processor with AMX runs other kernels; null: there is nothing to say.
const char* amx_notice();

}  // namespace vllm_cpu
