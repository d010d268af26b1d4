// Whole decoder layers of the Llama family in one call.
#include "layer.h"

#include "rows.h"

namespace graft {
namespace {

// In place: each head of `heads` is normalised by itself.
void norm_heads(float* x, std::int64_t stride, std::int64_t rows, std::int64_t heads,
                std::int64_t head_dim, const float* weight, float eps) {
    if (weight == nullptr) return;
    for (std::int64_t r = 0; r < rows; ++r) {
        rms_norm(nullptr, x + r * stride, weight, eps, heads, head_dim, x + r * stride);
    }
}

}  // namespace

void add_attention(Pool* pool, const DecoderLayer& layer, const KvLayer& kv, const StepRows& step,
                   const float* x, float* residual) {
    const std::int64_t rows = step.rows, stride = layer.qkv->out;
    const std::int64_t query = layer.heads * kv.head_dim, key = kv.slot_floats();
    float* b = scratch(Scratch::projected, std::size_t(rows * stride));
    linear(pool, *layer.qkv, x, rows, b);
    float *q = b, *k = b + query, *v = k + key;
    norm_heads(q, stride, rows, layer.heads, kv.head_dim, layer.q_norm, layer.eps);
    norm_heads(k, stride, rows, kv.kv_heads, kv.head_dim, layer.k_norm, layer.eps);
    rope(pool, q, stride, rows, layer.heads, kv.head_dim, step.positions, layer.cos, layer.sin,
         layer.half);
    rope(pool, k, stride, rows, kv.kv_heads, kv.head_dim, step.positions, layer.cos, layer.sin,
         layer.half);
    write_kv(kv, step, k, v, stride, stride);
    float* c = scratch(Scratch::hidden, std::size_t(rows * query));
    attend(pool, kv, step, q, stride, layer.heads, layer.scale, layer.window, c, query);
    float* a = scratch(Scratch::normed, std::size_t(rows * layer.output->out));
    linear(pool, *layer.output, c, rows, a);
    add(pool, residual, a, rows * layer.output->out);
}

void add_mlp(Pool* pool, const DecoderLayer& layer, std::int64_t rows, float* residual) {
    const std::int64_t width = layer.down->out, mlp = layer.down->in;
    float* a = scratch(Scratch::normed, std::size_t(rows * width));
    float* b = scratch(Scratch::projected, std::size_t(rows * 2 * mlp));
    float* c = scratch(Scratch::hidden, std::size_t(rows * mlp));
    rms_norm(pool, residual, layer.mlp_norm, layer.eps, rows, width, a);
    linear(pool, *layer.gate_up, a, rows, b);
    silu_mul(pool, b, rows, mlp, c);
    linear(pool, *layer.down, c, rows, a);
    add(pool, residual, a, rows * width);
}

void run_layer(Pool* pool, const DecoderLayer& layer, const KvLayer& kv, const StepRows& step,
               float* hidden) {
    const std::int64_t rows = step.rows, width = layer.qkv->in;
    float* normed = scratch(Scratch::normed, std::size_t(rows * width));
    rms_norm(pool, hidden, layer.attention_norm, layer.eps, rows, width, normed);
    add_attention(pool, layer, kv, step, normed, hidden);
    add_mlp(pool, layer, rows, hidden);
}

}  // namespace graft

// In place: hidden [rows, width] passes through layers 0..count - 1, each with its cache.
GRAFT_API void graft_layers(graft::Pool* pool, const graft::DecoderLayer* layers,
                            const graft::KvLayer* caches, std::int64_t count,
                            const graft::StepRows* step, float* hidden) {
    for (std::int64_t i = 0; i < count; ++i) {
        graft::run_layer(pool, layers[i], caches[i], *step, hidden);
    }
}
