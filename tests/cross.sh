#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cross.sh FOLDER: builds the library and the command for aarch64, against Debian's packages unpacked in FOLDER, and
# runs the example, and both operations held to the double-precision loop, in an emulator. After autoreconf.
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
    --include=libc6-dev,libdlpack-dev,libgomp1,libjansson-dev,libopenblas-dev bookworm "$root"

mkdir "$folder/build"
cd "$folder/build"
export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_LIBDIR="$libraries/openblas-pthread/pkgconfig:$libraries/pkgconfig"
logged "$here/configure" -q --host=aarch64-linux-gnu --with-cuda=no CC="aarch64-linux-gnu-gcc --sysroot=$root" \
    CFLAGS='-O2 -Werror' LDFLAGS="-Wl,-rpath-link,$libraries/openblas-pthread"
logged make -s -j"$(getconf _NPROCESSORS_ONLN)"
logged make -s examples/backward

emulated() { # PROGRAM ARGUMENT...
    qemu-aarch64 -L "$root" -E OMP_NUM_THREADS=2 -E OPENBLAS_NUM_THREADS=2 \
        -E LD_LIBRARY_PATH="$PWD/.libs:$libraries:$libraries/openblas-pthread" "$@"
}
emulated examples/.libs/backward
for operation in softmax_topk_backward sigmoid_topk_backward; do
    emulated .libs/moerouter make $operation --tokens 16 -o $operation.safetensors
    emulated .libs/moerouter run $operation $operation.safetensors --check
done
