"""The embedding cache in host memory, also the reference for testing the CUDA cache."""
