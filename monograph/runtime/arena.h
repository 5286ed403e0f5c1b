// Memory for the tensors of a step that takes and gives back the same blocks each time: one piece for all of them, in which each
// block has its place. The first run is watched; then places are found, by the best of some orders, so that blocks which live
// at the same time do not meet. A later run gets them as long as it does what that one did: the same sizes, in the same order.
// Where it does something else, it gets memory as all others do from there on, and the next run is watched again. A block that
// another thread holds for longer, such as that of a process group, gets no place from then on.
//
// Libraries may give back a block by `raw_deleter`, without the function that came with it: `free_any` finds out whose it is.

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace monograph {

constexpr size_t SMALL = 16384, UNIT = 64, MOST_MISSES = 8;  // bytes, bytes, runs of one step
constexpr size_t MOST_TRIES = 64, MOST_COMPARED = 1 << 25;  // to place the blocks of a step

struct Event {  // a block is taken, or given back
  int block;
  size_t bytes;  // 0: given back
};

struct Steps {  // of one compiled step
  std::vector<Event> events;
  std::vector<long> places;  // by block; -1 for those that are still there when the step ends
  size_t total = 0, misses = 0;
  bool is_known = false, is_off = false;
};

struct Run {  // a step that is running
  Steps* steps = nullptr;
  size_t next = 0;
  std::atomic<bool> follows{false};
  int elsewhere = -1;  // the block that was not given back here, where it was expected
};

std::mutex lock;
char* memory = nullptr;
size_t room = 0;
// Those that are taken from `memory`, and those of the run that is watched. They are never destroyed: when a process ends, threads
// of a process group may still give blocks back.
auto& blocks = *new std::unordered_map<void*, int>();
auto& watched = *new std::unordered_map<void*, int>();
Run run;
thread_local bool is_here = false;  // the run is one of this thread

struct Count {  // bytes that are held of what one thread, or all, have taken since the count began, whoever gives them back
  size_t now = 0, most = 0;
  std::unordered_map<void*, size_t> blocks;  // bytes by block
};

Count* counting = nullptr;
std::atomic<bool> counts_everywhere{false};
thread_local bool counts_here = false;
auto& uncounted = *new std::unordered_set<void*>();  // blocks of counts that have ended
c10::DeleterFnPtr free_others = nullptr;

void stop_following() {
  const auto& events = run.steps->events;
  if (run.next < events.size() && events[run.next].bytes == 0) run.elsewhere = events[run.next].block;
  run.follows = false;
}

void given_back(int block) {
  if (!run.steps) return;
  if (!is_here) {
    if (run.follows) run.elsewhere = block;
    run.follows = false;
  } else if (!run.steps->is_known) {
    run.steps->events.push_back({block, 0});
  } else if (run.follows) {
    const auto& events = run.steps->events;
    if (run.next < events.size() && events[run.next].bytes == 0 && events[run.next].block == block) run.next++;
    else stop_following();
  }
}

void free_watched(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = watched.find(pointer);
    if (found != watched.end()) {
      given_back(found->second);
      watched.erase(found);
    }
  }
  c10::profiledCPUMemoryReporter().Delete(pointer);
  c10::free_cpu(pointer);
}

void free_block(void* pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks.find(pointer);
  given_back(found->second);
  blocks.erase(found);
}

void free_counted(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!uncounted.erase(pointer)) {
      auto found = counting->blocks.find(pointer);
      counting->now -= found->second;
      counting->blocks.erase(found);
    }
  }
  c10::profiledCPUMemoryReporter().Delete(pointer);
  c10::free_cpu(pointer);
}

void free_any(void* pointer) {
  c10::DeleterFnPtr free = free_others;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (blocks.count(pointer)) free = &free_block;
    else if (watched.count(pointer)) free = &free_watched;
    else if (uncounted.count(pointer) || (counting && counting->blocks.count(pointer))) free = &free_counted;
  }
  free(pointer);
}

