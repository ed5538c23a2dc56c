/* SPDX-License-Identifier: Apache-2.0 */
/* What the fused kernel tells Blackwell's tensor cores, against a model of the ISA's tables (tcgen05_model.h): of each
 * descriptor that it can form, every element must be where copies and kernels have put it, and each bit that is used
 * must count. */
#include "fused_tcgen05.cuh"
#include "tcgen05_model.h"

#include <stdio.h>

using namespace moer_fused;

namespace {

int checks, failures;

/* Where a tensor copy, or the first kernel, puts an element of a matrix: panels side by side, of rows of so many bytes,
 * whose chunks of 16 bytes are permuted by the number of the row's 128 bytes. */
uint32_t placed(uint32_t slot, int rows, int width, int row, int column) {
    const int panel = column * 2 / width, byte = column * 2 % width;
    const uint32_t at = slot + static_cast<uint32_t>((panel * rows + row) * width + byte);
    const uint32_t chunks = static_cast<uint32_t>(width / 16);
    return at ^ (at / 128 % 8 & (chunks - 1)) * 16;
}

/* A tile in shared memory, and which 16 terms of which of its rows or columns a product shall read. */
struct reading {
    uint32_t slot;
    int rows, width;         /* of a panel: bytes */
    bool term_rows;          /* the tile's rows are terms */
    int first, extent, term; /* of the other axis, and where the terms begin */
};

bool reads(uint64_t descriptor, const reading &reading) {
    isa::operand operand;
    if (isa::decode_operand(descriptor, reading.term_rows, &operand))
        return false;
    for (int i = 0; i < reading.extent; i++)
        for (int k = 0; k < 16; k++) {
            const int outer = reading.first + i, term = reading.term + k;
            const uint32_t at = reading.term_rows ? placed(reading.slot, reading.rows, reading.width, term, outer)
                                                  : placed(reading.slot, reading.rows, reading.width, outer, term);
            if (isa::element_address(operand, i, k) != at)
                return false;
        }
    return true;
}

void report(bool good, const char *what, int experts, int k, const char *how) {
    checks++;
    if (good)
        return;
    if (failures++ < 20)
        printf("%s, %d experts, terms from %d on: %s\n", what, experts, 16 * k, how);
}

/* The distance across is not used where rows are not terms, nor where a product has no second panel. */
void check(const char *what, uint64_t descriptor, const reading &reading, int experts, int k) {
    report(reads(descriptor, reading), what, experts, k, "elements are elsewhere");
    const bool across = reading.term_rows && reading.extent > reading.width / 2;
    for (int bit = 0; bit < 64; bit++)
        if (across || bit < 16 || bit >= 30)
            report(!reads(descriptor ^ UINT64_C(1) << bit, reading), what, experts, k, "a bit that does not count");
}

void check_product(uint32_t descriptor, bool bfloat16, bool term_rows_a, int rows, int columns) {
    const auto same = [=](uint32_t word) {
        isa::instruction product;
        return !isa::decode_instruction(word, &product) && product.m == rows && product.n == columns &&
               product.a_type == bfloat16 && product.b_type == bfloat16 && product.a_mn_major == term_rows_a &&
               product.b_mn_major;
    };
    report(same(descriptor), "the product", columns, 0, "is another");
    for (int bit = 0; bit < 32; bit++)
        report(!same(descriptor ^ 1u << bit), "the product", columns, 0, "a bit that does not count");
}

/* Sums of a product of 128 rows, and what the threads of a warpgroup load of them, 32 columns at once. */
void check_sums(uint32_t sums, int columns, uint32_t own_of_warp[4]) {
    for (int row = 0; row < TENSOR_LANES; row++)
        for (int column = 0; column < columns; column++) {
            isa::cell there = isa::accumulator_cell(sums, TENSOR_LANES, row, column), here{};
            const uint32_t from = own_of_warp[row / 32] + static_cast<uint32_t>(column / 32 * 32);
            const char *refused = isa::load_cell(from, row / 32, row % 32, column % 32, &here);
            report(!refused && there.lane == here.lane && there.column == here.column && there.lane == row, "sums",
                   columns, 0, refused ? refused : "a thread has another's");
        }
}

template <typename shape>
void check_shape() {
    using of = operands<shape>;
    constexpr int TOKENS = shape::TOKENS, EXPERTS = shape::EXPERTS;
    constexpr uint32_t FIRST = 1024;
    /* Slots begin at multiples of 1 KB; wherever that is. */
    for (uint32_t slot = FIRST; slot + shape::GATE_BYTES <= FIRST + shape::ROOM; slot += 1024) {
        for (int k = 0; k < TOKENS / 16; k++)
            check("hidden states", of::hidden_states(slot) + k * of::HIDDEN_STEP,
                  {slot, TOKENS, B_PANEL, true, 0, shape::WEIGHT_COLUMNS, 16 * k}, EXPERTS, k);
        for (int k = 0; k < EXPERTS / 16; k++) {
            check("G", of::logits(slot) + of::logits_step(k), {slot, TOKENS, A_PANEL, false, 0, TOKENS, 16 * k},
                  EXPERTS, k);
            check("the gate", of::gate(slot) + k * of::GATE_STEP,
                  {slot, EXPERTS, B_PANEL, true, 0, HIDDEN_COLUMNS, 16 * k}, EXPERTS, k);
        }
    }
    for (int first = 0; first < EXPERTS; first += A_EXPERTS)
        for (int experts = A_EXPERTS; first + experts <= EXPERTS; experts += A_EXPERTS)
            for (int k = 0; k < TOKENS / 16; k++) {
                /* Entries make a whole tile of G, of which a block takes its part; tiles are copied in part. */
                const int offset = first / A_EXPERTS * TOKENS * A_PANEL;
                const uint32_t slot = FIRST, part = slot + static_cast<uint32_t>(offset);
                check("a part of G", of::logits_across(part) + k * of::LOGITS_STEP,
                      {slot, TOKENS, A_PANEL, true, first, experts, 16 * k}, experts, k);
            }
    for (bool bfloat16 : {false, true}) {
        check_product(of::item_product(bfloat16), bfloat16, false, TOKENS, HIDDEN_COLUMNS);
        for (int experts = A_EXPERTS; experts <= EXPERTS; experts += A_EXPERTS)
            check_product(of::weight_product(bfloat16, experts), bfloat16, true, shape::WEIGHT_COLUMNS, experts);
    }
    uint32_t own[4];
    for (int turn = 0; turn < WARPGROUPS; turn++) {
        for (int warp = 0; warp < 4; warp++)
            own[warp] = own_lanes(item_sums(0, turn), warp);
        check_sums(item_sums(0, turn), HIDDEN_COLUMNS, own);
        for (int experts = A_EXPERTS; experts <= EXPERTS; experts += A_EXPERTS) {
            for (int warp = 0; warp < 4; warp++)
                own[warp] = chain_sums(own_lanes(0, warp), turn, experts);
            check_sums(chain_sums(0, turn, experts), experts, own);
            report(chain_sums(0, 0, experts) >= static_cast<uint32_t>(experts) &&
                       chain_sums(0, 1, experts) >= chain_sums(0, 0, experts) + static_cast<uint32_t>(experts) &&
                       chain_sums(0, 1, experts) + static_cast<uint32_t>(experts) <= TENSOR_COLUMNS,
                   "sums", experts, 0, "parts that overlap");
        }
    }
    report(item_sums(0, 1) >= HIDDEN_COLUMNS && item_sums(0, 1) + HIDDEN_COLUMNS <= TENSOR_COLUMNS, "sums", EXPERTS, 0,
           "parts that overlap");
}

} // namespace

int main() {
    check_shape<shape<blackwell, 64, false>>();
    check_shape<shape<blackwell, FUSED_EXPERTS, false>>();
    check_shape<shape<blackwell, 128, true>>();
    check_shape<shape<blackwell, FUSED_EXPERTS_SPARSE, true>>();
    printf("%d checks of descriptors, %d failed\n", checks, failures);
    return failures != 0;
}
