// A program for setup.py: prints the instruction sets that this processor runs, one on each line.
//
// VLLM_ISAS lists instruction sets as ISA(name, whether this processor runs it).
#include <cstdio>

#include "processor.h"

int main() {
#define ISA(name, runs_here) if (runs_here) std::puts(#name);
  VLLM_ISAS
  return 0;
}
