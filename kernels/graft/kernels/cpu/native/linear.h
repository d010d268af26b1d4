// y = x W^T + b for one to a few hundred rows; knows no model.
#pragma once

#include <cstdint>

#include "pool.h"

namespace graft {

constexpr int kPanel = 32;  // outputs that lie together: weights are [out / 32][in][32]

enum class Weights : std::int64_t { f32 = 0, q8_0 = 1, q4_1 = 2 };

// Weights of one layer, laid out once. Outputs past `out` are zeros.
struct PackedLinear {
    std::int64_t in, out;
    const void* weights;  // f32: [panels][in][kPanel]; else [panels][in / 32][block of quant.h]
    const float* bias;    // [panels * kPanel] or null
    Weights kind;

    std::int64_t panels() const { return (out + kPanel - 1) / kPanel; }
    std::int64_t groups() const { return (panels() + 1) / 2; }
};

// x: [rows, in], y: [rows, out], both contiguous. With f32 weights every output is one chain of
// fused multiply-adds over the inputs in ascending order, started from the bias; else quant.h.
void linear(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows, float* y);

constexpr int kGroupOutputs = 2 * kPanel;

// Gets tile [rows][kGroupOutputs] of outputs group * kGroupOutputs on, from any thread; what lies
// past the last output means nothing.
struct GroupSink {
    void (*take)(void* context, int group, const float* tile);
    void* context;
};

// As linear(), bit for bit, but nothing is written: each group of outputs goes to the sink.
void linear_groups(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                   const GroupSink& sink);

}  // namespace graft
