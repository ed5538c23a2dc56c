/* SPDX-License-Identifier: Apache-2.0 */
/* What a packaged solution has in the library's place: the arguments of an operation, in the order of the suite's
 * definition, inputs first, are held to that definition and handed to the backend. Sizes are whatever the tensors have,
 * so long as they agree. */
#include "backend.h"
#include "tensor.h"

#include <string.h>

/* Nothing asks for it here. */
const char moer_cuda_build[] = "packed";

namespace moer_solution {

constexpr DLDataType BFLOAT16 = {kDLBfloat, 16, 1}, FLOAT32 = {kDLFloat, 32, 1}, INT64 = {kDLInt, 64, 1};

/* A tensor of a definition: where the backend looks for it, and a letter an axis, as in moer_operand. */
template <typename Args>
struct operand {
    const char *name;
    const DLTensor *Args::*place;
    const char *axes;
    DLDataType dtype;
};

using softmax = moer_softmax_topk_backward_args;
constexpr operand<softmax> softmax_operands[] = {
    {"hidden_states", &softmax::hidden_states, "NH", BFLOAT16},
    {"gate_weight", &softmax::gate_weight, "EH", BFLOAT16},
    {"router_logits", &softmax::router_logits, "NE", BFLOAT16},
    {"routing_probs", &softmax::routing_probs, "NE", FLOAT32},
    {"selected_experts", &softmax::selected_experts, "NK", INT64},
    {"routing_weights_sum", &softmax::routing_weights_sum, "N1", FLOAT32},
    {"grad_routing_weights", &softmax::grad_routing_weights, "NK", BFLOAT16},
    {"grad_expert_mask", &softmax::grad_expert_mask, "EKN", BFLOAT16},
    {"grad_router_logits", &softmax::grad_router_logits, "NE", BFLOAT16},
    {"grad_hidden_states", &softmax::grad_hidden_states, "NH", BFLOAT16},
    {"grad_gate_weight", &softmax::grad_gate_weight, "EH", BFLOAT16},
};

/* Of these the definition has routed_scaling_factor, a number, between denominator and the outputs. */
using sigmoid = moer_sigmoid_topk_backward_args;
constexpr operand<sigmoid> sigmoid_operands[] = {
    {"grad_topk_weights", &sigmoid::grad_topk_weights, "NK", BFLOAT16},
    {"hidden_states", &sigmoid::hidden_states, "NH", BFLOAT16},
    {"weight", &sigmoid::weight, "EH", BFLOAT16},
    {"scores", &sigmoid::scores, "NE", BFLOAT16},
    {"topk_indices", &sigmoid::topk_indices, "NK", INT64},
    {"topk_weights", &sigmoid::topk_weights, "NK", BFLOAT16},
    {"topk_weights_normalized", &sigmoid::topk_weights_normalized, "NK", BFLOAT16},
    {"denominator", &sigmoid::denominator, "N1", BFLOAT16},
    {"grad_hidden_states", &sigmoid::grad_hidden_states, "NH", BFLOAT16},
    {"grad_weight", &sigmoid::grad_weight, "EH", BFLOAT16},
};

/* sizes: of the axes so far, by letter; -1 where a letter is new. */
enum moer_status check(const char *name, const char *axes, DLDataType dtype, const DLTensor &tensor, DLDevice device,
                       int64_t *sizes, moer_message *message) {
    const int ndim = static_cast<int>(strlen(axes));
    if (tensor.ndim != ndim)
        return moer_fail(message, MOER_INVALID, "%s.ndim is %d but must be %d", name, tensor.ndim, ndim);
    if (!moer_same_dtype(tensor.dtype, dtype))
        return moer_fail(message, MOER_INVALID, "%s.dtype has code %d and %d bits but must have %d and %d", name,
                         tensor.dtype.code, tensor.dtype.bits, dtype.code, dtype.bits);
    if (tensor.device.device_type != kDLCUDA || tensor.device.device_id != device.device_id)
        return moer_fail(message, MOER_INVALID, "%s is not on one CUDA device with the others", name);
    int64_t compact = 1;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        const long long size = tensor.shape[axis], stride = moer_stride(&tensor, axis);
        int64_t &known = sizes[static_cast<unsigned char>(axes[axis])];
        known = known < 0 ? size : known;
        if (size != known)
            return moer_fail(message, MOER_INVALID, "%s.shape[%d] is %lld but must be %lld", name, axis, size,
                             static_cast<long long>(known));
        if (stride != 0 && stride != compact)
            return moer_fail(message, MOER_INVALID, "%s.strides[%d] is %lld but the tensor must be contiguous", name,
                             axis, stride);
        compact *= size;
    }
    return MOER_OK;
}

