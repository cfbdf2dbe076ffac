// Row by row: normalisation, quantisation, rotation, the exponential, and writing keys and values.
#pragma once

#include "kernels.h"

namespace treeserve::TREESERVE_ISA {

// e^x for x in [-87, 88]; beyond, the value at the end. Relative error below 2^-22 (Cephes' polynomial).
inline Floats exponential(Floats x) {
    x = minimum(maximum(x, broadcast(-87.0f)), broadcast(88.0f));
    const Ints power = round_to_int(multiply(x, broadcast(1.44269504f)));
    const Floats n = to_float(power);
    Floats r = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.9875691500e-4f);
    p = multiply_add(p, r, broadcast(1.3981999507e-3f));
    p = multiply_add(p, r, broadcast(8.3334519073e-3f));
    p = multiply_add(p, r, broadcast(4.1665795894e-2f));
    p = multiply_add(p, r, broadcast(1.6666665459e-1f));
    p = multiply_add(p, r, broadcast(5.0000001201e-1f));
    p = multiply_add(p, multiply(r, r), add(r, broadcast(1.0f)));
    return scale_by_power(p, power);
}

inline float reciprocal_rms(const float* x, int64_t width, float epsilon) {
    Floats squares = broadcast(0.0f);
    for (int64_t i = 0; i < width; i += kLanes) {
        const Floats v = load_first(x + i, width - i);
        squares = multiply_add(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + epsilon);
}

inline void normalise(const float* x, const float* weight, int64_t width, int64_t padded_width, float epsilon,
                      float* y) {
    const Floats factor = broadcast(reciprocal_rms(x, width, epsilon));
    for (int64_t i = 0; i < padded_width; i += kLanes) {
        store(y + i, multiply(multiply(load(x + i), factor), load(weight + i)));
    }
}

// 64 numbers in steps of largest / 127.
inline void quantise_group(const float* x, int8_t* values, float* scale, int32_t* offset) {
    Floats v[4];
    Floats magnitudes = broadcast(0.0f);
    for (int i = 0; i < 4; ++i) {
        v[i] = load(x + i * kLanes);
        magnitudes = maximum(magnitude(v[i]), magnitudes);
    }
    const float most = largest(magnitudes);
    const Floats inverse = broadcast(most > 1e-30f ? 127.0f / most : 0.0f);
    int32_t total = 0;
    for (int i = 0; i < 4; ++i) {
        const Floats steps = multiply(v[i], inverse);
        const Ints q = round_to_int(minimum(maximum(steps, broadcast(-127.0f)), broadcast(127.0f)));
        store_bytes(values + i * kLanes, q);
        total += sum(q);
    }
    *scale = most / 127.0f;
    *offset = -128 * total;
}

inline void quantise(const float* x, const Activations& out, int64_t row) {
    for (int64_t g = 0; g < out.groups; ++g) {
        const int64_t at = g * out.rows + row;
        quantise_group(x + g * kGroupInputs, out.values + at * kGroupInputs, out.scales + at, out.offsets + at);
    }
}

// Normalises one head if there is a weight, rotates it and multiplies it by `factor`.
inline void rotate_head(const float* x, const float* norm, const Rotation& rotation, int64_t position, float factor,
                        float* out) {
    const int64_t half = rotation.head_dim / 2;
    const float* cosines = rotation.cosines + position * half;
    const float* sines = rotation.sines + position * half;
    const Floats by = broadcast(factor);
    const Floats shrink = broadcast(norm ? reciprocal_rms(x, rotation.head_dim, rotation.epsilon) : 1.0f);
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t count = half - i;
        Floats a = load_first(x + i, count);
        Floats b = load_first(x + half + i, count);
        if (norm) {
            a = multiply(multiply(a, shrink), load_first(norm + i, count));
            b = multiply(multiply(b, shrink), load_first(norm + half + i, count));
        }
        const Floats c = load_first(cosines + i, count);
        const Floats s = load_first(sines + i, count);
        store_first(out + i, multiply(by, subtract(multiply(a, c), multiply(b, s))), count);
        store_first(out + half + i, multiply(by, add(multiply(b, c), multiply(a, s))), count);
    }
}

inline float convert(float x, float, const float*) { return x; }
inline Bfloat16 convert(float x, float, const Bfloat16*) { return to_bfloat16(x); }
inline int8_t convert(float x, float inverse, const int8_t*) {
    const float steps = x * inverse;
    const float limited = steps > 127.0f ? 127.0f : steps > -127.0f ? steps : -127.0f;
    return static_cast<int8_t>((limited + 12582912.0f) - 12582912.0f);
}

// Writes `count` numbers at a distance of `stride` elements; with int8, in steps of `*scale`.
template <class Number>
inline void write_numbers(const float* x, int64_t count, Number* out, int64_t stride, float* scale) {
    float inverse = 0.0f;
    if (scale) {
        float most = 0.0f;
        for (int64_t i = 0; i < count; ++i) {
            const float m = __builtin_fabsf(x[i]);
            most = m > most ? m : most;
        }
        inverse = most > 1e-30f ? 127.0f / most : 0.0f;
        *scale = most / 127.0f;
    }
    for (int64_t i = 0; i < count; ++i) out[i * stride] = convert(x[i], inverse, out);
}

template <class Number>
inline void write_cell(const KeyValueWrite& write, const float* key, float* scales) {
    const KvLayout& layout = *write.layout;
    Number* keys = reinterpret_cast<Number*>(write.cell) + write.lane;
    Number* values = reinterpret_cast<Number*>(write.cell + layout.values_offset) + write.lane * layout.padded_head_dim;
    write_numbers(key, layout.head_dim, keys, kLanes, scales);
    write_numbers(write.value, layout.head_dim, values, 1, scales ? scales + kLanes : nullptr);
}

inline void write_key_value(const KeyValueWrite& write) {
    float key[kMaxHeadDim];
    rotate_head(write.key, write.k_norm, *write.rotation, write.position, 1.0f, key);
    switch (write.layout->type) {
        case TS_KV_FLOAT32: return write_cell<float>(write, key, nullptr);
        case TS_KV_BFLOAT16: return write_cell<Bfloat16>(write, key, nullptr);
        case TS_KV_INT8:
            float* scales = reinterpret_cast<float*>(write.cell + write.layout->scales_offset) + write.lane;
            return write_cell<int8_t>(write, key, scales);
    }
}

}  // namespace treeserve::TREESERVE_ISA
