// What this processor offers, and memory for weights.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "pool.h"

// Counts changes of the C functions and structs; library.py takes no other number than its own.
GRAFT_API int graft_abi() { return 1; }

// 1 where a library built for `isa` runs; asked of the portable build, which runs anywhere.
GRAFT_API int graft_supports(const char* isa) {
    if (std::strcmp(isa, "portable") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (std::strcmp(isa, "avx2") == 0) return avx2;
    if (std::strcmp(isa, "avx512") == 0) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
#endif
    return 0;
}

// Zeroed, on huge pages where the system has them; null when memory is out.
GRAFT_API void* graft_alloc(std::int64_t bytes) {
    constexpr std::int64_t kHuge = 1 << 21;
    const auto size = std::size_t((bytes + kHuge - 1) / kHuge * kHuge);
    void* start = std::aligned_alloc(kHuge, size);
    if (start == nullptr) return nullptr;
#if defined(__linux__)
    madvise(start, size, MADV_HUGEPAGE);
#endif
    std::memset(start, 0, std::size_t(bytes));
    return start;
}

GRAFT_API void graft_free(void* start) { std::free(start); }
