// The exported functions of the library: its description, and the instruction set that it uses.
//
// VLLM_ISAS lists the instruction sets, best first: a compiled one as ISA(name, whether this
// processor runs it), and one that this build lacks as LEFT_OUT(name, the same). `base` is always
// compiled. VLLM_TEST_ISAS lists instruction sets that are only used if they are named. VLLM_BUILD
// identifies the sources.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "abi.h"
#include "amx.h"
#include "processor.h"

#undef HAS_AMX
#define HAS_AMX vllm_cpu::processor_has_amx()
#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

#define LEFT_OUT(name, runs_here)
#define ISA(name, runs_here) \
  namespace vllm_##name { extern const vllm_cpu::Kernel kernels[]; }
VLLM_ISAS
ISA(base, true)
VLLM_TEST_ISAS
#undef ISA
#undef LEFT_OUT
namespace vllm_base { extern const vllm_cpu::Type types[]; }

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const vllm_cpu::Kernel* kernels;  // null: this build lacks them
};

const Isa kIsas[] = {
#define ISA(name, runs_here) {#name, [] { return bool(runs_here); }, vllm_##name::kernels},
#define LEFT_OUT(name, runs_here) {#name, [] { return bool(runs_here); }, nullptr},
    VLLM_ISAS
    ISA(base, true)
    VLLM_TEST_ISAS
};

const char* isa = "base";
char* description = nullptr;
char notice[256] = "";

// Returns the kernels of an instruction set, or null if this build lacks them.
const vllm_cpu::Kernel* kernels_of(const char* name) {
  for (const Isa& found : kIsas) {
    if (std::strcmp(name, found.name) == 0) return found.kernels;
  }
  return nullptr;
}

// Returns whether this process can run the kernels of an instruction set of this build.
bool can_use(const Isa& found) {
  if (found.kernels == nullptr || !found.runs_here()) return false;
  if (std::strcmp(found.name, "amx") != 0) return true;
  const vllm_cpu::Kernel* const next_best = kernels_of("avx512_bf16");
  return next_best != nullptr && vllm_cpu::can_use_amx(found.kernels, next_best);
}

}  // namespace

// Returns the name of the instruction set in use.
VLLM_EXPORT const char* vllm_cpu_isa() { return isa; }

// Selects an instruction set by its name; null: the best one. Do not call this while a kernel runs.
// Returns false, and changes nothing, if this build or this processor does not have it.
VLLM_EXPORT bool vllm_cpu_set_isa(const char* name) {
  for (const Isa& found : kIsas) {
    if ((name != nullptr && std::strcmp(name, found.name) != 0) || !can_use(found)) continue;
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
VLLM_EXPORT const char* vllm_cpu_notice() {
  for (const Isa& found : kIsas) {
    if (std::strcmp(isa, found.name) == 0) break;
    if (found.kernels != nullptr || !found.runs_here()) continue;
    std::snprintf(notice, sizeof notice,
                  "This processor has %s, for which the C++ CPU kernels were not built: they were "
                  "built on another processor. To build them for this one, run `python setup.py "
                  "build_ext --inplace`",
                  found.name);
    return notice;
  }
  return vllm_cpu::amx_notice();
}

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
