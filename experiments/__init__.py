"""The studies: configuration, launching, tracking and provenance."""
