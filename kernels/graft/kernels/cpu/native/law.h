// The law of a row of logits up to the noise: masks, adjustments, temperature and filters.
#pragma once

#include <cstdint>

namespace graft {

// As in graft.kernels.ops.ChoiceRows; the adjust pointers and bitmask may be null.
struct ChoiceRows {
    std::int64_t rows, vocab;
    const float* logits;
    const float* temperature;
    const std::int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const std::int64_t* seed;
    const std::int32_t* position;
    const std::int32_t* adjust_ptr;
    const std::int32_t* adjust_tokens;
    const float* adjust_ratio;
    const float* adjust_shift;
    const std::int32_t* bitmask;  // [rows, words]
    std::int64_t words;
};

// [vocab]; null when the row is refused. Kept until the thread's next call with another row.
struct RowValues {
    const float* values;
    float highest;
};

// The logits, adjusted, and -inf where masked.
RowValues masked_logits(const ChoiceRows& rows, std::int64_t row);

// masked_logits over the temperature, and -inf outside the support.
RowValues supported_logits(const ChoiceRows& rows, std::int64_t row, const RowValues& masked);

// share[i] = exp(z[i] - highest).
void shares(const float* z, std::int64_t count, float highest, float* share);

// A share as an integer of which 2^40 are one, and the sum of many.
inline std::int64_t weight_of(float share) { return std::int64_t(share * 1099511627776.0f); }
std::int64_t total_weight(const float* share, std::int64_t count);

}  // namespace graft
