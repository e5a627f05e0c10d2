"""From recorded runs to statistics, claims and figures."""
