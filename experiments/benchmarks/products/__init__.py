"""What `matmul` and `matmul_bits` multiply: layers, tokens, and ways to do it."""
