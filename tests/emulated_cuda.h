/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel's blocks on the CPU, one cluster after the other: the instructions of ptx.cuh, wgmma.cuh and tcgen05.cuh, as
 * the PTX ISA describes them, in plain C++. A thread is a fiber. Which goes on, and when a copy or a product that was
 * begun is done, chance decides, which holds some of them up until nothing else goes on. So a kernel that reads what
 * has not come, writes what is still to be read, or waits for what may never be, is likely to do so here.
 *
 * Not seen: what a missing fence between threads' and asynchronous accesses does, and whatever another cluster does. */
#ifndef MOER_EMULATED_CUDA_H
#define MOER_EMULATED_CUDA_H

#include <algorithm>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <deque>
#include <fenv.h>
#include <functional>
#include <iterator>
#include <map>
#include <math.h>
#include <mutex>
#include <random>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <vector>

#include "tcgen05_model.h"

namespace emulated {

enum { LANES = 32, SHARED_BYTES = 227 * 1024, STACK_BYTES = 128 * 1024 };
/* Shared memory begins with 1 KB of the system's own. */
enum { FIRST_ADDRESS = 1024 };

struct barrier {
    int arrivals, pending, phase;
    long bytes;
};

struct fiber {
    ucontext_t context; /* where it begins */
    jmp_buf place;      /* where it goes on: unlike contexts, jumps ask nothing of the system */
    unsigned number;
    bool begun = false, done = false;
    std::deque<std::vector<std::function<void()>>> products, stores; /* groups; the last is not committed yet */
    std::vector<std::function<void()>> tensor_loads, tensor_stores;
};

struct block {
    unsigned number, left; /* threads that are not done */
    std::vector<char> shared;
    std::vector<fiber> fibers;
    std::map<uint32_t, barrier> barriers;
    std::vector<std::function<void()>> copies;
    std::map<unsigned, std::deque<std::function<void()>>> pipes; /* a thread's products, one after the other */
    std::vector<float> tensor_memory;                            /* none: not allocated */
    std::map<int, int> waiting;                                  /* at a barrier of bar.sync, by its number and round */
    std::map<int, int> rounds;
    std::map<int, std::vector<uint64_t>> shuffles;
};

inline std::vector<block> cluster;
inline block *now;
inline long idle;
inline fiber *self;
inline jmp_buf scheduler;
inline std::mt19937 chance;
inline unsigned grid_size, block_size;

inline void yield() {
    if (_setjmp(self->place) == 0)
        _longjmp(scheduler, 1);
}

inline void go_on(fiber &fiber) {
    self = &fiber;
    if (_setjmp(scheduler) != 0)
        return;
    if (fiber.begun)
        _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

[[noreturn]] inline void fail(const char *what) {
    fprintf(stderr, "block %u, thread %u: %s\n", now->number, self ? self->number : 0, what);
    abort();
}

template <typename Condition>
void wait_until(Condition condition, const char *what) {
    while (!condition()) {
        if (++idle > 400000) {
            bool under_way = false;
            for (const block &block : cluster)
                under_way = under_way || !block.copies.empty() || !block.pipes.empty();
            if (!under_way)
                fail(what);
            idle = 0;
        }
        yield();
    }
    idle = 0;
}

/* Another block's shared memory or barriers, for the time of an access. */
template <typename Access>
void in_block(unsigned rank, Access access) {
    block *const own = now;
    now = &cluster[rank];
    if (now->left == 0)
        fail("the block has ended");
    access();
    now = own;
}

inline char *at(uint32_t address, int bytes) {
    if (address < FIRST_ADDRESS || address + bytes > FIRST_ADDRESS + SHARED_BYTES)
        fail("an address outside of shared memory");
    return now->shared.data() + (address - FIRST_ADDRESS);
}

/* Bits of an address that a swizzle of so many bytes changes. */
inline uint32_t swizzled_address(uint32_t address, int width) {
    return width == 128 ? address ^ (address >> 7 & 7) << 4 : width == 64 ? address ^ (address >> 7 & 3) << 4 : address;
}

inline void settle(barrier &barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.phase ^= 1;
        barrier.pending = barrier.arrivals;
    }
}

inline barrier &barrier_at(uint32_t address) {
    auto found = now->barriers.find(address);
    if (found == now->barriers.end())
        fail("a barrier that was not initialised");
    return found->second;
}

inline void complete(uint32_t address, long bytes) {
    barrier_at(address).bytes -= bytes;
    settle(barrier_at(address));
    idle = 0;
}

/* What is done in its own time. */
inline void later(std::function<void()> what) {
    now->copies.push_back(std::move(what));
}

inline void some_copies() {
    while (!now->pipes.empty() && chance() % 3) {
        auto pipe = now->pipes.begin();
        std::advance(pipe, chance() % now->pipes.size());
        pipe->second.front()();
        pipe->second.pop_front();
        if (pipe->second.empty())
            now->pipes.erase(pipe);
    }
    while (!now->copies.empty() && chance() % 3) {
        const size_t which = chance() % now->copies.size();
        auto copy = std::move(now->copies[which]);
        now->copies.erase(now->copies.begin() + static_cast<long>(which));
        copy();
    }
}

/* Groups but for the last so many; the last of all is not committed. */
inline void finish(std::deque<std::vector<std::function<void()>>> &groups, size_t pending) {
    while (groups.size() > pending + 1) {
        for (auto &what : groups.front())
            what();
        groups.pop_front();
    }
}

inline unsigned meet(block *block, int which, unsigned threads) { /* barrier.sync; returns the round */
    const int round = block->rounds[which], key = which * 1000000 + round;
    if (++block->waiting[key] == static_cast<int>(threads)) {
        block->rounds[which]++;
        idle = 0;
    }
    wait_until([=] { return block->rounds[which] != round; }, "waits for threads that do not come");
    return static_cast<unsigned>(round);
}
inline unsigned meet(int which, unsigned threads) {
    return meet(now, which, threads);
}

/* All of a warp must come to the instructions that are aligned. */
inline void aligned() {
    meet(600 + static_cast<int>(self->number) / LANES, LANES);
}

/* The map that make_map() asks the driver for. */
struct tensor_map {
    char *data;
    uint64_t columns, rows, stride;
    unsigned box_columns, box_rows, swizzle;
};
static_assert(sizeof(tensor_map) <= sizeof(CUtensorMap), "fits");

inline CUresult encode(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *data, const cuuint64_t *size,
                       const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const unsigned width = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 0;
    const tensor_map made = {static_cast<char *>(data), size[0], size[1], stride[0], box[0], box[1], width};
    if (reinterpret_cast<uintptr_t>(data) % 16 || stride[0] % 16 || box[0] > 256 || box[1] > 256 ||
        (width && box[0] * 2 > width))
        return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof *map);
    memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

/* Visits a box: where each element lies in shared memory, and in the matrix, NULL outside. */
template <typename Visit>
void each_of_box(const CUtensorMap &map, int column, int row, uint32_t address, Visit visit) {
    tensor_map box;
    memcpy(&box, &map, sizeof box);
    if (address % 128)
        fail("a box that does not begin at a multiple of 128");
    for (unsigned r = 0; r < box.box_rows; r++)
        for (unsigned c = 0; c < box.box_columns; c++) {
            const int64_t y = row + static_cast<int64_t>(r), x = column + static_cast<int64_t>(c);
            const bool exists =
                y >= 0 && x >= 0 && y < static_cast<int64_t>(box.rows) && x < static_cast<int64_t>(box.columns);
            visit(at(swizzled_address(address + (r * box.box_columns + c) * 2, static_cast<int>(box.swizzle)), 2),
                  exists ? box.data + static_cast<uint64_t>(y) * box.stride + static_cast<uint64_t>(x) * 2 : nullptr);
        }
}

inline long bytes_of(const CUtensorMap &map) {
    tensor_map box;
    memcpy(&box, &map, sizeof box);
    return static_cast<long>(box.box_rows) * box.box_columns * 2;
}

inline std::function<void()> *body;
inline void enter() {
    (*body)();
    self->done = true;
    yield();
    abort();
}

/* Threads of a block, which begin when they first go on. */
inline void begin(block *block, unsigned threads, std::vector<char> *stacks) {
    block->left = threads;
    block->shared.assign(SHARED_BYTES, static_cast<char>(0xff)); /* NaN */
    block->fibers.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        fiber &fiber = block->fibers[i];
        stacks[i].resize(STACK_BYTES);
        fiber.number = i;
        fiber.products.emplace_back();
        fiber.stores.emplace_back();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks[i].data();
        fiber.context.uc_stack.ss_size = stacks[i].size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 0);
    }
}

