"""Networks as functions of tensors: layers, attention, kernels and the keys and values of their sequences."""
