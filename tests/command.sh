#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the moerouter command promises: its output, its exit status, and that no file and no argument gets past it.
# MOEROUTER is the command, DATA the folder of golden vectors. Files that break one rule each are made here.
: "${MOEROUTER:?the command}" "${DATA:?the folder of golden vectors}"
LC_ALL=C
export LC_ALL
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 2' HUP INT TERM
passed=0
failed=0

verdict() { # NAME, and the status of what went before
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok: $1"
    else
        failed=$((failed + 1))
        echo "FAILED: $1"
        sed 's/^/    /' "$work/log"
    fi
}

# check NAME STATUS TEXT ARGUMENT...: the command's exit status, and a text that must be in what it prints.
check() {
    name=$1 status=$2 text=$3
    shift 3
    "$MOEROUTER" "$@" >"$work/log" 2>&1 </dev/null
    got=$?
    [ $got -eq "$status" ] && grep -qF -- "$text" "$work/log"
    verdict "$name" $?
}

# holds NAME COMMAND...: a command of the shell succeeds.
holds() {
    name=$1
    shift
    "$@" >"$work/log" 2>&1
    verdict "$name" $?
}

fails() {
    ! "$@"
}

# The length of a header as the format's eight bytes.
prefix() {
    n=$1
    for _ in 1 2 3 4 5 6 7 8; do
        printf '%b' "\\0$(printf %03o $((n % 256)))"
        n=$((n / 256))
    done
}

