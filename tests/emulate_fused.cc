/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that make both products, as they are, in an emulator (emulated_cuda.h), on small integers, whose sums are
 * exact: every element of both gradients must be right, whatever the order of events. */
#include "emulated_cuda.h"

#undef __shared__
#define __shared__
#include "fused.cu"
#include "reduce.cu"
#include "columns.cu"
#include "wide.cu"

/* How G comes: to the fused kernel, as tiles or as entries; to those of wide.cu and columns.cu, as rows. */
enum logits { TILES, ENTRIES, ROWS, ROWS_BY_COLUMNS };

struct shapes {
    enum logits logits;
    int tokens, hidden, experts, top_k;
    bool accumulate, narrow; /* narrow: the weight gradient is of the operands' type, else float32 */
    int processors;
    int split_tokens; /* of rows: 0 lets the kernel's host choose */
};

/* G as the kernel before leaves it, tiles and entries for whole tiles of tokens; and as a matrix. */
template <typename T>
std::vector<uint32_t> make_logits(const shapes &shapes, problem *problem, std::vector<float> *g,
                                  std::mt19937 *numbers) {
    const int tokens = (shapes.tokens + PADDED_TOKENS - 1) / PADDED_TOKENS * PADDED_TOKENS;
    const bool sparse = shapes.logits == ENTRIES;
    const int multiple = shapes.logits >= ROWS ? LOGITS_MULTIPLE : FUSED_LOGITS_MULTIPLE;
    problem->logits_stride = (shapes.experts + multiple - 1) / multiple * multiple;
    problem->entries = sparse ? (shapes.top_k + 3) / 4 * 4 : 0;
    std::vector<uint32_t> logits(static_cast<size_t>(tokens) *
                                     static_cast<size_t>(sparse ? problem->entries : problem->logits_stride / 2),
                                 sparse ? NO_ENTRY : 0);
    for (int n = 0; n < shapes.tokens; n++)
        for (int k = 0; k < (sparse ? shapes.top_k : shapes.experts); k++) {
            const int expert = sparse ? static_cast<int>((*numbers)() % static_cast<unsigned>(shapes.experts)) : k;
            float &element = (*g)[static_cast<size_t>(n * shapes.experts + expert)];
            if ((*numbers)() % 7 == 0 || element != 0)
                continue;
            element = static_cast<float>(static_cast<int>((*numbers)() % 4) - 2) + 0.5f;
            const T narrow(element);
            uint16_t bits;
            memcpy(&bits, &narrow, 2);
            const int at = swizzled<T, TILE_TOKENS, A_PANEL>(n % TILE_TOKENS, expert);
            if (shapes.logits >= ROWS)
                memcpy(reinterpret_cast<char *>(logits.data()) + (n * problem->logits_stride + expert) * 2, &bits, 2);
            else if (sparse)
                logits[static_cast<size_t>(n * problem->entries + k)] =
                    static_cast<uint32_t>(at) | static_cast<uint32_t>(bits) << 16;
            else
                memcpy(reinterpret_cast<char *>(logits.data()) +
                           static_cast<size_t>(n / TILE_TOKENS) * TILE_TOKENS *
                               static_cast<size_t>(problem->logits_stride) * 2 +
                           at,
                       &bits, 2);
        }
    return logits;
}

/* Whether each row has what compute says, and nothing behind it has changed. */
template <typename V, typename Compute>
bool right(const char *what, const std::vector<V> &got, int rows, int columns, int stride, float before,
           Compute compute) {
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < stride; column++) {
            const float expected = static_cast<float>(V(column < columns ? compute(row, column) : before));
            const float found = static_cast<float>(got[static_cast<size_t>(row * stride + column)]);
            if (found != expected) {
                printf("%s[%d, %d] is %g but must be %g\n", what, row, column, static_cast<double>(found),
                       static_cast<double>(expected));
                return false;
            }
        }
    return true;
}

