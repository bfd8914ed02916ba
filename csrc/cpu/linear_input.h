// Converts rows of x into the form that the tiles of each weight format read, and converts sums
// into results.
//
// A Kind has: Tile; kConverts, false if rows of T are read without conversion; row_size, the size
// of a converted row in Tile::Input; convert, which converts a row; and value, which makes results
// of a vector of sums.
#pragma once

#include "linear_bytes.h"
#include "linear_int4.h"
#include "linear_matrix.h"

namespace VLLM_ISA {

using vllm_cpu::ceil_div;
using vllm_cpu::WeightFormat;

// Combines all lanes into one, half by half.
template <class Op>
VLLM_INLINE int32_t fold(Ints x, Op op) {
  int32_t lanes[kLanes];
  __builtin_memcpy(lanes, &x, sizeof lanes);
#pragma GCC unroll 16
  for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) lanes[i] = op(lanes[i], lanes[i + n]);
  }
  return lanes[0];
}

// Returns the largest |x|; NaN or infinity if x contains one, so that it reaches the result.
template <typename T>
float largest_magnitude(const T* x, int64_t size) {
  Ints largest = {};  // non-negative floats have the same order as their bits, with NaN last
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Ints bits = reinterpret_cast<Ints>(load(x + i, count)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  });
  const int32_t bits = fold(largest, [](int32_t a, int32_t b) { return a > b ? a : b; });
  float max;
  __builtin_memcpy(&max, &bits, sizeof max);
  return max;
}

// Quantizes a row: writes round(x * 127 / max |x|) + offset as bytes. visit(vector) is called with
// each vector before it is cut to bytes (the low byte of each lane is the result; x is 0 after the
// end). Returns the value of one step. A row whose maximum is below 2^-121 becomes zeros.
template <typename T, class Visit>
VLLM_INLINE float quantize_row(const T* x, uint8_t* out, int64_t size, float offset, Visit visit) {
  const float max = largest_magnitude(x, size);
  // With a smaller maximum the inverse would be infinite.
  const float inverse = max > 0x1p-121f ? 127.0f / max : 0.0f;
  for_each_vector(size, [&](int64_t i, int64_t count) {
    // The low bits of 1.5 * 2^23 + n are n. Product and sum are rounded separately on every
    // processor.
    const Vec shifted = load(x + i, count) * inverse + (12582912.0f + offset);
    const Bits bits = reinterpret_cast<Bits>(shifted);
    visit(reinterpret_cast<Ints>(bits));
    const ByteLanes bytes = narrow_to_bytes(bits & 0xffu);
    __builtin_memcpy(out + i, &bytes, count);
  });
  return max / 127.0f;
}

template <typename T>
float quantize_row(const T* x, uint8_t* out, int64_t size) {
  return quantize_row(x, out, size, 128.0f, [](Ints) {});
}

template <typename T, class Dot>
struct FloatKind {
  using Tile = DenseTile<Dot>;
  using Input = typename Tile::Input;
  static constexpr bool kConverts = sizeof(Input) != sizeof(T);

  static int64_t row_size(const LinearWeight& weight) { return weight.in_features; }

  static void convert(const LinearWeight& weight, const T* from, Input* to) {
    for_each_vector(weight.in_features, [&](int64_t i, int64_t count) {
      store(to + i, load(from + i, count), count);
    });
  }

  static VLLM_INLINE Vec value(const LinearWeight&, const Input*, Vec sum, int64_t) { return sum; }
};

// Selects the tiles for each weight format: matrix tiles, or vectors if there are no matrix tiles.
#ifdef VLLM_MATRIX_TILES

// Rows stay bf16, and are copied to the row distance that matrix tiles read fastest.
struct Bf16MatrixKind {
  using Tile = DenseMatrix<TilesOfBf16, DotBf16>;
  using Input = bf16;
  static constexpr bool kConverts = true;

  static int64_t row_size(const LinearWeight& weight) {
    return tile_row_bytes(weight.in_features * int64_t{sizeof(bf16)}) / int64_t{sizeof(bf16)};
  }

  static void convert(const LinearWeight& weight, const bf16* from, Input* to) {
    __builtin_memcpy(to, from, weight.in_features * sizeof(bf16));
  }

