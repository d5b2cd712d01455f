"""Training jobs: models built from a configuration, text turned into tokens, the loop, and what it writes down."""
