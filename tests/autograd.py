#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An independent truth: the routers' forward passes in PyTorch, float64, and autograd's gradients of them, against the
library's, over random shapes. Nothing here knows the formulas of the backward passes.

    tests/autograd.py [--library build/.libs/libmoerouter.so] [--cases 200] [--seed 0]

What the forward pass saved goes to the library rounded to the dtype of its tensors, so the two differ by that rounding and by
the library's own. Needs python3-torch."""
import argparse
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "bench"))
import torch  # noqa: E402
import moerouter  # noqa: E402

ap = argparse.ArgumentParser()
ap.add_argument("--library", default="build/.libs/libmoerouter.so")
ap.add_argument("--cases", type=int, default=200)
ap.add_argument("--seed", type=int, default=0)
options = ap.parse_args()
library = moerouter.Library(options.library)
# Of a gradient's norm: rounding of the inputs, of G and of the outputs, with room for sums that cancel.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def values(shape, scale, dtype):
    """Random numbers that dtype can hold, in float64."""
    return (scale * torch.randn(shape)).to(dtype).double()


def softmax(draw, n, h, e, k, dtype, ids):
    """Leaves, loss and the library's inputs."""
    hidden, gate = values((n, h), 1, dtype), values((e, h), draw.choice([0.3, 3]) * h ** -0.5, dtype)
    hidden.requires_grad_(), gate.requires_grad_()
    renormalised, with_mask, with_direct = (draw.random() < 0.7 for _ in range(3))
    g, m, d = values((n, k), 1, dtype), values((n, k, e), 1, dtype).permute(2, 1, 0), values((n, e), 1, dtype)

    probs = torch.softmax(hidden @ gate.t(), 1)
    chosen = torch.topk(probs, k).indices
    selected = probs.gather(1, chosen)
    total = selected.sum(1, keepdim=True)
    loss = (g * (selected / total if renormalised else selected)).sum()
    if with_mask:  # the one-hot mask hands its gradient straight to the chosen probability
        loss = loss + (m[chosen, torch.arange(k)[None, :], torch.arange(n)[:, None]] * selected).sum()
    if with_direct:
        loss = loss + (d * probs).sum()

    inputs = {"hidden_states": hidden.detach().to(dtype), "gate_weight": gate.detach().to(dtype),
              "routing_probs": probs.detach().float(), "selected_experts": chosen.to(ids),
              "grad_routing_weights": g.to(dtype)}
    if renormalised:
        inputs["routing_weights_sum"] = total.detach().float()
    if with_mask:
        inputs["grad_expert_mask"] = m.to(dtype)  # [E, K, N], permuted as autograd hands it over
    if with_direct:
        inputs["grad_router_logits"] = d.to(dtype)
    return hidden, gate, loss, inputs, 1


def sigmoid(draw, n, h, e, k, dtype, ids):
    hidden, weight = values((n, h), 1, dtype), values((e, h), draw.choice([0.3, 3]) * h ** -0.5, dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    g, factor = values((n, k), 1, dtype), draw.choice([1, 2.5, 0.75])

    scores = torch.sigmoid(hidden @ weight.t())
    chosen = torch.rand(n, e).argsort(1)[:, :k]  # the group-limited selection has no gradient
    selected = scores.gather(1, chosen)
    denominator = selected.sum(1, keepdim=True) + 1e-20
    loss = (g * (selected / denominator) * factor).sum()

    inputs = {"hidden_states": hidden.detach().to(dtype), "weight": weight.detach().to(dtype),
              "grad_topk_weights": g.to(dtype), "scores": scores.detach().to(dtype),
              "topk_indices": chosen.contiguous().to(ids),
              "topk_weights_normalized": (selected / denominator).detach().to(dtype),
              "denominator": denominator.detach().to(dtype)}
    return hidden, weight, loss, inputs, factor


def compare(number):
    draw = random.Random(options.seed * 1000003 + number)
    torch.manual_seed(draw.getrandbits(31))
    operation, forward = draw.choice([("softmax", softmax), ("sigmoid", sigmoid)])
    n, h, e = draw.randint(1, 200), draw.randint(1, 300), draw.choice([1, 3, 8, 60, 64, 128, 160, 257])
    k, dtype, ids = min(e, draw.choice([1, 2, 6, 8, 22])), draw.choice(list(TOLERANCE)), draw.choice(
        [torch.int64, torch.int32])
    hidden, weight, loss, inputs, factor = forward(draw, n, h, e, k, dtype, ids)
    loss.backward()
    run, outputs = library.backward(operation, inputs, torch.float32, factor)
    run()
    for name, ours, truth in zip(("grad_hidden_states", "weight gradient"), outputs, (hidden.grad, weight.grad)):
        # Where the gradient is zero but for rounding (one expert, or all of them chosen), the logits' scale counts.
        norm = max(truth.norm().item(), 1e-3 * weight.detach().norm().item())
        error = (ours.double() - truth).norm().item() / norm
        if not error <= TOLERANCE[dtype]:
            print(f"FAILED case {number}: {operation} N={n} H={h} E={e} K={k} {dtype} {ids}: {name} is off by {error:.2e}"
                  f" of its norm")
            return False
    return True


passed = sum(compare(number) for number in range(options.cases))
print(f"autograd: {passed} passed, {options.cases - passed} failed")
sys.exit(passed != options.cases)
