"""Patched, proven wheels of vLLM, FlashInfer and CUTLASS for NVIDIA DGX Spark."""

__version__ = "0.1.0"
