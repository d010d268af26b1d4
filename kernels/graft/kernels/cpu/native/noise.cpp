// The noise of one position for all tokens: what choosing adds to logits / T, for drafters that
// rank their own logits with it.
#include <algorithm>
#include <cstdint>

#include "law_math.h"
#include "philox.h"
#include "pool.h"

// out[token] for tokens 0 .. count - 1.
GRAFT_API void graft_noise(std::int64_t seed, std::int64_t position, std::int64_t count, float* out) {
    using namespace graft;
    std::uint32_t words[kGroup];
    float made[kGroup];
    for (std::int64_t first = 0; first < count; first += kGroup) {
        philox_group(std::uint64_t(seed), std::uint32_t(first / 4), std::uint32_t(position), words);
        for (int i = 0; i < kGroup; ++i) made[i] = noise_of(words[i]);
        std::copy_n(made, std::min<std::int64_t>(kGroup, count - first), out + first);
    }
}
