// Matrix tiles of Intel AMX (Software Developer's Manual, volume 1, chapter 18): eight registers of
// up to 16 rows of 64 bytes, and instructions that multiply them.
//
// The kernels use only `Tiles`, which is either AmxTiles (the instructions) or PortableTiles (C++
// with the same order of sums and the same rounding). PortableTiles exists for tests of the layout
// and the arithmetic on processors without AMX; tests/ops/amx_emulator.cpp runs AmxTiles on such
// processors.
//
// When tiles are multiplied (c += a @ b), the inputs of a row of a are adjacent, and b has the word
// layout of panels (linear_format.h): row k of b has inputs k * kInputs to k * kInputs + kInputs -
// 1 of 16 outputs.
#pragma once

#include "linear_dot.h"

#if defined(__AMX_TILE__) || defined(VLLM_PORTABLE_TILES)
#define VLLM_MATRIX_TILES
#endif

namespace VLLM_ISA {

#ifndef VLLM_MATRIX_TILES

constexpr bool kHasTiles = false;
constexpr void (*kLeaveThread)() = nullptr;

#else

constexpr bool kHasTiles = true;
constexpr int kTileRows = 16;  // rows of a tile, and 32-bit words of a row
constexpr int kTileBytes = 64;  // bytes of a row

// The operand of the instruction LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Element types of a and b in c += a @ b (U8 and S8: unsigned and signed bytes).
struct TilesOfBf16 {};
struct TilesOfU8S8 {};
struct TilesOfS8S8 {};

#ifdef __AMX_TILE__

struct AmxTiles {
  static VLLM_INLINE void configure(const TileConfig& config) {
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  static VLLM_INLINE void release() { __asm__ volatile("tilerelease"); }

  template <int kTile>
  static VLLM_INLINE void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  static VLLM_INLINE void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(kTile)
                     : "memory");
  }
  // Loads memory that is not read again soon.
  template <int kTile>
  static VLLM_INLINE void load_once(const void* from, int64_t stride) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  static VLLM_INLINE void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(to), "r"(stride), "i"(kTile)
                     : "memory");
  }

  template <int kC, int kA, int kB>
  static VLLM_INLINE void dot(TilesOfBf16) {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  static VLLM_INLINE void dot(TilesOfU8S8) {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  static VLLM_INLINE void dot(TilesOfS8S8) {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};
using Tiles = AmxTiles;

#else

// The content of the tile registers of a thread.
struct TileFile {
  TileConfig config;
  alignas(64) uint32_t words[8][kTileRows][kTileRows];
};
static thread_local TileFile tile_file;

struct PortableTiles {
  static void configure(const TileConfig& config) {
    __builtin_memset(&tile_file, 0, sizeof tile_file);
    tile_file.config = config;
  }
  static void release() { tile_file.config.palette = 0; }

  template <int kTile>
  static void zero() {
    __builtin_memset(tile_file.words[kTile], 0, sizeof tile_file.words[kTile]);
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    zero<kTile>();
    const TileConfig& config = configured();
    for (int row = 0; row < config.rows[kTile]; ++row) {
      __builtin_memcpy(tile_file.words[kTile][row], static_cast<const char*>(from) + row * stride,
                       config.row_bytes[kTile]);
    }
  }
  template <int kTile>
  static void load_once(const void* from, int64_t stride) {
    load<kTile>(from, stride);
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    const TileConfig& config = configured();
    for (int row = 0; row < config.rows[kTile]; ++row) {
      __builtin_memcpy(static_cast<char*>(to) + row * stride, tile_file.words[kTile][row],
                       config.row_bytes[kTile]);
    }
  }
  template <int kC, int kA, int kB, class Numbers>
  static void dot(Numbers numbers) {
    add_product(numbers, kC, kA, kB);
  }

 private:
  static const TileConfig& configured() {
    if (tile_file.config.palette != 1) __builtin_trap();  // the processor would fail as well
    return tile_file.config;
  }

  // Calls body(sums, words of a row of a, number of these words, kLanes columns of b) for each part
  // of c.
  template <class Sum, class Body>
  static void for_each_sum(int c, int a, int b, Body body) {
    const TileConfig& config = configured();
    const int num_words = config.row_bytes[a] / 4;
    if (config.rows[a] != config.rows[c] || config.rows[b] != num_words) __builtin_trap();
    for (int row = 0; row < config.rows[c]; ++row) {
      for (int column = 0; column < kTileRows; column += kLanes) {
        uint32_t* const at = tile_file.words[c][row] + column;
        Sum sum;
        __builtin_memcpy(&sum, at, sizeof sum);
        sum = body(sum, tile_file.words[a][row], num_words, &tile_file.words[b][0][column]);
        __builtin_memcpy(at, &sum, sizeof sum);
      }
    }
  }

  // TDPBF16PS: a word is a pair of bf16. The products of the first elements of all pairs are added
  // up, and separately the products of the second elements: each sum begins with zero and
  // follows the order of inputs, with one rounding per step. Then the two sums are added, and the
  // result is added to c. Rounds to nearest even; magnitudes below 2^-126 count as zero when they
  // are read or written, whatever MXCSR says.
  static __attribute__((noinline)) void add_product(TilesOfBf16, int c, int a, int b) {
    constexpr unsigned kFlushes = 0x9fc0;  // MXCSR: FTZ, DAZ, all exceptions masked
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(kFlushes);
    __asm__ volatile("" : : : "memory");
    for_each_sum<Vec>(c, a, b, [](Vec sum, const uint32_t* x, int num_words, const uint32_t* w) {
      Vec first = {}, second = {};
      for (int k = 0; k < num_words; ++k) {
        const Bits words = load_bits(w + k * kTileRows), inputs = splat_bits(x + k);
        first = fma(reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(inputs << 16), first);
        second = fma(reinterpret_cast<Vec>(words & 0xffff0000u),
                     reinterpret_cast<Vec>(inputs & 0xffff0000u), second);
      }
      return sum + (first + second);
    });
    __asm__ volatile("" : : : "memory");
    __builtin_ia32_ldmxcsr(before);
  }

  // TDPBUSD and TDPBSSD: exact, modulo 2^32.
  static void add_product(TilesOfU8S8, int c, int a, int b) { add_bytes<false>(c, a, b); }
  static void add_product(TilesOfS8S8, int c, int a, int b) { add_bytes<true>(c, a, b); }

  template <bool kIsSigned>
  static void add_bytes(int c, int a, int b) {
    for_each_sum<Ints>(c, a, b, [](Ints sum, const uint32_t* x, int num_words, const uint32_t* w) {
      for (int k = 0; k < num_words; ++k) {
        const Ints weights = reinterpret_cast<Ints>(load_bits(w + k * kTileRows));
        for (int i = 0; i < 4; ++i) {
          const uint8_t byte = static_cast<uint8_t>(x[k] >> (8 * i));
          const int32_t number = kIsSigned ? static_cast<int8_t>(byte) : byte;
          sum += ((weights << (24 - 8 * i)) >> 24) * number;
        }
      }
      return sum;
    });
  }
};
using Tiles = PortableTiles;

#endif

// The shapes of the tiles of this thread, packed into a number that differs for each set of shapes;
// 0: they have no shape.
static thread_local uint32_t tile_shape = 0;
constexpr uint32_t kIsDecodeShape = 1u << 31;  // a bit of the shapes of attention_decode_matrix.h

struct TileSize {
  int64_t rows, row_bytes;
};

// Sets the shapes of all tiles, unless they are packed as `shape` already. If they change, the
// content of all tiles becomes undefined. size_of(tile): the size of a tile.
template <class SizeOf>
inline void configure_tiles_as(uint32_t shape, SizeOf size_of) {
  uint32_t& current = tile_shape;
  if (shape == current) return;
  current = shape;
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    const TileSize size = size_of(tile);
    config.rows[tile] = static_cast<uint8_t>(size.rows);
    config.row_bytes[tile] = static_cast<uint16_t>(size.row_bytes);
  }
  Tiles::configure(config);
}

// Sets the shapes of the tiles for c += a @ b (matrix_product.h): sum tiles 0 and 1 and tile 4 (of
// a) get first_rows rows; sum tiles 2 and 3 and tile 5 (of a) get last_rows. Each row of a has
// num_words words.
inline void configure_tiles(int64_t first_rows, int64_t last_rows, int64_t num_words) {
  const uint32_t shape = static_cast<uint32_t>(first_rows | last_rows << 8 | num_words << 16);
  configure_tiles_as(shape, [&](int tile) {
    const bool is_last = tile == 2 || tile == 3 || tile == 5, is_of_a = tile == 4 || tile == 5;
    return TileSize{tile >= 6 ? num_words : is_last ? last_rows : first_rows,
                    is_of_a ? 4 * num_words : kTileBytes};
  });
}

// Releases the tiles of a thread when it leaves a loop (parallel.h). Otherwise the system would
// save them at each switch to another thread, and the core could not enter its deeper sleep.
inline void release_tiles() {
  if (tile_shape == 0) return;
  tile_shape = 0;
  Tiles::release();
}
constexpr void (*kLeaveThread)() = release_tiles;

#endif  // VLLM_MATRIX_TILES

}  // namespace VLLM_ISA
