# SPDX-License-Identifier: Apache-2.0
"""The library's two operations on PyTorch tensors, by ctypes: what the scripts that compare it with PyTorch share."""
import ctypes

import torch


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int),
                ("ndim", ctypes.c_int), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int64: (0, 64),
         torch.int32: (0, 32)}
POINTER = ctypes.POINTER(DLTensor)
COMMON = [("size", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
          ("workspace_size", ctypes.c_size_t), ("invalid_ids", POINTER), ("accumulate", ctypes.c_int)]


class SoftmaxArgs(ctypes.Structure):
    _fields_ = COMMON + [(name, POINTER) for name in (
        "hidden_states", "gate_weight", "router_logits", "routing_probs", "selected_experts", "routing_weights_sum",
        "grad_routing_weights", "grad_expert_mask", "grad_router_logits", "grad_hidden_states", "grad_gate_weight",
        "grad_logits")]


class SigmoidArgs(ctypes.Structure):
    _fields_ = COMMON + [("routed_scaling_factor", ctypes.c_double)] + [(name, POINTER) for name in (
        "hidden_states", "weight", "grad_topk_weights", "scores", "topk_indices", "topk_weights",
        "topk_weights_normalized", "denominator", "grad_hidden_states", "grad_weight", "grad_logits")]


ARGS = {"softmax": SoftmaxArgs, "sigmoid": SigmoidArgs}
WEIGHT = {"softmax": "gate_weight", "sigmoid": "weight"}


def describe(tensor):
    code, bits = CODES[tensor.dtype]
    shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
    strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
    device = (2, tensor.device.index) if tensor.is_cuda else (1, 0)
    return DLTensor(tensor.data_ptr(), *device, tensor.dim(), code, bits, 1, shape, strides, 0)


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.moer_last_error.restype = ctypes.c_char_p

    def _check(self, status):
        if status:
            raise RuntimeError(self.library.moer_last_error().decode())

    def backward(self, operation, inputs, output_dtype=None, routed_scaling_factor=0.0):
        """A function that runs the operation ("softmax" or "sigmoid") on a dict of inputs, with a workspace of its own
        on a CPU, and the two outputs that it fills: grad_hidden_states and the weight gradient."""
        function = getattr(self.library, f"moer_{operation}_topk_backward")
        weight = WEIGHT[operation]
        outputs = {f"grad_{name}": torch.empty_like(inputs[name], dtype=output_dtype or inputs[name].dtype)
                   for name in ("hidden_states", weight)}
        described = {name: describe(tensor) for name, tensor in {**inputs, **outputs}.items()}
        Args = ARGS[operation]
        args = Args(size=ctypes.sizeof(Args), **{name: ctypes.pointer(t) for name, t in described.items()})
        if operation == "sigmoid":
            args.routed_scaling_factor = routed_scaling_factor
        workspace = None
        if not inputs["hidden_states"].is_cuda:
            size = ctypes.c_size_t()
            self._check(getattr(self.library, f"moer_{operation}_topk_backward_workspace_size")(ctypes.byref(args),
                                                                                               ctypes.byref(size)))
            workspace = ctypes.create_string_buffer(size.value + 256)
            args.workspace, args.workspace_size = (ctypes.addressof(workspace) + 255) // 256 * 256, size.value

        def run(_alive=(described, workspace, inputs)):
            self._check(function(ctypes.byref(args)))

        return run, list(outputs.values())
