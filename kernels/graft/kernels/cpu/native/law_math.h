// log, exp and noise of the sampling law: the operations of reference/float_math.py and of
// graft.common.noise, bit for bit. The unit is compiled with -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>

namespace graft {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kHighestNoise = 16.635532f;  // of the greatest of the 2^23 uniforms
constexpr int kNoiseShift = 9;               // a uniform is ((word >> 9) + 0.5) * 2^-23

inline std::int32_t bits_of(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(std::int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Floats as integers of the same order; -0 is just below +0.
inline std::int32_t order_key(float x) {
    const std::int32_t bits = bits_of(x);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

inline float of_order_key(std::int32_t key) { return float_of(key ^ ((key >> 31) & 0x7FFFFFFF)); }

// Of at least one number, none of them NaN. Compared as integers so that it is vectorised.
inline float highest_of(const float* x, std::int64_t count) {
    std::int32_t high = order_key(x[0]);
    for (std::int64_t i = 1; i < count; ++i) {
        const std::int32_t key = order_key(x[i]);
        high = key > high ? key : high;
    }
    return of_order_key(high);
}

// Of a positive normal number.
inline float log32(float x) {
    const std::int32_t bits = bits_of(x);
    const std::int32_t exponent = (bits - 0x3F3504F3) >> 23;
    const float f = float_of(bits - (exponent << 23)) - 1.0f;
    const float e = float(exponent);
    const float square = f * f;
    float y = -0.07634322345256805f;
    y = y * f + 0.12761519849300385f;
    y = y * f + -0.1316022127866745f;
    y = y * f + 0.1420176774263382f;
    y = y * f + -0.16623353958129883f;
    y = y * f + 0.20001226663589478f;
    y = y * f + -0.250008225440979f;
    y = y * f + 0.3333333134651184f;
    y = y * f * square;
    y = y + e * -0.00021219444170128554f;
    y = y - 0.5f * square;
    return (f + y) + e * 0.693359375f;
}

// Of a number at or below 0; 0 below -87. Both limits are met in the bits, which grow with the
// distance from 0: written as comparisons of floats they would keep loops from being vectorised.
inline float exp32(float x) {
    constexpr std::int32_t kSign = std::int32_t(0x80000000u), kLowest = 0x42AE0000;  // of 87
    const std::int32_t distance = bits_of(x) & ~kSign;
    const std::int32_t beyond = distance - kLowest;
    const float clipped = float_of((kLowest + (beyond & (beyond >> 31))) | kSign);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float n = (clipped * 1.4426950216293335f + magic) - magic;
    const float r = (clipped - n * 0.693359375f) - n * -0.00021219444170128554f;
    float y = 0.0013814606936648488f;
    y = y * r + 0.008368710987269878f;
    y = y * r + 0.04166838899254799f;
    y = y * r + 0.1666652113199234f;
    y = y * r + 0.4999999403953552f;
    y = (y * (r * r) + r) + 1.0f;
    const float power = float_of((std::int32_t(n) + 127) << 23);
    const std::int32_t kept = (beyond - 1) >> 31;
    return float_of(bits_of(y * power) & kept);
}

// -log(-log u) of the uniform in a word's upper bits.
inline float noise_of(std::uint32_t word) {
    const float u = (float(std::int32_t(word >> kNoiseShift)) + 0.5f) * 1.1920928955078125e-07f;  // 2^-23
    return -log32(-log32(u));
}

}  // namespace graft
