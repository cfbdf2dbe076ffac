#include "drafter.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

using namespace treeserve;

namespace {

constexpr int32_t kTableDepth = 8;

// Adds the time that it lives to a source's.
class Timed {
  public:
    explicit Timed(TsSourceCounts& counts) : counts_(counts) {}
    ~Timed() { counts_.seconds += std::chrono::duration<double>(Clock::now() - began_).count(); }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

  private:
    using Clock = std::chrono::steady_clock;
    TsSourceCounts& counts_;
    Clock::time_point began_ = Clock::now();
};

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_table(const TsNgramTable& table, Token vocab_size) {
    require(table.max_order >= 0, "the table's order");
    require(table.token_bytes == 1 || table.token_bytes == 2 || table.token_bytes == 4, "the table's token type");
    require(table.num_buckets >= 1 && table.num_contexts >= 0 && table.num_entries >= 0, "the table's sizes");
    for (int64_t bucket = 0; bucket < table.num_buckets; ++bucket) {
        const uint32_t first = table.first_context[bucket], last = table.first_context[bucket + 1];
        require(first <= last && last <= table.num_contexts, "the table's buckets");
        int64_t end = table.first_token[bucket];
        for (uint32_t context = first; context < last; ++context) end += table.lengths[context];
        require(end <= table.num_entries, "the table's entries");
    }
    for (int64_t entry = 0; entry < table.num_entries; ++entry) {
        const Token token = NgramTableSource::token_id(table, entry);
        require(token >= 0 && token < vocab_size, "a token of the table");
    }
}

}  // namespace

TsDrafter::TsDrafter(const TsDraftingConfig& config)
    : eos_(config.eos, config.eos + std::max(config.num_eos, 0)),
      vocab_size_(config.vocab_size),
      max_nodes_(config.max_nodes),
      max_depth_(config.max_depth),
      suffix_(config.max_shared_nodes),
      recycling_(config.vocab_size, config.max_shared_rows),
      mixture_(eos_) {
    require(config.num_sources >= 1 && config.num_sources <= kMaxSources, "one to four sources");
    require(config.num_eos >= 0, "the number of end-of-sequence tokens");
    require(config.vocab_size >= 1 && config.max_nodes >= 1 && config.max_depth >= 1, "sizes are above 0");
    counts_.resize(config.num_sources);
    require(config.max_shared_nodes >= 0 && config.max_shared_rows >= 0, "a bound below 0");
    for (int32_t i = 0; i < config.num_sources; ++i) {
        require(config.sources[i] >= TS_NGRAM && config.sources[i] <= TS_NGRAM_TABLE, "an unknown source");
        const auto source = static_cast<TsSource>(config.sources[i]);
        require(std::find(sources_.begin(), sources_.end(), source) == sources_.end(), "a source named twice");
        sources_.push_back(source);
        if (source != TS_NGRAM_TABLE) continue;
        require(config.table != nullptr, "a table is missing");
        check_table(*config.table, config.vocab_size);
        table_.emplace(*config.table, std::min(kTableDepth, config.max_depth), eos_);
    }
}

const std::shared_ptr<TsDrafter::Sequence>& TsDrafter::find(int64_t handle) const {
    const auto found = sequences_.find(handle);
    require(found != sequences_.end(), "an unknown handle");
    return found->second;
}

void TsDrafter::check_tokens(const int32_t* token_ids, int32_t count) const {
    for (int32_t i = 0; i < count; ++i) require(token_ids[i] >= 0 && token_ids[i] < vocab_size_, "a token id");
}

void TsDrafter::assign(int64_t handle, const TsDraftSequence& given) {
    require(given.num_tokens >= 1, "a sequence without tokens");
    require(given.prompt_len >= 0, "a prompt's length");
    require(!sequences_.contains(handle), "a handle assigned twice");
    check_tokens(given.token_ids, given.num_tokens);
    auto made = std::make_shared<Sequence>();
    made->prompt_len = given.prompt_len;
    made->sampling = {given.temperature, given.seed};
    made->asks_table = given.asks_table != 0;
    made->tenant = given.tenant;
    made->seen.resize(vocab_size_);
    made->mixed.is_greedy = given.temperature == 0.0;
    made->drafted = blank();
    made->tokens.assign(given.token_ids, given.token_ids + given.num_tokens);
    for (const Token token : made->tokens) made->seen[token] = true;
    for (size_t i = 0; i < sources_.size(); ++i) {
        const Timed timed(counts_[i]);
        if (sources_[i] == TS_NGRAM) made->ngrams.update(made->tokens);
        if (sources_[i] == TS_SUFFIX) suffix_.open(made->suffixes, made->tokens);
    }
    sequences_[handle] = std::move(made);
}

void TsDrafter::commit(int64_t handle, int32_t base_len, const int32_t* token_ids, int32_t count) {
    const std::shared_ptr<Sequence>& found = find(handle);
    Sequence& sequence = *found;
    require(base_len == static_cast<int32_t>(sequence.tokens.size()), "a commit that does not follow what is known");
    check_tokens(token_ids, count);
    if (count == 0) return;
    Drafted& drafted = *sequence.drafted;
    if (drafted.opinions.count > 0) {
        lessons_.push_back({found, sequence.drafted, !drafted.is_followed, {token_ids, token_ids + count}});
        drafted.is_followed = true;
    }
    sequence.tokens.insert(sequence.tokens.end(), token_ids, token_ids + count);
    for (int32_t i = 0; i < count; ++i) sequence.seen[token_ids[i]] = true;
    for (size_t i = 0; i < sources_.size(); ++i) {
        const Timed timed(counts_[i]);
        if (sources_[i] == TS_NGRAM) sequence.ngrams.update(sequence.tokens);
        if (sources_[i] == TS_SUFFIX) suffix_.commit(sequence.suffixes, token_ids, count);
    }
}

