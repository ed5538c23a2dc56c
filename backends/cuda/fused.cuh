/* SPDX-License-Identifier: Apache-2.0 */
/* The fused kernel's sizes, and how its threads hand tiles to one another: what its products, which are an
 * architecture's own, share with the rest. */
#pragma once

#include "tiles.cuh"

#include <type_traits>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_fused {

enum {
    PANEL_COLUMNS = B_PANEL / 2,
    HIDDEN_COLUMNS = 2 * PANEL_COLUMNS, /* of an item */
    A_EXPERTS = A_PANEL / 2,            /* of a panel of G */
    BLOCK = 64,                         /* experts */
    WARPGROUP = 128,
    WARPGROUPS = 2,  /* that multiply */
    EARLY_STEPS = 2, /* of a weight block, whose hidden states are on their way first thing */
    MOST_BARRIERS = 64,
    OWN_BARRIERS = 8 /* the last of them, for the products */
};

/* How an architecture divides the work: tokens of a tile, columns of a weight block and of a slot for results, slots
 * for tiles of entries, and tiles of a step of the weight gradient's: short ones wait for one another. */
struct hopper {
    static constexpr int TOKENS = 64, WEIGHT_COLUMNS = PANEL_COLUMNS, RESULT_COLUMNS = HIDDEN_COLUMNS, ENTRY_SLOTS = 4;
    static constexpr int STEP = 2, SPARSE_STEP = 1, SPARSE_ROOM = 221 * 1024;
};
struct blackwell {
    static constexpr int TOKENS = 128, WEIGHT_COLUMNS = HIDDEN_COLUMNS, RESULT_COLUMNS = PANEL_COLUMNS, ENTRY_SLOTS = 2;
    static constexpr int STEP = 1, SPARSE_STEP = 1, SPARSE_ROOM = 224 * 1024;
};

/* Sizes for so many experts at most. SPARSE: G comes as entries. */
template <typename Division, int MOST_EXPERTS, bool SPARSE_LOGITS>
struct shape {
    using division = Division;
    static constexpr int EXPERTS = MOST_EXPERTS, BLOCKS = (EXPERTS + BLOCK - 1) / BLOCK;
    static constexpr bool SPARSE = SPARSE_LOGITS, HOPPER = division::TOKENS == hopper::TOKENS;
    static constexpr int TOKENS = division::TOKENS, WEIGHT_COLUMNS = division::WEIGHT_COLUMNS;
    static constexpr int LOADERS = SPARSE ? 128 : WARP, TEAMS = 128 / TOKENS; /* of loaders, a thread a token */
    /* Where warpgroups that multiply take registers from the others, there are whole ones of those. */
    static constexpr bool UNEVEN = SPARSE && HOPPER;
    static constexpr int COPIERS = UNEVEN ? WARPGROUP : SPARSE ? 3 * WARP : 2 * WARP;
    static constexpr int THREADS = WARPGROUPS * WARPGROUP + LOADERS + COPIERS;
    static constexpr int BOUND = UNEVEN ? 640 : 512, MORE = 136, FEWER = 56; /* registers: 96, or 128 */
    /* Warps of an item and of a part of its results: of one warpgroup, or both have 64 columns. */
    static constexpr int WARPS = (HOPPER ? WARPGROUPS : 1) * (WARPGROUP / WARP);
    static constexpr int HIDDEN_BYTES = TOKENS * WEIGHT_COLUMNS * 2,
                         RESULT_BYTES = TOKENS * division::RESULT_COLUMNS * 2;
    static constexpr int GATE_BYTES = EXPERTS * HIDDEN_COLUMNS * 2, LOGITS_BYTES = TOKENS * EXPERTS * 2;
    static constexpr int BLOCK_BYTES = TOKENS * BLOCK * 2; /* of a tile of G */
    static constexpr int ENTRY_SLOTS = division::ENTRY_SLOTS, STEP = SPARSE ? division::SPARSE_STEP : division::STEP;
    static constexpr int RESULTS_AN_ITEM = HIDDEN_COLUMNS / division::RESULT_COLUMNS;
    static constexpr int ENTRIES_ROOM = (HOPPER ? 24 : 16) * 1024; /* six tiles of 16 entries a token, or two */
    static constexpr int ROOM = SPARSE ? division::SPARSE_ROOM : 215 * 1024, BYTES = ROOM + MOST_BARRIERS * 8;
    /* A hidden block's: what gates and results leave. */
    static constexpr int GATES = HOPPER ? 1 : 2, RESULTS = UNEVEN ? 4 : 3,
                         LEFT = ROOM - GATES * GATE_BYTES - RESULTS * RESULT_BYTES;
    static constexpr int FIT = LEFT / LOGITS_BYTES / 2 * 2;
    static constexpr int ITEM_SLOTS = SPARSE ? ENTRY_SLOTS : FIT < 12 ? FIT : 12;
    static_assert(ITEM_SLOTS % 2 == 0 && ENTRY_SLOTS % TEAMS == 0,
                  "whoever takes every other tile must see every phase of its slots' barriers");
    static_assert(ITEM_SLOTS > 0 && ITEM_SLOTS * LOGITS_BYTES + (SPARSE ? ENTRIES_ROOM : 0) <= LEFT, "slots fit");
};

/* How the blocks share the work: first those of the weight gradient, of so many parts of the experts; then those of
 * grad_hidden_states, each of so many items, and the first so many of one more. */
struct shares {
    int weight_blocks, parts;
    int tiles; /* of tokens */
    int items, rest;
    int part_experts;
};

/* What a weight block works on: columns from column on and experts from first on (by wgmma: blocks of them), whose G
 * begins at an offset in a tile of it and has so many bytes of each; so many slots of both it and hidden states; so
 * many arrivals release one. */
struct weight_part {
    int column, first, experts, offset, bytes, slots, warpgroups, releases;
};

/* Tensor maps, of panels of 64 columns. */
struct maps {
    CUtensorMap hidden_states, weight, grad_hidden;
};

/* A map of a matrix of 16-bit elements, for boxes of so many rows and 64 columns. */
cudaError_t make_map(CUtensorMap *map, element type, const rows &matrix, int64_t rows, int64_t columns, int box_rows);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOER_FUSED_WGMMA
using made_for = hopper;
#elif defined(MOER_TCGEN05)
#define MOER_FUSED_TCGEN05
using made_for = blackwell;
#endif

#if defined(MOER_FUSED_WGMMA) || defined(MOER_FUSED_TCGEN05)

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

    __device__ __forceinline__ void init_slot(int slot, int producers, int consumers) const {
        barrier_init(barriers + slot * 16, producers);
        barrier_init(barriers + slot * 16 + 8, consumers);
    }
    /* A warp each takes its share: what many lanes do to barriers, they do one after the other. */
    __device__ __forceinline__ void init(int producers, int consumers, int first = 0) const {
        if (threadIdx.x % WARP == 0)
            for (int slot = first + threadIdx.x / WARP; slot < count; slot += blockDim.x / WARP)
                init_slot(slot, producers, consumers);
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
    __device__ __forceinline__ void advance(int slots) {
        for (int i = 0; i < slots; i++)
            advance();
    }
};

/* What a block works on: steps, of which each needs a tile of G, or two. */
struct job {
    int first, steps, tiles; /* step i's is tile (first + i) % tiles */
    ring logits;
};

#endif

} // namespace moer_fused
