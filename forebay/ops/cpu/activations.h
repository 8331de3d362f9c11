// The functions of one variable that layers apply, lane by lane, all on top of exp.
#pragma once

#include "simd.h"

inline Vec negate(Vec x) { return zero() - x; }
inline Vec abs(Vec x) { return max(x, negate(x)); }

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(negate(x))); }
inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(negate(x))); }

// log(1 + exp(x)) = max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(u / (2 + u)), whose argument is
// at most 1/3: Taylor to degree 15 is exact to 2^-28, and nothing cancels where u is small. NaN stays NaN.
inline Vec softplus(Vec x) {
    const Vec u = exp(negate(abs(x)));
    const Vec s = u / (set1(2.0f) + u);
    const Vec z = s * s;
    Vec p = set1(1.0f / 15);
    p = fma(p, z, set1(1.0f / 13));
    p = fma(p, z, set1(1.0f / 11));
    p = fma(p, z, set1(1.0f / 9));
    p = fma(p, z, set1(1.0f / 7));
    p = fma(p, z, set1(1.0f / 5));
    p = fma(p, z, set1(1.0f / 3));
    p = p * z;
    return max(zero(), x) + fma(s + s, p, s + s);
}

// x (1 + tanh(u)) / 2 is x sigmoid(2 u): no tanh is needed, and nothing cancels where x is far below 0.
inline Vec gelu_tanh(Vec x) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    const Vec cubic = fma(x * x, set1(0.044715f * kTwice), set1(kTwice));
    return x * sigmoid(x * cubic);
}

// erfc(z) for z >= 0 as t exp(-z^2 + P(t)) with t = 1 / (1 + z / 2); P is the polynomial of degree 9 closest to
// log(erfc(z) / t) + z^2 over 0 <= z <= 10, by Lawson's iteration, to 4.6e-8.
inline Vec erfc_of_positive(Vec z) {
    const Vec t = set1(1.0f) / fma(z, set1(0.5f), set1(1.0f));
    Vec p = set1(0.14219491f);
    p = fma(p, t, set1(-0.66606665f));
    p = fma(p, t, set1(1.12240922f));
    p = fma(p, t, set1(-0.65125918f));
    p = fma(p, t, set1(-0.11677887f));
    p = fma(p, t, set1(0.020191535f));
    p = fma(p, t, set1(0.028358562f));
    p = fma(p, t, set1(0.38789943f));
    p = fma(p, t, set1(0.99849254f));
    p = fma(p, t, set1(-1.26544142f));
    return t * exp(fma(negate(z), z, p));
}

// x Phi(x), Phi the normal distribution: max(x, 0) less |x| Phi(-|x|).
inline Vec gelu_exact(Vec x) {
    const Vec size = min(set1(1e30f), abs(x));  // infinity times 0 is NaN
    return max(zero(), x) - size * set1(0.5f) * erfc_of_positive(size * set1(0.70710678118654752f));
}

inline Vec relu2(Vec x) {
    const Vec positive = max(zero(), x);
    return positive * positive;
}

// exp(x) - 1 for x <= 0: where exp(x) is near 1 and the difference would cancel, by Taylor to degree 8, exact to 2^-26.
inline Vec expm1_of_negative(Vec x) {
    const Vec near = max(set1(-0.5f), x), rest = exp(x - near);
    Vec p = set1(1.0f / 40320);
    p = fma(p, near, set1(1.0f / 5040));
    p = fma(p, near, set1(1.0f / 720));
    p = fma(p, near, set1(1.0f / 120));
    p = fma(p, near, set1(1.0f / 24));
    p = fma(p, near, set1(1.0f / 6));
    p = fma(p, near, set1(0.5f));
    p = fma(p, near, set1(1.0f));
    return fma(rest * near, p, rest - set1(1.0f));
}

// beta x, and alpha_p x^2 above 0 or alpha_n (exp(min(x, eps)) - 1 - x) up to it.
inline Vec xielu(Vec x, Vec alpha_p, Vec alpha_n, Vec beta, Vec eps) {
    const Vec above = max(zero(), x), below = min(zero(), x);
    const Vec bent = zero_where_below(expm1_of_negative(min(eps, below)) - below, negate(x), zero());
    return fma(beta, x, fma(alpha_p * above, above, alpha_n * bent));
}

// cap tanh(x / cap), the tanh as 2 sigmoid(2 z) - 1; what is not finite becomes NaN.
inline Vec softcap(Vec x, float cap) {
    const Vec tanh = fma(set1(2.0f), sigmoid(x * set1(2.0f / cap)), set1(-1.0f));
    return fma(x, zero(), tanh * set1(cap));
}

inline Vec clamped_swiglu(Vec gate, Vec up, Vec alpha, Vec limit, Vec offset) {
    const Vec g = min(limit, gate), u = max(negate(limit), min(limit, up));
    return (u + offset) * (g * sigmoid(alpha * g));
}
