#include "bush.h"

#include <algorithm>
#include <cmath>

namespace graft {

void Growth::add(const float* probs, const std::int32_t* tokens) {
    const std::int64_t topk = stem_.topk, children = stem_.children;
    const std::int64_t rows = this->rows(), first = std::int64_t(tokens_.size());
    const std::size_t level = std::size_t(rows * children);
    std::vector<float> fresh(level);
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t k = 0; k < children; ++k) {
            const std::size_t at = std::size_t(r * children + k);
            fresh[at] = chain()       ? 1.0f
                        : depth_ == 0 ? probs[at]
                                      : beam_scores_[std::size_t(r)] * probs[at];
            scores_.push_back(chain() ? std::log(probs[at]) : fresh[at]);
            tokens_.push_back(tokens[at]);
            above_.push_back(depth_ == 0 ? -1 : beam_numbers_[std::size_t(r)]);
        }
    }
    std::vector<std::int64_t> best(static_cast<std::size_t>(topk));
    highest_numbers(fresh.data(), std::int64_t(level), topk, best.data());
    if (++depth_ == stem_.num_steps) return;  // the last level is not run

    const std::vector<std::vector<std::int32_t>> old = std::move(paths_);
    paths_.assign(std::size_t(topk), {});
    std::vector<float> kept(static_cast<std::size_t>(topk));
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(topk));
    for (std::int64_t k = 0; k < topk; ++k) {
        const std::int64_t candidate = best[std::size_t(k)], row = candidate / children;
        const std::int64_t run = (depth_ - 1) * topk + k;
        kept[std::size_t(k)] = fresh[std::size_t(candidate)];
        numbers[std::size_t(k)] = first + candidate;
        stem_.run_tokens[run] = tokens[candidate];
        stem_.run_parents[run] = std::int32_t(row);
        std::vector<std::int32_t>& path = paths_[std::size_t(k)];
        if (!old.empty()) path = old[std::size_t(row)];
        path.push_back(slot(stem_.cached + run));
    }
    beam_scores_ = std::move(kept);
    beam_numbers_ = std::move(numbers);
}

void Growth::finish() const {
    const std::int64_t total = std::int64_t(scores_.size()), wanted = stem_.num_nodes - 1;
    std::vector<std::int64_t> picked(static_cast<std::size_t>(wanted));
    if (chain()) {
        for (std::int64_t i = 0; i < wanted; ++i) picked[std::size_t(i)] = i;
    } else {
        highest_numbers(scores_.data(), total, wanted, picked.data());
        std::sort(picked.begin(), picked.end());
    }
    std::vector<std::int32_t> place(static_cast<std::size_t>(total), 0);
    float sum = 0.0f;
    for (std::int64_t i = 0; i < wanted; ++i) {
        const std::size_t candidate = std::size_t(picked[std::size_t(i)]);
        place[candidate] = std::int32_t(i + 1);
        const std::int64_t above = above_[candidate];
        stem_.tokens[i] = tokens_[candidate];
        stem_.parents[i] = above < 0 ? 0 : place[std::size_t(above)];
        sum += chain() ? scores_[candidate] : 0.0f;
        stem_.scores[i] = chain() ? sum : std::log(scores_[candidate]);
    }
}

}  // namespace graft
