// What sequences leave behind for later ones: each tenant's for itself, bounded all together (sources/tenants.py).
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <utility>

namespace treeserve {

// A Memory has size(), add(item) and forget_oldest(), which is called only if there is something.
template <class Memory>
class TenantMemories {
  public:
    explicit TenantMemories(int64_t max_size) : max_size_(max_size) {}

    // The tenant's memory; null if it has none.
    Memory* find(const std::string& tenant) {
        const auto found = places_.find(tenant);
        if (found == places_.end()) return nullptr;
        memories_.splice(memories_.end(), memories_, found->second);
        return &found->second->second;
    }

    // Adds to the tenant's memory, and lets whoever was heard of longest ago forget what that takes.
    template <class Item>
    void add(const std::string& tenant, Item&& item) {
        if (tenant.empty()) return;
        Memory* memory = find(tenant);
        if (memory == nullptr) {
            places_[tenant] = memories_.emplace(memories_.end(), tenant, Memory());
            memory = &memories_.back().second;
        }
        size_ -= memory->size();
        memory->add(std::forward<Item>(item));
        size_ += memory->size();
        while (size_ > max_size_) forget();
    }

  private:
    void forget() {
        auto& [tenant, memory] = memories_.front();
        size_ -= memory.size();
        memory.forget_oldest();
        size_ += memory.size();
        if (memory.size() > 0) return;
        places_.erase(tenant);
        memories_.pop_front();
    }

    std::list<std::pair<std::string, Memory>> memories_;  // heard of longest ago first
    std::unordered_map<std::string, typename decltype(memories_)::iterator> places_;
    int64_t size_ = 0;
    int64_t max_size_;
};

}  // namespace treeserve
