// Which kernels this CPU can run.
#pragma once

#include <string_view>
#include <vector>

#include "kernels.h"

namespace treeserve {

// Best first; never empty.
const std::vector<const Kernels*>& available_kernels();

// Throws std::invalid_argument if there are no such kernels or this CPU cannot run them.
const Kernels& find_kernels(std::string_view name);

}  // namespace treeserve
