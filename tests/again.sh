#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# again.sh FILE: the suites about results once more, or those that the file names, with the environment that it sets.
suites='exact values laws bits numbers'
set -a
. "$1"
set +a
for suite in $suites; do
    "tests/check_$suite"
    status=$?
    [ $status -eq 0 ] || exit $status
done