/* When all threads are done. */
inline void end(block *block) {
    now = block;
    while (!block->copies.empty() || !block->pipes.empty())
        some_copies();
    if (!block->tensor_memory.empty())
        fail("tensor memory that is not freed");
    for (fiber &fiber : block->fibers) {
        finish(fiber.stores, 0);
        if (fiber.products.size() > 1 || !fiber.products.back().empty())
            fail("products that nobody waits for");
    }
}

template <typename Kernel, typename... Arguments>
void run_grid(unsigned blocks, unsigned threads, unsigned together, Kernel kernel, const Arguments &...arguments) {
    std::function<void()> call = [&] { kernel(arguments...); };
    body = &call;
    grid_size = blocks;
    block_size = threads;
    static std::vector<std::vector<char>> stacks;
    stacks.resize(std::max<size_t>(stacks.size(), threads * together));
    for (unsigned first = 0; first < blocks; first += together) {
        cluster = std::vector<block>(together);
        idle = 0;
        for (unsigned i = 0; i < together; i++) {
            cluster[i].number = first + i;
            begin(&cluster[i], threads, &stacks[i * threads]);
        }
        /* Chance holds some warps up, and copies, until nothing else goes on. */
        const unsigned warps = threads / LANES;
        std::vector<bool> held(warps * together, false);
        bool held_copies = false;
        unsigned left = threads * together;
        for (long turn = 0, until = 0; left > 0; turn++) {
            const bool stuck = idle > 4 * static_cast<long>(threads * together);
            if (turn >= until || stuck) {
                for (size_t i = 0; i < held.size(); i++)
                    held[i] = !stuck && chance() % 3 == 0;
                held_copies = !stuck && chance() % 3 == 0;
                until = turn + (stuck ? 50 : chance() % 3000);
            }
            const unsigned chosen = chance() % (warps * together), warp = chosen % warps;
            now = &cluster[chosen / warps];
            if (held[chosen]) {
                idle++;
                continue;
            }
            for (unsigned lane = 0; lane < LANES; lane++) {
                fiber &fiber = now->fibers[warp * LANES + lane];
                if (fiber.done)
                    continue;
                go_on(fiber);
                left -= fiber.done;
                now->left -= fiber.done;
            }
            self = nullptr;
            if (!held_copies)
                some_copies();
        }
        for (block &block : cluster)
            end(&block);
    }
}

} // namespace emulated

