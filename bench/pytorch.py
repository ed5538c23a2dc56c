#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the library beside eager PyTorch on this CPU: same process, same tensors, same number of threads, in turn.

    bench/pytorch.py [--library build/.libs/libmoerouter.so] [--threads 2] [--repeats 9] [softmax|sigmoid ...] [--tokens N ...]

PyTorch runs the formulas of moerouter.h in bfloat16, its two products by oneDNN where it was built with it. Medians, warm.
Needs python3-torch."""
import argparse
import os
import statistics
import time

ap = argparse.ArgumentParser()
ap.add_argument("operations", nargs="*", default=[])
ap.add_argument("--library", default="build/.libs/libmoerouter.so")
ap.add_argument("--threads", type=int, default=os.cpu_count())
ap.add_argument("--repeats", type=int, default=9)
ap.add_argument("--tokens", type=int, nargs="*", default=[])
ap.add_argument("--float32", action="store_true", help="float32 tensors instead of bfloat16")
options = ap.parse_args()
os.environ["OMP_NUM_THREADS"] = str(options.threads)
import torch  # noqa: E402  (after OMP_NUM_THREADS)
import moerouter  # noqa: E402

torch.set_num_threads(options.threads)
T = torch.float32 if options.float32 else torch.bfloat16
library = moerouter.Library(options.library)


def softmax_case(n, h=2048, e=128, k=8):
    t = {"hidden_states": torch.randn(n, h).to(T), "gate_weight": (0.02 * torch.randn(e, h)).to(T)}
    t["routing_probs"] = torch.softmax(torch.randn(n, e).to(T).float(), 1)
    w, t["selected_experts"] = torch.topk(t["routing_probs"], k)
    t["routing_weights_sum"] = w.sum(1, keepdim=True)
    t["grad_routing_weights"] = (0.1 * torch.randn(n, k)).to(T)
    t["grad_expert_mask"] = (0.01 * torch.randn(e, k, n)).to(T)
    t["grad_router_logits"] = (0.1 * torch.randn(n, e)).to(T)
    return t


def softmax_pytorch(t):
    p, s, z = t["routing_probs"], t["selected_experts"], t["routing_weights_sum"]
    g, q = t["grad_routing_weights"].float(), t["routing_probs"].gather(1, t["selected_experts"])
    n, k = s.shape
    mask = t["grad_expert_mask"][s, torch.arange(k)[None, :], torch.arange(n)[:, None]].float()
    v = (g - (g * (q / z)).sum(1, keepdim=True)) / z + mask
    d = t["grad_router_logits"].float().scatter_add(1, s, v)
    logits = (p * (d - (d * p).sum(1, keepdim=True))).to(T)
    return logits @ t["gate_weight"], logits.t() @ t["hidden_states"]


def sigmoid_case(n, h=5120, e=160, k=8):
    t = {"hidden_states": torch.randn(n, h).to(T), "weight": (0.02 * torch.randn(e, h)).to(T)}
    t["grad_topk_weights"] = torch.randn(n, k).to(T)
    t["scores"] = torch.sigmoid(torch.randn(n, e).to(T))
    t["topk_indices"] = torch.rand(n, e).argsort(1)[:, :k].contiguous()
    w = t["scores"].gather(1, t["topk_indices"])
    t["denominator"] = w.sum(1, keepdim=True) + 1e-20
    t["topk_weights_normalized"] = w / t["denominator"]
    return t


def sigmoid_pytorch(t, f=2.5):
    a = t["grad_topk_weights"] * f
    c = (a * t["topk_weights_normalized"]).sum(1, keepdim=True)
    u = (a - c) / t["denominator"]
    s = t["scores"]
    d = torch.zeros_like(s).scatter_(1, t["topk_indices"], u)
    logits = d * s * (1 - s)
    return logits @ t["weight"], logits.t() @ t["hidden_states"]


def median_ms(functions):
    times = [[] for _ in functions]
    for repeat in range(options.repeats + 2):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if repeat >= 2:
                times[i].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


def compare(name, n):
    case, pytorch = {"softmax": (softmax_case, softmax_pytorch), "sigmoid": (sigmoid_case, sigmoid_pytorch)}[name]
    torch.manual_seed(n)
    tensors = case(n)
    ours, outputs = library.backward(name, tensors, routed_scaling_factor=2.5)
    ours()
    for mine, theirs in zip(outputs, pytorch(tensors)):
        error = (mine.float() - theirs.float()).abs()
        matched = (error <= 1e-5 + 0.05 * theirs.float().abs()).float().mean().item()
        if matched < 0.99:
            raise SystemExit(f"{name} N={n}: only {matched:.4f} of the elements agree")
    mine, theirs = median_ms([ours, lambda: pytorch(tensors)])
    print(f"{name:8} N={n:6}  moerouter {mine:8.2f} ms   PyTorch {torch.__version__} eager {theirs:8.2f} ms"
          f"   ratio {mine / theirs:5.2f}", flush=True)


for operation in options.operations or ["softmax", "sigmoid"]:
    for count in options.tokens or ([1024, 2048, 4096, 8192] if operation == "softmax" else [1280, 2048, 4096, 8192]):
        compare(operation, count)
