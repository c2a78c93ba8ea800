"""Plan tables over a slice, and save and load what was trained."""
