"""From the user's `build()` to a functional program."""
