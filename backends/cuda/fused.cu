/* SPDX-License-Identifier: Apache-2.0 */
/* Both products of an operation by one kernel, for sm_90a and for sm_100 and its family. A block makes either a part of
 * the weight gradient, from all tokens, or a part of grad_hidden_states; so nothing is summed up across blocks, and no
 * block waits for another.
 *
 * - A weight block has a slice of columns, and all experts or a part of them: G^T times hidden states. Those come by
 *   tensor copies, which do not wait for the kernel before.
 * - A hidden block has a run of items: tiles of tokens by 128 columns of grad_hidden_states, one below the other and
 * then the next columns. Two warpgroups share or alternate: G times the gate, whose columns come by tensor copies while
 * the ones before are in use. A warp stores results by tensor copies; on an H200 stores of registers took three times
 * as long as the products.
 * - Others bring G to either, once the kernel before is done: a thread copies tiles, which that has left as they are to
 *   lie in shared memory; or warps scatter entries, K a token, into tiles of zeros.
 *
 * For H = 2048, E = 128 there are 64 weight blocks, for 5120, 160, 80; the other multiprocessors have a hidden block
 * each. What decides a small batch is how soon the first tile of G and the gate are there, a large one what passes
 * through the second-level cache: a weight block reads all of G, or its experts' part. So the kernel before lets this
 * one start first thing, and it fits beside that; copies of the gate and of a few hidden states begin before anything
 * else does. More of those fill the memory's queues, where the kernel before then stands: for entries they wait (13.5
 * us on an H200 instead of 13.9 for 1280 tokens of H = 5120, E = 160). */
#include "fused.cuh"
#include "fused_tcgen05.cuh"
#include "fused_wgmma.cuh"

#include <cuda.h>

