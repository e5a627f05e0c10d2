"""Runs of a study through verl: data, reward, command line and launch."""
