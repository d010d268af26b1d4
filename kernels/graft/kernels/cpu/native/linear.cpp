// Blocks of up to kMaxRows rows meet panels of 32 outputs. A panel is cut along its inputs into
// parts that stay in the second-level cache while all row blocks pass over them, and the part
// that follows in memory is fetched meanwhile. Sums wait in y between the parts: storing and
// loading a float changes no bit, so the cut does not show in the result.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "quant.h"
#include "simd.h"
#include "transpose.h"

namespace graft {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 sums, 2 weights and 1 activation of 32 registers
constexpr int kWideRows = 12;
#else
constexpr int kMaxRows = 6;  // 12 sums, 2 weights and 1 activation of 16 registers
constexpr int kWideRows = 2;
#endif
constexpr std::int64_t kPartInputs = 512;
constexpr int kUnroll = 4;

struct Part {
    const float* weights;  // [inputs][kPanel]
    const float* x;        // [inputs][R]
    std::int64_t inputs;
    float* y;  // [R rows, stride y_stride][kPanel]
    std::int64_t y_stride;
    const float* start;   // first values of the sums, one for each output, or null for zeros
    bool resume;          // the sums are in y already
    const char* ahead;    // what to fetch meanwhile
};

template <int R, int C>
inline __attribute__((always_inline)) void step(F16 (&sum)[R][C], const float* w, const float* x) {
    F16 weight[C];
    for (int c = 0; c < C; ++c) weight[c] = load16(w + c * kLanes);
    for (int r = 0; r < R; ++r) {
        const F16 value = set16(x[r]);
        for (int c = 0; c < C; ++c) sum[r][c] = fma(value, weight[c], sum[r][c]);
    }
}

// C columns of 16 outputs for R rows; Lines cache lines are fetched every kUnroll inputs.
template <int R, int C, int Lines>
void run_columns(const Part& part, int first_column) {
    F16 sum[R][C];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            const int column = (first_column + c) * kLanes;
            sum[r][c] = part.resume  ? load16(part.y + r * part.y_stride + column)
                        : part.start ? load16(part.start + column)
                                     : zero16();
        }
    }
    const float* w = part.weights + first_column * kLanes;
    const float* x = part.x;
    const char* ahead = part.ahead;
    std::int64_t k = 0;
    for (; k + kUnroll <= part.inputs; k += kUnroll) {
        for (int line = 0; line < Lines; ++line) __builtin_prefetch(ahead + 64 * line, 0, 2);
        ahead += 64 * Lines;
        for (int i = 0; i < kUnroll; ++i) step<R, C>(sum, w + i * kPanel, x + i * R);
        w += kUnroll * kPanel;
        x += kUnroll * R;
    }
    for (; k < part.inputs; ++k, w += kPanel, x += R) step<R, C>(sum, w, x);
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) {
            store16(part.y + r * part.y_stride + (first_column + c) * kLanes, sum[r][c]);
        }
    }
}

template <int R, int Lines>
void run_part(const Part& part) {
    if constexpr (R <= kWideRows) {
        run_columns<R, 2, Lines>(part, 0);
    } else {
        run_columns<R, 1, (Lines + 1) / 2>(part, 0);
        Part rest = part;
        rest.ahead += 64 * ((Lines + 1) / 2) * (part.inputs / kUnroll);
        run_columns<R, 1, (Lines + 1) / 2>(rest, 1);
    }
}

using RunPart = void (*)(const Part&);

template <int Lines, int... R>
RunPart pick(int rows, std::integer_sequence<int, R...>) {
    static constexpr RunPart table[] = {run_part<R + 1, Lines>...};
    return table[rows - 1];
}

template <int Lines>
RunPart pick(int rows) {
    return pick<Lines>(rows, std::make_integer_sequence<int, kMaxRows>{});
}

// A part is 8 lines every kUnroll inputs; each of the row blocks fetches its share of the next.
RunPart pick(int rows, int blocks) {
    return blocks == 1 ? pick<8>(rows) : blocks <= 3 ? pick<4>(rows) : pick<2>(rows);
}

// The rows cut into blocks as equal as they can be, each turned to [inputs][rows of the block].
struct Blocks {
    int count;
    std::int64_t rows, in;
    const float* turned;

    std::int64_t first(int block) const { return rows * block / count; }
    int size(int block) const { return int(first(block + 1) - first(block)); }
    const float* x(int block, std::int64_t input) const {
        return turned + first(block) * in + input * size(block);
    }
};

Blocks turn_rows(const float* x, std::int64_t rows, std::int64_t in) {
    Blocks blocks{int((rows + kMaxRows - 1) / kMaxRows), rows, in, x};
    if (rows == 1) return blocks;
    float* turned = scratch(Scratch::activations, std::size_t(rows * in + kLanes));
    static const float zeros[kLanes] = {};
    for (int b = 0; b < blocks.count; ++b) {
        const int size = blocks.size(b);
        const float* first = x + blocks.first(b) * in;
        float* out = turned + blocks.first(b) * in;
        std::int64_t k = 0;
        for (; k + kLanes <= in; k += kLanes) {  // rows past the block are overwritten by the next k
            const float* source[kLanes];
            for (int r = 0; r < kLanes; ++r) source[r] = r < size ? first + r * in + k : zeros;
            transpose16(source, out + k * size, size);
        }
        for (; k < in; ++k) {
            for (int r = 0; r < size; ++r) out[k * size + r] = first[r * in + k];
        }
    }
    blocks.turned = turned;
    return blocks;
}