  static VLLM_INLINE Vec value(const LinearWeight&, const Input*, Vec sum, int64_t) { return sum; }
};
using Int8Tile = Int8Matrix;
template <class Code>
using Int4KindTile = Int4Matrix<Code>;

inline int64_t int8_row_size(int64_t size) { return tile_row_bytes(size + int64_t{sizeof(float)}); }

#else

using Int8Tile = DenseTile<DotInt8>;
template <class Code>
using Int4KindTile = Int4Tile<Code>;

inline int64_t int8_row_size(int64_t size) {
  return size + int64_t{sizeof(float) / sizeof(Int8Tile::Input)};
}

#endif

// Unpacks bytes in the second half of a row: each word of four bytes becomes the two pairs of
// 16-bit integers that DotInt8 multiplies.
template <typename Input>
inline void spread(Input* row, int64_t size) {
  static_assert(sizeof(Input) == 2);
  const char* const bytes = reinterpret_cast<const char*>(row) + size;
  for (int64_t i = 0; i < size; i += 4) {
    uint32_t word;
    __builtin_memcpy(&word, bytes + i, sizeof word);
    const uint32_t pairs[] = {word & 0x00ff00ffu, (word >> 8) & 0x00ff00ffu};
    __builtin_memcpy(row + i, pairs, sizeof pairs);
  }
}

// A converted row is the quantized x + 128 as Tile::Input, followed by the scale.
template <typename T>
struct Int8Kind {
  using Tile = Int8Tile;
  using Input = typename Tile::Input;
  static constexpr bool kConverts = true;

  static int64_t row_size(const LinearWeight& weight) { return int8_row_size(weight.in_features); }

  static void convert(const LinearWeight& weight, const T* from, Input* to) {
    const int64_t size = weight.in_features;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(to) + (sizeof(Input) - 1) * size;
    const float scale = quantize_row(from, bytes, size);
    if constexpr (sizeof(Input) > 1) spread<Input>(to, size);
    __builtin_memcpy(to + size, &scale, sizeof scale);
  }

  static VLLM_INLINE Vec value(const LinearWeight& weight, const Input* row, Ints sum,
                               int64_t output) {
    const Ints weights = reinterpret_cast<Ints>(load_bits(weight.sums + output));
    const Vec steps = __builtin_convertvector(sum - (weights << 7), Vec);
    return steps * load(weight.scales + output) *
           reinterpret_cast<Vec>(splat_bits(row + weight.in_features));
  }
};

// A converted row consists of blocks, each with an Int4Header and the bytes of its inputs.
template <typename T, class Code>
struct Int4Kind {
  using Tile = Int4KindTile<Code>;
  using Input = int8_t;
  static constexpr bool kConverts = true;

  static int64_t row_size(const LinearWeight& weight) {
    const int64_t blocks = ceil_div(weight.in_features, weight.block_inputs);
    return blocks * (weight.block_inputs + int64_t{sizeof(Int4Header)});
  }

  static void convert(const LinearWeight& weight, const T* from, Input* to) {
    const int64_t block = weight.block_inputs;
    for (int64_t k = 0; k < weight.in_features; k += block) {
      const int64_t left = weight.in_features - k;
      const int64_t count = left < block ? left : block;
      if (weight.order == nullptr) {
        convert_block(from + k, count, to);
      } else {
        T gathered[vllm_cpu::kMaxBlockInputs];
        for (int64_t i = 0; i < count; ++i) gathered[i] = from[weight.order[k + i]];
        convert_block(gathered, count, to);
      }
      to += sizeof(Int4Header) + block;
    }
  }

  static VLLM_INLINE Vec value(const LinearWeight& weight, const Input*, Vec sum, int64_t output) {
    return Code::kHasMinimums ? sum : sum * load(weight.scales + output);
  }

