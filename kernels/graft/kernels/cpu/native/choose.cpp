// The target's own choice at every row of logits; reference/choose.py says what it means.
#include <algorithm>

#include "contest.h"
#include "pool.h"

namespace graft {
namespace {

std::int32_t first_equal(const float* x, std::int64_t count, float value) {
    std::int64_t i = 0;
    for (int seen = 0; i + kGroup <= count; i += kGroup) {
        for (int j = 0; j < kGroup; ++j) seen |= x[i + j] == value;
        if (seen) break;
    }
    for (; i < count; ++i) {
        if (x[i] == value) return std::int32_t(i);
    }
    return kRefused;
}

std::int32_t choose_row(const ChoiceRows& rows, std::int64_t row) {
    const RowValues masked = masked_logits(rows, row);
    if (!masked.values) return kRefused;
    const std::int32_t greedy = first_equal(masked.values, rows.vocab, masked.highest);
    if (is_greedy(rows, row)) return greedy;
    const RowValues law = supported_logits(rows, row, masked);
    if (!law.values) return kRefused;
    const std::uint64_t seed = std::uint64_t(rows.seed[row]);
    const std::uint32_t position = std::uint32_t(rows.position[row]);
    Best best;
    const auto meet = [&](std::int64_t first) {
        const int width = int(std::min<std::int64_t>(kGroup, rows.vocab - first));
        try_group(law.values + first, width, first, seed, position, best);
    };
    // The likeliest token's group first: a high value early rules most other groups out.
    const std::int64_t start = greedy / kGroup * kGroup;
    meet(start);
    for (std::int64_t first = 0; first < rows.vocab; first += kGroup) {
        if (first != start) meet(first);
    }
    return best.token;
}

void probs_row(const ChoiceRows& rows, std::int64_t row, float* probs) {
    const std::int64_t count = rows.vocab;
    const RowValues masked = masked_logits(rows, row);
    const bool greedy = is_greedy(rows, row);
    const RowValues law =
        masked.values && !greedy ? supported_logits(rows, row, masked) : RowValues{nullptr, 0.0f};
    if (!law.values) {
        std::fill_n(probs, count, 0.0f);
        if (masked.values && greedy) {
            probs[first_equal(masked.values, count, masked.highest)] = 1.0f;
        }
        return;
    }
    shares(law.values, count, law.highest, probs);
    const double total = double(total_weight(probs, count));
    for (std::int64_t i = 0; i < count; ++i) {
        probs[i] = float(double(weight_of(probs[i])) / total);
    }
}

}  // namespace
}  // namespace graft

// chosen: [rows].
GRAFT_API void graft_choose(graft::Pool* pool, const graft::ChoiceRows* rows,
                            std::int32_t* chosen) {
    graft::parallel_for(pool, int(rows->rows),
                        [&](int row) { chosen[row] = graft::choose_row(*rows, row); });
}

// probs: [rows, vocab].
GRAFT_API void graft_target_probs(graft::Pool* pool, const graft::ChoiceRows* rows, float* probs) {
    graft::parallel_for(pool, int(rows->rows), [&](int row) {
        graft::probs_row(*rows, row, probs + row * rows->vocab);
    });
}
