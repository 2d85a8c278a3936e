// SPDX-License-Identifier: Apache-2.0
//
// Transfers through io_uring, driven by one thread: it fills the ring with parts, submits all that is ready in one
// system call and sleeps in the same call until the first of them is done. An eventfd that is always being read
// wakes it for new requests.

#include "io/engine.h"

#ifndef ZEROSHARDER_HAVE_LIBURING

#include <cerrno>
#include <system_error>

namespace zerosharder::io {

std::unique_ptr<Engine> make_uring_engine(EngineOptions) {
  throw std::system_error(ENOSYS, std::generic_category(), "io_uring: built without liburing");
}

bool built_with_uring() noexcept { return false; }

}  // namespace zerosharder::io

#else

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "memory/buffer.h"

namespace zerosharder::io {
namespace {

constexpr std::size_t kDefaultDepth = 16;
constexpr std::size_t kMaxDepth = 1024;
constexpr std::size_t kMaxBounceSlots = 8;

// The kernel takes at most 1 GiB as one registered buffer.
constexpr std::size_t kRegisteredChunk = std::size_t{1} << 30;
constexpr unsigned kRegisteredChunks = 1024;

// user_data of what is no part; parts carry the number of their slot.
constexpr std::uint64_t kWake = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kNobody = kWake - 1;

class Ring {
 public:
  Ring(unsigned entries, const char* what) {
    int result = -EINVAL;
#ifdef IORING_SETUP_COOP_TASKRUN
    // One thread reaps: no need to interrupt it for completions. Linux 5.19.
    result = ::io_uring_queue_init(entries, &ring_, IORING_SETUP_COOP_TASKRUN);
#endif
    if (result == -EINVAL) result = ::io_uring_queue_init(entries, &ring_, 0);
    if (result < 0) throw std::system_error(-result, std::generic_category(), what);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { ::io_uring_queue_exit(&ring_); }

  io_uring* get() noexcept { return &ring_; }

 private:
  io_uring ring_{};
};

// Memory the kernel knows by number, in chunks; a piece is eligible if it lies within one chunk.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(io_uring* ring) : ring_(ring) {
    error_ = -::io_uring_register_buffers_sparse(ring, kRegisteredChunks);  // Linux 5.19
    if (error_ == 0) {
      for (unsigned i = kRegisteredChunks; i > 0; --i) free_.push_back(i - 1);
    }
  }

  int add(void* data, std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ != 0) return error_;
    if (areas_.count(data) != 0) return EEXIST;
    auto& numbers = areas_[data];
    auto* bytes = static_cast<unsigned char*>(data);
    for (std::size_t begin = 0; begin < nbytes; begin += kRegisteredChunk) {
      const std::size_t length = std::min(kRegisteredChunk, nbytes - begin);
      const int result = free_.empty() ? -ENOSPC : update(free_.back(), bytes + begin, length);
      if (result < 0) {
        remove_locked(data);
        return -result;
      }
      chunks_[bytes + begin] = {length, free_.back()};
      numbers.push_back(bytes + begin);
      free_.pop_back();
    }
    return 0;
  }

  void remove(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    remove_locked(data);
  }

  // The kernel's number of the chunk around [data, data + nbytes), -1 if there is none.
  int find(const unsigned char* data, std::size_t nbytes) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = chunks_.upper_bound(const_cast<unsigned char*>(data));
    if (after == chunks_.begin()) return -1;
    const auto& [begin, chunk] = *std::prev(after);
    return data + nbytes <= begin + chunk.length ? static_cast<int>(chunk.number) : -1;
  }

 private:
  struct Chunk {
    std::size_t length;
    unsigned number;
  };

  int update(unsigned number, void* data, std::size_t nbytes) {
    iovec area{data, nbytes};
    __u64 tag = 0;
    const int result = ::io_uring_register_buffers_update_tag(ring_, number, &area, &tag, 1);
    return result < 0 ? result : 0;
  }

  void remove_locked(void* data) {
    const auto area = areas_.find(data);
    if (area == areas_.end()) return;
    for (unsigned char* begin : area->second) {
      const auto chunk = chunks_.find(begin);
      update(chunk->second.number, nullptr, 0);
      free_.push_back(chunk->second.number);
      chunks_.erase(chunk);
    }
    areas_.erase(area);
  }

  io_uring* const ring_;
  mutable std::mutex mutex_;
  int error_ = 0;
  std::map<unsigned char*, Chunk> chunks_;
  std::map<void*, std::vector<unsigned char*>> areas_;
  std::vector<unsigned> free_;
};