template <typename T, typename Weight>
bool trial(const shapes &shapes, element type, element weight_type, unsigned seed) {
    const int rows = shapes.tokens, columns = shapes.hidden, experts = shapes.experts;
    const int stride = columns + 8 * static_cast<int>(seed % 3);
    const float before = 3;
    std::mt19937 numbers(seed);
    const auto small = [&] { return T(static_cast<float>(static_cast<int>(numbers() % 7) - 3)); };
    std::vector<T> x(static_cast<size_t>(rows * stride)), w(static_cast<size_t>(experts * stride)),
        grad_hidden(x.size(), T(before));
    std::vector<Weight> grad_weight(w.size(), Weight(before));
    for (T &value : x)
        value = small();
    for (T &value : w)
        value = small();
    problem problem{};
    std::vector<float> g(static_cast<size_t>(rows * experts));
    std::vector<uint32_t> logits = make_logits<T>(shapes, &problem, &g, &numbers);
    problem.logits = reinterpret_cast<char *>(logits.data());
    problem.tokens = rows, problem.hidden = columns, problem.experts = experts, problem.top_k = shapes.top_k;
    problem.kernels = std::is_same<moer_fused::made_for, moer_fused::hopper>::value ? HOPPER : BLACKWELL;
    problem.fused = shapes.logits < ROWS, problem.accumulate = shapes.accumulate, problem.type = type;
    const auto place = [&](struct rows *matrix, void *data) {
        matrix->data = static_cast<char *>(data);
        matrix->stride = stride;
    };
    place(&problem.hidden_states, x.data());
    place(&problem.weight, w.data());
    place(&problem.grad_hidden, grad_hidden.data());
    place(&problem.grad_weight, grad_weight.data());
    problem.grad_hidden.type = type, problem.grad_weight.type = weight_type;
    emulated::processors = shapes.processors;
    emulated::chance.seed(seed);
    std::vector<float> partials;
    std::vector<int> arrivals;
    if (shapes.logits >= ROWS) {
        problem.by_columns = shapes.logits == ROWS_BY_COLUMNS;
        problem.split_tokens = shapes.split_tokens  ? shapes.split_tokens
                               : problem.by_columns ? choose_columns_split(problem)
                                                    : choose_wide_split(problem);
        problem.splits = divide_up(rows, problem.split_tokens);
        problem.partial_rows = experts + 1, problem.partial_stride = columns + 4;
        partials.assign(static_cast<size_t>(problem.splits * problem.partial_rows * problem.partial_stride), NAN);
        problem.partials = partials.data();
        arrivals.assign(static_cast<size_t>(count_wide_arrivals(problem)), 0); /* the kernel before does that */
        problem.arrivals = arrivals.data();
    }
    if ((problem.fused        ? launch_fused(problem, nullptr)
         : problem.by_columns ? launch_columns(problem, nullptr)
                              : launch_wide(problem, nullptr)) != cudaSuccess) {
        printf("the launch failed\n");
        return false;
    }
    const auto dot = [](const float *a, int a_step, const T *b, int b_step, int terms) {
        float sum = 0;
        for (int i = 0; i < terms; i++)
            sum += a[i * a_step] * static_cast<float>(b[i * b_step]);
        return sum;
    };
    return right("grad_hidden_states", grad_hidden, rows, columns, stride, before,
                 [&](int row, int column) {
                     return dot(&g[static_cast<size_t>(row * experts)], 1, &w[static_cast<size_t>(column)], stride,
                                experts);
                 }) &&
           right("the weight gradient", grad_weight, experts, columns, stride, before, [&](int row, int column) {
               return (shapes.accumulate ? before : 0) +
                      dot(&g[static_cast<size_t>(row)], experts, &x[static_cast<size_t>(column)], stride, rows);
           });
}