void TsDrafter::release(int64_t handle) {
    const Sequence& sequence = *find(handle);
    for (size_t i = 0; i < sources_.size(); ++i) {
        if (sources_[i] != TS_SUFFIX) continue;
        const Timed timed(counts_[i]);
        suffix_.close(sequence.tokens, sequence.prompt_len, sequence.tenant);
    }
    sequences_.erase(handle);
}

void TsDrafter::remember(int64_t handle, int32_t position, const int32_t* top, int32_t rows, int32_t width) {
    Sequence& sequence = *find(handle);
    const auto end = static_cast<int64_t>(sequence.tokens.size());
    require(position >= 0 && rows >= 0 && width >= 0 && position + int64_t{rows} <= end, "top tokens in place of none");
    for (int64_t i = 0; i < int64_t{rows} * width; ++i) require(top[i] >= -1, "a top token's id");
    const auto recycling = std::find(sources_.begin(), sources_.end(), TS_RECYCLING);
    if (recycling == sources_.end()) return;
    const Timed timed(counts_[recycling - sources_.begin()]);
    for (int32_t row = 0; row < rows; ++row, top += width) {
        const auto count = static_cast<int32_t>(std::find(top, top + width, -1) - top);
        if (position + row > 0 && count > 0)
            recycling_.remember(sequence.tokens[position + row - 1], top, count, sequence.tenant, sequence.recycled);
    }
}

TsDraftTree TsDrafter::draft(int64_t handle, int32_t budget, double node_price) {
    Sequence& sequence = *find(handle);
    if (sequence.drafted.use_count() > 1) sequence.drafted = blank();  // the last one is yet to be learnt from
    Opinions& opinions = sequence.drafted->opinions;
    MixedTree& tree = sequence.drafted->tree;
    budget = std::min(budget, max_nodes_);
    opinions.count = 0;
    for (size_t i = 0; i < sources_.size(); ++i) {
        const Timed timed(counts_[i]);
        Opinion& opinion = opinions.all[opinions.count];
        if (!propose(sources_[i], sequence, budget, node_price, opinion.tree)) continue;
        opinion.source = static_cast<int>(i);
        opinion.weigh();
        ++opinions.count;
    }
    opinions.begin();
    sequence.drafted->is_followed = false;
    mixture_.mix(sequence.mixed, opinions, sequence.tokens.back(), {budget, max_depth_, node_price}, tree);
    for (const uint32_t mask : tree.masks)
        for (size_t i = 0; i < sources_.size(); ++i) counts_[i].nodes += mask >> i & 1;
    return {tree.tokens.data(),   tree.parents.data(), tree.log_probs.data(),
            tree.masks.data(),    tree.size(),         static_cast<int32_t>(sequence.tokens.size())};
}

bool TsDrafter::propose(TsSource source, Sequence& sequence, int32_t budget, double node_price, TokenTree& tree) {
    switch (source) {
        case TS_NGRAM: return sequence.ngrams.propose(sequence.tokens, budget, tree);
        case TS_SUFFIX: return suffix_.propose(sequence.suffixes, sequence.tokens, sequence.tenant, budget, tree);
        case TS_RECYCLING:
            return recycling_.propose(sequence.tokens, sequence.tenant, sequence.recycled, budget, tree);
        case TS_NGRAM_TABLE:  // other sources may agree with what alone would not pay
            return sequence.asks_table && table_->propose(sequence.tokens, sequence.seen, sequence.sampling,
                                                          node_price / 2.0, budget, tree);
    }
    return false;
}

void TsDrafter::learn() {
    for (auto& [sequence, drafted, is_first, tokens] : lessons_) {
        mixture_.learn(sequence->mixed, drafted->opinions, tokens);
        if (is_first) count_visits(drafted->tree, tokens);
        if (drafted.use_count() == 1) spare_.push_back(std::move(drafted));
    }
    lessons_.clear();
}

std::shared_ptr<TsDrafter::Drafted> TsDrafter::blank() {
    if (spare_.empty()) return std::make_shared<Drafted>();
    std::shared_ptr<Drafted> drafted = std::move(spare_.back());
    spare_.pop_back();
    drafted->opinions.count = 0;
    return drafted;
}

void TsDrafter::count_visits(const MixedTree& tree, const std::vector<Token>& tokens) {
    int32_t node = 0;
    for (const Token token : tokens) {
        uint32_t proposed = 0, right = 0;
        int32_t next = -1;
        for (int32_t child = node + 1; child < tree.size(); ++child) {
            if (tree.parents[child] != node) continue;
            proposed |= tree.masks[child];
            if (tree.tokens[child] != token) continue;
            next = child;
            right = tree.masks[child];
        }
        for (size_t i = 0; i < sources_.size(); ++i) {
            counts_[i].visits += proposed >> i & 1;
            counts_[i].right += right >> i & 1;
        }
        if (next < 0) return;
        node = next;
    }
}
