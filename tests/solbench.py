#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A packaged solution on a GPU, built and called as the public suite does, and every bit of what it writes against the
library's on the same tensors:

    tests/solbench.py SOLUTION [--library build/.libs/libmoerouter.so] [--tokens N,N,...] [--build FOLDER]

Needs a GPU, nvcc, ninja and a PyTorch for CUDA. MOER_CUDA_ARCH=generic holds for both sides. The workloads are the
suite's, and a batch of one token; how the suite builds and calls is read off src/sol_execbench/driver/templates of
https://github.com/NVIDIA/SOL-ExecBench."""
import argparse
import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "bench"), str(HERE.parent / "tools" / "solbench")]
import torch  # noqa: E402
import torch.utils.cpp_extension  # noqa: E402
import moerouter  # noqa: E402
import pack  # noqa: E402

BFLOAT16 = {"dtype": torch.bfloat16, "device": "cuda"}


def softmax(n, h=2048, e=128, k=8):
    """The inputs of the definition, in its order."""
    logits = torch.randn(n, e, **BFLOAT16)
    probs = torch.softmax(logits.float(), 1)
    chosen = torch.topk(probs, k)
    return {"hidden_states": torch.randn(n, h, **BFLOAT16), "gate_weight": 0.02 * torch.randn(e, h, **BFLOAT16),
            "router_logits": logits, "routing_probs": probs, "selected_experts": chosen.indices,
            "routing_weights_sum": chosen.values.sum(1, keepdim=True),
            "grad_routing_weights": 0.1 * torch.randn(n, k, **BFLOAT16),
            "grad_expert_mask": 0.01 * torch.randn(e, k, n, **BFLOAT16),
            "grad_router_logits": 0.1 * torch.randn(n, e, **BFLOAT16)}


def sigmoid(n, h=5120, e=160, k=8):
    scores = torch.sigmoid(torch.randn(n, e, **BFLOAT16))
    chosen = torch.rand(n, e, device="cuda").argsort(1)[:, :k].contiguous()
    weights = scores.gather(1, chosen)
    denominator = weights.sum(1, keepdim=True) + 1e-20
    return {"grad_topk_weights": torch.randn(n, k, **BFLOAT16), "hidden_states": torch.randn(n, h, **BFLOAT16),
            "weight": 0.02 * torch.randn(e, h, **BFLOAT16), "scores": scores, "topk_indices": chosen,
            "topk_weights": weights, "topk_weights_normalized": weights / denominator, "denominator": denominator}


# How to draw a case, the numbers after its tensors, and the workloads.
OPERATIONS = {
    "softmax_topk_backward": (softmax, [], [1, 1024, 1056, 1087, 1088, 1120, 1152, 1163, 1184, 1216, 1248, 1249, 1280,
                                            2048, 3557, 8192, 65536]),
    "sigmoid_topk_backward": (sigmoid, [2.5], [1, 1280, 1312, 1321, 1344, 1376, 1408, 1440, 1721, 2048, 2131, 2521,
                                               3011, 3072, 3557, 6144, 8192]),
}


def build(solution, folder):
    """The function that the suite would call."""
    for source in solution["sources"]:
        (folder / source["path"]).write_text(source["content"])
    options = solution["spec"]["compile_options"]
    module = torch.utils.cpp_extension.load(
        name="benchmark_kernel", sources=[str(folder / source["path"]) for source in solution["sources"]],
        extra_cflags=options["cflags"], extra_cuda_cflags=options["cuda_cflags"], extra_ldflags=options["ld_flags"],
        extra_include_paths=[str(folder)], build_directory=str(folder))
    return getattr(module, solution["spec"]["entry_point"].split("::")[1])


def refuses(run, arguments):
    """Whether a wrong dtype becomes an exception that names the tensor."""
    try:
        run(arguments[0].float(), *arguments[1:])
    except RuntimeError as error:
        return ".dtype has code" in str(error)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solution")
    parser.add_argument("--library", default="build/.libs/libmoerouter.so")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--build", metavar="FOLDER", help="which is kept")
    options = parser.parse_args()
    solution = json.loads(pathlib.Path(options.solution).read_text())
    operation = next(name for name, (_, definition) in pack.OPERATIONS.items() if definition == solution["definition"])
    draw, numbers, workloads = OPERATIONS[operation]
    library = moerouter.Library(options.library)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.build or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = build(solution, folder)
    failed = 0
    for tokens in options.tokens or workloads:
        inputs = draw(tokens)
        expect, expected = library.backward(operation.split("_")[0], inputs, None, *numbers)
        expect()
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            outputs = [torch.full_like(output, float("nan")) for output in expected]
            arguments = [*inputs.values(), *numbers, *outputs]
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                result = run(*arguments)
            torch.cuda.synchronize()
            differing = [int((is_.view(torch.int16) != should.view(torch.int16)).sum())
                         for is_, should in zip(outputs, expected)]
            good = result is None and not any(differing) and not any(output.isnan().any() for output in expected)
            failed += not good
            print(f"{'ok' if good else 'FAILED'} {operation} N={tokens}: {differing[0]} and {differing[1]} elements "
                  "differ", flush=True)
    if not refuses(run, arguments):
        failed += 1
        print(f"FAILED {operation}: a wrong dtype is not refused")
    print(f"solbench: {operation}, {torch.cuda.get_device_name()}: {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
