/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a. A block makes either a part of the weight gradient, from all
 * tokens, or a part of grad_hidden_states; so nothing is summed up across blocks, and no block waits for another.
 *
 * - A weight block has 64 columns, and all experts or 64 of them: G^T times hidden states, a warpgroup for each 64
 *   experts. Hidden states come by tensor copies, which do not wait for the kernel before.
 * - A hidden block has a run of items: tiles of 64 tokens by 128 columns of grad_hidden_states, one below the other and
 *   then the next columns. Two warpgroups take turns: G times the gate, whose columns come by tensor copies while the
 *   ones before are in use. A warp stores results by tensor copies; stores of registers took three times as long as the
 *   products.
 * - Others bring G to either, once the kernel before is done: a thread copies tiles, which that has left as they are to
 *   lie in shared memory; or warps scatter entries, K a token, into tiles of zeros.
 *
 * For H = 2048, E = 128 there are 64 weight blocks, for 5120, 160, 80; the other multiprocessors have a hidden block
 * each. What decides a small batch is how soon the first tile of G and the gate are there, a large one what passes
 * through the second-level cache: a weight block reads all of G, or its experts' part. A product waits for all that is
 * done to its descriptors: they are an addition apart, in registers that a warp shares. The kernel before lets this one
 * start first thing, and fits beside it: 96 registers and at most 222 KB are few enough. */
#include "tiles.cuh"

#include <cuda.h>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_fused {

enum {
    TOKENS = TILE_TOKENS,
    BLOCK = 64, /* experts */
    PANEL_COLUMNS = B_PANEL / 2,
    HIDDEN_COLUMNS = 2 * PANEL_COLUMNS, /* of an item */
    WARPGROUP = 128,
    TURNS = 2,
    HIDDEN_BYTES = TOKENS * B_PANEL,
    RESULT_BYTES = TOKENS * HIDDEN_COLUMNS * 2,
    BLOCK_BYTES = TOKENS * BLOCK * 2, /* of a tile of G */
    ENTRIES_ROOM = 12 * 1024,         /* two tiles of 16 entries a token, at least */
    MOST_BARRIERS = 64
};

/* Sizes for so many experts at most. SPARSE: G comes as entries. */
template <int MOST_EXPERTS, bool SPARSE_LOGITS>
struct shape {
    static constexpr int EXPERTS = MOST_EXPERTS, BLOCKS = (EXPERTS + BLOCK - 1) / BLOCK;
    static constexpr bool SPARSE = SPARSE_LOGITS;
    static constexpr int LOADERS = SPARSE ? 128 : WARP;
    static constexpr int WARPGROUPS = BLOCKS > TURNS ? BLOCKS : TURNS;
    static constexpr int THREADS = WARPGROUPS * WARPGROUP + LOADERS + 2 * WARP;
    static constexpr int BOUND = SPARSE ? 640 : 512; /* registers: 96 or 128 */
    static constexpr int GATE_BYTES = EXPERTS * HIDDEN_COLUMNS * 2, LOGITS_BYTES = TOKENS * EXPERTS * 2;
    static constexpr int ENTRY_SLOTS = 4, TEAMS = 2; /* for tiles of entries */
    static constexpr int STEP = SPARSE ? 1 : 2;      /* a weight block's, in tiles: short ones wait for one another */
    static constexpr int ROOM = (SPARSE ? 221 : 215) * 1024, BYTES = ROOM + MOST_BARRIERS * 8;
    /* A hidden block's: what gates and results leave. */
    static constexpr int GATES = 2, RESULTS = 3, LEFT = ROOM - GATES * GATE_BYTES - RESULTS * RESULT_BYTES;
    static constexpr int ITEM_SLOTS = SPARSE ? ENTRY_SLOTS : LEFT / LOGITS_BYTES < 12 ? LEFT / LOGITS_BYTES : 12;
    static_assert(ITEM_SLOTS % TURNS == 0 && ENTRY_SLOTS % TEAMS == 0,
                  "whoever takes every other tile must see every phase of its slots' barriers");
    static_assert(ITEM_SLOTS * LOGITS_BYTES + (SPARSE ? ENTRIES_ROOM : 0) <= LEFT, "slots fit");
};

