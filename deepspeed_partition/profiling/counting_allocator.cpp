// An allocator under torch's CPU tensors that counts bytes and refuses those beyond a limit.
//
// It wraps the allocator that torch has, so memory, alignment and torch's own reports stay as they were. Sizes
// stand in a table by address: memory has no header, and what was allocated by the wrapped allocator can be freed by
// this one. Functions for Python have C names, so that they need no binding but ctypes.

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace {

struct Allocation {
  size_t size;
  uint64_t number;
  pthread_t thread;
};

// What one counter sees: allocations from number `first` on, until they are freed.
struct Counter {
  uint64_t first;
  int64_t current;
  int64_t peak;
  int64_t limit;  // -1: none
  bool of_one_thread;
  pthread_t thread;

  bool sees(const Allocation& allocation) const {
    return allocation.number >= first && (!of_one_thread || pthread_equal(allocation.thread, thread));
  }
};

// Never destroyed: tensors are freed while the process exits, too.
std::mutex& mutex = *new std::mutex;
auto& allocations = *new std::unordered_map<void*, Allocation>;
auto& counters = *new std::list<Counter>;  // a list: the address of a counter is its handle
uint64_t next_number = 0;
c10::Allocator* wrapped = nullptr;
c10::DeleterFnPtr wrapped_deleter = nullptr;

// The allocation is in no table yet: so count it first, for two threads must not share the last room.
Allocation count(size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  const Allocation allocation{size, next_number, pthread_self()};
  const auto bytes = static_cast<int64_t>(size);
  for (const Counter& counter : counters) {
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        counter.limit < 0 || !counter.sees(allocation) || counter.current + bytes <= counter.limit,
        "the limit of this process's memory for tensors is reached: ", size, " bytes were asked for, ",
        counter.current, " bytes are in use, and the limit is ", counter.limit, " bytes");
  }
  for (Counter& counter : counters) {
    if (counter.sees(allocation)) {
      counter.current += bytes;
      counter.peak = std::max(counter.peak, counter.current);
    }
  }
  ++next_number;
  return allocation;
}

// The caller holds the mutex.
void discount(const Allocation& allocation) {
  for (Counter& counter : counters) {
    if (counter.sees(allocation)) {
      counter.current -= static_cast<int64_t>(allocation.size);
    }
  }
}

void free_counted(void* address) {
  {
    // Before the memory is free: afterwards another thread may get the same address.
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(address);
    if (found != allocations.end()) {
      discount(found->second);
      allocations.erase(found);
    }
  }
  wrapped_deleter(address);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return wrapped->allocate(0);
    }
    const Allocation allocation = count(size);
    try {
      c10::DataPtr made = wrapped->allocate(size);
      // The wrapped allocator has a raw deleter: its context is the address itself.
      TORCH_CHECK(
          made.compare_exchange_deleter(wrapped_deleter, &free_counted),
          "torch's allocator for the CPU has changed how it frees memory");
      std::lock_guard<std::mutex> lock(mutex);
      allocations[made.get()] = allocation;
      return made;
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      discount(allocation);
      throw;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_counted;
  }

  void copy_data(void* destination, const void* source, size_t size) const override {
    wrapped->copy_data(destination, source, size);
  }
};

CountingAllocator& counting = *new CountingAllocator;

// Above every allocator that torch's libraries register.
constexpr uint8_t PRIORITY = 255;

}  // namespace

extern "C" {

// Begin a counter: of what is allocated from now on, perhaps by this thread alone, or, with a `parent`, of what that
// one counts. Null: the allocator that torch has cannot be wrapped.
void* madpipe_open(const void* parent, bool of_one_thread) {
  std::lock_guard<std::mutex> lock(mutex);
  if (wrapped == nullptr) {
    c10::Allocator* present = c10::GetCPUAllocator();
    if (present->raw_deleter() == nullptr) {
      return nullptr;
    }
    wrapped = present;
    wrapped_deleter = present->raw_deleter();
    // A fork while another thread holds the mutex would leave it locked in the child for ever.
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  }
  if (counters.empty()) {
    c10::SetCPUAllocator(&counting, PRIORITY);
  }
  if (parent == nullptr) {
    counters.push_back({next_number, 0, 0, -1, of_one_thread, pthread_self()});
  } else {
    const auto& outer = *static_cast<const Counter*>(parent);
    counters.push_back({outer.first, outer.current, outer.current, -1, outer.of_one_thread, outer.thread});
  }
  return &counters.back();
}

// End a counter. With the last one torch has its own allocator again; memory from this one can still be freed.
void madpipe_close(const void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  counters.remove_if([handle](const Counter& counter) { return &counter == handle; });
  if (counters.empty() && c10::GetCPUAllocator() == &counting) {
    c10::SetCPUAllocator(wrapped, PRIORITY);
  }
}

int64_t madpipe_current(const void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<const Counter*>(handle)->current;
}

int64_t madpipe_peak(const void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  return static_cast<const Counter*>(handle)->peak;
}

void madpipe_reset_peak(void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto& counter = *static_cast<Counter*>(handle);
  counter.peak = counter.current;
}

void madpipe_limit(void* handle, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  static_cast<Counter*>(handle)->limit = bytes;
}

}  // extern "C"
