/* SPDX-License-Identifier: Apache-2.0 */
/* moerouter: router kernels for Mixture-of-Experts models.
 *
 * A router scores every token against every expert, keeps the best top_k and turns their scores into mixing weights.
 * The functions below are the backward passes of two such routers. Tensors are described by DLPack's DLTensor, which
 * PyTorch, JAX, NumPy, CuPy and TVM hand over without a copy; where they live decides which backend does the work.
 *
 * Shapes: N tokens, H hidden size, E experts, K = top_k. Any of them may be 0.
 * dtypes: T is one of bfloat16, float16, float32, the same for every tensor marked T; an output is T or float32.
 * Layout: the last axis is contiguous; rows may be any distance apart that is not less than their width; byte_offset
 *         counts; NULL strides mean compact; data is aligned to one element. Axes of length 1 and tensors without
 *         elements may have any stride. grad_expert_mask may have any strides at all.
 * Ids:    int32 or int64. Ids that repeat in a row add up. -1 is an empty slot that contributes nothing. Any other id
 *         outside [0, E) is MOER_INVALID on the CPU, with every output untouched; a GPU skips it. Either way
 *         invalid_ids, where given, has the number of such ids added to it.
 * Memory: inputs are never written; an output may not overlap another tensor, judged by the bytes from first to last.
 * Bits:   the same inputs, library, device and environment, with what moer_tune() has found, give the same bits in
 * every run. A token's row of grad_hidden_states does not depend on the other tokens. On the CPU neither depends on the
 * number of threads. Where T is float32 and OpenBLAS does the products, both hold for one number of threads and one way
 * of calling only, and a row may depend on the number of tokens (MOER_DETERMINISTIC=1 does without OpenBLAS). Threads:
 * any function may be called from several threads at once and, on the CPU, from inside an OpenMP region. A forked child
 * may call too, unless its parent has run an OpenMP region before: GNU's OpenMP then never returns. Errors: a status,
 * and a sentence from moer_last_error(). After an error every output is as it was before, but for MOER_DEVICE.
 */
#ifndef MOEROUTER_H
#define MOEROUTER_H

#include <stddef.h>
#include <stdint.h>

/* Any copy of DLPack will do: the layout of DLTensor has been the same since 0.5. */
#ifndef DLPACK_DLPACK_H_
#include <dlpack/dlpack.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

#if defined __GNUC__
#define MOER_API __attribute__((visibility("default")))
#else
#define MOER_API
#endif

#define MOER_VERSION_MAJOR 0
#define MOER_VERSION_MINOR 1
#define MOER_VERSION_PATCH 0

/* Version of the library that is running, "0.1.0". */
MOER_API const char *moer_version(void);

/* ---- Errors ---------------------------------------------------------------------------------------------------- */

enum moer_status {
    MOER_OK = 0,
    MOER_INVALID,     /* the caller's fault: a shape, dtype, stride, id, pointer or size that the rules exclude */
    MOER_UNSUPPORTED, /* legal, but this backend cannot do it */
    MOER_UNAVAILABLE, /* the backend is not here: no module, no driver, no device */
    MOER_NO_MEMORY,   /* an allocation failed */
    MOER_DEVICE       /* the device reported an error; outputs are undefined */
};

/* "ok", "invalid argument", ...; never NULL. */
MOER_API const char *moer_status_string(enum moer_status status);

/* What went wrong in this thread's last call that returned a status: function, argument, rule and value, as in
 * "moer_softmax_topk_backward: routing_probs.shape[1] is 64 but gate_weight.shape[0] is 128".
 * Empty after success. Valid until the thread's next call. */
MOER_API const char *moer_last_error(void);

/* ---- Operations ------------------------------------------------------------------------------------------------ */

