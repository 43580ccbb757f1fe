"""Timing of kernels: correctness first, then medians, one JSONL schema."""
