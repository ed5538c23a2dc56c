#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# runtimes.sh BUILD CLANG-BUILD: calls from parallel regions, and right answers, with OpenBLAS in each of Debian's flavours,
# and from a program with LLVM's OpenMP runtime, which calls the library that gcc has built, and so loads GNU's too.
set -eu
build=$1 clang=$2
here=$(cd "$(dirname "$0")" && pwd)
log=$build/runtimes.log
. "$here"/steps.sh

# All products by OpenBLAS; a call that hangs is an error.
export MOER_CPU_PRODUCTS=openblas OMP_NUM_THREADS=2
for flavour in pthread:pthreads openmp:OpenMP serial:sequential; do
    name=${flavour%:*} word=${flavour#*:}
    library=$(find /usr/lib -path "*/openblas-$name/libopenblas.so.0" 2>/dev/null | head -n 1)
    [ -n "$library" ] || { echo "there is no OpenBLAS of the $name flavour" && exit 1; }
    export LD_LIBRARY_PATH="${library%/*}"
    check "info names OpenBLAS's flavour, $name" sh -c "'$build/moerouter' info | grep -q 'BLAS: .*($word)'"
    check "info names GNU's OpenMP" sh -c "'$build/moerouter' info | grep -q '(OpenMP, .*/libgomp'"
    for operation in softmax sigmoid; do
        check "$operation with $name" timeout 100 "$build/moerouter" run ${operation}_topk_backward \
            "$here/corpus/safetensors/golden_$operation" --check
    done
    check "calls from parallel regions with $name" timeout 100 "$build/tests/check_openmp"
    export LD_LIBRARY_PATH="$build/.libs:$LD_LIBRARY_PATH"
    program=$clang/tests/.libs/check_openmp
    check "two OpenMP runtimes" sh -c "ldd '$program' | grep -q libomp && ldd '$program' | grep -q libgomp"
    check "info names the one in use, LLVM's" sh -c "'$clang/.libs/moerouter' info | grep -q '(OpenMP, .*/libomp'"
    check "calls from LLVM's parallel regions with $name" timeout 100 "$program"
    check "the same, by our own kernels" env MOER_CPU_PRODUCTS=own timeout 100 "$program"
done
echo "$passed passed, 0 failed"
