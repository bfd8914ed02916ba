// Asks the system for permission to use Intel AMX, and checks that AMX multiplies correctly before
// any kernel uses it.
#include "amx.h"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear_format.h"
#include "x86.h"

namespace vllm_cpu {
namespace {

enum class Answer { kUnknown, kNo, kYes };
Answer answer = Answer::kUnknown;
bool is_assumed = false;  // for tests: assume that the processor has AMX
char notice[256] = "";

#if defined(__x86_64__) && defined(__linux__)

// Asks Linux for the tiles. A process gets them only on request, because they make the saved state
// of each thread larger.
bool ask_permission() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool ask_permission() {
  errno = ENOSYS;
  return false;
}

#endif

Function find(const Kernel* kernels, const char* name) {
  while (std::strcmp(kernels->name, name) != 0 || std::strcmp(kernels->dtype, "f32") == 0) ++kernels;
  return kernels->function();
}

// A test matmul for each weight format, with sizes that do not fill the tiles. All values are small
// integers, so that every order of additions gives the same bits; int4 has a fixed order
// (linear_matrix.h).
constexpr int64_t kRows = 20, kInputs = 104, kOutputs = kPanel;

struct alignas(64) Product {
  alignas(64) uint32_t panels[kOutputs * kInputs] = {};
  float scales[kOutputs] = {};
  int32_t sums[kOutputs] = {};
  bf16 plain[kOutputs * kInputs], x[kRows * kInputs];
  bf16 out[2][kRows * kOutputs] = {};
};

bf16 small_number(int64_t i) {
  const float number = static_cast<float>((i * 2654435761u >> 13) % 7) - 3.0f;
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}

// Computes product.out[i] with the kernels of tables[i]. Returns false if there is no memory.
bool multiply(WeightFormat format, const Kernel* const* tables, Product& product) {
  for (int64_t i = 0; i < kOutputs * kInputs; ++i) product.plain[i] = small_number(i);
  for (int64_t i = 0; i < kRows * kInputs; ++i) product.x[i] = small_number(i + 77777);
  LinearWeight weight = {};
  weight.panels = product.panels;
  weight.scales = product.scales;
  weight.sums = product.sums;
  weight.in_features = kInputs;
  weight.out_features = kOutputs;
  weight.format = format;
  weight.block_inputs = 32;
  using Pack = int64_t (*)(uint32_t*, int64_t, int64_t, int);
  using Quantize = int64_t (*)(const LinearWeight&, const bf16*, int);
  using Linear = int64_t (*)(const LinearWeight&, const bf16*, const bf16*, bf16*, int64_t, int64_t,
                             int);
  if (format == WeightFormat::kBf16) {
    std::memcpy(product.panels, product.plain, sizeof product.plain);
    const auto pack = reinterpret_cast<Pack>(find(tables[1], "pack_panels"));
    if (pack(product.panels, 1, kInputs / 2, 1) != 0) return false;
  } else {
    const auto quantize = reinterpret_cast<Quantize>(find(tables[1], "quantize_weight"));
    if (quantize(weight, product.plain, 1) != 0) return false;
  }
  for (int i = 0; i < 2; ++i) {
    const auto linear = reinterpret_cast<Linear>(find(tables[i], "linear"));
    if (linear(weight, product.x, nullptr, product.out[i], kRows, kInputs, 1) != 0) return false;
  }
  return true;
}

// Returns the name of a weight format whose test matmul fails, or null if all are correct.
const char* wrong_product(const Kernel* amx, const Kernel* reference) {
  const Kernel* const tables[] = {amx, reference};
  const struct {
    const char* name;
    WeightFormat format;
  } cases[] = {{"bf16", WeightFormat::kBf16},
               {"int8", WeightFormat::kInt8},
               {"int4", WeightFormat::kInt4}};
  for (const auto& kind : cases) {
    void* const memory = std::aligned_alloc(64, sizeof(Product));
    if (memory == nullptr) return kind.name;
    Product& product = *new (memory) Product;
    const bool is_right = multiply(kind.format, tables, product) &&
                          std::memcmp(product.out[0], product.out[1], sizeof product.out[0]) == 0;
    std::free(memory);
    if (!is_right) return kind.name;
  }
  return nullptr;
}

bool find_out(const Kernel* amx, const Kernel* reference) {
  notice[0] = 0;
  if (!processor_has_amx()) return false;
  if (!ask_permission()) {
    // When a signal arrives, the system saves the tiles of the thread on the stack of the signal
    // handler.
    const char* const more =
        errno == ENOSPC ? "; a thread has an alternate signal stack that is too small for them" : "";
    std::snprintf(notice, sizeof notice,
                  "AMX is not used: the system refuses this process the tiles (arch_prctl: %s%s)",
                  std::strerror(errno), more);
    return false;
  }
  const char* const wrong = wrong_product(amx, reference);
  if (wrong == nullptr) return true;
  std::snprintf(notice, sizeof notice,
                "AMX is not used: its product of %s weights is wrong on this processor", wrong);
  return false;
}

}  // namespace

bool processor_has_amx() { return is_assumed || has_amx(); }

bool can_use_amx(const Kernel* amx, const Kernel* reference) {
  if (answer == Answer::kUnknown) answer = find_out(amx, reference) ? Answer::kYes : Answer::kNo;
  return answer == Answer::kYes;
}

const char* amx_notice() { return notice[0] != 0 ? notice : nullptr; }

}  // namespace vllm_cpu

// For tests with an emulator: assumes that the processor has AMX. The next call of can_use_amx does
// the remaining checks again.
extern "C" __attribute__((visibility("default"))) void vllm_cpu_assume_amx() {
  vllm_cpu::is_assumed = true;
  vllm_cpu::answer = vllm_cpu::Answer::kUnknown;
}
