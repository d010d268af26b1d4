// Draft trees of many sessions, grown level by level, each of its own shape. Knows scores, beams
// and slots; knows no network.
//
// Candidates are numbered flat: 0 .. C-1 at level 1, then K * C a level, beam by beam; of equals the
// lower number wins. graft.kernels.reference.candidates says what is picked.
#pragma once

#include <cstdint>
#include <vector>

#include "children.h"
#include "kv.h"

namespace graft {

// Where one tree grows, what is to be run before, and what becomes of it. A node that passes through the network is numbered
// step * topk + beam, and its key lies that many slots behind what is cached.
struct Stem {
    std::int64_t topk, children;  // beams of a level, and candidates of each, as many at least
    std::int64_t num_steps, num_nodes;
    std::int64_t position;  // of a child of the root
    std::int64_t cached;    // leading slots of the pages that all nodes see
    const std::int32_t* pages;
    std::int64_t num_pages;
    // Rows that end before `position`, plain ones, run first: tokens and features [rows, width].
    std::int64_t rows;
    const std::int32_t* tokens_before;
    const float* features;
    ChildLaw law;           // its noise is that of each level
    const float* const* noise;  // [num_steps] of [draft vocab], or null
    // num_nodes - 1 picked nodes, parents first; the root is node 0. scores: log of the path's
    // probability.
    std::int32_t* tokens;
    std::int32_t* parents;
    float* scores;
    // topk * (num_steps - 1) nodes that were run. run_parents: beams of the level before.
    std::int32_t* run_tokens;
    std::int32_t* run_parents;

    std::int64_t num_run() const { return topk * (num_steps - 1); }
};

class Growth {
  public:
    Growth(const Stem& stem, std::int64_t page_tokens) : stem_(stem), page_tokens_(page_tokens) {}

    // The physical slot of a logical one.
    std::int32_t slot(std::int64_t at) const {
        return std::int32_t(stem_.pages[at / page_tokens_] * page_tokens_ + at % page_tokens_);
    }

    // Levels there are.
    std::int64_t depth() const { return depth_; }
    bool done() const { return depth_ == stem_.num_steps; }

    // The law of the children that are wanted next.
    ChildLaw law() const {
        ChildLaw law = stem_.law;
        law.noise = stem_.noise ? stem_.noise[depth_] : nullptr;
        return law;
    }

    // Rows that were run last; the root alone at first.
    std::int64_t rows() const { return depth_ == 0 ? 1 : stem_.topk; }

    // Takes the candidates of those rows: [rows, children], tokens in the target's numbers.
    void add(const float* probs, const std::int32_t* tokens);

    // The beams of the newest level: their tokens, the rows they grew from, and the slots of their
    // paths, each its own last.
    const std::int32_t* tokens() const { return stem_.run_tokens + (depth_ - 1) * stem_.topk; }
    const std::int32_t* parents() const { return stem_.run_parents + (depth_ - 1) * stem_.topk; }
    const std::vector<std::int32_t>& path(std::int64_t beam) const {
        return paths_[std::size_t(beam)];
    }

    // Picks the nodes, when done.
    void finish() const;

  private:
    // A product of many small numbers would vanish, and a chain has nothing to compare.
    bool chain() const { return stem_.children == 1; }

    Stem stem_;
    std::int64_t page_tokens_, depth_ = 0;
    std::vector<float> beam_scores_;
    std::vector<std::int64_t> beam_numbers_;  // candidates that became beams
    std::vector<std::vector<std::int32_t>> paths_;
    std::vector<float> scores_;  // of all candidates; for a chain, of its tokens alone, as logs
    std::vector<std::int32_t> tokens_;
    std::vector<std::int64_t> above_;  // the candidate each one grew from, -1 for the root
};

}  // namespace graft
