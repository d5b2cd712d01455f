"""Settings for every test."""

from hypothesis import settings

# an example that compiles, or meets a busy machine, is not a failure
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