/* Seeds, so many for each case, from 0 on. */
int main(int count, char **arguments) {
    const unsigned seeds = count > 1 ? static_cast<unsigned>(atoi(arguments[1])) : 2;
    const shapes cases[] = {
        {TILES, 1, 64, 16, 2, false, true, 4, 0},
        {TILES, 65, 72, 60, 2, true, true, 6, 0},
        {TILES, 300, 200, 128, 8, false, true, 9, 0},
        {TILES, 513, 136, 100, 8, false, false, 40, 0},
        {TILES, 200, 200, 128, 8, true, false, 4, 0},
        {TILES, 130, 1032, 128, 4, false, true, 20, 0},
        {TILES, 130, 1032, 64, 4, false, true, 4, 0},
        {TILES, 6300, 64, 32, 4, false, true, 5, 0},
        {ENTRIES, 1, 64, 160, 8, false, true, 4, 0},
        {ENTRIES, 65, 72, 20, 3, true, true, 6, 0},
        {ENTRIES, 700, 200, 160, 8, false, true, 9, 0},
        {ENTRIES, 513, 264, 128, 16, false, false, 30, 0},
        {ENTRIES, 1100, 136, 150, 12, false, true, 5, 0},
        {ENTRIES, 2300, 64, 160, 1, false, true, 7, 0},
        {ENTRIES, 65, 520, 140, 4, false, true, 4, 0},
#ifdef MOER_FUSED_WGMMA
        {ROWS, 1, 8, 65, 2, false, true, 4, 0},
        {ROWS, 200, 264, 144, 8, false, true, 12, 0},
        {ROWS, 200, 264, 144, 8, true, true, 12, 0},
        {ROWS, 200, 264, 144, 8, false, false, 2, 0},
        {ROWS, 330, 520, 130, 8, false, true, 12, 128},
        {ROWS, 130, 1032, 72, 8, false, true, 6, 64},
        {ROWS, 520, 72, 300, 8, true, false, 4, 192},
        {ROWS, 576, 1544, 200, 8, false, true, 2, 320},
        {ROWS, 330, 776, 250, 8, false, true, 6, 0},
        {ROWS, 200, 520, 450, 8, false, true, 8, 0},
        {ROWS, 650, 1032, 380, 8, false, true, 6, 0},
        {ROWS_BY_COLUMNS, 1, 8, 65, 2, false, true, 4, 0},
        {ROWS_BY_COLUMNS, 200, 264, 104, 8, false, true, 12, 0},
        {ROWS_BY_COLUMNS, 200, 776, 40, 8, true, true, 12, 0},
        {ROWS_BY_COLUMNS, 2300, 64, 128, 8, false, false, 2, 1216},
        {ROWS_BY_COLUMNS, 1330, 520, 60, 8, false, true, 12, 0},
        {ROWS_BY_COLUMNS, 700, 17400, 16, 8, false, true, 6, 0},
#endif
    };
    int failed = 0;
    for (const shapes &shapes : cases)
        for (unsigned seed = 0; seed < seeds; seed++) {
            const bool half = seed % 2;
            const bool good = shapes.narrow ? half ? trial<__half, __half>(shapes, F16, F16, seed)
                                                   : trial<__nv_bfloat16, __nv_bfloat16>(shapes, BF16, BF16, seed)
                              : half ? trial<__half, float>(shapes, F16, F32, seed)
                                            : trial<__nv_bfloat16, float>(shapes, BF16, F32, seed);
            if (!good) {
                static const char *const names[] = {"tiles", "entries", "rows", "rows by columns"};
                printf("%s, N = %d, H = %d, E = %d, K = %d, seed %u: FAILED\n", names[shapes.logits], shapes.tokens,
                       shapes.hidden, shapes.experts, shapes.top_k, seed);
                failed++;
            }
        }
    printf("%zu cases, %u seeds each, %d failed\n", sizeof cases / sizeof *cases, seeds, failed);
    return failed != 0;
}
