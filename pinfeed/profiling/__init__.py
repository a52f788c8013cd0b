"""Statistics, timelines and starvation warnings of a loop."""
