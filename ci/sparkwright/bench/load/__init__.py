"""Load on a server: the specification, the adapter to vllm-rs, and files of prompts."""
