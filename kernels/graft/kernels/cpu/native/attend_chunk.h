// The steps of attention over one chunk of keys; attend.cpp says in which order they happen.
#pragma once

#include <algorithm>
#include <limits>

#include "kv.h"
#include "simd.h"
#include "transpose.h"

namespace graft {
namespace {

constexpr std::int64_t kBlock = kLanes;
constexpr std::int64_t kChunk = 256;
constexpr std::int64_t kMaxHeadDim = 512;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The weighted values of one head over some keys: the sum of weights is `mass`, each weight is
// e^(score - top).
struct Mix {
    float top = kNone, mass = 0.0f;
    float* values = nullptr;  // [head_dim]
};

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

}  // namespace
}  // namespace graft
