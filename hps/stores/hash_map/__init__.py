"""The hash map of this process, which a GPU can read in place."""
