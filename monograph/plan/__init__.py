"""The program made physical: order and frees."""
