"""The sweep through torch's own test databases."""
