"""A ladder of sizes: effects of rounding rollouts by size, and the learning rates of its rungs."""
