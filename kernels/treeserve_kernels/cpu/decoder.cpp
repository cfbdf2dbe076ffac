#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "checks.h"
#include "cpu_features.h"

using namespace treeserve;

namespace {

std::vector<float> padded(const float* values, int64_t count, int64_t size) {
    std::vector<float> result(static_cast<size_t>(size), 0.0f);
    std::copy_n(values, count, result.begin());
    return result;
}

// Most phases of a layer, and of what comes before and after the layers.
constexpr int64_t kLayerPhases = 10;
constexpr int64_t kOtherPhases = 3;

// Items of a thread's share: enough to even out, and taking one costs too much for single panels of a large head.
constexpr int64_t kMostShare = 64;

// What is done row by row, one thread does for up to so many rows.
constexpr int64_t kFewRows = 4;

int64_t panels_of(const TsLinear& linear) { return rounded_up(linear.num_outputs, kPanelOutputs) / kPanelOutputs; }

int64_t groups_of(int64_t inputs) { return rounded_up(inputs, kGroupInputs) / kGroupInputs; }

// Before the pool starts them.
int checked_threads(const TsShape& shape, int threads) {
    check_shape(shape);
    require(threads >= 1 && threads <= 1024, "number of threads ", threads);
    return threads;
}

}  // namespace

void ActivationBuffer::reserve(int64_t rows, int64_t groups) {
    values_.reserve(rows * groups * kGroupInputs);
    scales_.reserve(rows * groups);
    offsets_.reserve(rows * groups);
}

void treeserve::apply_linear(const TsLinear& linear, const Kernels& kernels, int64_t rows, const float* x, float* y) {
    require(rows >= 0 && linear.num_inputs >= 1 && linear.num_outputs >= 1, rows, " rows, ", linear.num_inputs,
            " inputs, ", linear.num_outputs, " outputs");
    const int64_t groups = groups_of(linear.num_inputs);
    ActivationBuffer buffer;
    buffer.reserve(rows, groups);
    const Activations input = buffer.of(rows, groups);
    for (int64_t row = 0; row < rows; ++row) {
        const std::vector<float> one = padded(x + row * linear.num_inputs, linear.num_inputs, groups * kGroupInputs);
        kernels.quantise(one.data(), input, row);
    }
    const LinearCall call{&linear, input, y, linear.num_outputs};
    for (int64_t panel = 0; panel < panels_of(linear); ++panel) kernels.linear_store(call, panel);
}

// The rows that go through a layer, and where attention finds and leaves them.
struct TsDecoder::RowSet {
    float* hidden;
    const std::vector<AttentionRow>* rows;
    std::vector<RowRange> tasks;  // of each KV head

    int64_t size() const { return static_cast<int64_t>(rows->size()); }
};

struct TsDecoder::Pass {
    const TsKvCache& kv;
    RowSet all, wanted;
    const TsOutputs& outputs;
};

TsDecoder::TsDecoder(const TsShape& shape, const TsWeights& weights, int threads, std::string_view isa)
    : shape_(shape),
      weights_(weights),
      kernels_(find_kernels(isa)),
      rotation_{weights.rope_cos, weights.rope_sin, shape.head_dim, static_cast<float>(shape.rms_norm_eps)},
      pool_(checked_threads(shape, threads)),
      row_scratch_(static_cast<size_t>(threads)),
      attention_scratch_(static_cast<size_t>(threads)) {
    const int64_t attended = shape.num_heads * shape.head_dim;
    const int64_t qkv = attended + 2 * shape.num_kv_heads * shape.head_dim;
    hidden_groups_ = groups_of(shape.hidden_size);
    attended_groups_ = groups_of(attended);
    intermediate_groups_ = groups_of(shape.intermediate_size);
    hidden_stride_ = hidden_groups_ * kGroupInputs;
    attended_stride_ = attended_groups_ * kGroupInputs;
    qkv_stride_ = rounded_up(qkv, kPanelOutputs);
    for (int64_t i = 0; i < shape.num_layers; ++i) {
        const TsLayer& layer = weights.layers[i];
        check_linear("qkv", layer.qkv, qkv, shape.hidden_size);
        check_linear("attention_output", layer.attention_output, shape.hidden_size, attended);
        check_linear("gate_up", layer.gate_up, 2 * rounded_up(shape.intermediate_size, kLanes), shape.hidden_size);
        check_linear("down", layer.down, shape.hidden_size, shape.intermediate_size);
        layers_.push_back({layer, padded(layer.input_norm, shape.hidden_size, hidden_stride_),
                           padded(layer.feed_forward_norm, shape.hidden_size, hidden_stride_)});
    }
    require(weights.head.num_outputs >= 1, "head has ", weights.head.num_outputs, " outputs");
    check_linear("head", weights.head, weights.head.num_outputs, shape.hidden_size);
    norm_ = padded(weights.norm, shape.hidden_size, hidden_stride_);
}

