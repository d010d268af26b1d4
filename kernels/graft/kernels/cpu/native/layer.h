// One decoder layer of the Llama family, step by step the kernels of the single calls, so the bits
// are the same. Knows nothing of the layers around it.
#pragma once

#include <cstdint>

#include "kv.h"
#include "linear.h"

namespace graft {

struct DecoderLayer {
    const float* attention_norm;  // [hidden]
    const PackedLinear* qkv;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;  // [head_dim] or null
    const PackedLinear* output;
    const float* mlp_norm;  // [hidden]
    const PackedLinear* gate_up;
    const PackedLinear* down;
    const float* cos;  // [positions, half]
    const float* sin;
    std::int64_t half, heads, window;
    float eps, scale;
};

// In place: residual [rows, output->out] takes in what the rows read from the keys they see, their
// own among them, which are written first. x: [rows, qkv->in], normed; it may be Scratch::normed.
void add_attention(Pool* pool, const DecoderLayer& layer, const KvLayer& kv, const StepRows& step,
                   const float* x, float* residual);

// In place: residual [rows, down->out] takes in what the gated layer makes of its normed rows.
void add_mlp(Pool* pool, const DecoderLayer& layer, std::int64_t rows, float* residual);

// In place: hidden [rows, width] passes through the layer.
void run_layer(Pool* pool, const DecoderLayer& layer, const KvLayer& kv, const StepRows& step,
               float* hidden);

}  // namespace graft
