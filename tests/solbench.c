/* SPDX-License-Identifier: Apache-2.0 */
/* The entries of a packaged solution, linked with its translation unit: arguments that the suite's definitions do not
 * have are refused by name, and those that they have reach the backend. Nothing here has elements, so that no GPU is
 * needed to go that far. */
#include <dlpack/dlpack.h>
#include <stdio.h>
#include <string.h>

typedef const char *entry(const DLTensor *tensors, size_t count, const double *factor, void *stream);
entry moer_solution_softmax_topk_backward, moer_solution_sigmoid_topk_backward;

enum { MOST = 12, AXES = 3 };

struct definition {
    entry *entry;
    const char *tensors; /* for each its axes and b, f or l: bfloat16, float32, int64 */
    double factor;       /* 0: it has none */
};

static const struct definition softmax = {moer_solution_softmax_topk_backward,
                                          "NHb EHb NEb NEf NKl N1f NKb EKNb NEb NHb EHb", 0};
static const struct definition sigmoid = {moer_solution_sigmoid_topk_backward,
                                          "NKb NHb EHb NEb NKl NKb NKb N1b NHb EHb", 2.5};

struct call {
    DLTensor tensors[MOST];
    int64_t shapes[MOST][AXES], strides[MOST][AXES];
    size_t count;
    double factor;
};

/* N = 0, H = 0, E = 4, K = 2. */
static void begin(struct call *call, const struct definition *definition) {
    memset(call, 0, sizeof *call);
    call->factor = definition->factor;
    for (const char *letter = definition->tensors; *letter; letter++) {
        DLTensor *tensor = &call->tensors[call->count];
        switch (*letter) {
        case 'b':
            tensor->dtype = (DLDataType){kDLBfloat, 16, 1};
            break;
        case 'f':
            tensor->dtype = (DLDataType){kDLFloat, 32, 1};
            break;
        case 'l':
            tensor->dtype = (DLDataType){kDLInt, 64, 1};
            break;
        case ' ':
            continue;
        default:
            call->shapes[call->count][tensor->ndim++] = *letter == 'E' ? 4 : *letter == 'K' ? 2 : *letter == '1';
            continue;
        }
        tensor->device.device_type = kDLCUDA;
        tensor->shape = call->shapes[call->count++];
    }
}

static int failed;

/* said: NULL where the call is right, which it may also be where there is no GPU. */
static void finish(const struct call *call, const struct definition *definition, const char *said) {
    const char *is = definition->entry(call->tensors, call->count, call->factor != 0 ? &call->factor : NULL, NULL);
    const int good = said ? is && !strcmp(is, said) : !is || strstr(is, "driver") || strstr(is, "CUDA device");
    if (!good)
        printf("FAILED: \"%s\" instead of \"%s\"\n", is ? is : "", said ? said : "");
    failed += !good;
}

int main(void) {
    static struct call call;
    for (int i = 0; i < 2; i++) {
        const struct definition *definition = i ? &sigmoid : &softmax;
        begin(&call, definition);
        finish(&call, definition, NULL);
        call.count--;
        finish(&call, definition, i ? "there are 9 tensors but must be 10" : "there are 10 tensors but must be 11");
    }
    begin(&call, &softmax);
    call.factor = 1;
    finish(&call, &softmax, "there is a number among the arguments, but the definition has none");
    begin(&call, &sigmoid);
    call.factor = 0;
    finish(&call, &sigmoid, "routed_scaling_factor must be given, and not be 0");

    begin(&call, &softmax);
    call.tensors[5].ndim = 1;
    finish(&call, &softmax, "routing_weights_sum.ndim is 1 but must be 2");
    begin(&call, &softmax);
    call.shapes[3][1] = 5;
    finish(&call, &softmax, "routing_probs.shape[1] is 5 but must be 4");
    begin(&call, &sigmoid);
    call.shapes[7][1] = 2;
    finish(&call, &sigmoid, "denominator.shape[1] is 2 but must be 1");
    begin(&call, &sigmoid);
    call.tensors[4].dtype.bits = 32;
    finish(&call, &sigmoid, "topk_indices.dtype has code 0 and 32 bits but must have 0 and 64");
    begin(&call, &sigmoid);
    call.tensors[9].device.device_id = 1;
    finish(&call, &sigmoid, "grad_weight is not on one CUDA device with the others");
    begin(&call, &softmax);
    call.tensors[0].device.device_type = kDLCPU;
    finish(&call, &softmax, "hidden_states is not on one CUDA device with the others");
    begin(&call, &softmax);
    call.shapes[0][1] = call.shapes[1][1] = 8; /* gate_weight has elements */
    call.tensors[1].strides = memcpy(call.strides[1], (int64_t[]){9, 1}, 2 * sizeof(int64_t));
    finish(&call, &softmax, "gate_weight.strides[0] is 9 but the tensor must be contiguous");
    printf("entries: %d failed\n", failed);
    return failed > 0;
}