// A part on its way: waiting for its turn, for a bounce buffer, for time to pass, or in the kernel.
struct Slot {
  std::shared_ptr<Transfer> transfer;
  Part part;
  Piece piece;
  Fault fault;          // of this attempt
  bool judged = false;  // whether the source of faults has spoken about this attempt
  Clock::time_point not_before;
  int bounce = -1;
  bool in_kernel = false;
  bool cancelling = false;
};

EngineOptions checked(EngineOptions options) {
  if (options.depth == 0) options.depth = kDefaultDepth;
  if (options.depth > kMaxDepth) {
    throw std::invalid_argument("at most " + std::to_string(kMaxDepth) + " requests, not " +
                                std::to_string(options.depth));
  }
  return options;
}

class UringEngine final : public Engine {
 public:
  // Room in the ring for every part, a cancellation of each, and the read of the eventfd.
  explicit UringEngine(EngineOptions options)
      : Engine(checked(std::move(options))), shared_(static_cast<unsigned>(2 * options_.depth + 2)) {
    check_operations();
    slots_.resize(options_.depth);
    for (std::size_t i = options_.depth; i > 0; --i) free_slots_.push_back(i - 1);
    driver_ = std::thread([this] { drive(); });
  }

  ~UringEngine() override { close(); }

  void cancel(const std::shared_ptr<Transfer>& transfer) override {
    transfer->stop(ECANCELED);
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    wake();
  }

  int register_memory(void* data, std::size_t nbytes) override {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    return shared_.memory ? shared_.memory->add(data, nbytes) : ESHUTDOWN;
  }

  void withdraw_memory(void* data) override {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    if (shared_.memory) shared_.memory->remove(data);
  }

  const char* name() const noexcept override { return "io_uring"; }

 protected:
  void shut_down() override {
    {
      const std::lock_guard<std::mutex> lock(shared_.mutex);
      shared_.closing = true;
      wake();
    }
    driver_.join();
    // Those who still hold the engine, such as futures nobody has asked, must not keep descriptors open.
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.memory.reset();
    shared_.ring.reset();
    shared_.wake_fd = Descriptor();
  }

  void enqueue(const std::shared_ptr<Transfer>& transfer) override {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    if (shared_.closing) throw transfer->make_error(ESHUTDOWN, 0, "the I/O engine is closed");
    if (shared_.broken != 0) throw transfer->make_error(shared_.broken, 0, "the ring broke down");
    shared_.incoming.push_back(transfer);
    wake();
  }

 private:
  struct Shared {
    explicit Shared(unsigned entries) : wake_fd(::eventfd(0, EFD_CLOEXEC)) {
      if (!wake_fd) throw std::system_error(errno, std::generic_category(), "eventfd");
      ring.emplace(entries, "io_uring_setup");
      memory.emplace(ring->get());
    }
    // The driver uses these without the lock: they are there from its beginning to its end.
    std::optional<Ring> ring;
    std::optional<RegisteredMemory> memory;
    Descriptor wake_fd;
    std::mutex mutex;
    std::deque<std::shared_ptr<Transfer>> incoming;
    bool closing = false;
    int broken = 0;  // errno of a ring that cannot be used any more
  };

  void check_operations() {
    io_uring_probe* probe = ::io_uring_get_probe_ring(shared_.ring->get());
    bool complete = probe != nullptr;
    for (const int op :
         {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED, IORING_OP_ASYNC_CANCEL}) {
      complete = complete && ::io_uring_opcode_supported(probe, op) != 0;
    }
    if (probe != nullptr) ::io_uring_free_probe(probe);
    if (!complete) {
      throw std::system_error(ENOSYS, std::generic_category(),
                              "io_uring: an operation is missing, Linux 5.6 is needed");
    }
  }