/* Every args struct begins with these fields. Zero is the default of every field but size, so
 *     struct moer_softmax_topk_backward_args args = {.size = sizeof args};
 * and then the tensors is all it takes.
 *
 * size            sizeof the struct; a program compiled against an older header passes a smaller one.
 * accumulate      not 0: the weight gradient is added to what its tensor holds. The float32 sum is formed first, added
 *                 once to the old value and rounded once.
 * stream          CUDA: the cudaStream_t to work on, NULL for the default stream; the call is asynchronous, ordered by
 *                 the stream, and can be captured into a graph. CPU: ignored.
 * workspace       scratch memory on the tensors' device, aligned to 256 bytes, of at least the size that
 *                 moer_<operation>_workspace_size() reports; its contents are arbitrary before the call and undefined
 *                 after it. A call that is given one allocates nothing (OpenMP's runtime and OpenBLAS may).
 *                 NULL: the call takes and frees its own, on the
 *                 CPU at most 64 MiB + 4*E*H bytes.
 * invalid_ids     [1] int32 on the tensors' device, optional: has the number of invalid ids added to it.
 */
#define MOER_COMMON_FIELDS                                                                                             \
    size_t size;                                                                                                       \
    void *stream;                                                                                                      \
    void *workspace;                                                                                                   \
    size_t workspace_size;                                                                                             \
    const DLTensor *invalid_ids;                                                                                       \
    int accumulate

/* Backward pass of softmax routing with an optional renormalisation over the chosen experts (Mixtral, Qwen3-MoE):
 *
 *     p = softmax(hidden_states . gate_weight^T);  q = top_k(p);  routing_weights = q / z,  z = sum(q)
 *
 * For each token, with q[k] = p[selected[k]], g, m, d the three incoming gradients:
 *
 *     c    = sum_k g[k] * (q[k] / z)                      quotient rule
 *     v[k] = (g[k] - c) / z + m[selected[k], k]           gradient of the chosen probability
 *     D[e] = d[e] + sum_{k : selected[k] = e} v[k]        scattered back
 *     G[e] = p[e] * (D[e] - sum_j D[j] * p[j])            Jacobian of softmax; then rounded once to T
 *     grad_hidden_states = G . gate_weight,  grad_gate_weight = G^T . hidden_states
 *
 * both products accumulated in float32 and rounded once. A tensor that is optional or an output may be NULL. */
struct moer_softmax_topk_backward_args {
    MOER_COMMON_FIELDS;
    const DLTensor *hidden_states;        /* [N, H] T */
    const DLTensor *gate_weight;          /* [E, H] T */
    const DLTensor *router_logits;        /* [N, E] T, optional, never read */
    const DLTensor *routing_probs;        /* [N, E] float32: p */
    const DLTensor *selected_experts;     /* [N, K] int32 or int64 */
    const DLTensor *routing_weights_sum;  /* [N, 1] float32: z. NULL: not renormalised, v = g + m */
    const DLTensor *grad_routing_weights; /* [N, K] T: g */
    const DLTensor *grad_expert_mask;     /* [E, K, N] T, optional, any strides: m */
    const DLTensor *grad_router_logits; /* [N, E] T, optional: d, a gradient that reaches the probabilities directly */
    const DLTensor *grad_hidden_states; /* [N, H] T or float32, output */
    const DLTensor *grad_gate_weight;   /* [E, H] T or float32, output */
    const DLTensor *grad_logits;        /* [N, E] T or float32, output: G */
};

MOER_API enum moer_status moer_softmax_topk_backward(const struct moer_softmax_topk_backward_args *args);

