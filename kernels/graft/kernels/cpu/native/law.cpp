// Filters are thresholds on the logits, found from a histogram over the distance to the highest
// one, so that only the tokens of one bin are ever sorted; reference/choose.py says what they mean.
#include "law.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "law_math.h"

namespace graft {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBins = 1024;
constexpr float kBinsPerUnit = 32.0f;  // so that the last bin is beyond both reaches
constexpr float kLikelyReach = 16.0f;    // below the highest: nearly always far enough
constexpr float kWeightlessReach = 28.0f;  // further below, a weight is 0

struct Buffers {
    std::vector<float> x, z, near, share;
    std::vector<std::pair<float, float>> bin;
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

// The numbers of z at or above `lowest`, copied without branching: which ones stay cannot be
// predicted.
std::int64_t gather(const float* z, std::int64_t count, float lowest, std::vector<float>& into) {
    into.resize(std::size_t(count) + 1);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        into[std::size_t(kept)] = z[i];
        kept += z[i] >= lowest;
    }
    return kept;
}

// The k-th highest of z, or -inf when no more than k are above -inf.
float kth_highest(const float* z, std::int64_t count, float highest, std::int64_t k) {
    Buffers& own = buffers();
    for (const float lowest : {highest - kLikelyReach, std::numeric_limits<float>::lowest()}) {
        const std::int64_t near = gather(z, count, lowest, own.near);
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

// The highest z at or above `lowest` at which the tokens at or above it weigh top_p of the total.
float top_p_threshold(const float* z, std::int64_t count, float highest, float lowest,
                      float top_p) {
    Buffers& own = buffers();
    const std::int64_t near =
        gather(z, count, std::max(lowest, highest - kWeightlessReach), own.near);
    own.share.resize(std::size_t(near));
    shares(own.near.data(), near, highest, own.share.data());
    const std::int64_t total = total_weight(own.share.data(), near);
    const std::int64_t wanted =
        std::min(std::int64_t(std::ceil(double(top_p) * double(total))), total);
    std::array<std::int64_t, kBins> weight{};
    for (std::int64_t i = 0; i < near; ++i) {
        const auto at = std::size_t(i);
        weight[bin_of(own.near[at], highest)] += weight_of(own.share[at]);
    }
    std::size_t bin = 0;
    std::int64_t above = 0;
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

}  // namespace

void shares(const float* z, std::int64_t count, float highest, float* share) {
    for (std::int64_t i = 0; i < count; ++i) share[i] = exp32(z[i] - highest);
}

// The sum of weight_of, whose upper and lower 20 bits are summed apart to stay in 32 bits.
std::int64_t total_weight(const float* share, std::int64_t count) {
    constexpr std::int64_t kPart = 1024;
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
