// int4 weights (linear_format.h): rounding weights to int4, repacking int4 weights of checkpoints,
// and reading rows back.
#pragma once

#include "linear.h"

namespace VLLM_ISA {

// Rounds one value in the same way as a vector of values.
template <typename T>
T to_type(float x) {
  T lanes[kLanes];
  store(lanes, splat(x));
  return lanes[0];
}

// Returns the nearest float16 (ties to even) of a finite value below 65,520; undefined for other
// values.
inline uint16_t to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const float size = __builtin_fabsf(x);
  if (size < 0x1p-14f) {  // subnormal: steps of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(size * 0x1p24f)));
  }
  bits &= 0x7fffffffu;
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

// Returns the power of two by which the scales of an output are divided, so that they fit into
// float16: the largest is then from 1 to 2. NaN if they are not finite, so that the results become
// NaN.
inline float scale_unit(float largest) {
  uint32_t bits;
  __builtin_memcpy(&bits, &largest, sizeof bits);
  bits &= 0x7f800000u;
  float unit;
  __builtin_memcpy(&unit, &bits, sizeof unit);
  if (unit == 0) return 1.0f;
  return unit < __builtin_inff() ? unit : __builtin_nanf("");
}

inline uint32_t* block_of(const LinearWeight& weight, int64_t panel, int64_t input) {
  return const_cast<uint32_t*>(weight.panels) + panel * vllm_cpu::panel_words(weight) +
         vllm_cpu::panel_words(weight, input);
}

// Returns the bit position of value i of the eight values in a word.
constexpr int q_shift(int i) { return i % 4 * 8 + i / 4 * 4; }

// Returns the value of largest magnitude in a block.
template <typename T>
float extreme_of(const T* from, int64_t count) {
  float extreme = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = to_float(from[i]);
    if (__builtin_fabsf(x) > __builtin_fabsf(extreme)) extreme = x;
  }
  return extreme;
}

// Quantizes the weights of one output. The value of largest magnitude in a block becomes -8,
// whatever its sign, because the scale takes the sign.
template <typename T>
void pack_int4_row(const LinearWeight& weight, int64_t n, const T* from) {
  const int64_t size = weight.in_features, block = weight.block_inputs, output = n % kPanel;
  const float unit = scale_unit(largest_magnitude(from, size) / 8.0f);
  const_cast<float*>(weight.scales)[n] = unit;
  for (int64_t k = 0; k < size; k += block) {
    const int64_t count = size - k < block ? size - k : block;
    uint32_t* words = block_of(weight, n / kPanel, k);
    const uint16_t half = to_half(extreme_of(from + k, count) / -8.0f / unit);
    reinterpret_cast<uint16_t*>(words)[output] = half;
    words += vllm_cpu::header_words(weight) + output;
    uint16_t halves[kLanes] = {half};
    const float scale = load_float16(halves)[0] * unit;
    const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < count; i += 8, words += kPanel) {
      uint32_t word = 0;
      for (int j = 0; j < 8; ++j) {
        const float step = __builtin_rintf(to_float(from[k + i + j]) * inverse) + 8.0f;
        const uint32_t q = step > 15.0f ? 15u : step > 0.0f ? static_cast<uint32_t>(step) : 0u;
        word |= q << q_shift(j);
      }
      *words = word;
    }
  }
}

template <typename T>
void unpack_int4_row(const LinearWeight& weight, int64_t n, T* out) {
  with_int4_code(weight, [&](auto code) {
    using Code = decltype(code);
    const int64_t size = weight.in_features, output = n % kPanel, first = output % kLanes;
    const uint32_t* const panel =
        weight.panels + n / kPanel * vllm_cpu::panel_words(weight);
    for_each_block<Code>(weight, panel, size, [&](Int4Block<Code> block, int64_t k, int64_t count) {
      const int64_t vector = output - first;
      float scale = block.scales(vector)[first];
      if (!Code::kHasMinimums) scale *= weight.scales[n];
      const float minimum = Code::kHasMinimums ? block.minimums(vector)[first] : 0.0f;
      const int32_t zero =
          Code::kHasZeros ? static_cast<int32_t>(block.zeros(vector)[first]) : Code::kZero;
      for (int64_t i = 0; i < count; ++i) {
        const int32_t q =
            static_cast<int32_t>(block.quads(i / 4, vector)[first] >> (i % 4 * 8) & 0xffu);
        const int64_t input = weight.order != nullptr ? weight.order[k + i] : k + i;
        out[input] = to_type<T>(static_cast<float>(q - zero) * scale - minimum);
      }
    });
  });
}

using vllm_cpu::Int4Source;

// Returns the 4-bit value of input k and output n, read from the words of a checkpoint.
inline uint32_t source_q(const Int4Source& source, int64_t k, int64_t n, int64_t out_features) {
  if (source.is_awq) {
    // A word contains the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits on.
    const int64_t place = n % 8 / 2 + n % 2 * 4;
    return source.words[(k * out_features + n) / 8] >> (4 * place) & 15u;
  }
  return source.words[k / 8 * out_features + n] >> (k % 8 * 4) & 15u;
}

inline void convert_int4_panel(const LinearWeight& weight, const Int4Source& source,
                               int64_t panel) {
  const int64_t begin = panel * kPanel, size = weight.in_features, outs = weight.out_features;
  const int64_t width = outs - begin < kPanel ? outs - begin : int64_t{kPanel};
  float* const units = const_cast<float*>(weight.scales) + begin;
  for (int64_t n = 0; n < width; ++n) {
    float largest = 0;
    for (int64_t g = 0; g < source.num_groups; ++g) {
      const float scale = __builtin_fabsf(source.scales[g * outs + begin + n]);
      largest = scale > largest || scale != scale ? scale : largest;
    }
    units[n] = scale_unit(largest);
  }
  for (int64_t k = 0; k < size; k += weight.block_inputs) {
    uint32_t* words = block_of(weight, panel, k);
    const int64_t group = k / source.group_inputs * outs + begin;
    uint16_t* const scales = reinterpret_cast<uint16_t*>(words);
    uint8_t* const zeros = reinterpret_cast<uint8_t*>(words + vllm_cpu::kScaleWords);
    for (int64_t n = 0; n < width; ++n) {
      scales[n] = to_half(source.scales[group + n] / units[n]);
      if (weight.has_zeros) zeros[n] = source.zeros[group + n];
    }
    words += vllm_cpu::header_words(weight);
    for (int64_t i = k; i < k + weight.block_inputs && i < size; i += 8, words += kPanel) {
      for (int j = 0; j < 8; ++j) {
        const int64_t input = weight.order != nullptr ? weight.order[i + j] : i + j;
        for (int64_t n = 0; n < width; ++n) {
          words[n] |= source_q(source, input, begin + n, outs) << q_shift(j);
        }
      }
    }
  }
}

// Fills an int4 weight, whose memory is zeroed, from a weight of a checkpoint.
inline void convert_int4(const LinearWeight& weight, const Int4Source& source, int num_threads) {
  parallel_for(vllm_cpu::num_panels(weight), 1, num_threads,
               [&](int64_t begin, int64_t end, int) {
                 for (int64_t panel = begin; panel < end; ++panel) {
                   convert_int4_panel(weight, source, panel);
                 }
               });
}

}  // namespace VLLM_ISA
