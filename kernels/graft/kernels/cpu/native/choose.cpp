// The target's own choice at every row of logits; reference/choose.py says what it means.
//
// Filters are thresholds on the logits, found from a histogram over the distance to the highest
// one, so that only the tokens of one bin are ever sorted. Noise is made for 64 tokens at a time,
// and its logarithms only for tokens whose word is high enough to win.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "law_math.h"
#include "pool.h"

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

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kRefused = -1;
constexpr int kBins = 1024;
constexpr float kBinsPerUnit = 16.0f;
constexpr int kNoiseSteps = 512;
constexpr float kNoiseStep = 1.0f / 16;
constexpr float kNoiseFrom = -4.0f;

struct Buffers {
    std::vector<float> x, z, share;
    std::vector<std::pair<float, std::int64_t>> bin;
};

Buffers& buffers() {
    thread_local Buffers kept;
    return kept;
}

// Floats as integers of the same order; -0 is just below +0.
inline std::int32_t order_key(float x) {
    const std::int32_t bits = bits_of(x);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

struct Extent {
    float highest;
    bool lawful;  // no NaN and no +inf
};

Extent extent(const float* x, std::int64_t count) {
    std::int32_t high = std::numeric_limits<std::int32_t>::min();
    std::int32_t low = std::numeric_limits<std::int32_t>::max();
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t key = order_key(x[i]);
        high = key > high ? key : high;
        low = key < low ? key : low;
    }
    const bool lawful = high < order_key(kInfinity) && low >= order_key(-kInfinity);
    return {float_of(high ^ ((high >> 31) & 0x7FFFFFFF)), lawful};
}

// The row with its named tokens adjusted and the masked ones at -inf; null when it is refused.
const float* masked_row(const ChoiceRows& rows, std::int64_t row) {
    const float* x = rows.logits + row * rows.vocab;
    const std::int64_t first = rows.adjust_ptr ? rows.adjust_ptr[row] : 0;
    const std::int64_t last = rows.adjust_ptr ? rows.adjust_ptr[row + 1] : 0;
    if (first == last && !rows.bitmask) return x;
    std::vector<float>& copy = buffers().x;
    copy.assign(x, x + rows.vocab);
    for (std::int64_t i = first; i < last; ++i) {
        float& value = copy[std::size_t(rows.adjust_tokens[i])];
        const float ratio = rows.adjust_ratio[i];
        value = (value > 0 ? value / ratio : value * ratio) - rows.adjust_shift[i];
    }
    if (!rows.bitmask) return copy.data();
    if (!extent(copy.data(), rows.vocab).lawful) return nullptr;
    const std::int32_t* words = rows.bitmask + row * rows.words;
    for (std::int64_t start = 0; start < rows.vocab; start += 32) {
        const std::uint32_t word = std::uint32_t(words[start / 32]);
        if (word == 0xFFFFFFFFu) continue;
        const int count = int(std::min<std::int64_t>(32, rows.vocab - start));
        for (int i = 0; i < count; ++i) {
            if (!((word >> i) & 1)) copy[std::size_t(start + i)] = -kInfinity;
        }
    }
    return copy.data();
}

inline int bin_of(float z, float highest) {
    const float distance = (highest - z) * kBinsPerUnit;
    return distance < float(kBins - 1) ? int(distance) : kBins - 1;
}

// The k-th highest of z, or -inf when no more than k are above -inf.
float kth_highest(const float* z, std::int64_t count, float highest, std::int64_t k) {
    std::array<std::int64_t, kBins> size{};
    std::int64_t supported = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        if (z[i] == -kInfinity) continue;
        ++size[std::size_t(bin_of(z[i], highest))];
        ++supported;
    }
    if (k >= supported) return -kInfinity;
    int bin = 0;
    std::int64_t above = 0;
    while (above + size[std::size_t(bin)] < k) above += size[std::size_t(bin++)];
    std::vector<float>& found = buffers().share;
    found.clear();
    for (std::int64_t i = 0; i < count; ++i) {
        if (z[i] != -kInfinity && bin_of(z[i], highest) == bin) found.push_back(z[i]);
    }
    const auto place = found.begin() + (k - above - 1);
    std::nth_element(found.begin(), place, found.end(), std::greater<float>());
    return *place;
}

inline std::int64_t weight_of(float share) { return std::int64_t(share * kWeightOne); }

// share[i] = exp(z[i] - highest), 0 below `lowest`.
const float* shares(const float* z, std::int64_t count, float highest, float lowest) {
    std::vector<float>& share = buffers().share;
    share.resize(std::size_t(count));
    for (std::int64_t i = 0; i < count; ++i) {
        const float value = exp32(z[i] - highest);
        share[std::size_t(i)] = z[i] >= lowest ? value : 0.0f;
    }
    return share.data();
}

std::int64_t total_weight(const float* share, std::int64_t count) {
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < count; ++i) total += weight_of(share[i]);
    return total;
}

