// Intel AMX in software, for processors without it: preloaded into a process, it takes the signal
// that the processor raises for each of these instructions, and does what the Software Developer's
// Manual (volume 2) says that the instruction does, one number at a time. So the very machine code of
// the kernels runs, and an instruction that a processor with AMX would refuse ends the process.
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {
  Config config;
  uint8_t at[8][16][64];
};

thread_local Tiles tiles;
bool is_wrong = false;
int refusal = 0;  // the errno of a request for the tiles; 0: it is granted

enum Counter { kConfigs, kReleases, kBf16, kU8S8, kS8S8, kNumCounters };
int64_t counters[kNumCounters];

void count(Counter counter) { __atomic_fetch_add(&counters[counter], 1, __ATOMIC_RELAXED); }

[[noreturn]] void refuse(const char* why) {
  std::fprintf(stderr, "amx_emulator: %s\n", why);
  std::_Exit(99);
}

void require(bool holds, const char* why) {
  if (!holds) refuse(why);
}

void require_tile(int tile) {
  require(tiles.config.palette == 1, "a tile is used without a configuration");
  require(tiles.config.rows[tile] > 0 && tiles.config.row_bytes[tile] > 0, "a tile has no rows");
}

// ---- what the instructions do -----------------------------------------------------------------

void configure(const void* from) {
  Config config;
  std::memcpy(&config, from, sizeof config);
  require(config.palette == 1 && config.start_row == 0, "the palette is not 1");
  for (int i = 0; i < 14; ++i) require(config.reserved[i] == 0, "reserved bytes are not zero");
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = config.rows[tile], bytes = config.row_bytes[tile];
    require(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0), "a tile is too large");
    require(tile < 8 || rows == 0, "there are eight tiles");
  }
  std::memset(&tiles, 0, sizeof tiles);
  tiles.config = config;
  count(kConfigs);
}

void load(int tile, const uint8_t* from, int64_t stride) {
  require_tile(tile);
  std::memset(tiles.at[tile], 0, sizeof tiles.at[tile]);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    std::memcpy(tiles.at[tile][row], from + row * stride, tiles.config.row_bytes[tile]);
  }
}

void store(int tile, uint8_t* to, int64_t stride) {
  require_tile(tile);
  for (int row = 0; row < tiles.config.rows[tile]; ++row) {
    std::memcpy(to + row * stride, tiles.at[tile][row], tiles.config.row_bytes[tile]);
  }
}

void require_product(int c, int a, int b) {
  require_tile(a), require_tile(b), require_tile(c);
  const Config& config = tiles.config;
  require(a != b && a != c && b != c, "tiles of a product are the same one");
  require(config.rows[a] == config.rows[c], "rows of a and c differ");
  require(config.row_bytes[b] == config.row_bytes[c], "columns of b and c differ");
  require(config.row_bytes[a] == 4 * config.rows[b], "inputs of a and b differ");
  require(config.row_bytes[c] % 4 == 0, "c has half a number");
}

float without_denormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

float number_of(const uint8_t* half) {
  uint32_t bits = uint32_t{half[0]} << 16 | uint32_t{half[1]} << 24;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return without_denormal(x);
}

void multiply_bf16(int c, int a, int b) {
  require_product(c, a, b);
  const Config& config = tiles.config;
  for (int m = 0; m < config.rows[c]; ++m) {
    for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
      float parts[2] = {};
      for (int k = 0; k < config.row_bytes[a] / 4; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float x = number_of(&tiles.at[a][m][4 * k + 2 * i]);
          const float w = number_of(&tiles.at[b][k][4 * n + 2 * i]);
          parts[i] = without_denormal(std::fmaf(x, w, parts[i]));
        }
      }
      float sum;
      std::memcpy(&sum, &tiles.at[c][m][4 * n], sizeof sum);
      const float added = without_denormal(parts[0] + parts[1]);
      sum = without_denormal(without_denormal(sum) + added);
      std::memcpy(&tiles.at[c][m][4 * n], &sum, sizeof sum);
    }
  }
  count(kBf16);
}

void multiply_bytes(int c, int a, int b, bool is_signed) {
  require_product(c, a, b);
  const Config& config = tiles.config;
  for (int m = 0; m < config.rows[c]; ++m) {
    for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, &tiles.at[c][m][4 * n], sizeof sum);
      for (int i = 0; i < config.row_bytes[a]; ++i) {
        const uint8_t byte = tiles.at[a][m][i];
        const int x = is_signed ? static_cast<int8_t>(byte) : byte;
        const int w = static_cast<int8_t>(tiles.at[b][i / 4][4 * n + i % 4]);
        sum += static_cast<uint32_t>(x * w);
      }
      sum += is_wrong ? 1 : 0;
      std::memcpy(&tiles.at[c][m][4 * n], &sum, sizeof sum);
    }
  }
  count(is_signed ? kS8S8 : kU8S8);
}

// ---- which instruction it is ------------------------------------------------------------------

