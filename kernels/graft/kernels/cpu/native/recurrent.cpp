// EAGLE-3's network and its trees in one call: only tokens, parents and scores come out of the
// levels, no row of logits.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "bush.h"
#include "children.h"
#include "layer.h"
#include "rows.h"

namespace graft {
namespace {

constexpr std::int64_t kFewRows = 4;  // below this handing norms out costs more than they do

struct RecurrentNet {
    const PackedLinear* fc;    // states side by side -> hidden, or null
    const float* input_norm;   // [width], over all states at once, or null
    const float* state_norms;  // [states, width / states], one each, or null
    std::int64_t num_states, width;
    const float* embedding;       // [vocab, hidden]
    const float* embedding_norm;  // [hidden]
    const float* hidden_norm;     // [hidden]
    const DecoderLayer* layers;   // the first reads both halves side by side
    const float* final_norm;      // [hidden]
    const PackedLinear* head;
    const std::int32_t* token_ids;  // [head->out], the target's numbers, or null
    std::int64_t num_layers, hidden, vocab;
    std::int64_t norm_before_residual, norm_output;
};

// In place: features [rows, width] are normed; returns [rows, hidden], which may be the features.
float* fuse(Pool* pool, const RecurrentNet& net, std::int64_t rows, float* features) {
    const float eps = net.layers[0].eps;
    if (net.input_norm) {
        rms_norm(pool, features, net.input_norm, eps, rows, net.width, features);
    }
    if (net.state_norms) {
        const std::int64_t width = net.width / net.num_states;
        for (std::int64_t i = 0; i < rows * net.num_states; ++i) {
            float* state = features + i * width;
            rms_norm(nullptr, state, net.state_norms + i % net.num_states * width, eps, 1, width,
                     state);
        }
    }
    if (!net.fc) return features;
    float* fused = scratch(Scratch::fused, std::size_t(rows * net.hidden));
    linear(pool, *net.fc, features, rows, fused);
    return fused;
}

// out: [rows, hidden], the output before the final norm, or after it with norm_output.
void forward(Pool* pool, const RecurrentNet& net, const KvLayer* caches, const StepRows& step,
             const std::int32_t* tokens, const float* hidden, float* out) {
    const std::int64_t rows = step.rows, width = net.hidden;
    const float eps = net.layers[0].eps;
    float* joined = scratch(Scratch::joined, std::size_t(rows * 2 * width));
    parallel_for(rows < kFewRows ? nullptr : pool, int(rows), [&](int row) {
        float *both = joined + row * 2 * width, *normed = both + width;
        const float *embedded = net.embedding + tokens[row] * width, *state = hidden + row * width;
        rms_norm(nullptr, embedded, net.embedding_norm, eps, 1, width, both);
        rms_norm(nullptr, state, net.hidden_norm, eps, 1, width, normed);
        std::memcpy(out + row * width, net.norm_before_residual ? normed : state,
                    std::size_t(width) * sizeof(float));
    });
    add_attention(pool, net.layers[0], caches[0], step, joined, out);
    add_mlp(pool, net.layers[0], rows, out);
    for (std::int64_t i = 1; i < net.num_layers; ++i) {
        run_layer(pool, net.layers[i], caches[i], step, out);
    }
    if (net.norm_output) rms_norm(pool, out, net.final_norm, eps, rows, width, out);
}

// [rows, head->out] of the states [rows, hidden] that `forward` gave.
float* score(Pool* pool, const RecurrentNet& net, const float* states, std::int64_t rows) {
    const std::int64_t width = net.hidden;
    if (!net.norm_output) {
        float* normed = scratch(Scratch::normed, std::size_t(rows * width));
        rms_norm(rows < kFewRows ? nullptr : pool, states, net.final_norm, net.layers[0].eps, rows,
                 width, normed);
        states = normed;
    }
    float* logits = scratch(Scratch::logits, std::size_t(rows * net.head->out));
    linear(pool, *net.head, states, rows, logits);
    return logits;
}

// Rows of one forward. A stem's line of the page table is its number.
class Rows {
  public:
    Rows(const Stem* stems, std::int64_t count) {
        for (std::int64_t s = 0; s < count; ++s) {
            max_pages_ = std::max(max_pages_, stems[s].num_pages);
        }
        page_table_.assign(std::size_t(count * max_pages_), -1);
        for (std::int64_t s = 0; s < count; ++s) {
            std::copy_n(stems[s].pages, stems[s].num_pages, &page_table_[s * max_pages_]);
        }
    }