/* Named: nvcc would name an anonymous one after the file's path, and other folders would give other bytes. */
namespace moer_fused {

#if defined(MOER_FUSED_WGMMA) || defined(MOER_FUSED_TCGEN05)

/* ---- Either block ---- */

template <typename shape>
__device__ __forceinline__ void share_registers(int role) {
    if constexpr (shape::UNEVEN) {
        if (role < WARPGROUPS)
            take_registers<shape::MORE>();
        else
            give_registers<shape::FEWER>();
    }
}

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
template <typename shape>
__device__ __forceinline__ ring entries_ring(const problem &problem, uint32_t slots, uint32_t barriers) {
    constexpr int ROOM = shape::ENTRIES_ROOM;
    const int bytes = shape::TOKENS * 4 * problem.entries;
    return {slots, barriers, bytes, bytes <= ROOM / 6 ? 6 : bytes <= ROOM / 4 ? 4 : 2};
}

/* Entries of a tile of G, by a single thread. */
__device__ __forceinline__ void copy_entries(const place &at, const problem &problem, int tile) {
    const int bytes = at.around.bytes;
    at.wait_empty();
    barrier_arrive_expecting(at.full(), bytes);
    copy_bulk(at.memory(), problem.logits + static_cast<int64_t>(tile) * bytes, bytes, at.full());
}

/* Zeros in a row of a tile of G; neighbours begin with different banks. */
template <typename shape>
__device__ __forceinline__ void clear_row(uint32_t tile, int row) {
#pragma unroll
    for (int i = 0; i < shape::EXPERTS * 2 / CHUNK_BYTES; i++)
        store_words(tile + i / 4 * shape::TOKENS * A_PANEL + row * A_PANEL + (i + row / 2) % 4 * CHUNK_BYTES,
                    make_uint4(0, 0, 0, 0));
}

/* G from its entries, by teams of a thread a token, which take turns. They clear what they wrote into the slot before,
 * of which a thread keeps eight entries, or all of their row if there are more, and write what there is now. The first
 * time around, before there is any, is for the instructions: those of memory's, a thread waits for as for data. */
template <typename shape>
__device__ __forceinline__ void make_logits(const job &job, const ring &entries, const problem &problem, int thread) {
    constexpr int TEAMS = shape::TEAMS, SLOTS = shape::ENTRY_SLOTS / TEAMS, HELD = 2;
    const int team = uniform(thread / shape::TOKENS), chunks = problem.entries / 4;
    const int row = thread % shape::TOKENS;
    const uint32_t own = row * chunks * CHUNK_BYTES;
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
    for (int i = team - TEAMS * SLOTS; i < job.steps; i += TEAMS * SLOTS)
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const int step = i + s * TEAMS;
            if (step >= job.steps)
                break;
            const bool real = step >= 0;
            if (real)
                from.wait_full();
            const uint32_t list = from.memory() + own;
            if (real)
                to.wait_empty();
            const uint32_t tile = to.memory();
            if (chunks > HELD)
                clear_row<shape>(tile, row);
            else
#pragma unroll
                for (int j = 0; j < HELD; j++)
                    put_entries(tile, held[s][j], true);
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                held[s][j] = real && j < chunks ? load_words(list + j * CHUNK_BYTES) : none;
                put_entries(tile, held[s][j], false);
            }
#pragma unroll 1
            for (int j = HELD; j < chunks && real; j++)
                put_entries(tile, load_words(list + j * CHUNK_BYTES), false);
            fence_asynchronous();
            __syncwarp();
            if (!real)
                continue;
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

template <typename T, typename shape>
__device__ __forceinline__ void weight_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared) {
    constexpr int STEP = shape::STEP, TOKENS = shape::TOKENS, HIDDEN_BYTES = shape::HIDDEN_BYTES;
    const weight_part part = part_of<shape>(shares, problem);
    job job;
    job.first = 0;
    job.tiles = shares.tiles;
    job.steps = (shares.tiles + STEP - 1) / STEP;
    ring hidden, entries{};
    hidden.slots = shared;
    hidden.barriers = shared + shape::ROOM;
    if (shape::SPARSE) {
        hidden.bytes = STEP * HIDDEN_BYTES;
        hidden.count = (shape::ROOM - shape::ENTRIES_ROOM - shape::ENTRY_SLOTS * shape::LOGITS_BYTES) / hidden.bytes;
        job.logits.slots = shared + hidden.count * hidden.bytes;
        job.logits.bytes = shape::LOGITS_BYTES;
        job.logits.count = shape::ENTRY_SLOTS;
        job.logits.barriers = hidden.barriers + hidden.count * 16;
        entries = entries_ring<shape>(problem, shared + shape::ROOM - shape::ENTRIES_ROOM,
                                      job.logits.barriers + job.logits.count * 16);
    } else { /* G in the same ring, behind hidden states */
        hidden.bytes = STEP * (HIDDEN_BYTES + part.bytes);
        hidden.count = part.slots;
        job.logits = hidden;
        job.logits.slots += STEP * HIDDEN_BYTES;
    }
    const int role = uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x - WARPGROUPS * WARPGROUP;
    const bool leads = thread == shape::LOADERS;
    constexpr int PRODUCERS = shape::SPARSE ? 1 : 2;
    place at(hidden);
    int step = 0;
    const auto copy_hidden = [&] {
        barrier_arrive_expecting(at.full(), STEP * HIDDEN_BYTES);
#pragma unroll
        for (int j = 0; j < shape::WEIGHT_COLUMNS / PANEL_COLUMNS; j++)
            copy_box(at.memory() + j * STEP * TOKENS * B_PANEL, maps.hidden_states, part.column + j * PANEL_COLUMNS,
                     step * STEP * TOKENS, at.full());
        at.advance();
    };
    if (leads) {
        for (int i = 0; i < EARLY_STEPS; i++)
            hidden.init_slot(i, PRODUCERS, part.releases);
        barrier_init_done();
        for (; step < EARLY_STEPS && step < job.steps; step++)
            copy_hidden();
    }
    hidden.init(PRODUCERS, part.releases, EARLY_STEPS);
    if (shape::SPARSE) {
        job.logits.init(TOKENS / WARP, part.releases);
        entries.init(1, TOKENS / WARP);
    }
    tensor_memory memory = allocate<shape>(shared);
    barrier_init_done();
    __syncthreads();
    open(&memory);
    share_registers<shape>(role);
    if (role < WARPGROUPS) {
        add_up<T, shape>(problem, job, hidden, part, memory, role);
    } else if (leads) {
        if (shape::SPARSE)
            wait_for_last_kernel();
#pragma unroll 1
        for (; step < job.steps; step++) {
            at.wait_empty();
            copy_hidden();
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
            load_logits<shape, STEP>(job, problem.logits + part.offset, part.bytes);
    }
    close<shape>(memory);
}

/* ---- Hidden blocks ---- */

template <typename T, typename shape>
__device__ __forceinline__ void hidden_block(const shares &shares, const problem &problem, const maps &maps,
                                             uint32_t shared, int number) {
    constexpr int TOKENS = shape::TOKENS;
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
    results.bytes = shape::RESULT_BYTES;
    results.count = shape::RESULTS;
    job.logits.slots = results.slots + results.count * results.bytes;
    job.logits.bytes = shape::LOGITS_BYTES;
    job.logits.count = shape::ITEM_SLOTS;
    gate.barriers = shared + shape::ROOM;
    results.barriers = gate.barriers + gate.count * 16;
    job.logits.barriers = results.barriers + results.count * 16;
    if (shape::SPARSE)
        entries = entries_ring<shape>(problem, shared + shape::ROOM - shape::ENTRIES_ROOM,
                                      job.logits.barriers + job.logits.count * 16);
    const int role = uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x - WARPGROUPS * WARPGROUP;
    const bool leads = thread == shape::LOADERS;
    const int last_slice = steps > 0 ? first_slice + (job.first + steps - 1) / tiles : first_slice - 1;
    place at(gate);
    int slice = first_slice;
    const auto copy_gate = [&] {
        barrier_arrive_expecting(at.full(), shape::GATE_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++)
            copy_box(at.memory() + i * shape::EXPERTS * B_PANEL, maps.weight,
                     slice * HIDDEN_COLUMNS + i * PANEL_COLUMNS, 0, at.full());
        at.advance();
    };
    if (leads) { /* at once: nothing can be done before the first is there */
        for (int i = 0; i < shape::GATES; i++)
            gate.init_slot(i, 1, WARPGROUPS * (WARPGROUP / WARP));
        barrier_init_done();
        for (; slice <= last_slice && slice < first_slice + shape::GATES; slice++)
            copy_gate();
        prefetch_map(maps.grad_hidden);
    }
    results.init(shape::WARPS, 1);
    job.logits.init(shape::SPARSE ? TOKENS / WARP : 1, shape::WARPS);
    if (shape::SPARSE)
        entries.init(1, TOKENS / WARP);
    tensor_memory memory = allocate<shape>(shared);
    barrier_init_done();
    __syncthreads();
    open(&memory);
    share_registers<shape>(role);
    if (role < WARPGROUPS) {
        if (steps > 0)
            multiply_gate<T, shape>(job, gate, results, memory, role);
    } else if (leads) {
#pragma unroll 1
        for (; slice <= last_slice; slice++) {
            at.wait_empty();
            copy_gate();
        }
    } else if (shape::SPARSE && thread == shape::LOADERS + 2 * WARP) {
        place at(entries);
        int tile = job.first;
        wait_for_last_kernel();
#pragma unroll 1
        for (int i = 0; i < steps; i++, at.advance()) {
            copy_entries(at, problem, tile);
            tile = tile + 1 == tiles ? 0 : tile + 1;
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
        for (int i = 0; i < steps; i++) {
#pragma unroll
            for (int part = 0; part < shape::RESULTS_AN_ITEM; part++, at.advance()) {
                constexpr int BOXES = 2 / shape::RESULTS_AN_ITEM;
                at.wait_full();
#pragma unroll
                for (int j = 0; j < BOXES; j++)
                    store_box(maps.grad_hidden, slice * HIDDEN_COLUMNS + (part + j) * PANEL_COLUMNS, tile * TOKENS,
                              at.memory() + j * TOKENS * B_PANEL);
                if (i * shape::RESULTS_AN_ITEM + part > 0) {
                    store_bulk_wait<BOXES>(); /* this slot's: the one before is free */
                    barrier_arrive(last.empty());
                    last.advance();
                }
            }
            if (++tile == tiles) {
                tile = 0;
                slice++;
            }
        }
        store_bulk_wait<0>();
    }
    close<shape>(memory);
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
#if defined(MOER_FUSED_WGMMA) || defined(MOER_FUSED_TCGEN05)
    if constexpr (std::is_same<typename shape::division, made_for>::value) {
        extern __shared__ __align__(1024) char shared[];
        fused<T, shape>(shares, problem, maps, shared);
        return;
    }
#endif
    __trap();
}

/* ---- Launches ---- */

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

/* How many blocks have how many of the experts. On Hopper 64 or all, which need a warpgroup for each 64; on Blackwell
 * as few, in 32s, as leave nearly half of the multiprocessors to the hidden gradient. */
template <typename shape>
shares divide(const problem &problem, int processors) {
    const int slices = static_cast<int>(divide_up(problem.hidden, shape::WEIGHT_COLUMNS));
    shares result{};
    if (shape::HOPPER) {
        result.parts = slices * shape::BLOCKS <= processors / 2 ? shape::BLOCKS : 1;
    } else {
        const auto parts = [&] { return static_cast<int>(divide_up(problem.experts, result.part_experts)); };
        result.part_experts = A_EXPERTS;
        while (slices * parts() > processors * 9 / 16 && parts() > 1)
            result.part_experts += A_EXPERTS;
        result.parts = parts();
    }
    result.weight_blocks = slices * result.parts;
    return result;
}

template <typename T, typename shape>
cudaError_t launch_with(const problem &problem, cudaStream_t stream) {
    const typed_rows &out = problem.grad_weight;
    struct problem with = problem;
    with.whole_rows = !problem.accumulate && out.type == problem.type && is_aligned(out, 2);
    /* As many blocks as there are multiprocessors, or some more. */
    const int processors = attribute(cudaDevAttrMultiProcessorCount);
    shares shares = divide<shape>(problem, processors);
    shares.tiles = static_cast<int>(divide_up(problem.tokens, shape::TOKENS));
    const int left = processors - shares.weight_blocks;
    const int fewest = processors < 4 ? 1 : processors / 4, hidden_blocks = left > fewest ? left : fewest;
    const int items = static_cast<int>(divide_up(problem.hidden, HIDDEN_COLUMNS)) * shares.tiles;
    shares.items = items / hidden_blocks;
    shares.rest = items % hidden_blocks;
    const int64_t blocks = shares.weight_blocks + hidden_blocks;
    auto kernel = fused_kernel<T, shape>;
    maps maps;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    if (error == cudaSuccess)
        error = make_map(&maps.hidden_states, problem.type, problem.hidden_states, problem.tokens, problem.hidden,
                         shape::STEP * shape::TOKENS);
    if (error == cudaSuccess)
        error = make_map(&maps.weight, problem.type, problem.weight, problem.experts, problem.hidden, shape::EXPERTS);
    if (error == cudaSuccess)
        error = make_map(&maps.grad_hidden, problem.type, problem.grad_hidden, problem.tokens, problem.hidden,
                         shape::TOKENS);
    return error == cudaSuccess ? launch_early(kernel, blocks, shape::THREADS, shape::BYTES, stream, shares, with, maps)
                                : error;
}

template <typename T, typename division>
cudaError_t launch(const problem &problem, cudaStream_t stream) {
    if (problem.entries)
        return problem.experts <= 128 ? launch_with<T, shape<division, 128, true>>(problem, stream)
                                      : launch_with<T, shape<division, FUSED_EXPERTS_SPARSE, true>>(problem, stream);
    return problem.experts <= 64 ? launch_with<T, shape<division, 64, false>>(problem, stream)
                                 : launch_with<T, shape<division, FUSED_EXPERTS, false>>(problem, stream);
}

template <typename T>
cudaError_t launch_for(const problem &problem, cudaStream_t stream) {
    return problem.kernels == BLACKWELL ? launch<T, blackwell>(problem, stream) : launch<T, hopper>(problem, stream);
}

} // namespace moer_fused

cudaError_t launch_fused(const problem &problem, cudaStream_t stream) {
    return problem.type == BF16 ? moer_fused::launch_for<__nv_bfloat16>(problem, stream)
                                : moer_fused::launch_for<__half>(problem, stream);
}
