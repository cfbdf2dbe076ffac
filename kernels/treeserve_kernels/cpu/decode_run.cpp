#include "decode_run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "checks.h"
#include "rivals.h"

namespace treeserve {

namespace {

// As the verifier has them: calibration.py and planner.py.
constexpr double kVerifiedSmoothing = 0.3, kCalibrationSmoothing = 0.15, kPriorSmoothing = 0.02, kForgiveness = 0.01;
constexpr int32_t kSpareNodes = 4;

constexpr int32_t kMostTop = 64;
constexpr int32_t kNothing = -1;  // in place of a top token
constexpr int64_t kBitsPerWord = 64;

double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

DecodeRun::DecodeRun(TsDecoder& decoder, TsKvCache& kv, TsRun& run)
    : decoder_(decoder),
      kv_(kv),
      run_(run),
      alone_(decoder.run_scratch().running),
      num_outputs_(decoder.num_outputs()),
      trees_(static_cast<size_t>(std::max<int64_t>(run.num_sequences, 0))),
      logits_(decoder.run_scratch().logits) {
    run.num_steps = run.num_trees = run.num_empty_trees = run.drafter_failed = 0;
    run.draft_seconds = 0.0;
    require(run.num_sequences >= 1, "a run of no sequence");
    require(run.vocab_size >= 1 && run.vocab_size <= num_outputs_, "vocab_size is ", run.vocab_size);
    require(run.choose != nullptr, "nobody chooses where logits do not tell");
    require(run.costs.num_stairs >= 1 && run.costs.rows[0] >= 1, "a cost table is empty or begins below one row");
    require(run.top_tokens >= 0 && run.top_tokens <= std::min<int64_t>(kMostTop, run.vocab_size), "top_tokens is ",
            run.top_tokens);
    for (size_t s = 0; s < size(); ++s) {
        TsRunSequence& each = sequence(s);
        each.num_emitted = each.num_read = each.has_ended = each.has_failed = 0;
        require(each.num_tokens >= 1 && each.tokens_left >= 1, "sequence ", s, " has no root or nothing to emit");
        require(each.num_unread >= 0 && each.num_unread <= each.num_tokens, "sequence ", s, " has ", each.num_unread,
                " unread tokens of ", each.num_tokens);
        for (int32_t i = 0; i < each.num_unread; ++i)
            require_index("an unread token of sequence", static_cast<int64_t>(s), each.unread[i], run.vocab_size);
        require(each.num_unread == 0 || each.unread[each.num_unread - 1] == each.root, "sequence ", s,
                " has another root than its last unread token");
        require(each.most_nodes >= 0, "sequence ", s, " has trees of ", each.most_nodes, " nodes");
        require(each.temperature == 0.0 || can_draw_at(each.temperature), "sequence ", s, " has temperature ",
                each.temperature);
        require_index("the root of sequence", static_cast<int64_t>(s), each.root, run.vocab_size);
        for (int32_t i = 0; i < each.num_blocks; ++i)
            require_index("a block of sequence", static_cast<int64_t>(s), each.block_table[i], kv.num_blocks());
        require(each.num_unread == 0 || run.unread_rows > 0, "sequence ", s, " has unread tokens, and no step computes any");
        blocks_per_sequence_ = std::max<int64_t>(blocks_per_sequence_, each.num_blocks);
        trees_[s].nodes.assign(1, 0);
        if (!reads(s)) decoding_.push_back(s);
    }
    const auto roots = static_cast<int64_t>(decoding_.size());
    require(run.unread_rows >= 0 && run.step_rows - roots >= run.unread_rows, roots, " roots and ", run.unread_rows,
            " unread tokens in steps of ", run.step_rows, " rows");
    room_ = run.step_rows - roots - run.unread_rows;
    block_tables_.assign(size() * static_cast<size_t>(blocks_per_sequence_), -1);
    for (size_t s = 0; s < size(); ++s)
        std::copy_n(sequence(s).block_table, sequence(s).num_blocks,
                    block_tables_.begin() + static_cast<int64_t>(s) * blocks_per_sequence_);
}

void DecodeRun::go() {
    while (run_.num_steps < run_.max_steps && may_go_on() && has_room() && step()) {
    }
}

bool DecodeRun::may_go_on() const {
    return !__atomic_load_n(run_.stop, __ATOMIC_RELAXED) && seconds_since(began_) < run_.max_seconds;
}

// KV positions, before the present step.
int64_t DecodeRun::computed(size_t s) const {
    const TsRunSequence& each = sequence(s);
    return each.num_tokens - (reads(s) ? each.num_unread - each.num_read : 1);
}

// Positions beyond the next one; negative if there is none for that.
int64_t DecodeRun::kv_room(size_t s) const { return sequence(s).num_blocks * kv_.block_size() - computed(s) - 1; }

int64_t DecodeRun::slot(const TsRunSequence& each, int64_t position) const {
    const int64_t size = kv_.block_size();
    return each.block_table[position / size] * size + position % size;
}

bool DecodeRun::has_room() const {
    for (size_t s = 0; s < size(); ++s)
        if (kv_room(s) < 0) return false;
    return true;
}

// False if the run is to end.
bool DecodeRun::step() {
    const Clock::time_point began = Clock::now();
    TsRunStep& step = run_.steps[run_.num_steps];
    TsRunRecord* records = run_.records + run_.num_steps * run_.num_sequences;
    if (!draft()) return false;
    choose_nodes();
    choose_unread();
    lay_out();
    forward(step);
    bool goes_on = true;
    for (size_t s = 0; s < size(); ++s) {
        accept(s, records[s]);
        goes_on &= !sequence(s).has_ended && !sequence(s).has_failed;
        goes_on &= !reads(s) || sequence(s).num_read < sequence(s).num_unread;
    }
    if (!moved_from_.empty()) kv_.move(static_cast<int64_t>(moved_from_.size()), moved_from_.data(), moved_to_.data());
    ++run_.num_steps;
    const Clock::time_point decided = Clock::now();
    for (size_t s = 0; s < size() && !run_.drafter_failed; ++s) run_.drafter_failed = !tell_drafter(s, records[s]);
    if (run_.drafter != nullptr && !run_.drafter_failed)
        run_.drafter_failed = run_.drafter->learn(run_.drafter->drafter) != 0;
    run_.draft_seconds += seconds_since(decided);
    step.step_ms = 1e3 * seconds_since(began);
    for (size_t s = 0; s < size(); ++s) sequence(s).slack_ms -= step.step_ms;
    return goes_on && !run_.drafter_failed;
}

bool DecodeRun::draft() {
    const Clock::time_point began = Clock::now();
    for (size_t s = 0; s < size(); ++s) {
        if (!draft_tree(s)) {
            run_.drafter_failed = 1;
            return false;
        }
        rank(s);
    }
    run_.draft_seconds += seconds_since(began);
    return true;
}

bool DecodeRun::draft_tree(size_t s) {
    const TsRunSequence& each = sequence(s);
    TsDraftTree& drafted = trees_[s].drafted;
    static constexpr int32_t kNoParent = -1;
    drafted = {&each.root, &kNoParent, nullptr, nullptr, 1, each.num_tokens};
    if (run_.drafter == nullptr || each.handle < 0 || each.tokens_left <= 1 || reads(s)) return true;
    const double pays = std::ceil(2.0 * each.verified) + kSpareNodes;
    const auto most = static_cast<int32_t>(std::min<int64_t>(each.most_nodes, kv_room(s)));
    const int32_t budget = pays < most ? static_cast<int32_t>(pays) : most;
    if (budget < 1) return true;
    const TsDrafterCalls& calls = *run_.drafter;
    if (calls.draft(calls.drafter, each.handle, budget, run_.node_price, &drafted) != 0) return false;
    ++run_.num_trees;
    run_.num_empty_trees += drafted.num_nodes == 1;
    return drafted.num_nodes >= 1 && drafted.num_nodes <= budget + 1 && drafted.base_len == each.num_tokens &&
           drafted.token_ids[0] == each.root;
}

// Orders the nodes that may be verified, and what is expected of each.
void DecodeRun::rank(size_t s) {
    const TsRunSequence& each = sequence(s);
    Tree& tree = trees_[s];
    const int32_t n = tree.drafted.num_nodes;
    tree.depths.assign(1, 0);
    tree.paths.assign(1, 0.0);
    tree.ranked.clear();
    for (int32_t i = 1; i < n; ++i) {
        const int32_t parent = tree.drafted.parents[i];
        require_index("the parent of node", i, parent, i);
        require_index("the token of node", i, tree.drafted.token_ids[i], run_.vocab_size);
        require(tree.drafted.log_probs[i] <= 0.0, "the log-probability of node ", i, " is ", tree.drafted.log_probs[i]);
        tree.depths.push_back(tree.depths[parent] + 1);
        tree.paths.push_back(tree.paths[parent] + tree.drafted.log_probs[i]);
        if (tree.depths[i] < each.tokens_left) tree.ranked.push_back(i);
    }
    const auto value = [&](int32_t i) { return std::min(1.0, each.calibration * std::exp(tree.paths[i])); };
    std::sort(tree.ranked.begin(), tree.ranked.end(), [&](int32_t a, int32_t b) {
        if (const double x = value(a), y = value(b); x != y) return x > y;
        if (tree.depths[a] != tree.depths[b]) return tree.depths[a] < tree.depths[b];
        return tree.paths[a] != tree.paths[b] ? tree.paths[a] > tree.paths[b] : a < b;
    });
    tree.accepted.clear();
    tree.ranked_depths.clear();
    for (const int32_t i : tree.ranked) {
        tree.accepted.push_back(value(i));
        tree.ranked_depths.push_back(tree.depths[i]);
    }
}

void DecodeRun::choose_nodes() {
    offers_.clear();
    for (const size_t s : decoding_) {
        const TsRunSequence& each = sequence(s);
        const Tree& tree = trees_[s];
        offers_.push_back({static_cast<int64_t>(tree.ranked.size()), tree.accepted.data(), tree.ranked_depths.data(),
                           each.slack_ms, each.token_ms, each.reserve_ms, each.tokens_left});
    }
    if (!offers_.empty()) choice_.choose(run_.costs, offers_, room_);
    for (size_t i = 0; i < decoding_.size(); ++i) {
        Tree& tree = trees_[decoding_[i]];
        tree.nodes.assign(tree.ranked.begin(), tree.ranked.begin() + choice_.counts()[i]);
        tree.nodes.push_back(0);
        std::sort(tree.nodes.begin(), tree.nodes.end());
        tree.expected = choice_.expected()[i];
    }
}

// A step that verifies draft nodes should take no longer for them.
void DecodeRun::choose_unread() {
    int64_t nodes = 0;
    for (const Tree& tree : trees_) nodes += static_cast<int64_t>(tree.nodes.size()) - 1;
    int64_t left = std::max((run_.unread_rows + 1) / 2, run_.unread_rows - nodes);
    for (size_t s = 0; s < size(); ++s) {
        const TsRunSequence& each = sequence(s);
        trees_[s].unread = static_cast<int32_t>(
            reads(s) ? std::min({int64_t{each.num_unread - each.num_read}, kv_room(s) + 1, left}) : 0);
        left -= trees_[s].unread;
    }
}

// Rows of all sequences side by side.
void DecodeRun::lay_out() {
    size_t widest = 0;
    for (const Tree& tree : trees_) widest = std::max({widest, tree.nodes.size(), static_cast<size_t>(tree.unread)});
    words_per_row_ = (static_cast<int64_t>(widest) + kBitsPerWord - 1) / kBitsPerWord;
    for (std::vector<int64_t>* rows : {&input_ids_, &positions_, &slots_, &logits_indices_}) rows->clear();
    contexts_.clear();
    words_.clear();
    query_offsets_.assign(1, 0);
    node_offsets_.assign(size(), 0);
    for (size_t s = 0; s < size(); ++s) {
        Tree& tree = trees_[s];
        tree.first_row = static_cast<int64_t>(input_ids_.size());
        tree.first_logits = static_cast<int64_t>(logits_indices_.size());
        contexts_.push_back(static_cast<int32_t>(computed(s)));
        reads(s) ? fill_unread(s) : fill_rows(s);
        query_offsets_.push_back(static_cast<int32_t>(input_ids_.size()));
    }
}

void DecodeRun::fill_rows(size_t s) {
    Tree& tree = trees_[s];
    tree.parents.clear();
    for (size_t row = 0; row < tree.nodes.size(); ++row) {
        const int32_t node = tree.nodes[row];
        const auto parent = std::lower_bound(tree.nodes.begin(), tree.nodes.end(), tree.drafted.parents[node]);
        tree.parents.push_back(row == 0 ? -1 : static_cast<int32_t>(parent - tree.nodes.begin()));
        logits_indices_.push_back(add_row(s, tree.drafted.token_ids[node], computed(s) + tree.depths[node],
                                          static_cast<int64_t>(row), tree.parents.back()));
    }
}

// Those that this step computes: a chain. The last of all has logits.
void DecodeRun::fill_unread(size_t s) {
    const TsRunSequence& each = sequence(s);
    for (int64_t row = 0; row < trees_[s].unread; ++row) {
        const int64_t at = add_row(s, each.unread[each.num_read + row], computed(s) + row, row, row - 1);
        if (each.num_read + row + 1 == each.num_unread) logits_indices_.push_back(at);
    }
}

// A row of sequence s, under another of its rows; returns its place in the batch.
int64_t DecodeRun::add_row(size_t s, int32_t token, int64_t position, int64_t row, int64_t parent) {
    input_ids_.push_back(token);
    positions_.push_back(position);
    slots_.push_back(slot(sequence(s), computed(s) + row));
    const size_t words = words_.size();
    words_.resize(words + static_cast<size_t>(words_per_row_), 0);
    if (parent >= 0) {
        const int64_t above = (trees_[s].first_row + parent) * words_per_row_;
        std::copy_n(words_.begin() + above, words_per_row_, words_.begin() + static_cast<int64_t>(words));
    }
    words_[words + static_cast<size_t>(row / kBitsPerWord)] |= uint64_t{1} << row % kBitsPerWord;
    return static_cast<int64_t>(input_ids_.size()) - 1;
}

void DecodeRun::forward(TsRunStep& step) {
    const auto rows = static_cast<int64_t>(input_ids_.size()), with_logits = static_cast<int64_t>(logits_indices_.size());
    step.rows = static_cast<int32_t>(rows);
    step.prefill_rows = static_cast<int32_t>(rows - with_logits);
    step.attended = 0.0;
    for (size_t s = 0; s < size(); ++s) {
        const TsRunSequence& each = sequence(s);
        const bool is_last = reads(s) && each.num_read + trees_[s].unread == each.num_unread;
        const int32_t prefilled = trees_[s].unread - (is_last ? 1 : 0);
        step.attended += prefilled * (static_cast<double>(computed(s)) + prefilled / 2.0);
    }
    TsBatch batch{};
    batch.num_rows = rows;
    batch.num_logits = with_logits;
    batch.num_sequences = run_.num_sequences;
    batch.blocks_per_sequence = blocks_per_sequence_;
    batch.words_per_row = words_per_row_;
    batch.block_size = kv_.block_size();
    batch.input_ids = input_ids_.data();
    batch.positions = positions_.data();
    batch.slot_mapping = slots_.data();
    batch.block_tables = block_tables_.data();
    batch.context_lens = contexts_.data();
    batch.query_offsets = query_offsets_.data();
    batch.node_offsets = node_offsets_.data();
    batch.ancestor_words = words_.data();
    batch.logits_indices = logits_indices_.data();
    logits_.reserve(with_logits * num_outputs_);
    const Clock::time_point began = Clock::now();
    decoder_.forward(kv_, batch, {logits_.data(), nullptr, nullptr});
    step.forward_ms = 1e3 * seconds_since(began);
    moved_from_.clear();
    moved_to_.clear();
}

void DecodeRun::accept(size_t s, TsRunRecord& record) {
    TsRunSequence& each = sequence(s);
    Tree& tree = trees_[s];
    const auto rows = static_cast<int32_t>(tree.nodes.size());
    record = {tree.drafted.num_nodes - 1, rows - 1, 0, 0};
    tree.walk.clear();
    tree.top.clear();
    each.num_read += tree.unread;
    if (each.num_read < each.num_unread) return;
    const bool tells_top = run_.drafter != nullptr && each.handle >= 0 && run_.top_tokens > 0;
    int32_t row = 0;
    while (row >= 0 && !each.has_ended) {
        int32_t top[kMostTop];
        const int32_t token = choose_token(s, tree.first_logits + row, record.emitted, top);
        if (token < 0) {
            each.has_failed = 1;
            break;
        }
        if (tells_top) tree.top.insert(tree.top.end(), top, top + run_.top_tokens);
        tree.walk.push_back(row);
        each.token_ids[each.num_emitted + record.emitted++] = token;
        each.has_ended |= record.emitted == each.tokens_left;
        int32_t child = row + 1;
        while (child < rows && !(tree.parents[child] == row && tree.drafted.token_ids[tree.nodes[child]] == token))
            ++child;
        row = child < rows ? child : -1;
        if (row < 0) break;
        ++record.accepted;
        if (tree.drafted.masks == nullptr) continue;
        for (uint32_t mask = tree.drafted.masks[tree.nodes[row]]; mask; mask &= mask - 1)
            ++run_.accepted_by_source[__builtin_ctz(mask)];
    }
    learn_acceptance(s, record, tree.expected);
    keep(s);
    if (record.emitted == 0) return;
    each.num_emitted += record.emitted;
    each.num_tokens += record.emitted;
    each.tokens_left -= record.emitted;
    each.root = each.token_ids[each.num_emitted - 1];
    if (each.token_ms < std::numeric_limits<double>::infinity()) each.slack_ms += record.emitted * each.token_ms;
}

// The token after a row with logits of sequence s, which emitted `emitted` tokens in this step; negative if there is
// none.
int32_t DecodeRun::choose_token(size_t s, int64_t row, int32_t emitted, int32_t* top) {
    TsRunSequence& each = sequence(s);
    const float* logits = logits_.data() + row * num_outputs_;
    const Kernels& kernels = decoder_.kernels();
    int64_t largest[kMostTop];
    const bool is_finite = find_largest(kernels, run_.vocab_size, logits, std::max(run_.top_tokens, 1), largest);
    std::copy_n(largest, is_finite ? run_.top_tokens : 0, top);
    std::fill(top + (is_finite ? run_.top_tokens : 0), top + run_.top_tokens, kNothing);
    int64_t token = largest[0];
    bool is_decided = is_finite && !each.asks;
    if (is_decided && each.temperature != 0.0) {
        rivals_.resize(static_cast<size_t>(run_.vocab_size));
        const Draw draw{run_.vocab_size, logits, nullptr, each.temperature, each.seed, each.num_tokens + emitted};
        is_decided = find_rivals(kernels, draw, rivals_.data()) == 1;
        token = rivals_[0];
    }
    if (!is_decided) {
        const int32_t asked = run_.choose(static_cast<int64_t>(s), each.token_ids, each.num_emitted + emitted, logits,
                                          &each.has_ended);
        return asked < run_.vocab_size ? asked : -1;
    }
    const int32_t* end = each.end_ids + each.num_end_ids;
    each.has_ended = std::find(each.end_ids, end, token) != end;
    return static_cast<int32_t>(token);
}

// What the verifier learns of a step: calibration.py.
void DecodeRun::learn_acceptance(size_t s, const TsRunRecord& record, double expected) {
    if (record.emitted == 0) return;
    TsRunSequence& each = sequence(s);
    const Tree& tree = trees_[s];
    if (record.offered) each.verified += kVerifiedSmoothing * (record.verified - each.verified);
    double accepted = record.accepted;
    if (expected == 0.0) {
        if (!record.offered || record.verified) {
            each.calibration += kForgiveness * (1.0 - each.calibration);
            return;
        }
        // Nothing was tried: the emitted token judges the first level.
        double first_level = 0.0;
        accepted = 0.0;
        for (int32_t i = 1; i < tree.drafted.num_nodes; ++i) {
            if (tree.drafted.parents[i] != 0) continue;
            first_level += std::exp(tree.paths[i]);
            if (tree.drafted.token_ids[i] == each.token_ids[each.num_emitted]) accepted = 1.0;
        }
        expected = each.calibration * first_level;
    }
    const double ratio = std::min((accepted + 0.5) / (expected + 0.5), 2.0);
    each.calibration *= 1.0 + kCalibrationSmoothing * (ratio - 1.0);
    run_.prior += kPriorSmoothing * (each.calibration - run_.prior);
}

// Brings the KV of the walked rows together.
void DecodeRun::keep(size_t s) {
    const TsRunSequence& each = sequence(s);
    const Tree& tree = trees_[s];
    const int64_t context = each.num_tokens - 1;
    for (size_t i = 0; i < tree.walk.size(); ++i) {
        if (tree.walk[i] == static_cast<int32_t>(i)) continue;
        moved_from_.push_back(slots_[static_cast<size_t>(tree.first_row) + static_cast<size_t>(tree.walk[i])]);
        moved_to_.push_back(slot(each, context + static_cast<int64_t>(i)));
    }
}

bool DecodeRun::tell_drafter(size_t s, const TsRunRecord& record) {
    const TsRunSequence& each = sequence(s);
    if (run_.drafter == nullptr || each.handle < 0 || record.emitted == 0) return true;
    const TsDrafterCalls& calls = *run_.drafter;
    const int32_t base_len = each.num_tokens - record.emitted;
    const int32_t* token_ids = each.token_ids + each.num_emitted - record.emitted;
    if (calls.commit(calls.drafter, each.handle, base_len, token_ids, record.emitted) != 0) return false;
    if (run_.top_tokens == 0) return true;
    return calls.remember(calls.drafter, each.handle, base_len, trees_[s].top.data(), record.emitted,
                          run_.top_tokens) == 0;
}

}  // namespace treeserve
