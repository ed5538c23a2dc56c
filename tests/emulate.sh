#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# emulate.sh FOLDER [SEEDS]: compiles the fused kernel for this machine's processor, where there is an nvcc, whose headers
# it needs, and runs it in an emulator: so many seeds of chance for each case.
set -eu
mkdir -p "$1/cuda"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
if ! command -v nvcc >/dev/null; then
    echo "emulate.sh: no nvcc"
    exit 0
fi
cp backends/cuda/*.cu backends/cuda/*.cuh "$folder/cuda"
# Instructions are the emulator's; descriptors are the kernel's own.
printf '#include "emulated_cuda.h"\n' >"$folder/cuda/ptx.cuh"
for target in wgmma:__CUDA_ARCH_FEAT_SM90_ALL tcgen05:__CUDA_ARCH_FAMILY_SPECIFIC__=1000; do
    nvcc -x c++ -std=c++17 -O2 "-D${target#*:}" -DMOER_MODULE -I"$folder/cuda" -Itests -Isrc -Iinclude \
        -cudart none -o "$folder/emulate" tests/emulate_fused.cc
    echo "${target%:*}: $("$folder/emulate" ${2+"$2"})"
done
