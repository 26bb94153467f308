#include "courier.h"

#include <algorithm>
#include <chrono>

#include "stream.h"

namespace hybrid {

namespace {

constexpr int64_t kMostSlept = 10000;  // microseconds, whatever the bus is said to carry

}  // namespace

Courier::~Courier() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
        thread_.join();
    }
    if (queue_) {
        host_.ggml_backend_free(queue_);
    }
}

void Courier::send(Delivery delivery) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { work(); });
    }
    deliveries_.push_back(std::move(delivery));
    changed_.notify_all();
}

void Courier::wait(const Arrived & arrived) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return arrived->load(std::memory_order_acquire); });
}

void Courier::join(Stream * stream) {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    streams_.push_back(stream);
    n_streams_++;
}

void Courier::part(Stream * stream) {
    std::lock_guard<std::mutex> lock(streams_mutex_);
    streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
    n_streams_--;
}

void Courier::work() {
    // A queue of its own; a device without queues is written at once.
    queue_ = inner_->iface.init_backend(inner_, nullptr);
    if (queue_ && !queue_->iface.set_tensor_async) {
        host_.ggml_backend_free(queue_);
        queue_ = nullptr;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return ended_ || !deliveries_.empty(); });
        if (deliveries_.empty()) {
            return;
        }
        const Delivery delivery = std::move(deliveries_.front());
        deliveries_.pop_front();
        lock.unlock();
        deliver(delivery);
        lock.lock();
        delivery.arrived->store(true, std::memory_order_release);
        changed_.notify_all();
    }
}

void Courier::deliver(const Delivery & delivery) {
    await(delivery.readers);
    for (const Piece & piece : delivery.pieces) {
        if (queue_) {
            queue_->iface.set_tensor_async(queue_, piece.slots, piece.data, piece.offset, piece.size);
        } else {
            host_.ggml_backend_tensor_set(piece.slots, piece.data, piece.offset, piece.size);
        }
    }
    if (queue_) {
        // Who waits for a device keeps a core busy, which the lanes need more: nearly all of the time is slept.
        size_t bytes = 0;
        for (const Piece & piece : delivery.pieces) {
            bytes += piece.size;
        }
        if (const int64_t rate = bytes_us_.load()) {
            const int64_t takes = std::min<int64_t>(static_cast<int64_t>(bytes) / rate, kMostSlept);
            std::this_thread::sleep_for(std::chrono::microseconds(takes));
        }
        host_.ggml_backend_synchronize(queue_);
    }
}

// Who computes says by itself when it is done, at its next block; who has nothing more to do is asked.
void Courier::await(const std::vector<Reader> & readers) {
    for (const Reader & reader : readers) {
        while (!reader.done()) {
            {
                std::lock_guard<std::mutex> lock(streams_mutex_);
                for (Stream * stream : streams_) {
                    std::unique_lock<std::recursive_mutex> idle(stream->api(), std::try_to_lock);
                    if (idle.owns_lock() && stream->progress() == reader.progress) {
                        stream->synchronize();
                    }
                }
            }
            if (!reader.done()) {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
    }
}

}  // namespace hybrid
