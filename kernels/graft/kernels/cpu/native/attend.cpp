// Attention over paged keys. A row's keys are numbered from 0 in order of position; blocks of 16
// and chunks of 256 are counted from key 0. Inside a chunk all scores come first, then one maximum,
// one sum and the mixed values, key by key; chunks merge in order. So a row's result follows from
// its own keys and their number alone: a tree node equals the plain row at its place, and chunks
// may run on different threads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kv.h"
#include "simd.h"
#include "transpose.h"

namespace graft {
namespace {

constexpr std::int64_t kBlock = kLanes;
constexpr std::int64_t kChunk = 256;
constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kMaxHeadDim = 512;
constexpr std::int64_t kMaxGroup = 128;  // query heads of one key head
constexpr float kNone = -std::numeric_limits<float>::infinity();

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

// The weighted values of one head over some keys: the sum of weights is `mass`, each weight is
// e^(score - top).
struct Mix {
    float top = kNone, mass = 0.0f;
    float* values = nullptr;  // [head_dim]
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

// out[d][16]: the keys of 16 slots side by side; slots past `count` are zeros.
void turn_keys(const KvLayer& kv, std::int64_t head, const std::int32_t* slots, std::int64_t count,
               float* out) {
    static const float zeros[kMaxHeadDim] = {};
    const float* keys[kBlock];
    for (std::int64_t i = 0; i < kBlock; ++i) {
        keys[i] = i < count ? kv.keys + slots[i] * kv.slot_floats() + head * kv.head_dim : zeros;
    }
    std::int64_t d = 0;
    for (; d + kLanes <= kv.head_dim; d += kLanes) {
        const float* part[kBlock];
        for (std::int64_t i = 0; i < kBlock; ++i) part[i] = keys[i] + d;
        transpose16(part, out + d * kBlock, kBlock);
    }
    for (; d < kv.head_dim; ++d) {
        for (std::int64_t i = 0; i < kBlock; ++i) out[d * kBlock + i] = keys[i][d];
    }
}

// Scores of H queries against B blocks of turned keys, each a chain over d in ascending order.
template <int H, int B>
void score(const float* const* q, const float* turned, std::int64_t head_dim, float* const* out) {
    F16 sum[H][B];
    for (int h = 0; h < H; ++h) {
        for (int b = 0; b < B; ++b) sum[h][b] = zero16();
    }
    for (std::int64_t d = 0; d < head_dim; ++d) {
        F16 key[B];
        for (int b = 0; b < B; ++b) key[b] = load16(turned + (b * head_dim + d) * kBlock);
        for (int h = 0; h < H; ++h) {
            const F16 value = set16(q[h][d]);
            for (int b = 0; b < B; ++b) sum[h][b] = fma(value, key[b], sum[h][b]);
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int b = 0; b < B; ++b) store16(out[h] + b * kBlock, sum[h][b]);
    }
}

template <int H>
void score_blocks(const float* const* q, const float* turned, std::int64_t head_dim,
                  std::int64_t blocks, float* const* out) {
    constexpr int kWide = H == 1 ? 4 : 2;
    float* to[H];
    std::int64_t b = 0;
    for (; b + kWide <= blocks; b += kWide) {
        for (int h = 0; h < H; ++h) to[h] = out[h] + b * kBlock;
        score<H, kWide>(q, turned + b * head_dim * kBlock, head_dim, to);
    }
    for (; b < blocks; ++b) {
        for (int h = 0; h < H; ++h) to[h] = out[h] + b * kBlock;
        score<H, 1>(q, turned + b * head_dim * kBlock, head_dim, to);
    }
}

// out[h][b * 16 ..]: scores of any number of heads, up to four at a time.
void score_heads(const float* const* q, std::int64_t heads, const float* turned,
                 std::int64_t head_dim, std::int64_t blocks, float* const* out) {
    std::int64_t h = 0;
    for (; h + 4 <= heads; h += 4) score_blocks<4>(q + h, turned, head_dim, blocks, out + h);
    switch (heads - h) {
        case 3: return score_blocks<3>(q + h, turned, head_dim, blocks, out + h);
        case 2: return score_blocks<2>(q + h, turned, head_dim, blocks, out + h);
        case 1: return score_blocks<1>(q + h, turned, head_dim, blocks, out + h);
    }
}

// scores [begin, end) become weights; others inside the blocks become 0.
void weigh(float* scores, std::int64_t begin, std::int64_t end, Mix& mix) {
    const std::int64_t low = begin / kBlock * kBlock, high = (end + kBlock - 1) / kBlock * kBlock;
    std::fill(scores + low, scores + begin, kNone);
    std::fill(scores + end, scores + high, kNone);
    F16 top = set16(kNone);
    for (std::int64_t i = low; i < high; i += kBlock) top = max(top, load16(scores + i));
    mix.top = max16(top);
    const F16 shift = set16(mix.top);
    F16 mass = zero16();
    for (std::int64_t i = low; i < high; i += kBlock) {
        const F16 weight = exp16(load16(scores + i) - shift);
        store16(scores + i, weight);
        mass = mass + weight;
    }
    mix.mass = sum16(mass);
}

#if defined(__AVX512F__)
constexpr int kMixHeads = 4;  // 16 sums and 4 values of 32 registers
#else
constexpr int kMixHeads = 1;
#endif

// What the heads of a group mix: the same values by their own weights.
struct MixJob {
    const float* values;  // of the key head, slot 0
    std::int64_t slot_floats;
    const std::int32_t* slots;
    const float* weights;  // [heads][kChunk]
    std::int64_t begin, end;
    float* const* out;  // [heads] rows of head_dim floats
};

// out[h][d .. d + 16 V): the values of keys begin..end-1 mixed by their weights, key by key.
template <int H, int V>
void mix_columns(const MixJob& job, std::int64_t head, std::int64_t d) {
    F16 sum[H][V];
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) sum[h][v] = zero16();
    }
    const float* weights = job.weights + head * kChunk;
    for (std::int64_t j = job.begin; j < job.end; ++j) {
        const float* from = job.values + job.slots[j] * job.slot_floats + d;
        F16 value[V];
        for (int v = 0; v < V; ++v) value[v] = load16(from + v * kLanes);
        for (int h = 0; h < H; ++h) {
            const F16 weight = set16(weights[h * kChunk + j]);
            for (int v = 0; v < V; ++v) sum[h][v] = fma(weight, value[v], sum[h][v]);
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int v = 0; v < V; ++v) store16(job.out[head + h] + d + v * kLanes, sum[h][v]);
    }
}

// The last `left` entries of a head, fewer than 16.
void mix_rest(const MixJob& job, std::int64_t head, std::int64_t d, int left) {
    F16 sum = zero16();
    for (std::int64_t j = job.begin; j < job.end; ++j) {
        const F16 value = load_part(job.values + job.slots[j] * job.slot_floats + d, left);
        sum = fma(set16(job.weights[head * kChunk + j]), value, sum);
    }
    store_part(job.out[head] + d, sum, left);
}

template <int H>
void mix_heads(const MixJob& job, std::int64_t head, std::int64_t head_dim) {
    std::int64_t d = 0;
    for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) mix_columns<H, 4>(job, head, d);
    for (; d + kLanes <= head_dim; d += kLanes) mix_columns<H, 1>(job, head, d);
    if (d == head_dim) return;
    for (int h = 0; h < H; ++h) mix_rest(job, head + h, d, int(head_dim - d));
}

