"""Load on a server: the specification, the adapter to vllm-rs, and the check of its accuracy."""
