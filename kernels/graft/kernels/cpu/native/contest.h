// The contest of perturbed logits: which token of a row wins, met group by group in any order.
//
// Noise is made for 64 tokens at a time, and only where the highest of them can still win; its
// logarithms are taken only for tokens whose word is high enough.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "law.h"
#include "law_math.h"
#include "philox.h"

namespace graft {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kRefused = -1;
constexpr int kNoiseSteps = 512;
constexpr float kNoiseStep = 1.0f / 16;
constexpr float kNoiseFrom = -4.0f;

// For a wanted noise of kNoiseFrom + i * kNoiseStep, a word below which no word gives it.
inline const std::array<std::uint32_t, kNoiseSteps>& lowest_words() {
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

// Meets the best so far with `width` tokens from `first` on; first is a multiple of kGroup.
inline void try_group(const float* group, int width, std::int64_t first, std::uint64_t seed,
                      std::uint32_t position, Best& best) {
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

inline bool is_greedy(const ChoiceRows& rows, std::int64_t row) {
    return rows.temperature[row] < kGreedyBelow || rows.top_k[row] == 1;
}

}  // namespace graft
