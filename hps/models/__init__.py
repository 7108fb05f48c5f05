"""Model files: found, checked, read, loaded, imported from other formats, and written."""
