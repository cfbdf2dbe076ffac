// The C interface: turns exceptions into statuses.
#include "drafting.h"

#include <cstdio>
#include <exception>
#include <stdexcept>

#include "drafter.h"

namespace {

thread_local char last_error[256];

void note(const char* what) { std::snprintf(last_error, sizeof last_error, "%s", what); }

template <class Function>
TsDraftStatus guarded(Function function) {
    try {
        function();
        return TS_DRAFT_OK;
    } catch (const std::invalid_argument& error) {
        note(error.what());
        return TS_DRAFT_INVALID_ARGUMENT;
    } catch (const std::exception& error) {
        note(error.what());
        return TS_DRAFT_INTERNAL;
    }
}

template <class Function>
TsDraftStatus guarded(TsDrafter* drafter, Function function) {
    const std::lock_guard lock(drafter->busy);
    return guarded(function);
}

}  // namespace

int32_t ts_drafting_abi_version() { return TS_DRAFTING_ABI_VERSION; }

const char* ts_drafting_last_error() { return last_error; }

TsDraftStatus ts_drafter_create(const TsDraftingConfig* config, TsDrafter** drafter) {
    return guarded([&] { *drafter = new TsDrafter(*config); });
}

void ts_drafter_destroy(TsDrafter* drafter) { delete drafter; }

TsDraftStatus ts_drafter_assign(TsDrafter* drafter, int64_t handle, const TsDraftSequence* sequence) {
    return guarded(drafter, [&] { drafter->assign(handle, *sequence); });
}

TsDraftStatus ts_drafter_commit(TsDrafter* drafter, int64_t handle, int32_t base_len,
                                          const int32_t* token_ids, int32_t count) {
    return guarded(drafter, [&] { drafter->commit(handle, base_len, token_ids, count); });
}

TsDraftStatus ts_drafter_release(TsDrafter* drafter, int64_t handle) {
    return guarded(drafter, [&] { drafter->release(handle); });
}

TsDraftStatus ts_drafter_remember(TsDrafter* drafter, int64_t handle, int32_t position, const int32_t* top,
                                  int32_t rows, int32_t width) {
    return guarded(drafter, [&] { drafter->remember(handle, position, top, rows, width); });
}

TsDraftStatus ts_drafter_draft(TsDrafter* drafter, int64_t handle, int32_t budget, double node_price,
                               TsDraftTree* tree) {
    return guarded(drafter, [&] { *tree = drafter->draft(handle, budget, node_price); });
}

TsDraftStatus ts_drafter_learn(TsDrafter* drafter) {
    return guarded(drafter, [&] { drafter->learn(); });
}

void ts_drafter_counts(TsDrafter* drafter, TsSourceCounts* counts) {
    const std::lock_guard lock(drafter->busy);
    for (const TsSourceCounts& count : drafter->counts()) *counts++ = count;
}
