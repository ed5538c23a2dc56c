/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a. A block makes either a part of the weight gradient, from all
 * tokens, or a part of grad_hidden_states; so nothing is summed up across blocks, and no block waits for another.
 *
 * - A weight block has 64 columns, and all experts or 64 of them: G^T times hidden states, a warpgroup for each 64
 *   experts. Hidden states come by tensor copies, the first of which do not wait for the kernel before.
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
    PANEL_COLUMNS = FUSED_COLUMNS,
    ITEM_COLUMNS = 2 * PANEL_COLUMNS,
    PANEL_BYTES = TOKENS * B_PANEL,   /* of a tile of hidden states, or half an item */
    BLOCK_BYTES = TOKENS * BLOCK * 2, /* of a tile of G */
    WARPGROUP = 128,
    WARPS = WARPGROUP / WARP,
    TURNS = 2,
    TEAMS = 2,
    ENTRY_TILES = 4,
    ENTRIES_ROOM = 12 * 1024, /* two tiles of 16 entries a token, at least */
    MOST_BARRIERS = 64
};

/* Sizes for so many experts at most. SPARSE: G comes as entries. */
template <int MOST_EXPERTS, bool SPARSE_LOGITS>
struct shape {
    static constexpr int EXPERTS = MOST_EXPERTS, BLOCKS = (EXPERTS + BLOCK - 1) / BLOCK;
    static constexpr bool SPARSE = SPARSE_LOGITS;
    static constexpr int WARPGROUPS = BLOCKS > TURNS ? BLOCKS : TURNS, LOADERS = SPARSE ? TEAMS * TOKENS : WARP;
    static constexpr int THREADS = WARPGROUPS * WARPGROUP + LOADERS + 2 * WARP;
    static constexpr int BOUND = SPARSE ? 640 : 512; /* registers: 96, or 128, of which it takes 96 */
    static constexpr int GATE_BYTES = EXPERTS * ITEM_COLUMNS * 2, LOGITS_BYTES = TOKENS * EXPERTS * 2;
    static constexpr int ROOM = (SPARSE ? 221 : 215) * 1024, BYTES = ROOM + MOST_BARRIERS * 8;
    /* A weight block's step is so many tiles: short ones would wait for one another. So many steps do not wait for the
     * kernel before: more would make that late, and the gates. */
    static constexpr int STEP = SPARSE ? 1 : 2, EARLY_STEPS = SPARSE ? 6 : 2;
    static constexpr int RESULTS = 3, GATES = 2;
    static constexpr int LEFT = ROOM - GATES * GATE_BYTES - RESULTS * 2 * PANEL_BYTES - (SPARSE ? ENTRIES_ROOM : 0);
    static constexpr int ITEM_TILES = SPARSE ? ENTRY_TILES : LEFT / LOGITS_BYTES / TURNS * TURNS;
    /* Whoever takes every other tile must see every phase of its slots' barriers. */
    static_assert(ITEM_TILES % TURNS == 0 && ENTRY_TILES % TEAMS == 0 && ITEM_TILES * LOGITS_BYTES <= LEFT, "slots");
};

/* How the blocks share the work: first those of the weight gradient, each of 64 experts if they are apart; then those
 * of grad_hidden_states, each of so many items, and the first so many of one more. */
struct shares {
    int weight_blocks;
    bool apart;
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

