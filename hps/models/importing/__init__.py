"""Checkpoints and files of trainers, written as sparse model files."""