/* ---- What launches ask of CUDA's runtime and driver ---- */

/* Where a kernel's shared memory begins: what lies there is each block's own. */
namespace moer_fused {
inline char shared[1];
}
namespace moer_wide {
inline char shared[1];
}
namespace moer_columns {
inline char shared[1];
}

namespace emulated {

inline int processors = 12;
inline decltype(&encode) map_maker = encode;

/* One launch after the other, whoever calls, and in plain arithmetic, whatever the caller's is. */
struct launching {
    launching() {
        mutex.lock();
        fegetenv(&before);
        fesetenv(FE_DFL_ENV);
    }
    ~launching() {
        fesetenv(&before);
        mutex.unlock();
    }
    fenv_t before;
    static inline std::mutex mutex;
};

template <typename Kernel, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t *config, Kernel kernel, const Arguments &...arguments) {
    const launching now;
    if (config->dynamicSmemBytes > SHARED_BYTES || config->blockDim.x % LANES)
        return cudaErrorInvalidValue;
    unsigned together = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            together = config->attrs[i].val.clusterDim.x;
    if (config->gridDim.x % together)
        return cudaErrorInvalidValue;
    run_grid(config->gridDim.x, config->blockDim.x, together, kernel, arguments...);
    return cudaSuccess;
}

inline CUresult no_context(CUcontext *context) {
    *context = nullptr;
    return CUDA_SUCCESS;
}