  // With the lock held; does nothing once the engine is closed.
  void wake() {
    if (!shared_.wake_fd) return;
    const std::uint64_t one = 1;
    // It can only fail for a counter at its maximum, and then the driver has been woken.
    ssize_t ignored = ::write(shared_.wake_fd.get(), &one, sizeof one);
    (void)ignored;
  }

  // ---- The driver's own. Everything below runs in its thread and needs no lock.

  void drive() {
    for (;;) {
      const bool closing = take_incoming();
      sweep(closing);
      fill();
      submit_ready();
      if (closing && queue_.empty() && free_slots_.size() == slots_.size()) return;
      wait_and_reap();
    }
  }

  bool take_incoming() {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    queue_.insert(queue_.end(), shared_.incoming.begin(), shared_.incoming.end());
    shared_.incoming.clear();
    return shared_.closing;
  }

  // Ends what was cancelled or is too late: queued transfers at once, parts in the kernel by asking for it.
  void sweep(bool closing) {
    for (auto it = queue_.begin(); it != queue_.end();) {
      const std::shared_ptr<Transfer> transfer = *it;
      if (closing) transfer->stop(ECANCELED);
      if (transfer->stop_code() == 0) {
        ++it;
        continue;
      }
      it = queue_.erase(it);
      if (transfer->in_flight == 0) conclude(*transfer);
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      if (slot.transfer == nullptr || slot.cancelling) continue;
      if (closing) slot.transfer->stop(ECANCELED);
      if (slot.transfer->stop_code() == 0) continue;
      if (!slot.in_kernel) {
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), i));
        leave(i);
      } else if (io_uring_sqe* entry = ::io_uring_get_sqe(shared_.ring->get())) {
        ::io_uring_prep_cancel64(entry, i, 0);
        ::io_uring_sqe_set_data64(entry, kNobody);
        slot.cancelling = true;
      }
    }
  }

  void fill() {
    while (!free_slots_.empty() && !queue_.empty()) {
      const std::shared_ptr<Transfer> transfer = queue_.front();
      const std::size_t index = free_slots_.back();
      free_slots_.pop_back();
      slots_[index] = Slot{};
      slots_[index].transfer = transfer;
      slots_[index].part = transfer->take_part(options_.block);
      ++transfer->in_flight;
      if (transfer->issued_all()) queue_.pop_front();
      waiting_.push_back(index);
    }
  }

  // Gives every slot whose time has come to the ring. Entries go to the kernel together, in wait_and_reap().
  void submit_ready() {
    again_ = false;
    for (std::size_t turns = waiting_.size(); turns > 0; --turns) {
      const std::size_t index = waiting_.front();
      waiting_.pop_front();
      if (!begin(index)) waiting_.push_back(index);
    }
  }

  // Whether the slot needs no further turn: it is in the ring, or done with. False: its time has not come.
  bool begin(std::size_t index) {
    Slot& slot = slots_[index];
    if (slot.not_before > Clock::now()) return false;
    slot.not_before = {};
    Transfer& transfer = *slot.transfer;
    const Request& request = transfer.request();
    unsigned char* memory = transfer.data_at(slot.part.at);
    const std::uint64_t offset = transfer.offset_of(slot.part.at);
    slot.piece = request.file->next_piece(offset, slot.part.end - slot.part.at, memory);
    if (options_.faults != nullptr) {
      if (!slot.judged) {
        slot.fault = options_.faults->next(request.kind, offset, slot.piece.nbytes);
        slot.judged = true;
        if (slot.fault.delay.count() > 0) {
          slot.not_before = Clock::now() + std::chrono::duration_cast<Clock::duration>(slot.fault.delay);
          return false;
        }
      }
      if (slot.fault.error != 0) {
        completed(index, -slot.fault.error);
        return true;
      }
    }
    if (slot.piece.route == Route::kBounce) {
      const int error = take_bounce(slot);
      if (error == EBUSY) return false;  // a part that is in the kernel has it
      if (error != 0) {
        completed(index, -error);
        return true;
      }
      if (request.kind == Kind::kWrite) std::memcpy(bounce_data(slot), memory, slot.piece.nbytes);
      memory = bounce_data(slot);
    }
    io_uring_sqe* entry = ::io_uring_get_sqe(shared_.ring->get());
    if (entry == nullptr) return false;
    const int fd = request.file->fd(slot.piece.route);
    const auto length = static_cast<unsigned>(slot.piece.nbytes);
    // Registered pages help direct transfers; the page cache copies anyway.
    const int number = slot.piece.route == Route::kDirect ? shared_.memory->find(memory, slot.piece.nbytes) : -1;
    if (request.kind == Kind::kRead) {
      if (number >= 0) {
        ::io_uring_prep_read_fixed(entry, fd, memory, length, offset, number);
      } else {
        ::io_uring_prep_read(entry, fd, memory, length, offset);
      }
    } else {
      if (number >= 0) {
        ::io_uring_prep_write_fixed(entry, fd, memory, length, offset, number);
      } else {
        ::io_uring_prep_write(entry, fd, memory, length, offset);
      }
    }
    ::io_uring_sqe_set_data64(entry, index);
    slot.in_kernel = true;
    return true;
  }

  // One piece is over, with bytes moved or -errno.
  void completed(std::size_t index, std::int64_t moved) {
    Slot& slot = slots_[index];
    slot.in_kernel = false;
    slot.judged = false;
    if (slot.bounce >= 0) {
      if (moved > 0 && slot.transfer->request().kind == Kind::kRead) {
        std::memcpy(slot.transfer->data_at(slot.part.at), bounce_data(slot), static_cast<std::size_t>(moved));
      }
      free_bounces_.push_back(slot.bounce);
      slot.bounce = -1;
    }
    if (moved > 0 && static_cast<std::size_t>(moved) > slot.fault.limit) {
      moved = static_cast<std::int64_t>(slot.fault.limit);
    }
    slot.fault = Fault{};
    const int stopped = slot.transfer->stop_code();
    if (moved == -ECANCELED && stopped != 0) moved = -stopped;
    Transfer& transfer = *slot.transfer;
    const Next next = transfer.account(slot.part, slot.piece, moved);
    if (next == Next::kStop || slot.part.at == slot.part.end || stopped != 0) {
      leave(index);
      return;
    }
    if (next == Next::kRetry && moved == -EAGAIN) {
      slot.not_before = Clock::now() + Transfer::backoff(slot.part.stalls);
    } else {
      again_ = true;
    }
    waiting_.push_back(index);
  }

  // The part is over, well or not.
  void leave(std::size_t index) {
    Slot& slot = slots_[index];
    const std::shared_ptr<Transfer> transfer = std::move(slot.transfer);
    if (slot.part.at < slot.part.end) {
      const int code = transfer->stop_code();
      if (code != 0) transfer->fail(code, slot.part.at);
    }
    slot = Slot{};
    free_slots_.push_back(index);
    --transfer->in_flight;
    // Asked once: a deadline that passes between two questions would leave a concluded transfer in the queue.
    const bool stopped = transfer->stop_code() != 0;
    if (stopped && !transfer->issued_all()) {
      const auto found = std::find(queue_.begin(), queue_.end(), transfer);
      if (found != queue_.end()) queue_.erase(found);
    }
    const bool over = stopped || transfer->issued_all();
    if (over && transfer->in_flight == 0) conclude(*transfer);
  }

  // Submits, sleeps until something is done or due, and takes what is done.
  void wait_and_reap() {
    io_uring* ring = shared_.ring->get();
    if (!wake_armed_) {
      if (io_uring_sqe* entry = ::io_uring_get_sqe(ring)) {
        ::io_uring_prep_read(entry, shared_.wake_fd.get(), &wake_count_, sizeof wake_count_, 0);
        ::io_uring_sqe_set_data64(entry, kWake);
        wake_armed_ = true;
      }
    }
    io_uring_cqe* first = nullptr;
    const std::optional<Clock::time_point> due = next_due();
    int result = 0;
    if (again_) {
      result = ::io_uring_submit(ring);
    } else if (due) {
      const auto left = std::max(std::chrono::nanoseconds(1000), std::chrono::nanoseconds(*due - Clock::now()));
      __kernel_timespec timeout{};
      timeout.tv_sec = left.count() / 1'000'000'000;
      timeout.tv_nsec = left.count() % 1'000'000'000;
      result = ::io_uring_submit_and_wait_timeout(ring, &first, 1, &timeout, nullptr);
    } else {
      result = ::io_uring_submit_and_wait(ring, 1);
    }
    if (result < 0 && result != -ETIME && result != -EINTR) {
      // EAGAIN and EBUSY mean that the kernel is short of memory for the moment; anything else should not happen.
      if (result != -EAGAIN && result != -EBUSY) give_up(-result);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    unsigned head = 0;
    unsigned count = 0;
    done_.clear();
    io_uring_for_each_cqe(ring, head, first) {
      ++count;
      done_.push_back({::io_uring_cqe_get_data64(first), first->res});
    }
    ::io_uring_cq_advance(ring, count);
    for (const auto& [who, moved] : done_) {
      if (who == kWake) {
        wake_armed_ = false;
      } else if (who != kNobody) {
        completed(static_cast<std::size_t>(who), moved);
      }
    }
  }

  // When to wake up although nothing has completed: for the nearest deadline, or for a slot that waits for its
  // time.
  std::optional<Clock::time_point> next_due() const {
    Clock::time_point due = Clock::time_point::max();
    for (const auto& transfer : queue_) due = std::min(due, transfer->request().deadline);
    for (const Slot& slot : slots_) {
      if (slot.transfer == nullptr) continue;
      // Those that wait for a bounce buffer or room in the ring are woken by a completion.
      if (!slot.in_kernel && slot.not_before > Clock::time_point()) due = std::min(due, slot.not_before);
      if (!slot.cancelling) due = std::min(due, slot.transfer->request().deadline);
    }
    if (due == Clock::time_point::max()) return std::nullopt;
    return due;
  }

  int take_bounce(Slot& slot) {
    if (!bounce_) {
      const std::size_t count = std::min(kMaxBounceSlots, slots_.size());
      try {
        bounce_.emplace(count * options_.block, Buffer::Options{});
      } catch (const std::exception&) {
        return ENOMEM;
      }
      for (std::size_t i = count; i > 0; --i) free_bounces_.push_back(static_cast<int>(i - 1));
    }
    if (free_bounces_.empty()) return EBUSY;
    slot.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    return 0;
  }

  unsigned char* bounce_data(const Slot& slot) {
    return static_cast<unsigned char*>(bounce_->data()) + static_cast<std::size_t>(slot.bounce) * options_.block;
  }

  // The kernel refuses the ring itself. What was not begun fails with the errno, and so does every later
  // submission. What the kernel has already stays in flight until it answers: it may still write to that memory.
  void give_up(int code) {
    {
      const std::lock_guard<std::mutex> lock(shared_.mutex);
      shared_.broken = code;
    }
    for (const auto& transfer : queue_) transfer->fail(code, transfer->issued());
    for (const std::size_t index : waiting_) slots_[index].transfer->fail(code, slots_[index].part.at);
  }

  Shared shared_;
  std::thread driver_;

  std::deque<std::shared_ptr<Transfer>> queue_;  // transfers with parts that have no slot
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_slots_;
  std::deque<std::size_t> waiting_;  // slots to be begun
  bool again_ = false;               // one of them can be begun at once
  std::vector<std::pair<std::uint64_t, std::int64_t>> done_;
  std::optional<Buffer> bounce_;
  std::vector<int> free_bounces_;
  bool wake_armed_ = false;
  std::uint64_t wake_count_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(EngineOptions options) {
  return std::make_unique<UringEngine>(std::move(options));
}

bool built_with_uring() noexcept { return true; }

}  // namespace zerosharder::io

#endif
