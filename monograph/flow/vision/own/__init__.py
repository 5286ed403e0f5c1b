"""Models and transforms for where torchvision is not: its constructors, state dicts, initial weights and numbers."""
