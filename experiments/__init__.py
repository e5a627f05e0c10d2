"""Studies: what is run, how it is launched, tracked and recorded."""

import os

# MLflow reads it when imported; no program of the harness sends usage data anywhere
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
