// Prompts whose experts are brought ahead.
#include <cstdlib>
#include <thread>

#include "bench.h"

namespace trial {

namespace {

// A prompt through layers of which most experts are brought, against the CPU alone; `n` batches of several sizes.
void pass_prompts(Bench & bench, const Layers & layers, int n, unsigned seed) {
    const Shape & shape = layers.all[0]->shape;
    const Reference cpu(shape, 0);
    const Layers plain(shape, static_cast<int>(layers.all.size()), cpu.type, cpu.type);
    std::mt19937 dice(seed);
    Backend * backend = bench.backend();
    for (int turn = 0; turn < n; turn++) {
        const int64_t tokens = turn % 4 == 3 ? 1 : 10 + dice() % 8, places = 4;
        Pass pass(Bench::host(), layers.all, tokens, places, bench.inner_type), same(Bench::host(), plain.all, tokens, places, cpu.type);
        for (int again = 0; again < 2; again++) {
            const auto x = random_values(dice, static_cast<size_t>(shape.n_in * tokens));
            const int64_t named = again && turn % 3 == 0 ? shape.n_experts / 2 : shape.n_experts;  // half of them at times
            const auto ids = random_choices(dice, tokens, places, named, turn % 5 != 4);
            same.set(cpu.backend, x, ids);
            pass.set(backend, x, ids);
            CHECK(same.compute(cpu.backend) == kSuccess && pass.compute(backend) == kSuccess);
            CHECK(difference(same.output(cpu.backend), pass.output(backend)) < kClose);
        }
    }
    backend->iface.free(backend);
}

void prompts_ahead() {
    const std::string costs = "cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\n";
    for (int n_slots = 0; n_slots < 8; n_slots += 3) {
        for (int variant = 0; variant < 4; variant++) {
            Shape shape;
            shape.fused = variant == 1;
            const bool two = variant != 2, events = variant != 3;
            Bench bench(costs + "slots " + std::to_string(n_slots) + "\nguests 1\nbanks " + (two ? "2" : "1"), true, events);
            const Layers layers(shape, 5, bench.wrapper->store.type, bench.inner_type);
            pass_prompts(bench, layers, 8, static_cast<unsigned>(n_slots));
            CHECK(bench.counted("staged") > 0);
            // Both banks were used where there are two and events order them.
            const int64_t bank = static_cast<int64_t>(bench.host().ggml_nbytes(layers.all[0]->up)) * (shape.fused ? 1 : 2) +
                                 static_cast<int64_t>(bench.host().ggml_nbytes(layers.all[0]->down));
            const int64_t wanted = two && events ? 2 * bank : bank;
            CHECK(bench.counted("stage_bytes") >= wanted && bench.counted("stage_bytes") < wanted + bank / 2);
        }
    }
}

bool says(Bench & bench, const std::string & what) { return bench.wrapper->report().find(what) != std::string::npos; }

// Pages that the device does not lock, through small chunks: parcels are divided, and share some. A layer ahead, and once
// it has chosen.
void prompts_through_the_ring() {
    const std::string costs = "cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nguests 1\nmemory plain\n";
    for (const char * banks : {"banks 1\n", "banks 2\n"}) {
        for (const char * chunk : {"ring_chunk 5000\n", "ring_chunk 70000\n"}) {
            Bench bench(costs + banks + "ring 1\nslots 3\n" + chunk, true);
            const Layers layers(Shape(), 5, bench.wrapper->store.type, bench.inner_type);
            pass_prompts(bench, layers, 8, 3);
            CHECK(bench.counted("staged") > 0 && says(bench, "\"ring\":\"taken\""));
            CHECK(bench.counted("ring_bytes") == 4 * std::atoll(chunk + 11) && bench.counted("ring_bytes_us") == 0);
        }
    }
}

// Which way is taken: both are right, and only what is taken has memory.
void the_ring_is_measured() {
    const std::string costs = "cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nslots 3\nring_chunk 5000\n";
    for (const char * memory : {"memory plain\n", "memory plain\nbanks 1\n", "memory plain\nring 0\n", "memory pinned\n", "no events", "no memory"}) {
        const bool lacks = memory[0] == 'n', measured = !lacks && std::string(memory).find("pinned") == std::string::npos &&
                                                        std::string(memory).find("ring") == std::string::npos;
        Bench bench(costs + (lacks ? "memory plain\n" : memory), true, std::string(memory) != "no events");
        bench.slow_device.refuses_host = std::string(memory) == "no memory";
        const Layers layers(Shape(), 5, bench.wrapper->store.type, bench.inner_type);
        CHECK(says(bench, "\"ring\":\"unused\""));
        pass_prompts(bench, layers, 4, 3);
        CHECK(bench.counted("staged") > 0);
        CHECK((bench.counted("ring_bytes_us") > 0) == measured && (bench.counted("paged_bytes_us") > 0) == measured);
        CHECK(measured == (says(bench, "\"ring\":\"taken\"") || says(bench, "\"ring\":\"slower\"")));
        CHECK((bench.counted("ring_bytes") > 0) == says(bench, "\"ring\":\"taken\""));
        CHECK(measured || says(bench, std::string(memory).find("pinned") == std::string::npos ? "\"ring\":\"refused\"" : "\"ring\":\"unused\""));
    }
}

// Slots are filled that way too, before any prompt; then every token is right.
void slots_are_filled_through_the_ring() {
    const Shape shape;
    for (const char * chunk : {"ring_chunk 5000\n", "ring_chunk 70000\n"}) {
        Bench bench(std::string("slots 5\nguests 1\nstage 0\nmemory plain\nring 1\n") + chunk, true);
        Layer layer(Bench::host(), shape, 0, 5, bench.wrapper->store.type, bench.inner_type);
        CHECK(layer.ok);
        one_and_many(bench, shape, layer, 2, {6, 7, 4, 9, 3});
        CHECK(says(bench, "\"ring\":\"taken\"") && bench.counted("staged") == 0 && bench.counted("hits") > 0);
    }
}

// Of less than two chunks nothing is told: the device's own way, until more comes.
void few_experts_decide_nothing() {
    Bench bench("cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nslots 3\nmemory plain\n", true);
    const Layers layers(Shape(), 5, bench.wrapper->store.type, bench.inner_type);
    pass_prompts(bench, layers, 4, 3);
    CHECK(bench.counted("staged") > 0 && bench.counted("ring_bytes") == 0 && says(bench, "\"ring\":\"unused\""));
}

// The seeded fault: what a chunk holds is replaced while the device has yet to take it.
void a_chunk_is_refilled_early() {
    Bench bench("cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nmemory plain\nring 1\nring_chunk 5000\nslots 3\n", true, true, nullptr,
                Fault::kEarlyRefill);
    const Layers layers(Shape(), 5, bench.wrapper->store.type, bench.inner_type);
    pass_prompts(bench, layers, 8, 3);
}

// Contexts whose prompts take turns at the stage while the residents change, one of whose devices fails.
void prompts_of_many(const char * memory) {
    Shape shape;
    Bench bench(std::string("cpu_tokens 4\ncpu_bytes_us 1000\nbus_bytes_us 1000\nslots 3\nguests 2\n") + memory, true);
    const Layers layers(shape, 4, bench.wrapper->store.type, bench.inner_type);
    std::atomic<int> running{3};
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 3; number++) {
        threads.emplace_back([&, number] {
            pass_prompts(bench, layers, 10, number);
            running--;
        });
    }
    threads.emplace_back([&] {
        std::mt19937 dice(5);
        while (running > 0) {
            const int block = static_cast<int>(dice() % 4);
            CHECK(bench.wrapper->store.set_residents(0, block, "exps", random_choices(dice, 1, 3, shape.n_experts, true)).empty());
            std::this_thread::yield();
        }
    });
    for (auto & thread : threads) {
        thread.join();
    }
    Backend * backend = bench.backend();
    {
        Pass pass(Bench::host(), layers.all, 12, 4, bench.inner_type);
        std::mt19937 dice(1);
        pass.set(backend, random_values(dice, 12 * 64), random_choices(dice, 12, 4, 8, true));
        for (int left = 0; left < 9; left++) {
            bench.slow_device.n_fail_after = bench.slow_device.n_graphs.load() + left;
            CHECK(pass.compute(backend) == kFailed);
            bench.slow_device.n_fail_after = -1;
            CHECK(pass.compute(backend) == kSuccess);
            (void)pass.output(backend);
        }
    }
    backend->iface.free(backend);
}

void prompts_of_many() {
    prompts_of_many("");
    prompts_of_many("memory plain\nring 1\nring_chunk 20000\n");
}

// Prompts whose experts are brought ahead, in contexts whose single tokens exchange them.
void prompts_while_slots_follow() {
    for (const char * policy : {"policy lru\nupload_bytes 1000000000\n", "policy lfu\nhalf_life 4\nupload_bytes 60000\nleast_misses 2\nlockstep 1\n"}) {
        Shape shape;
        Bench bench(std::string("cpu_tokens 4\ncpu_bytes_us 1\nbus_bytes_us 1000000\nslots 5\nguests 1\n") + policy, true);
        const Layers layers(shape, 4, bench.wrapper->store.type, bench.inner_type);
        std::vector<std::thread> threads;
        for (unsigned number = 0; number < 3; number++) {
            threads.emplace_back([&, number] { pass_prompts(bench, layers, 12, number); });
        }
        for (auto & thread : threads) {
            thread.join();
        }
        CHECK(bench.counted("admitted") > 0 && bench.counted("staged") > 0);
    }
}

}  // namespace

const Tests kPrompts = {
    {"prompts_ahead", prompts_ahead},
    {"prompts_of_many", prompts_of_many},
    {"prompts_through_the_ring", prompts_through_the_ring},
    {"the_ring_is_measured", the_ring_is_measured},
    {"slots_are_filled_through_the_ring", slots_are_filled_through_the_ring},
    {"few_experts_decide_nothing", few_experts_decide_nothing},
    {"a_chunk_is_refilled_early", a_chunk_is_refilled_early},
    {"prompts_while_slots_follow", prompts_while_slots_follow},
};

}  // namespace trial