inline CUresult any_context(CUcontext) {
    return CUDA_SUCCESS;
}

inline cudaError_t driver_entry(const char *name, void **function) {
    *function = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void *>(map_maker)
                : strcmp(name, "cuCtxGetCurrent") == 0      ? reinterpret_cast<void *>(no_context)
                : strcmp(name, "cuCtxSetCurrent") == 0      ? reinterpret_cast<void *>(any_context)
                                                            : nullptr;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

inline cudaError_t attribute_of(int *value, cudaDeviceAttr which) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int major = 9;
#else
    const int major = 10;
#endif
    *value = which == cudaDevAttrMultiProcessorCount            ? processors
             : which == cudaDevAttrComputeCapabilityMajor       ? major
             : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? SHARED_BYTES
                                                                : 0;
    return cudaSuccess;
}

} // namespace emulated

#define cudaFuncSetAttribute(...) cudaSuccess
#define cudaFuncGetAttributes(attributes, kernel) ((attributes)->ptxVersion = 90, cudaSuccess)
#define cudaGetDriverEntryPointByVersion(name, function, version, flags, status) emulated::driver_entry(name, function)
#define cudaLaunchKernelEx emulated::launch
#define cudaGetLastError() cudaSuccess
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaDeviceGetAttribute(value, which, device) emulated::attribute_of(value, which)

/* ---- Where a thread is ---- */

namespace emulated {
struct number {
    unsigned (*get)();
    operator unsigned() const {
        return get();
    }
};
struct index {
    number x;
};
} // namespace emulated
inline const emulated::index threadIdx{{[] { return emulated::self->number; }}},
    blockIdx{{[] { return emulated::now->number; }}}, gridDim{{[] { return emulated::grid_size; }}},
    blockDim{{[] { return emulated::block_size; }}};

/* ---- CUDA C++ ---- */

