// The C entry points, and the choice of the instruction set they run on.
//
// The first call picks the best set that this build has and this processor runs. VLLM_WITH_<SET>
// is defined for each set whose kernels were compiled; `base` always is.
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

namespace {

struct Isa {
  const char* name;
  bool (*runs_here)();
  const vllm_cpu::Kernels<float>* f32;
  const vllm_cpu::Kernels<bf16>* half;
};

// Best first.
const Isa kIsas[] = {
#ifdef VLLM_WITH_AVX512
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
     },
     &vllm_avx512::kernels_f32, &vllm_avx512::kernels_bf16},
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
  VLLM_EXPORT void vllm_silu_and_mul_##suffix(const T* x, T* out, int64_t rows, int64_t size,     \
                                              int64_t x_stride, int num_threads) {                \
    isa->table->silu_and_mul(x, out, rows, size, x_stride, num_threads);                          \
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
  VLLM_EXPORT int64_t vllm_paged_attention_decode_##suffix(                                       \
      const T* query, const T* key_cache, const T* value_cache, const int32_t* block_tables,      \
      const int32_t* seq_lens, T* out, int64_t num_requests, int64_t num_heads,                   \
      int64_t num_kv_heads, int64_t head_size, int64_t num_blocks, int64_t block_size,            \
      int64_t max_blocks, int64_t query_stride, int64_t table_stride, float scale,                \
      int64_t sliding_window, int num_threads) {                                                  \
    return isa->table->paged_attention_decode(                                                    \
        {query, key_cache, value_cache, block_tables, seq_lens, out, num_requests, num_heads,     \
         num_kv_heads, head_size, num_blocks, block_size, max_blocks, query_stride, table_stride, \
         scale, sliding_window},                                                                  \
        num_threads);                                                                             \
  }

VLLM_ENTRIES(f32, float, f32)
VLLM_ENTRIES(bf16, bf16, half)
