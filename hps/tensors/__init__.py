"""Callers' tensors: adopted through DLPack, cut into the segments of a lookup, pooled by bags."""
