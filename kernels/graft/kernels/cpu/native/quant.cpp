// Row blocks pass over panels as in linear.cpp, with bytes for floats inside a block of 32 inputs.
#include "quant.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dot4.h"
#include "half.h"

namespace graft {
namespace {

#define GRAFT_UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
constexpr int kMaxRows = 4;  // of more, the sums no longer stay in registers
#else
constexpr int kMaxRows = 3;  // 6 sums of floats, 6 of integers
#endif
constexpr int kGroups = kQuantBlock / 4;  // of four inputs in a block

// One block of activations of R rows: quants [kGroups][R][4], then scale [R], then their sum [R],
// as quants for q8_0 and times the scale for q4_1.
constexpr std::int64_t x_block_bytes(std::int64_t rows) { return rows * (kQuantBlock + 8); }

void quantize_block(const float* x, Weights kind, int row, int rows, std::int8_t* block) {
    F16 low = load16(x), high = load16(x + kLanes);
    const F16 zero = zero16();
    const float top = max16(max(max(low, zero - low), max(high, zero - high)));
    const float scale = top / 127.0f;
    const F16 inverse = set16(scale > 0.0f ? 1.0f / scale : 0.0f);
    const F16 magic = set16(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    alignas(64) float rounded[kQuantBlock];
    store16(rounded, fma(low, inverse, magic) - magic);
    store16(rounded + kLanes, fma(high, inverse, magic) - magic);
    std::int32_t sum = 0;
    for (int k = 0; k < kQuantBlock; ++k) {
        const auto quant = std::int8_t(std::clamp(rounded[k], -127.0f, 127.0f));
        block[(k / 4 * rows + row) * 4 + k % 4] = quant;
        sum += quant;
    }
    std::int8_t* scales = block + kQuantBlock * rows;
    const float weighed = scale * float(sum);
    std::memcpy(scales + 4 * row, &scale, 4);
    std::memcpy(scales + 4 * (rows + row), kind == Weights::q8_0 ? static_cast<void*>(&sum)
                                                                 : const_cast<float*>(&weighed),
                4);
}

template <class T>
inline T read(const std::int8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// One block of one column of 16 outputs joins the sums of R rows.
template <Weights Kind, int R>
inline __attribute__((always_inline)) void add_block(F16 (&total)[R], const std::uint8_t* block,
                                                     const std::int8_t* x, int column) {
    constexpr bool bytes = Kind == Weights::q8_0;
    constexpr std::int64_t column_bytes = kLanes * kQuantBlock / (bytes ? 1 : 2);
    const std::uint8_t* w = block + (bytes ? 2 : 4) * kPanel + column * column_bytes;
    const std::int8_t* scales = x + kQuantBlock * R;
    I16 sum[R];
    GRAFT_UNROLL for (int r = 0; r < R; ++r) {
        sum[r] = bytes ? start_bytes(read<std::int32_t>(scales + 4 * (R + r))) : set_int16(0);
    }
    if constexpr (bytes) {
        GRAFT_UNROLL for (int g = 0; g < kGroups; ++g) {
            const W16 weights = load_weights(w + 64 * g);
            GRAFT_UNROLL for (int r = 0; r < R; ++r) {
                sum[r] = dot_bytes(sum[r], weights, x + (g * R + r) * 4);
            }
        }
    } else {
        GRAFT_UNROLL for (int g = 0; g < kGroups / 2; ++g) {
            const W16 both = load_weights(w + 64 * g);
            const W16 low = low_nibbles(both), high = high_nibbles(both);
            GRAFT_UNROLL for (int r = 0; r < R; ++r) {
                sum[r] = dot_nibbles(sum[r], low, x + (g * R + r) * 4);
            }
            GRAFT_UNROLL for (int r = 0; r < R; ++r) {
                sum[r] = dot_nibbles(sum[r], high, x + ((g + kGroups / 2) * R + r) * 4);
            }
        }
    }
    const auto* halves = reinterpret_cast<const std::uint16_t*>(block) + column * kLanes;
    const F16 weight_scale = load_half16(halves);
    GRAFT_UNROLL for (int r = 0; r < R; ++r) {
        const F16 scale = weight_scale * set16(read<float>(scales + 4 * r));
        total[r] = fma(to_float(sum[r]), scale, total[r]);
    }
    if constexpr (!bytes) {
        const F16 minimum = load_half16(halves + kPanel);
        GRAFT_UNROLL for (int r = 0; r < R; ++r) {
            total[r] = fma(minimum, set16(read<float>(scales + 4 * (R + r))), total[r]);
        }
    }
}

struct Job {
    const std::uint8_t* panel;
    const std::int8_t* x;
    std::int64_t blocks;
    const float* bias;
    float* y;
    std::int64_t y_stride;
    const char* ahead;
    std::int64_t ahead_bytes;  // a block's share of what to fetch meanwhile
};

template <Weights Kind, int R, int C>
void run_columns(const Job& job, int first_column, bool fetch) {
    F16 total[C][R];
    GRAFT_UNROLL for (int c = 0; c < C; ++c) {
        const float* bias = job.bias ? job.bias + (first_column + c) * kLanes : nullptr;
        GRAFT_UNROLL for (int r = 0; r < R; ++r) total[c][r] = bias ? load16(bias) : zero16();
    }
    for (std::int64_t b = 0; b < job.blocks; ++b) {
        if (fetch) {
            for (std::int64_t at = 0; at < job.ahead_bytes; at += 64) {
                __builtin_prefetch(job.ahead + b * job.ahead_bytes + at, 0, 2);
            }
        }
        GRAFT_UNROLL for (int c = 0; c < C; ++c) {
            add_block<Kind, R>(total[c], job.panel + b * panel_block_bytes(Kind),
                               job.x + b * x_block_bytes(R), first_column + c);
        }
    }
    GRAFT_UNROLL for (int c = 0; c < C; ++c) {
        GRAFT_UNROLL for (int r = 0; r < R; ++r) {
            store16(job.y + r * job.y_stride + (first_column + c) * kLanes, total[c][r]);
        }
    }
}

template <Weights Kind, int R>
void run_job(const Job& job) {
#if defined(__AVX512F__)
    run_columns<Kind, R, 2>(job, 0, true);
#else
    run_columns<Kind, R, 1>(job, 0, true);
    run_columns<Kind, R, 1>(job, 1, false);
#endif
}

using RunJob = void (*)(const Job&);

template <Weights Kind, int... R>
RunJob pick(int rows, std::integer_sequence<int, R...>) {
    static constexpr RunJob table[] = {run_job<Kind, R + 1>...};
    return table[rows - 1];
}

RunJob pick(Weights kind, int rows) {
    constexpr auto sizes = std::make_integer_sequence<int, kMaxRows>{};
    return kind == Weights::q8_0 ? pick<Weights::q8_0>(rows, sizes)
                                 : pick<Weights::q4_1>(rows, sizes);
}

// The rows cut as equally as can be, each cut rounded to blocks of bytes.
struct Quants {
    const PackedLinear* layer;
    std::int64_t rows, cuts;
    const std::int8_t* values;

    std::int64_t blocks() const { return layer->in / kQuantBlock; }
    std::int64_t first(std::int64_t cut) const { return rows * cut / cuts; }
    int size(std::int64_t cut) const { return int(first(cut + 1) - first(cut)); }
    std::int64_t start(std::int64_t cut) const { return first(cut) * x_block_bytes(1) * blocks(); }
};

Quants round_rows(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows) {
    Quants quants{&layer, rows, (rows + kMaxRows - 1) / kMaxRows, nullptr};
    const std::int64_t blocks = quants.blocks();
    auto* values = reinterpret_cast<std::int8_t*>(
        scratch(Scratch::quants, std::size_t(x_block_bytes(rows) * blocks / 4)));
    parallel_for(rows < 4 ? nullptr : pool, int(rows), [&](int row) {
        std::int64_t cut = std::int64_t(row) * quants.cuts / rows;
        while (quants.first(cut + 1) <= row) ++cut;
        const int size = quants.size(cut);
        for (std::int64_t b = 0; b < blocks; ++b) {
            quantize_block(x + row * layer.in + b * kQuantBlock, layer.kind,
                           int(row - quants.first(cut)), size,
                           values + quants.start(cut) + b * x_block_bytes(size));
        }
    });
    quants.values = values;
    return quants;
}

// y: [rows, stride y_stride], the panel's 32 outputs.
void run_panel(const Quants& quants, std::int64_t panel, float* y, std::int64_t y_stride) {
    const PackedLinear& layer = *quants.layer;
    const std::int64_t block_bytes = panel_block_bytes(layer.kind);
    const std::int64_t panel_bytes = block_bytes * quants.blocks();
    for (std::int64_t cut = 0; cut < quants.cuts; ++cut) {
        Job job;
        job.panel = static_cast<const std::uint8_t*>(layer.weights) + panel * panel_bytes;
        job.x = quants.values + quants.start(cut);
        job.blocks = quants.blocks();
        job.bias = layer.bias ? layer.bias + panel * kPanel : nullptr;
        job.y = y + quants.first(cut) * y_stride;
        job.y_stride = y_stride;
        job.ahead = reinterpret_cast<const char*>(job.panel + panel_bytes) +
                    panel_bytes * cut / quants.cuts / 64 * 64;
        job.ahead_bytes = block_bytes / quants.cuts / 64 * 64;
        pick(layer.kind, quants.size(cut))(job);
    }
}

}  // namespace

void quant_linear(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                  float* y) {
    const Quants quants = round_rows(pool, layer, x, rows);
    parallel_for(pool, int(layer.panels()), [&](int panel) {
        float* out = y + std::int64_t(panel) * kPanel;
        const std::int64_t width = std::min<std::int64_t>(kPanel, layer.out - panel * kPanel);
        if (width == kPanel) return run_panel(quants, panel, out, layer.out);
        float* tile = scratch(Scratch::partials, std::size_t(rows * kPanel));
        run_panel(quants, panel, tile, kPanel);
        for (std::int64_t r = 0; r < rows; ++r) {
            std::memcpy(out + r * layer.out, tile + r * kPanel, std::size_t(width) * sizeof(float));
        }
    });
}

void quant_groups(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                  const GroupSink& sink) {
    const Quants quants = round_rows(pool, layer, x, rows);
    parallel_for(pool, int(layer.groups()), [&](int group) {
        float* tile = scratch(Scratch::partials, std::size_t(rows * kGroupOutputs));
        for (std::int64_t half = 0; half < 2; ++half) {
            const std::int64_t panel = 2 * std::int64_t(group) + half;
            if (panel < layer.panels()) run_panel(quants, panel, tile + half * kPanel, kGroupOutputs);
        }
        sink.take(sink.context, group, tile);
    });
}

void quant_row(const PackedLinear& layer, std::int64_t output, float* out) {
    const bool bytes = layer.kind == Weights::q8_0;
    const std::int64_t blocks = layer.in / kQuantBlock, size = panel_block_bytes(layer.kind);
    const auto* block =
        static_cast<const std::uint8_t*>(layer.weights) + output / kPanel * blocks * size;
    const std::int64_t place = output % kPanel, column = place / kLanes, lane = place % kLanes;
    for (std::int64_t b = 0; b < blocks; ++b, block += size, out += kQuantBlock) {
        const auto* halves = reinterpret_cast<const std::uint16_t*>(block);
        const float scale = half_to_float(halves[place]);
        const float minimum = bytes ? 0.0f : half_to_float(halves[kPanel + place]);
        const std::uint8_t* quants = block + kPanel * (bytes ? 2 : 4) +
                                     column * kLanes * kQuantBlock / (bytes ? 1 : 2) + lane * 4;
        for (int k = 0; k < kQuantBlock; ++k) {
            if (bytes) {
                out[k] = scale * float(int(quants[k / 4 * 64 + k % 4]) - 128);
            } else {
                const int both = quants[k % 16 / 4 * 64 + k % 4];
                out[k] = fma1(scale, float(k < 16 ? both & 15 : both >> 4), minimum);
            }
        }
    }
}

}  // namespace graft

// source: [rows, in / 32] blocks of a GGUF file; its rows become outputs first..first + rows - 1.
GRAFT_API void graft_quant_pack(graft::Pool* pool, std::uint8_t* weights, std::int64_t kind,
                                std::int64_t in, std::int64_t first, const std::uint8_t* source,
                                std::int64_t rows) {
    using namespace graft;
    const bool bytes = Weights(kind) == Weights::q8_0;
    const std::int64_t blocks = in / kQuantBlock, size = panel_block_bytes(Weights(kind));
    const std::int64_t quant_bytes = bytes ? 32 : 16, header = bytes ? 2 : 4;
    parallel_for(pool, int(rows), [&](int r) {
        const std::int64_t output = first + r, place = output % kPanel;
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::uint8_t* from = source + (r * blocks + b) * (header + quant_bytes);
            std::uint8_t* block = weights + (output / kPanel * blocks + b) * size;
            std::memcpy(block + 2 * place, from, 2);
            if (!bytes) std::memcpy(block + 2 * (kPanel + place), from + 2, 2);
            std::uint8_t* to = block + header * kPanel + place / kLanes * kLanes * quant_bytes +
                               place % kLanes * 4;
            for (std::int64_t k = 0; k < quant_bytes; ++k) {
                to[k / 4 * 64 + k % 4] = bytes ? from[header + k] ^ 0x80 : from[header + k];
            }
        }
    });
}
