#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh BUILD STAGE: installs the build folder under STAGE, builds the example against it as a user would, shared and
# static, runs both, looks at what the library exports and needs, uninstalls, and expects nothing to be left.
set -eu
build=$1 stage=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$stage"
stage=$(cd "$stage" && pwd)
log=$stage/log
. "$here"/steps.sh

root=$stage/root
libdir=$root$(PKG_CONFIG_PATH=$build pkg-config --variable=libdir moerouter)
export PKG_CONFIG_PATH="$libdir/pkgconfig"
flags() { # What pkg-config says of the stage.
    PKG_CONFIG_SYSROOT_DIR="$root" pkg-config "$@" moerouter
}
compile() { # OUT FLAGS...
    out=$1
    shift
    ${CC:-gcc} -Wall -Werror "$here/../examples/backward.c" -o "$out" "$@"
}
# The shared library would be taken before the static one of the same name.
static_libs() {
    flags --static --libs | sed 's/-lmoerouter/-l:libmoerouter.a/'
}

check 'make install DESTDIR' make -s -C "$build" install DESTDIR="$root"
check 'no build or staging path in moerouter.pc' \
    sh -c "! grep -nE '$stage|$(cd "$build" && pwd)' '$libdir/pkgconfig/moerouter.pc'"
# shellcheck disable=SC2046
check 'shared consumer builds' compile "$stage/shared" $(flags --cflags --libs)
check 'shared consumer runs' env LD_LIBRARY_PATH="$libdir" "$stage/shared"
# shellcheck disable=SC2046
check 'static consumer builds' compile "$stage/static" $(flags --cflags) $(static_libs)
check 'static consumer runs' "$stage/static"
check 'static consumer does not need the shared library' sh -c "! readelf -d '$stage/static' | grep -q moerouter"
check 'only moer_* is exported, each with its version' \
    sh -c "! nm -D --defined-only '$libdir/libmoerouter.so' | grep -vE ' (moer_[a-z_]+@@MOER_0|MOER_0(@@MOER_0)?)$'"
check 'global names of the static library are moer_*' sh -c \
    "! nm -g --defined-only '$libdir/libmoerouter.a' | grep -E '^[0-9a-f]+ ' | grep -vE ' moer_'"
check 'soname' sh -c "readelf -d '$libdir/libmoerouter.so' | grep -q 'SONAME.*\[libmoerouter.so.0\]'"
check 'it stays loaded' sh -c "readelf -d '$libdir/libmoerouter.so' | grep -q NODELETE"
check 'no CUDA library is needed' sh -c "! readelf -d '$libdir/libmoerouter.so' | grep -iE 'NEEDED.*(cuda|nvidia)'"
check 'a backend has no undefined name of the library' sh -c "! nm -u '$build'/.libs/libcpu.a | grep ' moer_' |
    grep -vE ' moer_(cpu|slice|blas)_'"
if [ -f "$libdir/moerouter/cuda.so" ]; then
    check 'the CUDA module exports its entry alone' \
        sh -c "[ \"\$(nm -D --defined-only '$libdir/moerouter/cuda.so' | cut -d ' ' -f 3)\" = moer_backend_entry ]"
    check 'the CUDA module needs no CUDA library' \
        sh -c "! readelf -d '$libdir/moerouter/cuda.so' | grep -iE 'NEEDED.*(cuda|nvidia)'"
    check 'the self-check lies beside the module, and runs' sh -c \
        "LD_LIBRARY_PATH='$libdir' '$libdir/moerouter/selfcheck' 0 none GPU-none '$(PKG_CONFIG_PATH=$build pkg-config --modversion moerouter)' none |
            grep -q '^trouble cuda:0 is not GPU-none here'"
fi
check 'the header compiles as C++' sh -c \
    "echo '#include <moerouter/moerouter.h>' | ${CC:-gcc} -x c++ -fsyntax-only -Wall -Werror $(flags --cflags) -"
check 'make uninstall' make -s -C "$build" uninstall DESTDIR="$root"
check 'nothing is left' sh -c "! find '$root' ! -type d -o -name '*moerouter*' | grep ."
echo "$passed passed, 0 failed"
