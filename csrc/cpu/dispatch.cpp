// The exported functions of the library: its description, and the instruction set that it uses.
//
// VLLM_ISAS lists the compiled instruction sets, best first, as ISA(name, whether this processor
// runs it). `base` is always one of them. VLLM_TEST_ISAS lists instruction sets that are only used
// if they are named. VLLM_BUILD identifies the sources.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "abi.h"
#include "amx.h"
#include "arm.h"
#include "x86.h"

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))
#define HAS(feature) __builtin_cpu_supports(feature)
#define HAS_ARM_BF16 vllm_cpu::has_arm_bf16()
#define HAS_AVX_VNNI vllm_cpu::has_avx_vnni()
#define HAS_AMX vllm_cpu::can_use_amx(vllm_amx::kernels, vllm_avx512_bf16::kernels)

#define ISA(name, runs_here) \
  namespace vllm_##name { extern const vllm_cpu::Kernel kernels[]; }
VLLM_ISAS
ISA(base, true)
VLLM_TEST_ISAS
#undef ISA
namespace vllm_base { extern const vllm_cpu::Type types[]; }

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const vllm_cpu::Kernel* kernels;
};

const Isa kIsas[] = {
#define ISA(name, runs_here) {#name, [] { return bool(runs_here); }, vllm_##name::kernels},
    VLLM_ISAS
    ISA(base, true)
    VLLM_TEST_ISAS
};

const char* isa = "base";
char* description = nullptr;

}  // namespace

// Returns the name of the instruction set in use.
VLLM_EXPORT const char* vllm_cpu_isa() { return isa; }

// Selects an instruction set by its name; null: the best one. Do not call this while a kernel runs.
// Returns false, and changes nothing, if this build or this processor does not have it.
VLLM_EXPORT bool vllm_cpu_set_isa(const char* name) {
  for (const Isa& found : kIsas) {
    if ((name != nullptr && std::strcmp(name, found.name) != 0) || !found.runs_here()) continue;
    for (int64_t i = 0; found.kernels[i].name != nullptr; ++i) {
      vllm_base::kernels[i].choose(found.kernels[i].function());
    }
    isa = found.name;
    return true;
  }
  return false;
}

// Returns one line for users about the choice of the best instruction set, or null if there is
// nothing to say.
VLLM_EXPORT const char* vllm_cpu_notice() { return vllm_cpu::amx_notice(); }

// Returns the description of the library, with one line for each entry: the build, the kernels with
// the addresses of their entry functions, and the types. Null if there is no memory. Do not call
// this from two threads at once.
VLLM_EXPORT const char* vllm_cpu_abi() {
  if (description != nullptr) return description;
  size_t size = 0;
  std::FILE* const out = open_memstream(&description, &size);
  if (out == nullptr) return nullptr;
  std::fprintf(out, "build %s\n", VLLM_BUILD);
  for (const auto* k = vllm_base::kernels; k->name != nullptr; ++k) {
    std::fprintf(out, "kernel %s %s %s %" PRIuPTR "\n", k->name, k->dtype, k->types,
                 reinterpret_cast<uintptr_t>(k->entry()));
  }
  for (const auto* t = vllm_base::types; t->name != nullptr; ++t) {
    std::fprintf(out, "%s %s %zu %s\n", t->kind, t->name, t->size, t->text);
  }
  std::fclose(out);
  return description;
}