void TsDecoder::check_linear(const char* name, const TsLinear& linear, int64_t outputs, int64_t inputs) const {
    require(linear.num_outputs == outputs && linear.num_inputs == inputs, name, " has ", linear.num_outputs,
            " outputs and ", linear.num_inputs, " inputs instead of ", outputs, " and ", inputs);
    require(reinterpret_cast<uintptr_t>(linear.panels) % 64 == 0, name, " panels begin at no multiple of 64 bytes");
}

void TsDecoder::forward(const TsKvCache& kv, const TsBatch& batch, const TsOutputs& outputs) {
    const std::lock_guard lock(busy_);
    require(kv.num_layers() == shape_.num_layers && kv.num_kv_heads() == shape_.num_kv_heads &&
                kv.layout().head_dim == shape_.head_dim,
            "the KV cache is of another shape than the decoder");
    require(weights_.embedding || batch.inputs, "inputs are missing, and the decoder has no embedding");
    plan_.build(batch, shape_, kv);
    reserve(batch.num_rows, batch.num_logits, plan_.most_visible());
    Pass pass{kv, {hidden_.data(), &plan_.rows(), {}}, {wanted_hidden_.data(), &plan_.wanted_rows(), {}}, outputs};
    const int64_t heads_per_kv = shape_.num_heads / shape_.num_kv_heads;
    for (RowSet* set : {&pass.all, &pass.wanted}) {
        // Large tasks share more, small ones are spread better.
        const int64_t spread = set->size() * shape_.num_kv_heads / (3 * pool_.size());
        cut_rows(*set->rows, std::clamp<int64_t>(spread, 1, std::max<int64_t>(1, kTaskRows / heads_per_kv)),
                 set->tasks);
    }
    pool_.run(kOtherPhases + batch.num_feature_layers + shape_.num_layers * kLayerPhases,
              [&](ThreadPool::Member& member) { run_layers(pass, member); });
}

void TsDecoder::reserve(int64_t rows, int64_t logits_rows, int64_t most_visible) {
    const int64_t most_rows = std::max(rows, logits_rows);
    hidden_.reserve(rows * hidden_stride_);
    wanted_hidden_.reserve(logits_rows * hidden_stride_);
    qkv_.reserve(rows * qkv_stride_);
    attended_.reserve(most_rows * attended_stride_);
    input_.reserve(most_rows, std::max(hidden_groups_, attended_groups_));
    products_.reserve(most_rows, intermediate_groups_);
    const int64_t row_floats = std::max(hidden_stride_, most_rows * kGroupInputs);
    for (Scratch<float>& scratch : row_scratch_) scratch.reserve(row_floats);
    score_rows_ = std::max<int64_t>(kTaskRows, shape_.num_heads / shape_.num_kv_heads);
    score_stride_ = rounded_up(most_visible, kLanes) + 2 * kLanes;  // kernels write up to a vector beyond the end
    const int64_t padded_head_dim = rounded_up(shape_.head_dim, kLanes);
    for (Scratch<float>& scratch : attention_scratch_) {
        scratch.reserve(score_rows_ * (kQueryStride + score_stride_ + padded_head_dim + 1));
    }
}

AttentionScratch TsDecoder::attention_scratch(int thread) const {
    float* queries = attention_scratch_[static_cast<size_t>(thread)].data();
    float* scores = queries + score_rows_ * kQueryStride;
    float* sums = scores + score_rows_ * score_stride_;
    return {queries, scores, sums, sums + score_rows_ * rounded_up(shape_.head_dim, kLanes), score_stride_};
}

