/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of a softmax router: 2 tokens, hidden size 3, 4 experts of which each token has chosen 2. */
#include <moerouter/moerouter.h>
#include <stdio.h>

#define TENSOR(data, rows, columns, code, bits)                                                                        \
    &(DLTensor) {                                                                                                      \
        data, {kDLCPU, 0}, 2, {code, bits, 1}, (int64_t[]){rows, columns}, NULL, 0                                     \
    }

int main(void) {
    float hidden[2][3] = {{1, 2, 3}, {4, 5, 6}}, gate[4][3] = {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {1, 1, 1}};
    float probs[2][4] = {{0.5f, 0.25f, 0.125f, 0.125f}, {0.125f, 0.125f, 0.25f, 0.5f}}, sum[2] = {0.75f, 0.75f};
    int64_t chosen[2][2] = {{0, 1}, {3, 2}};
    float grad_weights[2][2] = {{1, 0}, {0, 1}}, grad_hidden[2][3], grad_gate[4][3];
    struct moer_softmax_topk_backward_args args = {.size = sizeof args,
                                                   .hidden_states = TENSOR(hidden, 2, 3, kDLFloat, 32),
                                                   .gate_weight = TENSOR(gate, 4, 3, kDLFloat, 32),
                                                   .routing_probs = TENSOR(probs, 2, 4, kDLFloat, 32),
                                                   .selected_experts = TENSOR(chosen, 2, 2, kDLInt, 64),
                                                   .routing_weights_sum = TENSOR(sum, 2, 1, kDLFloat, 32),
                                                   .grad_routing_weights = TENSOR(grad_weights, 2, 2, kDLFloat, 32),
                                                   .grad_hidden_states = TENSOR(grad_hidden, 2, 3, kDLFloat, 32),
                                                   .grad_gate_weight = TENSOR(grad_gate, 4, 3, kDLFloat, 32)};
    if (moer_softmax_topk_backward(&args)) {
        fprintf(stderr, "%s\n", moer_last_error());
        return 1;
    }
    for (int n = 0; n < 2; n++)
        printf("%8.5f %8.5f %8.5f\n", grad_hidden[n][0], grad_hidden[n][1], grad_hidden[n][2]);
    return 0;
}