    __device__ __forceinline__ uint32_t end() const {
        return slots + count * bytes;
    }
    __device__ __forceinline__ uint32_t barriers_end() const {
        return barriers + count * 16;
    }
    /* A warp each takes its share: what several lanes do to barriers, they do one after the other. */
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
    __device__ __forceinline__ void advance(int slots = 1) {
        for (int i = 0; i < slots; i++)
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
template <typename Shape>
struct job {
    using shape = Shape;
    int first, steps, tiles; /* step i's is tile (first + i) % tiles */
    ring logits, entries;
    /* Who a thread is: a warpgroup, or so many threads behind them. */
    int warpgroup, thread;

    __device__ __forceinline__ job() {
        warpgroup = uniform(threadIdx.x / WARPGROUP);
        thread = static_cast<int>(threadIdx.x) - shape::WARPGROUPS * WARPGROUP;
    }
    __device__ __forceinline__ bool loads() const {
        return thread >= 0 && thread < shape::LOADERS;
    }
    __device__ __forceinline__ bool leads() const {
        return thread == shape::LOADERS;
    }
    __device__ __forceinline__ bool follows() const {
        return thread == shape::LOADERS + WARP;
    }
    __device__ __forceinline__ int tile(int step) const {
        return static_cast<int>(static_cast<unsigned>(first + step) % static_cast<unsigned>(tiles));
    }
    /* At the end of shared memory; an even number of slots, since each is one team's. */
    __device__ __forceinline__ void place_entries(const problem &problem, uint32_t shared, uint32_t barriers) {
        const int bytes = TOKENS * 4 * problem.entries;
        entries = {shared + shape::ROOM - ENTRIES_ROOM, barriers, bytes,
                   bytes <= ENTRIES_ROOM / 6   ? 6
                   : bytes <= ENTRIES_ROOM / 4 ? 4
                                               : 2};
    }
    __device__ __forceinline__ void init_logits(int consumers) const {
        logits.init(shape::SPARSE ? TOKENS / WARP : 1, consumers);
        if (shape::SPARSE)
            entries.init(1, TOKENS / WARP);
    }
};

/* So many tiles of G a step, or so many bytes of each, by a single thread. */
template <int TOGETHER, typename shape>
__device__ __forceinline__ void copy_logits(const job<shape> &job, const char *logits, int bytes) {
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

/* Entries of a tile of G, by a single thread. */
__device__ __forceinline__ void copy_entries(const place &at, const problem &problem, int tile) {
    const int bytes = at.around.bytes;
    at.wait_empty();
    barrier_arrive_expecting(at.full(), bytes);
    copy_bulk(at.memory(), problem.logits + static_cast<int64_t>(tile) * bytes, bytes, at.full());
}

/* Writes entries into a tile of G, or zeros where those were. */
__device__ __forceinline__ void put_entries(uint32_t tile, uint4 entries, bool zeros) {
    for (uint32_t entry : {entries.x, entries.y, entries.z, entries.w})
        if ((entry & 0xffff) != NO_ENTRY)
            store_shared(tile + (entry & 0xffff), static_cast<unsigned short>(zeros ? 0 : entry >> 16));
}

/* G from its entries, by teams of a thread a token, which take turns. They clear what they wrote into the slot before,
 * and write what there is now. Each thread keeps its first eight of those: what it loaded from global memory, the fence
 * would wait for. */
template <typename shape>
__device__ __forceinline__ void scatter_entries(const job<shape> &job, const problem &problem) {
    constexpr int SLOTS = ENTRY_TILES / TEAMS, HELD = 2;
    const int team = uniform(job.thread / TOKENS), chunks = problem.entries / 4;
    const uint32_t own = job.thread % TOKENS * chunks * CHUNK_BYTES;
    const char *list = problem.logits + own;
    for (int i = job.thread * CHUNK_BYTES; i < ENTRY_TILES * shape::LOGITS_BYTES; i += shape::LOADERS * CHUNK_BYTES)
        store_shared(job.logits.slots + i, {0, 0, 0, 0});
    synchronize(2, shape::LOADERS);
    const uint4 none = make_uint4(NO_ENTRY, NO_ENTRY, NO_ENTRY, NO_ENTRY);
    uint4 held[SLOTS][HELD];
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
        for (int j = 0; j < HELD; j++)
            held[s][j] = none;
    place from(job.entries), to(job.logits);
    from.advance(team);
    to.advance(team);
#pragma unroll 1
    for (int i = team; i < job.steps; i += ENTRY_TILES)
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const int step = i + s * TEAMS;
            if (step >= job.steps)
                break;
            from.wait_full();
            uint4 next[HELD];
#pragma unroll
            for (int j = 0; j < HELD; j++)
                next[j] = j < chunks ? load_words(from.memory() + own + j * CHUNK_BYTES) : none;
            to.wait_empty();
            const uint32_t tile = to.memory();
#pragma unroll
            for (int j = 0; j < HELD; j++)
                put_entries(tile, held[s][j], true);
#pragma unroll 1
            for (int j = HELD; j < chunks && i >= ENTRY_TILES; j++) {
                const char *last = list + static_cast<int64_t>(job.tile(step - ENTRY_TILES)) * job.entries.bytes;
                put_entries(tile, __ldcg(reinterpret_cast<const uint4 *>(last) + j), true);
            }
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                put_entries(tile, next[j], false);
                held[s][j] = next[j];
            }
#pragma unroll 1
            for (int j = HELD; j < chunks; j++)
                put_entries(tile, load_words(from.memory() + own + j * CHUNK_BYTES), false);
            fence_asynchronous();
            __syncwarp();
            if (threadIdx.x % WARP == 0) {
                barrier_arrive(to.full());
                barrier_arrive(from.empty());
            }
            from.advance(TEAMS);
            to.advance(TEAMS);
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

template <typename T>
__device__ __forceinline__ void store_weight(const problem &problem, const sums_of<PANEL_COLUMNS> &sums, int expert,
                                             int column) {
    if (problem.whole_rows) {
        store_sectors<T>(sums, problem.grad_weight, expert, problem.experts, column, problem.hidden);
        return;
    }
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < sums.ACROSS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = expert + sums.first_row() + lane / 4 + 8 * half, at = column + j * 8 + lane % 4 * 2;
            if (row < problem.experts && at < problem.hidden)
                store_apart(problem, row, at, sums.sums[0][j][2 * half], sums.sums[0][j][2 * half + 1]);
        }
}

/* A warpgroup's 64 experts. logits: where theirs begin in a slot; part: from tile to tile of a step. A step's products
 * begin before those of the last are done, whose slots are then released. */
template <typename T, typename shape>
__device__ __forceinline__ void add_up(const job<shape> &job, const ring &hidden, int logits, int part,
                                       sums_of<PANEL_COLUMNS> &total) {
    sums_of<PANEL_COLUMNS> chain;
    total.clear();
    chain.clear();
    const matrix first_a = matrix_at(job.logits.slots + logits, 8 * A_PANEL, TOKENS * A_PANEL, SWIZZLE_64),
                 first_b = matrix_at(hidden.slots, 8 * B_PANEL, 0, SWIZZLE_128);
    place g(job.logits), x(hidden), last_g(job.logits), last_x(hidden);
#pragma unroll 1
    for (int i = 0; i < job.steps; i++) {
        if (shape::SPARSE)
            g.wait_full();
        x.wait_full();
        const matrix a = first_a + g.slot * job.logits.bytes, b = first_b + x.slot * hidden.bytes;
        const int linked = i % (LONGEST_CHAIN / TOKENS / shape::STEP);
        if (linked == 0 && i > 0) {
            wgmma_wait<0>();
            hold(chain.sums);
            total.add(chain);
            hold(chain.sums);
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < shape::STEP; j++)
#pragma unroll
            for (int k = 0; k < TOKENS / 16; k++)
                wgmma<true>(chain.sums[0], a + j * part + k * 16 * A_PANEL, b + (j * PANEL_BYTES + k * 16 * B_PANEL),
                            j + k > 0 ? 1 : linked, T());
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0) {
            last_x.release();
            last_x.advance();
            if (shape::SPARSE) {
                last_g.release();
                last_g.advance();
            }
        }
        g.advance();
        x.advance();
    }
    wgmma_wait<0>();
    hold(chain.sums);
    total.add(chain);
}

template <typename T, typename shape>
__device__ __forceinline__ void weight_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared) {
    constexpr int STEP = shape::STEP, HIDDEN_BYTES = STEP * PANEL_BYTES;
    const int number = static_cast<int>(blockIdx.x);
    const int column = (shares.apart ? number / shape::BLOCKS : number) * PANEL_COLUMNS;
    const int part = shares.apart ? number % shape::BLOCKS : 0;
    const int blocks = shares.apart ? 1 : shape::BLOCKS, bytes = blocks * BLOCK_BYTES; /* of the experts, and their G */
    job<shape> job;
    if (job.leads())
        prefetch_map(maps.hidden_states);
    job.first = 0;
    job.tiles = shares.tiles;
    job.steps = (shares.tiles + STEP - 1) / STEP;
    ring hidden;
    hidden.slots = shared;
    hidden.barriers = shared + shape::ROOM;
    if (shape::SPARSE) {
        hidden.bytes = HIDDEN_BYTES;
        hidden.count = (shape::ROOM - ENTRIES_ROOM - ENTRY_TILES * shape::LOGITS_BYTES) / HIDDEN_BYTES;
        job.logits = {hidden.end(), hidden.barriers_end(), shape::LOGITS_BYTES, ENTRY_TILES};
        job.place_entries(problem, shared, job.logits.barriers_end());
        job.init_logits(blocks * WARPS);
        hidden.init(1, blocks * WARPS);
    } else { /* G in the same ring, behind hidden states */
        hidden.bytes = HIDDEN_BYTES + STEP * bytes;
        hidden.count = shares.apart ? shape::ROOM / (HIDDEN_BYTES + STEP * BLOCK_BYTES)
                                    : shape::ROOM / (HIDDEN_BYTES + STEP * shape::LOGITS_BYTES);
        job.logits = hidden;
        job.logits.slots += HIDDEN_BYTES;
        hidden.init(2, blocks * WARPS);
    }
    barrier_init_done();
    __syncthreads();
    if (job.warpgroup < shape::WARPGROUPS) {
        if (job.warpgroup >= blocks)
            return;
        const int block = part * blocks + job.warpgroup;
        sums_of<PANEL_COLUMNS> total;
        add_up<T>(job, hidden, (shape::SPARSE ? block : job.warpgroup) * BLOCK_BYTES, bytes, total);
        store_weight<T>(problem, total, block * BLOCK, column);
    } else if (job.loads()) {
        if constexpr (shape::SPARSE)
            scatter_entries(job, problem);
        else if (job.thread == 0)
            copy_logits<STEP>(job, problem.logits + part * BLOCK_BYTES, bytes);
    } else if (job.leads()) {
        place at(hidden);
#pragma unroll 1
        for (int i = 0; i < job.steps; i++, at.advance()) {
            if (i == shape::EARLY_STEPS)
                wait_for_last_kernel();
            at.wait_empty();
            barrier_arrive_expecting(at.full(), HIDDEN_BYTES);
            copy_box(at.memory(), maps.hidden_states, column, i * STEP * TOKENS, at.full());
        }
    } else if (shape::SPARSE && job.follows()) {
        place at(job.entries);
        wait_for_last_kernel();
#pragma unroll 1
        for (int i = 0; i < job.steps; i++, at.advance())
            copy_entries(at, problem, i);
    }
}