struct Operand {
  uint8_t* address;
  int64_t index;  // 0: none
};

constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// A VEX instruction of three prefix bytes.
class Instruction {
 public:
  explicit Instruction(greg_t* registers)
      : registers_(registers), code_(reinterpret_cast<const uint8_t*>(registers[REG_RIP])) {}

  bool is_amx() const {
    const bool is_vex = code_[0] == 0xc4 && (code_[1] & 0x1f) == 2 && (code_[2] & 0x84) == 0;
    return is_vex && (code_[3] == 0x49 || code_[3] == 0x4b || code_[3] == 0x5c || code_[3] == 0x5e);
  }

  void run() {
    const int prefix = code_[2] & 3, reg = code_[4] >> 3 & 7, rm = code_[4] & 7;
    const int other = (code_[2] >> 3 & 15) ^ 15;
    enum { kNone, k66, kF3, kF2 };
    length_ = 5;
    const bool is_memory = code_[4] >> 6 != 3;
    switch (code_[3]) {
      case 0x49:
        if (prefix == kNone && is_memory) return configure(operand().address);
        if (prefix == kNone && reg == 0 && rm == 0) {
          std::memset(&tiles, 0, sizeof tiles);
          return count(kReleases);
        }
        if (prefix == kF2 && !is_memory && rm == 0) {
          require_tile(reg);
          std::memset(tiles.at[reg], 0, sizeof tiles.at[reg]);
          return;
        }
        break;
      case 0x4b: {
        require(is_memory && rm == 4, "a tile is loaded without index");
        const Operand from = operand();
        if (prefix == kF2 || prefix == k66) return load(reg, from.address, from.index);
        if (prefix == kF3) return store(reg, from.address, from.index);
        break;
      }
      case 0x5c:
        if (prefix == kF3) return multiply_bf16(reg, rm, other);
        break;
      default:
        if (prefix == k66) return multiply_bytes(reg, rm, other, false);
        if (prefix == kF2) return multiply_bytes(reg, rm, other, true);
    }
    refuse("an instruction of AMX that is not emulated");
  }

  void skip() { registers_[REG_RIP] += length_; }

 private:
  int64_t value(int number) const { return registers_[kRegisters[number]]; }

  Operand operand() {
    const int extension = ~code_[1] >> 5 & 7;  // R, X and B, stored inverted
    const int mode = code_[4] >> 6, rm = code_[4] & 7;
    int64_t address = 0, index = 0;
    bool has_base = true;
    if (rm == 4) {
      const uint8_t sib = code_[length_++];
      const int base = sib & 7, number = (sib >> 3 & 7) | (extension & 2) << 2;
      has_base = base != 5 || mode != 0;
      if (has_base) address = value(base | (extension & 1) << 3);
      if (number != 4) index = value(number) << (sib >> 6);
    } else {
      has_base = rm != 5 || mode != 0;
      if (has_base) address = value(rm | (extension & 1) << 3);
    }
    if (mode == 1) {
      address += static_cast<int8_t>(code_[length_++]);
    } else if (mode == 2 || !has_base) {
      int32_t displacement;
      std::memcpy(&displacement, code_ + length_, sizeof displacement);
      length_ += 4;
      address += displacement;
      if (!has_base && rm == 5) address += registers_[REG_RIP] + length_;
    }
    return {reinterpret_cast<uint8_t*>(address), index};
  }

  greg_t* const registers_;
  const uint8_t* const code_;
  int length_ = 0;
};

void on_illegal_instruction(int, siginfo_t*, void* context) {
  Instruction instruction(static_cast<ucontext_t*>(context)->uc_mcontext.gregs);
  require(instruction.is_amx(), "an illegal instruction that is not one of AMX");
  instruction.run();
  instruction.skip();
}

__attribute__((constructor)) void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace

// refuses: the errno for a process that asks for the tiles; 0: it gets them. errs: whether products
// of bytes are wrong.
extern "C" void amx_emulator_behave(int refuses, bool errs) {
  refusal = refuses;
  is_wrong = errs;
}

// How often it did what; `Counter` names the numbers.
extern "C" const int64_t* amx_emulator_counters() { return counters; }

// Whether the calling thread has tiles.
extern "C" bool amx_emulator_is_configured() { return tiles.config.palette != 0; }

// Takes the place of the C library's: answers the request for the tiles, and passes the rest on.
extern "C" long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long args[6];
  for (long& arg : args) arg = va_arg(list, long);
  va_end(list);
  constexpr long kRequestPermission = 0x1023;
  if (number == SYS_arch_prctl && args[0] == kRequestPermission) {
    if (refusal == 0) return 0;
    errno = refusal;
    return -1;
  }
  register long r10 __asm__("r10") = args[3];
  register long r8 __asm__("r8") = args[4];
  register long r9 __asm__("r9") = args[5];
  long result = number;
  __asm__ volatile("syscall"
                   : "+a"(result)
                   : "D"(args[0]), "S"(args[1]), "d"(args[2]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result >= -4095 && result < 0) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}
