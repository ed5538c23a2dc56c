#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# manual.sh: the manual pages draw no warning, and moerouter(3) has every name of the public header.
set -eu
cd "$(dirname "$0")/.."
for page in man/moerouter.1 man/moerouter.3; do
    mandoc -T lint -W warning "$page"
    # Prototypes are wider than 80 columns and cannot be broken.
    warnings=$(groff -mdoc -ww -Tutf8 -rLL=120n "$page" 2>&1 >/dev/null)
    [ -z "$warnings" ] || { echo "$warnings" && exit 1; }
done
# Public names, and the fields that are pointers.
names=$(sed -e 's@/\*[^*]*\*/@@g' include/moerouter/moerouter.h |
    grep -oE '\b(moer_[a-z_]+|MOER_[A-Z_]+)\b|\*[a-z_]+;' | tr -d '*;' | sort -u |
    grep -vE '^(moer_|MOER_API|MOER_COMMON_FIELDS)$')
missing=0
for name in $names; do
    grep -qw -- "$name" man/moerouter.3 || { echo "moerouter.3 does not have $name" && missing=1; }
done
[ "$missing" = 0 ]
echo "manual: $(echo "$names" | wc -l) names"
