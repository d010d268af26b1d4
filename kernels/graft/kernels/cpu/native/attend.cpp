// Attention over paged keys. A row's keys are numbered from 0 in order of position; blocks of 16
// and chunks of 256 are counted from key 0. Inside a chunk all scores come first, then one maximum,
// one sum and the mixed values, key by key; chunks merge in order. So a row's result follows from
// its own keys and their number alone: a tree node equals the plain row at its place, and chunks
// may run on different threads.
#include <algorithm>
#include <limits>
#include <vector>

#include "attend_chunk.h"
#include "kv.h"

namespace graft {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kMaxGroup = 128;  // query heads of one key head

struct Call {
    const KvLayer& kv;
    const StepRows& rows;
    const float* q;
    std::int64_t q_stride, heads, window;
    float scale;

    std::int64_t group() const { return heads / kv.kv_heads; }
    std::int64_t keys_of(std::int64_t row) const {
        return rows.prefix_len[row] + rows.extra_ptr[row + 1] - rows.extra_ptr[row];
    }
    std::int64_t first_key_of(std::int64_t row) const {
        return window > 0 ? std::max<std::int64_t>(0, keys_of(row) - window) : 0;
    }
};

// Neighbouring rows of one sequence, and the chunks that any of them sees.
struct Tile {
    std::int64_t row, rows, first_chunk, end_chunk;
};

std::vector<Tile> cut_tiles(const Call& call, std::int64_t tile_rows) {
    std::vector<Tile> tiles;
    for (std::int64_t row = 0; row < call.rows.rows;) {
        Tile tile{row, 0, std::numeric_limits<std::int64_t>::max(), 0};
        while (row < call.rows.rows && tile.rows < tile_rows &&
               call.rows.sequence[row] == call.rows.sequence[tile.row]) {
            tile.first_chunk = std::min(tile.first_chunk, call.first_key_of(row) / kChunk);
            tile.end_chunk = std::max(tile.end_chunk, (call.keys_of(row) + kChunk - 1) / kChunk);
            ++tile.rows;
            ++row;
        }
        tiles.push_back(tile);
    }
    return tiles;
}

// Works through one key head of a tile, a chunk at a time.
class TileHead {
  public:
    TileHead(const Call& call, const Tile& tile, std::int64_t head)
        : call_(call), tile_(tile), head_(head), dim_(call.kv.head_dim), group_(call.group()) {
        for (std::int64_t r = 0; r < tile.rows; ++r) {
            shared_ = std::max<std::int64_t>(shared_, call.rows.prefix_len[tile.row + r]);
        }
        const std::int64_t own = kBlock * dim_, keys = kChunk * dim_;
        turned_ = scratch(Scratch::keys, std::size_t(keys + own + tile.rows * group_ * dim_));
        own_ = turned_ + keys;
        queries_ = own_ + own;
        scores_ = scratch(Scratch::scores, std::size_t(group_ * kChunk));
        for (std::int64_t r = 0; r < tile.rows; ++r) {
            const float* q = call.q + (tile.row + r) * call.q_stride + head * group_ * dim_;
            for (std::int64_t i = 0; i < group_ * dim_; ++i) {
                queries_[r * group_ * dim_ + i] = q[i] * call.scale;
            }
        }
    }

    // Calls emit(row of the tile, head of the group, mix) for every row with keys in the chunk;
    // the mix's values are written to into(row, head).
    template <class Into, class Emit>
    void run(std::int64_t chunk, Into&& into, Emit&& emit) {
        start_ = chunk * kChunk;
        turn_shared();
        for (std::int64_t r = 0; r < tile_.rows; ++r) {
            const std::int64_t row = tile_.row + r;
            const std::int64_t begin = std::max(call_.first_key_of(row), start_) - start_;
            const std::int64_t end = std::min(call_.keys_of(row), start_ + kChunk) - start_;
            if (begin >= end) continue;
            const std::int32_t* slots = score_row(r, begin, end);
            for (std::int64_t h = 0; h < group_; ++h) {
                mixes_[h].values = to_[h] = into(r, h);
                weigh(scores_ + h * kChunk, begin, end, mixes_[h]);
            }
            const float* values = call_.kv.values + head_ * dim_;
            mix_values({values, call_.kv.slot_floats(), slots, scores_, begin, end, to_}, group_,
                       dim_);
            for (std::int64_t h = 0; h < group_; ++h) emit(r, h, mixes_[h]);
        }
    }

