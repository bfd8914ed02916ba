// Weights of one byte that are widened to bf16 just before they are multiplied: fp8 (e4m3), and whole
// numbers from 0 to 255 with zero points. Widening is exact, and inputs stay as they are.
//
// A Code has: kHasZeros, for weights with zero points, which may also have an order of inputs; and
// widen, which makes two bf16 in each lane of the bytes in bits 0 to 7 and 16 to 23.
#pragma once

#include "fp8.h"
#include "linear_tile.h"

namespace VLLM_ISA {

struct Fp8Code {
  static constexpr bool kHasZeros = false;

  static VLLM_INLINE Bits widen(Bits pair, Vec) {
#ifdef __AVX512BW__
    return reinterpret_cast<Bits>(
        widen_halves<E4m3, false>(reinterpret_cast<__m512i>(pair), tiny_halves<E4m3>()));
#else
    const Bits low = reinterpret_cast<Bits>(widen_fp8<E4m3>(pair & 0xffu));
    const Bits high = reinterpret_cast<Bits>(widen_fp8<E4m3>(pair >> 16));
    return low >> 16 | high;
#endif
  }
};

// q - zero, from -256 to 255, has at most 8 significant bits.
struct Uint8Code {
  static constexpr bool kHasZeros = true;

  static VLLM_INLINE Bits widen(Bits pair, Vec zero) {
    const auto number = [zero](Bits q) {
      return reinterpret_cast<Bits>(
          __builtin_convertvector(reinterpret_cast<Ints>(q), Vec) - zero);
    };
    return number(pair & 0xffu) >> 16 | number(pair >> 16);
  }
};

// Multiplies stretches of a panel that were widened before, so that all rows share that work.
template <class DotOf, class CodeOf>
struct ByteTile {
  using Dot = DotOf;
  using Code = CodeOf;
  using Input = typename Dot::Input;
  using Acc = Vec;
  static constexpr int64_t kRowUnit = 1;
};

constexpr int64_t kWidenedInputs = 128;  // of a panel at a time: 16 KiB

// The words of `inputs` inputs of a panel as those of a bf16 weight. zeros: of the panel, or null.
template <class Code>
VLLM_INLINE void widen_words(const uint32_t* w, const float* zeros, int64_t inputs, uint32_t* out) {
  for (int64_t word = 0; word < inputs / 4; ++word) {
#pragma GCC unroll 16
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      const Vec zero = Code::kHasZeros ? load(zeros + column) : Vec{};
      const uint32_t* const from = w + word * kPanel + column;
      __builtin_prefetch(from + kWidenedInputs / 4 * kPanel);  // while these are multiplied
      const Bits bytes = load_bits(from);
      const Bits first = Code::widen(bytes & 0x00ff00ffu, zero);
      const Bits second = Code::widen((bytes >> 8) & 0x00ff00ffu, zero);
      uint32_t* const to = out + 2 * word * kPanel + column;
      __builtin_memcpy(to, &first, sizeof first);
      __builtin_memcpy(to + kPanel, &second, sizeof second);
    }
  }
}

// Where in its word input number i of four is, in bits.
constexpr int byte_shift(int i) { return i == 1 ? 16 : i == 2 ? 8 : 8 * i; }

// The weight of one output and input.
inline float byte_weight(const LinearWeight& weight, int64_t n, int64_t input) {
  const int64_t words = vllm_cpu::panel_words(weight);
  const uint32_t word = weight.panels[n / kPanel * words + input / 4 * kPanel + n % kPanel];
  const Bits byte = (word >> byte_shift(input % 4) & 0xffu) - Bits{};
  const int64_t place = input / weight.block_inputs * vllm_cpu::num_panels(weight) * kPanel + n;
  const float number = weight.format == vllm_cpu::WeightFormat::kFp8
                           ? widen_fp8<E4m3>(byte)[0]
                           : static_cast<float>(byte[0]) - weight.zeros[place];
  return number * weight.scales[place];
}

}  // namespace VLLM_ISA
