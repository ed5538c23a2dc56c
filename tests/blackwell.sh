#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# blackwell.sh FOLDER: what a machine without a GPU can say of the fused kernel for Blackwell, where there is an nvcc: its
# descriptors, by a model of the ISA's tables; how many of which instructions it has; that its variables are in registers.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/cuda/bin
if ! command -v nvcc >/dev/null; then
    echo "blackwell.sh: no nvcc"
    exit 0
fi
compile() { nvcc -std=c++17 -O3 -DMOER_MODULE -DMOER_CUDA_SM100F -Ibackends/cuda -Isrc -Iinclude "$@"; }

compile -arch=sm_100 -Itests -o "$folder/descriptors" tests/descriptors.cu
"$folder/descriptors"

compile -gencode arch=compute_100f,code=compute_100f -ptx -o "$folder/fused.ptx" backends/cuda/fused.cu
# count EXPECTED INSTRUCTION: a line each.
count() {
    found=$(grep -cF "$2" "$folder/fused.ptx") || true
    echo "$found $2"
    if [ "$found" -ne "$1" ]; then
        echo "blackwell.sh: there must be $1 of $2"
        exit 1
    fi
}
# Kernels for two types and up to 64 and 128 experts, and 128 and 160 by entries. A weight block multiplies 8 times for a
# tile of 128 tokens, an item once for each 16 experts.
kernels=8
count $((2 * (4 * 8 + (64 + 128 + 128 + 160) / 16))) 'tcgen05.mma.cta_group::1.kind::f16 '
count 0 'cta_group::2'
count $((2 * kernels)) 'tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 '
count $((2 * kernels)) 'tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned'
count $((2 * kernels)) 'tcgen05.dealloc.cta_group::1.sync.aligned.b32 '
# Hidden states and G in one slot, or in two; a chain; an item.
count $((kernels / 2 * (1 + 2) + 2 * kernels)) 'tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 '
# A chain, totals; four parts of an item.
count $((kernels * (2 + 4))) 'tcgen05.ld.sync.aligned.32x32b.x32.b32 '
count $((kernels * (2 + 4))) 'tcgen05.wait::ld.sync.aligned'
count "$kernels" 'tcgen05.st.sync.aligned.32x32b.x32.b32 '
count "$kernels" 'tcgen05.wait::st.sync.aligned'
# Memory allocated, and given back, by either block; sums read, of a chain and of an item.
count $((kernels * (2 + 2 + 2))) 'tcgen05.fence::before_thread_sync'
# The same, products of either block, and their sums.
count $((kernels * (2 + 2 + 2 + 2))) 'tcgen05.fence::after_thread_sync'
# Two halves of an item; entries in two slots of either block.
count $((kernels * 2 + kernels / 2 * 4)) 'fence.proxy.async.shared::cta'
# Two panels of hidden states and of the gate, of either in two places: first thing and later; two halves of an item; tiles or
# entries of either block.
count $((kernels * (4 + 4))) 'cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes '
count $((kernels * 2)) 'cp.async.bulk.tensor.2d.global.shared::cta.bulk_group '
count $((kernels * 2)) 'cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes '
count 0 '.local'

compile -gencode arch=compute_100f,code=sm_100f -cubin -Xptxas -v -o "$folder/fused.cubin" backends/cuda/fused.cu \
    2>"$folder/ptxas"
if grep 'stack frame' "$folder/ptxas" | grep -v ' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads'; then
    echo "blackwell.sh: variables in local memory"
    exit 1
fi
grep -o 'Used [0-9]* registers' "$folder/ptxas" | sort | uniq -c
