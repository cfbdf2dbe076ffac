// The C interface: turns exceptions into statuses.
#include "api.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "cpu_features.h"
#include "decode_run.h"
#include "decoder.h"
#include "node_choice.h"
#include "rivals.h"

namespace {

thread_local std::string last_error;

template <class Function>
TsStatus guarded(Function function) {
    try {
        function();
        return TS_OK;
    } catch (const std::invalid_argument& error) {
        last_error = error.what();
        return TS_INVALID_ARGUMENT;
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
        return TS_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        last_error = error.what();
        return TS_INTERNAL;
    }
}

}  // namespace

int32_t ts_abi_version() { return TS_ABI_VERSION; }

const char* ts_last_error() { return last_error.c_str(); }

const char* ts_isas() {
    static const std::string names = [] {
        std::string joined;
        for (const treeserve::Kernels* kernels : treeserve::available_kernels()) {
            if (!joined.empty()) joined += ' ';
            joined += kernels->name;
        }
        return joined;
    }();
    return names.c_str();
}

TsStatus ts_decoder_create(const TsShape* shape, const TsWeights* weights, int32_t threads, const char* isa,
                           TsDecoder** decoder) {
    return guarded([&] { *decoder = new TsDecoder(*shape, *weights, threads, isa); });
}

void ts_decoder_destroy(TsDecoder* decoder) { delete decoder; }

TsStatus ts_decoder_forward(TsDecoder* decoder, TsKvCache* kv, const TsBatch* batch, const TsOutputs* outputs) {
    return guarded([&] { decoder->forward(*kv, *batch, *outputs); });
}

TsStatus ts_decode_run(TsDecoder* decoder, TsKvCache* kv, TsRun* run) {
    return guarded([&] { treeserve::DecodeRun(*decoder, *kv, *run).go(); });
}

TsStatus ts_choose_nodes(const TsCosts* costs, int64_t num_offers, const TsOffer* offers, int64_t room, int32_t* counts,
                         double* expected) {
    return guarded([&] {
        treeserve::NodeChoice choice;
        choice.choose(*costs, {offers, offers + num_offers}, room);
        std::copy(choice.counts().begin(), choice.counts().end(), counts);
        std::copy(choice.expected().begin(), choice.expected().end(), expected);
    });
}

TsStatus ts_kv_create(const TsShape* shape, int64_t num_blocks, int64_t block_size, TsKvType type, TsKvCache** kv) {
    return guarded([&] { *kv = new TsKvCache(*shape, num_blocks, block_size, type); });
}

void ts_kv_destroy(TsKvCache* kv) { delete kv; }

int64_t ts_kv_nbytes(const TsKvCache* kv) { return kv->nbytes(); }

int64_t ts_kv_block_nbytes(const TsKvCache* kv) { return kv->block_nbytes(); }

TsStatus ts_kv_move(TsKvCache* kv, int64_t count, const int64_t* src, const int64_t* dst) {
    return guarded([&] { kv->move(count, src, dst); });
}

TsStatus ts_kv_save(const TsKvCache* kv, int64_t block, char* data) {
    return guarded([&] { kv->save(block, data); });
}

TsStatus ts_kv_load(TsKvCache* kv, int64_t block, const char* data) {
    return guarded([&] { kv->load(block, data); });
}

TsStatus ts_linear_apply(const TsLinear* linear, const char* isa, int64_t rows, const float* x, float* y) {
    return guarded([&] { treeserve::apply_linear(*linear, treeserve::find_kernels(isa), rows, x, y); });
}

TsStatus ts_find_rivals(const char* isa, int64_t count, const float* values, const int64_t* ids, double temperature,
                        uint64_t seed, int64_t position, int64_t* rivals, int64_t* num_rivals) {
    return guarded([&] {
        const treeserve::Draw draw{count, values, ids, temperature, seed, position};
        *num_rivals = treeserve::find_rivals(treeserve::find_kernels(isa), draw, rivals);
    });
}

TsStatus ts_find_largest(const char* isa, int64_t count, const float* values, int64_t num, int64_t* largest,
                         int32_t* all_finite) {
    return guarded([&] {
        *all_finite = treeserve::find_largest(treeserve::find_kernels(isa), count, values, num, largest);
    });
}
