// Keys and values in numbered slots; pages are runs of slots.
#pragma once

#include <cstdint>

#include "pool.h"

namespace graft {

// The first key and value of one layer: [slots, kv_heads, head_dim] contiguous each.
struct KvLayer {
    float* keys;
    float* values;
    std::int64_t kv_heads, head_dim, page_tokens;

    std::int64_t slot_floats() const { return kv_heads * head_dim; }
};

// What the rows of a step see, as in graft.kernels.ops.StepRows.
struct StepRows {
    std::int64_t rows, max_pages;
    const std::int32_t* positions;
    const std::int32_t* write_slots;
    const std::int32_t* sequence;
    const std::int32_t* page_table;
    const std::int32_t* prefix_len;
    const std::int32_t* extra_ptr;
    const std::int32_t* extra_slots;
};

// keys, values: rows of kv_heads * head_dim floats, a row every `stride` floats.
void write_kv(const KvLayer& kv, const StepRows& rows, const float* keys, const float* values,
              std::int64_t key_stride, std::int64_t value_stride);

// q, out: a row every `q_stride` and `out_stride` floats, its heads together.
void attend(Pool* pool, const KvLayer& kv, const StepRows& rows, const float* q,
            std::int64_t q_stride, std::int64_t heads, float scale, std::int64_t window, float* out,
            std::int64_t out_stride);

}  // namespace graft
