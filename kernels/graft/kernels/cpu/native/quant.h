// Weights of 8 and 4 bits in blocks of 32 inputs, exactly as a GGUF file stores them.
#pragma once

#include <cstdint>

#include "linear.h"

namespace graft {

constexpr std::int64_t kQuantBlock = 32;

// Bytes of one block of a panel: for 32 outputs the scales (and minima) as float16, then for each
// half of 16 outputs the quants, four inputs of every output side by side.
constexpr std::int64_t panel_block_bytes(Weights kind) {
    return kind == Weights::q8_0 ? kPanel * 2 + kPanel * kQuantBlock
                                 : kPanel * 4 + kPanel * kQuantBlock / 2;
}

// As linear(), with activations rounded to 8 bits in blocks of 32, one scale each. Sums inside a
// block are integers; blocks add up in ascending order by fused multiply-adds.
void quant_linear(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                  float* y);

// As linear_groups().
void quant_groups(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                  const GroupSink& sink);

// One output's weights as floats: out [in].
void quant_row(const PackedLinear& layer, std::int64_t output, float* out);

}  // namespace graft
