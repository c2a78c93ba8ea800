"""The commands that belong to training data, training and scoring; found through entry points in pyproject.toml."""