/* How the blocks share the work: first those of the weight gradient, of so many parts of the experts; then those of
 * grad_hidden_states, each of so many items, and the first so many of one more. */
struct shares {
    int weight_blocks, parts;
    int tiles; /* of tokens */
    int items, rest;
};

/* Tensor maps, of panels of 64 columns. */
struct maps {
    CUtensorMap hidden_states, weight, grad_hidden;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What is the same for a warp, so that the compiler knows it: descriptors of products that lie in uniform registers
 * from the first do not wait for one another. */
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(0xffffffffu, value, 0);
}

/* ---- Rings ---- */

/* Slots in shared memory, and two barriers for each: full, then empty. */
struct ring {
    uint32_t slots, barriers;
    int bytes, count;

    /* A warp each takes its share: what many lanes do to barriers, they do one after the other. */
    __device__ __forceinline__ void init(int producers, int consumers) const {
        if (threadIdx.x % WARP == 0)
            for (int slot = threadIdx.x / WARP; slot < count; slot += blockDim.x / WARP) {
                barrier_init(barriers + slot * 16, producers);
                barrier_init(barriers + slot * 16 + 8, consumers);
            }
    }
};

/* Where somebody is on the way around a ring. */
struct place {
    const ring &around;
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ explicit place(const ring &ring) : around(ring) {}
    __device__ __forceinline__ uint32_t memory() const {
        return around.slots + slot * around.bytes;
    }
    __device__ __forceinline__ uint32_t full() const {
        return around.barriers + slot * 16;
    }
    __device__ __forceinline__ uint32_t empty() const {
        return full() + 8;
    }
    __device__ __forceinline__ void wait_full() const {
        barrier_wait(full(), parity);
    }
    __device__ __forceinline__ void wait_empty() const { /* the first time around, at once */
        barrier_wait(empty(), parity ^ 1);
    }
    /* A warp has read the slot. */
    __device__ __forceinline__ void release() const {
        if (threadIdx.x % WARP == 0)
            barrier_arrive(empty());
    }
    __device__ __forceinline__ void advance() {
        if (++slot == around.count) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* ---- Sums ---- */

/* Sums of 64 rows, as wgmma has them: a warp has 16 rows, a thread pairs of columns. */
template <int COLUMNS>
struct sums_of : async_layout {
    static constexpr int DOWN = 1, ACROSS = COLUMNS / 8;
    float sums[1][ACROSS][4];

    __device__ __forceinline__ void clear() {
        memset(sums, 0, sizeof sums);
    }
    __device__ __forceinline__ void add(const sums_of &more) {
#pragma unroll
        for (int i = 0; i < ACROSS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[0][i][j] = __fadd_rn(sums[0][i][j], more.sums[0][i][j]);
    }
};

/* ---- Either block ---- */

/* What a block works on: steps, of which each needs a tile of G, or two. */
struct job {
    int first, steps, tiles; /* step i's is tile (first + i) % tiles */
    ring logits;

    __device__ __forceinline__ int tile(int step) const {
        return static_cast<int>(static_cast<unsigned>(first + step) % static_cast<unsigned>(tiles));
    }
};

/* So many tiles of G a step, or so many bytes of each, by a single thread. */
template <typename shape, int TOGETHER>
__device__ __forceinline__ void load_logits(const job &job, const char *logits, int bytes) {
    place at(job.logits);
    wait_for_last_kernel();
    int tile = job.first;
#pragma unroll 1
    for (int i = 0; i < job.steps; i++, at.advance()) {
        at.wait_empty();
        barrier_arrive_expecting(at.full(), TOGETHER * bytes);
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
            copy_bulk(at.memory() + j * bytes, logits + static_cast<int64_t>(tile + j) * shape::LOGITS_BYTES, bytes,
                      at.full());
        tile = tile + TOGETHER >= job.tiles ? 0 : tile + TOGETHER;
    }
}

/* Writes entries into a tile of G, or zeros where those were. */
__device__ __forceinline__ void put_entries(uint32_t tile, uint4 entries, bool zeros) {
    for (uint32_t entry : {entries.x, entries.y, entries.z, entries.w})
        if ((entry & 0xffff) != NO_ENTRY)
            store_shared(tile + (entry & 0xffff), static_cast<unsigned short>(zeros ? 0 : entry >> 16));
}

/* A ring for entries of tiles, with an even number of slots: each is one team's. */
__device__ __forceinline__ ring entries_ring(const problem &problem, uint32_t slots, uint32_t barriers) {
    const int bytes = TOKENS * 4 * problem.entries;
    return {slots, barriers, bytes, bytes <= ENTRIES_ROOM / 6 ? 6 : bytes <= ENTRIES_ROOM / 4 ? 4 : 2};
}

/* Entries of a tile of G, by a single thread. */
__device__ __forceinline__ void copy_entries(const place &at, const problem &problem, int tile) {
    const int bytes = at.around.bytes;
    at.wait_empty();
    barrier_arrive_expecting(at.full(), bytes);
    copy_bulk(at.memory(), problem.logits + static_cast<int64_t>(tile) * bytes, bytes, at.full());
}

/* G from its entries, by teams of a thread a token, which take turns. They clear what they wrote into the slot before,
 * and write what there is now. Each thread keeps its first eight of those: what it loaded from global memory, the fence
 * would wait for. */
template <typename shape>
__device__ __forceinline__ void make_logits(const job &job, const ring &entries, const problem &problem, int thread) {
    constexpr int TEAMS = shape::TEAMS, SLOTS = shape::ENTRY_SLOTS / TEAMS, HELD = 2;
    const int team = uniform(thread / TOKENS), chunks = problem.entries / 4;
    const uint32_t own = thread % TOKENS * chunks * CHUNK_BYTES;
    for (int i = thread * CHUNK_BYTES; i < shape::ENTRY_SLOTS * shape::LOGITS_BYTES; i += shape::LOADERS * CHUNK_BYTES)
        store_shared(job.logits.slots + i, {0, 0, 0, 0});
    synchronize(2, shape::LOADERS);
    const uint4 none = make_uint4(NO_ENTRY, NO_ENTRY, NO_ENTRY, NO_ENTRY);
    uint4 held[SLOTS][HELD];
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
        for (int j = 0; j < HELD; j++)
            held[s][j] = none;
    place from(entries), to(job.logits);
    if (team == 1) {
        from.advance();
        to.advance();
    }
#pragma unroll 1
    for (int i = team; i < job.steps; i += TEAMS * SLOTS)
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const int step = i + s * TEAMS;
            if (step >= job.steps)
                break;
            from.wait_full();
            const uint32_t list = from.memory() + own;
            to.wait_empty();
            const uint32_t tile = to.memory();
#pragma unroll
            for (int j = 0; j < HELD; j++)
                put_entries(tile, held[s][j], true);
#pragma unroll 1
            for (int j = HELD; j < chunks && i >= TEAMS * SLOTS; j++)
                put_entries(tile,
                            __ldcg(reinterpret_cast<const uint4 *>(
                                problem.logits + job.tile(step - TEAMS * SLOTS) * int64_t{entries.bytes} + own +
                                j * CHUNK_BYTES)),
                            true);
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                held[s][j] = j < chunks ? load_words(list + j * CHUNK_BYTES) : none;
                put_entries(tile, held[s][j], false);
            }
#pragma unroll 1
            for (int j = HELD; j < chunks; j++)
                put_entries(tile, load_words(list + j * CHUNK_BYTES), false);
            fence_asynchronous();
            __syncwarp();
            if (thread % WARP == 0) {
                barrier_arrive(to.full());
                barrier_arrive(from.empty());
            }
            for (int j = 0; j < TEAMS; j++) {
                from.advance();
                to.advance();
            }
        }
}

/* ---- Weight blocks ---- */

/* Stores neighbours of the weight gradient one by one. Out of the way of the code that stores more at once. */
__device__ __noinline__ void store_apart(const problem &problem, int64_t expert, int64_t column, float first,
                                         float second) {
    if (problem.accumulate) {
        first = __fadd_rn(load_element(problem.grad_weight, expert, column), first);
        second = __fadd_rn(load_element(problem.grad_weight, expert, column + 1), second);
    }
    store_element(problem.grad_weight, expert, column, first);
    store_element(problem.grad_weight, expert, column + 1, second);
}

template <typename T, typename shape>
__device__ __forceinline__ void weight_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared) {
    /* A part is all blocks of 64 experts, or one; a warpgroup each. */
    const bool apart = shares.parts > 1;
    const int blocks = apart ? 1 : shape::BLOCKS, part = apart ? static_cast<int>(blockIdx.x) % shape::BLOCKS : 0;
    const int column = static_cast<int>(blockIdx.x) / (apart ? shape::BLOCKS : 1) * PANEL_COLUMNS;
    constexpr int STEP = shape::STEP, PART_SLOTS = shape::ROOM / (STEP * (HIDDEN_BYTES + BLOCK_BYTES)),
                  ALL_SLOTS = shape::ROOM / (STEP * (HIDDEN_BYTES + shape::BLOCKS * BLOCK_BYTES));
    const int part_bytes = blocks * BLOCK_BYTES;
    job job;
    job.first = 0;
    job.tiles = shares.tiles;
    job.steps = (shares.tiles + STEP - 1) / STEP;
    ring hidden, entries{};
    hidden.slots = shared;
    hidden.barriers = shared + shape::ROOM;
    if (shape::SPARSE) {
        hidden.bytes = STEP * HIDDEN_BYTES;
        hidden.count = (shape::ROOM - ENTRIES_ROOM - shape::ENTRY_SLOTS * shape::LOGITS_BYTES) / hidden.bytes;
        job.logits.slots = shared + hidden.count * hidden.bytes;
        job.logits.bytes = shape::LOGITS_BYTES;
        job.logits.count = shape::ENTRY_SLOTS;
        job.logits.barriers = hidden.barriers + hidden.count * 16;
        entries =
            entries_ring(problem, shared + shape::ROOM - ENTRIES_ROOM, job.logits.barriers + job.logits.count * 16);
    } else { /* G in the same ring, behind hidden states */
        hidden.bytes = STEP * (HIDDEN_BYTES + part_bytes);
        hidden.count = apart ? PART_SLOTS : ALL_SLOTS;
        job.logits = hidden;
        job.logits.slots += STEP * HIDDEN_BYTES;
    }
    const int role = uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x - shape::WARPGROUPS * WARPGROUP;
    const bool leads = thread == shape::LOADERS;
    if (leads)
        prefetch_map(maps.hidden_states);
    hidden.init(shape::SPARSE ? 1 : 2, blocks * (WARPGROUP / WARP));
    if (shape::SPARSE) {
        job.logits.init(TOKENS / WARP, blocks * (WARPGROUP / WARP));
        entries.init(1, TOKENS / WARP);
    }
    barrier_init_done();
    __syncthreads();
    if (role < shape::WARPGROUPS) {
        if (role >= blocks)
            return;
        sums_of<PANEL_COLUMNS> chain, total;
        total.clear();
        chain.clear();
        const int block = part * blocks + role;
        const uint32_t offset = (shape::SPARSE ? block : role) * BLOCK_BYTES;
        const matrix first_a = matrix_at(job.logits.slots + offset, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64),
                     first_b = matrix_at(hidden.slots, 8 * B_PANEL, 0, SWIZZLE_128);
        place logits(job.logits), hidden_states(hidden), last_logits(job.logits), last_hidden(hidden);
#pragma unroll 1
        for (int i = 0; i < job.steps; i++) {
            if (shape::SPARSE)
                logits.wait_full();
            hidden_states.wait_full();
            const matrix a = first_a + logits.slot * job.logits.bytes, b = first_b + hidden_states.slot * hidden.bytes;
            const int first = i % (LONGEST_CHAIN / TOKENS / STEP);
            if (first == 0 && i > 0) {
                wgmma_wait<0>();
                hold(chain.sums);
                total.add(chain);
                hold(chain.sums);
            }
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < STEP; j++)
#pragma unroll
                for (int k = 0; k < TOKENS / 16; k++)
                    wgmma<true>(chain.sums[0], a + j * part_bytes + k * 16 * A_PANEL,
                                b + (j * HIDDEN_BYTES + k * 16 * B_PANEL), j + k > 0 ? 1 : first, T());
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0) {
                last_hidden.release();
                last_hidden.advance();
                if (shape::SPARSE) {
                    last_logits.release();
                    last_logits.advance();
                }
            }
            logits.advance();
            hidden_states.advance();
        }
        wgmma_wait<0>();
        hold(chain.sums);
        total.add(chain);
        if (problem.whole_rows) {
            store_sectors<T>(total, problem.grad_weight, block * BLOCK, problem.experts, column, problem.hidden);
            return;
        }
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int j = 0; j < total.ACROSS; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = block * BLOCK + total.first_row() + lane / 4 + 8 * half,
                          at = column + j * 8 + lane % 4 * 2;
                if (row < problem.experts && at < problem.hidden)
                    store_apart(problem, row, at, total.sums[0][j][2 * half], total.sums[0][j][2 * half + 1]);
            }
        return;
    }
    if (leads) {
        place at(hidden);
#pragma unroll 1
        for (int i = 0; i < job.steps; i++, at.advance()) {
            at.wait_empty();
            barrier_arrive_expecting(at.full(), STEP * HIDDEN_BYTES);
            copy_box(at.memory(), maps.hidden_states, column, i * STEP * TOKENS, at.full());
        }
    } else if (shape::SPARSE && thread == shape::LOADERS + WARP) {
        place at(entries);
        wait_for_last_kernel();
#pragma unroll 1
        for (int i = 0; i < job.steps; i++, at.advance())
            copy_entries(at, problem, i);
    } else if (thread >= 0 && thread < shape::LOADERS) {
        if constexpr (shape::SPARSE)
            make_logits<shape>(job, entries, problem, thread);
        else if (thread == 0)
            load_logits<shape, STEP>(job, problem.logits + part * BLOCK_BYTES, part_bytes);
    }
}