void run_panel(const PackedLinear& layer, const Blocks& blocks, std::int64_t panel, float* y,
               std::int64_t y_stride) {
    const float* weights = static_cast<const float*>(layer.weights) + panel * layer.in * kPanel;
    const std::int64_t parts = std::max<std::int64_t>(1, (layer.in + kPartInputs / 2) / kPartInputs);
    for (std::int64_t p = 0; p < parts; ++p) {
        const std::int64_t begin = layer.in * p / parts, end = layer.in * (p + 1) / parts;
        const std::int64_t bytes = (end - begin) * kPanel * std::int64_t(sizeof(float));
        const auto* next = reinterpret_cast<const char*>(weights + end * kPanel);
        for (int b = 0; b < blocks.count; ++b) {
            Part part;
            part.weights = weights + begin * kPanel;
            part.x = blocks.x(b, begin);
            part.inputs = end - begin;
            part.y = y + blocks.first(b) * y_stride;
            part.y_stride = y_stride;
            part.start = layer.bias == nullptr ? nullptr : layer.bias + panel * kPanel;
            part.resume = p > 0;
            part.ahead = next + bytes * b / blocks.count / 64 * 64;
            pick(blocks.size(b), blocks.count)(part);
        }
    }
}

}  // namespace

void linear(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows, float* y) {
    if (layer.kind != Weights::f32) return quant_linear(pool, layer, x, rows, y);
    const Blocks blocks = turn_rows(x, rows, layer.in);
    parallel_for(pool, int(layer.panels()), [&](int panel) {
        float* out = y + std::int64_t(panel) * kPanel;
        const std::int64_t width = std::min<std::int64_t>(kPanel, layer.out - panel * kPanel);
        if (width == kPanel) return run_panel(layer, blocks, panel, out, layer.out);
        float* tile = scratch(Scratch::partials, std::size_t(rows * kPanel));
        run_panel(layer, blocks, panel, tile, kPanel);
        for (std::int64_t r = 0; r < rows; ++r) {
            std::memcpy(out + r * layer.out, tile + r * kPanel, std::size_t(width) * sizeof(float));
        }
    });
}

void linear_groups(Pool* pool, const PackedLinear& layer, const float* x, std::int64_t rows,
                   const GroupSink& sink) {
    if (layer.kind != Weights::f32) return quant_groups(pool, layer, x, rows, sink);
    const Blocks blocks = turn_rows(x, rows, layer.in);
    parallel_for(pool, int(layer.groups()), [&](int group) {
        float* tile = scratch(Scratch::partials, std::size_t(rows * kGroupOutputs));
        for (std::int64_t half = 0; half < 2; ++half) {
            const std::int64_t panel = 2 * std::int64_t(group) + half;
            if (panel < layer.panels()) {
                run_panel(layer, blocks, panel, tile + half * kPanel, kGroupOutputs);
            }
        }
        sink.take(sink.context, group, tile);
    });
}

}  // namespace graft

// source: [rows, in] contiguous; its rows become outputs first..first + rows - 1 of `weights`.
GRAFT_API void graft_linear_pack(graft::Pool* pool, float* weights, std::int64_t in,
                                 std::int64_t first, const float* source, std::int64_t rows) {
    using graft::kLanes, graft::kPanel;
    const std::int64_t low = first / kLanes, high = (first + rows + kLanes - 1) / kLanes;
    graft::parallel_for(pool, int(high - low), [&](int piece) {
        const std::int64_t output = (low + piece) * kLanes;
        float* panel = weights + output / kPanel * in * kPanel + output % kPanel;
        const bool whole = output >= first && output + kLanes <= first + rows;
        const std::int64_t turned = whole ? in / kLanes * kLanes : 0;
        for (std::int64_t k = 0; k < turned; k += kLanes) {
            const float* lines[kLanes];
            for (int r = 0; r < kLanes; ++r) lines[r] = source + (output - first + r) * in + k;
            graft::transpose16(lines, panel + k * kPanel, kPanel);
        }
        for (int r = 0; r < kLanes; ++r) {
            const std::int64_t row = output - first + r;
            if (row < 0 || row >= rows) continue;
            for (std::int64_t k = turned; k < in; ++k) panel[k * kPanel + r] = source[row * in + k];
        }
    });
}

GRAFT_API void graft_linear(graft::Pool* pool, const graft::PackedLinear* layer, const float* x,
                            std::int64_t rows, float* y) {
    graft::linear(pool, *layer, x, rows, y);
}

// Rows of the layout read back: out[i] = row tokens[i] of the weights.
GRAFT_API void graft_linear_rows(const graft::PackedLinear* layer, const std::int32_t* tokens,
                                 std::int64_t count, float* out) {
    using graft::kPanel;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t output = tokens[i];
        float* row = out + i * layer->in;
        if (layer->kind != graft::Weights::f32) {
            graft::quant_row(*layer, output, row);
            continue;
        }
        const float* panel = static_cast<const float*>(layer->weights) +
                             output / kPanel * layer->in * kPanel + output % kPanel;
        for (std::int64_t k = 0; k < layer->in; ++k) row[k] = panel[k * kPanel];
    }
}
