// A row's highest entries lie in the groups with the highest maxima, so most groups are only
// compared as a whole.
#include "children.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "law.h"
#include "law_math.h"
#include "simd.h"

namespace graft {
namespace {

constexpr std::int64_t kGroupColumns = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The highest of what it is shown, in descending order; of equals what was shown first.
class Ranking {
  public:
    explicit Ranking(std::size_t count) : count_(count) { kept_.reserve(count + 1); }

    // False for what cannot enter any more.
    bool open_to(float value) const { return kept_.size() < count_ || value > kept_.back().value; }

    void show(float value, std::int64_t number) {
        if (!open_to(value)) return;
        auto place = kept_.end();
        while (place != kept_.begin() && value > (place - 1)->value) --place;
        kept_.insert(place, {value, number});
        if (kept_.size() > count_) kept_.pop_back();
    }

    struct Entry {
        float value;
        std::int64_t number;
    };

    const std::vector<Entry>& entries() const { return kept_; }

  private:
    std::size_t count_;
    std::vector<Entry> kept_;
};

// In place: -inf for what the law's filters drop. False where they leave nothing.
bool filter(float* logits, std::int64_t vocab, const ChildLaw& law) {
    const std::int32_t position = 0;
    const std::int64_t seed = 0;
    ChoiceRows rows{};
    rows.rows = 1;
    rows.vocab = vocab;
    rows.logits = logits;
    rows.temperature = &law.temperature;
    rows.top_k = &law.top_k;
    rows.top_p = &law.top_p;
    rows.min_p = &law.min_p;
    rows.seed = &seed;
    rows.position = &position;
    const RowValues masked = masked_logits(rows, 0);
    if (!masked.values) return false;
    const RowValues kept = supported_logits(rows, 0, masked);
    if (!kept.values) return false;
    for (std::int64_t i = 0; i < vocab; ++i) {
        const bool likely = weight_of(exp32(kept.values[i] - kept.highest)) > 0;
        logits[i] = likely ? logits[i] : kLowest;
    }
    return true;
}

// Sixteen columns from `first` on, -inf past the end.
F16 columns_at(const float* logits, std::int64_t vocab, std::int64_t first) {
    if (first + kLanes <= vocab) return load16(logits + first);
    float rest[kLanes];
    for (int i = 0; i < kLanes; ++i) rest[i] = first + i < vocab ? logits[first + i] : kLowest;
    return load16(rest);
}

}  // namespace

void highest_numbers(const float* values, std::int64_t total, std::int64_t count,
                     std::int64_t* numbers) {
    Ranking ranking{std::size_t(count)};
    for (std::int64_t i = 0; i < total; ++i) ranking.show(values[i], i);
    for (const Ranking::Entry& entry : ranking.entries()) *numbers++ = entry.number;
}

bool best_children(float* logits, std::int64_t vocab, const ChildLaw& law, std::int64_t topk,
                   float* probs, std::int64_t* columns) {
    if (law.noise) {
        const bool cut = law.top_k > 0 && law.top_k < vocab;
        if ((cut || law.top_p < 1.0f || law.min_p > 0.0f) && !filter(logits, vocab, law)) {
            return false;
        }
        for (std::int64_t i = 0; i < vocab; ++i) {
            logits[i] = fma1(law.noise[i], law.temperature, logits[i]);
        }
    }
    const std::int64_t groups = (vocab + kGroupColumns - 1) / kGroupColumns;
    thread_local std::vector<float> tops;
    tops.resize(std::size_t(groups));
    for (std::int64_t g = 0; g < groups; ++g) {
        F16 top = set16(kLowest);
        for (std::int64_t c = 0; c < kGroupColumns; c += kLanes) {
            top = max(top, columns_at(logits, vocab, g * kGroupColumns + c));
        }
        tops[std::size_t(g)] = max16(top);
    }
    float highest = kLowest;
    for (const float top : tops) highest = top > highest ? top : highest;
    if (!(std::fabs(highest) < std::numeric_limits<float>::infinity())) return false;

    const F16 shift = set16(highest);
    F16 mass = zero16();
    for (std::int64_t i = 0; i < vocab; i += kLanes) {
        mass = mass + exp16(columns_at(logits, vocab, i) - shift);
    }
    const float total = sum16(mass);  // NaN where a logit is
    if (!(total >= 1.0f)) return false;

    Ranking ranking{std::size_t(topk)};
    for (std::int64_t g = 0; g < groups; ++g) {
        if (!ranking.open_to(tops[std::size_t(g)])) continue;
        const std::int64_t end = std::min(vocab, (g + 1) * kGroupColumns);
        for (std::int64_t i = g * kGroupColumns; i < end; ++i) ranking.show(logits[i], i);
    }
    for (const Ranking::Entry& entry : ranking.entries()) {
        *probs++ = exp1(entry.value - highest) / total;
        *columns++ = entry.number;
    }
    return true;
}

}  // namespace graft
