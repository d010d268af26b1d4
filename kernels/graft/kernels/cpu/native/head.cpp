// The vocabulary head and the choice in one pass: each group of logits meets the contest while it
// is in the cache, and no row of logits is ever written. For rows without filters and masks.
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "contest.h"
#include "linear.h"

namespace graft {
namespace {

static_assert(kGroup == kGroupOutputs, "noise is made for the tokens of one group of outputs");

// What the groups of one row have shown so far. Each field only grows towards its end, so the
// order in which threads bring their groups does not show.
struct Row {
    std::atomic<std::int32_t> highest{std::numeric_limits<std::int32_t>::min()};  // order keys
    std::atomic<std::int32_t> lowest{std::numeric_limits<std::int32_t>::max()};
    std::atomic<std::uint64_t> best{0};  // 0 is nobody
};

// Grows with the value, and for equal values with falling tokens; -0 equals +0.
std::uint64_t rank_of(float value, std::int32_t token) {
    const auto key = std::uint32_t(order_key(value + 0.0f)) ^ 0x80000000u;
    return (std::uint64_t(key) << 32) | std::uint32_t(~token);
}

Best best_of(std::uint64_t rank) {
    if (rank == 0) return {};
    const auto key = std::int32_t(std::uint32_t(rank >> 32) ^ 0x80000000u);
    return {of_order_key(key), std::int32_t(~std::uint32_t(rank))};
}

template <class T, class Better>
void improve(std::atomic<T>& kept, T value, Better better) {
    T known = kept.load(std::memory_order_relaxed);
    while (better(value, known) &&
           !kept.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
    }
}

struct Contest {
    const ChoiceRows* rows;
    Row* row;

    void take(int number, const float* tile) {
        const std::int64_t first = std::int64_t(number) * kGroup;
        const int width = int(std::min<std::int64_t>(kGroup, rows->vocab - first));
        for (std::int64_t r = 0; r < rows->rows; ++r) {
            meet(r, tile + r * kGroup, first, width);
        }
    }

    void meet(std::int64_t r, const float* logits, std::int64_t first, int width) {
        std::int32_t high = order_key(logits[0]), low = high;
        for (int i = 1; i < width; ++i) {
            const std::int32_t key = order_key(logits[i]);
            high = key > high ? key : high;
            low = key < low ? key : low;
        }
        Row& own = row[r];
        improve(own.highest, high, [](auto a, auto b) { return a > b; });
        improve(own.lowest, low, [](auto a, auto b) { return a < b; });
        const std::uint64_t known = own.best.load(std::memory_order_relaxed);
        Best best = best_of(known);
        if (is_greedy(*rows, r)) {
            const float value = of_order_key(high);
            if (!(value >= best.value) || value == -kInfinity) return;
            int place = 0;
            while (place < width && logits[place] != value) ++place;
            if (place == width) return;  // NaN: the row is refused
            best = {value, std::int32_t(first + place)};
        } else {
            const float temperature = rows->temperature[r];
            float scaled[kGroup];
            const float* group = logits;
            if (temperature != 1.0f) {
                for (int i = 0; i < width; ++i) scaled[i] = logits[i] / temperature;
                group = scaled;
            }
            try_group(group, width, first, std::uint64_t(rows->seed[r]),
                      std::uint32_t(rows->position[r]), best);
            if (best.token == kRefused) return;
        }
        improve(own.best, rank_of(best.value, best.token), [](auto a, auto b) { return a > b; });
    }

    std::int32_t chosen(std::int64_t r) const {
        const float highest = of_order_key(row[r].highest.load(std::memory_order_relaxed));
        const bool lawful =
            row[r].highest.load(std::memory_order_relaxed) < order_key(kInfinity) &&
            row[r].lowest.load(std::memory_order_relaxed) >= order_key(-kInfinity);
        if (!lawful || highest == -kInfinity) return kRefused;
        if (!is_greedy(*rows, r)) {
            const float scaled = highest / rows->temperature[r];
            if (scaled == kInfinity || scaled == -kInfinity) return kRefused;
        }
        return best_of(row[r].best.load(std::memory_order_relaxed)).token;
    }
};

}  // namespace
}  // namespace graft

// x: [rows, in], ready for the head. rows: its logits are not read; filters and masks must be off,
// but top_k may be 1. chosen: [rows], as graft_choose on the head's logits, bit for bit.
GRAFT_API void graft_head_choose(graft::Pool* pool, const graft::PackedLinear* head,
                                 const float* x, const graft::ChoiceRows* rows,
                                 std::int32_t* chosen) {
    using namespace graft;
    const std::unique_ptr<Row[]> kept(new Row[std::size_t(rows->rows)]);
    Contest contest{rows, kept.get()};
    const GroupSink sink{[](void* context, int group, const float* tile) {
                             static_cast<Contest*>(context)->take(group, tile);
                         },
                         &contest};
    linear_groups(pool, *head, x, rows->rows, sink);
    for (std::int64_t r = 0; r < rows->rows; ++r) chosen[r] = contest.chosen(r);
}
