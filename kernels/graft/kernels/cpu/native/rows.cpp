// Each row is computed from its own values alone, in one order.
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace graft {
namespace {

constexpr std::int64_t kPieceFloats = 8192;  // below this a piece costs less than handing it out

// Calls fn(begin, end) over 0..count-1 in pieces of about kPieceFloats floats, `weight` a step.
template <class Fn>
void in_pieces(Pool* pool, std::int64_t count, std::int64_t weight, Fn&& fn) {
    const std::int64_t pieces = std::clamp<std::int64_t>(
        count * weight / kPieceFloats, 1, std::min<std::int64_t>(count, 4 * num_threads(pool)));
    parallel_for(pool, int(pieces), [&](int piece) {
        fn(count * piece / pieces, count * (piece + 1) / pieces);
    });
}

F16 load_up_to(const float* p, std::int64_t left) {
    return left >= kLanes ? load16(p) : load_part(p, int(left));
}

void store_up_to(float* p, F16 a, std::int64_t left) {
    if (left >= kLanes) return store16(p, a);
    store_part(p, a, int(left));
}

void rms_norm_row(const float* x, const float* weight, float eps, std::int64_t width, float* out) {
    F16 square = zero16();
    for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 value = load_up_to(x + i, width - i);
        square = fma(value, value, square);
    }
    const F16 scale = set16(1.0f / std::sqrt(sum16(square) / float(width) + eps));
    for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 value = load_up_to(x + i, width - i) * scale;
        store_up_to(out + i, value * load_up_to(weight + i, width - i), width - i);
    }
}

void rope_head(float* x, const float* cos, const float* sin, std::int64_t half) {
    for (std::int64_t i = 0; i < half; i += kLanes) {
        const std::int64_t left = half - i;
        const F16 c = load_up_to(cos + i, left), s = load_up_to(sin + i, left);
        const F16 first = load_up_to(x + i, left), second = load_up_to(x + half + i, left);
        store_up_to(x + i, fma(first, c, zero16() - second * s), left);
        store_up_to(x + half + i, fma(second, c, first * s), left);
    }
}

void silu_mul_row(const float* gate_up, std::int64_t width, std::int64_t begin, std::int64_t end,
                  float* out) {
    const F16 one = set16(1.0f);
    for (std::int64_t i = begin; i < end; i += kLanes) {
        const F16 gate = load_up_to(gate_up + i, end - i);
        const F16 up = load_up_to(gate_up + width + i, end - i);
        store_up_to(out + i, gate / (one + exp16(zero16() - gate)) * up, end - i);
    }
}

}  // namespace

void rms_norm(Pool* pool, const float* x, const float* weight, float eps, std::int64_t rows,
              std::int64_t width, float* out) {
    in_pieces(pool, rows, width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            rms_norm_row(x + r * width, weight, eps, width, out + r * width);
        }
    });
}

void add(Pool* pool, float* residual, const float* x, std::int64_t count) {
    in_pieces(pool, count, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; i += kLanes) {
            const std::int64_t left = end - i;
            store_up_to(residual + i, load_up_to(residual + i, left) + load_up_to(x + i, left), left);
        }
    });
}

void rope(Pool* pool, float* x, std::int64_t stride, std::int64_t rows, std::int64_t heads,
          std::int64_t head_dim, const std::int32_t* positions, const float* cos, const float* sin,
          std::int64_t half) {
    in_pieces(pool, rows, 4 * heads * half, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            const std::int64_t angle = positions[r] * half;
            for (std::int64_t h = 0; h < heads; ++h) {
                rope_head(x + r * stride + h * head_dim, cos + angle, sin + angle, half);
            }
        }
    });
}

void silu_mul(Pool* pool, const float* gate_up, std::int64_t rows, std::int64_t width, float* out) {
    in_pieces(pool, rows, 8 * width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            silu_mul_row(gate_up + r * 2 * width, width, 0, width, out + r * width);
        }
    });
}

}  // namespace graft

GRAFT_API void graft_rms_norm(graft::Pool* pool, const float* x, const float* weight, float eps,
                              std::int64_t rows, std::int64_t width, float* out) {
    graft::rms_norm(pool, x, weight, eps, rows, width, out);
}

GRAFT_API void graft_add(graft::Pool* pool, float* residual, const float* x, std::int64_t count) {
    graft::add(pool, residual, x, count);
}

GRAFT_API void graft_rope(graft::Pool* pool, float* x, std::int64_t stride, std::int64_t rows,
                          std::int64_t heads, std::int64_t head_dim, const std::int32_t* positions,
                          const float* cos, const float* sin, std::int64_t half) {
    graft::rope(pool, x, stride, rows, heads, head_dim, positions, cos, sin, half);
}

GRAFT_API void graft_silu_mul(graft::Pool* pool, const float* gate_up, std::int64_t rows,
                              std::int64_t width, float* out) {
    graft::silu_mul(pool, gate_up, rows, width, out);
}

// out: [rows, hidden]; table: [vocab, hidden].
GRAFT_API void graft_embed(const std::int32_t* tokens, std::int64_t rows, const float* table,
                           std::int64_t hidden, float* out) {
    for (std::int64_t r = 0; r < rows; ++r) {
        std::memcpy(out + r * hidden, table + tokens[r] * hidden, std::size_t(hidden) * sizeof(float));
    }
}
