// The walk of each tree along the target's own choices; reference/accept.py says what it means.
#include <algorithm>
#include <cstdint>

#include "pool.h"

// ptr: [trees + 1]; tokens, next_token, next_sibling, chosen: [rows]; links are local, -1 is none.
// accept_token_num: [trees]; accept_index: [trees, width], -1 after the end of each path.
GRAFT_API void graft_accept(std::int64_t trees, const std::int32_t* ptr,
                            const std::int32_t* tokens, const std::int32_t* next_token,
                            const std::int32_t* next_sibling, const std::int32_t* chosen,
                            std::int64_t width, std::int32_t* accept_token_num,
                            std::int32_t* accept_index) {
    std::fill_n(accept_index, trees * width, -1);
    for (std::int64_t tree = 0; tree < trees; ++tree) {
        const std::int64_t start = ptr[tree];
        accept_token_num[tree] = 0;
        if (ptr[tree + 1] == start) continue;
        std::int32_t* path = accept_index + tree * width;
        std::int32_t node = 0, accepted = 0;
        path[0] = 0;
        while (chosen[start + node] >= 0) {
            std::int32_t child = next_token[start + node];
            while (child >= 0 && tokens[start + child] != chosen[start + node]) {
                child = next_sibling[start + child];
            }
            if (child < 0) break;
            node = child;
            path[++accepted] = node;
        }
        accept_token_num[tree] = accepted;
    }
}
