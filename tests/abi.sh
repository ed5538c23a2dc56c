#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# abi.sh LIBRARY [--update]: holds the ABI of a shared library, built with -g, to the committed one: functions, structs,
# enumerators. --update writes it anew, after a change that is meant; the difference then shows in review.
set -eu
library=$1
abi=$(cd "$(dirname "$0")/.." && pwd)/abi/libmoerouter-x86_64.abi
if [ "${2-}" = --update ]; then
    abidw --no-corpus-path --no-comp-dir-path --no-elf-needed --short-locs --no-parameter-names \
        --type-id-style hash --exported-interfaces-only "$library" >"$abi"
fi
# Without types any two libraries with the same names are alike.
readelf -S "$library" | grep -q '\.debug_info' || { echo "abi: $library was not built with -g" && exit 1; }
abidiff --no-show-locs --exported-interfaces-only "$abi" "$library" || {
    echo "abi: differs from $abi; if that is meant: tests/abi.sh LIBRARY --update"
    exit 1
}
echo "abi: $(grep -c '<elf-symbol' "$abi") symbols as committed"
