// The activation of a gated MLP.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

// out = round(silu(gate)) * up. x: [rows, 2 * size], gate then up, rows `x_stride` elements
// apart; out: [rows, size], dense.
template <typename T>
void silu_and_mul(const T* x, T* out, int64_t rows, int64_t size, int64_t x_stride,
                  int num_threads) {
  parallel_rows(rows, 4 * size, num_threads, [&](int64_t row) {  // e^x costs about 4 passes
    const T* const gate = x + row * x_stride;
    const T* const up = gate + size;
    for_each_vector(size, [&](int64_t i, int64_t count) {
      // Below -88 e^-g stops growing, and the quotient is nothing already.
      const Vec g = max(splat(-88.0f), load(gate + i, count));
      const Vec silu = round_to<T>(g / (1.0f + exp(-g)));
      store(out + row * size + i, silu * load(up + i, count), count);
    });
  });
}

}  // namespace VLLM_ISA