void mix_values(const MixJob& job, std::int64_t heads, std::int64_t head_dim) {
    std::int64_t h = 0;
    if constexpr (kMixHeads == 4) {
        for (; h + 4 <= heads; h += 4) mix_heads<4>(job, h, head_dim);
        if (heads - h == 3) return mix_heads<3>(job, h, head_dim);
        if (heads - h == 2) return mix_heads<2>(job, h, head_dim);
    }
    for (; h < heads; ++h) mix_heads<1>(job, h, head_dim);
}

// In place on `all`: takes in the mix of the chunk that follows.
void merge(Mix& all, const Mix& next, std::int64_t head_dim) {
    const float top = all.top > next.top ? all.top : next.top;
    const float old_scale = exp1(all.top - top), new_scale = exp1(next.top - top);
    all.top = top;
    all.mass = fma1(next.mass, new_scale, all.mass * old_scale);
    for (std::int64_t d = 0; d < head_dim; ++d) {
        all.values[d] = fma1(next.values[d], new_scale, all.values[d] * old_scale);
    }
}

void finish(const Mix& mix, std::int64_t head_dim, float* out) {
    const float scale = 1.0f / mix.mass;
    for (std::int64_t d = 0; d < head_dim; ++d) out[d] = mix.values[d] * scale;
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
