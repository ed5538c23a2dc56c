#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# debian.sh FOLDER [PROFILE]: exports what git tracks into FOLDER, makes the Debian packages there, and once more in
# another folder, where they must be the same; lets lintian judge them, and runs their own tests by autopkgtest in a
# root that has nothing but Debian's base system; makes them in another such root from what Build-Depends names. With the
# profile pkg.moerouter.cuda the CUDA module is one of them. DEB_BUILD_OPTIONS=nocheck leaves out make check. As root.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
profile=${2-}
cd "$(dirname "$0")/.."
log=$folder/log
. tests/steps.sh

another=$folder/another/folder
rm -rf "$folder/source" "$folder/another" "$folder/root" "$folder"/*.deb
for place in "$folder" "$another"; do
    mkdir -p "$place/source"
    git ls-files -z | tar --null -T - -cf - | tar -xf - -C "$place/source"
    check "dpkg-buildpackage${profile:+ -P$profile}" \
        sh -c "cd '$place/source' && dpkg-buildpackage -us -uc -b -j$(getconf _NPROCESSORS_ONLN) ${profile:+-P$profile}"
done
check 'the same bytes from another folder' \
    sh -c "for package in '$folder'/*.deb; do cmp \$package '$another'/\${package##*/} || exit; done"
check 'lintian' sh -c "lintian --allow-root --fail-on error,warning '$folder'/moerouter_*.changes"
check 'nothing depends on the CUDA module' sh -c "! for package in '$folder'/*.deb; do
    dpkg-deb -f \$package Depends Pre-Depends Recommends; done | grep moerouter-cuda"

# nvcc is no package of Debian.
[ -n "$profile" ] || check 'what Build-Depends names is enough' mmdebstrap --quiet --variant=apt --skip=cleanup/apt \
    --customize-hook="copy-in '$folder/source' /" --chrooted-customize-hook='cd source &&
    apt-get build-dep -y --no-install-recommends ./ && DEB_BUILD_OPTIONS=nocheck dpkg-buildpackage -us -uc -b' \
    bookworm /dev/null
check 'a clean root' mmdebstrap --quiet --variant=apt --include=apt-utils --skip=cleanup/apt bookworm "$folder/root"
autopkgtest() { # Status 2: a test was skipped, whose package was not made.
    command autopkgtest --quiet "$folder/source" "$folder"/*.deb -- chroot "$folder/root" ||
        { [ $? = 2 ] && [ -z "$profile" ]; }
}
check 'autopkgtest' autopkgtest
grep -E '^[a-z]+ +(PASS|SKIP)' "$log"
echo "$passed passed, 0 failed"