    void clear() {
        for (auto* each : {&tokens, &positions_, &write_slots_, &sequence_, &prefix_len_,
                           &extra_slots_}) {
            each->clear();
        }
        extra_ptr_.assign(1, 0);
    }

    void add(std::int64_t stem, std::int32_t token, std::int64_t position, std::int64_t seen,
             std::int32_t slot) {
        tokens.push_back(token);
        positions_.push_back(std::int32_t(position));
        write_slots_.push_back(slot);
        sequence_.push_back(std::int32_t(stem));
        prefix_len_.push_back(std::int32_t(seen));
        extra_ptr_.push_back(std::int32_t(extra_slots_.size()));
    }

    void add_node(std::int64_t stem, std::int32_t token, std::int64_t position,
                  std::int64_t seen, const std::vector<std::int32_t>& path) {
        extra_slots_.insert(extra_slots_.end(), path.begin(), path.end());
        add(stem, token, position, seen, path.back());
    }

    StepRows step() const {
        return {std::int64_t(tokens.size()), max_pages_,         positions_.data(),
                write_slots_.data(),         sequence_.data(),   page_table_.data(),
                prefix_len_.data(),          extra_ptr_.data(), extra_slots_.data()};
    }

    std::vector<std::int32_t> tokens;

  private:
    std::int64_t max_pages_ = 1;
    std::vector<std::int32_t> page_table_, positions_, write_slots_, sequence_, prefix_len_,
        extra_ptr_, extra_slots_;
};

// Trees of many stems, all levels.
class Bush {
  public:
    Bush(Pool* pool, const RecurrentNet& net, const KvLayer* caches, const Stem* stems,
         std::int64_t count)
        : pool_(pool), net_(net), caches_(caches), stems_(stems), rows_(stems, count) {
        std::int64_t runs = 0;
        for (std::int64_t s = 0; s < count; ++s) {
            growths_.emplace_back(stems[s], caches[0].page_tokens);
            growing_.push_back(s);
            first_run_.push_back(runs);
            runs += stems[s].num_run();
        }
    }

    // In place: the roots [stems, hidden] of stems with rows become what the last of them gave.
    void catch_up(bool fused, float* roots) {
        const std::int64_t width = fused ? net_.hidden : net_.width;
        std::int64_t total = 0;
        for (const std::int64_t s : growing_) total += stems_[s].rows;
        if (total == 0) return;
        float* features = scratch(Scratch::features, std::size_t(total * width));
        float* to = features;
        rows_.clear();
        for (const std::int64_t s : growing_) {
            const Stem& stem = stems_[s];
            to = std::copy_n(stem.features, stem.rows * width, to);
            for (std::int64_t r = 0; r < stem.rows; ++r) {
                const std::int64_t at = stem.cached - stem.rows + r;
                // Ids beyond the embedding are padding of the target's, and no words.
                const auto token =
                    std::int32_t(std::min<std::int64_t>(stem.tokens_before[r], net_.vocab - 1));
                rows_.add(s, token, stem.position - stem.rows + r, at + 1,
                          growths_[std::size_t(s)].slot(at));
            }
        }
        const float* hidden = fused ? features : fuse(pool_, net_, total, features);
        std::vector<float> out(std::size_t(total * net_.hidden));
        forward(pool_, net_, caches_, rows_.step(), rows_.tokens.data(), hidden, out.data());
        const float* last = out.data();
        for (const std::int64_t s : growing_) {
            if (stems_[s].rows == 0) continue;
            last += stems_[s].rows * net_.hidden;
            std::copy_n(last - net_.hidden, net_.hidden, roots + s * net_.hidden);
        }
    }

    // roots: [stems, hidden]; states: where the run nodes of all stems go, one stem after the
    // other. False where a row cannot be ranked.
    bool grow(const float* roots, float* states) {
        const std::int64_t width = net_.hidden;
        std::vector<float> rows(roots, roots + std::int64_t(growths_.size()) * width);
        std::vector<float> above;
        while (add_children(rows.data())) {
            next_level(rows.data(), above);
            if (growing_.empty()) {
                for (const Growth& growth : growths_) growth.finish();
                return true;
            }
            rows.resize(above.size());
            forward(pool_, net_, caches_, rows_.step(), rows_.tokens.data(), above.data(),
                    rows.data());
            const float* from = rows.data();
            for (const std::int64_t s : growing_) {
                const std::int64_t topk = stems_[s].topk;
                const std::int64_t step = growths_[std::size_t(s)].depth() - 1;
                std::copy_n(from, topk * width,
                            states + (first_run_[std::size_t(s)] + step * topk) * width);
                from += topk * width;
            }
        }
        return false;
    }

