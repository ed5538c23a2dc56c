#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# debian.sh FOLDER [PROFILE]: exports what git tracks into FOLDER, makes the Debian packages there, lets lintian judge
# them, unpacks them into an empty root, and runs the packages' own tests against that. With the profile
# pkg.moerouter.cuda the CUDA module is one of them. DEB_BUILD_OPTIONS=nocheck leaves out make check.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
profile=${2-}
cd "$(dirname "$0")/.."
log=$folder/log
. tests/steps.sh

source=$folder/source root=$folder/root
rm -rf "$source" "$root" "$folder"/*.deb
mkdir "$source" "$root"
git ls-files -z | tar --null -T - -cf - | tar -xf - -C "$source"
check "dpkg-buildpackage${profile:+ -P$profile}" \
    sh -c "cd '$source' && dpkg-buildpackage -us -uc -b -j$(getconf _NPROCESSORS_ONLN) ${profile:+-P$profile}"
check 'lintian' sh -c "lintian --allow-root --fail-on error,warning '$folder'/moerouter_*.changes"
check 'nothing depends on the CUDA module' sh -c "! for package in '$folder'/*.deb; do
    dpkg-deb -f \$package Depends Pre-Depends Recommends; done | grep moerouter-cuda"

for package in "$folder"/*.deb; do
    dpkg -x "$package" "$root"
done
libdir=$root/usr/lib/$(dpkg-architecture -q DEB_HOST_MULTIARCH)
export PATH="$root/usr/bin:$PATH" LD_LIBRARY_PATH="$libdir" AUTOPKGTEST_TMP="$folder"
# The root comes first; OpenBLAS's own file is the machine's.
export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_PATH="$libdir/pkgconfig"
cd "$source"
check 'a program finds the library in the root' sh -c "pkg-config --cflags moerouter | grep -F -- '-I$root/usr/include'"
check 'a program outside the tree' debian/tests/consumer
check 'the command' debian/tests/command
for page in man1/moerouter.1 man3/moerouter.3; do
    check "$page" gzip -t "$root/usr/share/man/$page.gz"
done
if [ -n "$profile" ]; then
    # It loads: there may be no driver or device, but nothing else is missing.
    check 'the CUDA module loads' sh -c "moerouter info |
        grep -E '^cuda: (available|unavailable: there is no (NVIDIA driver|CUDA device))'"
fi
echo "$passed passed, 0 failed"