void TsDecoder::run_layers(Pass& pass, ThreadPool::Member& member) {
    const TsBatch& batch = plan_.batch();
    pool_.for_each(member, batch.num_rows, [&](int64_t row) {
        const float* input = batch.inputs ? batch.inputs + row * shape_.hidden_size
                                          : weights_.embedding + batch.input_ids[row] * shape_.hidden_size;
        std::copy_n(input, shape_.hidden_size, hidden_.data() + row * hidden_stride_);
        normalise_row(pass.all, layers_[0].input_norm, row, member);
    });
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) run_layer(pass, layer, member);
    export_last_hidden(pass, member);
    const TsLinear& head = weights_.head;
    linear({&head, input_.of(pass.wanted.size(), hidden_groups_), pass.outputs.logits, head.num_outputs}, member);
}

// Finds the normalised, quantised rows in input_, and leaves there what the next layer or the head reads.
void TsDecoder::run_layer(Pass& pass, int64_t index, ThreadPool::Member& member) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const TsLayer& weights = layer.weights;
    project_qkv(pass, index, member);
    const bool last = index + 1 == shape_.num_layers;
    // Nobody reads what the last layer would make of the other rows.
    const RowSet& rows = last ? pass.wanted : pass.all;
    if (last) gather_wanted(pass, member);
    attend(pass, index, rows, member);
    linear_then_normalise(
        {&weights.attention_output, input_.of(rows.size(), attended_groups_), rows.hidden, hidden_stride_},
        layer.feed_forward_norm, rows, member);
    const Activations products = gate_up(weights.gate_up, rows, member);
    linear_then_normalise({&weights.down, products, rows.hidden, hidden_stride_},
                          last ? norm_ : layers_[static_cast<size_t>(index + 1)].input_norm, rows, member);
    export_features(pass, index + 1, member);
}

// Items of a phase, then something for every row: for few rows, waiting for each other twice costs more than sharing
// them gains.
template <class Function, class RowFunction>
void TsDecoder::for_each_then_rows(ThreadPool::Member& member, int64_t count, Function function, int64_t rows,
                                   RowFunction row_function) {
    if (rows > kFewRows) {
        pool_.for_each(member, count, function);
        pool_.for_each(member, rows, row_function);
        return;
    }
    pool_.for_each(member, count, function, [&] {
        for (int64_t row = 0; row < rows; ++row) row_function(row);
    });
}

void TsDecoder::normalise_row(const RowSet& rows, const std::vector<float>& weight, int64_t row,
                              const ThreadPool::Member& member) {
    float* row_scratch = row_scratch_[static_cast<size_t>(member.thread)].data();
    kernels_.normalise(rows.hidden + row * hidden_stride_, weight.data(), shape_.hidden_size, hidden_stride_,
                       rotation_.epsilon, row_scratch);
    kernels_.quantise(row_scratch, input_.of(rows.size(), hidden_groups_), row);
}

void TsDecoder::linear(const LinearCall& call, ThreadPool::Member& member) {
    if (call.input.rows == 0) return;
    const int64_t panels = panels_of(*call.linear);
    const int64_t items = std::min(panels, pool_.size() * kMostShare);
    pool_.for_each(member, items, [&](int64_t item) {
        for (int64_t panel = panels * item / items; panel < panels * (item + 1) / items; ++panel) {
            kernels_.linear_store(call, panel);
        }
    });
}

void TsDecoder::linear_then_normalise(const LinearCall& call, const std::vector<float>& norm, const RowSet& rows,
                                      ThreadPool::Member& member) {
    if (rows.size() == 0) return;
    for_each_then_rows(
        member, panels_of(*call.linear), [&](int64_t panel) { kernels_.linear_add(call, panel); }, rows.size(),
        [&](int64_t row) { normalise_row(rows, norm, row, member); });
}

void TsDecoder::project_qkv(const Pass& pass, int64_t layer, ThreadPool::Member& member) {
    const TsLinear& qkv = layers_[static_cast<size_t>(layer)].weights.qkv;
    const LinearCall call{&qkv, input_.of(pass.all.size(), hidden_groups_), qkv_.data(), qkv_stride_};
    for_each_then_rows(
        member, panels_of(qkv), [&](int64_t panel) { kernels_.linear_store(call, panel); }, pass.all.size(),
        [&](int64_t row) { write_keys_values(pass, layer, row); });
}

