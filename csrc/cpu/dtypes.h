// Element types of the tensors. Knows no vectors and no instruction set.
#pragma once

#include <cstdint>

// The upper half of a float. Only moved and converted, never computed with.
struct bf16 {
  uint16_t bits;
};
