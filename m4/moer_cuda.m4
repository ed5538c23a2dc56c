# SPDX-License-Identifier: Apache-2.0
# MOER_CUDA
# Whether and how the CUDA backend is built.
#   --with-cuda=auto|no|yes|DIR   auto: built where nvcc is found and compiles for the targets
#   --enable-cuda-builtin         a part of the library instead of a module
#   NVCC, NVCCFLAGS, NVCC_GENCODE
# Sets cuda_backend (no, module, builtin), cuda_bench (no, yes), the conditionals CUDA, CUDA_MODULE, CUDA_BUILTIN and
# CUDA_BENCH, and substitutes NVCC, NVCCFLAGS, NVCC_GENCODE, NVCC_LTFLAGS, CUDA_DEFS, CUDA_LIBS and, for moerouter.pc,
# CUDA_PC_LIBS; for C programs that know CUDA, CUDA_CPPFLAGS and, for the benchmark, CUDA_BENCH_LIBS.
AC_DEFUN([MOER_CUDA], [
AC_ARG_VAR([NVCC], [CUDA compiler])
AC_ARG_VAR([NVCCFLAGS], [CUDA compiler flags])
AC_ARG_VAR([NVCC_GENCODE], [GPU targets, as -gencode options])
AC_ARG_WITH([cuda], [AS_HELP_STRING([--with-cuda=DIR],
    [auto, no, yes or the folder of the CUDA toolkit @<:@auto@:>@])], [], [with_cuda=auto])
AC_ARG_ENABLE([cuda-builtin], [AS_HELP_STRING([--enable-cuda-builtin],
    [put the CUDA backend inside the library instead of a module])], [], [enable_cuda_builtin=no])

cuda_backend=no
cuda_reason="--with-cuda=$with_cuda"
AS_IF([test "x$with_cuda" != xno], [
  AS_CASE([$with_cuda],
    [auto|yes], [AC_PATH_PROG([NVCC], [nvcc], [], [$PATH$PATH_SEPARATOR/usr/local/cuda/bin])],
    [AC_PATH_PROG([NVCC], [nvcc], [], [$with_cuda/bin])])
  : ${NVCCFLAGS=-O3}
  # Every generation from Ampere on; Hopper's and Blackwell's own instructions need their own targets, and PTX carries to
  # what comes later.
  AS_IF([test -z "$NVCC_GENCODE"], [
    for target in compute_80,code=sm_80 compute_90a,code=sm_90a compute_100f,code=sm_100 compute_120,code=sm_120 dnl
        compute_90,code=compute_90; do
      NVCC_GENCODE="$NVCC_GENCODE${NVCC_GENCODE:+ }-gencode arch=$target"
    done
  ])
  cuda_reason="no nvcc"
  AS_IF([test -n "$NVCC"], [
    AC_MSG_CHECKING([whether $NVCC compiles with $NVCC_GENCODE])
    AS_ECHO(["__global__ void kernel(void) {}"]) >conftest.cu
    AS_IF([$NVCC $NVCC_GENCODE $NVCCFLAGS -c conftest.cu -o conftest.o >&AS_MESSAGE_LOG_FD 2>&1],
      [cuda_backend=module], [cuda_reason="$NVCC does not compile for the targets, see config.log"])
    rm -f conftest.cu conftest.o
    AC_MSG_RESULT([$cuda_backend])
  ])
  AS_IF([test "x$with_cuda" != xauto && test $cuda_backend = no],
    [AC_MSG_ERROR([--with-cuda=$with_cuda: $cuda_reason])])
])

# Kernels for an architecture alone are asked for only where they have been compiled.
CUDA_DEFS=
AS_CASE([$NVCC_GENCODE], [*compute_90a*], [CUDA_DEFS="-DMOER_CUDA_SM90A"])
AS_CASE([$NVCC_GENCODE], [*compute_100f*], [CUDA_DEFS="$CUDA_DEFS -DMOER_CUDA_SM100F"])
AC_SUBST([CUDA_DEFS])

AS_IF([test $cuda_backend = module], [
  AS_IF([test "x$enable_cuda_builtin" != xno || test "x$enable_shared" = xno], [cuda_backend=builtin])
  cuda_root=`$NVCC --dryrun -c x.cu 2>&1 | sed -n 's/^#[\$] TOP=//p'`
  CUDA_CPPFLAGS="-isystem $cuda_root/include"
  # nvcc's host code guards its static variables with functions of the C++ runtime.
  CUDA_LIBS="-L$cuda_root/lib64 -lcudart_static -lstdc++ -ldl -lrt -lpthread"
  # One position-independent object serves module, shared and static library, so that nvcc runs once a file.
  AS_IF([test "x$enable_shared" != xno], [NVCC_LTFLAGS=-shared], [NVCC_LTFLAGS=-prefer-pic])
])
AS_IF([test $cuda_backend = builtin], [
  CUDA_PC_LIBS=$CUDA_LIBS
  AC_DEFINE([MOER_CUDA_BUILTIN], [1], [Define to 1 where the CUDA backend is inside the library.])])
# The benchmark is C, and looks for CUPTI and cuBLASLt when it runs: of those it needs the headers.
cuda_bench=no
AS_IF([test $cuda_backend != no], [
  CUDA_BENCH_LIBS="-L$cuda_root/lib64 -lcudart_static -ldl -lrt -lpthread"
  AC_MSG_CHECKING([for the headers of CUPTI and cuBLASLt])
  moer_saved_cppflags=$CPPFLAGS
  CPPFLAGS="$CPPFLAGS $CUDA_CPPFLAGS"
  AC_COMPILE_IFELSE([AC_LANG_PROGRAM([[#include <cuda_runtime_api.h>
#include <cupti.h>
#include <cublasLt.h>
CUpti_ActivityKernel10 kernel;
CUpti_ActivityMemcpy6 copy;
CUpti_ActivityMemset4 set;
cublasLtMatmulHeuristicResult_t result;]])], [cuda_bench=yes])
  CPPFLAGS=$moer_saved_cppflags
  AC_MSG_RESULT([$cuda_bench])
])
AS_IF([test $cuda_bench = yes], [
  AC_DEFINE([MOER_CUDA_BENCH], [1], [Define to 1 where the benchmark can time CUDA devices.])
  AC_DEFINE_UNQUOTED([MOER_CUDA_ROOT], ["$cuda_root"], [Folder of the CUDA toolkit.])])
AC_SUBST([CUDA_BENCH_LIBS])
AM_CONDITIONAL([CUDA_BENCH], [test $cuda_bench = yes])
AC_DEFINE([MOER_CUDA_MODULE], ["cuda.so"], [File name of the CUDA backend's module.])
AC_SUBST([CUDA_CPPFLAGS])
AC_SUBST([CUDA_LIBS])
AC_SUBST([CUDA_PC_LIBS])
AC_SUBST([NVCC_LTFLAGS])
AM_CONDITIONAL([CUDA], [test $cuda_backend != no])
AM_CONDITIONAL([CUDA_MODULE], [test $cuda_backend = module])
AM_CONDITIONAL([CUDA_BUILTIN], [test $cuda_backend = builtin])
AS_CASE([$cuda_backend],
  [no], [cuda_text="not built: $cuda_reason; $PACKAGE/cuda.so is used where one is installed"],
  [cuda_text="$cuda_backend, by $NVCC $NVCC_GENCODE"])
])
