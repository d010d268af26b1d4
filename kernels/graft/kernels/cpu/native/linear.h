// y = x W^T + b for one to a few hundred rows; knows no model.
#pragma once

#include <cstdint>

#include "pool.h"

namespace graft {

constexpr int kPanel = 32;  // outputs that lie together: weights are [out / 32][in][32]

// Weights of one layer, laid out once. Outputs past `out` are zeros.
struct PackedLinear {
    std::int64_t in, out;
    const float* weights;  // [panels][in][kPanel]
    const float* bias;     // [panels * kPanel] or null

    std::int64_t panels() const { return (out + kPanel - 1) / kPanel; }
};

// x: [rows, in], y: [rows, out], both contiguous. Every output is one chain of fused
// multiply-adds over the inputs in ascending order, started from the bias.
void linear(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows, float* y);

}  // namespace graft
