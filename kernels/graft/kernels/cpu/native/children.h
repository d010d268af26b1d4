// The likeliest children of a row of a drafter's logits. graft.draft.law says what they mean.
#pragma once

#include <cstdint>

namespace graft {

// What decides the token after a row. A drafter ranks by logit + temperature * noise where the
// target's choice hangs on noise, by the logit alone where `noise` is null.
struct ChildLaw {
    const float* noise;  // [vocab]
    float temperature;
    std::int32_t top_k;
    float top_p, min_p;
};

// Numbers of the `count` highest of `values`, highest first; of equals the lower number first.
void highest_numbers(const float* values, std::int64_t total, std::int64_t count,
                     std::int64_t* numbers);

// probs, columns: [topk], likeliest first; of equals the lower column. logits [vocab] may change.
// False where the row holds NaN or +inf, or the filters leave nothing.
bool best_children(float* logits, std::int64_t vocab, const ChildLaw& law, std::int64_t topk,
                   float* probs, std::int64_t* columns);

}  // namespace graft