inline void __syncthreads() {
    emulated::meet(0, emulated::block_size);
}
inline void __syncwarp() {
    emulated::meet(100 + static_cast<int>(emulated::self->number) / 32, 32);
}
/* What each lane of a warp gives, which all see. */
template <typename V, typename Take>
auto exchanged(V value, Take take) {
    static_assert(sizeof value <= 8, "fits");
    const int warp = static_cast<int>(emulated::self->number) / 32;
    auto &values = emulated::now->shuffles[warp];
    values.resize(32);
    memcpy(&values[emulated::self->number % 32], &value, sizeof value);
    emulated::meet(200 + warp, 32);
    const auto result = take([&](unsigned lane) {
        V other;
        memcpy(&other, &values[lane], sizeof other);
        return other;
    });
    emulated::meet(300 + warp, 32);
    return result;
}
template <typename V>
V __shfl_sync(unsigned, V value, int lane, int width = 32) {
    const unsigned own = emulated::self->number % 32, from = static_cast<unsigned>(lane % width);
    return exchanged(
        value, [=](auto of) { return of(own / static_cast<unsigned>(width) * static_cast<unsigned>(width) + from); });
}
template <typename V>
V __shfl_xor_sync(unsigned, V value, int mask) {
    const unsigned own = emulated::self->number % 32;
    return exchanged(value, [=](auto of) { return of(own ^ static_cast<unsigned>(mask)); });
}
inline bool __all_sync(unsigned, bool value) {
    return exchanged(value, [](auto of) {
        bool all = true;
        for (unsigned lane = 0; lane < 32; lane++)
            all = all && of(lane);
        return all;
    });
}
inline void __threadfence() {}
template <typename V>
V __ldcg(const V *from) {
    return *from;
}
inline int atomicAdd(int *to, int value) {
    return (*to += value) - value;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
#define __builtin_assume(truth)
#define __isGlobal(pointer) true
inline float __fadd_rn(float a, float b) {
    return a + b;
}
#define __trap() abort()
#undef __noinline__
#define __noinline__
#undef __launch_bounds__
#define __launch_bounds__(...)
/* ---- ptx.cuh ---- */

inline uint32_t shared_address(const void *) { /* of its beginning */
    return emulated::FIRST_ADDRESS;
}
inline void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    if (bytes % 16 || to % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        emulated::fail("a bulk copy of what is not whole chunks");
    emulated::later([=] {
        memcpy(emulated::at(to, bytes), from, static_cast<size_t>(bytes));
        emulated::complete(barrier, bytes);
    });
}
inline void copy_box(uint32_t to, const CUtensorMap &map, int column, int row, uint32_t barrier) {
    emulated::later([=, &map] {
        emulated::each_of_box(map, column, row, to, [](char *here, const char *there) {
            memset(here, 0, 2);
            if (there)
                memcpy(here, there, 2);
        });
        emulated::complete(barrier, emulated::bytes_of(map));
    });
}
/* Each block's copy comes in its own time. */
template <int BLOCKS>
void copy_box_to_cluster(uint32_t to, const CUtensorMap &map, int column, int row, uint32_t barrier) {
    for (unsigned i = 0; i < BLOCKS; i++)
        emulated::in_block(i, [&] { copy_box(to, map, column, row, barrier); });
}
inline void store_box(const CUtensorMap &map, int column, int row, uint32_t from) {
    emulated::self->stores.back().push_back([=, &map] {
        emulated::each_of_box(map, column, row, from, [](const char *here, char *there) {
            if (there)
                memcpy(there, here, 2);
        });
    });
    emulated::self->stores.emplace_back();
}
template <int PENDING>
void store_bulk_wait() {
    emulated::finish(emulated::self->stores, PENDING);
    emulated::yield();
}
inline void barrier_init(uint32_t barrier, int arrivals) {
    emulated::now->barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive_expecting(uint32_t address, int bytes) {
    emulated::barrier &barrier = emulated::barrier_at(address);
    barrier.bytes += bytes;
    if (--barrier.pending < 0)
        emulated::fail("more arrive than the barrier has been told");
    emulated::settle(barrier);
    emulated::idle = 0;
    emulated::yield();
}
inline void barrier_arrive(uint32_t barrier) {
    barrier_arrive_expecting(barrier, 0);
}
inline void barrier_arrive(uint32_t address, int block) {
    emulated::in_block(static_cast<unsigned>(block), [=] {
        emulated::barrier &barrier = emulated::barrier_at(address);
        if (--barrier.pending < 0)
            emulated::fail("more arrive than the barrier has been told");
        emulated::settle(barrier);
    });
    emulated::idle = 0;
    emulated::yield();
}
inline void cluster_synchronize() {
    emulated::meet(&emulated::cluster[0], 700, emulated::block_size * static_cast<unsigned>(emulated::cluster.size()));
}
template <int REGISTERS>
void give_registers() {}
template <int REGISTERS>
void take_registers() {}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    emulated::wait_until([=] { return emulated::barrier_at(barrier).phase != static_cast<int>(parity); },
                         "waits for a barrier for ever");
}
inline void prefetch_map(const CUtensorMap &) {}
inline void synchronize(int barrier, int threads) {
    emulated::meet(barrier, static_cast<unsigned>(threads));
}
inline void store_shared(uint32_t to, const float (&values)[4]) {
    memcpy(emulated::at(to, 16), values, 16);
}
template <typename T>
void store_shared(uint32_t to, T value) {
    memcpy(emulated::at(to, sizeof value), &value, sizeof value);
}
inline uint4 load_words(uint32_t from) {
    uint4 value;
    memcpy(&value, emulated::at(from, 16), 16);
    return value;
}
inline uint32_t load_word(uint32_t from) {
    uint32_t value;
    memcpy(&value, emulated::at(from, 4), 4);
    return value;
}
inline void store_words(uint32_t to, uint4 value) {
    memcpy(emulated::at(to, 16), &value, 16);
}
inline void fence_asynchronous() {}

namespace emulated {

/* Visits a lane's elements of a warp's four 8 x 8 matrices, two of a row of each, where they lie in shared memory, or
 * their transposes do: a lane gives a row's address. */
template <typename Visit>
void matrices(uint32_t row, bool transpose, Visit visit) {
    const int warp = static_cast<int>(self->number) / 32, lane = static_cast<int>(self->number) % 32;
    auto &rows = now->shuffles[1000 + warp];
    rows.resize(32);
    rows[static_cast<size_t>(lane)] = row;
    meet(400 + warp, 32);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            const int down = lane / 4, across = lane % 4 * 2 + j;
            visit(i, j,
                  at(static_cast<uint32_t>(rows[static_cast<size_t>(i * 8 + (transpose ? across : down))]) +
                         static_cast<uint32_t>(transpose ? down : across) * 2,
                     2));
        }
    meet(500 + warp, 32);
}
inline void store(uint32_t row, bool transpose, const uint32_t (&values)[4]) {
    matrices(row, transpose,
             [&](int i, int j, char *to) { memcpy(to, reinterpret_cast<const char *>(&values[i]) + 2 * j, 2); });
}

} // namespace emulated

