"""One run of a study, from preflight checks to its last step."""
