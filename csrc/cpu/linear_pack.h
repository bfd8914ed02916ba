// Packs weights into the layout of linear_format.h, and reads the weights of one output back.
#pragma once

#include "linear_pack_int4.h"

namespace VLLM_ISA {

// Returns the size in bytes of the panels of a weight. Its pointers need not be set yet.
inline int64_t packed_bytes(const LinearWeight& weight) {
  return vllm_cpu::num_panels(weight) * vllm_cpu::panel_words(weight) * 4;
}

// Reorders panels in place: from [64 outputs][words] to [words][64 outputs]. Returns 0, or
// kNoMemory (nothing was changed).
inline int64_t pack_panels(uint32_t* panels, int64_t num_panels, int64_t words, int num_threads) {
  const int64_t size = words * kPanel;
  char* const scratch = vllm_cpu::workspace(num_threads * aligned(size * 4));
  if (scratch == nullptr) return kNoMemory;
  parallel_for(num_panels, 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
    uint32_t* const plain = reinterpret_cast<uint32_t*>(scratch + worker * aligned(size * 4));
    for (int64_t panel = begin; panel < end; ++panel) {
      uint32_t* const packed = panels + panel * size;
      __builtin_memcpy(plain, packed, size * 4);
      for (int64_t word = 0; word < words; word += 16) {  // one cache line of each row at a time
        const int64_t stop = word + 16 < words ? word + 16 : words;
        for (int64_t row = 0; row < kPanel; ++row) {
          for (int64_t i = word; i < stop; ++i) packed[i * kPanel + row] = plain[row * words + i];
        }
      }
    }
  });
  return 0;
}

// Quantizes the weights of one output to int8; returns the sum of the quantized values.
template <typename T>
int32_t pack_int8_row(const T* from, int64_t size, uint32_t* to, float* scale, uint8_t* bytes) {
  *scale = quantize_row(from, bytes, size);
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += bytes[i];
  for (int64_t i = 0; i < size; i += 4) {
    uint32_t word;
    __builtin_memcpy(&word, bytes + i, sizeof word);
    to[i / 4 * kPanel] = word ^ 0x80808080u;  // from x + 128 to two's complement
  }
  return sum - static_cast<int32_t>(128 * size);
}

// Fills `weight` (int8 or int4), whose memory is zeroed, from a plain matrix [out_features,
// in_features]; int4 without zero points and without an order. Returns 0, or kNoMemory.
template <typename T>
int64_t quantize_weight(const LinearWeight& weight, const T* from, int num_threads) {
  const int64_t size = weight.in_features;
  char* const scratch = vllm_cpu::workspace(num_threads * aligned(size));
  if (scratch == nullptr) return kNoMemory;
  const int64_t words = vllm_cpu::panel_words(weight);
  parallel_for(vllm_cpu::num_panels(weight), 1, num_threads,
               [&](int64_t begin, int64_t end, int worker) {
                 uint8_t* const bytes =
                     reinterpret_cast<uint8_t*>(scratch + worker * aligned(size));
                 const int64_t stop = end * kPanel;
                 for (int64_t n = begin * kPanel; n < stop && n < weight.out_features; ++n) {
                   uint32_t* const panel =
                       const_cast<uint32_t*>(weight.panels) + n / kPanel * words;
                   if (weight.format == WeightFormat::kInt4) {
                     pack_int4_row(weight, n, from + n * size);
                   } else {
                     const_cast<int32_t*>(weight.sums)[n] =
                         pack_int8_row(from + n * size, size, panel + n % kPanel,
                                       const_cast<float*>(weight.scales) + n, bytes);
                   }
                 }
               });
  return 0;
}

// Reads the weights of output n, and converts them to T.
template <typename T>
void unpack_row(const LinearWeight& weight, int64_t n, T* out) {
  if (vllm_cpu::has_int4_blocks(weight)) return unpack_int4_row(weight, n, out);
  if (vllm_cpu::has_byte_blocks(weight)) {
    for (int64_t i = 0; i < weight.in_features; ++i) {
      const int64_t input = weight.order != nullptr ? weight.order[i] : i;
      out[input] = to_type<T>(byte_weight(weight, n, i));
    }
    return;
  }
  const int64_t words = vllm_cpu::panel_words(weight);
  const uint32_t* const from = weight.panels + n / kPanel * words + n % kPanel;
  const int64_t per_word = weight.in_features * kPanel / words;
  for (int64_t i = 0; i < weight.in_features; i += per_word) {
    const uint32_t word = from[i / per_word * kPanel];
    if (per_word * int64_t{sizeof(T)} == 4) {  // same type, so copy the bits
      __builtin_memcpy(out + i, &word, sizeof word);
      continue;
    }
    float values[4];
    for (int64_t j = 0; j < per_word; ++j) {
      if (weight.format == WeightFormat::kInt8) {
        values[j] = static_cast<float>(static_cast<int8_t>(word >> (8 * j))) * weight.scales[n];
      } else if (weight.format == WeightFormat::kBf16) {
        values[j] = to_float(bf16{static_cast<uint16_t>(word >> (16 * j))});
      } else {
        __builtin_memcpy(values, &word, sizeof word);
      }
    }
    for (int64_t j = 0; j < per_word; ++j) {
      out[i + j] = to_type<T>(values[j]);
    }
  }
}

// out[i] = row ids[i] of the weight; out: [count, in_features], dense.
// Returns -1, or the first i whose id is out of range; nothing is written then.
template <typename T>
int64_t linear_rows(const LinearWeight& weight, const int64_t* ids, int64_t count, T* out,
                    int num_threads) {
  int64_t num_rows = 0;
  for (const LinearWeight* w = &weight; w != nullptr; w = w->next) num_rows += w->out_features;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_rows) return i;
  }
  // Each word is in another cache line, which costs as much as ten elements.
  parallel_rows(count, 10 * weight.in_features, num_threads, [&](int64_t i) {
    const LinearWeight* w = &weight;
    int64_t id = ids[i];
    for (; id >= w->out_features; w = w->next) id -= w->out_features;
    unpack_row(*w, id, out + i * weight.in_features);
  });
  return -1;
}

}  // namespace VLLM_ISA
