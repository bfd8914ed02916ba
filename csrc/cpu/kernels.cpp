// All kernels for one instruction set. Compiled once per set, with -DVLLM_ISA=<its name> and the
// flags that go with it (the list is in setup.py).
#include "kernels.h"

#include "activation.h"
#include "attention.h"
#include "attention_prefill.h"
#include "cache.h"
#include "decode_step.h"
#include "linear_pack.h"
#include "moe.h"
#include "norm.h"
#include "rotary.h"
#include "sampling_logprobs.h"

namespace VLLM_ISA {

template <typename T>
constexpr vllm_cpu::Kernels<T> all_kernels() {
  return {rms_norm<T>,
          fused_add_rms_norm<T>,
          layer_norm<T>,
          silu_and_mul<T>,
          gelu_and_mul<T>,
          rotary_embedding<T>,
          reshape_and_cache<T>,
          reshape_and_cache_fp8<T>,
          paged_attention_decode<T>,
          paged_attention_prefill<T>,
          linear<T>,
          quantize_weight<T>,
          linear_rows<T>,
          pack_panels,
          program_scratch_bytes<T>,
          program_forward<T>,
          decode_step_scratch_bytes<T>,
          decode_step<T>,
          sample<T>,
          gather_logprobs<T>,
          draw_exponentials,
          moe<T>,
          convert_int4};
}

extern const vllm_cpu::Kernels<float> kernels_f32 = all_kernels<float>();
extern const vllm_cpu::Kernels<bf16> kernels_bf16 = all_kernels<bf16>();

}  // namespace VLLM_ISA