/* ---- Hidden blocks ---- */

/* A turn's items: every other. */
template <typename T, typename shape>
__device__ __forceinline__ void multiply_gate(const job<shape> &job, const ring &gate, const ring &results) {
    const int lane = threadIdx.x % WARP, turn = job.warpgroup;
    sums_of<ITEM_COLUMNS> result;
    result.clear();
    const int row = result.first_row() + lane % 16; /* a lane's, of stores */
    const matrix first_a = matrix_at(job.logits.slots, 8 * A_PANEL, 0, SWIZZLE_64),
                 first_b = matrix_at(gate.slots, 8 * B_PANEL, shape::EXPERTS * B_PANEL, SWIZZLE_128);
    place g(job.logits), w(gate), to(results);
    g.advance(turn);
    to.advance(turn);
    int tile = job.first + turn;
    w.wait_full();
#pragma unroll 1
    for (int i = turn; i < job.steps; i += TURNS, tile += TURNS) {
        for (; tile >= job.tiles; tile -= job.tiles) {
            w.release();
            w.advance();
            w.wait_full();
        }
        g.wait_full();
        const matrix a = first_a + g.slot * shape::LOGITS_BYTES, b = first_b + w.slot * shape::GATE_BYTES;
        hold(result.sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < shape::EXPERTS / 16; k++)
            wgmma<false>(result.sums[0], a + (k / 2 * TOKENS * A_PANEL + k % 2 * A_PANEL / 2), b + k * 16 * B_PANEL,
                         k > 0, T());
        wgmma_commit();
        wgmma_wait<0>();
        hold(result.sums);
        g.release();
        to.wait_empty();
        const uint32_t at = to.memory() + row * B_PANEL;
#pragma unroll
        for (int j = 0; j < result.ACROSS; j += 2) {
            const float(&sums)[4] = result.sums[0][j], (&beside)[4] = result.sums[0][j + 1];
            store_matrices(at + j / 8 * PANEL_BYTES + ((j % 8 + lane / 16) ^ row % 8) * CHUNK_BYTES,
                           packed(sums[0], sums[1], T()), packed(sums[2], sums[3], T()),
                           packed(beside[0], beside[1], T()), packed(beside[2], beside[3], T()));
        }
        fence_asynchronous();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(to.full());
        g.advance(TURNS);
        to.advance(TURNS);
    }
}

