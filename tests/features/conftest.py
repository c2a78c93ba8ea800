"""Property tests run on machines that are shared: an example has no deadline."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
