#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs the CUDA backend as a solution for the public suite, SOL-ExecBench, for whoever has the GPU to submit it:

    tools/solbench/pack.py --operation softmax_topk_backward -o solution.json

A solution is a file of JSON. This one has two sources: moerouter.cu, which is backends/cuda with all its headers and
entry.cu, one translation unit that needs CUDA's headers alone; and binding.cpp, PyTorch's side. The same tree gives
the same bytes.

https://github.com/NVIDIA/SOL-ExecBench (read at 8d2237d) says what a solution is in docs/solution.md and
src/sol_execbench/core/data/solution.py, and how it is built in src/sol_execbench/driver/templates/build_ext.py."""
import argparse
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# The suite's number for a problem, and its definition's name.
OPERATIONS = {
    "softmax_topk_backward": ("L2/011", "011_moe_sparse_routing_and_dispatch_backward"),
    "sigmoid_topk_backward": ("L1/093", "093_grouped_topk_moe_routing_backward"),
}
# What a compute capability takes, and the flags that ask for it.
PATHS = {
    "default": ({"9.0": "sm_90a, by wgmma", "10.0": "generic, by mma.sync"}, ["-DMOER_CUDA_SM90A"]),
    "generic": ({"9.0": "generic, by mma.sync", "10.0": "generic, by mma.sync"}, []),
    "tcgen05": ({"9.0": "sm_90a, by wgmma", "10.0": "sm_100f, by tcgen05, which has not been proven on one: no GPU has run it"},
                ["-DMOER_CUDA_SM90A", "-DMOER_CUDA_SM100F", "-DMOER_SOLUTION_UNPROVEN"]),
}
# As the library is compiled: the suite's default, --use_fast_math, would change the bits. Targets are named, since the
# suite would have sm_90 for sm_90a. PyTorch's builder takes away the conversions of 16-bit types, which are wanted; 177
# is a function of a header that nobody calls.
FLAGS = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_100a,code=sm_100a",
         "--threads=2", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "--diag-suppress=177"]


def refuse(sentence):
    sys.exit(f"pack.py: {sentence}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", required=True, choices=OPERATIONS)
    parser.add_argument("--path", default="default", choices=PATHS,
                        help="the kernels: default, the best that are proven on each GPU; generic, on every GPU; "
                             "tcgen05, with Blackwell's own, proven or not")
    parser.add_argument("--dlpack", default="/usr/include", metavar="FOLDER", help="which has dlpack/dlpack.h")
    parser.add_argument("-o", dest="output", metavar="FILE", help="else to standard output")
    options = parser.parse_args()
    if not (pathlib.Path(options.dlpack) / "dlpack" / "dlpack.h").is_file():
        refuse(f"--dlpack is {options.dlpack}, which has no dlpack/dlpack.h (Debian and Ubuntu: apt install "
               "libdlpack-dev)")
    return options


def known_headers(options):
    """Those that go into the file, by the names that #include has; CUDA's and the C library's do not."""
    files = [*(ROOT / "backends" / "cuda").glob("*.cuh"), *(ROOT / "src").glob("*.h")]
    return {**{file.name: file for file in files},
            "moerouter/moerouter.h": ROOT / "include" / "moerouter" / "moerouter.h",
            "dlpack/dlpack.h": pathlib.Path(options.dlpack) / "dlpack" / "dlpack.h"}


def inlined(file, headers, done):
    """The lines of a file, with each header in the place of its first #include."""
    title = file.relative_to(ROOT) if file.is_relative_to(ROOT) else \
        f"{file.name} of DLPack, https://github.com/dmlc/dlpack, licence: Apache-2.0"
    lines = [f"/* ==== {title} ==== */"]
    for line in file.read_text(encoding="utf-8").splitlines():
        include = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', line)
        header = include and headers.get(include[1])
        if header and header not in done:
            done.add(header)
            lines += inlined(header, headers, done) + [f"/* ==== {title}, on ==== */"]
        elif not header and line != "#pragma once":
            lines.append(line)
    return lines


def version():
    header = (ROOT / "include" / "moerouter" / "moerouter.h").read_text(encoding="utf-8")
    return ".".join(re.search(f"MOER_VERSION_{part} (\\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def commit():
    if not (ROOT / ".git").exists():
        return "unknown"
    said = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*"], text=True,
                          stdout=subprocess.PIPE)
    return said.stdout.strip() or "unknown"


def translation_unit(options):
    kernels, _ = PATHS[options.path]
    lines = ["/* SPDX-License-Identifier: Apache-2.0 */",
             f"/* moerouter {version()}, commit {commit()}: its CUDA backend in one file, for SOL-ExecBench.",
             " * Made by tools/solbench/pack.py from the files that are named below; a change belongs there.",
             " * Licence of all of them: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0",
             " *",
             f" * Packed with --path {options.path}. Kernels, by compute capability:"]
    lines += [f" *     {capability:<6}{kernel}" for capability, kernel in kernels.items()] + [" */"]
    headers, done = known_headers(options), set()
    for file in sorted((ROOT / "backends" / "cuda").glob("*.cu")) + [HERE / "entry.cu"]:
        lines += inlined(file, headers, done)
    return "\n".join(lines) + "\n"


def solution(options):
    problem, definition = OPERATIONS[options.operation]
    kernels, defines = PATHS[options.path]
    return {
        "name": f"moerouter-{version()}-{commit()}-{options.operation}-{options.path}",
        "definition": definition,
        "author": "moerouter",
        "description": f"{problem} by moerouter {version()}, commit {commit()}, Apache-2.0. Kernels, by compute "
                       "capability: " + "; ".join(" ".join(pair) for pair in kernels.items()),
        "spec": {
            "languages": ["cuda_cpp"],
            "target_hardware": ["B200", "LOCAL"],
            "entry_point": "binding.cpp::run",
            "dependencies": ["torch"],
            "destination_passing_style": True,
            "binding": "torch",
            "compile_options": {
                "cflags": ["-O2", "-std=c++17", f"-DMOER_SOLUTION=moer_solution_{options.operation}"],
                "cuda_cflags": FLAGS + defines,
                "ld_flags": [],
            },
        },
        "sources": [
            {"path": "moerouter.cu", "content": translation_unit(options)},
            {"path": "binding.cpp", "content": (HERE / "binding.cpp").read_text(encoding="utf-8")},
        ],
    }


def main():
    options = arguments()
    text = json.dumps(solution(options), indent=2) + "\n"
    if options.output:
        pathlib.Path(options.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