/* The gate's columns for a slice after the other, each before the slice before it ends, and entries of G. */
template <typename shape>
__device__ __forceinline__ void copy_gates(const job<shape> &job, const problem &problem, const maps &maps,
                                           const ring &gate, int slice, int gates) {
    place at(gate), list(job.entries);
    int tile = job.first;
    const auto copy = [&] {
        at.wait_empty();
        barrier_arrive_expecting(at.full(), shape::GATE_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++)
            copy_box(at.memory() + i * shape::EXPERTS * B_PANEL, maps.weight, slice * ITEM_COLUMNS + i * PANEL_COLUMNS,
                     0, at.full());
        at.advance();
        slice++;
        gates--;
    };
    if (gates > 0)
        copy();
    if (shape::SPARSE)
        wait_for_last_kernel();
#pragma unroll 1
    for (int i = 0; i < job.steps; i++) {
        if (shape::SPARSE) {
            copy_entries(list, problem, tile);
            list.advance();
        }
        if (++tile == job.tiles) {
            tile = 0;
            if (gates > 0)
                copy();
        }
    }
}

template <typename shape>
__device__ __forceinline__ void store_items(const job<shape> &job, const maps &maps, const ring &results, int slice) {
    place at(results), last(results);
    int tile = job.first;
#pragma unroll 1
    for (int i = 0; i < job.steps; i++, at.advance()) {
        at.wait_full();
#pragma unroll
        for (int j = 0; j < 2; j++)
            store_box(maps.grad_hidden, slice * ITEM_COLUMNS + j * PANEL_COLUMNS, tile * TOKENS,
                      at.memory() + j * PANEL_BYTES);
        if (i > 0) {
            store_bulk_wait<2>(); /* the two of this item */
            barrier_arrive(last.empty());
            last.advance();
        }
        if (++tile == job.tiles) {
            tile = 0;
            slice++;
        }
    }
    store_bulk_wait<0>();
}

