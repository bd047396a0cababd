// Completes promises on threads of their own.
//
// Completing an XLA promise runs the rest of the program inline, collectives included, so a completion may wait for
// another one: none may queue behind another, none may run on a progress thread, and no lock may be held. The pool
// starts a thread whenever none is idle; idle threads leave after a second, so that closed domains leave none behind.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace moonep {

class Completer {
 public:
  // Never destroyed: a detached thread may still run XLA code when the process exits.
  static Completer& Get() {
    static Completer* completer = new Completer();
    return *completer;
  }

  void Run(std::function<void()> completion) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.push_back(std::move(completion));
    if (idle_ >= work_.size()) {
      wake_.notify_one();
      return;
    }
    try {
      std::thread([this] { Loop(); }).detach();
    } catch (const std::system_error&) {
      // No thread to be had: better one completion behind another than none at all.
      completion = std::move(work_.back());
      work_.pop_back();
      lock.unlock();
      completion();
    }
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (work_.empty()) {
        ++idle_;
        const bool woken = wake_.wait_for(lock, std::chrono::seconds(1), [this] { return !work_.empty(); });
        --idle_;
        if (!woken) break;
      }
      {
        std::function<void()> completion = std::move(work_.front());
        work_.pop_front();
        lock.unlock();
        completion();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  size_t idle_ = 0;
};

}  // namespace moonep
