"""The whole treeserve service beside llama.cpp, vLLM and transformers: same weights, prompts and output lengths."""
