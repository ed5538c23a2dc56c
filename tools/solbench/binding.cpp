/* SPDX-License-Identifier: Apache-2.0 */
/* PyTorch's side of a packaged solution: tensors become DLTensors, the current stream goes with them, and what is wrong
 * becomes an exception. */
#include <ATen/DLConvertor.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

/* The entry of moerouter.cu for an operation, which the build's flags name: NULL, or what is wrong. */
extern "C" const char *MOER_SOLUTION(const DLTensor *tensors, size_t count, const double *factor, void *stream);

/* Inputs and then outputs, as the suite's definition has them; nothing is allocated, and nothing returned. */
static void run(const py::args &arguments) {
    std::vector<torch::Tensor> tensors;
    std::vector<DLTensor> described; /* whose shapes and strides are the tensors' own */
    double number = 0;
    const double *factor = nullptr;
    for (const py::handle argument : arguments) {
        if (THPVariable_Check(argument.ptr())) {
            tensors.push_back(argument.cast<torch::Tensor>());
            at::toDLPackNonOwning(tensors.back(), &described.emplace_back());
        } else {
            number = argument.cast<double>();
            factor = &number;
        }
    }
    const auto device = tensors.empty() ? c10::DeviceIndex(-1) : tensors.front().device().index();
    const char *wrong =
        MOER_SOLUTION(described.data(), described.size(), factor, c10::cuda::getCurrentCUDAStream(device).stream());
    TORCH_CHECK(!wrong, "moerouter: ", wrong);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("run", &run, "The inputs of the suite's definition, then its outputs, which are written.");
}
