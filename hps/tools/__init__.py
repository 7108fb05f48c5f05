"""The command line, planning and profiling."""
