/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of a softmax router: 4 tokens, hidden size 8, 6 experts, 2 of them chosen for each token. */
#include <moerouter/moerouter.h>
#include <stdio.h>

enum { N = 4, H = 8, E = 6, K = 2 };
static float hidden[N][H], gate[E][H], probs[N][E], sum[N][1], grad_weights[N][K], grad_hidden[N][H], grad_gate[E][H];
static int64_t chosen[N][K];

#define MATRIX(name, rows, columns, code, bits)                                                                        \
    DLTensor name##_tensor = {name, {kDLCPU, 0}, 2, {code, bits, 1}, (int64_t[]){rows, columns}, NULL, 0}

int main(void) {
    for (int n = 0; n < N; n++) {
        for (int e = 0; e < E; e++)
            probs[n][e] = (e == n || e == n + 1 ? 4.0f : 1.0f) / 12; /* a row adds up to 1 */
        chosen[n][0] = n, chosen[n][1] = n + 1;
        sum[n][0] = probs[n][n] + probs[n][n + 1];
        grad_weights[n][0] = 1; /* more weight for the first of the two would raise the loss */
        for (int h = 0; h < H; h++)
            hidden[n][h] = (float)(n + h) / 8;
    }
    for (int e = 0; e < E; e++)
        gate[e][e] = 1;

    MATRIX(hidden, N, H, kDLFloat, 32);
    MATRIX(gate, E, H, kDLFloat, 32);
    MATRIX(probs, N, E, kDLFloat, 32);
    MATRIX(chosen, N, K, kDLInt, 64);
    MATRIX(sum, N, 1, kDLFloat, 32);
    MATRIX(grad_weights, N, K, kDLFloat, 32);
    MATRIX(grad_hidden, N, H, kDLFloat, 32);
    MATRIX(grad_gate, E, H, kDLFloat, 32);
    struct moer_softmax_topk_backward_args args = {.size = sizeof args,
                                                   .hidden_states = &hidden_tensor,
                                                   .gate_weight = &gate_tensor,
                                                   .routing_probs = &probs_tensor,
                                                   .selected_experts = &chosen_tensor,
                                                   .routing_weights_sum = &sum_tensor,
                                                   .grad_routing_weights = &grad_weights_tensor,
                                                   .grad_hidden_states = &grad_hidden_tensor,
                                                   .grad_gate_weight = &grad_gate_tensor};
    if (moer_softmax_topk_backward(&args)) {
        fprintf(stderr, "%s\n", moer_last_error());
        return 1;
    }
    for (int n = 0; n < N; n++) {
        for (int h = 0; h < H; h++)
            printf(" %8.5f", grad_hidden[n][h]);
        printf("\n");
    }
    return 0;
}
