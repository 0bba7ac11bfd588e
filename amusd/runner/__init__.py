"""Passes of a model: captured on a GPU, eager on a CPU, shared by ranks, with what a device cannot do left out."""
