// Writes new keys and values into the paged cache.
#pragma once

#include "fp8.h"
#include "parallel.h"
#include "simd.h"

namespace VLLM_ISA {

// Copies new keys and values into the cache. key, value: [T, row_size], tokens `*_stride` elements
// apart; caches: [num_slots, row_size], dense. A token with a negative slot is skipped. value may
// be null: there are only keys. Returns -1, or a token whose slot is out of range; nothing is
// written then.
template <typename T>
int64_t reshape_and_cache(const T* key, const T* value, T* key_cache, T* value_cache,
                          const int64_t* slot_mapping, int64_t num_tokens, int64_t row_size,
                          int64_t key_stride, int64_t value_stride, int64_t num_slots,
                          int num_threads) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    if (slot_mapping[t] >= num_slots) return t;
  }
  parallel_rows(num_tokens, 2 * row_size, num_threads, [&](int64_t t) {
    const int64_t slot = slot_mapping[t];
    if (slot < 0) return;
    __builtin_memcpy(key_cache + slot * row_size, key + t * key_stride, row_size * sizeof(T));
    if (value == nullptr) return;
    __builtin_memcpy(value_cache + slot * row_size, value + t * value_stride, row_size * sizeof(T));
  });
  return -1;
}

// Writes keys and values into a cache of 8-bit floats.
template <class Format, typename T>
void narrow_into_cache(const vllm_cpu::CacheFp8Args<T>& args, int num_threads) {
  const int64_t size = args.head_size, row_size = args.num_heads * size;
  const auto narrow = [&](const T* from, const float* scales, uint8_t* to) {
    for (int64_t h = 0; h < args.num_heads; ++h) {
      narrow_row<Format>(from + h * size, size, scales[h], to + h * size);
    }
  };
  parallel_rows(args.num_tokens, 4 * row_size, num_threads, [&](int64_t t) {
    const int64_t slot = args.slot_mapping[t];
    if (slot < 0) return;
    narrow(args.key + t * args.key_stride, args.key_scales, args.key_cache + slot * row_size);
    if (args.value == nullptr) return;
    narrow(args.value + t * args.value_stride, args.value_scales,
           args.value_cache + slot * row_size);
  });
}

template <typename T>
int64_t reshape_and_cache_fp8(const vllm_cpu::CacheFp8Args<T>& args, int num_threads) {
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    if (args.slot_mapping[t] >= args.num_slots) return t;
  }
  if (args.cache_type == vllm_cpu::CacheType::kE4m3) {
    narrow_into_cache<E4m3>(args, num_threads);
  } else {
    narrow_into_cache<E5m2>(args, num_threads);
  }
  return -1;
}

}  // namespace VLLM_ISA