template <typename T, typename shape>
__device__ __forceinline__ void hidden_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared, int number) {
    const bool longer = number < shares.rest;
    const int begin = number * shares.items + (longer ? number : shares.rest);
    const int slice = static_cast<int>(static_cast<unsigned>(begin) / static_cast<unsigned>(shares.tiles));
    job<shape> job;
    if (job.leads()) {
        prefetch_map(maps.weight);
        prefetch_map(maps.grad_hidden);
    }
    job.tiles = shares.tiles;
    job.first = begin - slice * shares.tiles;
    job.steps = shares.items + longer;
    const int gates = job.steps > 0 ? (job.first + job.steps - 1) / shares.tiles + 1 : 0;
    const uint32_t barriers = shared + shape::ROOM;
    const ring gate = {shared, barriers, shape::GATE_BYTES, shape::GATES};
    const ring results = {gate.end(), gate.barriers_end(), 2 * PANEL_BYTES, shape::RESULTS};
    job.logits = {results.end(), results.barriers_end(), shape::LOGITS_BYTES, shape::ITEM_TILES};
    if (shape::SPARSE)
        job.place_entries(problem, shared, job.logits.barriers_end());
    gate.init(1, TURNS * WARPS);
    results.init(WARPS, 1);
    job.init_logits(WARPS);
    barrier_init_done();
    __syncthreads();
    if (job.warpgroup < shape::WARPGROUPS) {
        if (job.warpgroup < TURNS && job.warpgroup < job.steps)
            multiply_gate<T>(job, gate, results);
    } else if (job.loads()) {
        if constexpr (shape::SPARSE)
            scatter_entries(job, problem);
        else if (job.thread == 0)
            copy_logits<1>(job, problem.logits, shape::LOGITS_BYTES);
    } else if (job.leads()) {
        copy_gates(job, problem, maps, gate, slice, gates);
    } else if (job.follows()) {
        store_items(job, maps, results, slice);
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
    /* As many blocks as there are multiprocessors, or a few more. */
    const int processors = attribute(cudaDevAttrMultiProcessorCount);
    const int slices = static_cast<int>(divide_up(problem.hidden, PANEL_COLUMNS));
    shares shares{};
    shares.apart = slices * shape::BLOCKS <= processors / 2;
    shares.weight_blocks = slices * (shares.apart ? shape::BLOCKS : 1);
    shares.tiles = static_cast<int>(divide_up(problem.tokens, TOKENS));
    const int left = processors - shares.weight_blocks;
    const int hidden_blocks = left > processors / 4 ? left : processors / 4;
    const int items = static_cast<int>(divide_up(problem.hidden, ITEM_COLUMNS)) * shares.tiles;
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