struct Blocks final : c10::Allocator {
  c10::Allocator* others;
  explicit Blocks(c10::Allocator* others) : others(others) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (counts_here || counts_everywhere) return counted_block(bytes);
    if (!is_here || bytes < SMALL) return others->allocate(bytes);
    return run.steps->is_known ? placed(bytes) : noted(bytes);
  }

  c10::DataPtr counted_block(size_t bytes) {
    void* made = c10::alloc_cpu(bytes);
    c10::profiledCPUMemoryReporter().New(made, bytes);
    std::lock_guard<std::mutex> guard(lock);
    if (counting) {
      counting->blocks[made] = bytes;
      counting->now += bytes;
      counting->most = std::max(counting->most, counting->now);
    } else {
      uncounted.insert(made);
    }
    return {made, made, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DataPtr noted(size_t bytes) {
    void* made = c10::alloc_cpu(bytes);
    c10::profiledCPUMemoryReporter().New(made, bytes);
    std::lock_guard<std::mutex> guard(lock);
    int block = run.steps->places.size();
    run.steps->places.push_back(-1);
    run.steps->events.push_back({block, bytes});
    watched[made] = block;
    return {made, made, &free_watched, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DataPtr placed(size_t bytes) {
    const auto& steps = *run.steps;
    if (run.follows) {
      if (run.next >= steps.events.size() || steps.events[run.next].bytes != bytes) {
        std::lock_guard<std::mutex> guard(lock);
        if (run.follows) stop_following();
      } else {
        int block = steps.events[run.next++].block;
        if (steps.places[block] >= 0) {
          void* made = memory + steps.places[block];
          {
            std::lock_guard<std::mutex> guard(lock);
            blocks[made] = block;
          }
          c10::profiledCPUMemoryReporter().New(made, bytes);
          return {made, made, &free_block, c10::Device(c10::DeviceType::CPU)};
        }
      }
    }
    return others->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

struct Life {
  int block;
  size_t begin, end, bytes;
  long place;
};

size_t place(std::vector<Life>& order) {  // gives the bytes of all together
  std::vector<Life> placed;  // by place
  size_t total = 0;
  for (auto& life : order) {
    long best = -1, end = 0;
    size_t least = SIZE_MAX;
    for (const auto& other : placed) {
      if (other.end < life.begin || life.end < other.begin) continue;
      if (other.place >= end && size_t(other.place - end) >= life.bytes && size_t(other.place - end) < least) {
        best = end;
        least = other.place - end;
      }
      end = std::max(end, other.place + long(other.bytes));
    }
    life.place = best < 0 ? end : best;
    placed.insert(std::upper_bound(placed.begin(), placed.end(), life, [](const Life& a, const Life& b) {
      return a.place < b.place;
    }), life);
    total = std::max(total, size_t(life.place) + life.bytes);
  }
  return total;
}

size_t most_alive(const std::vector<Life>& lives) {  // the bytes that any way to place them takes
  std::vector<std::pair<size_t, long>> changes;
  for (const auto& life : lives) {
    changes.push_back({life.begin, long(life.bytes)});
    changes.push_back({life.end, -long(life.bytes)});
  }
  std::sort(changes.begin(), changes.end());
  long now = 0, most = 0;
  for (const auto& change : changes) most = std::max(most, now += change.second);
  return most;
}

void find_places(Steps& steps) {
  std::vector<Life> lives(steps.places.size());
  for (size_t i = 0; i < steps.events.size(); i++) {
    const auto& event = steps.events[i];
    if (event.bytes) lives[event.block] = {event.block, i, 0, (event.bytes + UNIT - 1) / UNIT * UNIT, -1};
    else lives[event.block].end = i;
  }
  std::vector<Life> order;
  for (const auto& life : lives) if (life.end) order.push_back(life);
  auto by_bytes = [](const Life& a, const Life& b) { return a.bytes > b.bytes; };
  auto by_length = [](const Life& a, const Life& b) { return a.end - a.begin > b.end - b.begin; };
  auto by_both = [](const Life& a, const Life& b) { return a.bytes * (a.end - a.begin) > b.bytes * (b.end - b.begin); };
  auto by_begin = [](const Life& a, const Life& b) { return a.begin < b.begin; };
  auto by_end = [](const Life& a, const Life& b) { return a.end > b.end; };
  const size_t least = most_alive(order);
  // of n blocks, a try takes n * n comparisons
  const size_t tries = 1 + MOST_COMPARED / std::max<size_t>(1, order.size() * order.size());
  steps.total = SIZE_MAX;
  for (bool (*first)(const Life&, const Life&) : {+by_bytes, +by_length, +by_both, +by_begin, +by_end}) {
    std::vector<Life> tried = order;
    std::stable_sort(tried.begin(), tried.end(), first);
    for (size_t i = 0; i < std::min(tries, MOST_TRIES) && steps.total > least; i++) {
      size_t total = place(tried);
      if (total < steps.total) {
        steps.total = total;
        for (const auto& life : tried) steps.places[life.block] = life.place;
      }
      // those that reach too far choose first the next time
      std::stable_partition(tried.begin(), tried.end(), [least](const Life& life) {
        return life.place + life.bytes > least;
      });
    }
  }
}

bool make_room(size_t bytes) {
  if (bytes <= room) return true;
  if (memory) munmap(memory, room);
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memory = made == MAP_FAILED ? nullptr : static_cast<char*>(made);
  room = memory ? bytes : 0;
  return memory;
}

}  // namespace monograph

extern "C" {

void monograph_install() {
  static auto* blocks = new monograph::Blocks(c10::GetCPUAllocator());
  monograph::free_others = blocks->others->raw_deleter();
  c10::SetCPUAllocator(blocks, 0);
}

bool monograph_begin_count(bool everywhere) {
  using namespace monograph;
  std::lock_guard<std::mutex> guard(lock);
  if (counting) return false;
  counting = new Count();
  counts_everywhere = everywhere;
  return counts_here = true;
}

size_t monograph_end_count() {
  using namespace monograph;
  std::lock_guard<std::mutex> guard(lock);
  size_t most = counting->most;
  for (const auto& block : counting->blocks) uncounted.insert(block.first);
  delete counting;
  counting = nullptr;
  counts_here = counts_everywhere = false;
  return most;
}

void* monograph_new_steps() { return new monograph::Steps(); }

bool monograph_begin(void* which) {
  using namespace monograph;
  auto* steps = static_cast<Steps*>(which);
  std::lock_guard<std::mutex> guard(lock);
  if (steps->is_off || run.steps) return false;
  if (steps->is_known && (!blocks.empty() || !make_room(steps->total))) return false;
  if (!steps->is_known) {
    steps->events.clear();
    steps->places.clear();
    steps->total = 0;
    watched.clear();
  }
  run.steps = steps;
  run.next = 0;
  run.follows = steps->is_known;
  run.elsewhere = -1;
  is_here = true;
  return true;
}

void monograph_end(bool is_whole) {
  using namespace monograph;
  std::lock_guard<std::mutex> guard(lock);
  auto* steps = run.steps;
  if (!is_whole) {
    // what failed shows nothing
  } else if (!steps->is_known) {
    find_places(*steps);
    steps->is_known = true;
    malloc_trim(0);  // the heap needs no more what this run had from it
  } else if (run.elsewhere >= 0) {
    auto& events = steps->events;
    steps->places[run.elsewhere] = -1;
    events.erase(std::remove_if(events.begin(), events.end(), [](const Event& event) {
      return event.bytes == 0 && event.block == run.elsewhere;
    }), events.end());
  } else if (!run.follows) {
    steps->is_known = false;
    steps->is_off = ++steps->misses >= MOST_MISSES;
    if (steps->is_off) {  // the heap keeps what it frees
      mallopt(M_MMAP_THRESHOLD, 32 << 20);
      mallopt(M_TRIM_THRESHOLD, int(std::min(2 * steps->total, size_t(1) << 30)));
    }
  }
  watched.clear();
  run.steps = nullptr;
  is_here = false;
}

void monograph_give_back() {
  using namespace monograph;
  std::lock_guard<std::mutex> guard(lock);
  if (memory && blocks.empty() && !run.steps) madvise(memory, room, MADV_DONTNEED);
}
}