inline void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulated::store(row, false, {a, b, c, d});
}
inline void store_matrices_transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    emulated::store(row, true, {a, b, c, d});
}
inline void load_matrices_transposed(uint32_t (&values)[4], uint32_t row) {
    emulated::matrices(row, true, [&](int i, int j, const char *from) {
        memcpy(reinterpret_cast<char *>(&values[i]) + 2 * j, from, 2);
    });
}
inline uint32_t transposed(uint32_t matrix) {
    const unsigned lane = emulated::self->number % 32, row = lane / 4, column = lane % 4 * 2;
    return exchanged(matrix, [=](auto of) { /* row r's element c is lane 4 r + c / 2's */
                                            const auto element = [&](unsigned r, unsigned c) {
                                                return of(4 * r + c / 2) >> c % 2 * 16 & 0xffff;
                                            };
                                            return element(column, row) | element(column + 1, row) << 16;
    });
}

/* ---- wgmma.cuh ---- */

template <int DOWN, int ACROSS>
void hold(float (&)[DOWN][ACROSS][4]) {}
inline void wgmma_fence() {}
inline void wgmma_commit() {
    emulated::self->products.emplace_back();
}
template <int PENDING>
void wgmma_wait() {
    emulated::finish(emulated::self->products, PENDING);
    emulated::aligned();
}

