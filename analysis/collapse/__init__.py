"""Studies of collapses: which runs lost what they had learnt, judged after docs/protocols."""
