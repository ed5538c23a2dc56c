# SPDX-License-Identifier: Apache-2.0
# For scripts that check step by step: they set log, a file, and source this.
# shellcheck shell=sh disable=SC2154
export LC_ALL=C # so that [a-z] has all letters: Turkish has no i there
passed=0
check() { # NAME COMMAND...
    step=$1
    shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        echo "ok $step"
    else
        cat "$log"
        echo "FAILED $step"
        echo "$passed passed, 1 failed"
        exit 1
    fi
}