  private:
    // The chunk's keys that the page table names, turned once for all rows.
    void turn_shared() {
        const std::int64_t first_row_key = tile_first_key();
        const std::int64_t end = std::min(shared_, start_ + kChunk);
        const std::int32_t* pages =
            call_.rows.page_table + call_.rows.sequence[tile_.row] * call_.rows.max_pages;
        for (std::int64_t j = start_; j < end; ++j) {
            const std::int64_t page = call_.kv.page_tokens;
            slots_[j - start_] = std::int32_t(pages[j / page] * page + j % page);
        }
        const std::int64_t from = std::max(first_row_key, start_) / kBlock * kBlock;
        for (std::int64_t j = from; j < end; j += kBlock) {
            turn_keys(call_.kv, head_, slots_ + (j - start_), std::min(kBlock, end - j),
                      turned_ + (j - start_) * dim_);
        }
    }

    std::int64_t tile_first_key() const {
        std::int64_t first = std::numeric_limits<std::int64_t>::max();
        for (std::int64_t r = 0; r < tile_.rows; ++r) {
            first = std::min(first, call_.first_key_of(tile_.row + r));
        }
        return first;
    }

    // Fills the scores of one row's heads and returns the slots of its keys in this chunk.
    const std::int32_t* score_row(std::int64_t r, std::int64_t begin, std::int64_t end) {
        const std::int64_t row = tile_.row + r, prefix = call_.rows.prefix_len[row] - start_;
        const std::int64_t extras = call_.keys_of(row) - call_.rows.prefix_len[row];
        for (std::int64_t h = 0; h < group_; ++h) {
            q_[h] = queries_ + (r * group_ + h) * dim_;
        }
        const std::int64_t low = begin / kBlock, high = (end + kBlock - 1) / kBlock;
        // Blocks from here on hold keys that only this row sees.
        const std::int64_t mine =
            extras == 0 ? high : std::clamp(prefix < 0 ? 0 : prefix / kBlock, low, high);
        score_at(low, mine - low, turned_ + low * kBlock * dim_);
        if (mine == high) return slots_;
        std::copy(slots_, slots_ + std::clamp<std::int64_t>(prefix, 0, kChunk), row_slots_);
        const std::int32_t* extra = call_.rows.extra_slots + call_.rows.extra_ptr[row];
        for (std::int64_t j = std::max<std::int64_t>(prefix, 0); j < end; ++j) {
            row_slots_[j] = extra[j - prefix];
        }
        for (std::int64_t b = mine; b < high; ++b) {
            turn_keys(call_.kv, head_, row_slots_ + b * kBlock, std::min(kBlock, end - b * kBlock),
                      own_);
            score_at(b, 1, own_);
        }
        return row_slots_;
    }

    void score_at(std::int64_t block, std::int64_t blocks, const float* turned) {
        for (std::int64_t h = 0; h < group_; ++h) to_[h] = scores_ + h * kChunk + block * kBlock;
        score_heads(q_, group_, turned, dim_, blocks, to_);
    }