 private:
  static VLLM_INLINE void convert_block(const T* from, int64_t count, Input* to) {
    Ints sums = {};
    const auto add = [&](Ints steps) { sums += (steps << 24) >> 24; };
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(to + sizeof(Int4Header));
    Int4Header header;
    header.scale = quantize_row(from, bytes, count, 0.0f, add);
    const int32_t sum = fold(sums, [](int32_t a, int32_t b) { return a + b; });
    if (Code::kHasMinimums) {
      header.sum = header.scale * static_cast<float>(sum);
    } else {
      header.start = Code::kHasZeros ? -sum & 0xffff : -sum * Code::kZero;
    }
    __builtin_memcpy(to, &header, sizeof header);
  }
};

// A converted row is bf16 or float, for weights of bytes or codes that are converted to bf16.
template <typename T, class Dot, class Code>
struct ByteKind {
  using Tile = ByteTile<Dot, Code>;
  using Input = typename Tile::Input;
  static constexpr bool kConverts = Code::kHasZeros || sizeof(Input) != sizeof(T);

  static int64_t row_size(const LinearWeight& weight) { return weight.in_features; }

  static void convert(const LinearWeight& weight, const T* from, Input* to) {
    if (weight.order == nullptr) return FloatKind<T, Dot>::convert(weight, from, to);
    for (int64_t i = 0; i < weight.in_features; ++i) {
      if constexpr (sizeof(Input) == sizeof(T)) {
        to[i] = from[weight.order[i]];
      } else {
        to[i] = to_float(from[weight.order[i]]);
      }
    }
  }

  static VLLM_INLINE Vec value(const LinearWeight&, const Input*, Vec sum, int64_t) { return sum; }
};

#ifdef VLLM_MATRIX_TILES
// The same rows, read by matrix tiles.
template <class Code>
struct ByteMatrixKind : Bf16MatrixKind {
  using Tile = ByteMatrix<Code>;

  static void convert(const LinearWeight& weight, const bf16* from, Input* to) {
    ByteKind<bf16, DotBf16, Code>::convert(weight, from, to);
  }
};
#endif

// Calls body with the Kind for weights of bytes and rows of T.
template <typename T, class Code, class Body>
VLLM_INLINE int64_t with_byte_kind(Body body) {
#if defined(VLLM_MATRIX_TILES)
  if constexpr (sizeof(T) == sizeof(bf16)) return body(ByteMatrixKind<Code>{});
#elif defined(VLLM_DOT_BF16)
  if constexpr (sizeof(T) == sizeof(bf16)) return body(ByteKind<T, DotBf16, Code>{});
#endif
  return body(ByteKind<T, DotWide, Code>{});
}

// Calls body(Code{}) with the Code of a weight of 4 or 5 bits.
template <class Body>
VLLM_INLINE auto with_int4_code(const LinearWeight& weight, Body body) {
  switch (weight.format) {
    case WeightFormat::kMxfp4:
      return body(E2m1Code{});
    case WeightFormat::kInt4Minimums:
      return body(Int4MinimumsCode{});
    case WeightFormat::kInt5Minimums:
      return body(Int5MinimumsCode{});
    default:
      return weight.has_zeros ? body(Int4ZerosCode{}) : body(Int4Code{});
  }
}

// Calls body(Kind{}) with the Kind for a weight and rows of T.
template <typename T, class Body>
VLLM_INLINE int64_t with_kind(const LinearWeight& weight, Body body) {
  switch (weight.format) {
    case WeightFormat::kFloat:
      return body(FloatKind<T, DotFloat>{});
    case WeightFormat::kBf16:
#if defined(VLLM_MATRIX_TILES)
      if constexpr (sizeof(T) == sizeof(bf16)) return body(Bf16MatrixKind{});
#elif defined(VLLM_DOT_BF16)
      if constexpr (sizeof(T) == sizeof(bf16)) return body(FloatKind<T, DotBf16>{});
#endif
      return body(FloatKind<T, DotWide>{});
    case WeightFormat::kInt8:
      return body(Int8Kind<T>{});
    case WeightFormat::kFp8:
      return with_byte_kind<T, Fp8Code>(body);
    case WeightFormat::kUint8:
      return with_byte_kind<T, Uint8Code>(body);
    case WeightFormat::kTable4:
      return with_byte_kind<T, Table4Code>(body);
    default:
      return with_int4_code(weight, [&](auto code) { return body(Int4Kind<T, decltype(code)>{}); });
  }
}

}  // namespace VLLM_ISA
