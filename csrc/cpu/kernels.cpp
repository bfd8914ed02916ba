// The table of kernels: one entry per operation, whose types are derived from its function. This
// file is compiled once for each instruction set, with -DVLLM_ISA=<its name> and its compiler flags
// (the list is in setup.py).
#include <cstdint>
#include <type_traits>

#include "abi.h"
#include "attention.h"
#include "attention_prefill.h"
#include "cache.h"
#include "collectives.h"
#include "decode_step.h"
#include "delta_rule.h"
#include "linear_pack.h"
#include "low_rank.h"
#include "moe.h"
#include "rotary.h"
#include "row_operations.h"
#include "sampling_logprobs.h"
#include "state_space.h"

namespace VLLM_ISA {
namespace {

// Returns the letter of a type in `Kernel::types`; a reference is passed as a pointer.
template <typename T>
constexpr char letter() {
  if (std::is_void_v<T>) return 'v';
  if (std::is_pointer_v<T> || std::is_reference_v<T>) return 'p';
  if (std::is_same_v<T, int64_t>) return 'q';
  if (std::is_same_v<T, int>) return 'i';
  return std::is_same_v<T, float> ? 'f' : '?';
}

// The exported entry of a kernel: it calls the version of the kernel for the instruction set in
// use.
template <auto function>
struct Entry;

template <typename Result, typename... Args, Result (*function)(Args...)>
struct Entry<function> {
  static_assert(letter<Result>() != '?' && ((letter<Args>() != '?') && ...));
  static constexpr char types[] = {letter<Result>(), letter<Args>()..., 0};
  static inline Result (*chosen)(Args...) = function;

  static Result call(Args... args) { return chosen(args...); }
  static void choose(vllm_cpu::Function other) { chosen = reinterpret_cast<Result (*)(Args...)>(other); }
  static vllm_cpu::Function own() { return reinterpret_cast<vllm_cpu::Function>(function); }
  static vllm_cpu::Function entry() { return reinterpret_cast<vllm_cpu::Function>(call); }
  static constexpr vllm_cpu::Kernel row(const char* name, const char* dtype) {
    return {name, dtype, types, own, entry, choose};
  }
};

}  // namespace

#define KERNEL(name) \
  Entry<&name<float>>::row(#name, "f32"), Entry<&name<bf16>>::row(#name, "bf16")
#define KERNEL_WITHOUT_DTYPE(name) Entry<&name>::row(#name, "-")
#define STRUCT(...) {"struct", __VA_ARGS__::kName, sizeof(__VA_ARGS__), __VA_ARGS__::kText}
#define CONSTANT(name) {"constant", #name, size_t(vllm_cpu::name), ""}
#define ENUM(name) {"enum", name##Text::kName, sizeof(name), name##Text::kText}

// The last entry has no name.
extern const vllm_cpu::Kernel kernels[];
constexpr vllm_cpu::Kernel kernels[] = {
    KERNEL(row_operation),
    KERNEL(rotary_embedding),
    KERNEL(reshape_and_cache),
    KERNEL(reshape_and_cache_fp8),
    KERNEL(paged_attention_decode),
    KERNEL(paged_attention_prefill),
    KERNEL(linear),
    KERNEL(linear_rows),
    KERNEL(head_linear),
    KERNEL(quantize_weight),
    KERNEL_WITHOUT_DTYPE(pack_panels),
    KERNEL_WITHOUT_DTYPE(packed_bytes),
    KERNEL_WITHOUT_DTYPE(convert_int4),
    KERNEL(moe),
    KERNEL(add_low_rank),
    KERNEL_WITHOUT_DTYPE(tile_matrix),
    KERNEL_WITHOUT_DTYPE(scan_tokens),
    KERNEL_WITHOUT_DTYPE(delta_tokens),
    KERNEL(program_scratch_bytes),
    KERNEL(program_forward),
    KERNEL(decode_step_scratch_bytes),
    KERNEL(decode_step),
    KERNEL(sample),
    KERNEL(gather_logprobs),
    KERNEL_WITHOUT_DTYPE(draw_exponentials),
    KERNEL(all_reduce),
    KERNEL_WITHOUT_DTYPE(all_gather),
    {},
};

// Types of the arguments and results of kernels: constants, enums and structs. A struct has the
// same fields for each dtype.
extern const vllm_cpu::Type types[];
constexpr vllm_cpu::Type types[] = {
    CONSTANT(kPanel),
    CONSTANT(kRankBlock),
    CONSTANT(kRankInputs),
    CONSTANT(kMaxBuffers),
    CONSTANT(kMaxSectionedElements),
    CONSTANT(kMaxTopK),
    CONSTANT(kMaxExpertGroups),
    CONSTANT(kNotPlain),
    CONSTANT(kVocabBlock),
    CONSTANT(kMaxRanks),
    CONSTANT(kExchanged),
    CONSTANT(kAborted),
    CONSTANT(kMissing),
    ENUM(vllm_cpu::CacheType),
    ENUM(vllm_cpu::WeightFormat),
    ENUM(vllm_cpu::Activation),
    ENUM(vllm_cpu::ExpertActivation),
    ENUM(vllm_cpu::Routing),
    ENUM(vllm_cpu::OperationKind),
    ENUM(vllm_cpu::ProgramStatus),
    ENUM(vllm_cpu::Param),
    STRUCT(vllm_cpu::CacheFp8Args<float>),
    STRUCT(vllm_cpu::AttentionArgs<float>),
    STRUCT(vllm_cpu::LinearWeight),
    STRUCT(vllm_cpu::Int4Source),
    STRUCT(vllm_cpu::HeadLinearArgs<float>),
    STRUCT(vllm_cpu::Experts),
    STRUCT(vllm_cpu::MoeArgs<float>),
    STRUCT(vllm_cpu::LowRank),
    STRUCT(vllm_cpu::TileArgs),
    STRUCT(vllm_cpu::AdaptedRows),
    STRUCT(vllm_cpu::LowRankArgs),
    STRUCT(vllm_cpu::RowTensors),
    STRUCT(vllm_cpu::Operation),
    STRUCT(vllm_cpu::ProgramBuffer),
    STRUCT(vllm_cpu::Program),
    STRUCT(vllm_cpu::ProgramLaunch),
    STRUCT(vllm_cpu::DecodeStepRows),
    STRUCT(vllm_cpu::DecodeStepLaunch),
    STRUCT(vllm_cpu::SampleArgs<float>),
    STRUCT(vllm_cpu::LogprobArgs<float>),
    STRUCT(vllm_cpu::Arena),
    {},
};

}  // namespace VLLM_ISA