/* Backward pass of sigmoid routing with normalised, scaled weights (DeepSeek-V3, GLM-4.5 and later, Kimi-K2):
 *
 *     s = sigmoid(hidden_states . weight^T);  the selection has no gradient;  w = s[selected] / z
 *     topk_weights of the model = w * f,  f = routed_scaling_factor,  z = sum(s[selected]) + 1e-20
 *
 * Every step is rounded to T, as in the model's reference implementation, and in the order given here: G has exactly
 * these bits. R rounds to T, to nearest even:
 *
 *     a[k] = R(g[k] * f)
 *     c    = R(sum_k R(a[k] * w[k]))                      summed in float32, in ascending k
 *     u[k] = R(R(a[k] - c) / z)
 *     D[e] = sum_{k : i[k] = e} u[k]                      D = R(D + u[k]), in ascending k
 *     G[e] = R(R(D[e] * s[e]) * R(1 - s[e]))
 *     grad_hidden_states = G . weight,  grad_weight = G^T . hidden_states
 *
 * both products accumulated in float32 and rounded once. */
struct moer_sigmoid_topk_backward_args {
    MOER_COMMON_FIELDS;
    double routed_scaling_factor;            /* f, used as float32; 0 means 1 */
    const DLTensor *hidden_states;           /* [N, H] T */
    const DLTensor *weight;                  /* [E, H] T */
    const DLTensor *grad_topk_weights;       /* [N, K] T: g */
    const DLTensor *scores;                  /* [N, E] T: s */
    const DLTensor *topk_indices;            /* [N, K] int32 or int64: i */
    const DLTensor *topk_weights;            /* [N, K] T, optional, never read */
    const DLTensor *topk_weights_normalized; /* [N, K] T: w */
    const DLTensor *denominator;             /* [N, 1] T: z */
    const DLTensor *grad_hidden_states;      /* [N, H] T or float32, output */
    const DLTensor *grad_weight;             /* [E, H] T or float32, output */
    const DLTensor *grad_logits;             /* [N, E] T or float32, output: G */
};

MOER_API enum moer_status moer_sigmoid_topk_backward(const struct moer_sigmoid_topk_backward_args *args);

/* Size of the workspace of such a call, in bytes. Reads shapes, dtypes and the device, but no data: data pointers may
 * be NULL. The same checks and errors as the call itself, but for those of data and of the workspace. */
MOER_API enum moer_status moer_softmax_topk_backward_workspace_size(const struct moer_softmax_topk_backward_args *args,
                                                                    size_t *bytes);
MOER_API enum moer_status moer_sigmoid_topk_backward_workspace_size(const struct moer_sigmoid_topk_backward_args *args,
                                                                    size_t *bytes);

/* Which kernel such a call would take, in words, and what about it does not fit a fast path that it might take, written
 * to text (size bytes, cut to fit, always terminated unless size is 0). */
MOER_API enum moer_status moer_softmax_topk_backward_explain(const struct moer_softmax_topk_backward_args *args,
                                                             char *text, size_t size);
MOER_API enum moer_status moer_sigmoid_topk_backward_explain(const struct moer_sigmoid_topk_backward_args *args,
                                                             char *text, size_t size);

/* ---- What operations are made of: for bindings and tools --------------------------------------------------------- */

enum moer_operation { MOER_SOFTMAX_TOPK_BACKWARD, MOER_SIGMOID_TOPK_BACKWARD, MOER_OPERATIONS };

enum moer_kind {
    MOER_DTYPE_T,      /* bfloat16, float16 or float32, the same for all of a call */
    MOER_DTYPE_OUTPUT, /* T or float32, and written by the call */
    MOER_DTYPE_FLOAT,  /* float32 */
    MOER_DTYPE_ID,     /* int32 or int64 */
    MOER_DTYPE_COUNT   /* int32, and written by the call */
};

struct moer_operand {
    const char *name;    /* "hidden_states" */
    const char *axes;    /* a letter an axis: "NH"; 'N', 'H', 'E', 'K' as above, '1' for an axis of length 1 */
    size_t offset;       /* where the struct of the operation holds its const DLTensor * */
    enum moer_kind kind; /* which dtypes are legal */
    int required;        /* 0: may be NULL */
    int any_strides;     /* 1: strides of every size and sign are legal */
};

