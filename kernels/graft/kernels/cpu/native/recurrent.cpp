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
    const float* embedding;       // [vocab, hidden]
    const float* embedding_norm;  // [hidden]
    const float* hidden_norm;     // [hidden]
    const DecoderLayer* layers;   // the first reads both halves side by side
    const float* final_norm;      // [hidden]
    const PackedLinear* head;
    const std::int32_t* token_ids;  // [head->out], the target's numbers, or null
    std::int64_t num_layers, hidden;
    std::int64_t norm_before_residual, norm_output;
};

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

// The rows of one level, as a step.
struct Level {
    std::vector<std::int32_t> positions, write_slots, sequence, prefix_len, extra_ptr, extra_slots;

    void clear() {
        for (auto* each : {&positions, &write_slots, &sequence, &prefix_len, &extra_slots}) {
            each->clear();
        }
        extra_ptr.assign(1, 0);
    }

    void add(std::int64_t position, std::int64_t stem, std::int64_t cached,
             const std::vector<std::int32_t>& path) {
        positions.push_back(std::int32_t(position));
        write_slots.push_back(path.back());
        sequence.push_back(std::int32_t(stem));
        prefix_len.push_back(std::int32_t(cached));
        extra_slots.insert(extra_slots.end(), path.begin(), path.end());
        extra_ptr.push_back(std::int32_t(extra_slots.size()));
    }

    StepRows step(const std::int32_t* page_table, std::int64_t max_pages) const {
        return {std::int64_t(positions.size()), max_pages,         positions.data(),
                write_slots.data(),             sequence.data(),   page_table,
                prefix_len.data(),              extra_ptr.data(), extra_slots.data()};
    }
};

// Trees of many stems, all levels. states: where the stems' run nodes go, one stem after the other.
class Bush {
  public:
    Bush(Pool* pool, const RecurrentNet& net, const KvLayer* caches, const Stem* stems,
         std::int64_t count, const std::int32_t* page_table, std::int64_t max_pages)
        : pool_(pool), net_(net), caches_(caches), stems_(stems), page_table_(page_table),
          max_pages_(max_pages) {
        for (std::int64_t s = 0; s < count; ++s) {
            growths_.emplace_back(stems[s], page_table + s * max_pages, caches[0].page_tokens);
            growing_.push_back(s);
        }
    }

    // roots: [stems, hidden]. False where a row cannot be ranked.
    bool grow(const float* roots, float* states) {
        const std::int64_t width = net_.hidden;
        std::vector<std::int64_t> first_run;
        std::int64_t runs = 0;
        for (const Growth& growth : growths_) {
            first_run.push_back(runs);
            runs += stems_[std::size_t(&growth - &growths_[0])].num_run();
        }
        std::vector<float> rows(roots, roots + std::int64_t(growths_.size()) * width);
        std::vector<float> above;
        Level level;
        for (;;) {
            if (!add_children(rows.data())) return false;
            level.clear();
            above.clear();
            std::vector<std::int32_t> tokens;
            std::vector<std::int64_t> still;
            std::int64_t first_row = 0;
            for (const std::int64_t s : growing_) {
                const Growth& growth = growths_[std::size_t(s)];
                const Stem& stem = stems_[s];
                const std::int64_t ran = growth.depth() == 1 ? 1 : stem.topk;
                if (!growth.done()) {
                    still.push_back(s);
                    for (std::int64_t k = 0; k < stem.topk; ++k) {
                        const float* row = rows.data() + (first_row + growth.parents()[k]) * width;
                        above.insert(above.end(), row, row + width);
                        tokens.push_back(growth.tokens()[k]);
                        level.add(stem.position + growth.depth() - 1, s, stem.cached,
                                  growth.path(k));
                    }
                }
                first_row += ran;
            }
            growing_ = std::move(still);
            if (growing_.empty()) break;
            rows.resize(above.size());
            forward(pool_, net_, caches_, level.step(page_table_, max_pages_), tokens.data(),
                    above.data(), rows.data());
            const float* from = rows.data();
            for (const std::int64_t s : growing_) {
                const std::int64_t topk = stems_[s].topk;
                const std::int64_t run = first_run[std::size_t(s)] +
                                         (growths_[std::size_t(s)].depth() - 1) * topk;
                std::copy_n(from, topk * width, states + run * width);
                from += topk * width;
            }
        }
        for (const Growth& growth : growths_) growth.finish();
        return true;
    }

  private:
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
                total += stems_[s].topk;
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
            const std::int64_t topk = stems_[stem].topk;
            if (!best_children(logits + r * vocab, vocab, growths_[std::size_t(stem)].law(), topk,
                               probs.data() + first, columns.data() + first)) {
                lawful.store(false, std::memory_order_relaxed);
                return;
            }
            for (std::int64_t i = first; i < first + topk; ++i) {
                const std::int64_t column = columns[std::size_t(i)];
                tokens[std::size_t(i)] =
                    net_.token_ids ? net_.token_ids[column] : std::int32_t(column);
            }
        });
        if (!lawful.load()) return false;
        std::int64_t first = 0;
        for (const std::int64_t s : growing_) {
            Growth& growth = growths_[std::size_t(s)];
            const std::int64_t taken = growth.rows() * stems_[s].topk;
            growth.add(probs.data() + first, tokens.data() + first);
            first += taken;
        }
        return true;
    }

    Pool* pool_;
    const RecurrentNet& net_;
    const KvLayer* caches_;
    const Stem* stems_;
    const std::int32_t* page_table_;
    std::int64_t max_pages_;
    std::vector<Growth> growths_;
    std::vector<std::int64_t> growing_;
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

// Grows a tree for each stem. roots: [stems, hidden], what `forward` gave for the last row before;
// page_table: [stems, max_pages]; states: [run nodes of all stems, hidden], what it gives for them.
// Returns 0 where a row of logits holds NaN or +inf or the filters leave nothing of it.
GRAFT_API int graft_recurrent_grow(graft::Pool* pool, const graft::RecurrentNet* net,
                                   const graft::KvLayer* caches, const graft::Stem* stems,
                                   std::int64_t count, const std::int32_t* page_table,
                                   std::int64_t max_pages, const float* roots, float* states) {
    graft::Bush bush(pool, *net, caches, stems, count, page_table, max_pages);
    return bush.grow(roots, states) ? 1 : 0;
}