/* ---- Hidden blocks ---- */

template <typename T, typename shape>
__device__ __forceinline__ void hidden_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared, int number) {
    const int tiles = shares.tiles, steps = shares.items + (number < shares.rest);
    const unsigned begin = number * shares.items + (number < shares.rest ? number : shares.rest);
    const int first_slice = static_cast<int>(begin / static_cast<unsigned>(tiles));
    job job;
    job.tiles = tiles;
    job.first = static_cast<int>(begin) - first_slice * tiles;
    job.steps = steps;
    ring gate, results, entries{};
    gate.slots = shared;
    gate.bytes = shape::GATE_BYTES;
    gate.count = shape::GATES;
    results.slots = gate.slots + gate.count * gate.bytes;
    results.bytes = RESULT_BYTES;
    results.count = shape::RESULTS;
    job.logits.slots = results.slots + results.count * results.bytes;
    job.logits.bytes = shape::LOGITS_BYTES;
    job.logits.count = shape::ITEM_SLOTS;
    gate.barriers = shared + shape::ROOM;
    results.barriers = gate.barriers + gate.count * 16;
    job.logits.barriers = results.barriers + results.count * 16;
    if (shape::SPARSE)
        entries =
            entries_ring(problem, shared + shape::ROOM - ENTRIES_ROOM, job.logits.barriers + job.logits.count * 16);
    const int role = uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x - shape::WARPGROUPS * WARPGROUP;
    const bool leads = thread == shape::LOADERS;
    const int last_slice = steps > 0 ? first_slice + (job.first + steps - 1) / tiles : first_slice - 1;
    if (leads) {
        prefetch_map(maps.weight);
        prefetch_map(maps.grad_hidden);
    }
    gate.init(1, TURNS * (WARPGROUP / WARP));
    results.init(WARPGROUP / WARP, 1);
    job.logits.init(shape::SPARSE ? TOKENS / WARP : 1, WARPGROUP / WARP);
    if (shape::SPARSE)
        entries.init(1, TOKENS / WARP);
    barrier_init_done();
    __syncthreads();
    if (role < shape::WARPGROUPS) {
        if (role >= TURNS || role >= steps)
            return;
        const int lane = threadIdx.x % WARP;
        sums_of<HIDDEN_COLUMNS> result;
        result.clear();
        const int row = result.first_row() + lane % 16; /* a lane's, of stores */
        const uint32_t row_at = row * B_PANEL;
        const matrix first_a = matrix_at(job.logits.slots, 8 * A_PANEL, 0, SWIZZLE_64),
                     first_b = matrix_at(gate.slots, 8 * B_PANEL, shape::EXPERTS * B_PANEL, SWIZZLE_128);
        place logits(job.logits), to(results), weight(gate);
        if (role == 1) {
            logits.advance();
            to.advance();
        }
        int slice = 0, next = job.first + role;
        weight.wait_full();
#pragma unroll 1
        for (int i = role; i < steps; i += TURNS, next += TURNS) {
            for (; next >= tiles; next -= tiles, slice++) {
                weight.release();
                weight.advance();
                weight.wait_full();
            }
            logits.wait_full();
            const matrix a = first_a + logits.slot * shape::LOGITS_BYTES, b = first_b + weight.slot * shape::GATE_BYTES;
            hold(result.sums);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < shape::EXPERTS / 16; k++)
                wgmma<false>(result.sums[0], a + (k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2), b + k * 16 * B_PANEL,
                             k > 0, T());
            wgmma_commit();
            wgmma_wait<0>();
            hold(result.sums);
            logits.release();
            to.wait_empty();
            const uint32_t at = to.memory() + row_at;
#pragma unroll
            for (int j = 0; j < result.ACROSS; j += 2) {
                const float(&sums)[4] = result.sums[0][j], (&beside)[4] = result.sums[0][j + 1];
                store_matrices(at + j / 8 * TOKENS * B_PANEL + ((j % 8 + lane / 16) ^ row % 8) * CHUNK_BYTES,
                               packed(sums[0], sums[1], T()), packed(sums[2], sums[3], T()),
                               packed(beside[0], beside[1], T()), packed(beside[2], beside[3], T()));
            }
            fence_asynchronous();
            __syncwarp();
            if (lane == 0)
                barrier_arrive(to.full());
            logits.advance(), logits.advance();
            to.advance(), to.advance();
        }
        /* The slices that are left have no item of this warpgroup's. */
        return;
    }
    if (leads) {
        place at(gate), list(entries);
        int tile = job.first, slice = first_slice, next = first_slice;
        const auto copy_gate = [&] {
            at.wait_empty();
            barrier_arrive_expecting(at.full(), shape::GATE_BYTES);
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_box(at.memory() + i * shape::EXPERTS * B_PANEL, maps.weight,
                         next * HIDDEN_COLUMNS + i * PANEL_COLUMNS, 0, at.full());
            at.advance();
            next++;
        };
        while (next <= last_slice && next <= first_slice + 1)
            copy_gate();
        if (shape::SPARSE)
            wait_for_last_kernel();
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
            if (shape::SPARSE) {
                copy_entries(list, problem, tile);
                list.advance();
            }
            if (next <= last_slice && next <= slice + 1)
                copy_gate();
            if (++tile == tiles) {
                tile = 0;
                slice++;
            }
        }
    } else if (thread >= 0 && thread < shape::LOADERS) {
        if constexpr (shape::SPARSE)
            make_logits<shape>(job, entries, problem, thread);
        else if (thread == 0)
            load_logits<shape, 1>(job, problem.logits, shape::LOGITS_BYTES);
    } else if (thread == shape::LOADERS + WARP) {
        place at(results), last(results);
        int slice = first_slice, tile = job.first;
#pragma unroll 1
        for (int i = 0; i < steps; i++, at.advance()) {
            at.wait_full();
            store_box(maps.grad_hidden, slice * HIDDEN_COLUMNS, tile * TOKENS, at.memory());
            store_box(maps.grad_hidden, slice * HIDDEN_COLUMNS + PANEL_COLUMNS, tile * TOKENS,
                      at.memory() + TOKENS * B_PANEL);
            if (i > 1) {
                store_bulk_wait<4>();
                barrier_arrive(last.empty());
                last.advance();
            }
            if (++tile == tiles) {
                tile = 0;
                slice++;
            }
        }
        store_bulk_wait<0>();
    }
}

