// The C entry points, and the choice of the instruction set they run on.
//
// Loading the library picks the best set that this build has and this processor runs.
// VLLM_WITH_<SET> is defined for each set whose kernels were compiled; `base` always is.
#include <cstring>

#include "dtypes.h"
#include "kernels.h"

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

#define VLLM_DECLARE(isa)                            \
  namespace isa {                                    \
  extern const vllm_cpu::Kernels<float> kernels_f32; \
  extern const vllm_cpu::Kernels<bf16> kernels_bf16; \
  }
VLLM_DECLARE(vllm_base)
#ifdef VLLM_WITH_AVX2
VLLM_DECLARE(vllm_avx2)
#endif
#ifdef VLLM_WITH_AVX512
VLLM_DECLARE(vllm_avx512)
#endif
#ifdef VLLM_WITH_AVX512_VNNI
VLLM_DECLARE(vllm_avx512_vnni)
#endif
#ifdef VLLM_WITH_AVX512_BF16
VLLM_DECLARE(vllm_avx512_bf16)
#endif

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const vllm_cpu::Kernels<float>* f32;
  const vllm_cpu::Kernels<bf16>* half;
};

#if defined(VLLM_WITH_AVX512) || defined(VLLM_WITH_AVX512_VNNI) || defined(VLLM_WITH_AVX512_BF16)
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Best first.
const Isa kIsas[] = {
#ifdef VLLM_WITH_AVX512_BF16  // with VNNI: every processor that has the one has the other
    {"avx512_bf16",
     [] {
       return runs_avx512() && __builtin_cpu_supports("avx512vnni") &&
              __builtin_cpu_supports("avx512bf16");
     },
     &vllm_avx512_bf16::kernels_f32, &vllm_avx512_bf16::kernels_bf16},
#endif
#ifdef VLLM_WITH_AVX512_VNNI
    {"avx512_vnni", [] { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); },
     &vllm_avx512_vnni::kernels_f32, &vllm_avx512_vnni::kernels_bf16},
#endif
#ifdef VLLM_WITH_AVX512
    {"avx512", runs_avx512, &vllm_avx512::kernels_f32, &vllm_avx512::kernels_bf16},
#endif
#ifdef VLLM_WITH_AVX2
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     &vllm_avx2::kernels_f32, &vllm_avx2::kernels_bf16},
#endif
    {"base", [] { return true; }, &vllm_base::kernels_f32, &vllm_base::kernels_bf16},
};

// Null name: the best one.
const Isa* find_isa(const char* name) {
  for (const Isa& isa : kIsas) {
    if ((name == nullptr || std::strcmp(name, isa.name) == 0) && isa.runs_here()) return &isa;
  }
  return nullptr;
}

const Isa* isa = find_isa(nullptr);

}  // namespace

// The name of the instruction set in use.
VLLM_EXPORT const char* vllm_cpu_isa() { return isa->name; }

// Uses another instruction set, for tests; not to be called while a kernel runs.
// False, and no change, when this build lacks it or this processor cannot run it.
VLLM_EXPORT bool vllm_cpu_set_isa(const char* name) {
  const Isa* const found = find_isa(name);
  if (found != nullptr) isa = found;
  return found != nullptr;
}

