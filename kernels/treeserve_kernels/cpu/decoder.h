// The decoder: weights, scratch memory, and the phases of a forward pass.
#pragma once

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "batch.h"
#include "kernels.h"
#include "kv_cache.h"
#include "memory.h"
#include "thread_pool.h"

namespace treeserve {

// Quantised rows and their memory.
class ActivationBuffer {
public:
    void reserve(int64_t rows, int64_t groups);
    Activations of(int64_t rows, int64_t groups) const {
        return {values_.data(), scales_.data(), offsets_.data(), rows, groups};
    }

private:
    Scratch<int8_t> values_;
    Scratch<float> scales_;
    Scratch<int32_t> offsets_;
};

// One linear layer alone, in the calling thread: x [rows, num_inputs] to y [rows, num_outputs].
void apply_linear(const TsLinear& linear, const Kernels& kernels, int64_t rows, const float* x, float* y);

// A layer with its norms padded as the kernels read them.
struct Layer {
    TsLayer weights;
    std::vector<float> input_norm, feed_forward_norm;
};

}  // namespace treeserve

struct TsDecoder {
public:
    // Throws std::invalid_argument.
    TsDecoder(const TsShape& shape, const TsWeights& weights, int threads, std::string_view isa);

    // Throws std::invalid_argument or std::bad_alloc before anything is written.
    void forward(const TsKvCache& kv, const TsBatch& batch, const TsOutputs& outputs);

    int64_t num_outputs() const { return weights_.head.num_outputs; }
    const treeserve::Kernels& kernels() const { return kernels_; }

    // For whoever runs several passes in a row, and holds `running` meanwhile: memory that is kept for the next time.
    struct RunScratch {
        std::mutex running;
        treeserve::Scratch<float> logits;
    };
    RunScratch& run_scratch() { return run_scratch_; }

private:
    struct Pass;
    struct RowSet;

    void check_linear(const char* name, const TsLinear& linear, int64_t outputs, int64_t inputs) const;
    void reserve(int64_t rows, int64_t logits_rows, int64_t most_visible);
    treeserve::AttentionScratch attention_scratch(int thread) const;

    // The phases: every thread calls each of them, and all have finished when one returns.
    void run_layers(Pass& pass, treeserve::ThreadPool::Member& member);
    void run_layer(Pass& pass, int64_t index, treeserve::ThreadPool::Member& member);
    template <class Function, class RowFunction>
    void for_each_then_rows(treeserve::ThreadPool::Member& member, int64_t count, Function function, int64_t rows,
                            RowFunction row_function);
    void normalise_row(const RowSet& rows, const std::vector<float>& weight, int64_t row,
                       const treeserve::ThreadPool::Member& member);
    void linear(const treeserve::LinearCall& call, treeserve::ThreadPool::Member& member);
    void linear_then_normalise(const treeserve::LinearCall& call, const std::vector<float>& norm, const RowSet& rows,
                               treeserve::ThreadPool::Member& member);
    void project_qkv(const Pass& pass, int64_t layer, treeserve::ThreadPool::Member& member);
    void write_keys_values(const Pass& pass, int64_t layer, int64_t row) const;
    void gather_wanted(Pass& pass, treeserve::ThreadPool::Member& member);
    void export_features(const Pass& pass, int64_t layers_behind, treeserve::ThreadPool::Member& member);
    void export_last_hidden(const Pass& pass, treeserve::ThreadPool::Member& member);
    void attend(const Pass& pass, int64_t layer, const RowSet& rows, treeserve::ThreadPool::Member& member);
    treeserve::Activations gate_up(const TsLinear& linear, const RowSet& rows, treeserve::ThreadPool::Member& member);

    TsShape shape_;
    TsWeights weights_;
    const treeserve::Kernels& kernels_;
    std::vector<treeserve::Layer> layers_;
    std::vector<float> norm_;
    treeserve::Rotation rotation_;
    int64_t hidden_stride_, attended_stride_, qkv_stride_, hidden_groups_, attended_groups_, intermediate_groups_;
    int64_t score_rows_ = 0, score_stride_ = 0;

    std::mutex busy_;
    treeserve::ThreadPool pool_;
    treeserve::BatchPlan plan_;
    treeserve::Scratch<float> hidden_, wanted_hidden_, qkv_, attended_;
    RunScratch run_scratch_;
    treeserve::ActivationBuffer input_, products_;
    std::vector<treeserve::Scratch<float>> row_scratch_, attention_scratch_;  // one per thread
};