  private:
    // Leaves the stems that are done behind, and sets the rows of the others: their beams, and in
    // `above` the states of the rows that these grew from.
    void next_level(const float* states, std::vector<float>& above) {
        const std::int64_t width = net_.hidden;
        std::vector<std::int64_t> still;
        rows_.clear();
        above.clear();
        for (const std::int64_t s : growing_) {
            const Growth& growth = growths_[std::size_t(s)];
            const Stem& stem = stems_[s];
            if (!growth.done()) {
                still.push_back(s);
                for (std::int64_t k = 0; k < stem.topk; ++k) {
                    const float* from = states + growth.parents()[k] * width;
                    above.insert(above.end(), from, from + width);
                    rows_.add_node(s, growth.tokens()[k], stem.position + growth.depth() - 1,
                                   stem.cached, growth.path(k));
                }
            }
            states += (growth.depth() == 1 ? 1 : stem.topk) * width;
        }
        growing_ = std::move(still);
    }

    // Scores the rows that were run last and adds a level to each growing stem.
    bool add_children(const float* states) {
        struct Row {
            std::int64_t stem, first;
        };
        std::vector<Row> rows;
        std::int64_t total = 0;
        for (const std::int64_t s : growing_) {
            for (std::int64_t r = 0; r < growths_[std::size_t(s)].rows(); ++r) {
                rows.push_back({s, total});
                total += stems_[s].children;
            }
        }
        const std::int64_t vocab = net_.head->out;
        float* logits = score(pool_, net_, states, std::int64_t(rows.size()));
        std::vector<float> probs(static_cast<std::size_t>(total));
        std::vector<std::int64_t> columns(static_cast<std::size_t>(total));
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(total));
        std::atomic<bool> lawful{true};
        parallel_for(pool_, int(rows.size()), [&](int r) {
            const auto [stem, first] = rows[std::size_t(r)];
            const std::int64_t children = stems_[stem].children;
            if (!best_children(logits + r * vocab, vocab, growths_[std::size_t(stem)].law(),
                               children, probs.data() + first, columns.data() + first)) {
                lawful.store(false, std::memory_order_relaxed);
                return;
            }
            for (std::int64_t i = first; i < first + children; ++i) {
                const std::int64_t column = columns[std::size_t(i)];
                tokens[std::size_t(i)] =
                    net_.token_ids ? net_.token_ids[column] : std::int32_t(column);
            }
        });
        if (!lawful.load()) return false;
        std::int64_t first = 0;
        for (const std::int64_t s : growing_) {
            Growth& growth = growths_[std::size_t(s)];
            const std::int64_t taken = growth.rows() * stems_[s].children;
            growth.add(probs.data() + first, tokens.data() + first);
            first += taken;
        }
        return true;
    }

    Pool* pool_;
    const RecurrentNet& net_;
    const KvLayer* caches_;
    const Stem* stems_;
    Rows rows_;
    std::vector<Growth> growths_;
    std::vector<std::int64_t> growing_, first_run_;
};

}  // namespace
}  // namespace graft

// Runs rows and writes their keys and values. hidden: [rows, hidden], what goes in beside the
// tokens; out: [rows, hidden], what the next step takes as hidden.
GRAFT_API void graft_recurrent_forward(graft::Pool* pool, const graft::RecurrentNet* net,
                                       const graft::KvLayer* caches, const graft::StepRows* step,
                                       const std::int32_t* tokens, const float* hidden,
                                       float* out) {
    graft::forward(pool, *net, caches, *step, tokens, hidden, out);
}

// Runs the rows of each stem and grows its tree. fused: the features have passed fc. In place:
// roots [stems, hidden], what the last row before each tree gave, read for stems without rows.
// states: [run nodes of all stems, hidden], what the network gives for them. Returns 0 where a row
// of logits holds NaN or +inf or the filters leave nothing of it.
GRAFT_API int graft_recurrent_grow(graft::Pool* pool, const graft::RecurrentNet* net,
                                   const graft::KvLayer* caches, const graft::Stem* stems,
                                   std::int64_t count, std::int64_t fused, float* roots,
                                   float* states) {
    graft::Bush bush(pool, *net, caches, stems, count);
    bush.catch_up(fused != 0, roots);
    return bush.grow(roots, states) ? 1 : 0;
}
