// The cheap steps of a layer, row by row. Strides are in floats; a row's heads lie together.
#pragma once

#include <cstdint>

#include "pool.h"

namespace graft {

// x, out: [rows, width] contiguous; out may be x.
void rms_norm(Pool* pool, const float* x, const float* weight, float eps, std::int64_t rows,
              std::int64_t width, float* out);

// In place: residual += x.
void add(Pool* pool, float* residual, const float* x, std::int64_t count);

// In place: entries i and half + i of each head rotate by the angle i of the row's position.
// cos, sin: [positions, half].
void rope(Pool* pool, float* x, std::int64_t stride, std::int64_t rows, std::int64_t heads,
          std::int64_t head_dim, const std::int32_t* positions, const float* cos, const float* sin,
          std::int64_t half);

// gate_up: [rows, 2 * width] contiguous, gate first -> out: [rows, width].
void silu_mul(Pool* pool, const float* gate_up, std::int64_t rows, std::int64_t width, float* out);

}  // namespace graft