# bad NAME TEXT HEADER BYTES: a file of that header and so much data is refused with that text.
bad() {
    { prefix ${#3}; printf '%s' "$3"; head -c "$4" /dev/zero; } >"$work/bad"
    check "bad file: $1" 2 "$2" run softmax_topk_backward "$work/bad" -o "$work/bad.out"
}

# The bytes of the header in front of a file's data, prefix and all.
data_begin() {
    echo $((8 + $(od -An -tu4 -N4 "$1")))
}

# patch FILE OFFSET FORMAT: printf's bytes there.
patch() {
    printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

same_content() {
    [ "$(cksum <"$1")" = "$2" ]
}

softmax=softmax_topk_backward
sigmoid=sigmoid_topk_backward
qwen=$DATA/softmax_n33_qwen3.safetensors
odd=$DATA/softmax_n7_odd.safetensors
glm=$DATA/grouped_n16_scale1.safetensors

# ---- Arguments

check 'help' 0 'Usage: moerouter SUBCOMMAND' --help
check 'version' 0 'moerouter 0.' --version
for subcommand in bench check info make run tune; do
    check "help of $subcommand" 0 "Usage: moerouter $subcommand" $subcommand --help
    check "unknown option of $subcommand" 2 "moerouter $subcommand --help" $subcommand --wrong
    check "unknown letter of $subcommand" 2 "moerouter $subcommand --help" $subcommand -x
done
check 'no subcommand' 2 'subcommand is missing'
check 'unknown subcommand' 2 "'fly'" fly
check 'argument after --version' 2 "'now'" --version now
check 'argument of info' 2 "'now'" info now
check 'info' 0 'cpu: available' info
check 'make without an operation' 2 'OPERATION is missing' make --tokens 1 -o "$work/out"
check 'make of an unknown operation' 2 "'relu'" make relu --tokens 1 -o "$work/out"
check 'make without tokens' 2 '--tokens is missing' make $softmax -o "$work/out"
check 'make without a file' 2 '-o FILE is missing' make $softmax --tokens 1
check 'make with two files' 2 'given twice' make $softmax --tokens 1 -o "$work/out" --output "$work/out"
check 'option without its value' 2 'requires an argument' make $softmax --tokens
for number in -1 1x '' ' 1' 9223372036854775808 0x10; do
    check "make with '$number' tokens" 2 "'$number' must be a number" make $softmax "--tokens=$number" -o "$work/out"
done
check 'seed too large' 2 'must be a number' make $softmax --tokens 1 --seed 18446744073709551616 -o "$work/out"
check 'dtype of an id' 2 "'int64'" make $softmax --tokens 1 --dtype int64 -o "$work/out"
check 'top_k above experts' 2 'only 4 experts' make $softmax --tokens 1 --experts 4 --top-k 5 -o "$work/out"
check 'more than fits in memory' 2 'moerouter make: ' make $softmax --tokens 9223372036854775807 -o "$work/out"
check 'run without a file' 2 'FILE is missing' run $softmax
check 'run with two files' 2 'too many' run $softmax "$odd" "$odd"
check 'run of an unknown device' 2 "'tpu'" run $softmax "$odd" --device tpu
check 'run of a device without a number' 2 "'cuda:'" run $softmax "$odd" --device cuda:
check 'run with a wrong dtype' 2 'float16' run $softmax "$odd" --output-dtype float16
check 'check of an unknown operation' 2 "'relu'" check relu
check 'check of two operations' 2 'too many' check $softmax $sigmoid
check 'check of an unknown device' 2 "'tpu'" check --device tpu
check 'tune without a device' 2 '--device is missing' tune
for device in cpu cuda cuda: cuda:x tpu; do
    check "tune of '$device'" 2 "--device '$device' must be cuda:N" tune --device $device
done
check 'tune of a GPU that is not here' 2 'moerouter tune: cuda:2147483647: ' tune --device cuda:2147483647
for seconds in 0 3601 1x ''; do
    check "tune within '$seconds' seconds" 2 "'$seconds' must be a number from 1 to 3600" tune --device cuda:0 \
        "--timeout=$seconds"
done
check 'argument of tune' 2 "'now'" tune --device cuda:0 now
check 'bench of an unknown operation' 2 "'relu'" bench relu --json "$work/out"
for tokens in 0 -1 1,,2 1, ,1 '' 1x 2147483648; do
    check "bench with '$tokens' tokens" 2 'must be a number' bench $softmax --tokens "$tokens" --json "$work/out"
done
check 'bench with no expert' 2 'must be a number' bench $softmax --experts 0 --json "$work/out"
check 'bench with top_k above experts' 2 'only 4 experts' bench $softmax --experts 4 --json "$work/out"
check 'bench with too few repeats' 2 'from 9' bench $softmax --repeats 8 --json "$work/out"
"$MOEROUTER" bench --device cuda:2147483647 >"$work/log" 2>&1
if grep -q 'no benchmark for cuda devices' "$work/log"; then
    gpu_bench=missing
    check 'bench of a GPU without its headers' 2 'this build has no' bench $softmax --device cuda:0 --json "$work/out"
elif "$MOEROUTER" info | grep -q '^cuda: available'; then
    gpu_bench=runs
    check 'bench of a GPU that is not here' 2 'no device cuda:999' bench $softmax --device cuda:999 --json "$work/out"
else
    gpu_bench=idle
    check 'bench without a GPU' 2 'cuda:0: the cuda backend is not available: ' bench $softmax --device cuda:0 --json "$work/out"
fi
if [ $gpu_bench != missing ]; then
    check 'bench of a GPU with too few repeats' 2 'from 50' bench --device cuda:0 --repeats 49 --json "$work/out"
fi
holds 'nothing was written' fails test -e "$work/out"
if [ -c /dev/full ]; then
    for argument in --help --version info; do
        holds "$argument to a full disk" fails sh -c '"$0" "$1" >/dev/full' "$MOEROUTER" $argument
    done
fi

# ---- make

make_case() { # FILE SEED DTYPE OPERATION
    "$MOEROUTER" make "$4" --tokens 5 --hidden 24 --experts 12 --top-k 3 --seed "$2" --dtype "$3" -o "$1"
}

while read -r operation dtype sum size; do
    holds "make $operation in $dtype" make_case "$work/case" 42 "$dtype" "$operation"
    holds "$operation in $dtype has the same bytes everywhere" same_content "$work/case" "$sum $size"
    check "run $operation in $dtype" 0 'by the loop' run "$operation" "$work/case" --check
    check "run $operation in $dtype, outputs float32" 0 'outputs float32' \
        run "$operation" "$work/case" --check --output-dtype float32
done <<END
$softmax bfloat16 1881075981 2570
$softmax float16 3668604361 2562
$softmax float32 1883316358 4008
$sigmoid bfloat16 1763855784 1878
$sigmoid float16 193357948 1870
$sigmoid float32 2633399844 2908
END
holds 'another seed' make_case "$work/other" 43 float32 $sigmoid
holds 'has other bytes' fails cmp "$work/case" "$work/other"
for sizes in '0 8 4 2' '3 0 4 2' '3 8 4 0' '3 8 0 0' '1 1 1 1' '2 8 4 4'; do
    set -- $sizes
    for operation in $softmax $sigmoid; do
        holds "make $operation of sizes $sizes" "$MOEROUTER" make $operation --tokens "$1" --hidden "$2" \
            --experts "$3" --top-k "$4" -o "$work/edge"
        check "run $operation of sizes $sizes" 0 "N = $1, H = $2, E = $3, K = $4" run $operation "$work/edge" --check
    done
done

# ---- run

found=0
for file in "$DATA"/*.safetensors; do
    case $file in
    */softmax_*) operation=$softmax ;;
    *) operation=$sigmoid ;;
    esac
    found=$((found + 1))
    check "golden $(basename "$file")" 0 'by the file' run $operation "$file"
done
holds 'golden files were found' test "$found" -gt 0

check 'nothing to do with the result' 2 'holds nothing' run $sigmoid "$work/case"
check 'the wrong operation' 2 'missing: weight, grad_topk_weights, scores, topk_indices' run $sigmoid "$odd" --check

cp "$odd" "$work/broken"
patch "$work/broken" $(($(data_begin "$odd") + 15188 - 4)) '\000\000\200\077' # the last expected.grad_hidden_states: 1
check 'a result out of its bounds' 1 'BROKEN  grad_hidden_states' run $softmax "$work/broken" -o "$work/out"
holds 'is written all the same' test -s "$work/out"

# A header one byte longer leaves no tensor aligned.
begin=$(data_begin "$odd")
{
    prefix $((begin - 8 + 1))
    head -c "$begin" "$odd" | tail -c +9
    printf ' '
    tail -c +$((begin + 1)) "$odd"
} >"$work/shifted"
check 'tensors that are not aligned' 0 'by the file' run $softmax "$work/shifted" -o "$work/shifted.out"
"$MOEROUTER" run $softmax "$odd" -o "$work/odd.out" >/dev/null
holds 'give the same bytes' cmp "$work/odd.out" "$work/shifted.out"
cp "$odd" "$work/both"
check 'output over the input' 0 'by the file' run $softmax "$work/both" -o "$work/both"
holds 'is the output' cmp "$work/odd.out" "$work/both"
ln -s both "$work/link"
check 'output through a link' 0 'by the file' run $softmax "$odd" -o "$work/link"
holds 'leaves the link' test -L "$work/link"
check 'an output that is a folder' 2 'directory' run $softmax "$odd" -o "$work"
check 'an output in no folder' 2 'cannot be written' run $softmax "$odd" -o "$work/none/out"
check 'output to a device' 0 'by the file' run $softmax "$odd" -o /dev/null
[ -c /dev/full ] && check 'output to a full disk' 2 'No space left' run $softmax "$odd" -o /dev/full
mkfifo "$work/fifo"
timeout 60 cat "$work/fifo" >"$work/fifo.out" &
check 'output to a pipe' 0 'by the file' run $softmax "$odd" -o "$work/fifo"
wait $!
holds 'arrives' cmp "$work/odd.out" "$work/fifo.out"
holds 'no temporary file is left' fails sh -c 'ls -A "$0" | grep "^\.moerouter"' "$work"


# edit FILE SCRIPT: a copy whose header sed has changed, in place of as many bytes.
edit() {
    sed "$2" "$1" >"$work/edited"
}

edit "$odd" 's/"grad_router_logits"/"grad_router_logitz"/'
check 'tensors of other names are named' 1 'ignored: grad_router_logitz' run $softmax "$work/edited"
edit "$odd" 's/"hidden_states"/"hidden_statez"/; s/"gate_weight"/"gate_weighd"/'
check 'missing tensors are named' 2 'missing: hidden_states, gate_weight' run $softmax "$work/edited"
edit "$glm" 's/"routed_scaling_factor"/"routed_scaling_fakter"/'
check 'no scaling factor is a factor of 1' 0 'by the file' run $sigmoid "$work/edited"
edit "$glm" 's/\("routed_scaling_factor": {"dtype": "BF16", "shape": \)\[1\]/\1[ ]/'
check 'a scaling factor without axes' 0 'by the file' run $sigmoid "$work/edited"
edit "$glm" 's/\("routed_scaling_factor": {"dtype": \)"BF16"/\1"I16" /'
check 'a scaling factor that is an integer' 2 'dtype I16' run $sigmoid "$work/edited"
edit "$glm" 's/\("expected.grad_logits": {"dtype": \)"F32"/\1"I32"/'
check 'expected values that are integers' 2 "'expected.grad_logits': dtype I32" run $sigmoid "$work/edited"
edit "$glm" 's/\("expected.grad_logits": {"dtype": "F32", "shape": \)\[16, 32\]/\1[32, 16]/'
check 'expected values of another shape' 2 "'expected.grad_logits': shape" run $sigmoid "$work/edited"
edit "$glm" 's/\("scores": {"dtype": \)"BF16"/\1"F16" /'
check 'two dtypes' 2 "$work/edited: scores.dtype is float16" run $sigmoid "$work/edited"
edit "$glm" 's/\("scores": {"dtype": "BF16", "shape": \)\[16, 32\]/\1[ 512  ]/'
check 'an axis too few' 2 'scores.ndim is 1' run $sigmoid "$work/edited"
edit "$glm" 's/\("scores": {"dtype": "BF16", "shape": \)\[16, 32\]/\1[32, 16]/'
check 'another shape' 2 'scores.shape[0] is 32' run $sigmoid "$work/edited"
patch "$work/case" "$(data_begin "$work/case")" '\014' # the first of topk_indices, which lie first: 12 of 12 experts
check 'an invalid id' 2 "$work/case on cpu: topk_indices" run $sigmoid "$work/case" --check
if "$MOEROUTER" info | grep -q '^cuda: available'; then
    check 'cuda' 0 'by the file' run $softmax "$qwen" --check --device cuda:0
else
    check 'cuda is not here' 2 'on cuda:0: the cuda backend is not available' run $softmax "$qwen" --check --device cuda:0
fi

# ---- check

check 'check' 0 ', 0 failed' check $sigmoid --quick
cp "$work/log" "$work/table"
holds 'has the suite' test "$(grep -c '  suite  .* pass$' "$work/table")" -eq 9
holds 'has no larger workloads' fails grep -q ' 8192 ' "$work/table"
for case in 'edges of N' 'edges of H' 'edges of E, K' 'required inputs' 'int32 ids' 'repeated ids' 'empty slots' \
    'peaked router' 'same signs' 'exact integers' 'identity gate'; do
    holds "has $case" grep -q "^$sigmoid  $case .* pass$" "$work/table"
done
holds 'has no other operation' fails grep -q "^$softmax" "$work/table"
holds 'counts its rows' grep -qx "$(grep -c ' pass$' "$work/table") passed, 0 failed" "$work/table"
"$MOEROUTER" info | grep -q '^cuda: available' ||
    check 'check on cuda, which is not here' 2 'on cuda:0: suite' check $softmax --quick --device cuda:0

# ---- bench

SOURCE_DATE_EPOCH=86400
export SOURCE_DATE_EPOCH
bench() {
    "$MOEROUTER" bench "$@" --hidden 40 --experts 8 --top-k 2 --json "$work/json" --plot "$work/svg"
}
valid() { # the files that were written: as JSON and XML where there is something to read them
    if command -v python3; then
        python3 -c 'import json, sys, xml.dom.minidom as xml
json.load(open(sys.argv[1]))
xml.parse(sys.argv[2])' "$work/json" "$work/svg"
    fi
}
has() { # FILE TEXT...: the file has them, in lines of their own or within one
    file=$1
    shift
    for text; do
        grep -qF -- "$text" "$file" || { echo "not in $file: $text"; return 1; }
    done
}
holds 'bench' bench --tokens 300,17,64
cp "$work/log" "$work/table"
holds 'has means' has "$work/table" geomean mean workspace $softmax $sigmoid
holds 'says which OpenBLAS' has "$work/table" "OpenBLAS core $("$MOEROUTER" info | sed -n 's/.*; core \([^,]*\),.*/\1/p')"
holds 'its files are valid' valid
holds 'its JSON has all' has "$work/json" '"library": "0.' '"commit": "' '"date": "1970-01-02"' '"device": "' \
    '"threads": ' '"openblas_core": "' "\"$softmax\": {" "\"$sigmoid\": {" '"geomean_us": ' '"mean_us": ' '"floor_geomean_us": ' \
    '"gemms_geomean_us": ' '"tokens": 17,' '"us": ' '"floor_us": ' '"gemms_us": ' '"workspace_bytes": ' '"checked": true'
holds 'its JSON has every case' test "$(grep -c '"checked": true' "$work/json")" -eq 6
holds 'its plot has all' has "$work/svg" $softmax $sigmoid 1970-01-02 tokens memcpy sgemm 'H = 40, E = 8, K = 2'
holds 'bench of one token' bench $sigmoid --tokens 1 --repeats 10
cp "$work/log" "$work/table"
holds 'its files are valid, too' valid
holds 'has no other operation' fails grep -q $softmax "$work/table" "$work/json" "$work/svg"
if [ $gpu_bench = runs ]; then
    holds 'bench of a GPU' bench --device cuda:0 --tokens 300,17
    cp "$work/log" "$work/table"
    holds 'says how it is timed' has "$work/table" 'driver ' 'dirty L2' 'of copy' launched cudaMemcpyAsync cuBLASLt
    holds 'its files are valid, too' valid
    holds 'its JSON has all' has "$work/json" '"method": "' '"driver": "' '"copy_gb_s": ' '"launched_us": ' \
        '"launched_geomean_us": ' '"floor_us": ' '"gemms_us": ' '"checked": true'
fi
SOURCE_DATE_EPOCH=today
check 'a date that is none' 2 "'today'" bench $softmax --tokens 1
unset SOURCE_DATE_EPOCH
check 'JSON in no folder' 2 'cannot be written: No such' bench $softmax --tokens 1 --json "$work/none/json"
check 'JSON and plot in one file' 2 'name one file' bench $softmax --tokens 1 --json "$work/both" --plot "$work/./both"
echo old >"$work/kept"
holds 'bench with its output closed' fails sh -c '"$0" bench "$1" --tokens 1 --hidden 8 --experts 4 --top-k 2 --json "$2" >&-' \
    "$MOEROUTER" $softmax "$work/json"
holds 'a failure with its output closed' fails sh -c 'MOER_CPU_ISA=none "$0" bench "$1" --tokens 1 --json "$2" >&-' \
    "$MOEROUTER" $softmax "$work/kept"
holds 'leaves the file as it was' test "$(cat "$work/kept")" = old
check 'a plot that is a folder' 2 'cannot be written: Is a' bench $softmax --tokens 1 --plot "$work"
if [ -c /dev/full ]; then
    check 'JSON to a full disk' 2 'cannot be written: No space' bench $softmax --tokens 1 --json /dev/full
    check 'a plot to a full disk' 2 'cannot be written: No space' bench $softmax --tokens 1 --plot /dev/full
fi

# ---- Rows of nothing

rows=1125899906842624
header=$(
    printf '{'
    for tensor in '"hidden_states":{"dtype":"F32","shape":['$rows',0]' '"gate_weight":{"dtype":"F32","shape":[0,0]' \
        '"routing_probs":{"dtype":"F32","shape":['$rows',0]' '"selected_experts":{"dtype":"I64","shape":['$rows',0]'; do
        printf '%s,"data_offsets":[0,0]},' "$tensor"
    done
    printf '"grad_routing_weights":{"dtype":"F32","shape":[%s,0],"data_offsets":[0,0]}}' $rows
)
{ prefix ${#header}; printf '%s' "$header"; } >"$work/rows"
check '2^50 tokens of nothing' 0 'norm         0' run $softmax "$work/rows" -o "$work/out" --check

# ---- Files that break the format's rules

one() { # DTYPE SHAPE OFFSETS: a header of one tensor
    printf '{"x":{"dtype":%s,"shape":%s,"data_offsets":%s}}' "$1" "$2" "$3"
}

two() { # OFFSETS OFFSETS: a header of two, four bytes each
    printf '{"x":{"dtype":"F32","shape":[1],"data_offsets":%s},"y":{"dtype":"F32","shape":[1],"data_offsets":%s}}' "$@"
}

: >"$work/empty"
printf '1234567' >"$work/short"
{ prefix 1000; printf '{}'; } >"$work/cut"
{ prefix 100000001; printf '{}'; } >"$work/huge"
printf '\377\377\377\377\377\377\377\377{}' >"$work/endless"
{ prefix 8; printf '{"\377\376":1}'; } >"$work/latin"
check 'bad file: missing' 2 'No such file' run $softmax "$work/none" --check
check 'bad file: a folder' 2 'not a regular file' run $softmax "$work" --check
check 'bad file: a pipe' 2 'not a regular file' run $softmax "$work/fifo" --check
check 'bad file: a device' 2 'not a regular file' run $softmax /dev/zero --check
check 'bad file: empty' 2 'has 0 bytes' run $softmax "$work/empty" --check
check 'bad file: too short' 2 'has 7 bytes' run $softmax "$work/short" --check
check 'bad file: cut in the header' 2 'ends 2 bytes' run $softmax "$work/cut" --check
check 'bad file: a huge header' 2 'allows 100000000' run $softmax "$work/huge" --check
check 'bad file: an endless header' 2 'allows 100000000' run $softmax "$work/endless" --check
check 'bad file: not UTF-8' 2 'not valid JSON' run $softmax "$work/latin" --check
head -c 20000 "$odd" >"$work/cut"
check 'bad file: cut in the data' 2 "past the file's" run $softmax "$work/cut" --check

bad 'no header' 'not a JSON object' '' 0
bad 'a header that is an array' 'not a JSON object' '[]' 0
bad 'spaces before the header' 'not a JSON object' ' {}' 0
bad 'a header cut short' 'not valid JSON' '{"x":' 0
bad 'something after the header' 'not valid JSON' '{}x' 0
bad 'twice the same name' 'not valid JSON' '{"x":1,"x":1}' 0
bad 'brackets without end' 'not valid JSON' "{\"x\":$(head -c 100000 /dev/zero | tr '\0' '[')" 0
bad 'metadata that is no object' '__metadata__' '{"__metadata__":1}' 0
bad 'metadata that is no string' "__metadata__: 'a'" '{"__metadata__":{"a":1}}' 0
bad 'a tensor that is no object' "'x': must be an object" '{"x":1}' 0
bad 'no dtype' 'dtype must be' '{"x":{"shape":[],"data_offsets":[0,4]}}' 4
bad 'a dtype that is no string' 'dtype must be' "$(one 1 '[]' '[0,4]')" 4
bad 'an unknown dtype' "dtype 'F31'" "$(one '"F31"' '[]' '[0,4]')" 4
bad 'no shape' 'shape must be' '{"x":{"dtype":"F32","data_offsets":[0,4]}}' 4
bad 'a shape that is no array' 'shape must be' "$(one '"F32"' 1 '[0,4]')" 4
bad 'a negative shape' 'shape[1]' "$(one '"F32"' '[1,-1]' '[0,4]')" 4
bad 'a shape of fractions' 'shape[0]' "$(one '"F32"' '[1.0]' '[0,4]')" 4
bad 'a shape of 2^63' 'too big' "$(one '"F32"' '[9223372036854775808]' '[0,4]')" 4
bad 'a shape of 2^64 bytes' 'shape[1] is 4294967296' "$(one '"F32"' '[1073741824,4294967296]' '[0,4]')" 4
bad 'no offsets' 'data_offsets must be' '{"x":{"dtype":"F32","shape":[1]}}' 4
bad 'three offsets' 'data_offsets must be' "$(one '"F32"' '[1]' '[0,4,4]')" 4
bad 'offsets of fractions' 'data_offsets must be' "$(one '"F32"' '[1]' '[0,4.0]')" 4
bad 'negative offsets' '[-4, 0]' "$(one '"F32"' '[1]' '[-4,0]')" 4
bad 'reversed offsets' '[4, 0]' "$(one '"F32"' '[1]' '[4,0]')" 4
bad 'offsets past the end' "[0, 8] end past the file's 4 bytes" "$(one '"F32"' '[2]' '[0,8]')" 4
bad 'offsets far past the end' 'end past' "$(one '"F32"' '[1]' '[9223372036854775803,9223372036854775807]')" 4
bad 'offsets of another length' 'hold 8 bytes' "$(one '"F32"' '[1]' '[0,8]')" 8
bad 'overlapping tensors' "'y': data_offsets [2, 6] overlap those of 'x'" "$(two '[0,4]' '[2,6]')" 6
bad 'tensors in the same place' 'overlap' "$(two '[0,4]' '[0,4]')" 4
bad 'a gap between tensors' 'gap of 4 bytes' "$(two '[8,12]' '[0,4]')" 12
bad 'a gap before all tensors' 'gap of 4 bytes' "$(two '[8,12]' '[4,8]')" 12
bad 'data of no tensor' 'the last 3 bytes' "$(two '[4,8]' '[0,4]')" 11
bad 'a name with an escape' "tensor 'x?[2J'" '{"x\u001b[2J":1}' 0
bad 'nothing wrong but the names' 'missing: hidden_states, gate_weight, routing_probs' "$(two '[4,8]' '[0,4]')   " 8
bad 'no tensor at all' 'missing: hidden_states' '{}' 0
holds 'no bad file has an output' fails test -e "$work/bad.out"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
