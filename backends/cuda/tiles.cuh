/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of the products, which the kernels that multiply share: how operands lie in shared memory, Hopper's wgmma on
 * them, and how rows of 16-bit results are stored. */
#pragma once

#include "common.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

enum { WARP = 32, STEP_BYTES = 128 };

template <typename T>
constexpr bool is_16_bit = sizeof(T) == 2;

/* Terms of a step. */
template <typename T>
constexpr int step_of = STEP_BYTES / sizeof(T);

/* A block in shared memory is panels side by side, each ROWS x PANEL bytes: A's of 64 bytes, B's of 128, since A's
 * widths are multiples of 32 elements only. This is where an element lies, in bytes; rows 8 apart look the same. */
enum { A_PANEL = 64, B_PANEL = 128 };

template <typename T, int ROWS, int PANEL>
__device__ __forceinline__ int swizzled(int row, int column) {
    constexpr int chunks = PANEL / CHUNK_BYTES, rows_a_line = 128 / PANEL;
    int byte = column * static_cast<int>(sizeof(T));
    int chunk = byte % PANEL / CHUNK_BYTES ^ row / rows_a_line % chunks;
    return byte / PANEL * ROWS * PANEL + row * PANEL + chunk * CHUNK_BYTES + byte % CHUNK_BYTES;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* Which rows and columns of sums a warp has, as wgmma leaves them: 16 of each 64 rows, and all columns. */
struct async_layout {
    static __device__ constexpr int row_step() {
        return 64;
    }
    static __device__ __forceinline__ int first_row() {
        return threadIdx.x / WARP % 4 * 16;
    }
    static __device__ __forceinline__ int first_column() {
        return 0;
    }
};

/* The same by Hopper's wgmma, which reads both operands in shared memory, 64 rows at a time. A product has a multiple
 * of 64 rows, but any multiple of 8 columns: where the tile's rows are A's columns, of which there may be 160, its
 * transpose is worked out, B's columns being the rows. A warp has every 4th 16 rows. */
template <typename T, int ROWS, int COLUMNS, bool TERMS_ARE_ROWS>
struct async_tile : async_layout {
    static constexpr int STEP = step_of<T>;
    static constexpr int DOWN = (TERMS_ARE_ROWS ? COLUMNS : ROWS) / 64, ACROSS = (TERMS_ARE_ROWS ? ROWS : COLUMNS) / 8;
    float sums[DOWN][ACROSS][4];
    int begun = 0;

    static __device__ constexpr bool pairs_below() {
        return TERMS_ARE_ROWS;
    }
    __device__ __forceinline__ void clear() {
        begun = 0;
    }
    __device__ __forceinline__ void publish() const {
        fence_asynchronous();
    }

    __device__ __forceinline__ void add(const char *a, const char *b, int terms) {
        if (terms > STEP / 2)
            add_groups<STEP / 16>(shared_address(a), shared_address(b));
        else
            add_groups<STEP / 32>(shared_address(a), shared_address(b));
    }

    /* The first factor's 64 rows, for 16 terms; the second factor's columns. */
    static __device__ __forceinline__ uint64_t left(uint32_t a, uint32_t b, int i, int group) {
        if (TERMS_ARE_ROWS)
            return matrix_at(b + group * 16 * B_PANEL + i * STEP * B_PANEL, 8 * B_PANEL, 0, SWIZZLE_128);
        return matrix_at(a + group / 2 * ROWS * A_PANEL + group % 2 * 32 + i * 64 * A_PANEL, 8 * A_PANEL, 0,
                         SWIZZLE_64);
    }
    static __device__ __forceinline__ uint64_t right(uint32_t a, uint32_t b, int group) {
        if (TERMS_ARE_ROWS)
            return matrix_at(a + group * 16 * A_PANEL, 8 * A_PANEL, STEP * A_PANEL, SWIZZLE_64);
        return matrix_at(b + group * 16 * B_PANEL, 8 * B_PANEL, STEP * B_PANEL, SWIZZLE_128);
    }

    template <int GROUPS>
    __device__ __forceinline__ void add_groups(uint32_t a, uint32_t b) {
        hold(sums);
        wgmma_fence();
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const uint64_t columns = right(a, b, group);
#pragma unroll
            for (int i = 0; i < DOWN; i++)
                wgmma<TERMS_ARE_ROWS>(sums[i], left(a, b, i, group), columns, begun | group, T());
        }
        begun = 1;
        wgmma_commit();
        wgmma_wait<0>();
        hold(sums);
    }

    /* Pairs of sums beside one another or, of a transpose, below. */
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = first_row() + 64 * i + 8 * half + lane / 4, column = 8 * j + lane % 4 * 2;
                    visit(TERMS_ARE_ROWS ? column : row, TERMS_ARE_ROWS ? row : column, sums[i][j][2 * half],
                          sums[i][j][2 * half + 1]);
                }
    }
};
#endif

__device__ __forceinline__ uint32_t packed(float first, float second, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t &>(pair);
}
__device__ __forceinline__ uint32_t packed(float first, float second, __half) {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t &>(pair);
}

/* Neighbouring lanes have neighbouring pairs of each 8 columns: one takes both pairs of the first 8, the other of the
 * next, so that a warp stores whole sectors of 32 bytes. */
template <typename T, typename Tile>
__device__ __forceinline__ void store_sectors(const Tile &result, const rows &out, int64_t token, int64_t tokens,
                                              int64_t column, int64_t columns) {
    const int lane = threadIdx.x % WARP, odd = lane % 2;
    columns -= column + result.first_column() + odd * 8;
    token += result.first_row() + lane / 4;
    T *to = reinterpret_cast<T *>(out.data) + token * out.stride + column + result.first_column() + odd * 8 +
            lane % 4 / 2 * 4;
    keep_here(to);
    asm volatile("" : "+l"(columns), "+l"(token));
#pragma unroll
    for (int i = 0; i < result.DOWN; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool exists = token + Tile::row_step() * i + 8 * half < tokens;
            T *row = to + (Tile::row_step() * i + 8 * half) * out.stride;
#pragma unroll
            for (int j = 0; j < result.ACROSS; j += 2) {
                const uint32_t first = packed(result.sums[i][j][2 * half], result.sums[i][j][2 * half + 1], T());
                const uint32_t next = packed(result.sums[i][j + 1][2 * half], result.sums[i][j + 1][2 * half + 1], T());
                const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : next, 1);
                if (exists && 8 * j < columns)
                    *reinterpret_cast<uint2 *>(row + 8 * j) = odd ? make_uint2(other, next) : make_uint2(first, other);
            }
        }
}
