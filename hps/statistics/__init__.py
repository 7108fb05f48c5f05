"""One set of figures: counted and timed once, and rendered for Prometheus, JSON, Python and Triton."""
