#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cross.sh FOLDER: builds everything for aarch64, against Debian's packages unpacked in FOLDER, and runs in an emulator
# what of make check is quick enough, and the command. After autoreconf.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
root=$folder/root libraries=$folder/root/usr/lib/aarch64-linux-gnu
rm -rf "$folder/build" "$root"
logged() {
    "$@" >"$folder/log" 2>&1 || { cat "$folder/log" && exit 1; }
}
logged mmdebstrap --quiet --variant=extract --architectures=arm64 \
    --include=check,libc6-dev,libdlpack-dev,libgomp1,libjansson-dev,libopenblas-dev bookworm "$root"

mkdir "$folder/build"
cd "$folder/build"
export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_LIBDIR="$libraries/openblas-pthread/pkgconfig:$libraries/pkgconfig"
logged "$here/configure" -q --host=aarch64-linux-gnu --with-cuda=no CC="aarch64-linux-gnu-gcc --sysroot=$root" \
    CFLAGS='-O2 -Werror' LDFLAGS="-Wl,-rpath-link,$libraries/openblas-pthread"
jobs=$(getconf _NPROCESSORS_ONLN)
logged make -s -j"$jobs"

# The suites once, with the only kernels that there are; libtool finds the program behind its script. Left out are what
# takes minutes there, the command's suite too, no_memory, since the emulator does not keep to the limit that it sets, and
# the self-check's suite, whose child would not be emulated.
export QEMU_LD_PREFIX="$root" LD_LIBRARY_PATH="$libraries/openblas-pthread" OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=1
export CK_EXCLUDE_TAGS='address caller_s_arithmetic edge_shapes every_run many_experts no_memory one_sign repeated_token
    several_callers'
emulator="$PWD/libtool --mode=execute qemu-aarch64"
make -s -j"$jobs" check VERBOSE=1 LOG_COMPILER="$emulator" \
    TESTS="$(make -s list-tests | tr ' ' '\n' | grep -vE 'setting$|command|tune' | tr '\n' ' ')"
grep -hE '^[0-9]+%: Checks' tests/*.log
for operation in softmax_topk_backward sigmoid_topk_backward; do
    $emulator ./moerouter make $operation --tokens 16 -o $operation.safetensors
    $emulator ./moerouter run $operation $operation.safetensors --check
done
