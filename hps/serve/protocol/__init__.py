"""Requests and answers as bytes: the Open Inference Protocol v2, and the JSON lookup. Knows nothing of HTTP."""