namespace emulated {

/* An element of a matrix by its descriptor: where it begins, what lies how many bytes apart, and the swizzle. */
template <typename T>
float element(uint64_t descriptor, bool term_rows, int outer, int term) {
    const uint32_t start = (descriptor & 0x3fff) << 4, across = (descriptor >> 16 & 0x3fff) << 4,
                   along = (descriptor >> 32 & 0x3fff) << 4;
    const int width = descriptor >> 62 == 1 ? 128 : 64, in_panel = width / 2;
    uint32_t address = start;
    if (term_rows)
        address += static_cast<uint32_t>(outer / in_panel) * across + static_cast<uint32_t>(term / 8) * along +
                   static_cast<uint32_t>(term % 8 * width + outer % in_panel * 2);
    else
        address += static_cast<uint32_t>(outer / 8) * along + static_cast<uint32_t>(outer % 8 * width + term * 2);
    T value;
    memcpy(&value, at(swizzled_address(address, width), 2), 2);
    return static_cast<float>(value);
}

template <bool TERM_ROWS_A, typename T, int GROUPS>
void product(float (&sums)[GROUPS][4], uint64_t a, uint64_t b, int add) {
    const int warp = static_cast<int>(self->number) / 32 % 4, lane = static_cast<int>(self->number) % 32;
    float *to = &sums[0][0];
    self->products.back().push_back([=] {
        for (int half = 0; half < 2; half++) {
            float row[16];
            for (int k = 0; k < 16; k++)
                row[k] = element<T>(a, TERM_ROWS_A, warp * 16 + half * 8 + lane / 4, k);
            for (int j = 0; j < GROUPS; j++)
                for (int i = 0; i < 2; i++) {
                    float sum = add ? to[j * 4 + half * 2 + i] : 0;
                    for (int k = 0; k < 16; k++)
                        sum += row[k] * element<T>(b, true, j * 8 + lane % 4 * 2 + i, k);
                    to[j * 4 + half * 2 + i] = sum;
                }
        }
    });
}

/* The same with the first factor in registers, which are read at once: that they must not change is not seen. */
template <typename T, int GROUPS>
void product(float (&sums)[GROUPS][4], const uint32_t (&a)[4], uint64_t b, int add) {
    const unsigned lane = self->number % LANES;
    std::vector<float> rows(32); /* two */
    for (int i = 0; i < 4; i++)
        for (unsigned t = 0; t < 4; t++) {
            const uint32_t pair = __shfl_sync(~0u, a[i], static_cast<int>(t), 4);
            for (unsigned j = 0; j < 2; j++) {
                const uint16_t bits = static_cast<uint16_t>(pair >> 16 * j);
                T value;
                memcpy(&value, &bits, 2);
                rows[static_cast<size_t>(i % 2) * 16 + static_cast<size_t>(i / 2) * 8 + 2 * t + j] =
                    static_cast<float>(value);
            }
        }
    float *to = &sums[0][0];
    self->products.back().push_back([=] {
        for (size_t half = 0; half < 2; half++)
            for (int j = 0; j < GROUPS; j++)
                for (int i = 0; i < 2; i++) {
                    float &sum = to[static_cast<size_t>(j) * 4 + half * 2 + static_cast<size_t>(i)];
                    sum = add ? sum : 0;
                    for (int k = 0; k < 16; k++)
                        sum += rows[half * 16 + static_cast<size_t>(k)] *
                               element<T>(b, false, j * 8 + static_cast<int>(lane) % 4 * 2 + i, k);
                }
    });
}

} // namespace emulated

template <typename T>
void wgmma(float (&sums)[8][4], const uint32_t (&a)[4], uint64_t b, int add, T) {
    emulated::product<T>(sums, a, b, add);
}
template <bool TERM_ROWS_A, int GROUPS>
void wgmma(float (&sums)[GROUPS][4], uint64_t a, uint64_t b, int add, __nv_bfloat16) {
    emulated::product<TERM_ROWS_A, __nv_bfloat16>(sums, a, b, add);
}
template <bool TERM_ROWS_A, int GROUPS>
void wgmma(float (&sums)[GROUPS][4], uint64_t a, uint64_t b, int add, __half) {
    emulated::product<TERM_ROWS_A, __half>(sums, a, b, add);
}

/* ---- tcgen05.cuh ---- */

