"""Helpers of the command line, files, processes and GPUs; nothing here knows a study."""
