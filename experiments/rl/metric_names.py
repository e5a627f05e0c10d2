"""Names of metrics that other modules read too, verl's, and of the drift's file."""

K3_KL = "rollout_corr/k3_kl"
MISMATCH_COUNT = "training/rollout_logprobs_mismatch_count"
REWARD = "critic/score/mean"
STEP_TIME = "timing_s/step"
TOTAL_TOKENS = "perf/total_num_tokens"  # of prompts and responses of a step
RESPONSE_TOKENS = "response_length/mean"  # a step's responses are as many as any other's
DRIFT_FILE = "drift.jsonl"  # beside the metrics
