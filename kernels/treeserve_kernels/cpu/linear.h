// Int8 linear layers: exact integer sums per group of 64 inputs, then floats group by group in order.
//
// A panel of 32 outputs is multiplied with up to kLinearRows rows at a time: each weight vector that is loaded serves
// all of them, and their integer sums stay in registers. A row's result does not depend on the rows beside it.
#pragma once

#include "elementwise.h"

namespace treeserve::TREESERVE_ISA {

constexpr int kStepInputs = 4;
constexpr int kStepBytes = kPanelOutputs * kStepInputs;
constexpr int kPanelGroupBytes = kPanelOutputs * kGroupInputs;
constexpr int kFetchAhead = 8192;  // what a core reads during one access to memory

// A panel's outputs for some rows, [row][32], before the scales of the weights:
// the sum over groups of (integer sum of the group) * (scale of the row's group).
//
// The first tile over a panel runs at the speed of memory, the others out of the caches: so that one asks for what lies
// ahead of it. The panels of a share follow each other in memory.
template <int Rows>
void multiply_tile(const uint8_t* panel, const Activations& x, int64_t row, float* outputs, bool is_first) {
    const int8_t* inputs = x.values + row * kGroupInputs;
    const float* scales = x.scales + row;
    const int32_t* offsets = x.offsets + row;
    const int64_t rows = x.rows;
    Floats sums[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = broadcast(0.0f);
    for (int64_t left = x.groups; left > 0; --left) {
        Ints totals[Rows][2];
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) totals[r][0] = totals[r][1] = first_sum(offsets[r]);
        for (int k = 0; k < kGroupInputs; k += kStepInputs) {
            const uint8_t* weights = panel + k * kPanelOutputs;
            if (is_first) {
                __builtin_prefetch(weights + kFetchAhead);
                __builtin_prefetch(weights + kFetchAhead + kStepBytes / 2);
            }
            const WeightBytes low = load_weights(weights);
            const WeightBytes high = load_weights(weights + kStepBytes / 2);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                const InputBytes input = load_inputs(inputs + r * kGroupInputs + k);
                totals[r][0] = add_products(totals[r][0], low, input);
                totals[r][1] = add_products(totals[r][1], high, input);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const Floats scale = broadcast(scales[r]);
            sums[r][0] = add(sums[r][0], multiply(to_float(totals[r][0]), scale));
            sums[r][1] = add(sums[r][1], multiply(to_float(totals[r][1]), scale));
        }
        panel += kPanelGroupBytes;
        inputs += rows * kGroupInputs;
        scales += rows;
        offsets += rows;
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
        store(outputs + r * kPanelOutputs, sums[r][0]);
        store(outputs + r * kPanelOutputs + kLanes, sums[r][1]);
    }
}

template <int Rows>
void multiply_rows(int rows, const uint8_t* panel, const Activations& x, int64_t row, float* outputs, bool is_first) {
    if constexpr (Rows > 1) {
        if (rows < Rows) return multiply_rows<Rows - 1>(rows, panel, x, row, outputs, is_first);
    }
    multiply_tile<Rows>(panel, x, row, outputs, is_first);
}

// Calls finish(row, first half, second half) with the outputs of one panel for every row.
template <class Finish>
inline void for_each_output(const TsLinear& linear, const Activations& x, int64_t panel, Finish finish) {
    alignas(64) float outputs[kLinearRows * kPanelOutputs];
    const int64_t panel_bytes = x.groups * kPanelGroupBytes;
    const uint8_t* weights = linear.panels + panel * panel_bytes;
    const Floats scales[2] = {load(linear.scales + panel * kPanelOutputs),
                              load(linear.scales + panel * kPanelOutputs + kLanes)};
    const float* bias = linear.bias ? linear.bias + panel * kPanelOutputs : nullptr;
    const int64_t tiles = (x.rows + kLinearRows - 1) / kLinearRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = x.rows * tile / tiles;
        const int rows = static_cast<int>(x.rows * (tile + 1) / tiles - row);
        multiply_rows<kLinearRows>(rows, weights, x, row, outputs, tile == 0);
        for (int r = 0; r < rows; ++r) {
            Floats halves[2];
            for (int h = 0; h < 2; ++h) {
                halves[h] = multiply(load(outputs + r * kPanelOutputs + h * kLanes), scales[h]);
                if (bias) halves[h] = add(halves[h], load(bias + h * kLanes));
            }
            finish(row + r, halves[0], halves[1]);
        }
    }
}

inline void linear_store(const LinearCall& call, int64_t panel) {
    const int64_t first = panel * kPanelOutputs;
    const int64_t count = call.linear->num_outputs - first;
    for_each_output(*call.linear, call.input, panel, [&](int64_t row, Floats low, Floats high) {
        float* out = call.output + row * call.stride + first;
        if (count >= kPanelOutputs) {
            store(out, low);
            store(out + kLanes, high);
        } else {
            store_first(out, low, count);
            if (count > kLanes) store_first(out + kLanes, high, count - kLanes);
        }
    });
}

inline void linear_add(const LinearCall& call, int64_t panel) {
    for_each_output(*call.linear, call.input, panel, [&](int64_t row, Floats low, Floats high) {
        float* out = call.output + row * call.stride + panel * kPanelOutputs;
        store(out, add(load(out), low));
        store(out + kLanes, add(load(out + kLanes), high));
    });
}

inline void linear_swiglu(const SwigluCall& call, int64_t group, float* products) {
    constexpr int kPanels = kGroupInputs / kLanes;  // each yields 16 products
    const int64_t num_panels = call.num_outputs / kLanes;
    for (int i = 0; i < kPanels; ++i) {
        const int64_t panel = group * kPanels + i;
        if (panel >= num_panels) {
            for (int64_t row = 0; row < call.input.rows; ++row) {
                store(products + row * kGroupInputs + i * kLanes, broadcast(0.0f));
            }
            continue;
        }
        for_each_output(*call.linear, call.input, panel, [&](int64_t row, Floats gate, Floats up) {
            const Floats one = broadcast(1.0f);
            const Floats silu = divide(gate, add(one, exponential(subtract(broadcast(0.0f), gate))));
            store(products + row * kGroupInputs + i * kLanes, multiply(silu, up));
        });
    }
    for (int64_t row = 0; row < call.input.rows; ++row) {
        const int64_t at = group * call.output.rows + row;
        quantise_group(products + row * kGroupInputs, call.output.values + at * kGroupInputs, call.output.scales + at,
                       call.output.offsets + at);
    }
}

}  // namespace treeserve::TREESERVE_ISA
