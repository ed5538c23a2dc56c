#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# emulate.sh FOLDER [SEEDS [BUILD]]: compiles the CUDA backend for this machine's processor, where there is an nvcc, whose
# headers it needs, over an emulator, for Hopper and for Blackwell: the kernels that make both products alone, so many
# seeds of chance for each case; and, where the project has been built in the folder BUILD, the module, for suites and
# the self-check.
set -eu
mkdir -p "$1/cuda"
folder=$(cd "$1" && pwd)
build=${3+$(cd "$3" && pwd)}
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/cuda/bin
if ! command -v nvcc >/dev/null; then
    echo "emulate.sh: no nvcc"
    exit 0
fi
log=$folder/log
. tests/steps.sh

cp backends/cuda/*.cu backends/cuda/*.cuh "$folder/cuda"
# Instructions are the emulator's; descriptors are the kernel's own.
printf '#include "emulated_cuda.h"\n' >"$folder/cuda/ptx.cuh"
compile() { # MACRO OUTPUT SOURCE ARGUMENT...
    macro=$1 output=$2 source=$3
    shift 3
    nvcc -x c++ -std=c++17 -O2 "-D$macro" -DMOER_MODULE -I"$folder/cuda" -Itests -Isrc -Iinclude -cudart none \
        -Xcompiler -ffp-contract=off "$@" -o "$output" "$source"
}

# found_wrong FAULT SENTENCE: the self-check finds the mistake, which is the path's doing.
found_wrong() {
    PLANTED=$1 "$build/moerouter" tune --device cuda:0 --timeout 10 >"$folder/said" 2>&1 && return 1
    grep "$path: found wrong on .*$2" "$folder/said"
}
# info_says WORDS [ARCH]: what MOER_CUDA_ARCH does, with that value.
info_says() {
    MOER_CUDA_ARCH=${2-} "$build/moerouter" info >"$folder/said" && grep "$1" "$folder/said"
}
# explains WORDS TOKENS ARGUMENT...: what a call with such tensors says of its kernels, where the path is asked for.
explains() {
    words=$1 tokens=$2
    shift 2
    "$build/moerouter" make softmax_topk_backward --tokens "$tokens" --top-k 4 "$@" -o "$folder/made" &&
        MOER_VERBOSE=1 MOER_CUDA_ARCH=$path "$build/moerouter" run softmax_topk_backward "$folder/made" --check \
            --device cuda:0 2>"$folder/said" && grep "$words" "$folder/said"
}
for target in sm_90a:__CUDA_ARCH_FEAT_SM90_ALL sm_100f:__CUDA_ARCH_FAMILY_SPECIFIC__=1000; do
    path=${target%:*}
    compile "${target#*:}" "$folder/emulate" tests/emulate_fused.cc
    check "$path: kernels of both products" "$folder/emulate" ${2+"$2"}
    tail -n 1 "$log"
    [ -n "$build" ] || continue
    mkdir -p "$folder/$path"
    compile "${target#*:}" "$folder/$path/cuda.so" tests/emulated_module.cc -shared -Xcompiler -fPIC
    export MOER_BACKEND_PATH="$folder/$path" XDG_CACHE_HOME="$folder/$path" MOER_TEST_DEVICE=cuda:0
    for suite in exact laws; do
        check "$path: $suite" env MOER_CUDA_ARCH="$path" "$build/tests/check_$suite"
        tail -n 1 "$log"
    done
    check "$path: without the swizzle" found_wrong swizzle "grad_"
    check "$path: without the tail" found_wrong tail "it was not written, nor was any behind it: a lost tail"
    check "$path: one that hangs" found_wrong hang "no progress in 10000 ms"
    "$build/moerouter" info | grep "'s path $path: "
    check "$path: a call that it fits" explains "tokens; by MOER_CUDA_ARCH\$" 5 --hidden 64 --experts 16
    check "$path: no float32" explains "generic path: .*; not for $path: float32; by" 5 --hidden 64 --dtype float32
    if [ "$path" = sm_100f ]; then
        check "$path: odd columns" explains "generic path: .*; not for $path: H is no multiple of 8; by" 5 --hidden 60
        check "$path: many experts" explains "generic path: .*; not for $path: E or K is too large; by" 5 --experts 136
        check "$path: no tokens" explains "generic path: .*; not for $path: nothing to multiply; by" 0 --hidden 64
    else
        check "$path: odd columns" explains "$path path: wgmma products, .* tokens; by" 5 --hidden 60
    fi
    override='^    cuda:0 by MOER_CUDA_ARCH:'
    check "$path: info of the generic path" info_says "$override generic path, whatever is proven or found\$" generic
    check "$path: info of the path that is asked for" info_says "$override $path path, whatever" "$path"
    check "$path: info of a path that is not here" info_says "$override calls are refused: .* is sm_none but must be one" sm_none
    check "$path: info without it" info_says "'s path $path: .*; found wrong on "
    ! grep -q MOER_CUDA_ARCH "$folder/said"
done
echo "emulate: $passed passed, 0 failed"