#define VLLM_ENTRIES(suffix, T, table)                                                            \
  VLLM_EXPORT void vllm_rms_norm_##suffix(const T* x, const T* weight, T* out, int64_t rows,      \
                                          int64_t heads, int64_t hidden, int64_t x_stride,        \
                                          float eps, int num_threads) {                           \
    isa->table->rms_norm(x, weight, out, rows, heads, hidden, x_stride, eps, num_threads);        \
  }                                                                                               \
  VLLM_EXPORT void vllm_fused_add_rms_norm_##suffix(T* x, T* residual, const T* weight,           \
                                                    int64_t rows, int64_t hidden, float eps,      \
                                                    int num_threads) {                            \
    isa->table->fused_add_rms_norm(x, residual, weight, rows, hidden, eps, num_threads);          \
  }                                                                                               \
  VLLM_EXPORT void vllm_layer_norm_##suffix(const T* x, const T* weight, const T* bias, T* out,   \
                                            int64_t rows, int64_t size, float eps,                \
                                            int num_threads) {                                    \
    isa->table->layer_norm(x, weight, bias, out, rows, size, eps, num_threads);                   \
  }                                                                                               \
  VLLM_EXPORT void vllm_silu_and_mul_##suffix(const T* x, T* out, int64_t rows, int64_t size,     \
                                              int64_t x_stride, int num_threads) {                \
    isa->table->silu_and_mul(x, out, rows, size, x_stride, num_threads);                          \
  }                                                                                               \
  VLLM_EXPORT void vllm_gelu_and_mul_##suffix(const T* x, T* out, int64_t rows, int64_t size,     \
                                              int64_t x_stride, int is_tanh, int num_threads) {   \
    isa->table->gelu_and_mul(x, out, rows, size, x_stride, is_tanh, num_threads);                 \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_rotary_embedding_##suffix(                                             \
      const int64_t* positions, T* query, T* key, const float* cos_sin, int64_t num_tokens,       \
      int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t query_stride,           \
      int64_t key_stride, int64_t rot_dim, int64_t max_positions, int is_neox, int num_threads) { \
    return isa->table->rotary_embedding(positions, query, key, cos_sin, num_tokens, num_heads,    \
                                        num_kv_heads, head_size, query_stride, key_stride,        \
                                        rot_dim, max_positions, is_neox, num_threads);            \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_reshape_and_cache_##suffix(                                            \
      const T* key, const T* value, T* key_cache, T* value_cache, const int64_t* slot_mapping,    \
      int64_t num_tokens, int64_t row_size, int64_t key_stride, int64_t value_stride,             \
      int64_t num_slots, int num_threads) {                                                       \
    return isa->table->reshape_and_cache(key, value, key_cache, value_cache, slot_mapping,        \
                                         num_tokens, row_size, key_stride, value_stride,          \
                                         num_slots, num_threads);                                 \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_reshape_and_cache_fp8_##suffix(const vllm_cpu::CacheFp8Args<T>* args,   \
                                                          int num_threads) {                      \
    return isa->table->reshape_and_cache_fp8(*args, num_threads);                                 \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_paged_attention_decode_##suffix(const vllm_cpu::DecodeArgs<T>* args,   \
                                                           int num_threads) {                     \
    return isa->table->paged_attention_decode(*args, num_threads);                                \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_paged_attention_prefill_##suffix(                                      \
      const vllm_cpu::PrefillArgs<T>* args, int num_threads) {                                    \
    return isa->table->paged_attention_prefill(*args, num_threads);                               \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_linear_##suffix(const vllm_cpu::LinearWeight* weight, const T* x,      \
                                           const T* bias, T* out, int64_t rows, int64_t x_stride, \
                                           int num_threads) {                                     \
    return isa->table->linear(*weight, x, bias, out, rows, x_stride, num_threads);                \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_quantize_weight_##suffix(const vllm_cpu::LinearWeight* weight,         \
                                                    const T* from, int num_threads) {             \
    return isa->table->quantize_weight(*weight, from, num_threads);                               \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_linear_rows_##suffix(const vllm_cpu::LinearWeight* weight,             \
                                                const int64_t* ids, int64_t count, T* out,        \
                                                int num_threads) {                                \
    return isa->table->linear_rows(*weight, ids, count, out, num_threads);                        \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_program_scratch_bytes_##suffix(const vllm_cpu::Program* program,       \
      int64_t num_tokens, int num_threads) {                                                      \
    return isa->table->program_scratch_bytes(*program, num_tokens, num_threads);                  \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_program_forward_##suffix(const vllm_cpu::Program* program,             \
      vllm_cpu::ProgramLaunch* launch, int num_threads) {                                         \
    return isa->table->program_forward(*program, *launch, num_threads);                           \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_decode_step_scratch_bytes_##suffix(                                    \
      const vllm_cpu::Program* decoder, const vllm_cpu::Program* head,                            \
      const vllm_cpu::DecodeStepRows* rows, int64_t n, int num_threads) {                         \
    return isa->table->decode_step_scratch_bytes(*decoder, *head, *rows, n, num_threads);         \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_decode_step_##suffix(                                                  \
      const vllm_cpu::Program* decoder, const vllm_cpu::Program* head,                            \
      const vllm_cpu::DecodeStepRows* rows, vllm_cpu::DecodeStepLaunch* launch, int num_threads) {\
    return isa->table->decode_step(*decoder, *head, *rows, *launch, num_threads);                 \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_sample_##suffix(const vllm_cpu::SampleArgs<T>* args,                   \
                                           int num_threads) {                                     \
    return isa->table->sample(*args, num_threads);                                                \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_gather_logprobs_##suffix(const vllm_cpu::LogprobArgs<T>* args,         \
                                                    int num_threads) {                            \
    return isa->table->gather_logprobs(*args, num_threads);                                       \
  }                                                                                               \
  VLLM_EXPORT int64_t vllm_moe_##suffix(const vllm_cpu::MoeArgs<T>* args, int num_threads) {      \
    return isa->table->moe(*args, num_threads);                                                   \
  }

VLLM_ENTRIES(f32, float, f32)
VLLM_ENTRIES(bf16, bf16, half)

// The number of a kind of operation in a program; -1: there is none of this name.
VLLM_EXPORT int64_t vllm_operation_kind(const char* name) {
#define VLLM_NAME(kind, cost) #kind,
  static const char* const kNames[] = {VLLM_ROW_OPERATIONS(VLLM_NAME) "linear", "attend"};
#undef VLLM_NAME
  for (int64_t i = 0; i < static_cast<int64_t>(sizeof(kNames) / sizeof(kNames[0])); ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return i;
  }
  return -1;
}

// In place; for weights that are not quantized.
VLLM_EXPORT int64_t vllm_pack_panels(uint32_t* panels, int64_t num_panels, int64_t words,
                                     int num_threads) {
  return isa->f32->pack_panels(panels, num_panels, words, num_threads);
}

// Random numbers of the sampler: the first `count` at a position of each key; out [num_rows, count].
VLLM_EXPORT void vllm_draw_exponentials(const uint64_t* keys, const int64_t* positions,
                                        int64_t num_rows, int64_t count, float* out,
                                        int num_threads) {
  isa->f32->draw_exponentials(keys, positions, num_rows, count, out, num_threads);
}

// Fills an int4 weight, whose memory is zeroed, from a checkpoint's.
VLLM_EXPORT void vllm_convert_int4(const vllm_cpu::LinearWeight* weight,
                                   const vllm_cpu::Int4Source* source, int num_threads) {
  isa->f32->convert_int4(*weight, *source, num_threads);
}

// Bytes of the packed panels of a weight, whose pointers need not be set yet.
VLLM_EXPORT int64_t vllm_packed_bytes(const vllm_cpu::LinearWeight* weight) {
  return vllm_cpu::num_panels(*weight) * vllm_cpu::panel_words(*weight) * 4;
}
