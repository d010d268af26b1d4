// Moves keys and values; computes nothing.
#include "kv.h"

#include <cstring>

namespace graft {

void write_kv(const KvLayer& kv, const StepRows& rows, const float* keys, const float* values,
              std::int64_t key_stride, std::int64_t value_stride) {
    const std::int64_t floats = kv.slot_floats();
    for (std::int64_t r = 0; r < rows.rows; ++r) {
        const std::int64_t slot = rows.write_slots[r] * floats;
        std::memcpy(kv.keys + slot, keys + r * key_stride, std::size_t(floats) * sizeof(float));
        std::memcpy(kv.values + slot, values + r * value_stride,
                    std::size_t(floats) * sizeof(float));
    }
}

}  // namespace graft

GRAFT_API void graft_write_kv(const graft::KvLayer* kv, const graft::StepRows* rows,
                              const float* keys, const float* values, std::int64_t key_stride,
                              std::int64_t value_stride) {
    graft::write_kv(*kv, *rows, keys, values, key_stride, value_stride);
}

// keys, values: [layers, slots, slot_floats]; one move after the other, in all layers.
GRAFT_API void graft_keep(float* keys, float* values, std::int64_t layers, std::int64_t slots,
                          std::int64_t slot_floats, const std::int32_t* source,
                          const std::int32_t* target, std::int64_t moves) {
    for (std::int64_t layer = 0; layer < layers; ++layer) {
        float* const starts[] = {keys + layer * slots * slot_floats,
                                 values + layer * slots * slot_floats};
        for (std::int64_t i = 0; i < moves; ++i) {
            if (source[i] == target[i]) continue;
            for (float* start : starts) {
                std::memcpy(start + target[i] * slot_floats, start + source[i] * slot_floats,
                            std::size_t(slot_floats) * sizeof(float));
            }
        }
    }
}
