extern "C" int mini_vllm_moe_largest_expert_count() { return 512; }