    const Call& call_;
    const Tile& tile_;
    const std::int64_t head_, dim_, group_;
    std::int64_t shared_ = 0, start_ = 0;
    float *turned_, *own_, *queries_, *scores_;
    std::int32_t slots_[kChunk], row_slots_[kChunk];
    const float* q_[kMaxGroup];
    float* to_[kMaxGroup];
    Mix mixes_[kMaxGroup];
};

// One thread walks all chunks of a tile and key head.
void attend_whole(const Call& call, const Tile& tile, std::int64_t head, float* out,
                  std::int64_t out_stride) {
    const std::int64_t dim = call.kv.head_dim, group = call.group(), count = tile.rows * group;
    float* values = scratch(Scratch::partials, std::size_t((count + group) * dim));
    float* fresh = values + count * dim;
    std::vector<Mix> mixes(static_cast<std::size_t>(count));
    TileHead work(call, tile, head);
    for (std::int64_t chunk = tile.first_chunk; chunk < tile.end_chunk; ++chunk) {
        const auto into = [&](std::int64_t r, std::int64_t h) {
            const std::int64_t i = r * group + h;
            return mixes[i].mass == 0.0f ? values + i * dim : fresh + h * dim;
        };
        work.run(chunk, into, [&](std::int64_t r, std::int64_t h, const Mix& mix) {
            Mix& all = mixes[r * group + h];
            if (all.mass == 0.0f) {
                all = mix;
            } else {
                merge(all, mix, dim);
            }
        });
    }
    for (std::int64_t i = 0; i < count; ++i) {
        finish(mixes[i], dim,
               out + (tile.row + i / group) * out_stride + (head * group + i % group) * dim);
    }
}

// Few tiles and many keys: chunks are pieces of their own, merged in order afterwards.
void attend_split(Pool* pool, const Call& call, const Tile& tile, float* out,
                  std::int64_t out_stride) {
    const std::int64_t dim = call.kv.head_dim, group = call.group(), count = tile.rows * group;
    const std::int64_t chunks = tile.end_chunk - tile.first_chunk, heads = call.kv.kv_heads;
    float* values =
        scratch(Scratch::partials, std::size_t(chunks * heads * count * dim));
    std::vector<Mix> mixes(static_cast<std::size_t>(chunks * heads * count));
    parallel_for(pool, int(chunks * heads), [&](int piece) {
        const std::int64_t base = piece * count;  // piece = head * chunks + chunk
        TileHead work(call, tile, piece / chunks);
        work.run(
            tile.first_chunk + piece % chunks,
            [&](std::int64_t r, std::int64_t h) { return values + (base + r * group + h) * dim; },
            [&](std::int64_t r, std::int64_t h, const Mix& mix) { mixes[base + r * group + h] = mix; });
    });
    for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
            Mix all;
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                const Mix& next = mixes[(head * chunks + chunk) * count + i];
                if (next.mass == 0.0f) continue;
                if (all.mass == 0.0f) {
                    all = next;
                } else {
                    merge(all, next, dim);
                }
            }
            finish(all, dim,
                   out + (tile.row + i / group) * out_stride + (head * group + i % group) * dim);
        }
    }
}

}  // namespace

void attend(Pool* pool, const KvLayer& kv, const StepRows& rows, const float* q,
            std::int64_t q_stride, std::int64_t heads, float scale, std::int64_t window, float* out,
            std::int64_t out_stride) {
    const Call call{kv, rows, q, q_stride, heads, window, scale};
    const int threads = num_threads(pool);
    const std::int64_t tile_rows =
        std::clamp<std::int64_t>(rows.rows * kv.kv_heads / (4 * threads), 4, kTileRows);
    const std::vector<Tile> tiles = cut_tiles(call, tile_rows);
    const std::int64_t pieces = std::int64_t(tiles.size()) * kv.kv_heads;
    if (threads > 1 && pieces < 4 * threads) {
        for (const Tile& tile : tiles) attend_split(pool, call, tile, out, out_stride);
        return;
    }
    parallel_for(pool, int(pieces), [&](int piece) {
        attend_whole(call, tiles[piece / kv.kv_heads], piece % kv.kv_heads, out, out_stride);
    });
}

}  // namespace graft

GRAFT_API void graft_attend(graft::Pool* pool, const graft::KvLayer* kv,
                            const graft::StepRows* rows, const float* q, std::int64_t q_stride,
                            std::int64_t heads, float scale, std::int64_t window, float* out) {
    graft::attend(pool, *kv, *rows, q, q_stride, heads, scale, window, out,
                  heads * kv->head_dim);
}
