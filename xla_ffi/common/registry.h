// Which local device is which rank of which domain: (domain id, device number) -> rank. One per backend and process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace moonep {

template <class Rank>
class Registry {
 public:
  // Never destroyed: handlers may still be asked for a domain when the process exits.
  static Registry& Get() {
    static Registry* registry = new Registry();
    return *registry;
  }

  // False if the device is already a rank of this domain.
  bool Add(int64_t domain, int64_t device, std::shared_ptr<Rank> rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ranks_.emplace(std::make_pair(domain, device), std::move(rank)).second;
  }

  // Null if this process has not set up the domain, or has closed it.
  std::shared_ptr<Rank> Find(int64_t domain, int64_t device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = ranks_.find({domain, device});
    return it == ranks_.end() ? nullptr : it->second;
  }

  std::vector<std::shared_ptr<Rank>> RanksOf(int64_t domain) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Rank>> found;
    for (const auto& [key, rank] : ranks_) {
      if (key.first == domain) found.push_back(rank);
    }
    return found;
  }

  void Remove(int64_t domain) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = ranks_.begin(); it != ranks_.end();) {
      it = it->first.first == domain ? ranks_.erase(it) : std::next(it);
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Rank>> ranks_;
};

}  // namespace moonep
