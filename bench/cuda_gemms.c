/* SPDX-License-Identifier: Apache-2.0 */
/* The two products alone, as a user would have them from cuBLASLt: bfloat16 in and out, sums in float32, each by the
 * fastest of the first eight ways that its heuristics propose, both in one graph.
 *
 * cuBLASLt counts by columns: to it a matrix of ours is its transpose. grad_hidden = G W is then W G with both as they
 * are, grad_weight = G^T X is X G^T. */
#include "cuda.h"

#include <cublasLt.h>
#include <math.h>

#include "command.h"

enum { CANDIDATES = 8, CANDIDATE_REPEATS = 20, WORKSPACE_BYTES = 32 << 20 };

/* ---- cuBLASLt, loaded at run time ------------------------------------------------------------------------------- */

static union {
    struct {
        __typeof__(&cublasLtCreate) create;
        __typeof__(&cublasLtGetVersion) version;
        __typeof__(&cublasLtGetStatusString) status_string;
        __typeof__(&cublasLtMatmulDescCreate) desc_create;
        __typeof__(&cublasLtMatmulDescDestroy) desc_destroy;
        __typeof__(&cublasLtMatmulDescSetAttribute) desc_set;
        __typeof__(&cublasLtMatrixLayoutCreate) layout_create;
        __typeof__(&cublasLtMatrixLayoutDestroy) layout_destroy;
        __typeof__(&cublasLtMatmulPreferenceCreate) preference_create;
        __typeof__(&cublasLtMatmulPreferenceDestroy) preference_destroy;
        __typeof__(&cublasLtMatmulPreferenceSetAttribute) preference_set;
        __typeof__(&cublasLtMatmulAlgoGetHeuristic) heuristic;
        __typeof__(&cublasLtMatmul) matmul;
    };
    void *addresses[13];
} blas;

static const char *const blas_names[] = {"cublasLtCreate",
                                         "cublasLtGetVersion",
                                         "cublasLtGetStatusString",
                                         "cublasLtMatmulDescCreate",
                                         "cublasLtMatmulDescDestroy",
                                         "cublasLtMatmulDescSetAttribute",
                                         "cublasLtMatrixLayoutCreate",
                                         "cublasLtMatrixLayoutDestroy",
                                         "cublasLtMatmulPreferenceCreate",
                                         "cublasLtMatmulPreferenceDestroy",
                                         "cublasLtMatmulPreferenceSetAttribute",
                                         "cublasLtMatmulAlgoGetHeuristic",
                                         "cublasLtMatmul",
                                         NULL};

static cublasLtHandle_t handle;
static void *workspace;

static int blas_failed(cublasStatus_t status, const char *call) {
    return status == CUBLAS_STATUS_SUCCESS ? 0 : complain("%s: %s", call, blas.status_string(status));
}

int gemms_open(size_t *version) {
    char soname[32], reason[256];
    snprintf(soname, sizeof soname, "libcublasLt.so.%d", CUBLAS_VER_MAJOR);
    void *library = cuda_open_library(soname, reason, sizeof reason);
    if (!library)
        return complain("the products alone need cuBLASLt: %s", reason);
    const char *missing = cuda_find_functions(library, blas_names, blas.addresses);
    if (missing)
        return complain("%s has no %s", soname, missing);
    *version = blas.version();
    return blas_failed(blas.create(&handle), "cublasLtCreate") ||
                   cuda_failed(cudaMalloc(&workspace, WORKSPACE_BYTES), "cudaMalloc of cuBLASLt's workspace")
               ? EXIT_TROUBLE
               : 0;
}

/* ---- A product -------------------------------------------------------------------------------------------------- */

/* Which of a copy's tensors it multiplies with G, and where the result goes. */
struct product {
    const struct ring *ring;
    int of_states; /* G^T X instead of G W */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t factor, logits, result;
    cublasLtMatmulAlgo_t algo;
};

static int enqueue_product(void *context, int copy, cudaStream_t stream) {
    const struct product *product = context;
    const struct ring_copy *at = &product->ring->copies[copy];
    const void *factor = product->of_states ? at->hidden_states : at->weight;
    void *result = product->of_states ? at->grad_weight : at->grad_hidden_states;
    const float one = 1, zero = 0;
    return blas_failed(blas.matmul(handle, product->desc, &one, factor, product->factor, at->logits, product->logits,
                                   &zero, result, product->result, result, product->result, &product->algo, workspace,
                                   WORKSPACE_BYTES, stream),
                       "cublasLtMatmul");
}

