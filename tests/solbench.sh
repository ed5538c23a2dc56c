#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# solbench.sh FOLDER: packs both operations for the public suite, holds the files to its rules, and where there is an
# nvcc compiles them as the suite does, away from the tree, and calls their entries. PyTorch's side is compiled where
# the python3 that PYTHON names has a PyTorch for CUDA.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
pack=tools/solbench/pack.py
log=$folder/log
. tests/steps.sh

same_again() {
    $pack --operation "$1" -o "$folder/again.json" && cmp "$folder/$1.json" "$folder/again.json"
}
refused() { # SENTENCE ARGUMENT...
    sentence=$1
    shift
    ! $pack "$@" 2>"$folder/said" && printf 'pack.py: %s\n' "$sentence" | diff - "$folder/said"
}
for operation in softmax_topk_backward sigmoid_topk_backward; do
    check "pack $operation" $pack --operation $operation -o "$folder/$operation.json"
    check "pack $operation again" same_again $operation
done
for path in generic tcgen05; do
    check "pack $path" $pack --operation softmax_topk_backward --path $path -o "$folder/$path.json"
done
check "no DLPack is refused" refused \
    "--dlpack is $folder, which has no dlpack/dlpack.h (Debian and Ubuntu: apt install libdlpack-dev)" \
    --operation softmax_topk_backward --dlpack "$folder"

# The rules of SOL-ExecBench's src/sol_execbench/core/data/solution.py and, for what is compiled, of its build_ext.py.
# The sources are laid out as there, with the flags in files beside them.
cat >"$folder/rules.py" <<'RULES'
import json, pathlib, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
solution = json.loads((folder / f"{name}.json").read_text())
assert set(solution) == {"name", "definition", "author", "description", "spec", "sources"}, set(solution)
assert all(solution[field] for field in solution)
spec, sources = solution["spec"], {source["path"]: source["content"] for source in solution["sources"]}
assert len(sources) == len(solution["sources"]) and all(sources.values()), "a source twice, or an empty one"
for path in map(pathlib.PurePosixPath, sources):
    assert not path.is_absolute() and ".." not in path.parts, path
    assert len(path.parts) == 1 and path.suffix in (".cu", ".cpp"), f"{path} would not be compiled"
assert set(spec) == {"languages", "target_hardware", "entry_point", "dependencies", "destination_passing_style",
                     "binding", "compile_options"}, set(spec)
assert spec["languages"] == ["cuda_cpp"] and spec["binding"] == "torch" and spec["destination_passing_style"] is True
assert spec["target_hardware"] and set(spec["target_hardware"]) <= {"B200", "LOCAL"}
assert spec["entry_point"].count("::") == 1 and spec["entry_point"].split("::")[0] in sources
flags = spec["compile_options"]
assert set(flags) == {"cflags", "cuda_cflags", "ld_flags"}
assert all(isinstance(flag, str) for group in flags.values() for flag in group)
text = sources["moerouter.cu"]
assert '#include "' not in text and "<moerouter/" not in text and "<dlpack/" not in text, "not in one file"
assert "Copyright (c) 2017 by Contributors" in text, "DLPack's notice"
head = text[:text.index("*/", text.index("*/") + 2)]
tuned = name != "generic"
blackwell = name == "tcgen05"
assert f"9.0   {'sm_90a' if tuned else 'generic'}," in head, head
assert f"10.0  {'sm_100f' if blackwell else 'generic'}," in head and ("not been proven" in head) == blackwell, head
assert all(f"-gencode=arch=compute_{target},code=sm_{target}" in flags["cuda_cflags"] for target in ("90a", "100a"))
assert ("-DMOER_CUDA_SM90A" in flags["cuda_cflags"]) == tuned
assert all((flag in flags["cuda_cflags"]) == blackwell for flag in ("-DMOER_CUDA_SM100F", "-DMOER_SOLUTION_UNPROVEN"))
(folder / name).mkdir(exist_ok=True)
for path, content in sources.items():
    (folder / name / path).write_text(content)
for group, kind in flags.items():
    (folder / name / group).write_text(" ".join(kind))
RULES
for name in softmax_topk_backward sigmoid_topk_backward generic tcgen05; do
    check "rules, $name" python3 "$folder/rules.py" "$folder" $name
done
# So that one compilation stands for both.
check "the operations' translation units are the same" \
    cmp "$folder/softmax_topk_backward/moerouter.cu" "$folder/sigmoid_topk_backward/moerouter.cu"

PATH=$PATH:/usr/local/cuda/bin
cd "$folder/softmax_topk_backward"
if command -v nvcc >/dev/null; then
    # What PyTorch's builder (torch/utils/cpp_extension.py, COMMON_NVCC_FLAGS) puts before a solution's own flags.
    builder="-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__
        -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr --compiler-options -fPIC"
    # shellcheck disable=SC2046,SC2086
    check "compile the translation unit" \
        nvcc $builder $(cat cuda_cflags) -Werror all-warnings -c moerouter.cu -o moerouter.o
    check "link its entries" nvcc "$OLDPWD/tests/solbench.c" moerouter.o -o entries
    check "call its entries" ./entries
    cd ../tcgen05
    # shellcheck disable=SC2046,SC2086
    check "compile it with Blackwell's own kernels" \
        nvcc $builder $(sed 's/-gencode=arch=compute_90a,code=sm_90a//' cuda_cflags) -Werror all-warnings -c moerouter.cu -o moerouter.o
    cd ../softmax_topk_backward
else
    echo "skipped: compilation, since there is no nvcc"
fi
torch=$(${PYTHON-python3} -c 'import importlib.util as u, sysconfig as s
found = u.find_spec("torch")
print(found.submodule_search_locations[0] + "/include" if found else "", s.get_path("include"))')
if [ -f "${torch% *}/c10/cuda/CUDAStream.h" ] && command -v nvcc >/dev/null; then
    cuda=$(dirname "$(dirname "$(command -v nvcc)")")/include
    # shellcheck disable=SC2046
    check "compile PyTorch's side" g++ $(cat cflags) -Wall -Werror -fsyntax-only -DTORCH_EXTENSION_NAME=kernel \
        -isystem "${torch% *}" -isystem "${torch% *}/torch/csrc/api/include" -isystem "${torch#* }" -isystem "$cuda" \
        binding.cpp
else
    echo "skipped: PyTorch's side, since ${PYTHON-python3} has no PyTorch for CUDA"
fi
echo "solbench: $passed passed, 0 failed"
