"""Where does a train/rollout mismatch come from? Probes that switch one cause off at a time."""