template <typename T, typename shape>
__device__ __forceinline__ void fused(const shares &shares, const problem &problem, const maps &maps, char *shared) {
    const int number = static_cast<int>(blockIdx.x) - shares.weight_blocks;
    if (number < 0)
        weight_block<T, shape>(shares, problem, maps, shared_address(shared));
    else
        hidden_block<T, shape>(shares, problem, maps, shared_address(shared), number);
}
#endif

template <typename T, typename shape>
__global__ void __launch_bounds__(shape::BOUND, 1)
    fused_kernel(const __grid_constant__ shares shares, const __grid_constant__ problem problem,
                 const __grid_constant__ maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) char shared[];
    fused<T, shape>(shares, problem, maps, shared);
#else
    __trap();
#endif
}

/* ---- Launches ---- */

/* A map of a matrix of 16-bit elements, for boxes of so many rows and 64 columns. */
cudaError_t make_map(CUtensorMap *map, element type, const rows &matrix, int64_t rows, int64_t columns, int box_rows) {
    static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    if (!encode)
        return cudaErrorSymbolNotFound;
    const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t stride = static_cast<cuuint64_t>(matrix.stride) * 2;
    const cuuint32_t box[] = {PANEL_COLUMNS, static_cast<cuuint32_t>(box_rows)}, step[] = {1, 1};
    const CUresult result =
        encode(map, type == BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, matrix.data,
               size, &stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, typename shape>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    const typed_rows &out = problem.grad_weight;
    struct problem with = problem;
    with.whole_rows = !problem.accumulate && out.type == problem.type && is_aligned(out, 2);
    /* As many blocks as there are multiprocessors, or some more. */
    const int processors = attribute(cudaDevAttrMultiProcessorCount);
    const int slices = static_cast<int>(divide_up(problem.hidden, PANEL_COLUMNS));
    shares shares{};
    shares.parts = slices * shape::BLOCKS <= processors / 2 ? shape::BLOCKS : 1;
    shares.weight_blocks = slices * shares.parts;
    shares.tiles = static_cast<int>(divide_up(problem.tokens, TOKENS));
    const int left = processors - shares.weight_blocks;
    const int hidden_blocks = left > processors / 4 ? left : processors / 4;
    const int items = static_cast<int>(divide_up(problem.hidden, HIDDEN_COLUMNS)) * shares.tiles;
    shares.items = items / hidden_blocks;
    shares.rest = items % hidden_blocks;
    const int64_t blocks = shares.weight_blocks + hidden_blocks;
    auto kernel = fused_kernel<T, shape>;
    maps maps;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    if (error == cudaSuccess)
        error = make_map(&maps.hidden_states, problem.type, problem.hidden_states, problem.tokens, problem.hidden,
                         shape::STEP * TOKENS);
    if (error == cudaSuccess)
        error = make_map(&maps.weight, problem.type, problem.weight, problem.experts, problem.hidden, shape::EXPERTS);
    if (error == cudaSuccess)
        error = make_map(&maps.grad_hidden, problem.type, problem.grad_hidden, problem.tokens, problem.hidden, TOKENS);
    return error == cudaSuccess ? launch_early(kernel, blocks, shape::THREADS, shape::BYTES, stream, shares, with, maps)
                                : error;
}

template <typename T>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    if (problem.entries)
        return problem.experts <= 128 ? launch_with<T, shape<128, true>>(problem, stream)
                                      : launch_with<T, shape<FUSED_EXPERTS_SPARSE, true>>(problem, stream);
    return problem.experts <= 64 ? launch_with<T, shape<64, false>>(problem, stream)
                                 : launch_with<T, shape<FUSED_EXPERTS, false>>(problem, stream);
}

} // namespace moer_fused

cudaError_t launch_fused(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_fused::launch<__nv_bfloat16>(problem, stream)
                                : moer_fused::launch<__half>(problem, stream);
}
