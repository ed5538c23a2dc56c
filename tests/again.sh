#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# again.sh FILE: the suites about results once more, with the environment that the file sets.
set -a
. "$1"
set +a
for suite in exact values laws bits numbers; do
    "tests/check_$suite"
    status=$?
    [ $status -eq 0 ] || exit $status
done