void TsDecoder::write_keys_values(const Pass& pass, int64_t layer, int64_t row) const {
    const KvLayout& layout = pass.kv.layout();
    const int64_t heads = shape_.num_kv_heads, head_dim = shape_.head_dim, place = plan_.place(row);
    const float* keys = qkv_.data() + row * qkv_stride_ + shape_.num_heads * head_dim;
    const float* k_norm = layers_[static_cast<size_t>(layer)].weights.k_norm;
    char* cells = pass.kv.cells(layer, place / kLanes);
    for (int64_t head = 0; head < heads; ++head) {
        kernels_.write_key_value({&layout, &rotation_, keys + head * head_dim, keys + (heads + head) * head_dim, k_norm,
                                  plan_.batch().positions[row], cells + head * layout.cell_bytes,
                                  static_cast<int>(place % kLanes)});
    }
}

void TsDecoder::gather_wanted(Pass& pass, ThreadPool::Member& member) {
    pool_.for_each(member, pass.wanted.size(), [&](int64_t i) {
        const int64_t row = (*pass.wanted.rows)[static_cast<size_t>(i)].query;
        std::copy_n(pass.all.hidden + row * hidden_stride_, hidden_stride_, pass.wanted.hidden + i * hidden_stride_);
    });
}

void TsDecoder::export_features(const Pass& pass, int64_t layers_behind, ThreadPool::Member& member) {
    const TsBatch& batch = plan_.batch();
    const int64_t* end = batch.feature_layers + batch.num_feature_layers;
    const int64_t* found = std::find(batch.feature_layers, end, layers_behind);
    if (found == end) return;
    const int64_t depth = found - batch.feature_layers;
    pool_.for_each(member, batch.num_features, [&](int64_t i) {
        std::copy_n(pass.all.hidden + batch.feature_rows[i] * hidden_stride_, shape_.hidden_size,
                    pass.outputs.features + (i * batch.num_feature_layers + depth) * shape_.hidden_size);
    });
}

void TsDecoder::export_last_hidden(const Pass& pass, ThreadPool::Member& member) {
    if (!pass.outputs.last_hidden) return;
    pool_.for_each(member, pass.wanted.size(), [&](int64_t i) {
        std::copy_n(pass.wanted.hidden + i * hidden_stride_, shape_.hidden_size,
                    pass.outputs.last_hidden + i * shape_.hidden_size);
    });
}

void TsDecoder::attend(const Pass& pass, int64_t layer, const RowSet& rows, ThreadPool::Member& member) {
    const KvLayout& layout = pass.kv.layout();
    const AttentionCall call{&layout,
                             &rotation_,
                             qkv_.data(),
                             layers_[static_cast<size_t>(layer)].weights.q_norm,
                             attended_.data(),
                             qkv_stride_,
                             attended_stride_,
                             static_cast<int>(shape_.num_heads / shape_.num_kv_heads),
                             1.0f / std::sqrt(static_cast<float>(shape_.head_dim))};
    const AttentionScratch scratch = attention_scratch(member.thread);
    const auto tasks = static_cast<int64_t>(rows.tasks.size());
    const Activations attended = input_.of(rows.size(), attended_groups_);
    for_each_then_rows(
        member, tasks * shape_.num_kv_heads,
        [&](int64_t item) {
            const RowRange range = rows.tasks[static_cast<size_t>(item % tasks)];
            const auto head = static_cast<int>(item / tasks);
            const AttentionRow* first = rows.rows->data() + range.first;
            kernels_.attend(call,
                            {&plan_.sequence(first->sequence), first, range.count, head,
                             pass.kv.cells(layer, 0) + head * layout.cell_bytes},
                            scratch);
        },
        rows.size(), [&](int64_t row) { kernels_.quantise(attended_.data() + row * attended_stride_, attended, row); });
}

Activations TsDecoder::gate_up(const TsLinear& linear, const RowSet& rows, ThreadPool::Member& member) {
    const Activations products = products_.of(rows.size(), intermediate_groups_);
    if (rows.size() == 0) return products;
    const SwigluCall call{&linear, input_.of(rows.size(), hidden_groups_), products,
                          rounded_up(shape_.intermediate_size, kLanes)};
    float* row_scratch = row_scratch_[static_cast<size_t>(member.thread)].data();
    pool_.for_each(member, intermediate_groups_,
                   [&](int64_t group) { kernels_.linear_swiglu(call, group, row_scratch); });
    return products;
}
