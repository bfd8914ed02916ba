// Element types of the tensors. This file does not depend on vectors or instruction sets.
#pragma once

#include <cstdint>

// The upper half of a float. It is only moved and converted; no arithmetic uses it directly.
struct bf16 {
  uint16_t bits;
};
