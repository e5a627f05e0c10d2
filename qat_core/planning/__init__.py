"""What is quantized, in which groups, why not the rest, and how much memory that takes."""
