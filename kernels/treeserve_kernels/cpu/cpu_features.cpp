#include "cpu_features.h"

#include <stdexcept>
#include <string>

namespace treeserve {

const std::vector<const Kernels*>& available_kernels() {
    static const std::vector<const Kernels*> available = [] {
        std::vector<const Kernels*> found;
#if defined(__x86_64__)
        // These ask the operating system, too, whether it saves the wide registers.
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni")) {
            found.push_back(&kAvx512Kernels);
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2Kernels);
#endif
        found.push_back(&kPortableKernels);
        return found;
    }();
    return available;
}

const Kernels& find_kernels(std::string_view name) {
    std::string names;
    for (const Kernels* kernels : available_kernels()) {
        if (kernels->name == name) return *kernels;
        if (!names.empty()) names += ", ";
        names += kernels->name;
    }
    throw std::invalid_argument("this CPU does not run '" + std::string(name) + "' kernels (" + names + ")");
}

}  // namespace treeserve
