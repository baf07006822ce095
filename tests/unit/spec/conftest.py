"""Generated examples may take as long as a busy machine makes them take."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
