/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A software model of what tcgen05.mma (kind::f16, cta_group::1) and tcgen05.ld read and write, written from the
 * PTX ISA, and CUTLASS where the ISA has only a figure.  Section numbers are those of PTX ISA 9.0 to 9.2, where
 * tcgen05 is 9.7.16; in 9.3 it is 9.7.17.
 * Functions that can refuse return NULL when all is well, and otherwise a sentence.
 */
#pragma once
#include <cstddef>
#include <cstdint>

namespace isa {

/* Offsets and the start are bytes.  swizzle_bytes is 0 (no swizzle), 32, 64 or 128. */
struct operand {
    bool mn_major;
    uint32_t start, leading, stride;
    int swizzle_bytes;
};
struct instruction {
    int m, n;
    int a_type, b_type; /* 0 f16, 1 bf16 */
    bool a_mn_major, b_mn_major;
};
struct cell {
    int lane, column;
};
enum class beyond { leading, stride, sixteen }; /* sixteen: 16 bytes, the "assumed to be 1" of 9.7.16.3.1.1 */

/*
 * The canonical layouts of 9.7.16.3.3 for 16-bit elements, in bytes (T there is 8 elements, here 16 bytes).
 * Along each axis, index i is at (i % extent) * step + (i / extent) * beyond.  (T,w):(1,T) of the ISA is contiguous,
 * so it is one extent here.  What leading and stride mean is in 9.7.16.3.1.1 and 9.7.16.3.2, which count in 128-bit
 * elements: an MN-major "row" is 8 elements along MN and a "column" is one k.  So, MN-major with a swizzle: leading
 * goes to the next swizzle-bytes / 16 rows (one swizzle width along MN), stride to the next 8 k.  Without a swizzle
 * the two change places.  K-major: stride goes to the next 8 rows; leading counts only without a swizzle.
 * Swizzle<1, 4, 3>, <2, 4, 3> or <3, 4, 3> then xors that many address bits from 4 up with those from 7 up.
 */
struct canonical_layout {
    bool mn_major;
    int swizzle_bytes;
    uint32_t mn_extent, mn_step;
    beyond mn_beyond;
    uint32_t k_extent, k_step;
    beyond k_beyond;
};
constexpr canonical_layout canonical_layouts[] = {
    {true, 0, 8, 2, beyond::stride, 8, 16, beyond::leading},     /* ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)) */
    {true, 32, 16, 2, beyond::leading, 8, 32, beyond::stride},   /* ((T,2,m),(8,k)):((1,T,LBO),(2T,SBO)) */
    {true, 64, 32, 2, beyond::leading, 8, 64, beyond::stride},   /* ((T,4,m),(8,k)):((1,T,LBO),(4T,SBO)) */
    {true, 128, 64, 2, beyond::leading, 8, 128, beyond::stride}, /* ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)) */
    {false, 0, 8, 16, beyond::stride, 8, 2, beyond::leading},    /* ((8,m),(T,2k)):((1T,SBO),(1,LBO)) */
    {false, 32, 8, 32, beyond::stride, 8, 2, beyond::sixteen},   /* ((8,m),(T,2k)):((2T,SBO),(1,T)) */
    {false, 64, 8, 64, beyond::stride, 8, 2, beyond::sixteen},   /* ((8,m),(T,2k)):((4T,SBO),(1,T)) */
    {false, 128, 8, 128, beyond::stride, 8, 2, beyond::sixteen}, /* ((8,m),(T,2k)):((8T,SBO),(1,T)) */
};

constexpr int swizzle_of_code[8] = {0, -1, 128, -1, 64, -1, 32, -1}; /* 9.7.16.4.1, bits 61-63 */

/* Fields that must have one value.  The shared memory descriptor is 9.7.16.4.1, the instruction's is 9.7.16.4.2. */
struct fixed_field {
    int first, size;
    uint32_t value;
    const char *sentence;
};
constexpr fixed_field operand_fields[] = {
    {14, 2, 0, "Bits 14-15 of the shared memory descriptor are not 0."},
    {30, 2, 0, "Bits 30-31 of the shared memory descriptor are not 0."},
    {46, 3, 1, "Bits 46-48 of the shared memory descriptor are not the constant 0b001."},
    {49, 3, 0, "The matrix base offset, bits 49-51, is not 0."},
    {52, 1, 0, "Bit 52 asks for an absolute leading dimension address, which is for a K dimension of 48 bytes."},
    {53, 8, 0, "Bits 53-60 of the shared memory descriptor are not 0."},
};
constexpr fixed_field instruction_fields[] = {
    {0, 2, 0, "The sparsity selector, bits 0-1, is not 0."},
    {2, 1, 0, "The sparsity bit, bit 2, is set."},
    {3, 1, 0, "The saturate bit, bit 3, is set, but it is for integers only."},
    {4, 2, 1, "The type of D, bits 4-5, is not F32 (1)."},
    {6, 1, 0, "Bit 6 is reserved and not 0."},
    {8, 2, 0, "The type of A, bits 7-9, is neither F16 (0) nor BF16 (1)."},
    {11, 2, 0, "The type of B, bits 10-12, is neither F16 (0) nor BF16 (1)."},
    {13, 1, 0, "The negate A bit, bit 13, is set."},
    {14, 1, 0, "The negate B bit, bit 14, is set."},
    {23, 1, 0, "Bit 23 is reserved and not 0."},
    {29, 1, 0, "Bit 29 is reserved and not 0."},
    {30, 2, 0, "The maximum shift, bits 30-31, is not 0, but it is for .ws only."},
};

inline uint32_t field(uint64_t word, int first, int size) {
    return static_cast<uint32_t>((word >> first) & ((uint64_t{1} << size) - 1));
}

template <size_t count>
const char *check_fields(uint64_t word, const fixed_field (&fields)[count]) {
    for (const fixed_field &f : fields)
        if (field(word, f.first, f.size) != f.value)
            return f.sentence;
    return nullptr;
}

inline const canonical_layout *find_layout(bool mn_major, int swizzle_bytes) {
    for (const canonical_layout &layout : canonical_layouts)
        if (layout.mn_major == mn_major && layout.swizzle_bytes == swizzle_bytes)
            return &layout;
    return nullptr;
}

/*
 * 9.7.16.4.1: base offset 0 means that the swizzle pattern (8 rows of swizzle bytes: 1024, 512 or 256 bytes) starts
 * on a multiple of its own size.  That is said of the pattern, not of the matrix.  It follows, for the start address:
 * MN-major: a multiple of the pattern.  A whole group of 8 k is one pattern, so steps of k 16 keep to that.  A start
 * inside a row would make the walk along MN leave the row before the layout turns to the leading offset.
 * K-major: inside the first row of a pattern, a multiple of 32 bytes.  An instruction reads 32 bytes of k, so it never
 * leaves the row, and the xor takes its row bits, 7 and up, from the absolute address, which the 32-byte steps do not
 * change.  The ISA does not spell out these steps; CUTLASS (DescriptorIterator, base_offset 0) takes them.
 * The offsets between patterns must be multiples of the pattern for the same reason.  Unused ones may be 0.
 */
inline const char *decode_operand(uint64_t descriptor, bool mn_major, operand *out) {
    if (const char *sentence = check_fields(descriptor, operand_fields))
        return sentence;
    const int swizzle_bytes = swizzle_of_code[field(descriptor, 61, 3)];
    if (swizzle_bytes < 0)
        return "The swizzle code, bits 61-63, is none of 0, 2, 4 and 6, as 16-bit types need.";
    const operand result{mn_major, field(descriptor, 0, 14) << 4, field(descriptor, 16, 14) << 4,
                         field(descriptor, 32, 14) << 4, swizzle_bytes};
    const uint32_t row = static_cast<uint32_t>(swizzle_bytes), pattern = 8 * row;
    if (row != 0) {
        if (mn_major && result.start % pattern != 0)
            return "The start address of an MN-major operand is not a multiple of the swizzle pattern.";
        if (!mn_major && (result.start % pattern >= row || result.start % 32 != 0))
            return "The start address of a K-major operand is not a multiple of 32 bytes in a pattern's first row.";
        if (result.stride % pattern != 0)
            return "The stride dimension byte offset is not a multiple of the swizzle pattern.";
        if (mn_major && result.leading % pattern != 0)
            return "The leading dimension byte offset is not a multiple of the swizzle pattern.";
    }
    *out = result;
    return nullptr;
}

/* The byte address in shared memory of the 16-bit element (mn, k), 0 <= k < 16, of a decoded operand. */
inline uint32_t element_address(const operand &operand, int mn, int k) {
    const canonical_layout *layout = find_layout(operand.mn_major, operand.swizzle_bytes);
    if (layout == nullptr || mn < 0 || k < 0 || k >= 16)
        return UINT32_MAX;
    const auto along = [&](uint32_t index, uint32_t extent, uint32_t step, beyond next) {
        const uint32_t far = next == beyond::leading ? operand.leading : next == beyond::stride ? operand.stride : 16;
        return index % extent * step + index / extent * far;
    };
    const uint32_t address = operand.start +
                             along(static_cast<uint32_t>(mn), layout->mn_extent, layout->mn_step, layout->mn_beyond) +
                             along(static_cast<uint32_t>(k), layout->k_extent, layout->k_step, layout->k_beyond);
    const uint32_t chunks = layout->swizzle_bytes == 0 ? 1 : static_cast<uint32_t>(layout->swizzle_bytes) / 16;
    return address ^ (((address >> 7) & (chunks - 1)) << 4);
}

/*
 * N: 9.7.16.2.1 has steps of 8 for M 64 and M 128 alike.  CUTLASS (SM100_MMA_F16BF16_SS) wants multiples
 * of 16 for M 128.  The stricter rule is taken.
 */
inline const char *decode_instruction(uint32_t descriptor, instruction *out) {
    if (const char *sentence = check_fields(descriptor, instruction_fields))
        return sentence;
    const int n = static_cast<int>(field(descriptor, 17, 6)) * 8, m = static_cast<int>(field(descriptor, 24, 5)) * 16;
    if (m != 64 && m != 128)
        return "M, bits 24-28 times 16, is neither 64 nor 128.";
    if (n < 8 || n > 256)
        return "N, bits 17-22 times 8, is not in 8..256.";
    if (m == 128 && n % 16 != 0)
        return "N, bits 17-22 times 8, is not a multiple of 16, as M 128 needs.";
    *out = {m,
            n,
            static_cast<int>(field(descriptor, 7, 1)),
            static_cast<int>(field(descriptor, 10, 1)),
            field(descriptor, 15, 1) != 0,
            field(descriptor, 16, 1) != 0};
    return nullptr;
}

/*
 * Where element (row, column) of an F32 D is in tensor memory.  Addresses: 9.7.16.1.1.  9.7.16.10.5 gives
 * M 128 layout D (9.7.16.10.5.4), lane alignment 0: the lane is the row.
 * M 64 layout F (9.7.16.10.5.6), half of each 32 lanes used, lane alignment 0 or 16: 16 rows in each 32 lanes.
 * The ISA draws the lanes and has no words for them.  Here they are CUTLASS tmem_frg's: 128:1 and (16,4):(1,32).
 * {-1, -1} when there is no such cell.
 */
inline cell accumulator_cell(uint32_t tmem_address, int m, int row, int column) {
    const int base_lane = static_cast<int>(tmem_address >> 16), base_column = static_cast<int>(tmem_address & 0xFFFF);
    const bool aligned = m == 128 ? base_lane == 0 : m == 64 && (base_lane == 0 || base_lane == 16);
    if (!aligned || row < 0 || row >= m || column < 0 || column > 511 - base_column)
        return {-1, -1};
    return {m == 128 ? row : base_lane + row / 16 * 32 + row % 16, base_column + column};
}

/*
 * The cell that register reg of a thread gets from tcgen05.ld.32x32b.xN (9.7.16.2.3.1.1): the thread's own lane, one
 * column for each register.  9.7.16.8.1: warp w of a warpgroup reaches lanes 32w to 32w + 31 only, and all columns.
 */
inline const char *load_cell(uint32_t tmem_address, int warp_in_group, int lane, int reg, cell *out) {
    const uint32_t base_lane = tmem_address >> 16, column = tmem_address & 0xFFFF;
    if (warp_in_group < 0 || lane < 0 || lane > 31)
        return "There is no such warp or thread.";
    if (reg < 0 || reg > 127)
        return "tcgen05.ld.32x32b gives a thread no more than 128 registers.";
    if (base_lane != static_cast<uint32_t>(warp_in_group % 4) * 32)
        return "The address does not start at the first of the 32 lanes that this warp may reach.";
    if (column + static_cast<uint32_t>(reg) > 511)
        return "The column is beyond 511.";
    *out = {static_cast<int>(base_lane) + lane, static_cast<int>(column) + reg};
    return nullptr;
}

} /* namespace isa */