namespace emulated {

enum { LANES_OF_MEMORY = 128, COLUMNS_OF_MEMORY = 512 };

inline float &memory_at(isa::cell cell) {
    if (now->tensor_memory.empty() || cell.lane < 0)
        fail("tensor memory that there is not");
    return now->tensor_memory[static_cast<size_t>(cell.lane * COLUMNS_OF_MEMORY + cell.column)];
}

/* The cell of a register, by a thread of the warp that the address is for. */
inline float &memory_of(uint32_t address, int reg) {
    isa::cell cell;
    const int warp = static_cast<int>(self->number) / LANES, lane = static_cast<int>(self->number) % LANES;
    if (const char *sentence = isa::load_cell(address, warp % 4, lane, reg, &cell))
        fail(sentence);
    return memory_at(cell);
}

template <typename T>
std::vector<float> operand_of(uint64_t descriptor, bool mn_major, int extent) {
    isa::operand operand;
    if (const char *sentence = isa::decode_operand(descriptor, mn_major, &operand))
        fail(sentence);
    std::vector<float> elements;
    for (int i = 0; i < extent; i++)
        for (int k = 0; k < 16; k++) {
            T value;
            memcpy(&value, at(isa::element_address(operand, i, k), 2), 2);
            elements.push_back(static_cast<float>(value));
        }
    return elements;
}

inline void tensor_product_now(uint32_t sums, uint64_t a, uint64_t b, uint32_t descriptor, int add) {
    isa::instruction product;
    if (const char *sentence = isa::decode_instruction(descriptor, &product))
        fail(sentence);
    const auto operand = [](int type) { return type ? operand_of<__nv_bfloat16> : operand_of<__half>; };
    const std::vector<float> left = operand(product.a_type)(a, product.a_mn_major, product.m),
                             right = operand(product.b_type)(b, product.b_mn_major, product.n);
    for (int row = 0; row < product.m; row++)
        for (int column = 0; column < product.n; column++) {
            float &cell = memory_at(isa::accumulator_cell(sums, product.m, row, column)), sum = add ? cell : 0;
            for (int k = 0; k < 16; k++)
                sum += left[static_cast<size_t>(row * 16 + k)] * right[static_cast<size_t>(column * 16 + k)];
            cell = sum;
        }
    idle = 0;
}

inline void all_of(std::vector<std::function<void()>> &accesses) {
    for (auto &access : accesses)
        access();
    accesses.clear();
}

} // namespace emulated

inline void tensor_allocate(uint32_t to) {
    emulated::aligned();
    if (emulated::self->number % emulated::LANES == 0) {
        if (!emulated::now->tensor_memory.empty())
            emulated::fail("tensor memory is allocated twice");
        emulated::now->tensor_memory.assign(emulated::LANES_OF_MEMORY * emulated::COLUMNS_OF_MEMORY, NAN);
        memset(emulated::at(to, 4), 0, 4);
    }
    emulated::aligned();
}
inline void tensor_free(uint32_t memory) {
    emulated::aligned();
    if (emulated::self->number % emulated::LANES == 0) {
        if (memory != 0 || emulated::now->tensor_memory.empty() || !emulated::now->pipes.empty())
            emulated::fail("tensor memory is freed that is in use, or is none");
        emulated::now->tensor_memory.clear();
    }
    emulated::aligned();
}
inline void tensor_before_sync() {}
inline bool elected() {
    emulated::aligned();
    return emulated::self->number % emulated::LANES == 0;
}
inline void tensor_after_sync() {}
inline void tensor_multiply(uint32_t sums, uint64_t a, uint64_t b, uint32_t product, int add) {
    emulated::now->pipes[emulated::self->number].push_back(
        [=] { emulated::tensor_product_now(sums, a, b, product, add); });
}
inline void tensor_commit(uint32_t barrier) {
    emulated::now->pipes[emulated::self->number].push_back([=] {
        emulated::barrier_at(barrier).pending--;
        emulated::settle(emulated::barrier_at(barrier));
        emulated::idle = 0;
    });
    emulated::yield();
}
/* Not before somebody waits for it. */
inline void tensor_load(float (&values)[32], uint32_t from) {
    emulated::aligned();
    for (int i = 0; i < 32; i++) {
        float *to = &values[i];
        *to = NAN;
        emulated::self->tensor_loads.push_back([=] { *to = emulated::memory_of(from, i); });
    }
}
inline void tensor_store(uint32_t to, const float (&values)[32]) {
    emulated::aligned();
    for (int i = 0; i < 32; i++) {
        const float value = values[i];
        emulated::self->tensor_stores.push_back([=] { emulated::memory_of(to, i) = value; });
    }
}
inline void tensor_load_wait(float (&)[32]) {
    emulated::aligned();
    emulated::all_of(emulated::self->tensor_loads);
    emulated::yield();
}
inline void tensor_store_wait() {
    emulated::aligned();
    emulated::all_of(emulated::self->tensor_stores);
}

#endif
