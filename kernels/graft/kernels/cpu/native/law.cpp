// Filters are thresholds on the logits, found from a histogram over the distance to the highest
// one, so that only the tokens of one bin are ever sorted; reference/choose.py says what they mean.
// A sample of a long row says where its top_p threshold should be and one pass weighs what is
// above, so that only the tokens between two cuts are looked at one by one.
#include "law.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "gather.h"
#include "law_math.h"

namespace graft {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBins = 1024;
constexpr float kBinsPerUnit = 32.0f;  // so that the last bin is beyond both reaches
constexpr float kLikelyReach = 16.0f;    // below the highest: nearly always far enough
constexpr float kWeightlessReach = 28.0f;  // further below, a weight is 0
constexpr std::int64_t kSampleStep = 256;  // of as many tokens, the first kSampled are sampled
constexpr std::int64_t kSampled = 16;
constexpr std::int64_t kLongRow = 32 * kSampleStep;  // a sample of fewer tokens says too little
constexpr double kFew = 2048;      // tokens that cost little one by one
constexpr double kDeviations = 3;  // a wrong guess costs a second search
constexpr std::int64_t kPart = 1024;  // tokens whose weights are summed in 32 bits

struct Buffers {
    std::vector<float> x, z, near, share;
    std::vector<std::pair<float, float>> bin;
};

Buffers& buffers() {
    thread_local Buffers kept;
    return kept;
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
    return {of_order_key(high), lawful};
}

// The row with its named tokens adjusted and the masked ones at -inf; null where a masked token
// hides that the row is refused.
const float* adjusted_row(const ChoiceRows& rows, std::int64_t row) {
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

inline std::size_t bin_of(float z, float highest) {
    const float distance = (highest - z) * kBinsPerUnit;
    return std::size_t(int(distance < float(kBins - 1) ? distance : float(kBins - 1)));
}

std::int64_t gather_near(const float* z, std::int64_t count, float lowest, float below) {
    std::vector<float>& near = buffers().near;
    near.resize(std::size_t(count) + 16);
    return gather(z, count, lowest, below, near.data());
}

// The k-th highest of z, or -inf when no more than k are above -inf.
float kth_highest(const float* z, std::int64_t count, float highest, std::int64_t k) {
    Buffers& own = buffers();
    for (const float lowest : {highest - kLikelyReach, std::numeric_limits<float>::lowest()}) {
        const std::int64_t near = gather_near(z, count, lowest, kInfinity);
        if (near < k) continue;
        std::array<std::int64_t, kBins> size{};
        for (std::int64_t i = 0; i < near; ++i) ++size[bin_of(own.near[std::size_t(i)], highest)];
        std::size_t bin = 0;
        std::int64_t above = 0;
        while (above + size[bin] < k) above += size[bin++];
        std::int64_t inside = 0;  // moved to the front, in place
        for (std::int64_t i = 0; i < near; ++i) {
            const float value = own.near[std::size_t(i)];
            own.near[std::size_t(inside)] = value;
            inside += bin_of(value, highest) == bin;
        }
        const auto first = own.near.begin();
        std::nth_element(first, first + (k - above - 1), first + inside, std::greater<float>());
        return own.near[std::size_t(k - above - 1)];
    }
    return -kInfinity;
}

std::int64_t wanted_of(float top_p, std::int64_t total) {
    return std::min(std::int64_t(std::ceil(double(top_p) * double(total))), total);
}

// Where own.near[0, near), with its shares, brings the weight from `above` to `wanted`; it does.
float threshold_among(Buffers& own, std::int64_t near, float highest, std::int64_t above,
                      std::int64_t wanted) {
    std::array<std::int64_t, kBins> weight{};
    for (std::int64_t i = 0; i < near; ++i) {
        const auto at = std::size_t(i);
        weight[bin_of(own.near[at], highest)] += weight_of(own.share[at]);
    }
    std::size_t bin = 0;
    while (above + weight[bin] < wanted) above += weight[bin++];
    own.bin.clear();
    for (std::int64_t i = 0; i < near; ++i) {
        const auto at = std::size_t(i);
        if (bin_of(own.near[at], highest) == bin) own.bin.emplace_back(own.near[at], own.share[at]);
    }
    std::sort(own.bin.begin(), own.bin.end(), std::greater<>());
    for (const auto& [value, share] : own.bin) {
        above += weight_of(share);
        if (above >= wanted) return value;
    }
    return highest;  // unreachable: the bin holds what is wanted
}

// The weight of own.near[0, near), whose shares it makes.
std::int64_t weigh(Buffers& own, std::int64_t near, float highest) {
    own.share.resize(std::size_t(near));
    shares(own.near.data(), near, highest, own.share.data());
    return total_weight(own.share.data(), near);
}

// The tokens at or above `lowest` and below `below`.
struct Bracket {
    float lowest, below;
};

// Where a sample says that the top_p threshold is. The highest token counts besides the sample,
// and a row of few likely tokens is searched from the top, so likely tokens that the sample has
// missed only move the threshold away from `lowest`.
Bracket guess_bracket(const float* z, std::int64_t count, float highest, float top_p) {
    struct Sums {
        double tokens, weight, square;
    };
    std::array<Sums, kBins> bins{};
    double total = 0.0;
    for (std::int64_t start = 0; start + kSampled <= count; start += kSampleStep) {
        float share[kSampled];
        shares(z + start, kSampled, highest, share);
        for (std::int64_t i = 0; i < kSampled; ++i) {
            const double weight = double(share[i]);
            Sums& sums = bins[bin_of(z[start + i], highest)];
            sums.tokens += 1.0;
            sums.weight += weight;
            sums.square += weight * weight;
            total += weight;
        }
    }
    constexpr double kTokens = double(kSampleStep) / double(kSampled);  // that one stands for
    total += 1.0 / kTokens;
    double squares = 0.0;
    for (const Sums& sums : bins) squares += sums.square;
    // From the lowest token up, the share of the tail is too small, uncertain, then too great.
    double tail = 0.0, tail_square = 0.0, tokens = 0.0;
    std::size_t low = kBins - 1, high = 0;
    bool found = false;
    for (std::size_t bin = kBins; bin-- > 1;) {
        tail += bins[bin].weight;
        tail_square += bins[bin].square;
        const double q = tail / total;
        const double top_square = std::max(squares - tail_square, 0.0);
        const double variance = (1 - q) * (1 - q) * tail_square + q * q * top_square;
        const double slack = kDeviations * std::sqrt(variance) / total;
        if (!found && q + slack >= 1.0 - double(top_p)) {
            found = true;
            low = bin;
        }
        if (q - slack > 1.0 - double(top_p)) {
            high = bin;
            break;
        }
    }
    if (!found) low = 0;
    for (std::size_t bin = 0; bin <= low; ++bin) tokens += bins[bin].tokens;
    const float lowest = highest - float(low + 1) / kBinsPerUnit;
    if (high == 0 || tokens * kTokens <= kFew) return {lowest, kInfinity};
    return {lowest, highest - float(high) / kBinsPerUnit};
}

struct Weighed {
    std::int64_t total, above;
};

// The weight of the row and of its tokens at or above `below`.
Weighed weigh_above(const float* z, std::int64_t count, float highest, float below) {
    const std::int32_t cut = order_key(below == 0.0f ? -0.0f : below);
    Weighed sum{0, 0};
    for (std::int64_t start = 0; start < count; start += kPart) {
        const std::int64_t end = std::min(start + kPart, count);
        std::int32_t upper = 0, lower = 0, upper_above = 0, lower_above = 0;
        for (std::int64_t i = start; i < end; ++i) {
            const float scaled = exp32(z[i] - highest) * 1048576.0f;
            const std::int32_t whole = std::int32_t(scaled);
            const std::int32_t rest = std::int32_t((scaled - float(whole)) * 1048576.0f);
            const std::int32_t above = order_key(z[i]) >= cut ? -1 : 0;
            upper += whole;
            lower += rest;
            upper_above += whole & above;
            lower_above += rest & above;
        }
        sum.total += (std::int64_t(upper) << 20) + lower;
        sum.above += (std::int64_t(upper_above) << 20) + lower_above;
    }
    return sum;
}

// The highest z at or above `lowest` at which the tokens at or above it weigh top_p of the total.
float top_p_threshold(const float* z, std::int64_t count, float highest, float lowest,
                      float top_p) {
    Buffers& own = buffers();
    const float weightless = highest - kWeightlessReach;
    if (count < kLongRow || lowest > -kInfinity) {
        const std::int64_t near = gather_near(z, count, std::max(lowest, weightless), kInfinity);
        const std::int64_t wanted = wanted_of(top_p, weigh(own, near, highest));
        return threshold_among(own, near, highest, 0, wanted);
    }
    Bracket bracket = guess_bracket(z, count, highest, top_p);
    auto [total, above] = weigh_above(z, count, highest, bracket.below);
    const std::int64_t wanted = wanted_of(top_p, total);
    if (above >= wanted) {  // it is higher than guessed
        bracket = {bracket.below, kInfinity};
        above = 0;
    }
    std::int64_t near = gather_near(z, count, bracket.lowest, bracket.below);
    const std::int64_t inside = weigh(own, near, highest);
    if (above + inside < wanted) {  // it is lower
        above += inside;
        near = gather_near(z, count, weightless, bracket.lowest);
        weigh(own, near, highest);
    }
    return threshold_among(own, near, highest, above, wanted);
}

}  // namespace

void shares(const float* z, std::int64_t count, float highest, float* share) {
    for (std::int64_t i = 0; i < count; ++i) share[i] = exp32(z[i] - highest);
}

// The sum of weight_of, whose upper and lower 20 bits are summed apart to stay in 32 bits.
std::int64_t total_weight(const float* share, std::int64_t count) {
    std::int64_t total = 0;
    for (std::int64_t start = 0; start < count; start += kPart) {
        const std::int64_t end = std::min(start + kPart, count);
        std::int32_t upper = 0, lower = 0;
        for (std::int64_t i = start; i < end; ++i) {
            const float scaled = share[i] * 1048576.0f;
            const std::int32_t whole = std::int32_t(scaled);
            upper += whole;
            lower += std::int32_t((scaled - float(whole)) * 1048576.0f);
        }
        total += (std::int64_t(upper) << 20) + lower;
    }
    return total;
}

RowValues masked_logits(const ChoiceRows& rows, std::int64_t row) {
    const float* x = adjusted_row(rows, row);
    if (!x) return {nullptr, 0.0f};
    const Extent seen = extent(x, rows.vocab);
    if (!seen.lawful || seen.highest == -kInfinity) return {nullptr, 0.0f};
    return {x, seen.highest};
}

RowValues supported_logits(const ChoiceRows& rows, std::int64_t row, const RowValues& masked) {
    const std::int64_t count = rows.vocab;
    const float temperature = rows.temperature[row];
    const std::int64_t top_k = rows.top_k[row];
    const float top_p = rows.top_p[row], min_p = rows.min_p[row];
    const float highest = masked.highest / temperature;
    if (highest == kInfinity || highest == -kInfinity) return {nullptr, 0.0f};
    const bool cut = top_k > 0 && top_k < count;
    if (temperature == 1.0f && !cut && !(top_p < 1.0f) && !(min_p > 0.0f)) {
        return {masked.values, highest};
    }
    std::vector<float>& z = buffers().z;
    z.resize(std::size_t(count));
    for (std::int64_t i = 0; i < count; ++i) z[std::size_t(i)] = masked.values[i] / temperature;
    float lowest = -kInfinity;
    if (cut) lowest = kth_highest(z.data(), count, highest, top_k);
    if (top_p < 1.0f) lowest = top_p_threshold(z.data(), count, highest, lowest, top_p);
    if (lowest > -kInfinity) {
        for (float& value : z) value = value >= lowest ? value : -kInfinity;
    }
    if (min_p > 0.0f) {
        for (float& value : z) value = exp32(value - highest) >= min_p ? value : -kInfinity;
    }
    return {z.data(), highest};
}

}  // namespace graft
