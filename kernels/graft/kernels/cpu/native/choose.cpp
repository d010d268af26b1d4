// The target's own choice at every row of logits; reference/choose.py says what it means.
//
// Noise is made for 64 tokens at a time, and only where the highest of them can still win; its
// logarithms are taken only for tokens whose word is high enough.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "law.h"
#include "law_math.h"
#include "philox.h"
#include "pool.h"

namespace graft {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kRefused = -1;
constexpr int kNoiseSteps = 512;
constexpr float kNoiseStep = 1.0f / 16;
constexpr float kNoiseFrom = -4.0f;

// For a wanted noise of kNoiseFrom + i * kNoiseStep, a word below which no word gives it.
const std::array<std::uint32_t, kNoiseSteps>& lowest_words() {
    static const std::array<std::uint32_t, kNoiseSteps> table = [] {
        std::array<std::uint32_t, kNoiseSteps> made{};
        for (int i = 0; i < kNoiseSteps; ++i) {
            const double noise = double(kNoiseFrom) + i * double(kNoiseStep);
            const double place = std::exp(-std::exp(-noise)) * 8388608.0 - 16.0;
            const double kept = std::min(std::max(place, 0.0), 8388607.0);
            made[std::size_t(i)] = std::uint32_t(kept) << kNoiseShift;
        }
        return made;
    }();
    return table;
}

inline std::uint32_t lowest_word(float noise) {
    const float place = (noise - kNoiseFrom) * (1.0f / kNoiseStep);
    if (!(place > 0.0f)) return 0;  // also where nothing is known yet
    return lowest_words()[std::size_t(std::min(int(place), kNoiseSteps - 1))];
}

struct Best {
    float value = -kInfinity;
    std::int32_t token = kRefused;
};

// Meets the best so far with the tokens first to first + 63 of z.
void try_group(const float* z, std::int64_t count, std::int64_t first, std::uint64_t seed,
               std::uint32_t position, Best& best) {
    const int width = int(std::min<std::int64_t>(kGroup, count - first));
    const float* group = z + first;
    const float highest = highest_of(group, width);
    if (highest == -kInfinity || highest + kHighestNoise < best.value) return;
    std::uint32_t words[kGroup];
    philox_group(seed, std::uint32_t(first / 4), position, words);
    // Sums may round up to the best value, and a tie counts.
    const float slack = std::fabs(best.value) * 5e-7f + 1e-6f;
    const std::uint32_t bar = lowest_word((best.value - highest) - slack);
    std::uint32_t high = 0;
    for (int i = 0; i < kGroup; ++i) high = words[i] > high ? words[i] : high;
    if (high < bar) return;
    for (int i = 0; i < width; ++i) {
        if (words[i] < bar || group[i] == -kInfinity) continue;
        const float value = group[i] + noise_of(words[i]);
        const std::int32_t token = std::int32_t(first + i);
        if (value > best.value || (value == best.value && token < best.token)) {
            best = {value, token};
        }
    }
}

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

bool is_greedy(const ChoiceRows& rows, std::int64_t row) {
    return rows.temperature[row] < kGreedyBelow || rows.top_k[row] == 1;
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
    // The likeliest token's group first: a high value early rules most other groups out.
    const std::int64_t start = greedy / kGroup * kGroup;
    try_group(law.values, rows.vocab, start, seed, position, best);
    for (std::int64_t first = 0; first < rows.vocab; first += kGroup) {
        if (first != start) try_group(law.values, rows.vocab, first, seed, position, best);
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
