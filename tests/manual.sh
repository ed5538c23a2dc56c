#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# manual.sh: the manual pages draw no warning, and have what the public header and the command's help have: prototypes,
# names, fields, shapes, dtypes, subcommands, options, and the variables that are read.
set -eu
export LC_ALL=C # so that [a-z] has all letters: Turkish has no i there
cd "$(dirname "$0")/.."
header=include/moerouter/moerouter.h library=man/moerouter.3 command=man/moerouter.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for page in $command $library; do
    mandoc -T lint -W warning "$page"
    warnings=$(groff -mdoc -ww -Tutf8 -rLL=78n "$page" 2>&1 >/dev/null) # as man calls it at 80 columns
    [ -z "$warnings" ] || { echo "$warnings" && exit 1; }
done

# The synopsis is C, and contradicts the header nowhere.
mandoc -T ascii $library | sed 's|.\x08||g' | sed -n '/^SYNOPSIS/,/^DESCRIPTION/p' | sed '1d;$d' >"$work/synopsis.c"
${CC:-gcc} -fsyntax-only -Wall -Werror -Iinclude "$work/synopsis.c"

# has PAGE WORD...: in the page, each as a word of its own.
missing=0
has() {
    page=$1
    shift
    for word; do
        grep -qw -- "$word" "$page" || { echo "$page does not have $word" && missing=1; }
    done
}
names=$(sed -e 's@/\*[^*]*\*/@@g' $header | grep -oE '\b(moer_[a-z_]+|MOER_[A-Z_]+)\b' | sort -u |
    grep -vE '^(moer_|MOER_API|MOER_COMMON_FIELDS)$')
fields=$(grep -oE '(\*|\b(size_t|int|double|enum moer_kind) )[a-z_]+(;|$)' $header | tr -d '*;' | sed 's/.* //' | sort -u)
options=$(grep -oE -- '--[a-z][a-z-]*' tools/main.c | sort -u)
subcommands=$(sed -n 's/^    {"\([a-z]*\)", [a-z]*_main,$/\1/p' tools/main.c)
variables=$(grep -rhoE '"MOER_[A-Z_]+"' src backends | tr -d '"' | sort -u)
# shellcheck disable=SC2086
{
    has $library $names $fields $variables
    has $command $variables
}
for subcommand in $subcommands; do
    grep -qx "\.Ss moerouter $subcommand" $command || { echo "$command has no section on $subcommand" && missing=1; }
done
grep -oE 'Fl -[a-z-]+' $command | sed 's/Fl /-/' | sort -u >"$work/options"
echo "$options" | diff - "$work/options"
[ "$missing" = 0 ]

# Tensors: name|dtype|shape, those of files without the outputs.
sed -n 's@^ *const DLTensor \*\([a-z_]*\); */\* \(\[[^]]*\]\) \(T or float32\|int32 or int64\|float32\|T\).*@\1|\3|\2@p' \
    $header >"$work/tensors"
sed -n 's@^\.It Va \([a-z_]*\) Ta \(.*\) Ta \(\[[^]]*\]\) Ta.*@\1|\2|\3@p' $library | diff "$work/tensors" -
grep -v '|T or float32|' "$work/tensors" | sed 's/int32 or int64/I32 or I64/; s/float32/F32/' >"$work/inputs"
sed -n 's@^\.It \([a-z_]*\) Ta \(T\|F32\|I32 or I64\) Ta \(\[[^]]*\]\).*@\1|\2|\3@p' $command | diff "$work/inputs" -
count() { # WORD...
    echo $#
}
# shellcheck disable=SC2086
echo "manual: $(count $names) names, $(count $fields) fields, $(wc -l <"$work/tensors") tensors," \
    "$(count $subcommands) subcommands, $(count $options) options, $(count $variables) variables"