/* "softmax_topk_backward"; NULL for a number that is no operation. */
MOER_API const char *moer_operation_name(enum moer_operation operation);

/* The tensors of an operation in the order of its struct, then invalid_ids; *count is their number. NULL and 0 for a
 * number that is no operation. */
MOER_API const struct moer_operand *moer_operands(enum moer_operation operation, size_t *count);

/* ---- Backends ---------------------------------------------------------------------------------------------------- */

/* The backends this library knows, "cpu" and "cuda", whether or not they can be used here. */
MOER_API size_t moer_backend_count(void);
MOER_API const char *moer_backend_name(size_t backend); /* NULL past the end */

/* NULL where the backend can be used, else the reason why not: "no NVIDIA driver". */
MOER_API const char *moer_backend_unavailable(size_t backend);

/* What the backend says of itself, a "name: value" a line (devices, instruction sets, threads, BLAS, ...), written to
 * text as above. */
MOER_API enum moer_status moer_backend_info(size_t backend, char *text, size_t size);

/* ---- Fast paths ------------------------------------------------------------------------------------------------- */

/* A GPU may have a fast path: kernels for its kind alone, beside the generic path, which runs on every GPU. Where the
 * project has proven it on GPUs of that compute capability it runs by default. Elsewhere it runs only after this
 * function has found it right on the very GPU, with the same driver, version of the library and build of its kernels,
 * and only for operations that it makes faster; what it has found wrong does not run while that verdict counts, proven
 * or not.
 *
 * It compares the two paths in a program of its own, the self-check, a child process: a path that breaks takes nothing
 * of the caller's with it. Sums are of small integers and exact, so that the results must have the same bits. Then both
 * are timed. The verdict is kept in a file of the user's cache folder, $XDG_CACHE_HOME/moerouter or
 * $HOME/.cache/moerouter, and counts for this process and those to come. Where it cannot be stored, one against the
 * path counts for this process, an older one for it is deleted where that can be, and one for it does not count. It
 * takes less than a minute, and nothing else should be running on the device meanwhile. Calls in other threads may take
 * one path or the other until it returns.
 *
 * device      kDLCUDA or kDLCUDAManaged
 * timeout_ms  milliseconds for which the child may show no progress before it is ended, which is a verdict too where
 *             the fast path was running and the child was not stopped; 0 means 60 s
 * text        the verdict in words, then the times of both paths, a shape a line (size bytes, cut to fit, always
 *             terminated unless size is 0). Untouched where there is no verdict
 *
 * MOER_OK            the path was found right
 * MOER_DEVICE        it was found wrong: its results differ, or it faulted or hung; the error says at what, and where
 *                    that could not be stored, why
 * MOER_UNSUPPORTED   the device has no fast path
 * MOER_UNAVAILABLE   there is no verdict: no such device, no self-check, or a child that was ended by others, could not
 *                    do its work, or faulted or hung elsewhere than in the fast path; or one for the path could not be
 *                    stored
 * MOER_INVALID       text is NULL but size is not 0, or timeout_ms is negative */
MOER_API enum moer_status moer_tune(DLDevice device, int timeout_ms, char *text, size_t size);

/* ---- Tensors on any device, for programs that have no allocator for it ----------------------------------------------
 */

/* A compact tensor with uninitialised data, aligned to 256 bytes. *tensor is NULL after an error. */
MOER_API enum moer_status moer_tensor_new(DLTensor **tensor, DLDevice device, DLDataType dtype, int32_t ndim,
                                          const int64_t *shape);
/* Frees what moer_tensor_new() made; NULL is fine. */
MOER_API void moer_tensor_free(DLTensor *tensor);
/* Copies all elements between two compact tensors of the same shape and dtype, on any two devices; done on return. */
MOER_API enum moer_status moer_tensor_copy(const DLTensor *to, const DLTensor *from);

#ifdef __cplusplus
}
#endif
#endif
