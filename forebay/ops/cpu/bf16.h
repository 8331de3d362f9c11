// bfloat16 as storage: all arithmetic is in float32, rounded once on the way out.
#pragma once

#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}
