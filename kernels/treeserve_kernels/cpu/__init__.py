"""A decoder in C++ for CPUs: int8 weights and activations, tree attention over paged KV, the same bits everywhere."""