// The highest z at which the tokens at or above it weigh top_p of the total.
float top_p_threshold(const float* z, const float* share, std::int64_t count, float highest,
                      float top_p) {
    const std::int64_t total = total_weight(share, count);
    const std::int64_t wanted =
        std::min(std::int64_t(std::ceil(double(top_p) * double(total))), total);
    std::array<std::int64_t, kBins> weight{};
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t own = weight_of(share[i]);
        if (own > 0) weight[std::size_t(bin_of(z[i], highest))] += own;
    }
    int bin = 0;
    std::int64_t above = 0;
    while (above + weight[std::size_t(bin)] < wanted) above += weight[std::size_t(bin++)];
    auto& found = buffers().bin;
    found.clear();
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t own = weight_of(share[i]);
        if (own > 0 && bin_of(z[i], highest) == bin) found.emplace_back(z[i], own);
    }
    std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (const auto& [value, own] : found) {
        above += own;
        if (above >= wanted) return value;
    }
    return highest;  // unreachable: the bin holds what is wanted
}

struct Supported {
    const float* z;  // -inf outside the support; null when the row is refused
    float highest;
};

// Steps 2 and 4 to 7 of the law.
Supported supported(const ChoiceRows& rows, std::int64_t row, const float* x, float highest) {
    const std::int64_t count = rows.vocab;
    const float temperature = rows.temperature[row];
    const std::int64_t top_k = rows.top_k[row];
    const float top_p = rows.top_p[row], min_p = rows.min_p[row];
    const float top = highest / temperature;
    if (top == kInfinity || top == -kInfinity) return {nullptr, 0.0f};
    const bool filtered = (top_k > 0 && top_k < count) || top_p < 1.0f || min_p > 0.0f;
    if (temperature == 1.0f && !filtered) return {x, top};
    std::vector<float>& z = buffers().z;
    z.resize(std::size_t(count));
    for (std::int64_t i = 0; i < count; ++i) z[std::size_t(i)] = x[i] / temperature;
    if (!filtered) return {z.data(), top};
    float lowest = -kInfinity;
    if (top_k > 0 && top_k < count) lowest = kth_highest(z.data(), count, top, top_k);
    if (top_p < 1.0f || min_p > 0.0f) {
        const float* share = shares(z.data(), count, top, lowest);
        if (top_p < 1.0f) {
            lowest = std::max(lowest, top_p_threshold(z.data(), share, count, top, top_p));
        }
        for (std::int64_t i = 0; i < count; ++i) {
            z[std::size_t(i)] = share[i] >= min_p ? z[std::size_t(i)] : -kInfinity;
        }
    }
    for (std::int64_t i = 0; i < count; ++i) {
        z[std::size_t(i)] = z[std::size_t(i)] >= lowest ? z[std::size_t(i)] : -kInfinity;
    }
    return {z.data(), top};
}

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
    float highest = group[0];
    for (int i = 1; i < width; ++i) highest = group[i] > highest ? group[i] : highest;
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
    for (std::int64_t i = 0; i < count; ++i) {
        if (x[i] == value) return std::int32_t(i);
    }
    return kRefused;
}

bool is_greedy(const ChoiceRows& rows, std::int64_t row) {
    return rows.temperature[row] < kGreedyBelow || rows.top_k[row] == 1;
}

std::int32_t choose_row(const ChoiceRows& rows, std::int64_t row) {
    const float* x = masked_row(rows, row);
    if (!x) return kRefused;
    const Extent seen = extent(x, rows.vocab);
    if (!seen.lawful || seen.highest == -kInfinity) return kRefused;
    const std::int32_t greedy = first_equal(x, rows.vocab, seen.highest);
    if (is_greedy(rows, row)) return greedy;
    const Supported law = supported(rows, row, x, seen.highest);
    if (!law.z) return kRefused;
    const std::uint64_t seed = std::uint64_t(rows.seed[row]);
    const std::uint32_t position = std::uint32_t(rows.position[row]);
    Best best;
    // The likeliest token's group first: a high value early rules most other groups out.
    const std::int64_t start = greedy / kGroup * kGroup;
    try_group(law.z, rows.vocab, start, seed, position, best);
    for (std::int64_t first = 0; first < rows.vocab; first += kGroup) {
        if (first != start) try_group(law.z, rows.vocab, first, seed, position, best);
    }
    return best.token;
}

void probs_row(const ChoiceRows& rows, std::int64_t row, float* probs) {
    std::fill_n(probs, rows.vocab, 0.0f);
    const float* x = masked_row(rows, row);
    if (!x) return;
    const Extent seen = extent(x, rows.vocab);
    if (!seen.lawful || seen.highest == -kInfinity) return;
    if (is_greedy(rows, row)) {
        probs[first_equal(x, rows.vocab, seen.highest)] = 1.0f;
        return;
    }
    const Supported law = supported(rows, row, x, seen.highest);
    if (!law.z) return;
    const float* share = shares(law.z, rows.vocab, law.highest, -kInfinity);
    const double total = double(total_weight(share, rows.vocab));
    for (std::int64_t i = 0; i < rows.vocab; ++i) {
        probs[i] = float(double(weight_of(share[i])) / total);
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
