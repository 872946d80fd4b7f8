"""What is stored and who has it: identity, slots, eviction, the index. No tensors, no peers."""