static int describe_product(struct product *product) {
    const uint64_t N = (uint64_t)product->ring->dims.tokens, H = (uint64_t)product->ring->dims.hidden,
                   E = (uint64_t)product->ring->dims.experts;
    const int32_t transposed = CUBLAS_OP_T;
    if (blas_failed(blas.desc_create(&product->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate") ||
        blas_failed(blas.layout_create(&product->factor, CUDA_R_16BF, H, product->of_states ? N : E, (int64_t)H),
                    "cublasLtMatrixLayoutCreate") ||
        blas_failed(blas.layout_create(&product->logits, CUDA_R_16BF, E, N, (int64_t)E),
                    "cublasLtMatrixLayoutCreate") ||
        blas_failed(blas.layout_create(&product->result, CUDA_R_16BF, H, product->of_states ? E : N, (int64_t)H),
                    "cublasLtMatrixLayoutCreate"))
        return EXIT_TROUBLE;
    if (!product->of_states)
        return 0;
    return blas_failed(blas.desc_set(product->desc, CUBLASLT_MATMUL_DESC_TRANSB, &transposed, sizeof transposed),
                       "cublasLtMatmulDescSetAttribute");
}

static void forget_product(struct product *product) {
    if (product->desc)
        blas.desc_destroy(product->desc);
    if (product->factor)
        blas.layout_destroy(product->factor);
    if (product->logits)
        blas.layout_destroy(product->logits);
    if (product->result)
        blas.layout_destroy(product->result);
}

/* ---- The fastest way -------------------------------------------------------------------------------------------- */

/* What the heuristics propose within the workspace. Parts of a sum that are split meet in float32, as ours do. */
static int propose(const struct product *product, cublasLtMatmulHeuristicResult_t candidates[CANDIDATES], int *count) {
    const uint64_t bytes = WORKSPACE_BYTES;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreference_t preference = NULL;
    if (blas_failed(blas.preference_create(&preference), "cublasLtMatmulPreferenceCreate"))
        return EXIT_TROUBLE;
    const int result =
        blas_failed(blas.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
                    "cublasLtMatmulPreferenceSetAttribute of the workspace") ||
        blas_failed(
            blas.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions),
            "cublasLtMatmulPreferenceSetAttribute of the reductions") ||
        blas_failed(blas.heuristic(handle, product->desc, product->factor, product->logits, product->result,
                                   product->result, preference, CANDIDATES, candidates, count),
                    "cublasLtMatmulAlgoGetHeuristic");
    blas.preference_destroy(preference);
    return result ? EXIT_TROUBLE : 0;
}

static int choose_algorithm(struct product *product) {
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    const struct cuda_work work = {enqueue_product, product, product->ring->count};
    int count = 0, best = -1;
    double least = INFINITY;
    if (propose(product, candidates, &count) != 0)
        return EXIT_TROUBLE;
    for (int i = 0; i < count; i++) {
        double us;
        if (candidates[i].state != CUBLAS_STATUS_SUCCESS)
            continue;
        product->algo = candidates[i].algo;
        if (timer_time(&work, 1, CANDIDATE_REPEATS, &us) != 0)
            return EXIT_TROUBLE;
        best = us < least ? i : best;
        least = us < least ? us : least;
    }
    if (best < 0)
        return complain("cuBLASLt has no product of this shape");
    product->algo = candidates[best].algo;
    return 0;
}

/* ---- Both ------------------------------------------------------------------------------------------------------- */

static int enqueue_both(void *context, int copy, cudaStream_t stream) {
    struct product *products = context;
    const int result = enqueue_product(&products[0], copy, stream);
    return result == 0 ? enqueue_product(&products[1], copy, stream) : result;
}

int gemms_time(const struct ring *ring, const struct call *host, uint64_t repeats, double *us) {
    struct product products[2] = {{.ring = ring}, {.ring = ring, .of_states = 1}};
    const struct cuda_work work = {enqueue_both, products, ring->count};
    int result = 0;
    for (int i = 0; i < 2 && result == 0; i++) {
        result = describe_product(&products[i]);
        if (result == 0)
            result = choose_algorithm(&products[i]);
    }
    if (result == 0)
        result = ring_spoil(ring);
    if (result == 0)
        result = timer_time(&work, 1, repeats, us);
    if (result == 0)
        result = ring_compare(ring, host, 0, "cuBLASLt");
    for (int i = 0; i < 2; i++)
        forget_product(&products[i]);
    return result;
}
