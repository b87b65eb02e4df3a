"""The HTTP server: one learner behind an API and a page, taught and asked at the same time (extra: serve)."""