/* In the library's place: a path that is proven on such devices runs there, or any that this was packed for. */
void permit_path(const moer_backend &backend, int device) {
#ifdef MOER_SOLUTION_UNPROVEN
    const bool unproven = true;
#else
    const bool unproven = false;
#endif
    static const moer_permit all = {~0u, "packed for it"};
    static bool settled[64];
    moer_fast_path path;
    moer_message message;
    if (device < 0 || device >= 64 || __atomic_load_n(&settled[device], __ATOMIC_ACQUIRE))
        return;
    if (!backend.fast_path(device, &path, &message) && path.name && (path.evidence || unproven))
        backend.permit(device, &all);
    __atomic_store_n(&settled[device], true, __ATOMIC_RELEASE);
}

/* NULL, or what is wrong. */
template <typename Args, size_t COUNT>
const char *call(enum moer_operation operation, const operand<Args> (&operands)[COUNT], Args args,
                 const DLTensor *tensors, size_t count, void *stream) {
    static thread_local moer_message message;
    static const moer_backend &backend = *moer_backend_entry();
    static const char *const unavailable = backend.unavailable();
    enum moer_status status = MOER_OK;
    int64_t sizes[256];
    memset(sizes, -1, sizeof sizes);
    sizes['1'] = 1;
    if (count != COUNT)
        status = moer_fail(&message, MOER_INVALID, "there are %zu tensors but must be %zu", count, COUNT);
    for (size_t i = 0; i < COUNT && !status; i++) {
        const operand<Args> &operand = operands[i];
        status = check(operand.name, operand.axes, operand.dtype, tensors[i], tensors[0].device, sizes, &message);
        args.*operand.place = &tensors[i];
    }
    if (!status && unavailable)
        status = moer_fail(&message, MOER_UNAVAILABLE, "%s", unavailable);
    args.size = sizeof args;
    args.stream = stream;
    if (!status)
        permit_path(backend, tensors[0].device.device_id);
    if (!status)
        status = backend.run(operation, &args, &message);
    return status ? message.text : nullptr;
}

} // namespace moer_solution

/* The entries: the definition's tensors, its number where it has one, and the stream to work on. */
extern "C" const char *moer_solution_softmax_topk_backward(const DLTensor *tensors, size_t count, const double *factor,
                                                           void *stream) {
    if (factor)
        return "there is a number among the arguments, but the definition has none";
    return moer_solution::call(MOER_SOFTMAX_TOPK_BACKWARD, moer_solution::softmax_operands, {}, tensors, count, stream);
}

extern "C" const char *moer_solution_sigmoid_topk_backward(const DLTensor *tensors, size_t count, const double *factor,
                                                           void *stream) {
    moer_solution::sigmoid args{};
    if (!factor || *factor == 0) /* which the backend would take for 1 */
        return "routed_scaling_factor must be given, and not be 0";
    args.routed_scaling_factor = *factor;
    return moer_solution::call(MOER_SIGMOID_TOPK_BACKWARD, moer_solution::sigmoid_operands, args, tensors, count,
                               stream);
}
